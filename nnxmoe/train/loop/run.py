"""Training run: steps with evaluation, callbacks and checkpoints in between."""

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
    """Dispatched step. ``position`` is the data position after the step's batch."""

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
    steps: int  # total number of steps
    seed: int
    flops: float  # FLOPs per token
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
                "number, or a different folder"
            )
        if checkpoints is not None:
            broadcast_text(lambda: refuse_unless_writable(checkpoints.folder) or "")
            plain({"data": self.source.position()}, "the state of the data's iterator (get_state)")
            self.base = fingerprint(self.step.base())
        # The sampler uses the parameters of the training state without a cast, so that its values equal the step's.
        self.source.sample_from(lambda: self.step.definition.merge(self.state.params, self.state.frozen))
        self._refuse_partial_rollouts()
        self.stop_requested = False
        self.evaluate = None if self.evaluation is None else self.evaluation.of(self.step)
        self.state = self._restored() if self.first else self.step.init(self.seed)
        self.peak = peak_flops(self.step.mesh)
        self.spent = Spent("data", "device", *(() if checkpoints is None else ("checkpoint",)))
        self.history: list[Metrics] = []
        self.bar: tqdm | None = None
        self.finite = shared_program("finite", _finite, out_shardings=self.step.places.step)

    def _refuse_partial_rollouts(self) -> None:
        """Raise ValueError if the run would end or save a checkpoint within a rollout."""
        counts = {"steps": self.steps}
        if self.checkpoints is not None:
            counts["Checkpoints(every=…)"] = self.checkpoints.every
        for name, count in counts.items():
            if count % self.source.stride:
                raise ValueError(
                    f"{name} is {count}: use a multiple of minibatches={self.source.stride}, so that all samples of a "
                    "rollout are used"
                )

    def go(self) -> Fitted:
        """Run all steps.

        Reads the report of each step while the device computes the next step, unless a callback, an
        evaluation or a checkpoint reads the state in between.
        """
        pending: _StepMade | None = None  # step whose report has not been read
        with contextlib.ExitStack() as contexts:
            for callback in self.callbacks:
                if isinstance(callback, contextlib.AbstractContextManager):
                    contexts.enter_context(callback)
            for number in range(self.first + 1, self.steps + 1):
                if self.checkpoints is not None and self.checkpoints.due(number):
                    with self.spent.on("checkpoint"):
                        self.checkpoints.wait()  # a killed process loses at most one interval
                if pending is None:
                    self.since = time.perf_counter()
                try:
                    started = self._start(number, contexts)
                finally:
                    if pending is not None:  # also if the data are exhausted or invalid
                        previous, pending = pending, None
                        self._finish(previous, next_started=True)
                if self._late and number > self.first + 1 and not self._due(number) and not started.asked():
                    pending = started
                elif self._finish(started):
                    break
        if self.first == self.steps:  # the run had already finished
            self.history.append(self.saved_metrics | self._evaluated())
        return self._fitted()

    def _start(self, number: int, contexts: contextlib.ExitStack) -> _StepMade:
        with self.spent.on("data"):
            batch, position = self.source.next()
            batch = put_batch(batch, self.step, self.limit)
        if self.step.compiles(batch):
            self._compile(batch)
        if self.bar is None:  # created after compilation, to exclude it from the time estimate
            disabled = {"disable": True} if jax.process_index() else {}  # False overrides TQDM_DISABLE
            bar_options = {"total": self.steps, "initial": self.first, "desc": "training", "unit": "step"}
            self.bar = contexts.enter_context(progress_bar(**bar_options, **disabled))
        is_interrupted = any_process(lambda: self.stop.asked, self.step.mesh)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            self.state, report = self.step.run(self.state, batch)
        return _StepMade(number, position, batch, report, is_interrupted)

    def _compile(self, batch: Batch) -> None:
        """Compile the step for batches of this shape. Excludes the compilation from the training time."""
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
        """Check whether the state after this step is read, because it is the last, saved, evaluated or sampled from."""
        saved = self.checkpoints is not None and self.checkpoints.due(number)
        return number == self.steps or saved or self._evaluates(number) or self.source.samples_after(number)

    def _evaluates(self, number: int) -> bool:
        return self.evaluation is not None and self.evaluation.due(number, number == self.steps)

    def _finish(self, started: _StepMade, *, next_started: bool = False) -> bool:
        """Read a step's report, evaluate, run callbacks and save a checkpoint if due.

        Args:
            started: The dispatched step.
            next_started: True if the next step has started. Training then does not end here, and Ctrl-C is not checked.

        Returns:
            True if training ends.

        Raises:
            Interrupted: If Ctrl-C was pressed in any process and the step is not the last.
        """
        number, late = started.number, self._late
        metrics, load = self._read(started)
        may_stop = not next_started and number % self.source.stride == 0
        interrupted = may_stop and started.asked()
        if self._evaluates(number):
            metrics |= self._evaluated()
        repeated = self.evaluation is not None and self.evaluation.every is not None
        measured = frozenset(metrics) | (EVALUATED if repeated else frozenset())
        model = unseen if late else lambda: self.step.model(self.state)
        progress = Progress(number, self.steps, metrics, load, model, measured)
        stop = any([is_true(callback(progress)) for callback in self.callbacks])
        if stop and next_started:
            raise ValueError(f"a late callback cannot stop the training at step {number}: remove its `late` attribute")
        self.stop_requested |= stop
        stop = may_stop and any_process(lambda: self.stop_requested, self.step.mesh)()
        if stop and not EVALUATED <= metrics.keys():
            metrics |= self._evaluated()
        is_last = stop or number == self.steps
        self._save(started, metrics, force=is_last or interrupted)
        self.history.append(metrics)
        assert self.bar is not None
        self.bar.set_postfix(shown_metrics(metrics), refresh=False)
        self.bar.update()
        if interrupted and not is_last:
            hint = "nothing was saved: to resume in a later call, pass a checkpoint folder to fit"
            if self.checkpoints is not None:
                self.checkpoints.wait()
                hint = f"saved in {self.checkpoints.folder}: repeat the call of fit to resume"
            raise Interrupted(f"interrupted at step {number} of {self.steps}; {hint}", self._fitted())
        return is_last

    def _fitted(self) -> Fitted:
        return Fitted(self.step.model(self.state), self.history, self.state)

    def _read(self, started: _StepMade) -> tuple[Metrics, np.ndarray]:
        """Wait for a step and return its metrics and `Progress.load`.

        Raises ValueError if the batch has no token to predict, and NotFinite if a gradient is not finite.
        """
        with self.spent.on("device"):
            report = jax.device_get(started.report)
        if report.losses.tokens is not None and not report.losses.tokens:
            raise ValueError(
                f"step {started.number}: the batch has no token to predict. Tokens with segment id 0, attention_mask 0 "
                "or loss_mask 0 are excluded, and so is the only token of a row. Check the data"
            )
        self.stop.deferred = True
        self._refuse_nonfinite("gradients", report.finite, started)
        now = time.perf_counter()
        metrics = metrics_of(report, started.number, started.batch, now - self.since) | self.spent.take()
        if self.peak is not None and "tokens" in started.batch:
            metrics["mfu"] = self.flops * metrics["tokens_per_second"] / self.peak
        self.since = now
        load = np.asarray(report.losses.load, np.float64)
        return metrics, load / np.maximum(load.sum(axis=-1, keepdims=True), 1)

    def _evaluated(self) -> Metrics:
        """Evaluate the current state. Returns no metrics if there is no evaluation."""
        if self.evaluate is None:
            return {}
        start = time.perf_counter()
        return {EVAL_LOSS: self.evaluate(self.state), EVAL_SECONDS: time.perf_counter() - start}

    def _save(self, started: _StepMade, metrics: Metrics, force: bool) -> None:
        """Save a checkpoint if it is due or forced.

        Raises NotFinite if a new parameter is not finite. Without checkpoints, only the final parameters are checked.
        """
        due = self.checkpoints is not None and self.checkpoints.due(started.number)
        if not (force or due):
            return
        self._refuse_nonfinite("new values", jax.device_get(self.finite(self.state.params)), started)
        if self.checkpoints is not None:
            extra = {"data": in_every_process(started.position), "base": self.base}
            extra["metrics"] = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON: no NaN
            with self.spent.on("checkpoint"):
                self.checkpoints.save(started.number, self.step.saved(self.state), extra, force=force)

    def _restored(self) -> TrainState:
        assert self.checkpoints is not None
        try:
            arrays, extra = self.checkpoints.restore(self.first, self.step.saved(self.step.shapes()))
        except CheckpointError as error:
            if self.step.pipeline is None or self.step.pipeline.stages is not None:
                raise
            raise CheckpointError(
                f"{error}\nThe arrays of a pipelined model depend on the number of stages: use the run's number of "
                f"stages, Pipeline({self.step.pipeline.microbatches}, stages=…)"
            ) from error
        if extra.get("base", self.base) != self.base:
            raise CheckpointError(
                f"{self.checkpoints.folder} contains a run with a different base model: the frozen parameters have "
                "different values. Load the model, revision and dtype of that run, or use a new folder"
            )
        self.saved_metrics = {"step": self.first, **extra.get("metrics", {})}
        self.source.restore(extra["data"])
        logger.info("resuming from step %d of %s", self.first, self.checkpoints.folder)
        return self.step.restored(arrays)

    def _refuse_nonfinite(self, quantity: str, finite: Iterable[Any], started: _StepMade) -> None:
        invalid = [name for name, is_finite in zip(self.step.names, finite, strict=True) if not is_finite]
        if invalid:
            hint = ""
            if self.checkpoints is not None:
                self.checkpoints.wait()
                latest = self.checkpoints.latest()
                hint = (
                    ". There is no checkpoint yet" if latest is None else f". The last checkpoint is from step {latest}"
                )
            loss = float(started.report.losses.total)
            raise NotFinite(
                f"step {started.number}: the {quantity} of {', '.join(invalid[:5])}{' …' if len(invalid) > 5 else ''} "
                f"({len(invalid)} of {len(self.step.names)} parameters) are NaN or infinite, and the loss is "
                f"{loss:.4g}. Lower the learning rate, clip gradients or check the batch{hint}"
            )


def _finite(params: dict[str, jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(value)) for value in params.values()]
