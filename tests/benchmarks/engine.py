"""The measurements of one side, ours or transformers', each kind in a process of its own.

A process prints one line of JSON: ``values``, which maps the name of a measurement with its unit to a number, and the
``versions`` of the packages. Neither side imports the other's framework: JAX and torch in one process slow each other.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from tests.benchmarks.models import Fields, trained

GROUPS = ("machine", "decode", "prefill", "load", "train", "quantized")
SETTINGS = ("eager", "grouped_mm")  # transformers' experts_implementation
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "peft")


class Engine(Protocol):
    """One side, with one checkpoint."""

    def load(self) -> None:
        """Load the checkpoint, until the weights are ready."""
        ...

    def generate(self, ids: np.ndarray, new: int) -> Any:
        """Greedy: ``ids [B, T]`` followed by exactly ``new`` ids."""
        ...

    def stamps(self, ids: np.ndarray, new: int) -> Sequence[float]:
        """The times at which the caller of `generate` gets each new token."""
        ...

    def training(self, fields: Fields, tokens: np.ndarray, rank: int | None) -> Callable[[], Any]:
        """One step of AdamW on ``tokens``, of all parameters or of LoRA adapters; parameters are float32."""
        ...

    def products(self, size: int) -> Sequence[Callable[[], Any]]:
        """Ways to compute ``[size, size] @ [size, size]`` in the dtype of the checkpoint."""
        ...

    def copy(self) -> float | None:
        """GB/s of a copy on an accelerator; None on CPU."""
        ...


@dataclass(frozen=True)
class Sizes:
    """Tokens, rows and repetitions of the measurements."""

    batches: Sequence[int] = (1, 8)
    prompt: int = 16
    warm: int = 16  # decode steps that are not counted, the compiled ones among them
    new: int = 48  # decode steps that are
    prefill: tuple[tuple[int, int], ...] = ((512, 3), (4096, 2))  # tokens, repetitions
    rows: tuple[int, int] = (2, 256)  # of a training batch
    steps: int = 7
    rank: int = 8
    product: int = 2048


QUICK = Sizes((1, 2), 5, 2, 6, ((16, 2), (48, 2)), (2, 16), 3, 2, 256)


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` resident now, ``VmHWM`` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def age() -> float:
    """Seconds since this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def seconds(run: Callable[[], Any]) -> float:
    """Duration of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def read_bandwidth(megabytes: int = 512, times: int = 12) -> float:
    """GB/s of the fastest read of a large buffer by a thread per core."""
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(megabytes * 125_000, np.int64), cores)
    with ThreadPoolExecutor(cores) as threads:
        fastest = min(seconds(lambda: list(threads.map(np.bitwise_or.reduce, parts))) for _ in range(times))
    return sum(part.nbytes for part in parts) / fastest / 1e9


class Measures:
    """The measurements of one engine: each method returns name -> value. A name is ``what, unit``."""

    def __init__(self, engine: Engine, sizes: Sizes, fields: Fields, size: int, setting: str | None = None):
        self.engine, self.sizes, self.fields, self.size, self.setting = engine, sizes, fields, size, setting

    def run(self, group: str) -> dict[str, float]:
        """The measurements of a group; those of ``load`` include loading, which decode and prefill need too."""
        if group in ("decode", "prefill", "quantized"):
            self.engine.load()
        return dict(getattr(self, group)())

    def machine(self) -> Iterator[tuple[str, float]]:
        """The machine's limits as this side reaches them."""
        copied = self.engine.copy()
        yield "read, GB/s", copied or read_bandwidth()
        size = self.sizes.product if copied is None else 4 * self.sizes.product
        fastest = min(seconds(way) for way in self.engine.products(size) for _ in range(6))
        yield "matrix product, GFLOP/s", 2 * size**3 / fastest / 1e9

    def decode(self) -> Iterator[tuple[str, float]]:
        """Tokens of all rows per second, by the median time of a step."""
        for batch in self.sizes.batches:
            stamps = self.engine.stamps(self.ids(batch, self.sizes.prompt), 1 + self.sizes.warm + self.sizes.new)
            yield f"decode batch {batch}, tok/s", batch / median(np.diff(stamps)[self.sizes.warm :])

    def quantized(self) -> Iterator[tuple[str, float]]:
        """`decode` and the shorter `prefill` of a model that is quantised while it is loaded, by ``setting``."""
        for name, value in (*self.decode(), *self.prefill(1)):
            yield f"{self.setting}: {name}", value

    def prefill(self, count: int | None = None) -> Iterator[tuple[str, float]]:
        """Tokens per second until the first new one, by the median time after a first call."""
        for length, times in self.sizes.prefill[:count]:
            ids = self.ids(1, length)
            took = [seconds(lambda ids=ids: self.engine.generate(ids, 1)) for _ in range(1 + times)]
            yield f"prefill {length}, tok/s", length / median(took[1:])

    def load(self) -> Iterator[tuple[str, float]]:
        """Load and compute the first token, in a process that has imported everything."""
        yield "imports, s", age()
        before = memory("VmRSS")
        loaded = seconds(self.engine.load)
        yield "load peak memory, x checkpoint", (memory("VmHWM") - before) / self.size
        first = seconds(lambda: self.engine.generate(self.ids(1, self.sizes.prompt), 1))
        yield "load to first logits, s", loaded + first
        yield "load peak memory to first logits, x checkpoint", (memory("VmHWM") - before) / self.size

    def train(self) -> Iterator[tuple[str, float]]:
        """Milliseconds of a training step, by the median after two steps."""
        for name, rank in (("full", None), (f"LoRA rank {self.sizes.rank}", self.sizes.rank)):
            fields = trained(self.fields)
            tokens = np.random.default_rng(0).integers(0, fields["vocab_size"], self.sizes.rows)
            step = self.engine.training(fields, tokens, rank)
            took = [seconds(step) for _ in range(2 + self.sizes.steps)]
            yield f"train {name}, ms", 1e3 * median(took[2:])

    def ids(self, batch: int, length: int) -> np.ndarray:
        """Prompts, the same in every process."""
        return np.random.default_rng(batch * length).integers(0, self.fields["vocab_size"], (batch, length))


def versions() -> dict[str, str]:
    """Versions of Python and of what is installed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def say(values: Mapping[str, float], **more: Any) -> None:
    """Print what `processes.call` reads."""
    print(json.dumps({"values": values, "versions": versions(), **more}))


def main(make: Callable[[Path, str | None], Engine]) -> None:
    """The command of one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--setting", help="of transformers' experts, or how to quantise")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    fields = json.loads((options.folder / "config.json").read_text())
    sizes, engine = QUICK if options.quick else Sizes(), make(options.folder, options.setting)
    say(Measures(engine, sizes, fields, size, options.setting).run(options.group))
