"""Callbacks for `fit`: metrics in files, TensorBoard and Weights & Biases, early stopping, profiling."""

import abc
import csv
import functools
import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from nnxmoe.config.printable import did_you_mean, short
from nnxmoe.config.validate import real_number, whole_number
from nnxmoe.convert.files.untrusted_files import absolute_path
from nnxmoe.convert.storage.atomic_dir import refuse_unless_writable
from nnxmoe.convert.storage.multihost import broadcast_text
from nnxmoe.runtime.progress import logger, say
from nnxmoe.train.loop.interface import Progress
from nnxmoe.train.loop.measured import EVAL_LOSS, EVAL_SECONDS, EVALUATED, Metrics

_NO_LOG = "does not contain the metrics of a step: use a different file for the log, or remove the line"


class _FolderWriter:
    """Callback that writes to ``folder``. ``__enter__`` raises CheckpointError if this is not possible."""

    folder: Path

    def __enter__(self) -> Self:
        broadcast_text(lambda: refuse_unless_writable(self.folder) or "")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass


class _Log(_FolderWriter, abc.ABC):
    """Callback that appends one entry per step to a file.

    A resumed run first removes the entries of the steps that it repeats.
    """

    late = True  # does not read the model, see `Callback`

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._next = absolute_path(path, "path"), -1
        self.folder = self.path.parent

    def __call__(self, progress: Progress) -> None:
        if jax.process_index() > 0:
            return
        if progress.step != self._next:  # the first call, or a new run with the same log
            self._begin(progress.step)
        self.add(progress.metrics)
        self._next = progress.step + 1

    def _begin(self, step: int) -> None:
        lines, rows = (self._lines(), self.read()) if self.path.exists() else ([], [])
        num_header_lines = len(lines) - len(rows)
        retained = [
            line for line, row in zip(lines[num_header_lines:], rows, strict=True) if self._step_of(row, line) < step
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            file.writelines(lines[:num_header_lines] + retained if retained else [])
        os.replace(temporary, self.path)

    def _lines(self) -> list[str]:
        """Read the lines, except blank lines and an incomplete last line (for example after a full disk)."""
        with self.path.open(newline="", encoding="utf-8") as file:
            return [line for line in file if line.endswith("\n") and line.strip()]

    def _step_of(self, row: Any, line: str) -> int:
        """Return the step number in a line. Raises ValueError if the line has no step number."""
        try:
            return int(row["step"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{self.path} has the line {short(line.strip())}, which {_NO_LOG}") from None

    @abc.abstractmethod
    def read(self) -> list[dict[str, Any]]:
        """Read the metrics in the file, one dict per step."""

    @abc.abstractmethod
    def add(self, metrics: Metrics) -> None:
        """Append the metrics of one step."""


class JsonLog(_Log):
    """Callback that logs metrics as JSON lines, one object per step."""

    def read(self) -> list[dict[str, Any]]:
        rows = []
        for line in self._lines():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self.path} has the line {short(line.strip())}, which {_NO_LOG}: {error}") from None
        return rows

    def add(self, metrics: Metrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            row = {  # JSON has no NaN
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in metrics.items()
            }
            file.write(json.dumps(row) + "\n")


class CsvLog(_Log):
    """Callback that logs metrics as CSV, one line per step.

    The columns are the metrics of the first step and of evaluations. A field is empty if its metric
    was not measured.
    """

    def read(self) -> list[dict[str, Any]]:
        return list(csv.DictReader(self._lines()))

    def add(self, metrics: Metrics) -> None:
        is_empty = not self.path.stat().st_size
        names = dict.fromkeys([*metrics, EVAL_LOSS, EVAL_SECONDS])
        if not is_empty:
            names = next(csv.reader(self._lines()))
        if unknown := [name for name in metrics if name not in names]:
            raise ValueError(f"{self.path} has no column for {', '.join(unknown)}: use a new file, or JsonLog")
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(names))
            if is_empty:
                writer.writeheader()
            writer.writerow(metrics)


def _installed(package: str, log: str) -> Any:
    """Import a package. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{log} requires a package that is not installed: pip install {package}") from error


def _scalars(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name != "step"}


class TensorBoardLog(_FolderWriter):
    """Callback that logs metrics to TensorBoard. Requires the package ``tensorboardX``."""

    late = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writer, self.folder = _installed("tensorboardX", "TensorBoardLog").SummaryWriter, absolute_path(folder)
        self._make: Callable[[], Any] = functools.cache(lambda: writer(str(self.folder)))

    def __call__(self, progress: Progress) -> None:
        if jax.process_index() > 0:
            return
        writer = self._make()
        for name, value in _scalars(progress.metrics).items():
            writer.add_scalar(name, value, progress.step)
        writer.flush()


class WandbLog:
    """Callback that logs metrics to Weights & Biases, one run per call of `fit`. Requires ``wandb``.

    Args:
        project: Name of the project.
        settings: Arguments of `wandb.init`, such as ``name``, ``config`` or ``mode="offline"``. If the
            run may be resumed, pass ``id`` and ``resume="allow"``. A resumed run repeats some steps
            with identical metrics, and wandb ignores repeated steps.
    """

    late = True

    def __init__(self, project: str, **settings: Any) -> None:
        self._init = functools.partial(_installed("wandb", "WandbLog").init, project=project, **settings)
        self._run: Any = None  # set in the first process while `fit` runs

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


class EarlyStopping:
    """Callback that stops training after ``patience`` consecutive measurements without improvement.

        train.fit(model, data, evaluate=train.Evaluation(held_out, every=50), …,
                  callbacks=[train.EarlyStopping("eval_loss", patience=3)])

    Args:
        metric: Name of a metric in `Fitted.history`, such as ``eval_loss``. Steps without this metric
            are ignored.
        min_delta: Minimum difference from the best measurement to count as an improvement.
        mode: ``min`` if lower values are better, ``max`` if higher values are better, as for
            ``rewards/accuracies``.

    The count restarts in every call of `fit`, including resumed runs. Raises ValueError at the first
    step if the run does not measure the metric, or measures ``eval_loss`` only at the end.
    """

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        if not isinstance(metric, str):
            raise ValueError(f"metric={short(metric)}: pass the name of a metric, such as 'eval_loss'")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={short(mode)}: pass 'min' or 'max'")
        self.metric, self.sign = metric, 1 if mode == "min" else -1
        self.patience = whole_number("patience", patience, 1, 2**31)
        self.min_delta = real_number("min_delta", min_delta, 0)
        self.late = metric in EVALUATED  # may run after the next step has started, see `Callback`
        self._start()

    def _start(self) -> None:
        self.best, self.failures = math.inf, 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, progress: Progress) -> bool:
        if self.metric not in progress.measured:
            hint = "; eval_loss needs evaluate=train.Evaluation(batches, every=…)" if self.late else ""
            raise ValueError(
                f"EarlyStopping({self.metric!r}): this run measures {', '.join(sorted(progress.measured))}{hint}"
                f"{did_you_mean(self.metric, progress.measured)}"
            )
        if self.metric not in progress.metrics:
            return False
        value = self.sign * progress.metrics[self.metric]
        better = value < self.best - self.min_delta
        self.best, self.failures = (value, 0) if better else (self.best, self.failures + 1)
        return self.failures >= self.patience


class Profile(_FolderWriter):
    """Callback that writes a `jax.profiler` trace of the first ``steps`` steps after compilation.

    The device is idle before and after these steps. During these steps, device and host overlap as in
    the rest of the run. Every process writes a file to the folder. A log message explains how to open
    the files with xprof or Perfetto. Raises ValueError unless ``steps`` is an int of at least 1.
    """

    def __init__(self, folder: str | os.PathLike[str], steps: int = 3) -> None:
        self.folder, self.steps = absolute_path(folder), whole_number("steps", steps, 1, 2**31)

    def __enter__(self) -> Self:
        super().__enter__()
        self._at, self._span = 0, range(0)  # the last finished step, the traced steps
        self._tracing = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tracing:  # training ended early
            self._stop()
        elif kind is None and not self._span:
            logger.warning("no step was profiled: the run has no step after the step that compiles")

    @property
    def late(self) -> bool:
        """False at the last traced step, so that training waits for it; see `Callback`."""
        return not self._tracing or self._at + 1 < self._span[-1]

    def __call__(self, progress: Progress) -> None:
        self._at = progress.step
        if not self._span and progress.step < progress.steps:
            self._span = range(progress.step + 1, min(progress.step + self.steps, progress.steps) + 1)
            jax.profiler.start_trace(str(self.folder))
            self._tracing = True
        elif self._tracing and progress.step == self._span[-1]:
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False
        viewers = "pip install xprof && xprof --logdir %s, or open its .trace.json.gz at https://ui.perfetto.dev"
        say(f"profiled steps {self._span[0]} to {self._at}: {viewers}", self.folder)
