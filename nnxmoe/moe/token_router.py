"""Routing by token ids (Roller et al. 2021; the first layers of DeepSeek-V4, 2026)."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.moe.router import Router, Routing, SqrtSoftplusTopK


class TokenExperts(nnx.Variable):
    """The experts of every token id ``[V, X]``, int32, which nothing trains; all are less than ``below``."""


class TokenRouter(Router):
    """The experts of a token are those of its id; the activations give their weights.

    Raises ValueError without a context that has the ids.
    """

    select: SqrtSoftplusTopK

    def __init__(self, dim: int, experts: int, select: SqrtSoftplusTopK, vocab: int, **kw: Unpack[ParamOptions]):
        super().__init__(dim, experts, select, bias=False, **kw)
        int32, zeros = jnp.dtype(jnp.int32), nnx.initializers.zeros
        self.table = parameter(
            (vocab, select.k), (None, None), zeros, dtype=int32, rngs=kw["rngs"], kind=TokenExperts, keeps_dtype=True
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
