"""Callbacks of `fit` that write metrics to files, TensorBoard and Weights & Biases."""

import abc
import csv
import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from nnxmoe.storage.files import absolute
from nnxmoe.train.loop.measured import EVALUATION, Metrics
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
    """One line per step; the columns are the metrics of the first step and of evaluations, empty if not measured."""

    def read(self) -> list[dict[str, Any]]:
        return list(csv.DictReader(self.lines()))

    def add(self, metrics: Metrics) -> None:
        new = not self.path.stat().st_size
        names = list(dict.fromkeys([*metrics, "evaluation", EVALUATION])) if new else list(self._names())
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


def _installed(package: str, log: str) -> Any:
    """The module of a package. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{log} requires a package that is not installed: pip install {package}") from error


def _scalars(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name != "step"}


class TensorBoardLog:
    """Scalars for TensorBoard. Requires the package ``tensorboardX``."""

    late = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writer = _installed("tensorboardX", "TensorBoardLog").SummaryWriter
        self._make: Callable[[], Any] = lambda: writer(str(Path(absolute(folder))))
        self._writer: Any = None

    def __call__(self, progress: Progress) -> None:
        if jax.process_index() > 0:
            return
        self._writer = self._writer or self._make()
        for name, value in _scalars(progress.metrics).items():
            self._writer.add_scalar(name, value, progress.step)
        self._writer.flush()


class WandbLog:
    """Metrics for Weights & Biases, as a run that begins and ends with the call of `fit`. Requires ``wandb``.

    ``settings`` are those of `wandb.init`, such as ``name``, ``config`` or ``mode="offline"``. For a run that may be
    resumed give ``id`` and ``resume="allow"``: wandb ignores the steps that it has already, which are equal.
    """

    late = True

    def __init__(self, project: str, **settings: Any) -> None:
        self._init = functools.partial(_installed("wandb", "WandbLog").init, project=project, **settings)
        self._run: Any = None  # in the first process, while `fit` runs

    def __enter__(self) -> Self:
        self._run = None if jax.process_index() else self._init()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if kind is None else 1)

    def __call__(self, progress: Progress) -> None:
        if self._run is not None:
            self._run.log(_scalars(progress.metrics), step=progress.step)
