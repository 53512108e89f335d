"""Checkpoints of random weights in Hugging Face's format, written tensor by tensor."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nnxmoe.convert.files.safetensors import dtype_code
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.convert.storage.write_safetensors import write_sharded
from nnxmoe.models import config_from_hf, model_class


def write_random(folder: Path, fields: Mapping[str, Any], shard_bytes: int = 10**10) -> None:
    """config.json and weights of ``fields['torch_dtype']``: norms 1, everything else normal with deviation 0.02."""
    kind = np.dtype(ml_dtypes.bfloat16 if fields["torch_dtype"] == "bfloat16" else fields["torch_dtype"])
    rng = np.random.default_rng(0)
    config = config_from_hf(fields)
    model = model_class(config)(config, rngs=None)

    def tensors() -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
        for name, leaf in tensor_layout(model).items():

            def make(shape: tuple[int, ...] = leaf.shape, norm: bool = "norm" in leaf.key) -> np.ndarray:
                value = np.ones(shape) if norm else rng.standard_normal(shape, np.float32) * np.float32(0.02)
                return value.astype(kind)

            yield name, dtype_code(kind), leaf.shape, make

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(fields)))
    write_sharded(folder, [(0, tensors())], shard_bytes, process=0)


def to_page_cache(folder: Path) -> None:
    """Read all weights, so that loading need not."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def from_page_cache(folder: Path) -> None:
    """Drop the pages of all weights, so that loading reads the disk."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
