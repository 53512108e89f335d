"""Step metrics: losses, seconds per phase, FLOPs, and the loss of held-out batches."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import axes_of
from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.validate import iterator_of, set_positive
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.hardware import of_device
from nnxmoe.train.loop.batch import Batch, rows_of
from nnxmoe.train.loop.definition import Report, TrainState
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.step import Step

Metrics = dict[str, float]
EVAL_LOSS, EVAL_SECONDS = "eval_loss", "eval_seconds"
EVALUATED = frozenset({EVAL_LOSS, EVAL_SECONDS})
# Reserved metric names, in addition to the names of the losses.
_OWN = {
    *("gradient_norm", "seconds", "learning_rate", "tokens_per_second", "mfu", "skipped"),
    *("data_seconds", "device_seconds", "checkpoint_seconds", *EVALUATED),
}


class Spent:
    """Timer that accumulates this process's waiting time, as metrics ``<name>_seconds``."""

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys([f"{name}_seconds" for name in names], 0.0)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Add the duration of the ``with`` block to ``<name>_seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"{name}_seconds"] += time.perf_counter() - start

    def take(self) -> Metrics:
        """Return the seconds by name and reset them to 0."""
        totals, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return totals


def metrics_of(report: Report, number: int, batch: Batch, seconds: float) -> Metrics:
    """Compute the metrics of step ``number``, which took ``seconds``.

    Raises ValueError if a metric of the objective has a reserved name.
    """
    losses = report.losses
    metrics = {"step": number, "loss": float(losses.total)}
    if losses.cross_entropy is not None:
        metrics |= {"cross_entropy": float(losses.cross_entropy), "tokens": float(losses.tokens)}
    if losses.mtp is not None:
        metrics["mtp"] = float(losses.mtp)
    if conflicts := losses.measured.keys() & {*metrics, *_OWN}:
        raise ValueError(
            f"the objective's metric {sorted(conflicts)[0]!r} has the name of a built-in metric: rename it"
        )
    metrics |= {name: float(value) for name, value in losses.measured.items()}
    metrics |= {"gradient_norm": float(report.gradient_norm), "seconds": seconds}
    if report.learning_rate is not None:
        metrics["learning_rate"] = float(report.learning_rate)
    if report.skipped is not None:
        metrics["skipped"] = int(report.skipped)
    if "tokens" in batch:
        metrics["tokens_per_second"] = batch["tokens"].size / seconds
    if (utilization := report.used) is not None:
        metrics |= {
            "balance": float(losses.balance),
            "router_z": float(losses.router_z),
            "busiest_expert": float(np.max(utilization.busiest)),
            "idle_experts": int(np.sum(utilization.idle)),
            "dropped": float(np.max(utilization.dropped)),
        }
    return metrics


def shown_metrics(metrics: Metrics) -> dict[str, str]:
    """Format the metrics shown next to the progress bar. Omits zeros, except for the loss."""
    formats = {
        "loss": "{:.4f}",
        "reward": "{:.3f}",
        "tokens_per_second": "{:.0f}",
        "seconds": "{:.3f}",
        "mfu": "{:.1%}",
        "data_seconds": "{:.3f}",
        "busiest_expert": "{:.1f}x",  # relative to a uniform load
        "dropped": "{:.1%}",
        "skipped": "{}",
    }
    labels = {
        "tokens_per_second": "tok/s",
        "seconds": "s/step",
        "data_seconds": "data s/step",
        "busiest_expert": "busiest expert",
    }
    selected = {name: spec for name, spec in formats.items() if metrics.get(name) or name == "loss"}
    return {labels.get(name, name): spec.format(metrics[name]) for name, spec in selected.items()}


def peak_flops(mesh: Mesh | None) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of all devices of a mesh, or None if unknown."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    hardware = of_device(devices[0].device_kind)
    return None if hardware is None else hardware.flops * len(devices)


def token_flops(model: CausalLM, trained: Collection[str]) -> float:
    """Estimate the FLOPs of a training step per token.

    Counts 4 FLOPs per used parameter (forward pass, and gradient of the input) and 2 more for the
    gradient of each parameter in ``trained`` (dotted paths). Attention scores and rematerialization
    are not counted (PaLM; Chowdhery et al. 2022). If any prediction layer is trained, all prediction
    layers are counted, each with one more use of the output head.
    """
    total, depths = 0.0, len(model.mtp) if any(name.startswith("mtp.") for name in trained) else 0
    head = "embed.table" if model.head is None else "head.kernel"
    weights = [(path, v, v.size) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    quantized = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, QuantizedWeight)]
    weights += [(path, node.codes, math.prod((*node.lead, *node.ins, *node.outs))) for path, node in quantized]
    for path, variable, size in weights:
        share, key = 1.0, ".".join(map(str, path)).removesuffix(".codes")
        if path[0] == "mtp" and not depths:
            share = 0.0
        elif "expert" in axes_of(variable):
            share = model.config.experts_per_token / model.config.experts
        elif key == head:
            share = 1.0 + depths
        elif key.endswith(".table"):
            share = 0.0  # a lookup, not a matmul; Gemma 4 has a second table
        total += (6 if ".".join(map(str, path)) in trained else 4) * share * size
    return total


@dataclasses.dataclass(frozen=True)
class Evaluation(KnownFields):
    """Held-out batches, evaluated at the end and, if ``every`` is set, every ``every`` steps."""

    batches: Iterable[Batch]
    every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise ValueError("evaluate is an iterator, which can be used only once: pass a list of batches, list(…)")
        iterator_of("evaluate", self.batches, "a list of batches")
        set_positive(self, "every")

    def due(self, step: int, last: bool) -> bool:
        """Check whether to evaluate after a step."""
        return last or (self.every is not None and step % self.every == 0)

    def of(self, step: Step) -> Callable[[TrainState], float]:
        """Return a function that computes the mean cross-entropy of the batches for a state.

        Raises ValueError if there are no batches or the first batch is invalid. Checking before training
        avoids an error during evaluation that would lose the steps since the last checkpoint.
        """
        if (first := next(iter(self.batches), None)) is None:
            raise ValueError("evaluate: there are no batches. Pass at least one batch, or omit evaluate")
        put_batch(first, step)
        program = step.shared("losses", step.definition.losses, "the evaluation")

        def evaluate(state: TrainState) -> float:
            batch_losses, weights = [], []
            for batch in self.batches:
                losses = program(state, batch := put_batch(batch, step))
                batch_losses.append(float(losses.total if losses.cross_entropy is None else losses.cross_entropy))
                weights.append(float(rows_of(batch) if losses.tokens is None else losses.tokens))
            if not sum(weights):
                raise ValueError("evaluate: the batches have no token to predict")
            return float(np.average(batch_losses, weights=weights))

        return evaluate
