"""Attention in blocks of queries and keys equals the reference, and computes no block without an allowed pair."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxmoe import BlockwiseAttention, FlashAttention, ReferenceAttention
from nnxmoe.layers.attention import blockwise_attention
from nnxmoe.layers.attention.flash_attention import _key_ranges
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.mask import Mask
from tests.support.arrays import max_error
from tests.support.attention import masks
from tests.support.running import PART_TOLERANCE

SMALL = FlashAttention(16, 8)
LENGTH = 41  # not a multiple of either block size
HEADS, KV_HEADS, WIDTH, V_WIDTH = 6, 2, 8, 5


def operands(count: int, keys: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(keys)
    dims = ((HEADS, count, WIDTH), (KV_HEADS, keys, WIDTH), (KV_HEADS, keys, V_WIDTH))
    return tuple(jnp.asarray(rng.standard_normal((2, *dim)), dtype) for dim in dims)


SINKS = jnp.asarray(np.random.default_rng(0).standard_normal(HEADS) * 2, jnp.float32)


def segments(length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 4, (2, length)), axis=1), jnp.int32)


def padded(padding: str, window: int | None, length: int = LENGTH) -> Mask:
    """Mask of a pass without a cache: segments, padding, and indices that count real tokens."""
    real = jnp.asarray(masks(length)[padding], bool)
    index = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    return Mask(index, segments(length), SlotMetadata(index, real, segments(length)), window, causal=True)


def cached(kind: str) -> Mask:
    """Mask of a chunk of 13 tokens, of which row 1 pads four, with 19 and 3 tokens in a cache."""
    before, real = jnp.array([19, 3])[:, None], np.ones((2, 13), bool)
    real[1, [0, 5, 6, 12]] = False
    index = jnp.where(real, before + jnp.cumsum(real, axis=1) - 1, -1)
    slots = jnp.arange(37)[None]
    if kind == "full":
        keys = jnp.where(slots < before + real.sum(axis=1, keepdims=True), slots, -1)
    else:  # 24 slots of a ring, in which token i is in slot i % 24, and the chunk itself
        newest = before - 1
        ring = newest - (newest - slots[:, :24]) % 24
        keys = jnp.concatenate([ring, index], axis=1)
    segment = segments(40)
    key_segment, query_segment = (jnp.take_along_axis(segment, jnp.maximum(i, 0), axis=1) for i in (keys, index))
    return Mask(jnp.maximum(index, 0), query_segment, SlotMetadata(keys, None, key_segment), window=9)


def plain(window: int | None, length: int = LENGTH) -> Mask:
    index = jnp.arange(length)
    return Mask(index, None, SlotMetadata(index, None, None), window, causal=True)


@functools.cache
def compiled(attention_fn: Any, softcap: float | None) -> Any:
    """Gradients and output of rows with a key; the loss of other rows is zero."""

    def loss(arrays: Any, sinks: Any, mask: Mask) -> Any:
        seen = jnp.any(mask.allowed(), axis=-1)[:, None, :, None]
        out = attention_fn(*arrays, MaskedSoftmax(mask, 0.4, softcap, sinks))
        return jnp.sum(jnp.sin(jnp.where(seen, out, 0).astype(jnp.float32))), jnp.where(seen, out, 0)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True, allow_int=True))


CASES = {
    "plain": (plain(None), None, None),
    "window": (plain(7), None, SINKS),
    "window of one": (plain(1), None, SINKS),
    "left": (padded("left", 9), 1.5, SINKS),
    "right": (padded("right", 9), 1.5, SINKS),
    "holes": (padded("holes", 9), 1.5, SINKS),
    "full cache": (cached("full"), 1.5, None),
    "ring": (cached("ring"), 1.5, None),
}


@pytest.mark.parametrize("case", CASES)
def test_streaming_equals_reference(case: str) -> None:
    """Outputs and gradients of operands and sinks, relative to magnitude."""
    mask, softcap, sinks = CASES[case]
    arrays = operands(mask.query_index.shape[-1], mask.keys.index.shape[-1])
    unused = jnp.zeros(1)
    ours, wanted = (
        jax.tree.leaves(
            run_of(attention_fn, softcap, sinks is not None)(arrays, unused if sinks is None else sinks, mask)
        )
        for attention_fn in (SMALL, ReferenceAttention())
    )
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == b.dtype and max_error(a, b) < PART_TOLERANCE * max(1.0, float(jnp.abs(b).max()))
        assert np.isfinite(np.asarray(a, np.float32)).all()


def run_of(attention_fn: Any, softcap: float | None, sinks: bool) -> Any:
    """The compiled gradient; without sinks, its second argument is ignored."""
    return compiled(attention_fn if sinks else WithoutSinks(attention_fn), softcap)


@dataclasses.dataclass(frozen=True)
class WithoutSinks:
    inner: Any

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> Any:
        return self.inner(q, k, v, dataclasses.replace(scores, sinks=None))


@pytest.mark.slow
def test_bfloat16_is_as_accurate_as_reference() -> None:
    """Errors against float32, of outputs and gradients, are at most 1.2 times those of the reference."""
    mask, _, _ = CASES["left"]
    exact = operands(LENGTH, LENGTH)
    rounded = tuple(x.astype(jnp.bfloat16) for x in exact)
    wide = tuple(x.astype(jnp.float32) for x in rounded)
    wanted = jax.tree.leaves(compiled(ReferenceAttention(), 1.5)(wide, SINKS, mask))
    ways = (SMALL, ReferenceAttention())
    found = [jax.tree.leaves(compiled(attention_fn, 1.5)(rounded, SINKS, mask)) for attention_fn in ways]
    for ours, theirs, exactly in zip(*found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        ours_off, theirs_off = (
            float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - exactly) ** 2))) for x in (ours, theirs)
        )
        assert ours_off < 1.2 * theirs_off + 1e-6


@pytest.mark.slow
def test_accumulates_in_float32() -> None:
    """A running sum in bfloat16 would not change any more after 256 of 1024 equal weights."""
    mask = Mask(jnp.full(2, 1023), None, SlotMetadata(jnp.arange(1024), None, None), None)
    q, k, v = operands(2, 1024, jnp.bfloat16)
    ours, wanted = (
        attention_fn(q * 0, k, v + 1, MaskedSoftmax(mask, 0.4))
        for attention_fn in (FlashAttention(2, 4), ReferenceAttention())
    )
    assert max_error(ours, wanted) < 2**-7


@pytest.mark.slow
def test_query_without_any_key_is_zero() -> None:
    """Without a sink its output is zero, and so are its gradients; with a NaN in its operands, outputs are NaN."""
    index = jnp.arange(LENGTH)
    mask = Mask(index, None, SlotMetadata(index, jnp.zeros((2, LENGTH), bool), None), None)
    arrays = operands(LENGTH, LENGTH)
    out, back = jax.vjp(lambda *a: SMALL(*a, MaskedSoftmax(mask, 0.4)), *arrays)
    assert not out.any() and not any(slope.any() for slope in back(jnp.ones_like(out)))
    q, k, v = arrays
    assert np.isnan(SMALL(q.at[0, 0, 3, 0].set(jnp.nan), k, v, MaskedSoftmax(plain(None), 0.4))[0, 0, 3]).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_blocks_without_allowed_pairs_are_skipped(case: str) -> None:
    """The ranges cover every block with an allowed pair, and for plain masks and full caches nothing else."""
    mask, _, _ = CASES[case]
    if mask.keys.valid is not None:
        slots = dataclasses.replace(mask.keys, index=jnp.where(mask.keys.valid, mask.keys.index, -1), valid=None)
        mask = dataclasses.replace(mask, keys=slots)
    queries, keys = (mask.query_index.shape[-1] // 8 * 8, mask.keys.index.shape[-1] // 4 * 4)
    mask = mask.select(slice(0, queries), slice(0, keys))
    allowed = np.asarray(mask.allowed()).reshape(-1, queries // 8, 8, keys // 4, 4).any(axis=(0, 2, 4))
    first, end = (np.asarray(x) for x in _key_ranges(mask, (8, 4)))
    for i, row in enumerate(allowed):
        needed = np.flatnonzero(row)
        assert not needed.size or (first[i] <= needed[0] and needed[-1] < end[i])
        if case in ("plain", "window", "window of one"):
            assert (first[i], end[i]) == (needed[0], needed[-1] + 1)
    assert (end - first).sum() < (1 if case == "ring" else 0.75) * allowed.size + 1


class Recorder:
    """Stub that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> Any:
        self.calls += 1
        return jnp.zeros((*q.shape[:3], v.shape[3]))


@pytest.mark.parametrize(
    ("count", "keys", "streams"), [(1, 600_000, 0), (512, 512, 0), (513, 513, 1), (32, 8192, 0), (32, 8193, 1)]
)
def test_blockwise_streams_long_passes(count: int, keys: int, streams: int) -> None:
    """A step of one token never streams: its scores are [B, N, 1, S]."""
    long, inner = Recorder(), Recorder()
    mask = Mask(jnp.arange(count), None, SlotMetadata(jnp.arange(keys), None, None), None, causal=count == keys)
    given = (jax.ShapeDtypeStruct((1, 1, length, 4), jnp.float32) for length in (count, keys, keys))
    jax.eval_shape(lambda *a: BlockwiseAttention(inner, 8, long)(*a, MaskedSoftmax(mask, 1.0)), *given)
    assert long.calls == streams and bool(inner.calls) == (not streams)


def test_default_block_sizes_equal_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "MAX_PAIRS", 200 * 200)
    arrays, scores = operands(261, 261), MaskedSoftmax(plain(150, 261), 0.4)
    ours, wanted = (
        jax.jit(lambda *a, f=f: f(*a, scores))(*arrays) for f in (BlockwiseAttention(), ReferenceAttention())
    )
    assert max_error(ours, wanted) < PART_TOLERANCE


@pytest.mark.wrong_types
@pytest.mark.parametrize("size", [0, True, 2.5, "2"])
def test_invalid_arguments(size: Any) -> None:
    for name in ("block_q", "block_k"):
        with pytest.raises(ValueError, match=rf"FlashAttention\({name}=.*positive integer"):
            FlashAttention(**{name: size})
    with pytest.raises(ValueError, match=r"FlashAttention\(block_k=None.*positive integer"):
        FlashAttention(block_k=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"BlockwiseAttention\(long_context=.*such as FlashAttention\(\)"):
        BlockwiseAttention(long_context=FlashAttention)  # pyright: ignore[reportArgumentType]
