"""nnxmoe's side of one checkpoint; prints a line of JSON.

python -m tests.benchmarks.ours FOLDER {load,first,prefill,decode,train}… [--quick]
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import nnxmoe
from tests.benchmarks import engine, train


class Ours:
    """What ``nnxmoe.from_pretrained`` gives."""

    limit = 600

    def __init__(self, folder: Path, _: str | None = None):
        self.folder = folder
        jax.device_put(1.0).block_until_ready()  # the backend is not part of loading, nor is importing
        self.read, self.generate_ids = nnxmoe.from_pretrained, nnxmoe.generate

    def load(self) -> None:
        """Until every array is there."""
        self.model = self.read(self.folder)
        jax.block_until_ready(nnx.state(self.model))

    def weights(self) -> Iterable[np.ndarray]:
        """On CPU arrays are NumPy's."""
        return map(np.asarray, jax.tree.leaves(nnx.state(self.model))) if jax.default_backend() == "cpu" else ()

    def generate(self, ids: np.ndarray, new: int) -> np.ndarray:
        """Greedy, eos off."""
        return self.generate_ids(self.model, ids, max_new_tokens=new, eos_token_id=None)

    def train(self, length: int, layers: int, times: int) -> dict[str, float]:
        """Of the model's config, cut to some layers, in the checkpoint's dtype with float32 parameters."""
        fields: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return train.measure(fields | {"num_hidden_layers": layers}, length, times)


if __name__ == "__main__":
    engine.main(Ours)
