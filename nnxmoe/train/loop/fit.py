"""Training as one call: steps, checkpoints that a killed run goes on from, evaluation, and what to say meanwhile."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from nnxmoe.config.validate import is_positive
from nnxmoe.layers.lora import LoRAParam
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.decoder import Decoder
from nnxmoe.moe.balance import utilisation
from nnxmoe.moe.block import MoE
from nnxmoe.runtime.processes import deadline
from nnxmoe.runtime.progress import logger
from nnxmoe.train.loop.feed import Source, placed
from nnxmoe.train.loop.loss import Batch, Objective
from nnxmoe.train.loop.speed import peak_flops, token_flops
from nnxmoe.train.loop.step import Report, Step, TrainState
from nnxmoe.train.runs.checkpoints import Checkpoints

Metrics = dict[str, float]


class NotFinite(ValueError):
    """Gradients, or parameters about to be kept, that are NaN or infinite; the message names the parameters."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a callback is told after a step: ``metrics`` of it, and ``load``, the shares ``[L, E]`` of the MoE layers'
    assignments that went to each expert. ``model()`` is the model now: the next step takes its arrays, so copy what is
    to be kept (``jax.tree.map(jnp.copy, nnx.state(model))``) or save it."""

    step: int
    steps: int
    metrics: Metrics
    load: np.ndarray
    model: Callable[[], CausalLM]


class Callback(Protocol):
    """Returns True (also NumPy's) to end the training after this step."""

    def __call__(self, progress: Progress, /) -> bool | np.bool_ | None: ...


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The trained model; the metrics of every step of this call; and the state, with the optimizer's moments."""

    model: CausalLM
    history: list[Metrics]
    state: TrainState


def fit(
    model: CausalLM,
    data: Iterable[Batch],
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    keep: int = 3,
    mesh: Mesh | None = None,
    objective: Objective | None = None,
    accumulate: int = 1,
    bias_rate: float = 0.0,
    trainable: Any = None,
    evaluate: Iterable[Batch] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Fitted:
    """Train a model for ``steps`` steps in all, and return it; the one given keeps its values.

    ``data``: batches (see `train.loss`); one that can be gone through again is, when it ends. ``checkpoint``: a folder;
    with what an earlier call wrote there the training goes on, to the bit: ``data`` that has ``get_state`` and
    ``set_state`` (grain's, `train.data`) is set to where it was, other data is gone through up to there.
    ``trainable``: which variables; default the adapters where the model has any, else all of `nnx.Param`.
    ``evaluate``: batches whose cross-entropy is a metric every ``evaluate_every`` steps and at the end.
    Raises NotFinite for gradients that are not, and ValueErrors for what cannot be.
    """
    if not is_positive(steps):
        raise ValueError(f"steps={steps!r}: how many in all, at least 1")
    if model.merged is not None:
        raise ValueError("the model's adapters are merged: lora.unmerge(model), or lora.merge(model, keep=False) it")
    model = model if mesh is None else on_mesh(model, mesh)
    if trainable is None:
        trainable = LoRAParam if jax.tree.leaves(nnx.state(model, LoRAParam)) else nnx.Param
    step = Step(model, optimizer, objective, trainable=trainable, accumulate=accumulate, bias_rate=bias_rate)
    kept = contextlib.nullcontext() if checkpoint is None else Checkpoints(checkpoint, keep, save_every)
    with kept as checkpoints:
        run = _Run(step, Source(data), checkpoints, steps, seed, token_flops(model, step.names))
        judge = None if evaluate is None else _Judge(step, evaluate, evaluate_every)
        return run.go(judge, callbacks)


def on_mesh(model: CausalLM, mesh: Mesh) -> CausalLM:
    """The same model with its arrays spread over a mesh."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    model.strategy = dataclasses.replace(model.strategy, mesh=mesh)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Decoder | MoE):  # the modules that hold a mesh
            node.mesh = mesh
    flat = [
        (p, v.replace(jax.device_put(v.get_value(), model.strategy.sharding_of(v))))
        for p, v in nnx.to_flat_state(state)
    ]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


class _Judge:
    """Mean cross-entropy of held-out batches."""

    def __init__(self, step: Step, data: Iterable[Batch], every: int | None) -> None:
        if isinstance(data, Iterator):
            raise ValueError("evaluate: an iterator is spent after the first time: give batches in a list, list(…)")
        if every is not None and not is_positive(every):
            raise ValueError(f"evaluate_every={every!r}: give a whole number from 1, or None")
        self.step, self.data, self.every = step, data, every
        self.losses = jax.jit(lambda state, batch: step.losses(state, batch))

    def due(self, step: int, last: bool) -> bool:
        return last or (self.every is not None and step % self.every == 0)

    def __call__(self, state: TrainState) -> float:
        found = [self.losses(state, placed(batch, self.step)) for batch in self.data]
        weights = [float(losses.tokens) for losses in found]
        if not sum(weights):
            raise ValueError("evaluate: the data has no tokens that count")
        return float(np.average([float(losses.cross_entropy) for losses in found], weights=weights))


class _Run:
    """From the last checkpoint, or the start, to the last step."""

    def __init__(
        self, step: Step, source: Source, checkpoints: Checkpoints | None, steps: int, seed: int, flops: float
    ) -> None:
        self.step, self.source, self.checkpoints, self.steps, self.flops = step, source, checkpoints, steps, flops
        self.first = 0 if checkpoints is None else checkpoints.latest() or 0
        if checkpoints is not None and self.first > steps:
            raise ValueError(
                f"{checkpoints.folder} is at step {self.first}, which is beyond steps={steps}, how many in all: give "
                "more, or another folder"
            )
        self.state = self._restored() if self.first else step.init(seed)
        self.peak = peak_flops(step.mesh)
        self.finite = jax.jit(
            lambda params: [jnp.all(jnp.isfinite(value)) for value in params.values()], out_shardings=step.places.step
        )

    def go(self, judge: _Judge | None, callbacks: Sequence[Callback]) -> Fitted:
        history: list[Metrics] = []
        silent: Any = {"disable": True} if jax.process_index() > 0 else {}  # False would overrule TQDM_DISABLE
        bar = tqdm(total=self.steps, initial=self.first, desc="training", unit="step", **silent)
        with bar:
            for number in range(self.first + 1, self.steps + 1):
                if self.checkpoints is not None and self.checkpoints.due(number):
                    self.checkpoints.wait()  # what a kill costs is one interval at most
                started = time.perf_counter()
                batch, position = self.source.next()
                batch = placed(batch, self.step)
                with deadline("a training step"):
                    self.state, report = self.step.run(self.state, batch)
                    jax.block_until_ready(report)
                if not float(report.losses.tokens):
                    raise ValueError(
                        f"step {number}: the batch has no tokens to predict: segment 0, attention_mask 0 and loss_mask "
                        "0 each leave a token out, and a row of one token has no next one; check the data"
                    )
                self._refuse_nonfinite("gradients", np.asarray(report.finite), report, number)
                metrics = self._metrics(report, number, time.perf_counter() - started, batch["tokens"].size)
                stop = self._after(number, position, metrics, report, judge, callbacks)
                history.append(metrics)
                bar.set_postfix(_shown(metrics), refresh=False)
                bar.update()
                if stop:
                    break
        return Fitted(self.step.model(self.state), history, self.state)

    def _after(
        self,
        number: int,
        position: dict[str, Any],
        metrics: Metrics,
        report: Report,
        judge: _Judge | None,
        callbacks: Sequence[Callback],
    ) -> bool:
        """Evaluation, callbacks and checkpoint; whether this was the last step."""
        last = number == self.steps
        if judge is not None and judge.due(number, last):
            metrics["evaluation"] = judge(self.state)
        load = np.asarray(report.losses.load, np.float64)
        load = load / np.maximum(load.sum(axis=-1, keepdims=True), 1)
        told = Progress(number, self.steps, metrics, load, lambda: self.step.model(self.state))
        answers = [callback(told) for callback in callbacks]
        stop = any(isinstance(answer, bool | np.bool_) and answer for answer in answers)
        if last or stop or (self.checkpoints is not None and self.checkpoints.due(number)):
            self._refuse_nonfinite("new values", jax.device_get(self.finite(self.state.params)), report, number)
        if self.checkpoints is not None:
            self.checkpoints.save(number, self.step.saved(self.state), {"data": position}, force=last or stop)
        return last or stop

    def _restored(self) -> TrainState:
        assert self.checkpoints is not None
        arrays, extra = self.checkpoints.restore(self.first, self.step.saved(self.step.shapes()))
        self.source.go_to(extra["data"])
        logger.info("going on from step %d of %s", self.first, self.checkpoints.folder)
        return self.step.restored(arrays)

    def _refuse_nonfinite(self, what: str, finite: Iterable[Any], report: Report, number: int) -> None:
        odd = [name for name, good in zip(self.step.names, finite, strict=True) if not good]
        if odd:
            where = ""
            if self.checkpoints is not None:
                self.checkpoints.wait()
                latest = self.checkpoints.latest()
                where = (
                    "; there is no checkpoint yet" if latest is None else f"; the last checkpoint is of step {latest}"
                )
            raise NotFinite(
                f"step {number}: the {what} of {', '.join(odd[:5])}{' …' if len(odd) > 5 else ''} "
                f"({len(odd)} of {len(self.step.names)} parameters) are NaN or infinite, the loss is "
                f"{float(report.losses.total):.4g}: lower the learning rate, clip, or look at the batch{where}"
            )

    def _metrics(self, report: Report, number: int, seconds: float, tokens: int) -> Metrics:
        losses = report.losses
        metrics = {
            "step": number,
            "loss": float(losses.total),
            "cross_entropy": float(losses.cross_entropy),
            "tokens": float(losses.tokens),
            "gradient_norm": float(report.gradient_norm),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
        if self.peak is not None:
            metrics["mfu"] = self.flops * tokens / seconds / self.peak
        if len(losses.load):
            used = utilisation(losses.load, losses.dropped)
            metrics |= {
                "balance": float(losses.balance),
                "router_z": float(losses.router_z),
                "busiest_expert": float(np.max(used.busiest)),
                "idle_experts": int(np.sum(used.idle)),
                "dropped": float(np.max(used.dropped)),
            }
        return metrics


def _shown(metrics: Metrics) -> dict[str, str]:
    """The part of the metrics that fits in a line."""
    names = {
        "loss": "{:.4f}",
        "tokens_per_second": "{:.0f}",
        "seconds": "{:.3f}",
        "mfu": "{:.1%}",
        "busiest_expert": "{:.2f}",
    }
    short = {"tokens_per_second": "tok/s", "seconds": "s", "busiest_expert": "busiest"}
    return {short.get(name, name): form.format(metrics[name]) for name, form in names.items() if name in metrics}
