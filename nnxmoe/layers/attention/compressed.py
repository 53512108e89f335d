"""Compressed keys: one entry per ``rate`` tokens, which later tokens attend to instead (DeepSeek-V4, 2026).

Windows of ``rate`` tokens are counted from the start of each segment, so padding and packing change nothing. The entry
of a window exists as soon as the last token of the window does, in slot ``index of that token // rate`` of its row.
"""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.cache import CacheMetadata, RecurrentState, SlotMetadata, append_ring
from nnxmoe.layers.cache_buffer import Buffer, as_float, write_slots
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import RotateFn, compute_rotation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """The entries of a layer and the inputs of entries that are not complete yet.

    Attributes:
        entries: ``[*L, B, C / rate, W]``.
        open: projections of the newest tokens of a row, ``[*L, B, R, W]``; token i is at ``i % R``.
    """

    entries: Buffer
    open: RecurrentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMetadata(CacheMetadata):
    """`CacheMetadata` of a pass with or without a cache.

    ``segment_offset``: for every stored token by its index, the number of tokens before it in its segment.
    """

    segment_offset: Int[Array, "B C"]

    @classmethod
    def from_context(cls, context: Context, batch: int, length: int) -> "RowMetadata":
        """Read the metadata of a pass with ``length`` tokens per row."""
        if context.past is not None:
            past = context.past
            before, after, index, segment = past.length_before, past.length_after, past.index, past.segment
        else:
            index = jnp.broadcast_to(context.index, (batch, length))
            if context.valid is not None:
                index = jnp.where(context.valid, index, -1)
            before, after = jnp.zeros((batch,), jnp.int32), jnp.max(index, axis=1) + 1
            segment = jnp.zeros((batch, length), jnp.int32)
            if context.segment is not None:
                segment = gather_by_index(context.segment[..., None], index, before, length)[..., 0]
        places = jnp.arange(segment.shape[1], dtype=jnp.int32)
        starts = jnp.where(segment[:, 1:] != segment[:, :-1], places[1:], 0)
        segment_start = jax.lax.cummax(jnp.pad(starts, ((0, 0), (1, 0))), axis=1)
        return cls(index, before, after, segment, places - segment_start)

    def window_ends(self, rate: int) -> Int[Array, "B n"]:
        """Index of the last token of each slot's window; -1 for slots without an entry."""
        count = self.segment_offset.shape[1]
        is_end = (self.segment_offset + 1) % rate == 0
        is_end = is_end & (jnp.arange(count, dtype=jnp.int32) < self.length_after[:, None])
        is_end = jnp.pad(is_end, ((0, 0), (0, -count % rate))).reshape(len(is_end), -1, rate)
        ends = jnp.argmax(is_end, axis=2).astype(jnp.int32) + jnp.arange(is_end.shape[1], dtype=jnp.int32) * rate
        return jnp.where(is_end.any(axis=2), ends, -1)

    def slots(self, index: Int[Array, "B n"]) -> SlotMetadata:
        """Describe slots that hold the tokens with these indices; -1 for empty slots."""
        return SlotMetadata(index, None, gather_clipped(self.segment, index))


def gather_clipped(values: Int[Array, "B C"], index: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Gather from each row; indices out of range are clipped."""
    return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)


def gather_by_index(
    values: Float[Array, "B S W"] | Int[Array, "B S W"], index: Int[Array, "B S"], first: Int[Array, "B"], count: int
) -> Array:
    """Gather the ``count`` tokens of each row with the indices from ``first`` on, ``[B, count, W]``.

    ``index``: index of each value in its row, negative for none. Tokens without a value get zeros.
    """
    targets = jnp.where(index < 0, -1, index - first[:, None])
    targets = jnp.where(targets < 0, count, targets)
    empty = jnp.full((len(values), count), values.shape[1], jnp.int32)
    sources = jax.vmap(lambda row, at: row.at[at].set(jnp.arange(len(at), dtype=jnp.int32), mode="drop"))(
        empty, targets
    )
    return jnp.take_along_axis(values, sources[..., None], axis=1, mode="fill", fill_value=0)


class Compressor(nnx.Module):
    """Entries ``norm(sum_j softmax_j(gate_j + place_j) * kv_j)`` over the tokens j of ``series`` windows.

    With one series an entry depends on its own window, with two also on the window before, whose tokens have other
    kernels (paper 2.3.1 and 2.3.2; ``DeepseekV4CSACompressor`` and ``DeepseekV4HCACompressor`` in transformers).
    Entries are rotated by the position of the first token of their window.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        rate: int,
        series: int,
        eps: float,
        rotary: Rope,
        rotate: RotateFn,
        **kw: Unpack[ParamOptions],
    ):
        self.rate, self.series, self.rotary, self.rotate = rate, series, rotary, rotate
        self.kv = Linear((dim,), (series * width,), ("embed", "latent"), **kw)
        self.gate = Linear((dim,), (series * width,), ("embed", "latent"), **kw)
        self.norm = RMSNorm(width, eps, **kw)
        zeros, f32 = nnx.initializers.zeros, jnp.dtype(jnp.float32)
        self.place = parameter(
            (rate, series * width), (None, None), zeros, dtype=f32, rngs=kw["rngs"], keeps_dtype=True
        )

    @property
    def reach(self) -> int:
        """Number of tokens before the last token of an entry that the entry depends on."""
        return self.series * self.rate - 1

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, rows: RowMetadata, cache: CompressedCache | None
    ) -> tuple[CompressedCache | None, Float[Array, "B n W"], SlotMetadata]:
        """Return the cache, all entries of the rows including those of the tokens x, and the slots of the entries."""
        projected, length = jnp.concatenate([self.kv(x), self.gate(x)], axis=-1), x.shape[1]
        open_tokens, tokens, index = None, projected, rows.index
        if cache is not None:  # lookahead -1: even a single token is returned beside the tokens stored before it
            open_tokens, tokens, index = append_ring(cache.open.states, projected, rows, -1)
        tokens = gather_by_index(tokens, index, rows.length_before - self.reach, self.reach + length)
        ends = rows.window_ends(self.rate)
        continues = cache is not None and not context.fresh  # a window may have begun before this pass
        count = min(-(-length // self.rate) + continues, ends.shape[1])
        slots = rows.length_before[:, None] // self.rate + jnp.arange(count, dtype=jnp.int32)
        new_ends = jnp.where(slots < ends.shape[1], gather_clipped(ends, slots), -1)
        new_ends = jnp.where(new_ends >= rows.length_before[:, None], new_ends, -1)
        entries = self._entries(tokens, new_ends, rows, context)
        if cache is None or open_tokens is None:
            return None, entries, rows.slots(new_ends)
        slots = jnp.where(new_ends < 0, ends.shape[1], slots)
        cache = CompressedCache(write_slots(cache.entries, entries, slots, 1), RecurrentState(open_tokens))
        if context.fresh:
            return cache, entries, rows.slots(new_ends)
        return cache, as_float(cache.entries, entries.dtype), rows.slots(ends)

    def _entries(
        self, tokens: Float[Array, "B S _"], ends: Int[Array, "B n"], rows: RowMetadata, context: Context
    ) -> Float[Array, "B n W"]:
        """Compute the entries whose windows end at these indices; ``tokens`` start at ``length_before - reach``."""
        width, rate = self.norm.scale.shape[-1], self.rate
        end_offset = gather_clipped(rows.segment_offset, ends)
        kv_parts, gate_parts = [], []
        for i in range(self.series):
            distance = (self.series - i) * rate - 1  # from the first token of window i to the last token of the entry
            first = ends - distance - rows.length_before[:, None] + self.reach
            places = first[..., None] + jnp.arange(rate, dtype=jnp.int32)
            places = jnp.clip(places, 0, tokens.shape[1] - 1).reshape(len(places), -1, 1)
            kv, gate = (
                jnp.take_along_axis(tokens[..., start : start + width], places, axis=1).reshape(
                    *ends.shape, rate, width
                )
                for start in (i * width, (self.series + i) * width)
            )
            gate = gate.astype(jnp.float32) + self.place[...][:, i * width : (i + 1) * width]
            kv_parts.append(kv)
            gate_parts.append(jnp.where((end_offset >= distance)[..., None, None], gate, -jnp.inf))
        kv, gate = jnp.concatenate(kv_parts, axis=2), jnp.concatenate(gate_parts, axis=2)
        gate = jnp.where(ends[..., None, None] < 0, 0, gate)
        entries = self.norm(jnp.sum(kv * jax.nn.softmax(gate, axis=2).astype(kv.dtype), axis=2))
        assert context.positions is not None
        positions = jnp.broadcast_to(context.positions, rows.index.shape)[..., None]
        positions = gather_by_index(positions, rows.index, rows.length_before, rows.index.shape[1])[..., 0]
        end_positions = gather_clipped(positions, ends - rows.length_before[:, None])
        first_positions = jnp.maximum(end_positions - (rate - 1), 0)
        return self.rotate(entries[:, :, None], compute_rotation(self.rotary, first_positions))[:, :, 0]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> CompressedCache:
        """Create a cache of entries for ``capacity`` tokens and of the tokens that later entries depend on."""
        width = self.norm.scale.shape[-1]
        entries = jnp.zeros((batch, -(-capacity // self.rate), width), dtype)
        values = jnp.zeros((batch, self.reach + lookahead, 2 * self.series * width), dtype)
        return CompressedCache(entries, RecurrentState(values))
