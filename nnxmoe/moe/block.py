"""Mixture-of-experts feed-forward block."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.context import Context, FeedForwardOutput, token_independent
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEInfo:
    """Routing and dispatch statistics of an MoE layer.

    Attributes:
        routing: The `Routing`, or the result of `OutputRequest.reduce_routing` if that function is set.
        dispatch: Dispatch statistics.
    """

    routing: PyTree
    dispatch: DispatchInfo


class MoE(nnx.Module):
    """Feed-forward block with routed experts and an optional shared expert.

    Args:
        router: Selects each token's experts and the weights of their outputs.
        experts: Routed experts.
        dispatch: Sends tokens to the experts and combines the outputs.
        shared: Shared expert, applied to every token.
        mesh: Device mesh of the tokens and the experts.
        norm: Normalizes the input of all experts. The router reads the input before normalization.
    """

    name: ClassVar[str] = "moe"

    def __init__(
        self,
        router: Router,
        experts: Experts,
        dispatch: Dispatch,
        shared: Callable[[Array], Array] | None,
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
        """Return the output and an `MoEInfo`. Without a context, no token is padding and no jitter is applied."""
        routing = self.router(x, context=context, mesh=self.mesh)
        if self.norm is not None:
            x = self.norm(x)
        y, info = self._apply_routed_experts(x, routing)
        if self.shared is not None:
            y = y + self.shared(x)
        if context is not None and context.request.reduce_routing is not None:
            return FeedForwardOutput(y, MoEInfo(context.request.reduce_routing(routing), info))
        return FeedForwardOutput(y, MoEInfo(routing, info))

    def _apply_routed_experts(
        self, x: Float[Array, "B T D"], routing: Routing
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        if not hasattr(self.experts, "count"):
            name = type(self.experts).__name__
            raise ValueError(f"moe.experts is a {name} without count. Define count and rules, as in Experts.")
        return self.dispatch(x, routing, self.experts, self.mesh)

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the output for a token is independent of the other tokens and of the token's batch index.

        Returns False if tokens compete for capacity, or if the routing depends on a token's index in the batch.
        """
        return getattr(self.dispatch, "token_independent", False) and token_independent(self.router, key)


class LatentMoE(MoE):
    """`MoE` whose routed experts are narrower than the tokens (Nemotron 3 Super, 2026).

    Args:
        *args: Positional arguments of `MoE`.
        reduce: Projects the tokens to the width of the experts.
        expand: Projects the weighted sum of the expert outputs back to the width of the tokens.
        latent_norm: Normalizes the weighted sum before ``expand`` (Kimi K3, 2026).
    """

    def __init__(self, *args: Any, reduce: Linear, expand: Linear, latent_norm: Callable[[Array], Array] | None = None):
        super().__init__(*args)
        self.reduce, self.expand, self.latent_norm = reduce, expand, latent_norm

    def _apply_routed_experts(
        self, x: Float[Array, "B T D"], routing: Routing
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        y, info = super()._apply_routed_experts(self.reduce(x), routing)
        return self.expand(y if self.latent_norm is None else self.latent_norm(y)), info
