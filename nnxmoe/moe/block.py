"""The feed-forward block of a mixture-of-experts layer."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.mlp import MLP
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEInfo:
    """What a MoE layer did: its routing, or what was asked of it (`Context.of_routing`), and what the dispatch
    reported."""

    routing: Any
    dispatch: DispatchInfo


class MoE(nnx.Module):
    """``x[B T D] -> y``: routed experts, plus a shared expert that sees every token where there is one."""

    def __init__(
        self, router: Router, experts: Experts, dispatch: Dispatch, shared: MLP | None, mesh: AnyMesh | None = None
    ):
        self.router = router
        self.experts = experts
        self.dispatch = dispatch
        self.shared = shared
        self.mesh = mesh

    @property
    def by_token(self) -> bool:
        """Whether what a token gets does not depend on which others are there."""
        return getattr(self.dispatch, "by_token", False) and self.router.select.by_row

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None, key: Key[Array, ""] | None = None
    ) -> tuple[Float[Array, "B T D"], Routing, DispatchInfo]:
        routing = self.router(x, valid, self.mesh, key)
        y, info = self.dispatch(x, routing, self.experts, self.mesh)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, routing, info
