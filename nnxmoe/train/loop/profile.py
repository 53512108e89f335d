"""A callback of `fit` that writes a trace of some steps for a profiler."""

import os
from typing import Self

import jax

from nnxmoe.config.printable import short
from nnxmoe.config.validate import is_positive
from nnxmoe.runtime.progress import logger, say
from nnxmoe.storage.files import absolute
from nnxmoe.train.loop.run import Progress


class Profile:
    """Writes a trace (`jax.profiler`) of the first ``steps`` steps after the one that compiles into a folder.

    The device is idle before and after these steps; between them it overlaps with the host as in the rest of the run.
    Every process writes a file. The log says how xprof or Perfetto opens it. Raises ValueError unless ``steps`` is an
    int of at least 1.
    """

    def __init__(self, folder: str | os.PathLike[str], steps: int = 3) -> None:
        if not is_positive(steps):
            raise ValueError(f"steps={short(steps)}: pass the number of steps to profile, an int of at least 1")
        self.folder, self.steps = absolute(folder), steps

    def __enter__(self) -> Self:
        self._at, self._span = 0, range(0)  # the step it was called for; the steps in the trace
        self._tracing = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tracing:  # the training ended early
            self._stop()
        elif kind is None and not self._span:
            logger.warning("no step was profiled: there was none after the step that compiles")

    @property
    def late(self) -> bool:
        """False at the last step of the trace, for which the training waits; see `Callback`."""
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
        how = "pip install xprof && xprof --logdir %s, or open its .trace.json.gz at https://ui.perfetto.dev"
        say(f"profiled steps {self._span[0]} to {self._at}: {how}", self.folder)
