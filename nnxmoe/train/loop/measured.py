"""The metrics of a step, from the report that its program returns."""

import numpy as np

from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.step import Report

Metrics = dict[str, float]
_OWN = ("gradient_norm", "seconds", "learning_rate", "tokens_per_second", "mfu", "evaluation")


def metrics_of(report: Report, number: int, batch: Batch, seconds: float) -> Metrics:
    """The metrics of a step that took this many seconds. Raises ValueError for a name that is taken."""
    losses = report.losses
    metrics = {"step": number, "loss": float(losses.total)}
    if losses.cross_entropy is not None:
        metrics |= {"cross_entropy": float(losses.cross_entropy), "tokens": float(losses.tokens)}
    if losses.mtp is not None:
        metrics["mtp"] = float(losses.mtp)
    if same := losses.measured.keys() & {*metrics, *_OWN}:
        raise ValueError(f"the objective's metric {sorted(same)[0]!r} has the name of one of nnxmoe's: rename it")
    metrics |= {name: float(value) for name, value in losses.measured.items()}
    metrics |= {"gradient_norm": float(report.gradient_norm), "seconds": seconds}
    if report.learning_rate is not None:
        metrics["learning_rate"] = float(report.learning_rate)
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
    """The metrics that fit beside the progress bar."""
    names = {
        "loss": "{:.4f}",
        "tokens_per_second": "{:.0f}",
        "seconds": "{:.3f}",
        "mfu": "{:.1%}",
        "busiest_expert": "{:.1f}x",  # its share, in even shares
    }
    short = {"tokens_per_second": "tok/s", "seconds": "s/step", "busiest_expert": "busiest expert"}
    return {short.get(name, name): form.format(metrics[name]) for name, form in names.items() if name in metrics}
