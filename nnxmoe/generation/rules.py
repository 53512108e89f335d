"""Rules that restrict the next id, as in transformers.

The rules are the fields of generation_config.json that do not belong to sampling.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnxmoe.config.printable import short
from nnxmoe.config.validate import real_number, whole_number
from nnxmoe.generation.ids import as_token_ids

_MOST = float(np.finfo(np.float32).max)  # largest bias


@dataclasses.dataclass(frozen=True)
class Rules:
    """Restrictions on the next id of a request. Static in the compiled step.

    Attributes:
        ngram: length of id sequences that must not repeat. 0 disables the rule.
        biases: pairs of an id sequence and a value. The value is added to the logit of the last id if
            the preceding ids match the rest of the sequence.
        suppressed: ids that are never generated.
        suppressed_first: ids that are not generated as the first new id.
        forced_end: the only ids that are allowed as the last of ``max_new_tokens`` ids. If empty, all ids
            are allowed.
    """

    ngram: int = 0
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        biases = []
        for pair in self.biases if isinstance(self.biases, list | tuple) else [self.biases]:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and len(ids := as_token_ids(pair[0], "biases"))):
                raise ValueError(f"biases: {short(pair)} is not a pair of a list of ids and a number")
            biases.append((ids, real_number("a bias", pair[1], -math.inf, _MOST)))
        object.__setattr__(self, "ngram", whole_number("ngram", self.ngram, 0, 2**31))
        object.__setattr__(self, "biases", tuple(biases))
        for name in ("suppressed", "suppressed_first", "forced_end"):
            object.__setattr__(self, name, as_token_ids(getattr(self, name), f"an id of {name}"))

    def __call__(
        self,
        logits: Float[Array, "B V"],
        ids: Int[Array, "B C"],
        count: Int[Array, "B"],
        new_count: Int[Array, "B"],
        limit: Int[Array, "B"],
    ) -> Float[Array, "B V"]:
        """Apply the rules to the logits of the next id.

        Args:
            logits: logits after ``count`` ids.
            ids: prompt and new ids.
            count: number of ids per row.
            new_count: number of new ids per row.
            limit: maximum number of new ids per row.
        """
        logits = self._biased(logits, ids, count)
        if self.ngram:
            logits = jnp.where(self._repeated(logits, ids, count), -jnp.inf, logits)
        if self.forced_end:
            forced = jnp.full_like(logits, -jnp.inf).at[:, np.asarray(self.forced_end)].set(0, mode="drop")
            logits = jnp.where((new_count == limit - 1)[:, None], forced, logits)
        for suppressed, applies in ((self.suppressed, new_count >= 0), (self.suppressed_first, new_count == 0)):
            if suppressed:
                masked = logits.at[:, np.asarray(suppressed)].set(-jnp.inf, mode="drop")
                logits = jnp.where(applies[:, None], masked, logits)
        return logits

    def _repeated(self, logits: Array, ids: Array, count: Array) -> Array:
        """Compute a mask [B, V] of the ids that would repeat a sequence of ``ngram`` ids."""
        prefix_length = self.ngram - 1
        positions = jnp.arange(ids.shape[1])[None]
        matches = positions + prefix_length < count[:, None]
        for k in range(prefix_length):
            recent_id = jnp.take_along_axis(ids, jnp.maximum(count - prefix_length + k, 0)[:, None], axis=1)
            matches &= jnp.roll(ids, -k, axis=1) == recent_id
        rows = jnp.arange(len(ids))[:, None]
        return jnp.zeros(logits.shape, bool).at[rows, jnp.roll(ids, -prefix_length, axis=1)].max(matches, mode="drop")

    def _biased(self, logits: Array, ids: Array, count: Array) -> Array:
        for length in sorted({len(sequence) for sequence, _ in self.biases}):
            group = [(sequence, bias) for sequence, bias in self.biases if len(sequence) == length]
            prefixes = np.asarray([sequence[:-1] for sequence, _ in group], np.int32)  # [S, length - 1]
            positions = count[:, None] - (length - 1) + np.arange(length - 1)[None]
            recent = jnp.take_along_axis(ids, jnp.maximum(positions, 0), axis=1)
            matches = (recent[:, None, :] == prefixes[None]).all(axis=-1) & (count >= length - 1)[:, None]
            bias_values = jnp.where(matches, np.asarray([bias for _, bias in group], np.float32), 0)
            logits = logits.at[:, np.asarray([sequence[-1] for sequence, _ in group])].add(bias_values, mode="drop")
        return logits
