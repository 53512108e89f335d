"""Plots for notebooks: expert load, training curves, and comparisons of strategies.

    plot.load(model(tokens, return_routing=True).routing)
    plot.history(fitted.history, ["loss", "eval_loss"])

Every plotting function draws on the Matplotlib axes ``ax`` and returns them. If ``ax`` is None, the
function creates a figure. Inputs are arrays, lists, dicts or model outputs. The colors are
colorblind-safe: cividis, and the palette of Okabe and Ito (2008). Requires Matplotlib (the extra
``notebooks``), which is imported at the first plot.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnxmoe.moe.selection import Routing
from nnxmoe.runtime.extras import install_command

Axes = Any  # matplotlib.axes.Axes or None. The type is Any, because Matplotlib is optional.
Loads = Mapping[int, Routing] | Sequence[Any] | Any  # {layer: Routing}, or counts or shares [L, E].
Numbers = Mapping[str, float] | Mapping[str, Mapping[str, float]]

PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB")
_MAP, _CELLS = "cividis", 160  # Color map. Heat maps with at most this many cells show values.


def shares(loads: Loads) -> np.ndarray:
    """Compute each expert's fraction of its layer's assignments, ``[L, E]``. 0 for layers without assignments.

    Args:
        loads: Routing per layer from a model's output (padding is excluded), or counts or shares ``[L, E]``.
    """
    if isinstance(loads, Mapping):
        loads = [_counts(loads[layer]) for layer in sorted(loads)]
    array = np.asarray(loads, np.float64)
    if array.ndim != 2 or not array.size or not (array >= 0).all():
        raise ValueError(
            f"loads: {list(array.shape)}: pass numbers >= 0 of shape [layers, experts], or {{layer: Routing}}"
        )
    total = array.sum(axis=1, keepdims=True)
    return np.divide(array, total, out=np.zeros_like(array), where=total > 0)


def load(loads: Loads, names: Sequence[str] | None = None, ax: Axes = None) -> Axes:
    """Draw a heat map of expert loads relative to the mean load of the layer, with one row per layer.

    Args:
        loads: See `shares`.
        names: Row labels. Defaults to "layer 0", …
    """
    values = shares(loads)
    values = values * values.shape[1]
    names = _names(loads, values, names)
    ax = _axes(ax, (1.5 + 0.5 * values.shape[1], 1.1 + 0.34 * len(values)))
    _heat(ax, values)
    ax.set(xlabel="expert", yticks=range(len(names)), yticklabels=names)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if values.size <= _CELLS:
        ax.set_xticks(range(values.shape[1]))
        for (y, x), value in np.ndenumerate(values):
            ink = "wk"[int(value > max(2.0, values.max()) / 2)]
            ax.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color=ink)
    return ax


def entropy(loads: Loads, names: Sequence[str] | None = None, ax: Axes = None) -> Axes:
    """Draw the entropy of each layer's expert loads, divided by log(E), as one bar per layer.

    1 means that the load is uniform. 0 means that one expert has the entire load.

    Args:
        loads: See `shares`.
    """
    share = shares(loads)
    names = _names(loads, share, names)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    values = -(share * logs).sum(axis=1) / np.log(max(share.shape[1], 2))
    return bars(
        dict(zip(names, values.tolist(), strict=True)), "entropy / log(experts), 1 = uniform", ax, form="{:.3f}"
    )


def over_steps(loads: Any, steps: Sequence[int] | None = None, ax: Axes = None) -> Axes:
    """Draw a heat map of the expert loads of one layer over training, relative to the mean load.

    Rows are experts. Columns are training steps.

    Args:
        loads: Counts or shares ``[S, E]``, one row per step.
        steps: Evenly spaced step numbers. Defaults to 1 … S.
    """
    values = shares(loads)
    values = values.T * values.shape[1]
    first_step, last_step = (1, values.shape[1]) if steps is None else (steps[0], steps[-1])
    half = (last_step - first_step) / max(values.shape[1] - 1, 1) / 2 or 0.5
    ax = _axes(ax, (6, 1.1 + 0.22 * len(values)))
    _heat(ax, values, extent=(first_step - half, last_step + half, len(values) - 0.5, -0.5))
    ax.set(xlabel="step", ylabel="expert")
    return ax


def strip(pieces: Sequence[str], routing: Mapping[int, Routing] | Routing, row: int = 0, ax: Axes = None) -> Axes:
    """Draw the top-1 expert of each token in each layer as a number and a color.

    The plot has one column per token and one row per layer. Padding cells are empty.

    Args:
        pieces: Text of each token, for the whole row or only for its first tokens.
        routing: ``{layer: Routing [B, T, …]}``, or a single Routing. For a single Routing, the rows
            of the plot are the experts of each token in the order of selection.
        row: Batch index.
    """
    if isinstance(routing, Routing):
        choices = np.asarray(routing.experts)[row].T
        cells = {f"choice {i}": (choice, routing.valid) for i, choice in enumerate(choices, 1)}
    else:
        cells = {f"layer {i}": (np.asarray(r.experts)[row, :, 0], r.valid) for i, r in sorted(routing.items())}
    if lengths := [len(experts) for experts, _ in cells.values() if len(experts) < len(pieces)]:
        raise ValueError(f"{len(pieces)} pieces, but the row has only {lengths[0]} tokens")
    ax = _axes(ax, (1 + 0.27 * len(pieces), 0.9 + 0.27 * len(cells)))
    for y, (experts, valid) in enumerate(cells.values()):
        token_mask = np.ones(len(experts), bool) if valid is None else np.asarray(valid)[row]
        for x in np.flatnonzero(token_mask[: len(pieces)]):
            color = PALETTE[experts[x] % len(PALETTE)]
            ax.bar(x, 1, 0.94, y - 0.5, color=color)
            red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "white"
            ax.text(x, y, str(experts[x]), ha="center", va="center", fontsize=8, color=ink)
    ax.set(xlim=(-0.5, len(pieces) - 0.5), ylim=(len(cells) - 0.5, -0.5), yticks=range(len(cells)), yticklabels=cells)
    # Make spaces and newlines visible. Escape dollar signs, because Matplotlib starts a formula at a dollar sign.
    labels = [piece.replace(" ", "·").replace("\n", "↵").replace("$", r"\$") for piece in pieces]
    ax.set_xticks(range(len(pieces)), labels, rotation=90, fontsize=8, family="monospace")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def history(
    runs: Sequence[Mapping[str, float]] | Mapping[str, Sequence[Mapping[str, float]]],
    metrics: str | Sequence[str] = "loss",
    ax: Axes = None,
) -> Axes:
    """Plot metrics over training steps. The first curve has the thickest line.

    Args:
        runs: A `Fitted.history`, or ``{label: history}`` to compare runs.
        metrics: Metrics to plot. Steps without a metric are skipped, such as steps between evaluations.

    Raises:
        ValueError: If no step has a metric.
    """
    runs = runs if isinstance(runs, Mapping) else {"": runs}
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    ax = _axes(ax, (6, 3))
    colors = itertools.cycle(PALETTE[i] for i in (0, 4, 2, 6, 1, 5))  # no yellow: it is faint on white
    metric_titles = {metric: metric.replace("_", " ") for metric in metrics}
    for i, ((label, steps), metric) in enumerate(itertools.product(runs.items(), metrics)):
        points = [(step["step"], step[metric]) for step in steps if metric in step]
        if not points:
            available = ", ".join(sorted({name for step in steps for name in step} - {"step"}))
            raise ValueError(f"no step has the metric {metric!r}. Available metrics: {available or 'none'}")
        curve_label = " ".join(part for part in (label, metric_titles[metric] if len(metrics) > 1 else "") if part)
        style: dict[str, Any] = {"marker": "o" if len(points) < 10 else "", "linestyle": ("-", "--", "-.", ":")[i % 4]}
        ax.plot(*zip(*points, strict=True), label=curve_label, color=next(colors), linewidth=max(1.6, 3.6 - i), **style)
    ax.set(xlabel="step", ylabel=", ".join(metric_titles.values()))
    ax.grid(alpha=0.3)
    if len(runs) * len(metrics) > 1:
        ax.legend(frameon=False)
    return ax


def bars(values: Numbers, unit: str = "", ax: Axes = None, *, form: str = "{:g}") -> Axes:
    """Draw labeled horizontal bars, from top to bottom in the order of ``values``.

    Args:
        values: ``{label: number}``, or ``{label: {part: number}}`` for stacked bars. Parts are stacked in
            order of first appearance.
        unit: Label of the x axis.
        form: Format string of the values.
    """
    stacked = {label: dict(v) if isinstance(v, Mapping) else {"": v} for label, v in values.items()}
    parts = list(dict.fromkeys(part for bar in stacked.values() for part in bar))
    ax = _axes(ax, (6 + 1.5 * (len(parts) > 1), 0.7 + 0.32 * len(stacked)))
    offsets = np.zeros(len(stacked))
    for part, color in zip(parts, itertools.cycle(("#0072B2", *PALETTE) if len(parts) == 1 else PALETTE), strict=False):
        widths = np.array([bar.get(part, 0.0) for bar in stacked.values()], float)
        ax.barh(range(len(stacked)), widths, 0.7, offsets, color=color, label=part)
        offsets += widths
    for y, total in enumerate(offsets):
        side: dict[str, Any] = {"xytext": (3, 0)} if total >= 0 else {"xytext": (-3, 0), "ha": "right"}
        ax.annotate(form.format(total), (total, y), textcoords="offset points", va="center", fontsize=9, **side)
    ax.set(yticks=range(len(stacked)), yticklabels=list(stacked), xlabel=unit)
    ax.set_ylim(len(stacked) - 0.5, -0.5)
    ax.margins(x=0.12)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
    ax.spines[["top", "right"]].set_visible(False)
    if len(parts) > 1:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    return ax


def errors(differences: Mapping[str, float], tolerance: float | None = None, ax: Axes = None) -> Axes:
    """Draw absolute differences as dots on a logarithmic axis, from top to bottom in the given order.

    Zeros are hollow dots at the left edge. NaN and infinity are red dots at the right edge.

    Args:
        differences: Absolute difference per label.
        tolerance: Largest accepted difference, drawn as a dotted line. Larger differences are red.
    """
    values = np.nan_to_num(np.array([abs(v) for v in differences.values()], float), nan=np.inf)
    finite = [*values[(values > 0) & np.isfinite(values)], tolerance or 1e-5]
    low, high = min(finite) / 10, max(finite) * 10
    ax = _axes(ax, (6, 0.8 + 0.24 * len(values)))
    for y, value in enumerate(values):
        color = "#D55E00" if value > (np.inf if tolerance is None else tolerance) or np.isinf(value) else "#0072B2"
        ax.plot(np.clip(value, low, high), y, "o", color=color, markerfacecolor=color if value else "none")
    legend = "hollow: 0"
    if tolerance is not None:
        ax.axvline(tolerance, color="black", linestyle=":")
        legend += f"; dotted: tolerance {tolerance:g}"
    ax.set(xscale="log", xlim=(low / 2, high * 2), xlabel=f"largest difference ({legend})")
    ax.set(ylim=(len(values) - 0.5, -0.5), yticks=range(len(values)), yticklabels=list(differences))
    ax.grid(axis="x", alpha=0.3)
    return ax


def _axes(ax: Axes, size: tuple[float, float]) -> Axes:
    """Return ``ax``, or the axes of a new figure of ``size`` inches."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(f"nnxmoe.plot needs matplotlib: {install_command('notebooks')}") from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def _counts(routing: Routing) -> np.ndarray:
    """Count the assignments per expert, ``[E]``, excluding padding."""
    experts = np.asarray(routing.experts)
    token_experts = experts if routing.valid is None else experts[np.asarray(routing.valid)]
    return np.bincount(token_experts.reshape(-1), minlength=routing.scores.shape[-1])


def _names(loads: Loads, values: np.ndarray, names: Sequence[str] | None) -> list[str]:
    layers = sorted(loads) if isinstance(loads, Mapping) else range(len(values))
    labels = [f"layer {i}" for i in layers] if names is None else list(names)
    if len(labels) != len(values):
        raise ValueError(f"{len(labels)} names, but loads has {len(values)} rows")
    return labels


def _heat(ax: Axes, values: np.ndarray, **options: Any) -> None:
    image = ax.imshow(values, cmap=_MAP, vmin=0, vmax=max(2.0, values.max()), aspect="auto", **options)
    ax.figure.colorbar(image, ax=ax, label="load / even load", pad=0.02)
