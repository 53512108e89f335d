"""Outputs of a model and of its parts."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.layers.cache import Cache
from nnxmoe.layers.context import OutputRequest
from nnxmoe.moe.router import Routing

Ids = Int[Array, "B T"] | Int[np.ndarray, "B T"]
TokenMask = Ids | Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


@jax.tree_util.register_pytree_node_class
class ByLayer(dict[int, Any]):
    """Layer index -> a value of that layer; layers without one are absent.

    Its pytree leaves are flat, because `nnx.tabulate` fails on dicts with integer keys.
    """

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Leaves and structure, for JAX."""
        return jax.tree.flatten(dict(self))

    @classmethod
    def tree_unflatten(cls, tree: Any, leaves: Any) -> Self:
        """The inverse of `tree_flatten`."""
        return cls(jax.tree.unflatten(tree, leaves))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Body:
    """Output of a stack, or of a model without its head.

    ``x``: hidden states of the requested tokens, or what else layers hand on (see `CausalLM.to_layer_input`).
    ``infos``: the `MoEInfo` of each layer with experts. ``hidden``: the output of every layer.
    ``mtp_hidden``: of a model, what its prediction layers read (`CausalLM.mtp_hidden`).
    """

    x: Any
    cache: Any
    infos: ByLayer
    hidden: tuple[Any, ...]
    mtp_hidden: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a model; parts that were not requested are None.

    ``routing``: layer index -> `Routing`, MoE layers only. ``dispatch``: layer index -> `DispatchInfo`, the load of the
    experts and the number of dropped assignments. ``hidden``: the embedding, the output of every layer, and last the
    normalised input of the head.
    """

    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    routing: ByLayer | None = None
    hidden: tuple[Float[Array, "B T D"], ...] | None = None
    dispatch: ByLayer | None = None


def drop_routing(routing: Routing) -> None:
    """Keep nothing of a layer's routing (see `OutputRequest.reduce_routing`)."""


EVERYTHING = OutputRequest()
LOGITS_ONLY = OutputRequest(all_hidden=False, reduce_routing=drop_routing)
