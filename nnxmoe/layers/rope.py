"""Rotary position embedding (Su et al. 2021) and its long-context forms, as Hugging Face checkpoints mean them.

Sources: llama3 (Meta's Llama 3.1 reference), dynamic NTK (transformers), YaRN (Peng et al. 2023; DeepSeek's mscale).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every token's angles, in float32."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


def rotate_halves(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(i, i + H/2)``, in float32 (Llama, Mistral, Mixtral)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation.cos[:, :, None, :], rotation.sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_pairs(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(2i, 2i + 1)`` (DeepSeek). The result lies de-interleaved, queries and keys alike."""
    return rotate_halves(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), rotation)


Rotate = Callable[[Float[Array, "B T N H"], Rotation], Float[Array, "B T N H"]]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Plain rotary embedding: frequency ``theta ** (-2i / dim)`` for i < dim / 2. Angles are in radians."""

    dim: int
    theta: float

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        """Radians a position for each pair; ``length`` is the number of positions in use."""
        return jnp.asarray(self._plain(), jnp.float32)

    def factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def __call__(self, positions: Int[Array, "B T"]) -> Rotation:
        frequencies = self.frequencies(jnp.max(positions) + 1)
        angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
        return Rotation(jnp.cos(angles) * self.factor(), jnp.sin(angles) * self.factor())

    def _plain(self) -> np.ndarray:
        return self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)


@dataclasses.dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by ``scale`` (Chen et al. 2023)."""

    scale: float

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        return jnp.asarray(self._plain() / self.scale, jnp.float32)


@dataclasses.dataclass(frozen=True)
class DynamicRope(Rope):
    """NTK scaling that grows with the length once it exceeds ``max_positions``; keys in a cache keep their rotation."""

    scale: float
    max_positions: int

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        used = jnp.maximum(length, self.max_positions).astype(jnp.float32)
        growth = self.scale * used / self.max_positions - (self.scale - 1)
        theta = self.theta * growth ** (self.dim / (self.dim - 2))
        return theta ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)


@dataclasses.dataclass(frozen=True)
class Llama3Rope(Rope):
    """Long waves slowed by ``scale``, short waves kept, a ramp in between."""

    scale: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        plain = self._plain()
        turns = self.original_positions * plain / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return jnp.asarray((1 - kept) * plain / self.scale + kept * plain, jnp.float32)


@dataclasses.dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN: frequencies below ``beta_slow`` turns divided by ``scale``, above ``beta_fast`` kept, a ramp between."""

    scale: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float

    def factor(self) -> float:
        return self.attention_factor

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        low, high = self._dimension(self.beta_fast), self._dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0, 1)
        plain = self._plain()
        return jnp.asarray(plain / self.scale * ramp + plain * (1 - ramp), jnp.float32)

    def _dimension(self, turns: float) -> float:
        """The dimension whose wave makes ``turns`` turns over the original context."""
        return self.dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_mscale(scale: float, mscale: float) -> float:
    """YaRN's attention temperature for a context stretched by ``scale``."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0
