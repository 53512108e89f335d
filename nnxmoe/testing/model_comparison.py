"""Compare two language models on the same tokens, and decide whether flipped experts explain the difference."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.linen import LinenCausalLM, from_linen
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.given_routing import moe_routers
from nnxmoe.testing.differences import measure_gap

ArraysByLayer = Mapping[int, Any]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Recorded outputs of a model, for example of transformers. Pass expert ids, router logits or both.

    Attributes:
        logits: Logits ``[B, T, V]``.
        experts: MoE layer -> expert ids ``[B, T, X]``.
        router_logits: MoE layer -> router logits ``[B, T, E]`` or ``[B * T, E]``.
    """

    logits: Any
    experts: ArraysByLayer = dataclasses.field(default_factory=dict)
    router_logits: ArraysByLayer = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of `compare`. Padding is excluded. Differences are relative, as in `ParityReport`.

    Attributes:
        verdict: "equal" if no token flips and the logits agree, "rounding" if a nearly tied choice of experts explains
            the difference, else "bug".
        tokens: Number of real tokens.
        flipped: MoE layer -> number of tokens with different experts.
        first_layer: First layer with flipped tokens, or None.
        margin: Largest change of the scores that is needed to flip the flipped tokens of ``first_layer``, relative to
            the token's largest score. None without flipped tokens or if no side has scores.
        router_difference: Difference of the router logits in ``first_layer``. None if unknown.
        difference: Difference of the logits.
        forced: Difference of the logits if one side is given the experts of the other side.
        tolerance: Tolerance of all differences and of the margin.
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
        lines = [f"{self.verdict}: logits differ by {self.difference:.1e} (tolerance {self.tolerance:.1e})"]
        if self.first_layer is None:
            return f"{lines[0]}; all {self.tokens} tokens have the same experts"
        flips = ", ".join(f"layer {layer}: {count}" for layer, count in self.flipped.items() if count)
        margin, router = (
            "unknown" if value is None else f"{value:.1e}" for value in (self.margin, self.router_difference)
        )
        cause = (
            "only the choice of experts differs" if self.forced <= self.tolerance else "more than the routing differs"
        )
        return "\n  ".join(
            [
                *lines,
                f"tokens with other experts, of {self.tokens}: {flips}",
                f"layer {self.first_layer}: margin {margin}, router logits differ by {router}",
                f"with the same experts, logits differ by {self.forced:.1e}: {cause}",
            ]
        )


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

    If tokens have different experts, the model is run again with the experts of the reference. If the model is
    recorded, the reference is run with the experts of the model.

    Args:
        model: A `CausalLM`, a pair of a `LinenCausalLM` and its variables, or `Recorded` outputs.
        reference: A second model, in the same forms. At least one of both must not be `Recorded`.
        tokens: Token ids ``[B, T]``.
        attention_mask, positions: See `CausalLM.__call__`.
        tolerance: Largest relative difference due to rounding. Defaults to 2e-4 if both sides are in float32, else
            to 5e-2.

    Raises:
        ValueError: The sides cannot be compared: both are recorded, or their layers or shapes differ.
    """
    tokens = np.asarray(tokens)
    valid = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    sides = [_side_of(side, (tokens, attention_mask, positions)) for side in (model, reference)]
    if all(side.run is None for side in sides):
        raise ValueError("model and reference are both Recorded: pass a model that can be run as one of them")
    with jax.default_matmul_precision("highest"):
        ours, theirs = (_outputs(side, tokens.shape, other) for side, other in (sides, sides[::-1]))
        _check_shapes(ours, theirs)
        flips = {layer: _differs(ids, theirs.experts[layer]) & valid for layer, ids in sorted(ours.experts.items())}
        first = next((layer for layer, flipped in flips.items() if flipped.any()), None)
        difference = forced = _gap(ours.logits, theirs.logits, valid)
        if first is not None:
            run, wanted = (sides[0].run, theirs) if sides[0].run else (sides[1].run, ours)
            assert run is not None
            forced = _gap(np.asarray(run(wanted.experts).logits), wanted.logits, valid)
    margin = router_difference = None
    if first is not None:
        margin = _margin(ours, theirs, first, flips[first], [side.routers().get(first) for side in sides])
        if first in ours.router_logits and first in theirs.router_logits:
            router_difference = _gap(ours.router_logits[first], theirs.router_logits[first], valid)
    if tolerance is None:
        tolerance = _default_tolerance([dtype for side in sides for dtype in side.dtypes])
    close = all(value <= tolerance for value in (forced, margin, router_difference) if value is not None)
    return Comparison(
        verdict="bug" if not close else "equal" if first is None else "rounding",
        tokens=int(valid.sum()),
        flipped={layer: int(flipped.sum()) for layer, flipped in flips.items()},
        first_layer=first,
        margin=margin,
        router_difference=router_difference,
        difference=difference,
        forced=forced,
        tolerance=tolerance,
    )


@dataclasses.dataclass(frozen=True)
class _Router:
    """Select function of an MoE layer with its correction bias."""

    select: Any
    bias: np.ndarray | None

    def experts(self, logits: np.ndarray) -> np.ndarray:
        return np.asarray(self.select(jnp.asarray(logits), self.bias).experts)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One of the compared models.

    Attributes:
        run: Function from given expert ids, or None, to the output of the model. None for recorded outputs.
        routers: Returns the routers by layer. Empty for recorded outputs.
        dtypes: Dtypes of weights and activations.
        recorded: The recorded outputs, if any.
    """

    run: Callable[[Any], Any] | None
    routers: Callable[[], dict[int, _Router]]
    dtypes: Sequence[Any]
    recorded: Recorded | None = None


def _side_of(side: Any, inputs: tuple[Any, ...]) -> _Side:
    if isinstance(side, Recorded):
        return _Side(None, dict, [jnp.result_type(side.logits)], side)
    if isinstance(side, CausalLM):
        run = functools.partial(side, *inputs, return_routing=True)
        return _Side(lambda routing: run(routing=routing), lambda: _routers(side), [side.dtype])
    if isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], LinenCausalLM):
        module, variables = side
        run = functools.partial(module.apply, variables, *inputs, return_routing=True)
        dtypes = list(map(jnp.result_type, jax.tree.leaves(variables)))
        if module.strategy is not None and module.strategy.compute_dtype is not None:
            dtypes.append(module.strategy.compute_dtype)
        return _Side(
            lambda routing: run(routing=routing), lambda: _routers(from_linen(variables, module.config)), dtypes
        )
    raise ValueError(
        f"cannot compare a {type(side).__name__}: pass an nnxmoe model, a pair (LinenCausalLM, variables), or "
        "testing.Recorded(logits, experts=…)"
    )


def _routers(model: CausalLM) -> dict[int, _Router]:
    starts = np.repeat(
        np.cumsum([0, *(stack.depth for stack in model.stacks)])[:-1], [stack.depth for stack in model.stacks]
    )
    routers = {}
    for layer, router in moe_routers(model).items():
        bias = None if router.bias is None else np.asarray(router.bias[...])
        if bias is not None and bias.ndim > 1:  # of stacked layers
            bias = bias.reshape(-1, bias.shape[-1])[layer - starts[layer]]
        routers[layer] = _Router(router.select, bias)
    return routers


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Outputs of one side by layer. Router logits and scores are absent if they are unknown."""

    logits: np.ndarray
    experts: dict[int, np.ndarray]
    router_logits: dict[int, np.ndarray]
    scores: dict[int, np.ndarray]


def _outputs(side: _Side, shape: tuple[int, ...], other: _Side) -> _Outputs:
    """Run a side or read its recorded outputs. The routers of the other side choose experts from recorded logits."""
    if side.run is not None:
        out = side.run(None)
        routing = {layer: jax.tree.map(np.asarray, routing) for layer, routing in out.routing.items()}
        experts, router_logits, scores = (
            {layer: getattr(each, name) for layer, each in routing.items()} for name in ("experts", "logits", "scores")
        )
        return _Outputs(np.asarray(out.logits), experts, router_logits, scores)
    assert side.recorded is not None
    recorded = side.recorded
    router_logits = {
        layer: np.asarray(array, np.float32).reshape(*shape, -1) for layer, array in recorded.router_logits.items()
    }
    experts = {layer: np.asarray(ids) for layer, ids in recorded.experts.items()}
    routers = {layer: router for layer, router in other.routers().items() if layer in router_logits.keys() - experts}
    experts |= {layer: router.experts(router_logits[layer]) for layer, router in routers.items()}
    return _Outputs(np.asarray(recorded.logits, np.float32), experts, router_logits, {})


def _check_shapes(ours: _Outputs, theirs: _Outputs) -> None:
    shapes = [
        {"logits": a.logits.shape} | {f"experts of layer {i}": ids.shape for i, ids in sorted(a.experts.items())}
        for a in (ours, theirs)
    ]
    for name in {**shapes[0], **shapes[1]}:
        if shapes[0].get(name) != shapes[1].get(name):
            found = [f"{list(a[name])}" if name in a else "missing" for a in shapes]
            raise ValueError(f"{name}: {found[0]} in the model, {found[1]} in the reference. They must be equal")


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.sort(a, -1) != np.sort(b, -1)).any(-1)


def _gap(a: np.ndarray, b: np.ndarray, valid: np.ndarray) -> float:
    return measure_gap(a[valid], b[valid]).error


def _margin(
    ours: _Outputs, theirs: _Outputs, layer: int, flipped: np.ndarray, routers: Sequence[_Router | None]
) -> float | None:
    """Return the largest margin of the flipped tokens of a layer.

    The margin of a token is the gap between the scores of the experts that only one side chose. With groups of experts,
    the scores of groups may be closer. The margin is then the difference of the router logits, if one router maps the
    logits of both sides to their experts.
    """
    margins, outputs = [], (ours, theirs)
    for side, other, router in zip(outputs, outputs[::-1], routers, strict=True):
        if layer in side.scores:
            bias = 0 if router is None or router.bias is None else router.bias
            scores = side.scores[layer][flipped] + bias
            own, their = (_one_hot(s.experts[layer][flipped], scores.shape[-1]) for s in (side, other))
            lowest = np.where(own & ~their, scores, np.inf).min(-1)
            highest = np.where(their & ~own, scores, -np.inf).max(-1)
            margins.append(np.abs(lowest - highest) / np.abs(scores).max(-1))
    router = next(router for router in routers if router is not None)
    if all(layer in side.router_logits for side in outputs):
        a, b = (side.router_logits[layer][flipped] for side in outputs)
        is_explained = np.ones(len(a), bool)
        for side, logits in zip(outputs, (a, b), strict=True):
            is_explained &= ~_differs(router.experts(logits), side.experts[layer][flipped])
        change = np.abs(a - b).max(-1) / np.maximum(np.abs(b).max(-1), 1)
        margins.append(np.where(is_explained, change, np.inf))
    return float(np.min(margins, axis=0).max()) if margins else None


def _one_hot(ids: np.ndarray, count: int) -> np.ndarray:
    return (ids[..., None] == np.arange(count)).any(-2)


def _default_tolerance(dtypes: Sequence[Any]) -> float:
    is_float32 = all(jnp.finfo(dtype).bits >= 32 for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    return 2e-4 if is_float32 else 5e-2
