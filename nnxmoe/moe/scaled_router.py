"""A router with a norm of its own, and a factor per expert (Gemma 4, 2026)."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.norm import unit_rms
from nnxmoe.moe.router import Router, Routing, Select


class ScaledRouter(Router):
    """A `Router` of ``unit(x) * scale / sqrt(D)``, whose weights are multiplied by ``per_expert``, a factor for each
    expert."""

    def __init__(self, dim: int, experts: int, select: Select, *, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, experts, select, bias=False, **kw)
        self.eps, ones = eps, nnx.initializers.ones
        self.scale = parameter((dim,), ("norm",), ones, **kw)
        self.per_expert = parameter((experts,), ("router",), ones, **kw)

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        scale = self.scale[...].astype(x.dtype) * x.shape[-1] ** -0.5
        routing = super().__call__(unit_rms(x, self.eps) * jnp.broadcast_to(scale, x.shape), context=context, mesh=mesh)
        factors = self.per_expert[...].astype(jnp.float32)[routing.experts]
        return dataclasses.replace(routing, weights=routing.weights * factors)
