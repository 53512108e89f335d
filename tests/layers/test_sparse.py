"""Sparse attention: the indexer's choice, attention to the chosen keys, and the models that have both."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import nnxmoe
from nnxmoe import AbsorbedMLA, AdaptiveMLA, NaiveMLA, ReferenceAttention
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import RequestOptions
from nnxmoe.layers.activations import LimitedSwiGLU
from nnxmoe.layers.attention import indexer, pooled_indexer, sparse_attention
from nnxmoe.layers.attention.block_indexer import BlockIndexer, KeyBlocks
from nnxmoe.layers.attention.indexer import Indexer, select_keys, topk_slots
from nnxmoe.layers.attention.mla import MLA, MLADims
from nnxmoe.layers.attention.pooled_indexer import MeanPoolIndexer
from nnxmoe.layers.attention.sparse_attention import NO_SLOT
from nnxmoe.layers.attention.sparse_mla import SparseMLA
from nnxmoe.layers.cache import SlotMetadata, TokenCache
from nnxmoe.layers.context import Context, OutputRequest
from nnxmoe.layers.hyper import MeanNorm
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import LayerNorm, RMSNorm
from nnxmoe.layers.rope import PartialRotary, rotate_halves, rotate_pairs
from tests.support.arrays import max_error
from tests.support.families import load
from tests.support.running import MODEL_TOLERANCE, PART_TOLERANCE, eager_logits, feed, randomise
from tests.support.tiny import build

F32: Any = jnp.dtype("float32")
ROPE = Rope(4, 100.0)
WIDTHS = MLADims(12, 3, q_rank=7, kv_rank=5, nope=6, rope=4, v_dim=7)
KINDS = ("deepseek_v32", "glm_moe_dsa")
POOLED, BLOCKS, MEANS = "glm5_next_text", "minimax_m3_vl_text", "qwen4_exp_text"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries, and causal parts of three, as for passes of thousands of tokens."""
    for module in (indexer, sparse_attention):
        monkeypatch.setattr(module, "BLOCK_SCORES", 2**8)
    monkeypatch.setattr(sparse_attention, "MIN_QUERIES", 3)
    monkeypatch.setattr(sparse_attention, "GATHER_COST", 0)


# The choice


def best(scores: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """The oracle of `topk_slots`, by a sort."""
    order = sorted(np.flatnonzero(allowed), key=lambda place: (-scores[place], place))[:count]
    return np.r_[np.sort(order), [NO_SLOT] * (count - len(order))]


def test_highest_scores_are_those_of_a_sort() -> None:
    """With equal scores, zeros of both signs, infinities, and fewer allowed scores than asked for."""
    rng = np.random.default_rng(0)
    scores = rng.choice([-2.5, -1e-30, -0.0, 0.0, 0.0, 1.0, 3e38, -np.inf, np.inf], (60, 23)).astype(np.float32)
    scores[20:40] = rng.standard_normal((20, 23))
    allowed = rng.random((60, 23)) < rng.choice([0.0, 0.1, 0.6, 1.0], (60, 1))
    for count in (1, 7, 23):
        found = jax.jit(topk_slots, static_argnums=2)(scores, allowed, count)
        assert np.array_equal(found, [best(*row, count) for row in zip(scores + 0.0, allowed, strict=True)])


@pytest.mark.slow
def test_an_indexer_chooses_by_its_formula() -> None:
    """Products of rotated queries and normalised keys, in float64; padding, segments and later keys are not chosen."""
    part = randomise(Indexer(9, 7, 5, 6, rotary=ROPE, rotate=rotate_pairs, dtype=F32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    x, latent = (rng.standard_normal((2, 11, width)).astype(np.float32) for width in (9, 7))
    context = Context.from_lengths(ROPE, 2, 11)
    keys = part.keys(jnp.asarray(x), context)
    w: Any = {
        str(path[0]) + str(path[-1]): np.asarray(v.get_value(), np.float64)
        for path, v in nnx.to_flat_state(nnx.state(part))
    }
    angle = np.arange(11)[:, None] * 100.0 ** (-np.arange(2) / 2)

    def turned(a: np.ndarray) -> np.ndarray:  # [B, T, N, 6]
        pairs = a[..., :4].reshape(*a.shape[:3], 2, 2)
        turn = np.exp(1j * angle)[None, :, None]
        both = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.concatenate([both.real, both.imag, a[..., 4:]], -1)

    k = x @ w["kkernel"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = turned((k * w["k_normscale"] + w["k_normbias"])[:, :, None])[:, :, 0]
    assert max_error(keys, k) < PART_TOLERANCE
    q = turned(np.einsum("btr,nhr->btnh", latent, w["qkernel"]))
    scores = np.einsum("btns,btn->bts", np.maximum(np.einsum("btnh,bsh->btns", q, k), 0), x @ w["weightskernel"].T)
    segment, valid = np.array([[0] * 4 + [1] * 7] * 2), np.array([[1] * 11, [1, 0, 0] + [1] * 8]) > 0
    index = np.arange(11, dtype=np.int32)
    for causal in (True, False):
        slots = SlotMetadata(jnp.asarray(index), jnp.asarray(valid), jnp.asarray(segment))
        mask = Mask(jnp.asarray(index), jnp.asarray(segment), slots, None, causal)
        found = np.asarray(part.select(jnp.asarray(x), jnp.asarray(latent), keys, mask, 3, context))
        for b, t in np.ndindex(2, 11):
            allowed = (index <= t) & valid[b] & (segment[b] == segment[b, t])
            wanted = [NO_SLOT] * 3 if causal and t < 3 else best(scores[b, t], allowed, 3)
            assert np.array_equal(found[b, t], wanted), (b, t)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_are_chosen_by_their_best_keys(packed: bool, small_blocks: None) -> None:
    """For each group of heads; padding on either side and in between, and segments, move the blocks."""
    rope, turn = Rope(4, 100.0), PartialRotary(4)
    part: Any = BlockIndexer(
        9, 2, 6, blocks=KeyBlocks(3, 2, 1), eps=1e-3, rotary=rope, rotate=turn, dtype=F32, rngs=nnx.Rngs(0)
    )
    part, size = randomise(part), 23
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, size, 9)), jnp.float32)
    context = Context.from_lengths(rope, 3, size)
    keys = np.asarray(part.keys(x, context))
    q = np.asarray(context.rotate(part.q_norm(part.q(x)), rope, turn))
    scores = np.einsum("btnh,bsh->btns", q.astype(np.float64), keys)
    valid = np.ones((3, size), bool)
    valid[1, :4], valid[2, [5, 6, 19, 22]] = False, False
    segment = np.repeat([0, 1, 2], [4, 12, 7])[None].repeat(3, 0) if packed else np.zeros((3, size), int)
    index = np.cumsum(valid, axis=1) - 1
    of_slots = jnp.asarray(segment) if packed else None
    slots = SlotMetadata(jnp.asarray(index, jnp.int32), jnp.asarray(valid), of_slots)
    for causal in (True, False):
        mask = Mask(slots.index, of_slots, slots, None, causal)
        found = np.asarray(part.select(x, jnp.asarray(keys), mask, context))
        for b, t, n in np.ndindex(3, size, 2):
            if not valid[b, t] or (causal and t < 6):
                continue
            near = np.flatnonzero(valid[b] & (np.arange(size) <= t) & (segment[b] == segment[b, t]))
            blocks = [near[i : i + 3] for i in range(0, len(near), 3)]
            high = [scores[b, t, n, block].max() for block in blocks[:-1]] + [np.inf]
            kept = np.sort(np.argsort(high)[-2:])
            wanted = np.concatenate([blocks[i] for i in kept])
            row = found[2 * b + n, t]
            assert np.array_equal(np.sort(row[row != NO_SLOT]), wanted), (b, t, n)


def test_layer_norm() -> None:
    x: Any = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32) * 4 + 2
    norm: Any = randomise(LayerNorm(5, 1e-3, dtype=F32, rngs=nnx.Rngs(0)))
    wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    assert max_error(norm(jnp.asarray(x)), wanted * norm.scale[...] + norm.bias[...]) < PART_TOLERANCE


# Attention to the chosen keys


def attention(topk: int | None, form: Any) -> Any:
    """Sparse attention, or dense for None, with the same weights."""
    kw: dict[str, Any] = {"dtype": F32, "rngs": nnx.Rngs(0)}
    options: dict[str, Any] = dict(scale=0.3, bias=True, **kw)
    options |= dict(rotary=ROPE, rotate=rotate_pairs, mla=form, attention_fn=ReferenceAttention())
    if topk is None:
        return MLA(WIDTHS, **options)
    part = Indexer(12, 7, 4, 8, rotary=ROPE, rotate=rotate_halves, **kw)
    return randomise(SparseMLA(WIDTHS, indexer=part, topk=topk, **options), seed=2)


X: Any = jnp.asarray(np.random.default_rng(0).standard_normal((2, 29, 12)), jnp.float32)


class Masked(ReferenceAttention):
    """Dense attention with another mask."""

    allowed: Any = None

    def __call__(self, q: Any, k: Any, v: Any, scores: Any) -> Any:
        scores_of = jnp.einsum("bnth,bnsh->bnts", q, k) * scores.scale
        weights = jax.nn.softmax(jnp.where(self.allowed[:, None], scores_of, -1e30), axis=-1)
        return jnp.einsum("bnts,bnsh->bnth", weights, v)


@pytest.mark.slow
@pytest.mark.parametrize("form", [NaiveMLA(), AbsorbedMLA(), AdaptiveMLA(2)])
def test_attention_is_dense_attention_to_the_chosen_keys(form: Any, small_blocks: None) -> None:
    """Values and gradients, masked and gathered, in blocks, and in causal parts or not."""
    context, sparse = Context.from_lengths(ROPE, 2, 29, lengths=[29, 21]), attention(6, form)
    chosen = sparse.indexer.select(
        X, sparse.q.latent(X), sparse.indexer.keys(X, context), context.append_to_cache(None, None, None)[2], 6, context
    )
    allowed = np.zeros((2, 29, 30), bool)
    np.put_along_axis(allowed, np.minimum(chosen, 29), True, axis=-1)
    allowed[:, :6, :6] = np.tri(6, dtype=bool)  # the first ones see all before them
    oracle = attention(6, NaiveMLA())
    oracle.topk, oracle.attention_fn = 99, Masked()
    object.__setattr__(oracle.attention_fn, "allowed", allowed[..., :29])

    def run(model: Any) -> tuple[Any, Any]:
        graph, state = nnx.split(model)

        def loss(state: Any, x: Any) -> Any:
            y = nnx.merge(graph, state)(x, context)[0]
            return jnp.sum(jnp.sin(y[0])) + jnp.sum(jnp.sin(y[1, :21])), y

        grads, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, X)
        return y, grads

    (y, grads), (wanted, slopes) = run(sparse), run(oracle)
    assert max_error(y[0], wanted[0]) < PART_TOLERANCE and max_error(y[1, :21], wanted[1, :21]) < PART_TOLERANCE
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(slopes), strict=True):
        assert max_error(a, b) < 5 * PART_TOLERANCE, path
        assert (float(jnp.abs(a).max()) > 0) != ("indexer" in str(path)), path


@pytest.mark.slow
def test_few_keys_are_all_attended_to() -> None:
    """Up to ``topk`` keys the output is that of dense attention to the last bit; in a larger cache to rounding."""
    sparse, dense = attention(29, NaiveMLA()), attention(None, NaiveMLA())
    nnx.update(dense, nnx.State({k: v for k, v in nnx.state(sparse).items() if k != "indexer"}))
    context = Context.from_lengths(ROPE, 2, 29)
    y, wanted = sparse(X, context)[0], dense(X, context)[0]
    assert np.array_equal(y, wanted)
    sparse.topk = 28
    assert max_error(sparse(X, context)[0][:, :28], wanted[:, :28]) < PART_TOLERANCE
    assert max_error(sparse(X, context)[0], wanted) > 1e-3


@pytest.mark.slow
def test_no_array_has_all_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the limit is that of one block, and of the chosen keys of all queries."""
    for module in (indexer, sparse_attention):
        monkeypatch.setattr(module, "BLOCK_SCORES", 2**14)
    sparse, x = attention(8, NaiveMLA()), jax.ShapeDtypeStruct((1, 1024, 12), F32)
    graph, state = nnx.split(sparse)

    def loss(state: Any, x: Any) -> Any:
        return jnp.sum(nnx.merge(graph, state)(x, Context.from_lengths(ROPE, 1, 1024))[0])

    def largest(jaxpr: Any) -> int:
        inner = [largest(one) for each in jaxpr.eqns for one in jaxprs_in_params(each.params)]
        return max([*inner, *(v.aval.size for each in jaxpr.eqns for v in each.outvars)], default=0)

    most = largest(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(state, x).jaxpr)
    assert most <= max(3 * 64 * 1024, 1024 * 8 * 9) < 1024 * 1024 / 4  # scores of a block, or gathered latents


# Models

Made = Callable[[str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def made() -> Made:
    """``made(kind)``: the frozen case of a family, and its model."""
    found: dict[str, tuple[Any, Any]] = {}

    def make(kind: str) -> tuple[Any, Any]:
        if kind not in found:
            case = load(kind)
            found[kind] = case, build(case.fields, case.weights)
        return found[kind]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, POOLED, BLOCKS, MEANS])
def test_every_split_of_a_prompt(kind: str, made: Made) -> None:
    """Cached chunks, padded on either side; packed segments are separate rows; the last token alone."""
    case, model = made(kind)
    tokens, mask = case.arrays["tokens"], case.arrays["mask"]
    place = np.arange(17)[None]
    for used, prefix in ((np.ones_like(mask), ""), (mask, "padded.")):
        wanted = case.arrays[prefix + "logits"]
        for first in range(1, 17):  # the rest of each chunk is padding, so that all have one shape
            now, later = used * (place < first), used * (place >= first)
            one = model(tokens, now, cache=model.empty_cache(2, 24))
            other = model(tokens, later, cache=one.cache)
            assert max_error(one.logits, wanted, now) < MODEL_TOLERANCE, (prefix, first)
            assert max_error(other.logits, wanted, later) < MODEL_TOLERANCE, (prefix, first)
        logits, _ = feed(model, tokens, [4, 2, 11], mask=used, capacity=24)
        assert max_error(logits, wanted, used) < MODEL_TOLERANCE, prefix
    halves = np.concatenate([model(tokens[:, :9]).logits, model(tokens[:, 9:]).logits], axis=1)
    segment, places = (np.arange(17) >= 9)[None].repeat(2, 0), np.r_[:9, :8][None].repeat(2, 0)
    packed = model(tokens, segment_ids=segment.astype(np.int32), positions=places).logits
    assert max_error(packed, halves) < 5 * PART_TOLERANCE
    x = model.body(jnp.asarray(tokens)).x
    assert (
        max_error(model.body(jnp.asarray(tokens), request=OutputRequest(last_token_only=True)).x, x[:, -1:])
        < 5 * PART_TOLERANCE
    )


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The new ids by whole passes."""
    ids = list(prompt)
    for _ in range(count):
        padded = np.asarray([ids + [0] * (24 - len(ids))])
        ids.append(int(jnp.argmax(model(padded, np.arange(24)[None] < len(ids)).logits[0, len(ids) - 1])))
    return ids[len(prompt) :]


PROMPTS = [[3, 4, 5, 3, 4, 5, 3, 4, 5], [7, 1, 30], [9, 9, 2, 9, 9, 2, 9]]


def engine_ids(model: Any, draft: Any) -> list[list[int]]:
    """The ids of an engine with fewer rows than prompts."""
    engine = Engine(model, slots=2, capacity=40, draft=draft)
    requests = [engine.submit(prompt, RequestOptions(8, stop_ids=None)) for prompt in PROMPTS]
    engine.run()
    return [request.ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, POOLED, BLOCKS, MEANS])
def test_rows_of_an_engine_and_drafts_that_are_taken_back(kind: str, made: Made) -> None:
    _, model = made(kind)
    wanted = [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert engine_ids(model, None) == engine_ids(model, nnxmoe.PromptLookup(3)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, POOLED, BLOCKS, MEANS])
def test_tokens_taken_back_leave_nothing(kind: str, made: Made) -> None:
    """The logits after rejected tokens are those without them, to the last bit."""
    case, model = made(kind)
    tokens = case.arrays["tokens"]
    cache = model(tokens[:, :8], cache=model.empty_cache(2, 24, 4)).cache
    tried = model(tokens[:, 12:16], cache=cache).cache
    back = dataclasses.replace(tried, length=cache.length)
    one, other = (model(tokens[:, 8:12], cache=each).logits for each in (cache, back))
    assert np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_int8_caches_hold_the_indexers_keys_too(kind: str, made: Made) -> None:
    """So many keys per query that choices seldom change by rounding; those of experts may."""
    case, _ = made(kind)
    tokens, fields = case.arrays["tokens"], case.fields | {"index_topk": 16}
    small = build(fields, case.weights, nnxmoe.Strategy(cache=nnxmoe.Int8Cache()))
    logits, cache = feed(small, tokens, [9, 8], mask=None, capacity=24)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.layers)} == {"int8", "float32"}
    error = np.abs(logits - build(fields, case.weights)(tokens).logits)[:, 9:].max(-1)
    assert 1e-3 < np.median(error) < 0.2


# Planted mistakes: each must change the logits of the whole pass, of a padded one, or of chunks

NOTICED = 1e-3
Plant = Callable[[Any, pytest.MonkeyPatch], None]


def indexers(model: Any) -> Iterator[Indexer]:
    return (part for _, part in nnx.iter_graph(model) if isinstance(part, Indexer))


def with_mask(change: Callable[[Mask], Mask]) -> Plant:
    """Plant of another mask for the choice."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        def choose(q: Any, weights: Any, keys: Any, mask: Mask, topk: int) -> Any:
            return select_keys(q, weights, keys, change(mask), topk)

        patch.setattr(indexer, "select_keys", choose)

    return plant


def see_later_keys(model: Any, patch: pytest.MonkeyPatch) -> None:
    def choose(q: Any, weights: Any, keys: Any, mask: Mask, topk: int) -> Any:
        return select_keys(q, weights, keys, dataclasses.replace(mask, query_index=mask.query_index + 1), topk)

    for module in (indexer, sparse_attention):
        patch.setattr(module, "query_parts", lambda mask, length, topk: [(slice(topk, None), slice(0, length))])
    patch.setattr(indexer, "select_keys", choose)


def without_relu(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jax.nn, "relu", lambda x: x)


def rotate_other_pairs(model: Any, patch: pytest.MonkeyPatch) -> None:
    for part in indexers(model):
        part.rotate = rotate_pairs if part.rotate is rotate_halves else rotate_halves


def rotate_last_components(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = Indexer._rotate
    patch.setattr(Indexer, "_rotate", lambda self, x, context: right(self, x[..., ::-1], context)[..., ::-1])


def forget_key_bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    for part in indexers(model):
        part.k_norm.bias[...] = jnp.zeros_like(part.k_norm.bias[...])


def forget_weights(model: Any, patch: pytest.MonkeyPatch) -> None:
    for part in indexers(model):
        part.weights.kernel[...] = jnp.abs(part.weights.kernel[...])


def keys_by(change: int) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for _, part in nnx.iter_graph(model):
            if isinstance(part, SparseMLA):
                part.topk += change

    return plant


def see_all_keys(model: Any, patch: pytest.MonkeyPatch) -> None:
    keys_by(100)(model, patch)


def hand_on_nothing(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Layers without an indexer attend to all keys."""
    for _, part in nnx.iter_graph(model):
        if isinstance(part, SparseMLA) and part.indexer is None:
            part.topk += 100


def hand_on_from_the_first(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The keys that later indexers have chosen are used in their own layer only."""
    right, first = SparseMLA.attend_sparse, list[Any]()

    def attend_sparse(self: Any, x: Any, chosen: Any, context: Any, cache: Any) -> Any:
        y, own, cache = right(self, x, first[0] if first and self.indexer is None else chosen, context, cache)
        first.append(own)
        return y, own, cache

    patch.setattr(SparseMLA, "attend_sparse", attend_sparse)


MISTAKES: dict[str, Plant] = {
    "later keys": see_later_keys,
    "padding": with_mask(lambda mask: dataclasses.replace(mask, keys=dataclasses.replace(mask.keys, valid=None))),
    "no relu": without_relu,
    "other pairs": rotate_other_pairs,
    "last components": rotate_last_components,
    "no bias of the key": forget_key_bias,
    "weights": forget_weights,
    "one key more": keys_by(1),
    "one key less": keys_by(-1),
    "all keys": see_all_keys,
}


HANDED_ON: dict[str, Plant] = {"not handed on": hand_on_nothing, "the first handed on": hand_on_from_the_first}
ALL = [(kind, name) for kind in KINDS for name in MISTAKES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*ALL, *(("glm_moe_dsa", name) for name in HANDED_ON)])
def test_planted_mistakes_change_the_logits(kind: str, name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = made(kind)
    model = nnx.merge(*nnx.split(right))
    (MISTAKES | HANDED_ON)[name](model, monkeypatch)
    mask = case.arrays["mask"] if name == "padding" else np.ones_like(case.arrays["mask"])
    prefix = "padded." if name == "padding" else ""
    assert max_error(eager_logits(model, case.arrays["tokens"], mask), case.arrays[prefix + "logits"], mask) > NOTICED


def pools_of_plain_means(model: Any, patch: pytest.MonkeyPatch) -> None:
    for x in indexers(model):
        x.gate.kernel.set_value(jnp.zeros_like(x.gate.kernel[...]))


def places_forgotten(model: Any, patch: pytest.MonkeyPatch) -> None:
    for x in indexers(model):
        x.place.set_value(jnp.zeros_like(x.place[...]))


def own_pool_not_seen(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = pooled_indexer._local_slots
    patch.setattr(pooled_indexer, "_local_slots", lambda *given: jnp.full_like(right(*given), NO_SLOT))


def pools_from_the_second_token(model: Any, patch: pytest.MonkeyPatch) -> None:
    def sort_padding_last(keys: SlotMetadata, shape: tuple[int, ...]) -> Any:
        order, tokens, offset = indexer.sort_padding_last(keys, shape)
        return order, tokens, jnp.maximum(offset - 1, 0)

    patch.setattr(pooled_indexer, "sort_padding_last", sort_padding_last)


def one_stream_instead_of_the_mean(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MeanNorm, "__call__", lambda self, x: RMSNorm.__call__(self, x[:, :, 0]))


def unbounded_gates(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LimitedSwiGLU, "__call__", lambda self, gate, up: jax.nn.silu(gate) * up)


OF_POOLS = [pools_of_plain_means, places_forgotten, own_pool_not_seen, pools_from_the_second_token]
OF_POOLS += [one_stream_instead_of_the_mean, unbounded_gates]


@pytest.mark.slow
@pytest.mark.parametrize("plant", OF_POOLS)
def test_mistakes_with_pools_change_the_logits(plant: Plant, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = made(POOLED)
    model = nnx.merge(*nnx.split(right))
    plant(model, monkeypatch)
    assert NOTICED < max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"]) < np.inf


def rotated_by_the_last_token(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = Context.rotation_at
    patch.setattr(Context, "rotation_at", lambda self, rope, positions: right(self, rope, positions + 1))


def mean_after_the_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = MeanPoolIndexer.keys
    patch.setattr(
        MeanPoolIndexer,
        "keys",
        lambda self, x, context: (self.k_norm(right(self, x, context)[0]), right(self, x, context)[1]),
    )


def scores_without_relu(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(indexer.jax.nn, "relu", lambda x: x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        own_pool_not_seen,
        pools_from_the_second_token,
        rotated_by_the_last_token,
        mean_after_the_norm,
        scores_without_relu,
    ],
)
def test_mistakes_with_means_change_the_logits(plant: Plant, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = made(MEANS)
    model = nnx.merge(*nnx.split(right))
    plant(model, monkeypatch)
    assert NOTICED < max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"]) < np.inf


@pytest.mark.slow
def test_int8_caches_keep_positions(made: Made) -> None:
    """The keys of an indexer are int8, but the positions of its pools stay integers."""
    case, _ = made(MEANS)
    small = build(case.fields, case.weights, nnxmoe.Strategy(cache=nnxmoe.Int8Cache()))
    cache = small.empty_cache(2, 24)
    buffers = jax.tree.leaves(cache.layers[-1])
    assert sorted({leaf.dtype.name for leaf in buffers}) == ["float32", "int32", "int8"]
    logits, _ = feed(small, case.arrays["tokens"], [9, 8], mask=None, capacity=24)
    assert 1e-4 < np.median(np.abs(logits - case.arrays["logits"])[:, 9:].max(-1)) < 0.2


class Kept(TokenCache):
    """Keys that are written once, so that those of rejected tokens stay."""

    def append(self, new: Any, past: Any) -> Any:
        cache, seen, slots = super().append(new, past)
        before, (latents, keys) = self.buffers[1], cache.buffers
        keys = jnp.where(jnp.any(before != 0, axis=-1, keepdims=True), before, keys)
        return Kept((latents, keys)), (seen[0], keys), slots


@pytest.mark.slow
def test_keys_that_are_not_taken_back_are_noticed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    jax.tree_util.register_dataclass(Kept, ["buffers"], ["ring", "lookahead"])
    case, model = made("deepseek_v32")
    monkeypatch.setattr("nnxmoe.layers.attention.sparse_mla.TokenCache", Kept)
    pieces = np.split(case.arrays["tokens"][:, :16], [8, 12], axis=1)
    first, cache = eager_pass(model, pieces[0], model.empty_cache(2, 24, 4))
    assert max_error(first, eager_logits(model, pieces[0])) < MODEL_TOLERANCE
    after = eager_pass(model, pieces[2], cache)[1]
    back = dataclasses.replace(after, length=cache.length)
    assert max_error(eager_pass(model, pieces[1], back)[0], eager_pass(model, pieces[1], cache)[0]) > NOTICED


def eager_pass(model: Any, tokens: Any, cache: Any) -> tuple[Any, Any]:
    """Logits and the cache after a pass, without programs, which know nothing of changes made here."""
    body = model.body(tokens, cache=cache)
    return model.logits(body.x), body.cache
