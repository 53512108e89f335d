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
    """The attention mask in structured form: a query attends to keys that are real, not later than itself, inside the
    window and in its own segment.

    ``window`` W: a query attends to the last W tokens, itself included. ``causal``: query t and key t are the same
    token, as in a pass without a cache. Segments None: all tokens are in one segment. Kernels that support a structure
    can use it directly; `allowed` is the equivalent boolean array.
    """

    query_index: Int[Array, "T"] | Int[Array, "B T"]
    query_segment: Int[Array, "B T"] | None
    keys: SlotMetadata
    window: int | None = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def plain(self) -> bool:
        """Whether causal order and the window are all there is: no cache, padding or segments."""
        return self.causal and self.query_segment is None and self.keys.valid is None

    def allowed(self) -> Bool[Array, "#B T S"]:
        """True where query t may attend to key s."""
        query, key = self.query_index[..., :, None], self.keys.index[..., None, :]
        near = (key >= 0) & (key <= query)
        if self.window is not None:
            near &= key > query - self.window
        seen = near if near.ndim == 3 else near[None]
        if self.query_segment is not None:
            assert self.keys.segment is not None
            seen &= self.query_segment[:, :, None] == self.keys.segment[:, None, :]
        return seen if self.keys.valid is None else seen & self.keys.valid[:, None, :]

    def map(self, of_queries: Callable[[Array], Array], of_keys: Callable[[Array], Array]) -> "Mask":
        """The mask of other queries and keys, by functions of the arrays of each, whose last axis is the tokens."""
        index, segment = jax.tree.map(of_queries, (self.query_index, self.query_segment))
        return Mask(index, segment, jax.tree.map(of_keys, self.keys), self.window)

    def part(self, queries: slice | Int[Array, "t"], keys: slice | Int[Array, "s"]) -> "Mask":
        """The mask of the queries and keys at these places; causal if both are the same slice of tokens."""
        same = self.causal and isinstance(queries, slice) and queries == keys
        return dataclasses.replace(self.map(lambda a: a[..., queries], lambda a: a[..., keys]), causal=same)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConcatenatedMask:
    """The mask over keys of two kinds, one after the other. ``chosen``: which of the second a query may attend to
    besides, None: all that their mask allows. For attention that computes its blocks itself with
    `ReferenceAttention`."""

    near: Mask
    far: Mask
    chosen: Bool[Array, "B T n"] | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        far = self.far.allowed()
        far, near = far if self.chosen is None else far & self.chosen, self.near.allowed()
        batch = max(len(near), len(far))
        return jnp.concatenate([jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (near, far)], axis=2)
