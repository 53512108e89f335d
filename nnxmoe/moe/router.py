"""Routers: modules that compute one logit per expert and select the experts of each token."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.kernel import Adapter, as_weight, kernel_param, with_adapter
from nnxmoe.moe.selection import Routing, Select
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_map


class RouterBias(nnx.Variable):
    """Correction bias of DeepSeek's routing. Updated by `nnxmoe.moe.balance.update_bias` instead of a gradient."""


class LogitBias(nnx.Module):
    """Trained bias ``[E]`` of the logits. It affects both the selection and the weights (gpt-oss, 2025)."""

    def __init__(self, experts: int, **kw: Unpack[ParamOptions]):
        self.values = parameter((experts,), ("router",), nnx.initializers.zeros, **kw)

    def __call__(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return logits + jnp.broadcast_to(self.values[...].astype(logits.dtype), logits.shape)


class Router(nnx.Module):
    """Linear map to one logit per expert, followed by a `Select` function. The kernel is ``[E, D]``.

    Args:
        dim: Width of the tokens, D.
        experts: Number of experts, E.
        select: Selects the experts from the logits.
        bias: Whether to create a correction bias, a `RouterBias`.
        jitter: Amplitude of the input noise. If the context has a key, the input is multiplied by uniform noise in
            [1 - jitter, 1 + jitter) (Switch Transformer; Fedus et al. 2021).
        logit_bias: Optional trained bias of the logits.
        **kw: Parameter dtype and rngs.
    """

    adapted: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora": ("kernel",)}

    def __init__(
        self,
        dim: int,
        experts: int,
        select: Select,
        *,
        bias: bool,
        jitter: float = 0.0,
        logit_bias: LogitBias | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.lora: Adapter | None = None
        self.select = select
        self.jitter = jitter
        self.logit_bias = logit_bias
        self.kernel = kernel_param((dim,), (experts,), ("embed", "router"), **kw)
        correction = None
        if bias:
            zeros, f32 = nnx.initializers.zeros, jnp.dtype(jnp.float32)
            correction = parameter(
                (experts,), ("router",), zeros, dtype=f32, rngs=kw["rngs"], param_type=RouterBias, keeps_dtype=True
            )
        self.bias = correction

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        """Route each token to its experts in the context, or else to the experts that ``select`` returns.

        Without a context, no token is padding, no jitter is applied and ``select`` returns the experts of all tokens.
        """
        valid, key = (None, None) if context is None else (context.valid, context.key)
        experts = None if context is None or context.experts is None else context.given_experts()
        routing = self._select_experts(self._compute_logits(x, key), experts, mesh)
        return dataclasses.replace(routing, valid=valid)

    def _compute_logits(self, x: Float[Array, "*rows D"], key: Key[Array, ""] | None) -> Float[Array, "*rows E"]:
        x = x.astype(jnp.float32)
        if self.jitter and key is not None:
            x = x * jax.random.uniform(key, x.shape, jnp.float32, 1 - self.jitter, 1 + self.jitter)
        kernel = with_adapter(as_weight(self.kernel).read(), self.lora)
        # HIGHEST, because rounding errors would change the selected experts if scores are nearly equal.
        logits = kernel.matmul_f32(x, jax.lax.Precision.HIGHEST)
        return logits if self.logit_bias is None else self.logit_bias(logits)

    def _select_experts(
        self, logits: Float[Array, "*rows E"], experts: Int[Array, "*rows X"] | None, mesh: AnyMesh | None
    ) -> Routing:
        bias = None if self.bias is None else self.bias[...]
        arguments: list[Any] = [logits, bias] if experts is None else [logits, bias, experts]
        batch_axes = batch_shard_axes(logits.shape[0], mesh)
        context_axes = context_shard_axes(logits.shape[1], mesh) if logits.ndim == 3 else ()
        if mesh is None or not (batch_axes or context_axes) or not self.token_independent(None):
            return self.select(*arguments)
        # With shard_map, top-k runs locally on each shard. Without shard_map, XLA:CPU gathers all tokens.
        tokens = PartitionSpec(batch_axes or None, context_axes or None)
        return shard_map(self.select, mesh, (tokens, PartitionSpec(), tokens)[: len(arguments)], tokens)(*arguments)

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the routing of a token is independent of other tokens and of the token's batch index."""
        return getattr(self.select, "token_independent", False) and (key is None or not self.jitter)
