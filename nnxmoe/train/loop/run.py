"""The steps of a training run, with evaluation, callbacks and checkpoints between them."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.storage.atomic_dir import refuse_unless_writable
from nnxmoe.convert.storage.multihost import any_process, broadcast_text
from nnxmoe.runtime.interrupts import Interrupted, Stop
from nnxmoe.runtime.programs import shared_program
from nnxmoe.runtime.progress import logger, progress_bar
from nnxmoe.train.checkpoints import Checkpoints, fingerprint, plain
from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.definition import Report, TrainState
from nnxmoe.train.loop.feed import BatchSource, in_every_process, put_batch
from nnxmoe.train.loop.interface import Callback, Fitted, NotFinite, Progress, is_true, unseen
from nnxmoe.train.loop.measured import (
    EVAL_LOSS,
    EVAL_SECONDS,
    EVALUATED,
    Evaluation,
    Metrics,
    Spent,
    metrics_of,
    peak_flops,
    shown_metrics,
)
from nnxmoe.train.loop.memory_limit import BatchLimit
from nnxmoe.train.loop.step import Step


@dataclasses.dataclass(frozen=True)
class _StepMade:
    """A step that was started. ``position`` is the position in the data after the step's batch."""

    number: int
    position: dict[str, Any]
    batch: Batch
    report: Report
    asked: Callable[[], bool]  # returns True if Ctrl-C was pressed in any process


@dataclasses.dataclass
class Run:
    """Training run from the last checkpoint, or from the start, to the last step."""

    step: Step
    source: BatchSource
    steps: int  # in total
    seed: int
    flops: float  # per token
    limit: BatchLimit
    checkpoints: Checkpoints | None
    evaluation: Evaluation | None
    callbacks: Sequence[Callback]
    stop: Stop

    def __post_init__(self) -> None:
        checkpoints = self.checkpoints
        self.first = 0 if checkpoints is None else checkpoints.latest() or 0
        if checkpoints is not None and self.first > self.steps:
            raise ValueError(
                f"{checkpoints.folder} is at step {self.first}, beyond the total of steps={self.steps}: pass a larger "
                "number, or another folder"
            )
        if checkpoints is not None:
            broadcast_text(lambda: refuse_unless_writable(checkpoints.folder) or "")
            plain({"data": self.source.position()}, "the state of the data's iterator (get_state)")
            self.base = fingerprint(self.step.base())
        self.evaluate = None if self.evaluation is None else self.evaluation.of(self.step)
        self.state = self._restored() if self.first else self.step.init(self.seed)
        self.peak = peak_flops(self.step.mesh)
        self.spent = Spent("data", "device", *(() if checkpoints is None else ("checkpoint",)))
        self.history: list[Metrics] = []
        self.bar: tqdm | None = None
        self.finite = shared_program("finite", _finite, out_shardings=self.step.places.step)

    def go(self) -> Fitted:
        """Run all steps.

        Reads the report of each step while the device computes the next step, unless a callback, an
        evaluation or a checkpoint reads the state in between.
        """
        before: _StepMade | None = None  # the step whose report has not been read
        with contextlib.ExitStack() as shown:
            for callback in self.callbacks:
                if isinstance(callback, contextlib.AbstractContextManager):
                    shown.enter_context(callback)
            for number in range(self.first + 1, self.steps + 1):
                if self.checkpoints is not None and self.checkpoints.due(number):
                    with self.spent.on("checkpoint"):
                        self.checkpoints.wait()  # a killed process loses at most one interval
                if before is None:
                    self.since = time.perf_counter()
                try:
                    made = self._start(number, shown)
                finally:
                    if before is not None:  # also if the data end or are invalid
                        previous, before = before, None
                        self._finish(previous, next_started=True)
                if self._late and number > self.first + 1 and not self._due(number) and not made.asked():
                    before = made
                elif self._finish(made):
                    break
        if self.first == self.steps:  # the run was finished before
            self.history.append(self.saved_metrics | self._evaluated())
        return self._fitted()

    def _start(self, number: int, shown: contextlib.ExitStack) -> _StepMade:
        """Start a step with the next batch."""
        with self.spent.on("data"):
            batch, position = self.source.next()
            batch = put_batch(batch, self.step, self.limit)
        if self.step.compiles(batch):
            self._compile(batch)
        if self.bar is None:  # created after compilation, so that its time estimate excludes it
            silent = {"disable": True} if jax.process_index() else {}  # False overrides TQDM_DISABLE
            given = {"total": self.steps, "initial": self.first, "desc": "training", "unit": "step"}
            self.bar = shown.enter_context(progress_bar(**given, **silent))
        asked = any_process(lambda: self.stop.asked, self.step.mesh)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            self.state, report = self.step.run(self.state, batch)
        return _StepMade(number, position, batch, report, asked)

    def _compile(self, batch: Batch) -> None:
        """Compile the step for batches of this shape. The seconds do not count as training time."""
        started = time.perf_counter()
        if self.bar is not None:
            self.bar.clear()
        self.step.program(self.state, batch)
        seconds = time.perf_counter() - started
        self.since += seconds
        if self.bar is not None:
            self.bar.start_t += seconds

    @property
    def _late(self) -> bool:
        """True if no callback reads the state, see `Callback`."""
        return all(getattr(callback, "late", False) for callback in self.callbacks)

    def _due(self, number: int) -> bool:
        """Check whether the state after this step is read, since the step is the last, saved or evaluated."""
        saved = self.checkpoints is not None and self.checkpoints.due(number)
        return number == self.steps or saved or self._evaluates(number)

    def _evaluates(self, number: int) -> bool:
        return self.evaluation is not None and self.evaluation.due(number, number == self.steps)

    def _finish(self, made: _StepMade, *, next_started: bool = False) -> bool:
        """Read a step's report, evaluate, run callbacks and save a checkpoint if due.

        Args:
            made: The step.
            next_started: Whether the next step has begun. If so, training does not end here, and Ctrl-C is not checked.

        Returns:
            True if training ends.

        Raises:
            Interrupted: If Ctrl-C was pressed in any process and the step is not the last.
        """
        number, late = made.number, self._late
        metrics, load = self._read(made)
        interrupted = not next_started and made.asked()
        if self._evaluates(number):
            metrics |= self._evaluated()
        repeated = self.evaluation is not None and self.evaluation.every is not None
        measured = frozenset(metrics) | (EVALUATED if repeated else frozenset())
        model = unseen if late else lambda: self.step.model(self.state)
        progress = Progress(number, self.steps, metrics, load, model, measured)
        stop = any([is_true(callback(progress)) for callback in self.callbacks])
        if stop and next_started:
            raise ValueError(f"a callback stops the training at step {number}: remove its attribute late")
        stop = not next_started and any_process(lambda: stop, self.step.mesh)()
        if stop and not EVALUATED <= metrics.keys():
            metrics |= self._evaluated()
        ends = stop or number == self.steps
        self._save(made, metrics, force=ends or interrupted)
        self.history.append(metrics)
        assert self.bar is not None
        self.bar.set_postfix(shown_metrics(metrics), refresh=False)
        self.bar.update()
        if interrupted and not ends:
            told = "nothing is saved: give fit a checkpoint folder to continue another time"
            if self.checkpoints is not None:
                self.checkpoints.wait()
                told = f"saved in {self.checkpoints.folder}: the same call continues from there"
            raise Interrupted(f"interrupted at step {number} of {self.steps}; {told}", self._fitted())
        return ends

    def _fitted(self) -> Fitted:
        return Fitted(self.step.model(self.state), self.history, self.state)

    def _read(self, made: _StepMade) -> tuple[Metrics, np.ndarray]:
        """Wait for a step and return its metrics and `Progress.load`.

        Raises ValueError for a batch without tokens to predict, and NotFinite for non-finite gradients.
        """
        with self.spent.on("device"):
            report = jax.device_get(made.report)
        if report.losses.tokens is not None and not report.losses.tokens:
            raise ValueError(
                f"step {made.number}: the batch has no token to predict. Tokens with segment id 0, attention_mask 0 "
                "or loss_mask 0 do not count, nor does the only token of a row; check the data"
            )
        self.stop.deferred = True
        self._refuse_nonfinite("gradients", report.finite, made)
        now = time.perf_counter()
        metrics = metrics_of(report, made.number, made.batch, now - self.since) | self.spent.take()
        if self.peak is not None and "tokens" in made.batch:
            metrics["mfu"] = self.flops * metrics["tokens_per_second"] / self.peak
        self.since = now
        load = np.asarray(report.losses.load, np.float64)
        return metrics, load / np.maximum(load.sum(axis=-1, keepdims=True), 1)

    def _evaluated(self) -> Metrics:
        """Evaluate the current state. Returns no metrics if there is no evaluation."""
        if self.evaluate is None:
            return {}
        began = time.perf_counter()
        return {EVAL_LOSS: self.evaluate(self.state), EVAL_SECONDS: time.perf_counter() - began}

    def _save(self, made: _StepMade, metrics: Metrics, force: bool) -> None:
        """Save a checkpoint if it is due or forced.

        Raises NotFinite if the new values are not finite. A run without checkpoints is checked at the end.
        """
        due = self.checkpoints is not None and self.checkpoints.due(made.number)
        if not (force or due):
            return
        self._refuse_nonfinite("new values", jax.device_get(self.finite(self.state.params)), made)
        if self.checkpoints is not None:
            extra = {"data": in_every_process(made.position), "base": self.base}
            extra["metrics"] = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON: no NaN
            with self.spent.on("checkpoint"):
                self.checkpoints.save(made.number, self.step.saved(self.state), extra, force=force)

    def _restored(self) -> TrainState:
        assert self.checkpoints is not None
        try:
            arrays, extra = self.checkpoints.restore(self.first, self.step.saved(self.step.shapes()))
        except CheckpointError as error:
            if self.step.pipeline is None or self.step.pipeline.stages is not None:
                raise
            raise CheckpointError(
                f"{error}\nThe arrays of a model in pipeline stages depend on their number: set it to that of the run, "
                f"Pipeline({self.step.pipeline.microbatches}, stages=…)"
            ) from error
        if extra.get("base", self.base) != self.base:
            raise CheckpointError(
                f"{self.checkpoints.folder} holds a run on another base model: the parameters that are not trained "
                "have other values. Load the model, revision and dtype that the run began with, or use a new folder"
            )
        self.saved_metrics = {"step": self.first, **extra.get("metrics", {})}
        self.source.restore(extra["data"])
        logger.info("resuming from step %d of %s", self.first, self.checkpoints.folder)
        return self.step.restored(arrays)

    def _refuse_nonfinite(self, what: str, finite: Iterable[Any], made: _StepMade) -> None:
        odd = [name for name, good in zip(self.step.names, finite, strict=True) if not good]
        if odd:
            where = ""
            if self.checkpoints is not None:
                self.checkpoints.wait()
                latest = self.checkpoints.latest()
                where = (
                    ". There is no checkpoint yet" if latest is None else f". The last checkpoint is of step {latest}"
                )
            loss = float(made.report.losses.total)
            raise NotFinite(
                f"step {made.number}: the {what} of {', '.join(odd[:5])}{' …' if len(odd) > 5 else ''} "
                f"({len(odd)} of {len(self.step.names)} parameters) are NaN or infinite, the loss is "
                f"{loss:.4g}: lower the learning rate, clip gradients or check the batch{where}"
            )


def _finite(params: dict[str, jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(value)) for value in params.values()]
