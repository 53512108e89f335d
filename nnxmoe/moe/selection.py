"""Functions that select the experts of each token from the router's logits, and compute their weights.

`Router` computes the logits in float32 on every platform. NaN logits produce NaN weights and therefore NaN outputs.
"""

import abc
import dataclasses
import math
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Selected experts and weights of each token.

    Attributes:
        experts: Ids of the X selected experts.
        weights: Weights of the selected experts' outputs, in float32.
        scores: Probabilities (softmax) or affinities (sigmoid) of all E experts, without the correction bias.
        logits: Outputs of the router's linear map.
        valid: Boolean mask, False for padding. Padding uses no capacity and is excluded from statistics. ``None`` if
            there is no padding.
        flipped: True for tokens whose given expert ids differ from the router's selection for the current input.
            ``None`` without given ids.
    """

    experts: Int[Array, "*rows X"]
    weights: Float[Array, "*rows X"]
    scores: Float[Array, "*rows E"]
    logits: Float[Array, "*rows E"]
    valid: Bool[Array, "*rows"] | None = None
    flipped: Bool[Array, "*rows"] | None = None


class Select(Protocol):
    """Protocol for functions that select experts from the router's logits. Ties go to the lower expert id.

    If ``experts`` is not None, tokens with nonnegative ids are routed to these experts. Their weights are computed from
    the logits. The function selects the experts of the other tokens. `SelectTopK` implements the protocol.

    Attributes:
        token_independent: Whether the routing of a token is independent of other tokens. If True, each device routes
            its shard of the tokens.
    """

    token_independent: ClassVar[bool]

    def __call__(
        self,
        logits: Float[Array, "*rows E"],
        bias: Float[Array, "E"] | None,
        experts: Int[Array, "*rows X"] | None = None,
    ) -> Routing: ...


class SelectTopK(abc.ABC):
    """Base class of `Select` functions with three steps: scores, expert ids, and weights of the selected experts."""

    token_independent: ClassVar[bool] = True

    def __call__(
        self,
        logits: Float[Array, "*rows E"],
        bias: Float[Array, "E"] | None,
        experts: Int[Array, "*rows X"] | None = None,
    ) -> Routing:
        """Route tokens by their logits. See `Select` for ``experts``."""
        scores = biased_scores = self.compute_scores(logits)
        if bias is not None:
            biased_scores = scores + jnp.broadcast_to(jax.lax.stop_gradient(bias), scores.shape)
        return self.route(logits, scores, self.top_k(biased_scores), experts)

    def route(
        self,
        logits: Float[Array, "*rows E"],
        scores: Float[Array, "*rows E"],
        selected: Int[Array, "*rows X"],
        experts: Int[Array, "*rows X"] | None,
    ) -> Routing:
        """Route each token to its ``experts``, or to its ``selected`` experts if one of these ids is negative."""
        flipped = None
        if experts is not None:
            experts = jnp.where(jnp.all(experts >= 0, axis=-1, keepdims=True), experts, selected)
            flipped = jnp.any(jnp.sort(experts, axis=-1) != jnp.sort(selected, axis=-1), axis=-1)
            selected = experts
        # Gather from the scores of all experts, because the top-k scores do not contain the scores of given experts.
        weights = self.compute_weights(jnp.take_along_axis(scores, selected, axis=-1))
        return Routing(selected, weights, scores, logits, flipped=flipped)

    @abc.abstractmethod
    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """Compute the score of each expert, without the correction bias."""

    @abc.abstractmethod
    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        """Return the ids of the selected experts. ``scores`` include the correction bias."""

    @abc.abstractmethod
    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        """Compute the weights of the selected experts from the scores of these experts."""


@dataclasses.dataclass(frozen=True)
class SoftmaxTopK(SelectTopK):
    """Softmax over all experts, then top-k (Mixtral; Jiang et al. 2024). The bias affects the selection only.

    Attributes:
        k: Number of experts per token.
        normalize: Whether to divide the weights by their sum. This is equivalent to a softmax over the top-k logits.
        scale: Scale factor for the weights.
        min_weight_sum: Lower bound on the divisor used by ``normalize`` (ERNIE 4.5). 0 disables the bound.
    """

    k: int
    normalize: bool = True
    scale: float = 1.0
    min_weight_sum: float = 0.0

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return jax.nn.softmax(logits, axis=-1)

    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        return jax.lax.top_k(scores, self.k)[1]

    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        if not self.normalize:
            return scores * self.scale
        weight_sum = jnp.sum(scores, axis=-1, keepdims=True)
        if self.min_weight_sum:
            weight_sum = jnp.maximum(weight_sum, self.min_weight_sum)
        return scores / weight_sum * self.scale


@dataclasses.dataclass(frozen=True)
class BalancedTopK(SelectTopK):
    """Balanced selection for load tests: ignores the logits and assigns the same number of tokens to each expert.

    Loads differ by at most one token. All weights are ``1 / k``. The selection is deterministic for a given ``seed``.
    """

    token_independent: ClassVar[bool] = False

    k: int
    seed: int = 0

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return jax.nn.softmax(logits, axis=-1)

    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        batch_shape, num_experts = scores.shape[:-1], scores.shape[-1]
        position = jax.random.permutation(jax.random.key(self.seed), math.prod(batch_shape)).astype(jnp.int32)
        experts = (position[:, None] * self.k + jnp.arange(self.k, dtype=jnp.int32)[None, :]) % num_experts
        return experts.reshape(*batch_shape, self.k)

    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        return jnp.full(scores.shape, 1 / self.k, jnp.float32)


@dataclasses.dataclass(frozen=True)
class SigmoidGroupTopK(SelectTopK):
    """Sigmoid affinities with group-limited top-k (DeepSeek-V3, 2024). The bias affects the selection only.

    The score of a group is the sum of the two largest biased affinities in the group. The top-k experts are selected
    from the ``top_groups`` best of ``groups`` groups. Experts in the remaining groups are masked with -inf, because
    biased affinities may be negative. ``epsilon`` is added to the divisor used by ``normalize`` (LFM2).
    """

    k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float
    epsilon: float = dataclasses.field(default=0.0, kw_only=True)

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        has_nan = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)  # includes unselected groups
        return jnp.where(has_nan, jnp.nan, jax.nn.sigmoid(logits))

    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        grouped_scores = scores.reshape(*scores.shape[:-1], self.groups, -1)
        group_scores = jnp.sum(jax.lax.top_k(grouped_scores, 2)[0], axis=-1)
        group_mask = _top_k_mask(group_scores, self.top_groups)
        masked_scores = jnp.where(group_mask[..., None], grouped_scores, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(masked_scores, self.k)[1]

    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        return (_normalize(scores, self.epsilon) if self.normalize else scores) * self.scale


@dataclasses.dataclass(frozen=True)
class SoftmaxGroupTopK(SelectTopK):
    """Softmax over all experts with group-limited top-k (``group_limited_greedy``; DeepSeek-V2, 2024).

    The score of a group is the largest probability in the group. The top-k experts are selected from the ``top_groups``
    best of ``groups`` groups. Weights are the experts' probabilities times ``scale``. Experts in the remaining groups
    are masked with 0, because probabilities are nonnegative. Unlike `SigmoidGroupTopK`, this class does not normalize
    the weights.
    """

    k: int
    groups: int
    top_groups: int
    scale: float

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return jax.nn.softmax(logits, axis=-1)

    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        grouped_scores = scores.reshape(*scores.shape[:-1], self.groups, -1)
        group_mask = _top_k_mask(jnp.max(grouped_scores, axis=-1), self.top_groups)
        masked_scores = jnp.where(group_mask[..., None], grouped_scores, 0.0).reshape(scores.shape)
        return jax.lax.top_k(masked_scores, self.k)[1]

    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        return scores * self.scale


@dataclasses.dataclass(frozen=True)
class SqrtSoftplusTopK(SelectTopK):
    """Affinities ``sqrt(softplus(logits))`` with top-k (DeepSeek-V4, 2026). The bias affects the selection only.

    The weights are normalized to sum to ``scale``.
    """

    k: int
    scale: float

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), 1e-30))  # sqrt has an infinite gradient at 0

    def top_k(self, scores: Float[Array, "*rows E"]) -> Int[Array, "*rows X"]:
        return jax.lax.top_k(scores, self.k)[1]

    def compute_weights(self, scores: Float[Array, "*rows X"]) -> Float[Array, "*rows X"]:
        return _normalize(scores) * self.scale


def _top_k_mask(values: Float[Array, "*rows groups"], k: int) -> Bool[Array, "*rows groups"]:
    _, indices = jax.lax.top_k(values, k)
    return jnp.any(jax.nn.one_hot(indices, values.shape[-1], dtype=bool), axis=-2)


def _normalize(weights: Float[Array, "*rows X"], epsilon: float = 0.0) -> Float[Array, "*rows X"]:
    """Divide the weights by ``sum + epsilon + 1e-20``. If the divisor underflows, the gradient is 0 instead of NaN."""
    weight_sum = jnp.sum(weights, axis=-1, keepdims=True) + epsilon
    has_underflow = weight_sum < 1e-15
    normalized_weights = weights / (jnp.where(has_underflow, 1.0, weight_sum) + 1e-20)
    return jnp.where(has_underflow, jax.lax.stop_gradient(weights / (weight_sum + 1e-20)), normalized_weights)
