"""Logits and routing of language models for `nnxmoe.testing.compare`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.linen import LinenCausalLM, from_linen
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.given_routing import moe_routers

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
class ExpertSelector:
    """Select function of an MoE layer with its correction bias."""

    select: Any
    bias: np.ndarray | None

    def select_experts(self, logits: np.ndarray) -> np.ndarray:
        """Return the ids of the experts that the router selects from its logits."""
        bias = None if self.bias is None else jnp.asarray(self.bias)
        return np.asarray(self.select(jnp.asarray(logits), bias).experts)


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two compared models.

    Attributes:
        run: Runs the model, with given expert ids by layer or with None. None for recorded outputs.
        routers: Returns the routers by layer. Returns an empty dict for recorded outputs.
        dtypes: Dtypes of weights and activations.
        recorded: The recorded outputs, if any.
    """

    run: Callable[[Any], Any] | None
    routers: Callable[[], dict[int, ExpertSelector]]
    dtypes: Sequence[Any]
    recorded: Recorded | None = None


def as_side(side: Any, inputs: tuple[Any, ...]) -> Side:
    """Convert an argument of `compare`. ``inputs`` are the arguments of the model's call.

    Raises:
        ValueError: ``side`` is not a model, a pair of a Linen module and variables, or `Recorded`.
    """
    if isinstance(side, Recorded):
        return Side(None, dict, [jnp.result_type(side.logits)], side)
    if isinstance(side, CausalLM):
        run = functools.partial(side, *inputs, return_routing=True)
        return Side(lambda routing: run(routing=routing), lambda: _routers(side), [side.dtype])
    if isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], LinenCausalLM):
        module, variables = side
        run = functools.partial(module.apply, variables, *inputs, return_routing=True)
        dtypes = list(map(jnp.result_type, jax.tree.leaves(variables)))
        if module.strategy is not None and module.strategy.compute_dtype is not None:
            dtypes.append(module.strategy.compute_dtype)
        return Side(
            lambda routing: run(routing=routing), lambda: _routers(from_linen(variables, module.config)), dtypes
        )
    raise ValueError(
        f"cannot compare a {type(side).__name__}: pass an nnxmoe model, a pair (LinenCausalLM, variables), or "
        "testing.Recorded(logits, experts=…)"
    )


def _routers(model: CausalLM) -> dict[int, ExpertSelector]:
    depths = [stack.depth for stack in model.stacks]
    first_layers = np.repeat(np.cumsum([0, *depths])[:-1], depths)  # by layer: the first layer of its stack
    routers = {}
    for layer, router in moe_routers(model).items():
        bias = None if router.bias is None else np.asarray(router.bias[...])
        if bias is not None and bias.ndim > 1:  # a scanned stack has one array for all layers
            bias = bias.reshape(-1, bias.shape[-1])[layer - first_layers[layer]]
        routers[layer] = ExpertSelector(router.select, bias)
    return routers


@dataclasses.dataclass(frozen=True)
class SideOutputs:
    """Logits of one side, and its routing by layer. Unknown router logits and scores are missing."""

    logits: np.ndarray
    experts: dict[int, np.ndarray]
    router_logits: dict[int, np.ndarray]
    scores: dict[int, np.ndarray]


def compute_outputs(side: Side, shape: tuple[int, ...], other: Side) -> SideOutputs:
    """Run a side, or read its recorded outputs.

    If only router logits are recorded, the routers of the other side select the experts.
    """
    if side.run is not None:
        out = side.run(None)
        experts = {layer: np.asarray(routing.experts) for layer, routing in out.routing.items()}
        router_logits = {layer: np.asarray(routing.logits) for layer, routing in out.routing.items()}
        scores = {layer: np.asarray(routing.scores) for layer, routing in out.routing.items()}
        return SideOutputs(np.asarray(out.logits), experts, router_logits, scores)
    assert side.recorded is not None
    recorded = side.recorded
    router_logits = {
        layer: np.asarray(array, np.float32).reshape(*shape, -1) for layer, array in recorded.router_logits.items()
    }
    experts = {layer: np.asarray(ids) for layer, ids in recorded.experts.items()}
    for layer, router in other.routers().items():
        if layer in router_logits and layer not in experts:
            experts[layer] = router.select_experts(router_logits[layer])
    return SideOutputs(np.asarray(recorded.logits, np.float32), experts, router_logits, {})
