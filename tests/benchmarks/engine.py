"""What both engines are measured by, each in a process of its own: loading, the first token, prefill, decoding.

One call of generate, greedy and without an end, is the only thing that is timed: what users of either side call.
"""

import argparse
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

GROUPS = ("load", "first", "prefill", "decode", "train")
SETTINGS = ("eager", "grouped_mm", "batched_mm")  # transformers' experts_implementation


class Engine(Protocol):
    """One side, with one checkpoint. ``limit``: seconds after which a measure is given up."""

    limit: int

    def load(self) -> None:
        """Read the checkpoint, until the weights are said to be there."""
        ...

    def weights(self) -> Iterable[np.ndarray]:
        """Their bytes where they lie, without copies; none of them where they are not in this process's memory."""
        ...

    def generate(self, ids: np.ndarray, new: int) -> Any:
        """``[B, T]`` and exactly ``new`` more ids, greedily."""
        ...

    def train(self, length: int, layers: int, times: int) -> dict[str, float]:
        """Of the steps of AdamW on one row of ``length`` tokens: measure -> value."""
        ...


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens and rows of the measures; ``times``: calls whose median counts."""

    prompt: int = 16
    new: int = 32
    prefill: Sequence[int] = (512, 2048)
    batches: Sequence[int] = (1, 8)
    context: int = 2048
    train: tuple[int, int] = (256, 2)  # tokens, layers
    times: int = 3


QUICK = Sizes(prompt=5, new=12, prefill=(16, 48), batches=(1, 2), context=48, train=(8, 2), times=5)


def memory(field: str, file: str = "/proc/self/status") -> int:
    """Bytes of this process: ``VmRSS`` resident now, ``VmHWM`` the most there were; or what another file says."""
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def limited(limit: int) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {limit} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)


class Measures:
    """The measures of one engine by their names, ``what, unit``; the first word is the group to ask for."""

    def __init__(self, engine: Engine, sizes: Sizes, size: int, vocab: int):
        self.engine, self.sizes, self.size, self.vocab = engine, sizes, size, vocab
        self.warming = 0.0

    def run(self, groups: Sequence[str]) -> dict[str, Any]:
        """Values, and under "skipped" why there are none; "load" is made in any case, but for "train"."""
        if groups == ["train"]:
            return self._all({"train": lambda: self.engine.train(*self.sizes.train, self.sizes.times)})
        loaded, sizes = self.load(), self.sizes
        found = self._all(
            {"first token, ms": lambda: 1e3 * self.prefill(sizes.prompt)}
            | {f"prefill {n}, tok/s": lambda n=n: n / self.prefill(n) for n in sizes.prefill}
            | {f"decode batch {b}, tok/s": lambda b=b: self.decode(b, sizes.prompt) for b in sizes.batches}
            | {f"decode context {sizes.context}, tok/s": lambda: self.decode(1, sizes.context)},
            groups,
        )
        if "load" in groups:
            found |= loaded
        return found | {"warm-up of all calls, s": self.warming}

    def _all(self, measures: dict[str, Callable[[], Any]], groups: Sequence[str] = GROUPS) -> dict[str, Any]:
        found: dict[str, Any] = {"skipped": {}}
        for name, measure in measures.items():
            if name.split()[0] in groups:
                try:
                    with limited(self.engine.limit):
                        value = measure()
                        found |= value if isinstance(value, dict) else {name: value}
                except (TimeoutError, MemoryError) as error:
                    found["skipped"][name] = f"{type(error).__name__}: {error}"[:200]
        return found

    def load(self) -> dict[str, float]:
        """Until the weights are there, and until each of their pages is: files may be mapped, not read.

        What is imported is imported before, also what transformers imports in its first from_pretrained only.
        """
        imported = age()
        before, started = memory("VmRSS"), time.perf_counter()
        self.engine.load()
        loaded = time.perf_counter()
        for array in self.engine.weights():
            np.max(array.reshape(-1).view(np.uint8)[::4096])
        touched, peak = time.perf_counter(), memory("VmHWM")
        self.engine.generate(self.ids(1, self.sizes.prompt), 1)
        answered = time.perf_counter()
        self.warming += answered - touched
        return {
            "load imports beforehand, s": imported,
            "load, GB/s": self.size / (loaded - started) / 1e9,
            "load and touch, GB/s": self.size / (touched - started) / 1e9,
            "load peak memory, x checkpoint": (peak - before) / self.size,
            "load to the first token with warm-up, s": answered - started,
        }

    def ids(self, batch: int, length: int) -> np.ndarray:
        """The same in every process."""
        return np.random.default_rng(batch * length).integers(0, self.vocab, (batch, length))

    def calls(self, batch: int, length: int, *new: int) -> list[list[float]]:
        """Seconds of calls in turn, each for so many new ids, after a round that may compile."""
        ids, took = self.ids(batch, length), []
        for _ in range(self.sizes.times + 1):
            took.append([self._seconds(ids, count) for count in new])
        self.warming += sum(took[0])
        return took[1:]

    def _seconds(self, ids: np.ndarray, new: int) -> float:
        started = time.perf_counter()
        self.engine.generate(ids, new)
        return time.perf_counter() - started

    def prefill(self, length: int) -> float:
        """Median seconds to the first new token."""
        return median(one for (one,) in self.calls(1, length, 1))

    def decode(self, batch: int, length: int) -> float:
        """Tokens a second after the first new one, of all rows."""
        new = self.sizes.new
        return batch * new / median(many - one for one, many in self.calls(batch, length, 1, 1 + new))


def main(make: Callable[[Path, str | None], Engine]) -> None:
    """The command of one side: measures a checkpoint and prints a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--setting", choices=SETTINGS, help="of transformers' experts")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    vocab = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    engine = make(options.folder, options.setting)
    print(json.dumps(Measures(engine, QUICK if options.quick else Sizes(), size, vocab).run(options.groups)))
