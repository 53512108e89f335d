"""The metrics of a step, from the report that its program returns, and the seconds waited for its parts."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.step import Report

Metrics = dict[str, float]
DATA, DEVICE, CHECKPOINT, EVALUATION = (f"{name}_seconds" for name in ("data", "device", "checkpoint", "evaluation"))
_PARTS = (DATA, DEVICE, CHECKPOINT, EVALUATION)
_OWN = ("gradient_norm", "seconds", "learning_rate", "tokens_per_second", "mfu", "evaluation", "skipped")


class Spent:
    """Accumulates the seconds that this process waits, by name."""

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Add the time of this block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def take(self) -> Metrics:
        """Return the seconds by name and reset them to 0."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


def metrics_of(report: Report, number: int, batch: Batch, seconds: float) -> Metrics:
    """The metrics of a step that took this many seconds. Raises ValueError for a name that is taken."""
    losses = report.losses
    metrics = {"step": number, "loss": float(losses.total)}
    if losses.cross_entropy is not None:
        metrics |= {"cross_entropy": float(losses.cross_entropy), "tokens": float(losses.tokens)}
    if losses.mtp is not None:
        metrics["mtp"] = float(losses.mtp)
    if same := losses.measured.keys() & {*metrics, *_OWN, *_PARTS}:
        raise ValueError(f"the objective's metric {sorted(same)[0]!r} has the name of one of nnxmoe's: rename it")
    metrics |= {name: float(value) for name, value in losses.measured.items()}
    metrics |= {"gradient_norm": float(report.gradient_norm), "seconds": seconds}
    if report.learning_rate is not None:
        metrics["learning_rate"] = float(report.learning_rate)
    if report.skipped is not None:
        metrics["skipped"] = int(report.skipped)
    if "tokens" in batch:
        metrics["tokens_per_second"] = batch["tokens"].size / seconds
    if (used := report.used) is not None:
        metrics |= {
            "balance": float(losses.balance),
            "router_z": float(losses.router_z),
            "busiest_expert": float(np.max(used.busiest)),
            "idle_experts": int(np.sum(used.idle)),
            "dropped": float(np.max(used.dropped)),
        }
    return metrics


def shown_metrics(metrics: Metrics) -> dict[str, str]:
    """The metrics shown beside the progress bar, as text; zeros are left out, except the loss."""
    names = {
        "loss": "{:.4f}",
        "tokens_per_second": "{:.0f}",
        "seconds": "{:.3f}",
        "mfu": "{:.1%}",
        DATA: "{:.3f}",
        "busiest_expert": "{:.1f}x",  # its share, in even shares
        "dropped": "{:.1%}",
        "skipped": "{}",
    }
    short = {"tokens_per_second": "tok/s", "seconds": "s/step", DATA: "data s/step", "busiest_expert": "busiest expert"}
    shown = {name: form for name, form in names.items() if metrics.get(name) or name == "loss"}
    return {short.get(name, name): form.format(metrics[name]) for name, form in shown.items()}
