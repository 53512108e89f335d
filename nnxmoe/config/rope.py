"""Rotary position embedding (Su et al. 2021) and its long-context forms: the frequencies that a config asks for.

Sources: llama3 (Meta's Llama 3.1 reference), dynamic NTK (transformers), YaRN (Peng et al. 2023; DeepSeek's mscale).
`nnxmoe.layers.rope` applies them.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Plain rotary embedding: frequency ``theta ** (-2i / dim)`` for i < dim / 2. Angles are in radians."""

    dim: int
    theta: float

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        """Radians per position of each pair; ``length`` is the number of positions in use."""
        return jnp.asarray(self._plain(), jnp.float32)

    def factor(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0

    def _plain(self) -> np.ndarray:
        return self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)


@dataclasses.dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by ``scale`` (Chen et al. 2023)."""

    scale: float

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        return jnp.asarray(self._plain() / self.scale, jnp.float32)


@dataclasses.dataclass(frozen=True)
class ProportionalRope(Rope):
    """The first ``rotated`` pairs turn with the frequencies of the whole width, divided by ``scale``; the others do not
    turn (Gemma 4, 2026)."""

    rotated: int
    scale: float = 1.0

    def frequencies(self, length: Int[Array, ""]) -> Float[Array, "half"]:
        turns = np.where(np.arange(self.dim // 2) < self.rotated, self._plain() / self.scale, 0.0)
        return jnp.asarray(turns, jnp.float32)


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
