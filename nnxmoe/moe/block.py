"""The feed-forward block of a mixture-of-experts layer."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.context import Context, Fed
from nnxmoe.layers.mlp import MLP
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEInfo:
    """A MoE layer's routing, or the result of `Context.of_routing` applied to it, and its dispatch statistics."""

    routing: Any
    dispatch: DispatchInfo


class MoEOutput(NamedTuple):
    """The layer's output, the routing of every token, and the dispatch statistics."""

    y: Float[Array, "B T D"]
    routing: Routing
    dispatch: DispatchInfo


class MoE(nnx.Module):
    """``x[B T D] -> y``: routed experts, plus an optional shared expert applied to every token."""

    name: ClassVar[str] = "moe"

    def __init__(
        self, router: Router, experts: Experts, dispatch: Dispatch, shared: MLP | None, mesh: AnyMesh | None = None
    ):
        self.router = router
        self.experts = experts
        self.dispatch = dispatch
        self.shared = shared
        self.mesh = mesh

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None, key: Key[Array, ""] | None = None
    ) -> MoEOutput:
        routing = self.router(x, valid, self.mesh, key)
        y, info = self.dispatch(x, routing, self.experts, self.mesh)
        if self.shared is not None:
            y = y + self.shared(x)
        return MoEOutput(y, routing, info)

    def feed(self, x: Float[Array, "B T D"], context: Context) -> Fed:
        """Implements `FeedForward`: the output and a `MoEInfo`."""
        y, routing, info = self(x, context.valid, context.key)
        return Fed(y, MoEInfo(routing if context.of_routing is None else context.of_routing(routing), info))

    def separates_tokens(self, key: Key[Array, ""] | None) -> bool:
        """False if tokens compete for capacity, or if routing depends on a token's index in the batch."""
        alone = getattr(self.dispatch, "by_token", False) and self.router.select.by_row
        return alone and (key is None or not self.router.jitter)
