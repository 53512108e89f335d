"""Compressed keys: later tokens attend to one entry per window of ``rate`` tokens (DeepSeek-V4, 2026).

The first window starts at the first token of a segment, so padding and packing do not change the result. An entry is
available as soon as its window is complete. The slot of an entry is ``index // rate``, where ``index`` is the index of
the window's last token in the row.
"""

import dataclasses
from typing import NamedTuple, Unpack

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
    """Compressed entries of a layer, and the inputs of incomplete entries.

    Attributes:
        entries: Entries ``[*L, B, C / rate, W]``.
        pending: Projections of the newest tokens of each row, ``[*L, B, R, W]``. Token i is stored at index ``i % R``.
    """

    entries: Buffer
    pending: RecurrentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMetadata(CacheMetadata):
    """`CacheMetadata` that is also defined for passes without a cache.

    Attributes:
        segment_offset: Number of earlier tokens in the same segment, for each token of a row.
    """

    segment_offset: Int[Array, "B C"]

    @classmethod
    def from_context(cls, context: Context, batch: int, length: int) -> "RowMetadata":
        """Create the metadata for a pass over ``batch`` rows of ``length`` tokens."""
        if context.past is not None:
            past = context.past
            start, end, index, segment = past.length_before, past.length_after, past.index, past.segment
        else:
            index = jnp.broadcast_to(context.index, (batch, length))
            if context.valid is not None:
                index = jnp.where(context.valid, index, -1)
            start, end = jnp.zeros((batch,), jnp.int32), jnp.max(index, axis=1) + 1
            segment = jnp.zeros((batch, length), jnp.int32)
            if context.segment is not None:
                segment = gather_by_index(context.segment[..., None], index, start, length)[..., 0]
        token_index = jnp.arange(segment.shape[1], dtype=jnp.int32)
        starts = jnp.where(segment[:, 1:] != segment[:, :-1], token_index[1:], 0)
        segment_start = jax.lax.cummax(jnp.pad(starts, ((0, 0), (1, 0))), axis=1)
        return cls(index, start, end, segment, token_index - segment_start)

    def window_ends(self, rate: int) -> Int[Array, "B n"]:
        """Return the index of the last token in each slot's window, or -1 for slots without an entry."""
        count = self.segment_offset.shape[1]
        is_end = (self.segment_offset + 1) % rate == 0
        is_end = is_end & (jnp.arange(count, dtype=jnp.int32) < self.length_after[:, None])
        is_end = jnp.pad(is_end, ((0, 0), (0, -count % rate))).reshape(len(is_end), -1, rate)
        ends = jnp.argmax(is_end, axis=2).astype(jnp.int32) + jnp.arange(is_end.shape[1], dtype=jnp.int32) * rate
        return jnp.where(is_end.any(axis=2), ends, -1)

    def slots(self, index: Int[Array, "B n"]) -> SlotMetadata:
        """Return the metadata of slots that contain the tokens ``index``. Index -1 marks empty slots."""
        return SlotMetadata(index, None, gather_clipped(self.segment, index))


def gather_clipped(values: Int[Array, "B C"], index: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Gather values of each row by index. Out-of-range indices are clipped."""
    return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)


def gather_by_index(
    values: Float[Array, "B S W"] | Int[Array, "B S W"], index: Int[Array, "B S"], first: Int[Array, "B"], count: int
) -> Array:
    """Gather the values of the tokens ``first`` to ``first + count - 1`` of each row.

    Args:
        values: Token values.
        index: Index of each value's token in the row. Values with negative indices are ignored.
        first: Index of the first token per row.
        count: Number of tokens per row.

    Returns:
        Values ``[B, count, W]``, with zeros for tokens without a value.
    """
    targets = jnp.where(index < 0, -1, index - first[:, None])
    targets = jnp.where(targets < 0, count, targets)
    no_source = jnp.full((len(values), count), values.shape[1], jnp.int32)
    sources = jax.vmap(lambda row, slots: row.at[slots].set(jnp.arange(len(slots), dtype=jnp.int32), mode="drop"))(
        no_source, targets
    )
    return jnp.take_along_axis(values, sources[..., None], axis=1, mode="fill", fill_value=0)


class CompressorOutput(NamedTuple):
    """Output of a `Compressor`.

    Attributes:
        cache: Updated cache, or ``None`` if no cache was passed.
        entries: All entries ``[B, n, W]``, including entries of the new tokens.
        slots: Indices and segments of the entries.
    """

    cache: CompressedCache | None
    entries: Float[Array, "B n W"]
    slots: SlotMetadata


class Compressor(nnx.Module):
    """Module that compresses token windows to entries ``norm(sum_j softmax_j(gate_j + place_j) * kv_j)``.

    The sum runs over the tokens j of ``series`` consecutive windows. With ``series=1``, an entry depends on a single
    window. With ``series=2``, an entry also depends on the previous window, whose tokens are projected by separate
    kernels. Entries are rotated by the position of the window's first token. See DeepSeek-V4, sections 2.3.1 and 2.3.2.
    Source: ``DeepseekV4CSACompressor`` and ``DeepseekV4HCACompressor`` in transformers.

    Args:
        dim: Width of the layer's input, D.
        width: Width of an entry, W.
        rate: Number of tokens per window.
        series: Number of consecutive windows that an entry depends on.
        eps: Epsilon for the norm.
        rotary: Rotary position embedding of the entries.
        rotate: Function that applies the rotary embedding to the entries.
        **kw: Parameter dtype and rngs.
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
    def entry_width(self) -> int:
        """Width of an entry."""
        return self.norm.scale.shape[-1]

    def project(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T _"], Float[Array, "B T _"]]:
        """Compute the values and the gates of the tokens, for each series."""
        return self.kv(x), self.gate(x)

    def position_bias(self, series: int) -> Float[Array, "rate W"] | float:
        """Return the bias of the gates by position in the window."""
        width = self.norm.scale.shape[-1]
        return self.place[...][:, series * width : (series + 1) * width]

    def to_entries(
        self, latents: Float[Array, "B n W"], first_positions: Int[Array, "B n"]
    ) -> Float[Array, "B n entry_width"]:
        """Rotate the normalized latents by the position of the window's first token."""
        return self.rotate(latents[:, :, None], compute_rotation(self.rotary, first_positions))[:, :, 0]

    @property
    def reach(self) -> int:
        """Number of tokens that an entry depends on, excluding the window's last token."""
        return self.series * self.rate - 1

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, rows: RowMetadata, cache: CompressedCache | None
    ) -> CompressorOutput:
        """Compress the windows that end in ``x``, and append the new entries to the cache."""
        projection, length = jnp.concatenate(self.project(x), axis=-1), x.shape[1]
        pending_tokens, tokens, index = None, projection, rows.index
        if cache is not None:  # With lookahead -1, `append_ring` always returns the stored tokens too.
            pending_tokens, tokens, index = append_ring(cache.pending.states, projection, rows, -1)
        tokens = gather_by_index(tokens, index, rows.length_before - self.reach, self.reach + length)
        ends = rows.window_ends(self.rate)
        may_continue = cache is not None and not context.fresh  # the first window may have started before this pass
        count = min(-(-length // self.rate) + may_continue, ends.shape[1])
        slots = rows.length_before[:, None] // self.rate + jnp.arange(count, dtype=jnp.int32)
        new_ends = jnp.where(slots < ends.shape[1], gather_clipped(ends, slots), -1)
        new_ends = jnp.where(new_ends >= rows.length_before[:, None], new_ends, -1)
        entries = self._entries(tokens, new_ends, rows, context)
        if cache is None or pending_tokens is None:
            return CompressorOutput(None, entries, rows.slots(new_ends))
        slots = jnp.where(new_ends < 0, ends.shape[1], slots)
        cache = CompressedCache(write_slots(cache.entries, entries, slots, 1), RecurrentState(pending_tokens))
        if context.fresh:
            return CompressorOutput(cache, entries, rows.slots(new_ends))
        return CompressorOutput(cache, as_float(cache.entries, entries.dtype), rows.slots(ends))

    def _entries(
        self, tokens: Float[Array, "B S _"], ends: Int[Array, "B n"], rows: RowMetadata, context: Context
    ) -> Float[Array, "B n entry_width"]:
        """Compute the entries of windows that end at ``ends``. ``tokens`` start at index ``length_before - reach``."""
        width, rate = self.norm.scale.shape[-1], self.rate
        end_offset = gather_clipped(rows.segment_offset, ends)
        kv_parts, gate_parts = [], []
        for i in range(self.series):
            distance = (self.series - i) * rate - 1  # from the start of window i to the entry's last token
            window_start = ends - distance - rows.length_before[:, None] + self.reach
            token_index = window_start[..., None] + jnp.arange(rate, dtype=jnp.int32)
            token_index = jnp.clip(token_index, 0, tokens.shape[1] - 1).reshape(len(token_index), -1, 1)
            kv, gate = (
                jnp.take_along_axis(tokens[..., start : start + width], token_index, axis=1).reshape(
                    *ends.shape, rate, width
                )
                for start in (i * width, (self.series + i) * width)
            )
            gate = gate.astype(jnp.float32) + self.position_bias(i)
            kv_parts.append(kv)
            gate_parts.append(jnp.where((end_offset >= distance)[..., None, None], gate, -jnp.inf))
        kv, gate = jnp.concatenate(kv_parts, axis=2), jnp.concatenate(gate_parts, axis=2)
        gate = jnp.where(ends[..., None, None] < 0, 0, gate)
        latents = self.norm(jnp.sum(kv * jax.nn.softmax(gate, axis=2).astype(kv.dtype), axis=2))
        assert context.positions is not None
        positions = jnp.broadcast_to(context.positions, rows.index.shape)[..., None]
        positions = gather_by_index(positions, rows.index, rows.length_before, rows.index.shape[1])[..., 0]
        end_positions = gather_clipped(positions, ends - rows.length_before[:, None])
        return self.to_entries(latents, jnp.maximum(end_positions - (rate - 1), 0))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> CompressedCache:
        """Create a cache for the entries of ``capacity`` tokens and for the inputs of incomplete entries."""
        width = self.norm.scale.shape[-1]
        entries = jnp.zeros((batch, -(-capacity // self.rate), self.entry_width), dtype)
        # With rate 1, no token is pending. A ring has at least one slot.
        values = jnp.zeros((batch, max(self.reach, 1) + lookahead, 2 * self.series * width), dtype)
        return CompressedCache(entries, RecurrentState(values))
