"""Comparison of two language models on the same tokens, which attributes differences to rounding or to a bug."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.testing.differences import measure_gap
from nnxmoe.testing.model_outputs import ExpertSelector, Side, SideOutputs, as_side, compute_outputs


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of `compare`. Padding is excluded. Differences are relative, as in `ParityReport`.

    A token flips in a layer if the two sides select different experts for it.

    Attributes:
        verdict: "equal" if no token flips and the logits agree, "rounding" if nearly tied router scores explain the
            difference, else "bug".
        tokens: Number of tokens that are not padding.
        flipped: MoE layer -> number of flipped tokens.
        first_layer: First layer with flipped tokens, or None.
        margin: Smallest change of the scores that explains all flips in ``first_layer``, relative to the token's
            largest score. None if no token flips or if no side has scores or router logits.
        router_difference: Difference of the router logits in ``first_layer``. None if unknown.
        difference: Difference of the logits.
        forced: Difference of the logits if both sides use the same experts.
        tolerance: Upper bound for rounding in all differences and the margin.
    """

    verdict: Literal["equal", "rounding", "bug"]
    tokens: int
    flipped: Mapping[int, int]
    first_layer: int | None
    margin: float | None
    router_difference: float | None
    difference: float
    forced: float
    tolerance: float

    def __str__(self) -> str:
        summary = f"{self.verdict}: logits differ by {self.difference:.1e} (tolerance {self.tolerance:.1e})"
        if self.first_layer is None:
            return f"{summary}; all {self.tokens} tokens have the same experts"
        flips = ", ".join(f"layer {layer}: {count}" for layer, count in self.flipped.items() if count)
        margin, router = _number_text(self.margin), _number_text(self.router_difference)
        only_routing = self.forced <= self.tolerance
        cause = "only the choice of experts differs" if only_routing else "more than the routing differs"
        lines = [
            summary,
            f"tokens with different experts, of {self.tokens}: {flips}",
            f"layer {self.first_layer}: margin {margin}, router logits differ by {router}",
            f"with the same experts, logits differ by {self.forced:.1e}: {cause}",
        ]
        return "\n  ".join(lines)


def compare(
    model: Any,
    reference: Any,
    tokens: Any,
    *,
    attention_mask: Any = None,
    positions: Any = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compare the logits and the routing of two models.

    If any token has different experts, runs the model again with the experts of the reference. If the model is
    `Recorded`, runs the reference with the experts of the model instead.

    Args:
        model: A `CausalLM`, a pair of a `LinenCausalLM` and its variables, or `Recorded` outputs.
        reference: The other model, in one of the same forms. At most one of the two can be `Recorded`.
        tokens: Token ids ``[B, T]``.
        attention_mask, positions: See `CausalLM.__call__`.
        tolerance: Largest relative difference that counts as rounding. Defaults to 2e-4 if both sides are in float32,
            else to 5e-2.

    Raises:
        ValueError: Both sides are recorded, or their MoE layers or shapes differ.
    """
    tokens = np.asarray(tokens)
    valid = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    sides = [as_side(side, (tokens, attention_mask, positions)) for side in (model, reference)]
    if all(side.run is None for side in sides):
        raise ValueError("model and reference are both Recorded: pass a model that can be run as one of them")
    with jax.default_matmul_precision("highest"):
        outputs = compute_outputs(sides[0], tokens.shape, sides[1]), compute_outputs(sides[1], tokens.shape, sides[0])
        _check_shapes(*outputs)
        flips = _flipped_tokens(*outputs, valid)
        first_layer = next((layer for layer, flipped in flips.items() if flipped.any()), None)
        difference = _relative_difference(outputs[0].logits, outputs[1].logits, valid)
        forced = difference if first_layer is None else _forced_difference(sides, outputs, valid)
    margin = router_difference = None
    if first_layer is not None:
        margin = _margin(outputs, first_layer, flips[first_layer], [side.routers().get(first_layer) for side in sides])
        if all(first_layer in side.router_logits for side in outputs):
            logits, reference_logits = (side.router_logits[first_layer] for side in outputs)
            router_difference = _relative_difference(logits, reference_logits, valid)
    if tolerance is None:
        tolerance = _default_tolerance([*sides[0].dtypes, *sides[1].dtypes])
    verdict: Literal["equal", "rounding", "bug"] = "equal" if first_layer is None else "rounding"
    if not all(value <= tolerance for value in (forced, margin, router_difference) if value is not None):
        verdict = "bug"
    return Comparison(
        verdict=verdict,
        tokens=int(valid.sum()),
        flipped={layer: int(flipped.sum()) for layer, flipped in flips.items()},
        first_layer=first_layer,
        margin=margin,
        router_difference=router_difference,
        difference=difference,
        forced=forced,
        tolerance=tolerance,
    )


def _check_shapes(model_outputs: SideOutputs, reference_outputs: SideOutputs) -> None:
    sides = _shapes(model_outputs), _shapes(reference_outputs)
    for name in sides[0] | sides[1]:
        if sides[0].get(name) != sides[1].get(name):
            texts = [f"{list(shapes[name])}" if name in shapes else "missing" for shapes in sides]
            raise ValueError(f"{name}: {texts[0]} in the model, {texts[1]} in the reference. They must be equal")


def _shapes(outputs: SideOutputs) -> dict[str, tuple[int, ...]]:
    experts = {f"experts of layer {layer}": ids.shape for layer, ids in sorted(outputs.experts.items())}
    return {"logits": outputs.logits.shape} | experts


def _flipped_tokens(a: SideOutputs, b: SideOutputs, valid: np.ndarray) -> dict[int, np.ndarray]:
    """Return a mask of the tokens with different experts for each layer."""
    return {layer: _experts_differ(ids, b.experts[layer]) & valid for layer, ids in sorted(a.experts.items())}


def _experts_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.sort(a, -1) != np.sort(b, -1)).any(-1)


def _relative_difference(a: np.ndarray, b: np.ndarray, valid: np.ndarray) -> float:
    return measure_gap(a[valid], b[valid]).error


def _forced_difference(sides: Sequence[Side], outputs: Sequence[SideOutputs], valid: np.ndarray) -> float:
    """Run one side with the experts of the other side, and return the difference of their logits."""
    run, target = (sides[0].run, outputs[1]) if sides[0].run else (sides[1].run, outputs[0])
    assert run is not None
    return _relative_difference(np.asarray(run(target.experts).logits), target.logits, valid)


def _margin(
    outputs: Sequence[SideOutputs], layer: int, flipped: np.ndarray, routers: Sequence[ExpertSelector | None]
) -> float | None:
    """Return the largest margin of the flipped tokens of a layer.

    The margin of a token is the gap between the scores of the experts that only one side selected. With groups of
    experts, the group scores may be closer to a tie. The margin is then the difference of the router logits, if one
    router maps the logits of both sides to their experts.
    """
    margins = list[np.ndarray]()
    for side, other, router in zip(outputs, outputs[::-1], routers, strict=True):
        if layer in side.scores:
            bias = 0 if router is None or router.bias is None else router.bias
            experts, other_experts = side.experts[layer][flipped], other.experts[layer][flipped]
            margins.append(_score_margins(side.scores[layer][flipped] + bias, experts, other_experts))
    if all(layer in side.router_logits for side in outputs):
        router = next(router for router in routers if router is not None)
        margins.append(_logit_margins(outputs, layer, flipped, router))
    return float(np.min(margins, axis=0).max()) if margins else None


def _score_margins(scores: np.ndarray, experts: np.ndarray, other_experts: np.ndarray) -> np.ndarray:
    selected, other_selected = _one_hot(experts, scores.shape[-1]), _one_hot(other_experts, scores.shape[-1])
    lowest = np.where(selected & ~other_selected, scores, np.inf).min(-1)
    highest = np.where(other_selected & ~selected, scores, -np.inf).max(-1)
    return np.abs(lowest - highest) / np.abs(scores).max(-1)


def _logit_margins(
    outputs: Sequence[SideOutputs], layer: int, flipped: np.ndarray, router: ExpertSelector
) -> np.ndarray:
    """Return the change of each token's router logits, or inf if ``router`` does not explain the experts."""
    is_explained = np.ones(flipped.sum(), bool)
    for side in outputs:
        experts = router.select_experts(side.router_logits[layer][flipped])
        is_explained &= ~_experts_differ(experts, side.experts[layer][flipped])
    logits, reference_logits = (side.router_logits[layer][flipped] for side in outputs)
    scale = np.maximum(np.abs(reference_logits).max(-1), 1)
    return np.where(is_explained, np.abs(logits - reference_logits).max(-1) / scale, np.inf)


def _one_hot(ids: np.ndarray, count: int) -> np.ndarray:
    return (ids[..., None] == np.arange(count)).any(-2)


def _default_tolerance(dtypes: Sequence[Any]) -> float:
    is_float32 = all(jnp.finfo(dtype).bits >= 32 for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    return 2e-4 if is_float32 else 5e-2


def _number_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1e}"
