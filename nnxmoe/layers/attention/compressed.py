"""Compressed keys: one entry for every few tokens, which later tokens attend to instead of these (DeepSeek-V4, 2026).

Windows of ``rate`` tokens are counted from the start of each segment, so that padding and packing change nothing. The
entry of a window exists once its last token does, in slot ``index of that token // rate`` of its row.
"""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.cache import Buffer, CacheMetadata, RecurrentState, SlotMetadata, append_ring, floats, written
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import RotateFn, compute_rotation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """The entries of a layer, ``[*L, B, C / rate, W]``, and what the newest tokens of a row contribute to entries,
    ``[*L, B, R, W]``: that of token i at ``i % R``."""

    entries: Buffer
    open: RecurrentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassRows(CacheMetadata):
    """The `CacheMetadata` of a pass, also of one without a cache, for parts that look back.

    ``own``: for every stored token by its index, its index in its segment.
    """

    own: Int[Array, "B C"]

    @classmethod
    def of(cls, context: Context, batch: int, length: int) -> "PassRows":
        """The rows of a pass."""
        if context.past is not None:
            past = context.past
            before, after, index, segment = past.before, past.after, past.index, past.segment
        else:
            index = jnp.broadcast_to(context.index, (batch, length))
            index = index if context.valid is None else jnp.where(context.valid, index, -1)
            before, after = jnp.zeros((batch,), jnp.int32), jnp.max(index, axis=1) + 1
            segment = jnp.zeros((batch, length), jnp.int32)
            if context.segment is not None:
                segment = gather_by_index(context.segment[..., None], index, before, length)[..., 0]
        places = jnp.arange(segment.shape[1], dtype=jnp.int32)
        starts = jnp.where(segment[:, 1:] != segment[:, :-1], places[1:], 0)
        first = jax.lax.cummax(jnp.pad(starts, ((0, 0), (1, 0))), axis=1)
        return cls(index, before, after, segment, places - first)

    def closing(self, rate: int) -> Int[Array, "B n"]:
        """The index of the last token of each slot's window; -1 for slots without an entry."""
        count = self.own.shape[1]
        last = ((self.own + 1) % rate == 0) & (jnp.arange(count, dtype=jnp.int32) < self.after[:, None])
        last = jnp.pad(last, ((0, 0), (0, -count % rate))).reshape(len(last), -1, rate)
        at = jnp.argmax(last, axis=2).astype(jnp.int32) + jnp.arange(last.shape[1], dtype=jnp.int32) * rate
        return jnp.where(last.any(axis=2), at, -1)

    def slots(self, index: Int[Array, "B n"]) -> SlotMetadata:
        """The slots that hold the tokens of these indices, -1 for none."""
        return SlotMetadata(index, None, gather_clipped(self.segment, index))


def gather_clipped(values: Int[Array, "B C"], index: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """The value at each index of its row; any for an index out of range."""
    return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)


def gather_by_index(
    values: Float[Array, "B S W"] | Int[Array, "B S W"], index: Int[Array, "B S"], first: Int[Array, "B"], count: int
) -> Array:
    """``count`` tokens of each row from the index ``first`` on, ``[B, count, W]``; zeros for those that are not there.

    ``index``: of each of the values in its row, negative for none.
    """
    at = jnp.where(index < 0, -1, index - first[:, None])
    at = jnp.where(at < 0, count, at)
    empty = jnp.full((len(values), count), values.shape[1], jnp.int32)
    where = jax.vmap(lambda row, at: row.at[at].set(jnp.arange(len(at), dtype=jnp.int32), mode="drop"))(empty, at)
    return jnp.take_along_axis(values, where[..., None], axis=1, mode="fill", fill_value=0)


class Compressor(nnx.Module):
    """Entries ``norm(sum_j softmax_j(gate_j + place_j) * kv_j)`` over the tokens of ``series`` windows each.

    With one series an entry is of its own window; with two also of the window before, whose tokens have other kernels
    (paper 2.3.1 and 2.3.2; ``DeepseekV4CSACompressor`` and ``DeepseekV4HCACompressor`` in transformers). Entries are
    rotated by the position of their window's first token.
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
        """How many tokens before its last one an entry depends on."""
        return self.series * self.rate - 1

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, rows: PassRows, cache: CompressedCache | None
    ) -> tuple[CompressedCache | None, Float[Array, "B n W"], SlotMetadata]:
        """Return the cache, all entries of the rows with those of the tokens x, and the slots of their last tokens."""
        new, index, open_tokens = jnp.concatenate([self.kv(x), self.gate(x)], axis=-1), rows.index, None
        length, seen = x.shape[1], new
        if cache is not None:  # -1 spare slots: even one token is seen beside those that were stored before it
            open_tokens, seen, index = append_ring(cache.open.states, new, rows, -1)
        seen = gather_by_index(seen, index, rows.before - self.reach, self.reach + length)
        closing, alone = rows.closing(self.rate), cache is None or context.fresh
        count = min(-(-length // self.rate) + (not alone), closing.shape[1])
        slots = rows.before[:, None] // self.rate + jnp.arange(count, dtype=jnp.int32)
        last = jnp.where(slots < closing.shape[1], gather_clipped(closing, slots), -1)
        last = jnp.where(last >= rows.before[:, None], last, -1)
        entries = self._entries(seen, last, rows, context)
        if cache is None or open_tokens is None:
            return None, entries, rows.slots(last)
        at = jnp.where(last < 0, closing.shape[1], slots)
        cache = CompressedCache(written(cache.entries, entries, at, 1), RecurrentState(open_tokens))
        if context.fresh:
            return cache, entries, rows.slots(last)
        return cache, floats(cache.entries, entries), rows.slots(closing)

    def _entries(
        self, seen: Float[Array, "B S _"], last: Int[Array, "B n"], rows: PassRows, context: Context
    ) -> Float[Array, "B n W"]:
        """The entries whose last tokens have these indices; ``seen``: tokens from ``before - reach`` on."""
        (width,), rate = self.norm.scale.shape[-1:], self.rate
        own, parts = gather_clipped(rows.own, last), []
        for i in range(self.series):
            ago = (self.series - i) * rate - 1  # from the window's first token to the entry's last
            at = (last - ago - rows.before[:, None] + self.reach)[..., None] + jnp.arange(rate, dtype=jnp.int32)
            at = jnp.clip(at, 0, seen.shape[1] - 1).reshape(len(at), -1, 1)
            kv, gate = (
                jnp.take_along_axis(seen[..., start : start + width], at, axis=1).reshape(*last.shape, rate, width)
                for start in (i * width, (self.series + i) * width)
            )
            gate = gate.astype(jnp.float32) + self.place[...][:, i * width : (i + 1) * width]
            parts.append((kv, jnp.where((own >= ago)[..., None, None], gate, -jnp.inf)))
        kv, gate = (jnp.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        gate = jnp.where(last[..., None, None] < 0, 0, gate)
        entries = self.norm(jnp.sum(kv * jax.nn.softmax(gate, axis=2).astype(kv.dtype), axis=2))
        assert context.positions is not None
        positions = jnp.broadcast_to(context.positions, rows.index.shape)[..., None]
        positions = gather_by_index(positions, rows.index, rows.before, rows.index.shape[1])[..., 0]
        first = jnp.maximum(gather_clipped(positions, last - rows.before[:, None]) - (rate - 1), 0)
        return self.rotate(entries[:, :, None], compute_rotation(self.rotary, first))[:, :, 0]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> CompressedCache:
        """Entries for ``capacity`` tokens, and the tokens that entries not yet made depend on."""
        width = self.norm.scale.shape[-1]
        entries = jnp.zeros((batch, -(-capacity // self.rate), width), dtype)
        values = jnp.zeros((batch, self.reach + lookahead, 2 * self.series * width), dtype)
        return CompressedCache(entries, RecurrentState(values))
