"""Output types of models and stacks."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from nnxmoe.layers.cache import Cache
from nnxmoe.layers.context import OutputRequest
from nnxmoe.moe.selection import Routing

Ids = Int[Array, "B T"] | Int[np.ndarray, "B T"]
TokenMask = Ids | Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


@jax.tree_util.register_pytree_node_class
class ByLayer(dict[int, Any]):
    """A dict from layer indices to values. Layers without a value are absent.

    Flattens to a list of leaves, because `nnx.tabulate` fails on dicts with integer keys.
    """

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Return the leaves and the structure, for JAX."""
        return jax.tree.flatten(dict(self))

    @classmethod
    def tree_unflatten(cls, tree: Any, leaves: Any) -> Self:
        """Rebuild the dict. Inverse of `tree_flatten`."""
        return cls(jax.tree.unflatten(tree, leaves))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Body:
    """Output of a stack, or of a model without its output head.

    Attributes:
        x: Hidden states of the requested tokens, or a pytree (see `CausalLM.to_layer_input`).
        cache: The updated cache, or None.
        infos: `MoEInfo` of each layer with experts.
        hidden: Output of every layer. Empty if not requested.
        mtp_hidden: States that prediction layers read (`CausalLM.mtp_hidden`). None for stacks.
    """

    x: PyTree
    cache: PyTree
    infos: ByLayer
    hidden: tuple[PyTree, ...]
    mtp_hidden: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a model. Fields that were not requested are None.

    Attributes:
        logits: Logits in float32.
        cache: The updated cache.
        routing: Layer index -> `Routing`, for layers with experts.
        hidden: The embedding, the output of every layer, and the normalized input of the output head.
        dispatch: Layer index -> `DispatchInfo`: load of the experts and number of dropped assignments.
    """

    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    routing: ByLayer | None = None
    hidden: tuple[Float[Array, "B T D"], ...] | None = None
    dispatch: ByLayer | None = None


def drop_routing(routing: Routing) -> None:
    """Discard a layer's routing. Used as `OutputRequest.reduce_routing`."""


def narrow_experts(routing: Routing) -> Integer[Array, "*rows X"]:
    """Return the ids of the selected experts in the smallest unsigned dtype. Used as `OutputRequest.reduce_routing`."""
    return routing.experts.astype(np.min_scalar_type(routing.logits.shape[-1] - 1))


EVERYTHING = OutputRequest()
LOGITS_ONLY = OutputRequest(all_hidden=False, reduce_routing=drop_routing)
