"""Routing of requests: the experts of each token, collected from the passes of an engine.

With L MoE layers and X experts per token, the routing of a token needs L * X bytes: 48 * 8 = 384 bytes for
Qwen3-30B-A3B. With more than 256 experts, it needs twice as many.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer


class PassRouting(NamedTuple):
    """Experts of the tokens of one pass. The array stays on the device until a row is read.

    Attributes:
        experts: expert ids.
        valid: False for padding. None for a decoding step, whose valid tokens are as many as the new ids of the row.
    """

    experts: Integer[Array | np.ndarray, "R T L X"]
    valid: Bool[np.ndarray, "R T"] | None

    @classmethod
    def from_tokens(cls, experts: Integer[np.ndarray, "T L X"]) -> "PassRouting":
        """Create the routing of one row without padding."""
        return cls(experts[None], np.ones((1, len(experts)), bool))

    def first_row(self) -> "PassRouting":
        """Mark the first row as the only valid row."""
        assert self.valid is not None
        return self._replace(valid=self.valid[:1])

    def read(self, row: int, new_count: int) -> Integer[np.ndarray, "T L X"]:
        """Copy the experts of a row's valid tokens to the host.

        A pass with a single valid row contains a prefix of all rows. Its experts are returned for every ``row``.
        """
        experts: Any = np.asarray(self.experts)
        if self.valid is None:
            return experts[row, :new_count].copy()
        row = min(row, len(self.valid) - 1)
        return experts[row, self.valid[row]]


@jax.jit
def stack_layers(experts: list[Integer[Array, "R T X"]]) -> Integer[Array, "R T L X"]:
    """Stack the expert ids of the layers. Compiled, because a `LayerwiseModel` runs passes outside of `jax.jit`."""
    return jnp.stack(experts, axis=2)


def pad_routing(
    routings: Sequence[Integer[np.ndarray, "_ L X"] | None],
    counts: Sequence[int],
    is_input: Bool[np.ndarray, "B T"],
    experts: int,
) -> Integer[np.ndarray, "B T L X"] | None:
    """Combine the routing of several rows into one array, in the smallest signed dtype. Other columns get the id -1.

    Args:
        routings: experts of the tokens of each row, or None for dense models.
        counts: number of tokens per row.
        is_input: mask of the columns that contain tokens. In each row, only the first ``counts`` of them are used.
        experts: number of experts.
    """
    row_routings = [routing for routing in routings if routing is not None]
    if not row_routings:
        return None
    padded = np.full((*is_input.shape, *row_routings[0].shape[1:]), -1, np.min_scalar_type(-experts))
    for row, (routing, count) in enumerate(zip(row_routings, counts, strict=True)):
        padded[row, np.flatnonzero(is_input[row])[:count]] = routing[:count]
    return padded
