"""Tiny models with every kind of attention and cache, and attention masks with every kind of padding."""

import dataclasses
from typing import Any

import numpy as np

import nnxmoe
from nnxmoe import AbsorbedMLA, AdaptiveMLA
from tests.support.tiny import ORACLE

LENGTH = 19
SCANNED = dataclasses.replace(ORACLE, stacking=nnxmoe.Scanned())


def masks(length: int) -> dict[str, np.ndarray]:
    """Attention masks of two rows with different padding, by name."""
    left, right, holes = (np.ones((2, length), np.int32) for _ in range(3))
    left[0, :6], right[1, -4:] = 0, 0
    holes[0, [2, 3, 9]], holes[1, [0, 7, length - 3]] = 0, 0
    return {"full": np.ones((2, length), np.int32), "left": left, "right": right, "holes": holes}


DENSE = {"first_k_dense_replace": 9, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, nnxmoe.Strategy, dict[str, Any]]] = {
    "full": ("llama", ORACLE, {}),
    "full-scanned": ("llama", SCANNED, {}),
    "ring": ("mistral", ORACLE, {"sliding_window": 4}),
    "ring-scanned": ("mistral", SCANNED, {"sliding_window": 5}),
    "ring-of-one": ("mistral", ORACLE, {"sliding_window": 1, "num_hidden_layers": 1}),
    "moe-ring": ("mixtral", nnxmoe.Strategy(), {"sliding_window": 6, "num_hidden_layers": 1}),
    "latent-naive": ("deepseek_v3", ORACLE, DENSE | {"num_hidden_layers": 1, "q_lora_rank": None}),
    "latent-absorbed-scanned": ("deepseek_v3", dataclasses.replace(SCANNED, mla=AbsorbedMLA()), DENSE),
    "latent-by-length": (
        "deepseek_v3",
        dataclasses.replace(ORACLE, mla=AdaptiveMLA(3)),
        DENSE | {"num_hidden_layers": 1},
    ),
}
