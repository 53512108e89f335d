"""Sampling of the next token from logits. Options are applied in the same order as in transformers."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling options; each is off at its default. ``temperature`` 0 is greedy (after the repetition penalty).

    ``top_k``: keep the k most likely tokens (0 or None: all). ``top_p``: keep the fewest that sum to p. ``min_p``: keep
    those at least p times as likely as the best. ``repetition_penalty``: > 1 makes tokens already seen less likely.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            left_out = name == "top_k" and value is None
            if not left_out and (isinstance(value, str) or not np.isscalar(value)):
                raise ValueError(f"Sampling({name}={value!r}): {name} must be a number")
        checks = {
            "temperature": (self.temperature, 0 <= self.temperature < math.inf, "a number >= 0 (0: greedy)"),
            "top_k": (self.top_k, self.top_k is None or self.top_k >= 0, "an integer >= 0 (0 or None: off)"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "positive"),
        }
        for name, (value, good, wanted) in checks.items():
            if not good:
                raise ValueError(f"Sampling({name}={value}): {name} must be {wanted}")
        if self.top_k is not None and not float(self.top_k).is_integer():
            raise ValueError(f"Sampling(top_k={self.top_k}): top_k must be an integer >= 0 (0 or None: off)")


class Steps(NamedTuple):
    """The sampling options in use: the static part of the options of all rows."""

    random: bool = True
    penalty: bool = True
    cut: bool = True

    def __or__(self, other: "Steps") -> "Steps":  # type: ignore[override]
        return Steps(*(one or another for one, another in zip(self, other, strict=True)))


class Knobs(NamedTuple):
    """Values of the options, one per row: the part that may change without recompilation. ``temperature`` 0: greedy."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any


def prepare(sampling: Sampling | None, vocab: int) -> tuple[Steps, Knobs]:
    """Split a Sampling (None: greedy) into its static part and the values of one row, without a row dimension."""
    s = sampling or Sampling(temperature=0.0)
    top_k = min(s.top_k or vocab, vocab)
    random = s.temperature > 0
    cut = random and (top_k < vocab or s.top_p < 1 or s.min_p > 0)
    numbers = (max(s.temperature, 1e-20) if random else 0.0, s.top_p, s.min_p, s.repetition_penalty)
    temperature, top_p, min_p, penalty = map(np.float32, numbers)
    return Steps(random, s.repetition_penalty != 1, cut), Knobs(temperature, np.int32(top_k), top_p, min_p, penalty)


def pick(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, steps: Steps, knobs: Knobs, keys: Key[Array, "B"]
) -> Int[Array, "B"]:
    """The next token of each row, a function of its own logits, options and key alone."""
    logits = _penalised(logits, seen, steps, knobs)
    best, drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32), knobs.temperature > 0
    if not steps.random:
        return best

    def draw() -> Int[Array, "B"]:
        found = jax.vmap(jax.random.categorical)(keys, _scaled_and_cut(logits, steps, knobs))
        return jnp.where(drawn, found.astype(jnp.int32), best)

    return jax.lax.cond(jnp.any(drawn), draw, lambda: best)


def _penalised(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, steps: Steps, knobs: Knobs
) -> Float[Array, "B V"]:
    if not steps.penalty:
        return logits
    assert seen is not None
    by = knobs.penalty[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * by, logits / by), logits)


def _scaled_and_cut(logits: Float[Array, "B V"], steps: Steps, knobs: Knobs) -> Float[Array, "B V"]:
    """The logits of the distribution that is drawn from; -inf for removed tokens."""
    logits = logits / jnp.where(knobs.temperature > 0, knobs.temperature, 1)[:, None]
    return jnp.where(logits < _threshold(logits, knobs)[:, None], -jnp.inf, logits) if steps.cut else logits


def _threshold(logits: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B"]:
    """The smallest logit that is kept by top-k, then top-p, then min-p."""
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    least = jnp.take_along_axis(ordered, knobs.top_k[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered < least, -jnp.inf, ordered)  # keeps ties with the k-th, as transformers does
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = knobs.top_p[:, None]
    kept = ((before < top_p) | (top_p == 1) | (rank == 0)) & (ordered >= least)
    kept &= (probabilities >= knobs.min_p[:, None] * probabilities[:, :1]) | (rank == 0)
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
