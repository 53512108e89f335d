"""Routers specific to one model family."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.norm import rms_normalize
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import Routing, Select, SqrtSoftplusTopK


class ScaledRouter(Router):
    """`Router` with normalized input and one trained factor per expert (Gemma 4, 2026).

    The input of the linear map is ``rms_normalize(x) * scale / sqrt(D)``. The weights are multiplied by ``per_expert``.
    """

    def __init__(self, dim: int, experts: int, select: Select, *, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, experts, select, bias=False, **kw)
        self.eps, ones = eps, nnx.initializers.ones
        self.scale = parameter((dim,), ("norm",), ones, **kw)
        self.per_expert = parameter((experts,), ("router",), ones, **kw)

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        scale = self.scale[...].astype(x.dtype) * x.shape[-1] ** -0.5
        routing = super().__call__(
            rms_normalize(x, self.eps) * jnp.broadcast_to(scale, x.shape), context=context, mesh=mesh
        )
        factors = self.per_expert[...].astype(jnp.float32)[routing.experts]
        return dataclasses.replace(routing, weights=routing.weights * factors)


class TokenExpertTable(nnx.Variable):
    """Untrained int32 table ``[V, X]`` of expert ids per token id. Its metadata ``below`` is the number of experts."""


class HashRouter(Router):
    """Router for hash routing (Roller et al. 2021; the first layers of DeepSeek-V4, 2026).

    A table maps each token id to experts. The weights of the experts are computed from the activations. Raises
    ValueError if the context has no token ids.
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
            param_type=TokenExpertTable,
            keeps_dtype=True,
        )
        self.table.set_metadata(below=experts)

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        if context is None or context.tokens is None:
            raise ValueError(
                "HashRouter needs token ids, but the context has none. Call the model, or pass Context(tokens=…)."
            )
        logits = self._compute_logits(x, context.key)
        scores, selected = self.select.compute_scores(logits), self.table[...][context.tokens]
        routing = self.select.route(logits, scores, selected, context.given_experts())
        return dataclasses.replace(routing, valid=context.valid)
