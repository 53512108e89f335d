"""Given routing: validation of the expert ids that a caller passes to a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnxmoe.config.printable import short
from nnxmoe.layers.context import check_call
from nnxmoe.layers.linear.kernel import as_weight
from nnxmoe.model.output import ByLayer
from nnxmoe.model.stack import UnrolledStack
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import Routing


def check_routing(model: Any, routing: Any, shape: tuple[int, ...], mask: Any = None) -> ByLayer | None:
    """Convert the argument ``routing`` of a model's call to integer arrays ``[B, T, X]`` by layer.

    Args:
        model: A `CausalLM`.
        routing: See `CausalLM.__call__`.
        shape: Shape of the tokens, ``(B, T)``.
        mask: 0 for padding, or None. Ids of padding are not checked.

    Raises:
        ValueError: A layer has no router, a dtype or shape is wrong, an id is out of range, or a token has an expert
            twice. The values of traced arrays and of arrays on other processes are not checked.
    """
    if routing is None:
        return None
    routers = moe_routers(model)
    if not isinstance(routing, Mapping):
        routing = _split_layers(routing, list(routers), shape)
    if unknown := [layer for layer in routing if layer not in routers]:
        raise ValueError(f"routing[{unknown[0]!r}]: the layers with routers are {short(list(routers))}")
    layer_ids = ByLayer({i: _check_layer(i, routing[i], routers[i], shape) for i in sorted(routing)})
    for layer, ids in layer_ids.items():
        if _has_values(ids) and _has_values(mask):
            _check_values(f"routing[{layer}]", ids, mask, as_weight(routers[layer].kernel).outs[0])
    return layer_ids


def moe_routers(model: Any) -> dict[int, Router]:
    """Return the router of each MoE layer by layer index. All layers of a scanned stack share one router object."""
    layers: list[Any] = []
    for stack in model.stacks:
        layers += stack.layers if isinstance(stack, UnrolledStack) else [stack.layer] * stack.depth
    routers = dict[int, Router]()
    for index, layer in enumerate(layers):
        for _, module in nnx.iter_graph(layer):
            if isinstance(module, Router):
                routers[index] = module
    return routers


def _split_layers(routing: Any, layers: list[int], shape: tuple[int, ...]) -> dict[int, Any]:
    """Split ids ``[B, T, L, X]``, or ``[T, L, X]`` of a single row, into arrays per layer."""
    ids = _as_ids("routing", routing)
    xp = np if isinstance(ids, np.ndarray) else jnp
    ids = ids[None] if len(ids.shape) == 3 and shape[0] == 1 else ids
    if len(ids.shape) != 4 or ids.shape[2] != len(layers):
        raise ValueError(
            f"routing has the shape {list(ids.shape)}: pass expert ids [B, T, L, X] with L = {len(layers)}, the number "
            f"of MoE layers, or a dict from the layers {short(layers)} to ids [B, T, X]"
        )
    if ids.shape[1] == shape[1] - 1:  # routing of a `Completion`, without the last id, which was never an input
        ids = xp.pad(ids.astype(np.int32), ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=-1)
    return {layer: ids[:, :, i] for i, layer in enumerate(layers)}


def _check_layer(layer: int, routing: Any, router: Router, shape: tuple[int, ...]) -> Any:
    name = f"routing[{layer}]"
    check_call(f"the router's select in layer {layer}", router.select, "experts")
    ids = _as_ids(name, routing.experts if isinstance(routing, Routing) else routing)
    expected = (*shape, getattr(router.select, "k", ids.shape[-1] if ids.shape else 0))
    if ids.shape != expected:
        raise ValueError(f"{name} has the shape {list(ids.shape)}: expert ids are [B, T, X], here {list(expected)}")
    return ids


def _as_ids(name: str, ids: Any) -> Any:
    if not isinstance(ids, jax.Array | np.ndarray):
        try:
            ids = np.asarray(ids)
        except ValueError:
            raise ValueError(f"{name} must be an array of expert ids, got {short(ids)}") from None
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} has the dtype {ids.dtype}: expert ids must be integers")
    return ids


def _check_values(name: str, ids: Any, mask: Any, count: int) -> None:
    """Raise ValueError if a token has an id out of range, or an expert twice. Padding is not checked."""
    tokens = np.asarray(ids).reshape(-1, ids.shape[-1])
    if mask is not None:
        tokens = tokens[np.asarray(mask).reshape(-1) != 0]
    invalid = tokens[(tokens < -1) | (tokens >= count)]
    if invalid.size:
        raise ValueError(f"{name}: expert ids must be in 0 … {count - 1}, or -1, got {invalid[0]}")
    ordered = np.sort(tokens, axis=-1)
    repeated = ordered[:, 1:][(ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)]
    if repeated.size:
        raise ValueError(f"{name}: a token has expert {repeated[0]} twice. Tokens without given experts have the id -1")


def _has_values(array: Any) -> bool:
    """Return whether this process can read the array."""
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)
