"""Structured attention masks."""

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

    A query attends to real keys that are in the query's segment, inside the window, and not after the query. Attention
    kernels support some or all of these features. `allowed` computes the equivalent boolean array.

    Attributes:
        query_index: Index of each query among the real tokens of the row.
        query_segment: Segment of each query. ``None`` if all tokens are in one segment.
        keys: Index, validity and segment of each key.
        window: Number of most recent keys that a query attends to, including the key of the query's token. ``None``
            disables the window.
        causal: Whether query t and key t are the same token, as in a pass without a cache.
    """

    query_index: Int[Array, "T"] | Int[Array, "B T"]
    query_segment: Int[Array, "B T"] | None
    keys: SlotMetadata
    window: int | None = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def is_plain(self) -> bool:
        """Whether the mask is causal, possibly with a window, and has no cache, padding or segments."""
        return self.causal and self.query_segment is None and self.keys.valid is None

    def allowed(self) -> Bool[Array, "#B T S"]:
        """Return the boolean mask: True where query t may attend to key s."""
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
        """Apply a function to the query arrays, and a function to the key arrays. The last axis is the token axis."""
        index, segment = jax.tree.map(map_queries, (self.query_index, self.query_segment))
        return Mask(index, segment, jax.tree.map(map_keys, self.keys), self.window)

    def select(self, queries: slice | Int[Array, "t"], keys: slice | Int[Array, "s"]) -> "Mask":
        """Select queries and keys along the token axis. The result is causal if both slices are equal."""
        causal = self.causal and isinstance(queries, slice) and queries == keys
        mask = self.map(lambda array: array[..., queries], lambda array: array[..., keys])
        return dataclasses.replace(mask, causal=causal)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConcatenatedMask:
    """Masks over two concatenated sets of keys, for `ReferenceAttention` on query blocks.

    Attributes:
        near: Mask over the first set of keys.
        far: Mask over the second set of keys.
        selected: Selection mask over the second set of keys. A query attends to keys that are selected and that ``far``
            allows. If ``None``, all keys are selected.
    """

    near: Mask
    far: Mask
    selected: Bool[Array, "B T n"] | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        """Return the boolean mask: True where query t may attend to key s of the concatenated keys."""
        far = self.far.allowed()
        if self.selected is not None:
            far = far & self.selected
        near = self.near.allowed()
        batch = max(len(near), len(far))
        return jnp.concatenate([jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (near, far)], axis=2)
