"""The feed-forward block of a mixture-of-experts layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.context import Context, FeedForward, FeedForwardOutput, token_independent
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEInfo:
    """A MoE layer's routing, or what `Context.reduce_routing` kept of it, and its dispatch statistics."""

    routing: Any
    dispatch: DispatchInfo


class MoE(nnx.Module):
    """``x[B T D] -> y``: routed experts, plus an optional shared expert applied to every token.

    ``norm`` is applied to the input of the experts, but not of the router; None: both read x."""

    name: ClassVar[str] = "moe"

    def __init__(
        self,
        router: Router,
        experts: Experts,
        dispatch: Dispatch,
        shared: FeedForward | None,
        mesh: AnyMesh | None = None,
        norm: Callable[[Array], Array] | None = None,
    ):
        self.router = router
        self.experts = experts
        self.dispatch = dispatch
        self.shared = shared
        self.mesh = mesh
        self.norm = norm

    def __call__(self, x: Float[Array, "B T D"], context: Context | None = None) -> FeedForwardOutput:
        """The output ``y`` and ``info``. Without a context all tokens are real, and nothing is random."""
        routing = self.router(x, context=context, mesh=self.mesh)
        keep = None if context is None else context.reduce_routing
        x = x if self.norm is None else self.norm(x)
        y, info = self._routed(x, routing)
        if self.shared is not None:
            y = y + self.shared(x)
        return FeedForwardOutput(y, MoEInfo(routing if keep is None else keep(routing), info))

    def _routed(self, x: Float[Array, "B T D"], routing: Routing) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        if not hasattr(self.experts, "count"):
            kind = type(self.experts).__name__
            raise ValueError(f"moe.experts, a {kind}, must define count and rules, as Experts does")
        return self.dispatch(x, routing, self.experts, self.mesh)

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """False if tokens compete for capacity, or if routing depends on a token's index in the batch."""
        return getattr(self.dispatch, "token_independent", False) and token_independent(self.router, key)


class LatentMoE(MoE):
    """`MoE` whose routed experts read ``reduce(x)``, of a smaller width; ``expand`` maps their sum back (Nemotron 3
    Super, 2026)."""

    def __init__(self, *args: Any, reduce: Linear, expand: Linear):
        super().__init__(*args)
        self.reduce, self.expand = reduce, expand

    def _routed(self, x: Float[Array, "B T D"], routing: Routing) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        y, info = super()._routed(self.reduce(x), routing)
        return self.expand(y), info
