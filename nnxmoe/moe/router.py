"""Routers: the experts of each token and their weights, computed in float32 (products included) on every platform.

NaN logits produce NaN weights and so NaN outputs.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Protocol, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.kernel import Adapter, as_weight, kernel_param, with_adapter
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_map


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Chosen experts per token with their weights, and the scores and logits they were chosen from.

    ``scores`` are the router's probabilities (softmax) or affinities (sigmoid), without any correction bias.
    ``valid`` is False for padding, which uses no capacity and is excluded from statistics; None: no padding.
    """

    experts: Int[Array, "*rows X"]
    weights: Float[Array, "*rows X"]
    scores: Float[Array, "*rows E"]
    logits: Float[Array, "*rows E"]
    valid: Bool[Array, "*rows"] | None = None


class Select(Protocol):
    """``(logits, bias | None) -> Routing``. Ties go to the lower expert index.

    ``token_independent``: whether each row is routed independently of the others. Each shard can then route its rows.
    """

    token_independent: ClassVar[bool]

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing: ...


class RouterBias(nnx.Variable):
    """The correction bias of DeepSeek's routing; set by `nnxmoe.moe.balance.updated_bias`, without a gradient."""


class LogitBias(nnx.Module):
    """A trained bias ``[E]`` of the logits, for the choice and the weights (gpt-oss 2025)."""

    def __init__(self, experts: int, **kw: Unpack[ParamOptions]):
        self.values = parameter((experts,), ("router",), nnx.initializers.zeros, **kw)

    def __call__(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return logits + jnp.broadcast_to(self.values[...].astype(logits.dtype), logits.shape)


@dataclasses.dataclass(frozen=True)
class SoftmaxTopK:
    """Softmax over all experts, then top ``k``, with weights rescaled to sum to 1 if ``normalize`` (Mixtral; Jiang et
    al. 2024), times ``scale``. With rescaling this equals a softmax over the top ``k`` logits.

    A correction bias affects the choice only, not the weights, whose sum is taken as at least
    ``min_weight_sum`` (ERNIE 4.5)."""

    token_independent: ClassVar[bool] = True

    k: int
    normalize: bool = True
    scale: float = 1.0
    min_weight_sum: float = 0.0

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing:
        scores = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(_biased(scores, bias), self.k)
        if bias is not None:
            weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (jnp.maximum(total, self.min_weight_sum) if self.min_weight_sum else total)
        return Routing(experts, weights * self.scale, scores, logits)


@dataclasses.dataclass(frozen=True)
class BalancedTopK:
    """A load test instead of a learned router: ignores the logits and assigns tokens to experts evenly (loads differ by
    at most one), with equal weights. Deterministic for a given ``seed``."""

    token_independent: ClassVar[bool] = False

    k: int
    seed: int = 0

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing:
        rows, count = logits.shape[:-1], logits.shape[-1]
        place = jax.random.permutation(jax.random.key(self.seed), math.prod(rows)).astype(jnp.int32)
        experts = (place[:, None] * self.k + jnp.arange(self.k, dtype=jnp.int32)[None, :]) % count
        even = jnp.full((*rows, self.k), 1 / self.k, jnp.float32)
        return Routing(experts.reshape(*rows, self.k), even, jax.nn.softmax(logits, axis=-1), logits)


@dataclasses.dataclass(frozen=True)
class SigmoidGroupTopK:
    """Sigmoid affinities, the top ``top_groups`` of ``groups`` by the sum of their two largest biased affinities, then
    the top ``k`` within those groups. The bias affects the choice only, not the weights (DeepSeek-V3, 2024).

    Experts outside the chosen groups are masked with -inf; with 0 they could win against negative biased affinities.
    """

    token_independent: ClassVar[bool] = True

    k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing:
        scores = jax.nn.sigmoid(logits)
        choice = _biased(scores, bias)
        grouped = choice.reshape(*choice.shape[:-1], self.groups, -1)
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = _highest(group_scores, self.top_groups)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
        _, experts = jax.lax.top_k(choice, self.k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalize:
            weights = _normalized(weights)
        lost = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)  # else NaN is lost if its group is not chosen
        return Routing(experts, jnp.where(lost, jnp.nan, weights * self.scale), scores, logits)


@dataclasses.dataclass(frozen=True)
class SoftmaxGroupTopK:
    """Softmax over all experts, the top ``top_groups`` of ``groups`` by their largest score, then the top ``k`` within
    those groups, weighted by their scores times ``scale`` (``group_limited_greedy``; DeepSeek-V2, 2024).

    Unlike in `SigmoidGroupTopK` one expert decides for its group, and there is no correction bias and no rescaling.
    Experts outside the chosen groups are masked with 0, as no score is negative.
    """

    token_independent: ClassVar[bool] = True

    k: int
    groups: int
    top_groups: int
    scale: float

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing:
        scores = jax.nn.softmax(logits, axis=-1)
        grouped = scores.reshape(*scores.shape[:-1], self.groups, -1)
        kept = _highest(jnp.max(grouped, axis=-1), self.top_groups)
        choice = jnp.where(kept[..., None], grouped, 0.0).reshape(scores.shape)
        weights, experts = jax.lax.top_k(choice, self.k)
        return Routing(experts, weights * self.scale, scores, logits)


@dataclasses.dataclass(frozen=True)
class SqrtSoftplusTopK:
    """Affinities ``sqrt(softplus(logit))``, the top ``k`` by biased affinity, weighted by the affinities without the
    bias, rescaled to sum to ``scale`` (DeepSeek-V4, 2026)."""

    token_independent: ClassVar[bool] = True

    k: int
    scale: float

    def __call__(self, logits: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Routing:
        scores = jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), 1e-30))  # without the bound 0 has an infinite slope
        choice = _biased(scores, bias)
        return self.chosen(jax.lax.top_k(choice, self.k)[1], scores, logits)

    def chosen(self, experts: Array, scores: Array, logits: Array) -> Routing:
        """The routing to these experts ``[*rows, X]``."""
        weights = _normalized(jnp.take_along_axis(scores, experts, axis=-1))
        return Routing(experts, weights * self.scale, scores, logits)


def _biased(scores: Float[Array, "*rows E"], bias: Float[Array, "E"] | None) -> Float[Array, "*rows E"]:
    return scores if bias is None else scores + jnp.broadcast_to(jax.lax.stop_gradient(bias), scores.shape)


def _highest(values: Float[Array, "*rows groups"], count: int) -> Bool[Array, "*rows groups"]:
    _, found = jax.lax.top_k(values, count)
    return jnp.any(jax.nn.one_hot(found, values.shape[-1], dtype=bool), axis=-2)


def _normalized(weights: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
    """``weights / (sum + 1e-20)``; without a gradient where all weights underflow, which would be 0 / 0."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    tiny = total < 1e-15
    usual = weights / (jnp.where(tiny, 1.0, total) + 1e-20)
    return jnp.where(tiny, jax.lax.stop_gradient(weights / (total + 1e-20)), usual)


class Router(nnx.Module):
    """``x[B T D] -> Routing`` by a linear map to one logit per expert; kernel ``[E, D]``, optional correction bias.

    ``logit_bias``: a bias of the logits, or None.

    ``jitter``: if a key is passed, the router's input is multiplied elementwise by uniform noise in
    [1 - jitter, 1 + jitter) (Switch Transformer, Fedus et al. 2021).
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
        zeros, f32 = nnx.initializers.zeros, jnp.dtype(jnp.float32)
        self.bias = (
            parameter(
                (experts,), ("router",), zeros, dtype=f32, rngs=kw["rngs"], param_type=RouterBias, keeps_dtype=True
            )
            if bias
            else None
        )

    def __call__(
        self, x: Float[Array, "*rows D"], context: Context | None = None, mesh: AnyMesh | None = None
    ) -> Routing:
        """The experts of each token. Without a context all tokens are real, and nothing is random."""
        valid, key = (None, None) if context is None else (context.valid, context.key)
        x = x.astype(jnp.float32)
        if self.jitter and key is not None:
            x = x * jax.random.uniform(key, x.shape, jnp.float32, 1 - self.jitter, 1 + self.jitter)
        # HIGHEST: with near ties, a less precise product would choose other experts.
        logits = with_adapter(as_weight(self.kernel).read(), self.lora).matmul_f32(x, jax.lax.Precision.HIGHEST)
        logits = logits if self.logit_bias is None else self.logit_bias(logits)
        bias = None if self.bias is None else self.bias[...]
        axes, over = batch_shard_axes(x.shape[0], mesh), context_shard_axes(x.shape[1], mesh) if x.ndim == 3 else ()
        # shard_map keeps top-k local to each shard; without it XLA:CPU gathers all tokens.
        if (axes or over) and self._token_independent:
            rows = PartitionSpec(axes or None, over or None)
            assert mesh is not None
            routing = shard_map(self.select, mesh, (rows, PartitionSpec()), rows)(logits, bias)
        else:
            routing = self.select(logits, bias)
        return dataclasses.replace(routing, valid=valid)

    @property
    def _token_independent(self) -> bool:
        return getattr(self.select, "token_independent", False)

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """False if routing depends on a token's index in the batch."""
        return self._token_independent and (key is None or not self.jitter)
