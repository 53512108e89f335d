"""transformers' side of one checkpoint, on torch; prints a line of JSON. Needs the 'oracle' extra.

    python -m tests.benchmarks.theirs FOLDER {load,first,prefill,decode,train}… [--setting eager] [--quick]

``--setting``: how its mixture-of-experts layers are computed. All cores, inference mode, on a GPU where torch has one.
"""

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from tests.benchmarks import engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Torch's errors where there is no memory are RuntimeErrors like any other: MemoryError instead."""
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise MemoryError(str(error)) from error


class Theirs:
    """What ``AutoModelForCausalLM.from_pretrained`` gives."""

    limit = 60

    def __init__(self, folder: Path, experts: str | None):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.folder, self.experts = folder, {} if experts is None else {"experts_implementation": experts}
        self.config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM._model_mapping[type(self.config)]  # importing is not part of loading
        torch.zeros(1, device=DEVICE)
        if DEVICE == "cpu":  # batched_mm copies the experts' weights for every token
            half = engine.memory("MemAvailable", "/proc/meminfo") // 2
            resource.setrlimit(resource.RLIMIT_DATA, (half, half))

    def load(self) -> None:
        """In the dtype of the checkpoint."""
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto", **self.experts)
        self.model = model.to(DEVICE).eval()
        self.model.generation_config.eos_token_id = None

    def weights(self) -> Iterable[np.ndarray]:
        """NumPy's view of them."""
        if DEVICE == "cpu":
            yield from (p.detach().reshape(-1).view(torch.uint8).numpy() for p in self.model.parameters())

    def generate(self, ids: np.ndarray, new: int) -> np.ndarray:
        """Greedy, eos off."""
        tokens = torch.tensor(ids, device=DEVICE)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode(), memory_errors():
            return self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu().numpy()

    def train(self, length: int, layers: int, times: int) -> dict[str, float]:
        """Float32 parameters and moments; where the checkpoint is of bfloat16, torch casts what is fast in it."""
        narrow = self.config.dtype == torch.bfloat16
        config = transformers.AutoConfig.from_pretrained(self.folder, num_hidden_layers=layers, use_cache=False)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **self.experts)
        model = model.to(DEVICE).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.tensor(np.random.default_rng(0).integers(0, config.vocab_size, (1, length)), device=DEVICE)
        took = []
        for _ in range(times + 1):
            started = perf_counter()
            with memory_errors():
                with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            took.append(perf_counter() - started)
        return {"train, ms": 1e3 * median(took[1:])}


if __name__ == "__main__":
    engine.main(Theirs)
