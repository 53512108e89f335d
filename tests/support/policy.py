"""Samples and cases of policy-gradient losses, for the tests and for `tests.support.freeze_policy`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from nnxmoe import train
from tests.support.tiny import TINY, Fields

FROZEN = Path(__file__).resolve().parents[1] / "data" / "policy.json"
FIELDS: Fields = TINY["mixtral"] | {"num_hidden_layers": 1, "router_aux_loss_coef": 0.0}
STEPS, MAX_LENGTH, TEMPERATURE, CAP = 8, 6, 0.8, 1.05
PROMPTS, ANSWERS = (3, 3, 3, 4, 4, 4), (5, 2, 1, 3, 6, 4)  # numbers of tokens
ADVANTAGES = np.array([1.1, -0.8, -0.3, 0.9, 0.4, -1.3], np.float32)
NOISE = {"old_logps": 0.15, "reference_logps": 0.3, "sampler_logps": 0.1}
ROWS = ((0, 1), (2, 3, 5), (4,))  # samples of each packed row
# Rewards [functions, prompts, n] with None, for comparisons of advantages.
REWARDS: list[Any] = [
    [[1.0, 0.0, 0.5, 2.0], [0.25, 0.25, 0.25, 0.25], [1.0, None, 0.0, 3.0]],
    [[0.0, 1.0, 1.0, 0.0], [0.5, None, 1.5, 0.0], [0.0, None, 1.0, 1.0]],
]
WEIGHTS = (1.0, 0.5)

# Arguments of TRL's GRPOConfig, and the objective with the same loss. SGD has these learning rates.
CASES: dict[str, tuple[dict[str, Any], Any, float]] = {
    "grpo": (
        {"loss_type": "grpo", "beta": 0.04, "temperature": TEMPERATURE},
        train.GRPO(len, kl=0.04, temperature=TEMPERATURE),
        0.02,
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": MAX_LENGTH},
        train.GRPO(len, aggregate=train.FixedLengthMean(MAX_LENGTH)),
        0.02,
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        train.GSPO(len),
        0.005,
    ),
    "gspo, wide": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        train.GSPO(len, clip=train.Clip(0.2, 0.2)),
        0.02,
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
        train.GRPO(len, clip=train.Clip(0.2, 0.28), aggregate=train.token_mean),
        0.02,
    ),
    "bnpo, delta": (
        {"loss_type": "bnpo", "delta": 1.3},
        train.GRPO(len, clip=train.Clip(delta=1.3), aggregate=train.token_mean),
        0.02,
    ),
    "importance": (
        {
            "loss_type": "grpo",
            "beta": 0.04,
            "use_bias_correction_kl": False,
            "vllm_importance_sampling_mode": "token_truncate",
        },
        train.GRPO(len, kl=0.04, kl_estimator=train.k3_kl, importance=train.ImportanceSampling(cap=CAP)),
        0.02,
    ),
}


def frozen() -> Any:
    """TRL's numbers."""
    return json.loads(FROZEN.read_text())


def samples(base: list[list[float]]) -> list[dict[str, Any]]:
    """Samples with log-probabilities near those of the untrained model, ``base``."""
    rng, found = np.random.default_rng(5), []
    for prompt, answer, advantage, logps in zip(PROMPTS, ANSWERS, ADVANTAGES, base, strict=True):
        tokens = rng.integers(1, FIELDS["vocab_size"], prompt + answer).astype(np.int32)
        sample = {"prompt": prompt, "tokens": tokens, "advantages": np.full(answer, advantage, np.float32)}
        for name, scale in NOISE.items():
            sample[name] = (logps + scale * rng.standard_normal(answer)).astype(np.float32)
        found.append(sample)
    return found


def untrained_logps() -> list[list[float]]:
    """Zeros in the shape of `frozen()["logps"]`, to make samples of which only the tokens are read."""
    return [[0.0] * length for length in ANSWERS]


def packed(found: list[dict[str, Any]], length: int = 22, rows: Any = ROWS) -> dict[str, np.ndarray]:
    """Pack samples into the rows of a batch. Arrays of a sample have one value per answer token."""
    integers = ("tokens", "segment_ids", "positions", "loss_mask")
    batch = {name: np.zeros((len(rows), length), np.int32) for name in integers}
    batch |= {name: np.zeros((len(rows), length), np.float32) for name in found[0] if name not in ("tokens", "prompt")}
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            sample = found[member]
            end, answer = start + len(sample["tokens"]), start + sample["prompt"]
            batch["tokens"][row, start:end] = sample["tokens"]
            batch["segment_ids"][row, start:end] = number
            batch["positions"][row, start:end] = np.arange(end - start)
            batch["loss_mask"][row, answer:end] = 1
            for name in batch.keys() - set(integers):
                batch[name][row, answer:end] = sample[name]
            start = end
    return batch
