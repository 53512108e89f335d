"""Attention and KV caches: cached decoding equals the full pass, and every fast form equals the reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import AbsorbedMLA, AdaptiveMLA, BlockwiseAttention, FusedAttention, NaiveMLA, ReferenceAttention
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.attention.mla import MLA, MLADims
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import Cache, CacheMetadata, SlotMetadata, append_full, append_ring
from nnxmoe.layers.context import Context
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import PartialRotary, compute_rotation, rotate_halves, rotate_pairs
from tests.support.arrays import inputs_first, max_error
from tests.support.attention import DENSE, LENGTH, MODELS, SCANNED, masks
from tests.support.running import PART_TOLERANCE, feed, forward, randomise
from tests.support.tiny import ORACLE, build_tiny, random_tokens


def counted(mask: np.ndarray) -> np.ndarray:
    """Positions that a cache assigns: the number of preceding real tokens."""
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)


# Cached decoding
CHUNKS = {
    "one-by-one": [1] * LENGTH,
    "prompt-then-steps": [10] + [1] * (LENGTH - 10),
    "uneven": [3, 1, 10, 3, 1, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("full-scanned", "ring", "latent-naive", "full") else [])
        for name in MODELS
    ],
)
def test_cached_decoding_equals_the_full_pass(name: str) -> None:
    """Covers several chunkings and paddings, and rows of unequal lengths."""
    kind, strategy, changes = MODELS[name]
    model, tokens = build_tiny(kind, strategy, **changes), random_tokens(2, LENGTH)
    for padding, mask in masks(LENGTH).items():
        full = forward(model, tokens, attention_mask=mask, positions=counted(mask)).logits
        for cut, chunks in CHUNKS.items():
            logits, cache = feed(model, tokens, chunks, mask=mask, capacity=24)
            assert max_error(logits, full, mask) < 2 * PART_TOLERANCE, (padding, cut)
            assert np.isfinite(logits).all()
            assert cache.length.tolist() == mask.sum(axis=1).tolist()


@pytest.mark.slow
def test_ring_cache_far_beyond_the_window() -> None:
    """The ring wraps around many times, for a prompt longer and one shorter than the window."""
    model = build_tiny("mistral", sliding_window=7, num_hidden_layers=1)
    tokens = random_tokens(1, 60, seed=1)
    full = forward(model, tokens).logits
    for prompt in (2, 17):
        logits, _ = feed(model, tokens, [prompt] + [1] * (60 - prompt), mask=None, capacity=60)
        assert max_error(logits, full) < 2 * PART_TOLERANCE


def test_positions_default_to_the_index_without_a_cache() -> None:
    """Rotary embedding depends on position differences only: left padding has no effect, holes in the middle do."""
    model, tokens = build_tiny("llama"), random_tokens(2, LENGTH)
    for padding, mask in masks(LENGTH).items():
        index = forward(model, tokens, attention_mask=mask).logits
        count = forward(model, tokens, attention_mask=mask, positions=counted(mask)).logits
        error = max_error(index, count, mask)
        assert (error > 1e-2) if padding == "holes" else (error < 2 * PART_TOLERANCE), padding


@pytest.mark.slow
def test_explicit_positions_with_a_cache() -> None:
    model, tokens = build_tiny("llama"), random_tokens(1, 8)
    positions = np.array([[0, 1, 5, 6, 7, 20, 21, 22]], np.int32)
    full = forward(model, tokens, positions=positions).logits
    cache, got = model.empty_cache(1, 8), []
    for part in (slice(0, 5), slice(5, 8)):
        out = forward(model, tokens[:, part], positions=positions[:, part], cache=cache)
        cache = out.cache
        got.append(np.asarray(out.logits))
    assert max_error(np.concatenate(got, axis=1), full) < 2 * PART_TOLERANCE


def test_padding_never_reaches_real_tokens() -> None:
    """Changing masked ids leaves the logits bitwise equal, and they match those without padding."""
    for kind, changes in (("mistral", {}), ("deepseek_v3", DENSE)):
        model, tokens = build_tiny(kind, **changes), random_tokens(2, 12)
        mask = np.ones_like(tokens)
        mask[:, :5] = 0
        other = np.where(mask, tokens, (tokens + 7) % 53)
        one, two = (forward(model, t, attention_mask=mask).logits for t in (tokens, other))
        assert np.array_equal(np.asarray(one)[:, 5:], np.asarray(two)[:, 5:])
        assert max_error(np.asarray(one)[:, 5:], forward(model, tokens[:, 5:]).logits) < 2 * PART_TOLERANCE


def test_any_nonzero_mask_value_means_real() -> None:
    model, tokens = build_tiny("llama"), random_tokens(2, 12)
    mask = masks(12)["left"]
    wanted = forward(model, tokens, attention_mask=mask).logits
    for same in (mask.astype(bool), mask * 3, -mask):
        assert np.array_equal(forward(model, tokens, attention_mask=same).logits, wanted)


# Capacity and memory


def nbytes(cache: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))


@pytest.mark.parametrize("strategy", [ORACLE, SCANNED])
def test_ring_cache_size_is_the_window(strategy: nnxmoe.Strategy) -> None:
    model = build_tiny("mistral", strategy, sliding_window=7)
    small, large = model.empty_cache(2, 20), model.empty_cache(2, 100_000)
    assert nbytes(small) == nbytes(large) == 2 * 2 * (2 * 2 * 7 * 8) * 4  # k and v, layers, [B K W H], float32
    assert nbytes(model.empty_cache(2, 3)) == 2 * 2 * (2 * 2 * 3 * 8) * 4  # never larger than the capacity
    _, cache = feed(model, random_tokens(2, 15), [15], mask=None, capacity=20)
    assert nbytes(cache) == nbytes(small)


def test_a_latent_cache_holds_latents_only() -> None:
    model = build_tiny("deepseek_v3")
    assert nbytes(model.empty_cache(2, 10)) == 3 * (2 * 10 * (16 + 8)) * 4
    assert not build_tiny("llama").empty_cache(1, 4).layers[0][0].ring
    assert build_tiny("mistral").empty_cache(1, 4).layers[0][0].ring


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_a_full_cache_is_refused(kind: str) -> None:
    model, tokens = build_tiny(kind), random_tokens(1, 6)
    cache = model.empty_cache(1, 5)
    with pytest.raises(ValueError, match=r"the cache has room for 5 tokens; 0 are cached and 6 more do not fit"):
        model(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"the cache has room for 5 tokens; 5 are cached and 1 more"):
        model(tokens[:, 5:], cache=dataclasses.replace(cache, length=jnp.full((1,), 5, jnp.int32)))


def test_cache_is_not_modified_by_a_continuation() -> None:
    """Two continuations of one cache are independent."""
    model, tokens = build_tiny("mistral"), random_tokens(1, 10)
    _, cache = feed(model, tokens[:, :8], [8], mask=None, capacity=16)
    first = forward(model, tokens[:, 8:9], cache=cache).logits
    forward(model, tokens[:, 9:10], cache=cache)
    assert np.array_equal(first, forward(model, tokens[:, 8:9], cache=cache).logits)


def past(lengths: list[int], real: np.ndarray) -> CacheMetadata:
    """Metadata of rows that hold ``lengths`` tokens and get new ones, of which ``real`` marks the non-padding."""
    cache = Cache(layers=(), length=jnp.asarray(lengths), segment=jnp.zeros((len(lengths), 99), jnp.int32), capacity=99)
    return cache.advance(real.shape[1], jnp.asarray(real), None)[1]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 7))])
def test_append_ring_equals_a_list(size: int, lookahead: int) -> None:
    """Random chunks with padding: slot i % size holds token i, and a chunk attends to the earlier ring, then to
    itself; one of few tokens, that lookahead slots have room for, to the ring after it."""
    rng, rows = np.random.default_rng(size), 3
    buffer, stored, lengths = jnp.full((rows, size, 1), -1), [[-1] * size for _ in range(rows)], [0] * rows
    for count in rng.choice([1, max(1, size - 1), size, 2 * size + 1], 12):
        real = rng.random((rows, count)) < 0.7
        new = rng.integers(0, 999, (rows, count))
        held = past(lengths, real)
        buffer, seen, index = jax.jit(append_ring, static_argnums=3)(
            buffer, jnp.asarray(new)[..., None], held, lookahead
        )
        for row in range(rows):
            numbers = lengths[row] + np.cumsum(real[row]) - 1
            wanted = {n: x for n, x in zip(_numbers(lengths[row], size), stored[row], strict=True) if n >= 0}
            wanted |= {int(n): int(x) for n, x, here in zip(numbers, new[row], real[row], strict=True) if here}
            for n, x, here in zip(numbers, new[row], real[row], strict=True):
                stored[row][n % size] = int(x) if here else stored[row][n % size]
            lengths[row] += int(real[row].sum())
            if count <= 1 + lookahead:
                wanted = {n: x for n, x in wanted.items() if n >= lengths[row] - size}
            found = zip(np.asarray(index)[row].tolist(), np.asarray(seen)[row, :, 0].tolist(), strict=True)
            assert {n: x for n, x in found if n >= 0} == wanted
            assert np.asarray(buffer)[row, :, 0].tolist() == stored[row]


def _numbers(length: int, size: int) -> list[int]:
    """Index of the token in each slot of a ring, -1 if empty."""
    newest = {n % size: n for n in range(length)}
    return [newest.get(slot, -1) for slot in range(size)]


def test_append_full_writes_in_the_buffers_dtype() -> None:
    """Real tokens are written at each row's own cursor; padding is not."""
    real = np.array([[True, True], [False, True]])
    new = 1 + jnp.arange(4.0).reshape(2, 2, 1)
    buffer, seen, index = append_full(jnp.zeros((2, 4, 1), jnp.bfloat16), new, past([1, 2], real))
    assert buffer.dtype == seen.dtype == jnp.bfloat16
    assert np.asarray(buffer[..., 0], np.float32).tolist() == [[0, 1, 2, 0], [0, 0, 4, 0]]
    assert np.asarray(index).tolist() == [[0, 1, 2, -1], [0, 1, 2, -1]]


# Rows of different lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "deepseek_v3"))]
)
def test_rows_that_advance_by_different_counts(kind: str) -> None:
    """Each step gives a row zero or more tokens with padding anywhere; results equal those of each row alone."""
    model, rng = build_tiny(kind, nnxmoe.Strategy()), np.random.default_rng(0)
    tokens, total = random_tokens(3, 20), np.array([20, 13, 9])
    full = forward(model, tokens).logits
    cache, done = model.empty_cache(3, 20), np.zeros(3, int)
    for width in [5, 1, 4, 1, 1, 4, 1, 4, 4, 1, 4]:
        given, real = np.zeros((3, width), np.int32), np.zeros((3, width), bool)
        for row in range(3):
            count = min(int(rng.integers(0, width + 1)), total[row] - done[row])
            places = np.sort(rng.permutation(width)[:count])
            given[row, places], real[row, places] = tokens[row, done[row] : done[row] + count], True
        out = model(given, attention_mask=real, cache=cache)
        cache = out.cache
        assert cache is not None
        for row in range(3):
            count = int(real[row].sum())
            wanted = np.asarray(full)[row, done[row] : done[row] + count]
            assert max_error(np.asarray(out.logits)[row][real[row]], wanted) < 2 * PART_TOLERANCE
            done[row] += count
        assert cache.length.tolist() == done.tolist()
    assert done.sum() > 25


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(ORACLE, marks=pytest.mark.slow), nnxmoe.Strategy()])
def test_layers_with_different_windows(strategy: nnxmoe.Strategy) -> None:
    """Alternating windows against a slow reference that slices the keys per query, without a cache and with a mix of
    ring and full caches."""
    model: Any = build_tiny("mistral", strategy, num_hidden_layers=3)
    tokens = random_tokens(2, 12)
    windows = [3, None, 5]
    for layer, window in zip(model.stacks[0].layers, windows, strict=True):
        layer.attention.window = window
        layer.attention.attention_fn = dataclasses.replace(Written(), window=window)
    wanted = np.asarray(model.logits(model.body(tokens).x))
    for layer in model.stacks[0].layers:
        layer.attention.attention_fn = strategy.attention_fn
    assert max_error(forward(model, tokens).logits, wanted) < 2 * PART_TOLERANCE
    assert [layer.ring for layer in model.empty_cache(2, 12).layers[0]] == [True, False, True]
    for chunks in ([1] * 12, [5, 1, 4, 1, 1]):
        assert max_error(feed(model, tokens, chunks, mask=None, capacity=12)[0], wanted) < 2 * PART_TOLERANCE


@dataclasses.dataclass(frozen=True)
class Written:
    """Attention per query over the keys in its window; for passes without a cache."""

    window: int | None = None

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> jax.Array:
        groups, outs = q.shape[1] // k.shape[1], []
        q, k, v = np.asarray(q), np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
        for t in range(q.shape[2]):
            first = 0 if self.window is None else max(0, t + 1 - self.window)
            powers = np.exp(np.einsum("bnh,bnsh->bns", q[:, :, t], k[:, :, first : t + 1]) * scores.scale)
            weights = powers / powers.sum(axis=-1, keepdims=True)
            outs.append(np.einsum("bns,bnsh->bnh", weights, v[:, :, first : t + 1]))
        return jnp.asarray(np.stack(outs, axis=2))


# Packed sequences


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "deepseek_v3"])
def test_packed_segments_equal_separate_sequences(kind: str) -> None:
    """Several documents per row, each with positions from 0, followed by padding."""
    model = build_tiny(kind, **(DENSE if kind == "deepseek_v3" else {"num_hidden_layers": 1}))
    lengths, tokens = [[5, 7, 2], [9, 4, 1]], random_tokens(2, 16)
    segments, positions = np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)
    for row, counts in enumerate(lengths):
        start = 0
        for number, count in enumerate(counts):
            segments[row, start : start + count] = number + 1
            positions[row, start : start + count] = np.arange(count)
            start += count
    mask = segments != 0
    packed = forward(model, tokens, attention_mask=mask, positions=positions, segment_ids=segments).logits
    for row, counts in enumerate(lengths):
        start = 0
        for count in counts:
            part = slice(start, start + count)
            padded = np.zeros((1, 16), np.int32)  # one shape, one compilation
            padded[0, :count] = tokens[row, part]
            alone = forward(model, padded, attention_mask=np.arange(16)[None] < count).logits
            assert max_error(np.asarray(packed)[row, part], np.asarray(alone)[0, :count]) < 2 * PART_TOLERANCE
            start += count


@pytest.mark.slow
def test_segments_with_a_cache() -> None:
    """A cache stores each token's segment id; the caller passes positions."""
    model, tokens = build_tiny("mistral"), random_tokens(1, 12)
    segments = np.array([[1] * 5 + [2] * 7], np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], np.int32)
    full = forward(model, tokens, positions=positions, segment_ids=segments).logits
    cache, got = model.empty_cache(1, 12), []
    for part in (slice(0, 7), slice(7, 12)):
        arrays = {"positions": positions[:, part], "segment_ids": segments[:, part]}
        out = forward(model, tokens[:, part], cache=cache, **arrays)
        cache = out.cache
        got.append(np.asarray(out.logits))
    assert max_error(np.concatenate(got, axis=1), full) < 2 * PART_TOLERANCE


# Attention kernels


def some_mask(rng: np.random.Generator, batch: int, count: int, keys: int, window: int | None) -> Mask:
    """Mask for the last ``count`` of ``keys`` tokens as queries, with some padding and two segments."""
    valid = rng.random((batch, keys)) < 0.8
    valid[:, -count:] = True
    segment = np.sort(rng.integers(0, 2, (batch, keys)), axis=1)
    slots = SlotMetadata(jnp.arange(keys), jnp.asarray(valid), jnp.asarray(segment))
    return Mask(jnp.arange(keys - count, keys), jnp.asarray(segment[:, -count:]), slots, window)


def test_mask_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    for window in (None, 1, 3):
        mask = some_mask(rng, 2, 4, 9, window)
        allowed = np.asarray(mask.allowed())
        for b, t, s in np.ndindex(allowed.shape):
            q = 5 + t
            seen = s <= q and (window is None or s > q - window)
            seen &= bool(mask.keys.valid[b, s]) and int(mask.keys.segment[b, s]) == int(mask.query_segment[b, t])
            assert bool(allowed[b, t, s]) == seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "v_width", "window"),
    [(6, 2, 8, 5, 3), (3, 1, 12, 12, None)],
)
def test_reference_and_fused_equal_numpy(
    heads: int, kv_heads: int, width: int, v_width: int, window: int | None
) -> None:
    rng = np.random.default_rng(heads)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, heads, 5, width), (2, kv_heads, 9, width), (2, kv_heads, 9, v_width))
    )
    mask, arrays = some_mask(rng, 2, 5, 9, window), [jnp.asarray(a) for a in (q, k, v)]
    allowed, wanted = np.asarray(mask.allowed()), np.empty((2, heads, 5, v_width))
    sinks = jnp.asarray(rng.standard_normal(heads) * 3, jnp.float32)
    for scores in (
        MaskedSoftmax(mask, 0.3),
        MaskedSoftmax(mask, 0.9, softcap=1.5),
        MaskedSoftmax(mask, 0.3, sinks=sinks),
    ):
        for b, n in np.ndindex(2, heads):
            products = q[b, n].astype(np.float64) @ k[b, n // (heads // kv_heads)].T * scores.scale
            if scores.softcap is not None:
                products = scores.softcap * np.tanh(products / scores.softcap)
            weights = np.exp(products) * allowed[b]
            sink = 0 if scores.sinks is None else np.exp(float(sinks[n]))
            wanted[b, n] = weights / (weights.sum(axis=-1, keepdims=True) + sink) @ v[b, n // (heads // kv_heads)]
        assert max_error(ReferenceAttention()(*arrays, scores), wanted) < PART_TOLERANCE
        if scores.softcap is None:
            assert max_error(FusedAttention()(*arrays, scores), wanted) < PART_TOLERANCE
        else:
            with pytest.raises(ValueError, match="does not support a soft cap"):
                FusedAttention()(*arrays, scores)


def test_gradients_of_fused_equal_reference() -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((2, n, 6, 8)), jnp.float32) for n in (4, 2, 2)]
    mask = some_mask(rng, 2, 6, 6, 4)
    one, two = (
        jax.jit(
            jax.grad(lambda a, attention_fn=attention_fn: jnp.sum(jnp.sin(attention_fn(*a, MaskedSoftmax(mask, 0.4)))))
        )(arrays)
        for attention_fn in (ReferenceAttention(), FusedAttention())
    )
    for a, b in zip(one, two, strict=True):
        assert max_error(a, b) < PART_TOLERANCE


def test_fully_masked_query_is_finite() -> None:
    """Its gradients are finite too: NaN times zero is NaN and would reach every parameter."""
    slots = SlotMetadata(jnp.arange(3), jnp.zeros((1, 3), bool), jnp.zeros((1, 3), jnp.int32))
    mask = Mask(jnp.arange(3), jnp.zeros((1, 3), jnp.int32), slots, None)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 4)), jnp.float32)
    sinks = MaskedSoftmax(mask, 0.5, sinks=jnp.asarray([-1e4, 1e4], jnp.float32))
    for attention_fn, scores in (
        (ReferenceAttention(), MaskedSoftmax(mask, 0.5)),
        (FusedAttention(), MaskedSoftmax(mask, 0.5)),
        (ReferenceAttention(), sinks),
    ):
        value, gradient = jax.jit(jax.value_and_grad(lambda x, f=attention_fn, s=scores: jnp.sum(f(x, x, x, s))))(x)
        assert np.isfinite(value) and np.isfinite(np.asarray(gradient)).all()


def test_fused_refuses_wide_values() -> None:
    q = jnp.zeros((1, 1, 2, 4))
    slots = SlotMetadata(jnp.arange(2), jnp.ones((1, 2), bool), jnp.zeros((1, 2), jnp.int32))
    mask = Mask(jnp.arange(2), jnp.zeros((1, 2), jnp.int32), slots, None)
    with pytest.raises(ValueError, match=r"5 > 4.*ReferenceAttention"):
        FusedAttention()(q, q, jnp.zeros((1, 1, 2, 5)), MaskedSoftmax(mask, 1.0))


@pytest.mark.parametrize(
    ("width", "dtype", "sinks", "message"),
    [
        (8, "float32", False, "requires bfloat16 or float16, got float32"),
        (12, "bfloat16", False, "a multiple of 8 up to 256, got 12"),
        (264, "float16", False, "a multiple of 8 up to 256, got 264"),
        (256, "bfloat16", True, "a multiple of 8 up to 256, got 256 plus 8 for sinks"),
    ],
)
def test_cudnn_without_a_fallback_refuses_what_it_does_not_support(
    width: int, dtype: str, sinks: bool, message: str
) -> None:
    q, index = jnp.zeros((1, 1, 2, width), dtype), jnp.arange(2)
    mask = Mask(index, None, SlotMetadata(index, None, None), None, causal=True)
    softmax = MaskedSoftmax(mask, 1.0, sinks=jnp.zeros(1) if sinks else None)
    with pytest.raises(ValueError, match=rf"FusedAttention with cuDNN .*{message}\. Use ReferenceAttention"):
        FusedAttention("cudnn")(q, q, q, softmax)


# Blocks of queries


def causal_mask(length: int, window: int | None, padding: str, segments: bool) -> tuple[Mask, np.ndarray]:
    """Mask of two rows without a cache, and a boolean array of the real tokens."""
    real = masks(length)[padding].astype(bool)
    index, valid = jnp.arange(length), None if padding == "full" else jnp.asarray(real)
    segment = None
    if segments:
        segment = jnp.asarray(np.sort(np.random.default_rng(length).integers(0, 4, (2, length)), axis=1), jnp.int32)
    return Mask(index, segment, SlotMetadata(index, valid, segment), window, causal=True), real


def operands(length: int, heads: int, kv_heads: int) -> list[jax.Array]:
    rng = np.random.default_rng(length)
    dims = ((heads, 8), (kv_heads, 8), (kv_heads, 5))
    return [jnp.asarray(rng.standard_normal((2, n, length, width)), jnp.float32) for n, width in dims]


@pytest.mark.slow
@pytest.mark.parametrize(("segments", "paddings"), [(False, ["full"]), (True, ["left", "right", "holes"])])
@pytest.mark.parametrize(
    ("length", "blocks", "window", "heads", "kv_heads"),
    [
        (192, 3, None, 4, 2),
        (197, 2, 70, 3, 1),
        pytest.param(263, 8, 1, 2, 2, marks=pytest.mark.slow),
        pytest.param(323, 8, 90, 6, 2, marks=pytest.mark.slow),
    ],
)
def test_blockwise_equals_reference(
    length: int, blocks: int, window: int | None, heads: int, kv_heads: int, segments: bool, paddings: list[str]
) -> None:
    """Compares outputs of real tokens and their gradients, relative to magnitude; also with Fused, whose kernel has
    a causal flag."""
    arrays = operands(length, heads, kv_heads)

    def compiled(attention_fn: Any) -> Any:
        def loss(arrays: Any, mask: Mask, real: Any) -> Any:
            out = attention_fn(*arrays, MaskedSoftmax(mask, 0.4)) * real[:, None, :, None]
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, has_aux=True))

    oracle, *runs = (
        compiled(way)
        for way in (
            ReferenceAttention(),
            BlockwiseAttention(blocks=blocks),
            BlockwiseAttention(FusedAttention(), blocks),
        )
    )
    for padding in paddings:
        given = arrays, *causal_mask(length, window, padding, segments)
        wanted = jax.tree.leaves(oracle(*given))
        for run in runs:
            for a, b in zip(jax.tree.leaves(run(*given)), wanted, strict=True):
                assert max_error(a, b) < PART_TOLERANCE * max(1.0, float(jnp.abs(b).max()))


@dataclasses.dataclass(frozen=True, eq=False)
class Told:
    """Stub that records the query indices, the key indices and whether the mask is causal."""

    calls: list[tuple[list[int], list[int], bool]] = dataclasses.field(default_factory=list)

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> Any:
        mask = scores.mask
        assert q.shape[2] == mask.query_index.size and k.shape[2] == v.shape[2] == mask.keys.index.size
        self.calls.append((mask.query_index.tolist(), mask.keys.index.tolist(), mask.causal))
        return jnp.zeros((*q.shape[:3], v.shape[3]))


@pytest.mark.parametrize("window", [None, 1, 30, 100])
@pytest.mark.parametrize(("length", "blocks", "cut"), [(191, 8, 1), (192, 8, 3), (512, 8, 8), (500, 5, 5), (300, 1, 1)])
def test_blocks_get_only_the_keys_they_attend_to(length: int, blocks: int, cut: int, window: int | None) -> None:
    """Blocks have at least 64 queries; a block's mask is causal only if its queries and keys are the same tokens."""
    mask, _ = causal_mask(length, window, "full", False)
    told = Told()
    BlockwiseAttention(told, blocks)(*operands(length, 2, 1), MaskedSoftmax(mask, 1.0))
    assert len(told.calls) == cut
    assert [token for queries, _, _ in told.calls for token in queries] == list(range(length))
    for queries, keys, causal in told.calls:
        first = 0 if window is None or cut == 1 else max(queries[0] - window + 1, 0)
        assert keys == list(range(first, queries[-1] + 1)) and (cut == 1 or len(queries) >= 64)
        assert causal == (queries == keys)


def test_blockwise_does_not_split_a_non_causal_mask() -> None:
    """With a cache, keys differ from queries and their order is given by the indices."""
    told, mask = Told(), some_mask(np.random.default_rng(0), 2, 200, 300, None)
    q, k, v = operands(300, 2, 1)
    BlockwiseAttention(told)(q[:, :, :200], k, v, MaskedSoftmax(mask, 0.4))
    assert told.calls == [(list(range(100, 300)), list(range(300)), False)]


@pytest.mark.slow
def test_mask_part_equals_a_slice_of_the_mask() -> None:
    for padding, segments, window in (("full", False, None), ("left", True, 3), ("holes", False, 4)):
        mask, _ = causal_mask(19, window, padding, segments)
        for queries, keys in ((slice(5, 9), slice(2, 9)), (slice(0, 7), slice(0, 7)), (slice(7, 19), slice(7, 19))):
            part, whole = mask.select(queries, keys), np.asarray(mask.allowed())
            assert np.array_equal(part.allowed(), whole[:, queries, keys])
            assert part.causal == (queries == keys) and part.is_plain == (part.causal and mask.is_plain)


@pytest.mark.program
@pytest.mark.parametrize(("window", "least", "most"), [(None, 0.54, 0.6), (64, 0.2, 0.3)])
def test_blockwise_uses_less_flops_and_memory(window: int | None, least: float, most: float) -> None:
    """Of 64 blocks 36 are computed, or 15 with a window of one block; temporary memory shrinks likewise."""

    def cost(attention_fn: Any) -> tuple[float, int]:
        mask, _ = causal_mask(512, window, "full", False)
        program = (
            jax.jit(lambda q, k, v: attention_fn(q, k, v, MaskedSoftmax(mask, 0.4)))
            .lower(*operands(512, 4, 2))
            .compile()
        )
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    (ours, our_bytes), (theirs, their_bytes) = cost(BlockwiseAttention()), cost(ReferenceAttention())
    assert least < ours / theirs < most and our_bytes < most * their_bytes


@pytest.mark.wrong_types
@pytest.mark.parametrize("blocks", [0, -1, True, 2.5, "8", None])
def test_blockwise_rejects_invalid_block_counts(blocks: Any) -> None:
    with pytest.raises(ValueError, match=r"BlockwiseAttention\(blocks=.*positive integer"):
        BlockwiseAttention(blocks=blocks)


@pytest.mark.wrong_types
@pytest.mark.parametrize("inner", [ReferenceAttention, "reference", None])
def test_blockwise_rejects_invalid_inner_attention(inner: Any) -> None:
    with pytest.raises(ValueError, match=r"BlockwiseAttention\(inner=.*such as ReferenceAttention\(\)"):
        BlockwiseAttention(inner)


# Attention modules


def context(batch: int, length: int, rope: Rope) -> Context:
    return Context.from_lengths(rope, batch, length)


@pytest.mark.slow
def test_attention_alone_ignores_padding() -> None:
    """A context made from lengths gives the results of the rows alone, in an order of its own choice."""
    model = build_tiny("mistral", sliding_window=3)
    attention, x = model.stacks[0].layers[0].attention, jax.random.normal(jax.random.key(1), (3, 7, 24))

    def attended(x: jax.Array, lengths: list[int] | None = None) -> jax.Array:
        seen = Context.from_lengths(model.config.rope, *x.shape[:2], lengths=lengths)
        y, cache = jax.jit(lambda x: attention(x, seen))(x)
        assert cache is None
        return y

    whole = attended(x, [7, 3, 1])
    for row, length in enumerate((7, 3, 1)):
        alone = attended(x[row : row + 1, :length])
        assert max_error(whole[row : row + 1, :length], alone) < PART_TOLERANCE
    for wrong in ([7, 3], [7, 3, 8], [7, -1, 2]):
        with pytest.raises(ValueError, match=r"pass 3 token counts from 0 to 7"):
            Context.from_lengths(model.config.rope, 3, 7, lengths=wrong)


@pytest.mark.wrong_types
def test_lengths_may_be_lists_arrays_or_traced() -> None:
    """Concrete lengths are validated inside transformations too."""
    rope, wanted = Rope(4, 100.0), np.arange(9)[None] < np.array([[9], [4]])

    def valid(lengths: Any) -> Any:
        return Context.from_lengths(rope, 2, 9, lengths).valid

    kinds = [9, 4], (9, 4), np.array([9, 4], np.uint8), jnp.array([9, 4])
    for lengths in kinds:
        for run in (valid, lambda n: jax.jit(lambda: valid(n))()):
            np.testing.assert_array_equal(run(lengths), wanted)
    np.testing.assert_array_equal(jax.jit(valid)(jnp.array([9, 4])), wanted)
    np.testing.assert_array_equal(jax.jit(lambda n: valid([9, n]))(4), wanted)
    np.testing.assert_array_equal(jax.vmap(valid)(jnp.array([[9, 4], [4, 9]])), [wanted, wanted[::-1]])
    assert int(Context.from_lengths(rope, 2, 9, np.array([9, 0], np.uint8)).index[1, 0]) == -1
    for wrong in ([9, 10], jnp.array([-1, 9]), [9], [9.0, 4.0], np.array([[9, 4]])):
        with pytest.raises(ValueError, match="pass 2 token counts from 0 to 9"):
            jax.jit(lambda wrong=wrong: valid(wrong))()


@pytest.mark.parametrize("window", [None, 3])
def test_gqa_equals_numpy(window: int | None) -> None:
    """NumPy computes each head separately in float64, with biases, groups, rotation, scale and window."""
    options: dict[str, Any] = {"rotary": Rope(4, 100.0), "window": window, "attention_fn": ReferenceAttention()}
    gqa = GQA(AttentionDims(10, 6, 2, 4, bias=True), **options, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    randomise(gqa, seed=1)
    x = np.random.default_rng(0).standard_normal((2, 7, 10))
    w = {name: inputs_first(getattr(gqa, name).kernel).astype(np.float64) for name in "qkvo"}
    b = {name: np.asarray(getattr(gqa, name).bias[...], np.float64).reshape(-1, 4) for name in "qkv"}
    angles = np.arange(7)[:, None] * 100.0 ** (-np.arange(0, 4, 2) / 4)

    def turned(a: np.ndarray) -> np.ndarray:
        c = (a[:, :2] + 1j * a[:, 2:]) * np.exp(1j * angles)
        return np.concatenate([c.real, c.imag], axis=1)

    out = np.broadcast_to(np.asarray(gqa.o.bias[...], np.float64), (2, 7, 10)).copy()
    for row, n in np.ndindex(2, 6):
        q = turned(x[row] @ w["q"][:, n] + b["q"][n])
        k, v = (x[row] @ w[i][:, n // 3] + b[i][n // 3] for i in "kv")
        scores = q @ turned(k).T / 2
        far = np.arange(7)[:, None] - np.arange(7)
        scores[(far < 0) | (far >= (window or 99))] = -np.inf
        weights = np.exp(scores)
        out[row] += weights / weights.sum(axis=1, keepdims=True) @ v @ w["o"][n]
    y, cache = jax.jit(lambda x: gqa(x, context(2, 7, Rope(4, 100.0)), None))(jnp.asarray(x, jnp.float32))
    assert cache is None
    assert max_error(y, out) < PART_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("q_rank", "rotate"), [(None, rotate_pairs), (7, rotate_halves)])
def test_mla_forms_agree(q_rank: int | None, rotate: Any) -> None:
    """Outputs and gradients of Naive, Absorbed and ByLength."""

    def make(form: Any) -> MLA:
        mla = MLA(
            MLADims(12, 3, q_rank=q_rank, kv_rank=5, nope=6, rope=4, v_dim=7),
            scale=0.3,
            bias=True,
            rotary=Rope(4, 100.0),
            rotate=rotate,
            mla=form,
            attention_fn=ReferenceAttention(),
            dtype=jnp.dtype(jnp.float32),
            rngs=nnx.Rngs(0),
        )
        return randomise(mla, seed=2)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 12)), jnp.float32)
    seen = context(2, 6, Rope(4, 100.0))

    def run(form: Any) -> tuple[Any, Any]:
        graph, state = nnx.split(make(form))

        def loss(state: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = nnx.merge(graph, state)(x, seen, None)
            return jnp.sum(jnp.sin(y)), y

        grads, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)
        return y, grads

    y, grads = run(NaiveMLA())
    for form in (AbsorbedMLA(), AdaptiveMLA(99), AdaptiveMLA(2)):
        other, other_grads = run(form)
        assert max_error(other, y) < PART_TOLERANCE
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
            assert max_error(a, b) < PART_TOLERANCE
            assert float(jnp.max(jnp.abs(a))) > 0


@pytest.mark.slow
def test_rotations() -> None:
    """Rotations preserve norms, and dot products depend on position differences only."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))
    rope = Rope(8, 100.0)

    def at(position: int) -> Any:
        return compute_rotation(rope, jnp.array([[position]]))

    wide = PartialRotary(8)
    for rotate in (rotate_halves, rotate_pairs, wide):
        assert max_error(jnp.linalg.norm(rotate(x, at(5))), jnp.linalg.norm(x)) < PART_TOLERANCE
        near = jnp.sum(rotate(x, at(7)) * rotate(y, at(4)))
        assert max_error(near, jnp.sum(rotate(x, at(33)) * rotate(y, at(30)))) < PART_TOLERANCE
        assert max_error(near, jnp.sum(rotate(x, at(4)) * rotate(y, at(7)))) > 1e-3
    halves = jnp.arange(8).reshape(4, 2).T.ravel()  # [0, 2, 4, 6, 1, 3, 5, 7]: neighbours as one channel of each half
    assert max_error(rotate_pairs(x, at(5)), rotate_halves(x[..., halves], at(5))) < PART_TOLERANCE
    assert max_error(rotate_pairs(x, at(5)), rotate_halves(x, at(5))) > 1e-2
    assert rotate_halves(x.astype(jnp.bfloat16), at(3)).dtype == jnp.bfloat16
    assert np.array_equal(wide(x, at(5)), rotate_halves(x, at(5)))
    tail = jnp.asarray(rng.standard_normal((1, 1, 1, 3)), jnp.float32)
    part = wide(jnp.concatenate([x, tail], axis=-1), at(5))
    assert np.array_equal(part, jnp.concatenate([rotate_halves(x, at(5)), tail], axis=-1))


# Wrong arguments


@pytest.mark.slow
@pytest.mark.wrong_types
def test_invalid_arguments_are_rejected() -> None:
    model, tokens = build_tiny("llama"), random_tokens(2, 5)
    with pytest.raises(ValueError, match=r"attention_mask must have the tokens' shape \[2, 5\], got \[2, 4\]"):
        model(tokens, attention_mask=np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"positions must have the tokens' shape \[2, 5\], got \[5\]"):
        model(tokens, positions=np.arange(5))
    with pytest.raises(ValueError, match="segment_ids"):
        model(tokens, segment_ids=np.ones((1, 5), np.int32))
    with pytest.raises(ValueError, match=r"token ids must be in 0 … 52, got 53"):
        model(np.full((1, 3), 53))
    with pytest.raises(ValueError, match=r"got -1"):
        model(np.array([[0, -1]]))
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\], got float"):
        model(tokens.astype(np.float32))
