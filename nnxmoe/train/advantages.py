"""Advantages from the rewards of groups of samples. NaN marks a sample that is excluded."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

AdvantageFn = Callable[..., Float[np.ndarray, "prompts n"]]
"""Function from the rewards of n samples per prompt to advantages, both ``[prompts, n]``. Excluded samples are NaN.

If the function has a true attribute ``per_function``, it is called with rewards ``[functions, prompts, n]`` and weights
``[functions]``."""

_EPSILON = 1e-4  # added to standard deviations, as in TRL


def group_advantages(rewards: Float[np.ndarray, "prompts n"]) -> Float[np.ndarray, "prompts n"]:
    """Subtract the group's mean and divide by its standard deviation (GRPO; Shao et al. 2024)."""
    return _normalize(rewards, -1)


def dr_grpo(rewards: Float[np.ndarray, "prompts n"]) -> Float[np.ndarray, "prompts n"]:
    """Subtract the group's mean (Dr. GRPO; Liu et al. 2025)."""
    return rewards - _mean(rewards, -1)


def rloo(rewards: Float[np.ndarray, "prompts n"]) -> Float[np.ndarray, "prompts n"]:
    """Subtract the mean of the group's other samples (RLOO; Ahmadian et al. 2024). A group of one gets 0."""
    count = _count(rewards, -1)
    return dr_grpo(rewards) * count / np.maximum(count - 1, 1)


@dataclasses.dataclass(frozen=True)
class GDPO:
    """Normalize each function's rewards per group, sum them, and normalize over the batch (Liu et al. 2026).

    With `group_advantages`, samples with equal sums of rewards have equal advantages. GDPO distinguishes them.
    """

    per_function: ClassVar[bool] = True

    def __call__(
        self, rewards: Float[np.ndarray, "functions prompts n"], weights: Sequence[float]
    ) -> Float[np.ndarray, "prompts n"]:
        """Compute the advantages."""
        return _normalize(weighted_sum(_normalize(rewards, -1), weights), None)


def weighted_sum(rewards: Float[np.ndarray, "functions *samples"], weights: Sequence[float]) -> np.ndarray:
    """Sum the weighted rewards of each sample, ignoring NaN. The sum is NaN if all rewards are NaN, as in TRL."""
    total = np.nansum(rewards * np.reshape(weights, (-1, *[1] * (rewards.ndim - 1))), axis=0)
    return np.where(np.isnan(rewards).all(axis=0), np.nan, total)


def compute_advantages(
    function: AdvantageFn, rewards: Float[np.ndarray, "functions prompts n"], weights: Sequence[float]
) -> Float[np.ndarray, "prompts n"]:
    """Call an advantage function with the weighted sum of the rewards, or with the rewards of each function.

    Raises ValueError if the function returns a wrong shape, or NaN or infinity for a sample that is not excluded.
    """
    total = weighted_sum(rewards, weights)
    per_function = getattr(function, "per_function", False)
    advantages = np.asarray(function(rewards, weights) if per_function else function(total))
    name = getattr(function, "__name__", type(function).__name__)
    if advantages.shape != total.shape:
        raise ValueError(
            f"advantages={name} returned the shape {list(advantages.shape)}: return one advantage per sample, "
            f"{list(total.shape)}"
        )
    if not np.isfinite(advantages[~np.isnan(total)]).all():
        raise ValueError(f"advantages={name} returned NaN or infinity for finite rewards: return finite advantages")
    return np.where(np.isnan(total), np.nan, advantages)


def _normalize(rewards: np.ndarray, axis: int | None) -> np.ndarray:
    """Subtract the mean and divide by the standard deviation (with Bessel's correction), as in TRL."""
    centered = rewards - _mean(rewards, axis)
    variance = np.nansum(centered**2, axis=axis, keepdims=True) / np.maximum(_count(rewards, axis) - 1, 1)
    return centered / (np.sqrt(variance) + _EPSILON)


def _mean(rewards: np.ndarray, axis: int | None) -> Any:
    return np.nansum(rewards, axis=axis, keepdims=True) / np.maximum(_count(rewards, axis), 1)


def _count(rewards: np.ndarray, axis: int | None) -> Any:
    return np.sum(~np.isnan(rewards), axis=axis, keepdims=True)
