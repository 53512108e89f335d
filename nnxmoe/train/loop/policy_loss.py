"""Terms of policy-gradient losses: probability ratios, clipping, importance weights, and means over samples."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.arguments import CheckedFields, KnownFields
from nnxmoe.config.validate import set_numbers, set_positive
from nnxmoe.train.loop.batch import Batch, targets_of

PerToken = Float[Array, "B T"]


class Counts(NamedTuple):
    """Numbers of answer tokens and of samples with an answer, each at least 1."""

    tokens: Float[Array, ""]
    samples: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answer tokens of the samples in a batch, at the positions that predict them.

    Attributes:
        segments: Number of the sample in its row, at most T.
        weights: 1 if the next token belongs to the answer, else 0.
    """

    segments: Int[Array, "B T"]
    weights: PerToken

    @classmethod
    def from_batch(cls, batch: Batch) -> Self:
        """Find the answers of a batch. Without ``segment_ids``, each row is one sample."""
        segments = batch.get("segment_ids")
        ones = jnp.ones(jnp.shape(batch["tokens"]), jnp.int32)
        return cls(ones if segments is None else jnp.asarray(segments), targets_of(batch)[1])

    def align(self, values: PerToken) -> PerToken:
        """Move the values of answer tokens to the positions that predict these tokens. Other values become 0."""
        return jnp.roll(values, -1, axis=1) * self.weights

    def sums(self, values: PerToken) -> PerToken:
        """Sum over each answer. All positions of a sample get its sum."""
        return jnp.take_along_axis(self._segment_sums(values), self.segments, axis=1)

    def means(self, values: PerToken) -> PerToken:
        """Compute the mean over each answer. All positions of a sample get its mean."""
        return self.sums(values) / self.lengths

    @functools.cached_property
    def lengths(self) -> PerToken:
        """Number of answer tokens of the sample at each position, at least 1."""
        return jnp.maximum(self.sums(jnp.ones_like(self.weights)), 1.0)

    def counts(self) -> Counts:
        """Count the answer tokens, and the samples with answer tokens."""
        lengths = self._segment_sums(jnp.ones_like(self.weights))
        return Counts(jnp.maximum(jnp.sum(lengths), 1.0), jnp.maximum(jnp.sum(lengths > 0), 1).astype(jnp.float32))

    def _segment_sums(self, values: PerToken) -> Float[Array, "B S"]:
        sums = functools.partial(jax.ops.segment_sum, num_segments=self.segments.shape[1] + 1)
        return jax.vmap(sums)(values * self.weights, self.segments)


RatioFn = Callable[[PerToken, Answers], PerToken]
"""Function ``(log_ratios, answers) -> ratios`` of the policy's probabilities to the old policy's probabilities."""


def token_ratio(log_ratios: PerToken, answers: Answers) -> PerToken:
    """Compute the probability ratio of each token (PPO; Schulman et al. 2017)."""
    return jnp.exp(log_ratios)


def sequence_ratio(log_ratios: PerToken, answers: Answers) -> PerToken:
    """Compute the geometric mean of the ratios of each answer's tokens (GSPO; Zheng et al. 2025, eq. 7)."""
    return jnp.exp(answers.means(log_ratios))


@dataclasses.dataclass(frozen=True)
class Clip(KnownFields):
    """Clipped surrogate loss ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`` of an advantage A.

    Attributes:
        low: Distance of the lower bound from 1.
        high: Distance of the upper bound from 1. Larger than ``low`` in DAPO (Yu et al. 2025).
        delta: Upper bound of the unclipped ratio, as in TRL. It limits the loss for negative advantages.
        dual: Upper bound of the loss for negative advantages, as a factor of ``-A`` (dual clip; Ye et al. 2020).

    Raises:
        ValueError: If a bound is negative, or if ``delta`` or ``dual`` is at most 1.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        optional = [name for name in ("delta", "dual") if getattr(self, name) is not None]
        set_numbers(self, "low", "high", *optional)
        for name in optional:
            if (value := getattr(self, name)) <= 1:
                raise ValueError(f"Clip({name}={value}): it bounds ratios above 1, so pass a number above 1")

    def __call__(self, ratios: PerToken, advantages: PerToken) -> PerToken:
        """Compute the loss of each token."""
        clipped = jnp.clip(ratios, 1 - self.low, 1 + self.high)
        if self.delta is not None:
            ratios = jnp.minimum(ratios, self.delta)
        gains = jnp.minimum(ratios * advantages, clipped * advantages)
        if self.dual is not None:
            gains = jnp.where(advantages < 0, jnp.maximum(gains, self.dual * advantages), gains)
        return -gains

    def clipped(self, ratios: PerToken, advantages: PerToken) -> tuple[PerToken, PerToken]:
        """Return 1 for tokens whose loss is clipped at the lower and at the upper bound, else 0."""
        low, high = (ratios < 1 - self.low) & (advantages < 0), (ratios > 1 + self.high) & (advantages > 0)
        return low.astype(jnp.float32), high.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ImportanceSampling(CheckedFields):
    """Loss weights ``pi_trainer / pi_sampler``, for samplers with different numerics (Yao et al. 2025).

    The weights are limited to [``floor``, ``cap``] and have no gradient.

    Attributes:
        cap: Upper bound of the weights.
        floor: Lower bound of the weights.
        per_sequence: Whether each answer has one weight, the product of the ratios of its tokens.
        mask: Whether weights outside the bounds become 0 instead of the nearest bound.
    """

    cap: float = 2.0
    floor: float = 0.0
    per_sequence: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "cap", positive=True)
        set_numbers(self, "floor")
        if self.floor >= self.cap:
            raise ValueError(f"ImportanceSampling(floor={self.floor}): it must be less than cap={self.cap}")

    def __call__(self, log_ratios: PerToken, answers: Answers) -> PerToken:
        """Compute the weight of each token. ``log_ratios`` are the trainer's minus the sampler's log-probabilities."""
        weights = jnp.exp(answers.sums(log_ratios) if self.per_sequence else log_ratios)
        if self.mask:
            weights = jnp.where((weights >= self.floor) & (weights <= self.cap), weights, 0.0)
        return jax.lax.stop_gradient(jnp.clip(weights, 0.0 if self.mask else self.floor, self.cap))


AggregateFn = Callable[[PerToken, Answers, Counts], Float[Array, ""]]
"""Function ``(losses, answers, counts) -> loss``. With gradient accumulation, it is called with the losses of each
microbatch and the counts of the whole batch, and the results are summed."""


def token_mean(losses: PerToken, answers: Answers, counts: Counts) -> Float[Array, ""]:
    """Compute the mean over all answer tokens (DAPO; Yu et al. 2025), named ``bnpo`` in TRL."""
    return jnp.sum(losses * answers.weights) / counts.tokens


def sequence_mean(losses: PerToken, answers: Answers, counts: Counts) -> Float[Array, ""]:
    """Compute the mean over each answer, then the mean over the samples (GRPO; Shao et al. 2024)."""
    return jnp.sum(losses * answers.weights / answers.lengths) / counts.samples


@dataclasses.dataclass(frozen=True)
class FixedLengthMean(KnownFields):
    """Sum over each answer divided by a constant, then the mean over the samples (Dr. GRPO; Liu et al. 2025).

    Attributes:
        length: Constant divisor, usually the maximum number of new tokens.
    """

    length: int

    def __post_init__(self) -> None:
        set_positive(self, "length")

    def __call__(self, losses: PerToken, answers: Answers, counts: Counts) -> Float[Array, ""]:
        """Aggregate the losses of the answer tokens."""
        return jnp.sum(losses * answers.weights) / (counts.samples * self.length)


def k3(log_ratios: PerToken) -> PerToken:
    """Estimate a KL divergence per token as ``exp(r) - r - 1`` (Schulman 2020). The estimates are at least 0.

    With r = log q - log p for tokens sampled from p, the expected estimate is KL(p || q).
    """
    return jnp.expm1(log_ratios) - log_ratios


KLFn = Callable[[PerToken, PerToken], PerToken]
"""Function ``(log_ratios, ratios) -> kl``. ``log_ratios`` are the reference's minus the policy's log-probabilities.
``ratios`` are the policy's divided by the old policy's probabilities."""


def k3_kl(log_ratios: PerToken, ratios: PerToken) -> PerToken:
    """Estimate KL(policy || reference) by `k3`, as published for GRPO. Its gradient is biased."""
    return k3(log_ratios)


def unbiased_kl(log_ratios: PerToken, ratios: PerToken) -> PerToken:
    """Estimate KL(policy || reference) by `k3` times the ratio (DeepSeek-V3.2).

    The gradient includes the gradient of the ratio. Therefore, value and gradient are unbiased.
    """
    return ratios * k3(log_ratios)
