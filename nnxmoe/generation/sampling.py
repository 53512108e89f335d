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
    """Which options are in use: the static part of a Sampling."""

    random: bool
    penalty: bool
    cut: bool


class Knobs(NamedTuple):
    """Values of the options: the part that may change without recompilation."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any


def prepare(sampling: Sampling | None, vocab: int) -> tuple[Steps, Knobs]:
    """Split a Sampling (None: greedy) into its static part and its traced values."""
    s = sampling or Sampling(temperature=0.0)
    top_k = min(s.top_k or vocab, vocab)
    random = s.temperature > 0
    cut = random and (top_k < vocab or s.top_p < 1 or s.min_p > 0)
    numbers = (max(s.temperature, 1e-20), s.top_p, s.min_p, s.repetition_penalty)
    temperature, top_p, min_p, penalty = map(np.float32, numbers)
    return Steps(random, s.repetition_penalty != 1, cut), Knobs(temperature, np.int32(top_k), top_p, min_p, penalty)


def pick(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, steps: Steps, knobs: Knobs, key: Key[Array, ""]
) -> Int[Array, "B"]:
    """The next token of each row. The random numbers of a row do not depend on the number of rows."""
    if steps.penalty:
        assert seen is not None
        punished = jnp.where(logits < 0, logits * knobs.penalty, logits / knobs.penalty)
        logits = jnp.where(seen, punished, logits)
    if not steps.random:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / knobs.temperature
    if steps.cut:
        logits = jnp.where(logits < _threshold(logits, knobs)[:, None], -jnp.inf, logits)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _threshold(logits: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B"]:
    """The smallest logit that is kept by top-k, then top-p, then min-p."""
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    least = jnp.take(ordered, knobs.top_k - 1, axis=-1)[:, None]
    ordered = jnp.where(ordered < least, -jnp.inf, ordered)  # keeps ties with the k-th, as transformers does
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = ((before < knobs.top_p) | (knobs.top_p == 1) | (rank == 0)) & (ordered >= least)
    kept &= (probabilities >= knobs.min_p * probabilities[:, :1]) | (rank == 0)
    return jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
