"""Routers of single families: a scaled router (Gemma 4, 2026), and hash routing by token ids (DeepSeek-V4, 2026)."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.norm import unit_rms
from nnxmoe.moe.router import Router, Routing, Select, SqrtSoftplusTopK


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


class TokenExpertTable(nnx.Variable):
    """The experts of every token id ``[V, X]``, int32, which nothing trains; all are less than ``below``."""


class HashRouter(Router):
    """The experts of a token are those of its id; the activations give their weights.

    Raises ValueError without a context that has the ids.
    """

    select: SqrtSoftplusTopK

    def __init__(self, dim: int, experts: int, select: SqrtSoftplusTopK, vocab: int, **kw: Unpack[ParamOptions]):
        super().__init__(dim, experts, select, bias=False, **kw)
        int32, zeros = jnp.dtype(jnp.int32), nnx.initializers.zeros
        self.table = parameter(
            (vocab, select.k),
            (None, None),
            zeros,
            dtype=int32,
            rngs=kw["rngs"],
            kind=TokenExpertTable,
            keeps_dtype=True,
        )
        self.table.set_metadata(below=experts)

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        if context is None or context.tokens is None:
            raise ValueError(
                "a router by token ids needs a context with tokens: call the model, or give Context(tokens=…)"
            )
        found = super().__call__(x, context=context, mesh=mesh)
        routing = self.select.chosen(self.table[...][context.tokens], found.scores, found.logits)
        return dataclasses.replace(routing, valid=found.valid)
