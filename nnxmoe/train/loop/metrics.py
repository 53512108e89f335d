"""Callbacks of `fit` that write metrics to files."""

import abc
import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from nnxmoe.storage.files import absolute
from nnxmoe.train.loop.measured import Metrics
from nnxmoe.train.loop.run import Progress


class _Log(abc.ABC):
    """Appends one entry per step to a file. A resumed run first removes the entries of steps that it repeats."""

    late = True  # see `Callback`

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._next = absolute(path), -1

    def __call__(self, progress: Progress) -> None:
        if jax.process_index() > 0:
            return
        if progress.step != self._next:  # the first call, or another run with the same log
            self._begin(progress.step)
        self.add(progress.metrics)
        self._next = progress.step + 1

    def _begin(self, step: int) -> None:
        kept = [metrics for metrics in self.read() if int(metrics["step"]) < step] if self.path.exists() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        final, self.path = self.path, beside
        try:
            beside.write_text("", encoding="utf-8")
            for metrics in kept:
                self.add(metrics)
            os.replace(beside, final)
        finally:
            self.path = final

    def lines(self) -> list[str]:
        """The complete lines of the file, without one that was cut off, such as by a full disk."""
        with self.path.open(newline="", encoding="utf-8") as file:
            return [line for line in file if line.endswith("\n")]

    @abc.abstractmethod
    def read(self) -> list[dict[str, Any]]:
        """The metrics in the file, one dict per step."""

    @abc.abstractmethod
    def add(self, metrics: Metrics) -> None:
        """Append the metrics of one step."""


class JsonLog(_Log):
    """One JSON object per line and step."""

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]

    def add(self, metrics: Metrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")


class CsvLog(_Log):
    """One line per step; the columns are the first step's metrics and ``evaluation``, empty where not measured."""

    def read(self) -> list[dict[str, Any]]:
        return list(csv.DictReader(self.lines()))

    def add(self, metrics: Metrics) -> None:
        new = not self.path.stat().st_size
        names = list(dict.fromkeys([*metrics, "evaluation"])) if new else list(self._names())
        if odd := [name for name in metrics if name not in names]:
            raise ValueError(f"{self.path} has no column for {', '.join(odd)}: use a new file, or JsonLog")
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="raise")
            if new:
                writer.writeheader()
            writer.writerow(metrics)

    def _names(self) -> list[str]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file))


class TensorBoardLog:
    """Scalars for TensorBoard. Requires the package ``tensorboardX``."""

    late = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                "TensorBoardLog requires a package that is not installed: pip install tensorboardX"
            ) from error
        self._make: Callable[[], Any] = lambda: SummaryWriter(str(Path(absolute(folder))))
        self._writer: Any = None

    def __call__(self, progress: Progress) -> None:
        if jax.process_index() > 0:
            return
        self._writer = self._writer or self._make()
        for name, value in progress.metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, progress.step)
        self._writer.flush()
