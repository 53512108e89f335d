"""Attention masks in structured form: which keys each query may attend to."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nnxmoe.layers.cache import SlotMetadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Causal attention mask with padding, a sliding window and segments, stored as indices of queries and keys.

    A query attends to keys that are real, not later than the query, inside the window and in the query's segment.
    Kernels that support a part of this structure use it directly. `allowed` is the equivalent boolean array.

    Attributes:
        query_index: index of each query among the real tokens of its row.
        query_segment: segment of each query; None if all tokens are in one segment.
        keys: the same of the keys, and which of them are real.
        window: number of latest keys that a query attends to, including the key of its own token; None: no window.
        causal: whether query t and key t are the same token, as in a pass without a cache.
    """

    query_index: Int[Array, "T"] | Int[Array, "B T"]
    query_segment: Int[Array, "B T"] | None
    keys: SlotMetadata
    window: int | None = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def is_plain(self) -> bool:
        """Whether causal order and the window are the whole mask: no cache, padding or segments."""
        return self.causal and self.query_segment is None and self.keys.valid is None

    def allowed(self) -> Bool[Array, "#B T S"]:
        """True where query t may attend to key s."""
        query, key = self.query_index[..., :, None], self.keys.index[..., None, :]
        allowed = (key >= 0) & (key <= query)
        if self.window is not None:
            allowed &= key > query - self.window
        if allowed.ndim == 2:
            allowed = allowed[None]
        if self.query_segment is not None:
            assert self.keys.segment is not None
            allowed &= self.query_segment[:, :, None] == self.keys.segment[:, None, :]
        if self.keys.valid is not None:
            allowed = allowed & self.keys.valid[:, None, :]
        return allowed

    def map(self, map_queries: Callable[[Array], Array], map_keys: Callable[[Array], Array]) -> "Mask":
        """Apply functions to the arrays of the queries and to those of the keys, whose last axis is the tokens."""
        index, segment = jax.tree.map(map_queries, (self.query_index, self.query_segment))
        return Mask(index, segment, jax.tree.map(map_keys, self.keys), self.window)

    def select(self, queries: slice | Int[Array, "t"], keys: slice | Int[Array, "s"]) -> "Mask":
        """Select queries and keys along the token axis; causal if both are the same slice of tokens."""
        causal = self.causal and isinstance(queries, slice) and queries == keys
        selected = self.map(lambda array: array[..., queries], lambda array: array[..., keys])
        return dataclasses.replace(selected, causal=causal)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConcatenatedMask:
    """The masks of two sets of keys, one after the other, for `ReferenceAttention` on blocks of queries.

    ``selected``: further restricts which keys of the second set a query attends to; None: all that ``far`` allows.
    """

    near: Mask
    far: Mask
    selected: Bool[Array, "B T n"] | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        """True where query t may attend to key s of the concatenated keys."""
        far = self.far.allowed()
        if self.selected is not None:
            far = far & self.selected
        near = self.near.allowed()
        batch = max(len(near), len(far))
        return jnp.concatenate([jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (near, far)], axis=2)
