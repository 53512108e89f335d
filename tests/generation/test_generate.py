"""Generation: sampling, end-of-sequence ids, padding, streaming and reuse of compiled programs."""

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Sampling
from nnxmoe.generation import decode, engine, grouping, passes
from nnxmoe.generation.decode import left_pad
from nnxmoe.generation.grouping import chunk_sizes
from nnxmoe.generation.ids import eos_ids
from nnxmoe.generation.sampling import sample_ids, split_sampling
from nnxmoe.model.program import bucket_size
from nnxmoe.tokenizer.tokenizer import TextStream
from tests.support.cases import HF_CASES, load_case_model
from tests.support.running import compiled_in, greedy_ids
from tests.support.tiny import build_tiny, random_tokens

PROMPT = random_tokens(2, 7, seed=5)


@functools.cache
def tiny() -> nnxmoe.CausalLM:
    """One small model for all tests here, to limit compilation; must not be modified."""
    return build_tiny("mistral", nnxmoe.Strategy(), num_hidden_layers=1, sliding_window=12)


def run(prompt: Any = PROMPT, mask: Any = None, count: int = 8, **options: Any) -> np.ndarray:
    """New ids only; generation does not stop early by default."""
    options = {"eos_token_id": None} | options
    ids = nnxmoe.generate(tiny(), prompt, mask, max_new_tokens=count, **options)
    assert np.array_equal(ids[:, : np.shape(prompt)[1]], prompt)
    return ids[:, np.shape(prompt)[1] :]


# Sampling of one token


def draw(
    logits: Sequence[float], sampling: Sampling | None, count: int = 20000, seen: Any = None, counts: Any = None
) -> np.ndarray:
    """Fraction of ``count`` rows with equal logits that choose each token."""
    steps, knobs = split_sampling(sampling, len(logits))
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
    mask = None if seen is None else jnp.tile(jnp.asarray(seen, bool), (count, 1))
    each = jax.tree.map(lambda knob: jnp.full(count, knob), knobs)
    keys = jax.random.split(jax.random.key(3), count)
    times = None if counts is None else jnp.tile(jnp.asarray(counts), (count, 1))
    tokens = jax.jit(sample_ids, static_argnums=2)(rows, mask, steps, each, keys, times)
    assert tokens.dtype == jnp.int32
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


@pytest.mark.slow
def test_sampling_allows_strict_rank_promotion() -> None:
    """Research code often runs with ``jax_numpy_rank_promotion="raise"``."""
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=1)
    with jax.numpy_rank_promotion("raise"):
        assert run(count=2, sampling=sampling).shape == (2, 2)


def softmax(x: Any) -> np.ndarray:
    e = np.exp(np.asarray(x, np.float64))
    return e / e.sum()


LOGITS = [1.0, 3.0, -2.0, 2.0, 0.5, 2.5]  # most likely first: 1 5 3 0 4 2
P = softmax(LOGITS)


def only(*kept: int, p: np.ndarray = P) -> np.ndarray:
    """A distribution restricted to some tokens and normalised."""
    out = np.zeros(len(p))
    out[list(kept)] = p[list(kept)]
    return out / out.sum()


CUTS = {
    "plain": (Sampling(), P),
    "hot": (Sampling(temperature=2.0), softmax(np.array(LOGITS) / 2)),
    "cold": (Sampling(temperature=0.5), softmax(np.array(LOGITS) * 2)),
    "top-k": (Sampling(top_k=3), only(1, 5, 3)),
    "top-k-of-all": (Sampling(top_k=99), P),
    "top-k-off": (Sampling(top_k=0), P),
    "top-p": (Sampling(top_p=P[1] + 0.01), only(1, 5)),
    "top-p-just-reached": (Sampling(top_p=P[1] - 0.01), only(1)),
    "top-p-tiny": (Sampling(top_p=1e-6), only(1)),
    "top-k-then-top-p": (Sampling(top_k=2, top_p=P[1] / (P[1] + P[5]) - 0.01), only(1)),
    "min-p": (Sampling(min_p=float(P[3] / P[1]) - 0.01), only(1, 5, 3)),
    "min-p-one": (Sampling(min_p=1.0), only(1)),
    "temperature-before-top-p": (
        Sampling(temperature=0.5, top_p=0.70),
        only(1, 5, p=softmax(np.array(LOGITS) * 2)),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_sampling_frequencies(name: str) -> None:
    """Within five standard errors over 20000 rows; removed tokens are never drawn."""
    sampling, wanted = CUTS[name]
    found = draw(LOGITS, sampling)
    assert np.all(found[wanted == 0] == 0)
    assert np.all(np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / 20000) + 1e-9)


def test_repetition_penalty() -> None:
    """Divides positive and multiplies negative logits of seen tokens, before temperature, top-k and top-p."""
    seen = [False, True, True, False, False, True]
    punished = np.array([1.0, 1.5, -4.0, 2.0, 0.5, 1.25])
    found = draw(LOGITS, Sampling(repetition_penalty=2.0), seen=seen)
    assert np.all(np.abs(found - softmax(punished)) < 0.02)
    assert draw(LOGITS, Sampling(repetition_penalty=2.0, temperature=0), 1, seen=seen).argmax() == 3
    assert draw(LOGITS, Sampling(repetition_penalty=2.0, top_k=1), 1, seen=seen).argmax() == 3


def test_presence_and_frequency_penalties() -> None:
    """Subtracted once and per occurrence from the logits of generated tokens, after the repetition penalty."""
    counts, seen = np.array([0, 3, 0, 1, 0, 2]), np.array([False, True, True, True, False, True])
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-0.3)
    expected = np.array(LOGITS) - 0.5 * (counts > 0) + 0.3 * counts
    assert np.all(np.abs(draw(LOGITS, sampling, counts=counts) - softmax(expected)) < 0.02)
    both = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.5)
    repeated = np.array([1.0, 1.5, -4.0, 1.0, 0.5, 1.25]) - 0.5 * (counts > 0) - 0.25 * counts
    found = draw(LOGITS, both, seen=seen, counts=counts)
    assert np.all(np.abs(found - softmax(repeated * 2)) < 0.02)


def test_extreme_values_are_finite() -> None:
    assert draw(LOGITS, Sampling(temperature=1e-30)).argmax() == 1
    assert draw(LOGITS, Sampling(temperature=1e30)).max() < 0.2
    assert draw([-1e9, 5.0, -1e9], Sampling(top_k=2, top_p=0.9))[1] == 1
    assert draw([1e4, -1e4, 0.0], Sampling(min_p=0.5))[0] == 1


def test_ties() -> None:
    """Top-k keeps every token tied with the k-th, as transformers does; greedy takes the first."""
    assert np.all(np.abs(draw([1.0, 1.0, 1.0, 0.0], Sampling(top_k=2)) - [1 / 3, 1 / 3, 1 / 3, 0]) < 0.02)
    assert draw([0.0, 1.0, 1.0], None, 1).argmax() == 1


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", float("nan")),
    ],
)
@pytest.mark.wrong_types
def test_invalid_sampling_arguments_are_named(knob: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{knob}=.*: it must be "):
        Sampling(**{knob: value})


# Sampling of sequences


@pytest.mark.slow
def test_seed_determines_the_samples() -> None:
    sampling = Sampling(temperature=1.5)
    first = run(sampling=sampling, seed=1)
    assert np.array_equal(first, run(sampling=sampling, seed=1))
    assert not np.array_equal(first, run(sampling=sampling, seed=2))
    twins = np.stack([PROMPT[0]] * 2)
    both = run(twins, sampling=sampling, seed=1)
    assert not np.array_equal(both[0], both[1])  # equal prompts draw independently


@pytest.mark.slow
def test_steps_are_sampled_independently() -> None:
    """Of flat logits, every step would draw the same token from the same key."""
    for row in run(sampling=Sampling(temperature=1e30)):
        assert len(set(row[1:].tolist())) > 3


@pytest.mark.slow
def test_rows_are_sampled_independently() -> None:
    sampling = Sampling(temperature=1.2, top_k=20, repetition_penalty=1.2)
    pair = run(sampling=sampling)
    other = PROMPT.copy()
    other[1] = (other[1] + 11) % 53
    assert np.array_equal(run(other, sampling=sampling)[0], pair[0])
    assert np.array_equal(run(PROMPT[:1], sampling=sampling)[0], pair[0])


@pytest.mark.slow
def test_single_candidate_equals_greedy() -> None:
    greedy = run()
    for sampling in (Sampling(top_k=1), Sampling(temperature=0), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        assert np.array_equal(run(sampling=sampling, seed=9), greedy), sampling


def test_a_large_penalty_forbids_repetition() -> None:
    """Penalises ids of the prompt, without its padding, and new ids."""
    new = run(count=10, sampling=Sampling(temperature=0, repetition_penalty=1e6))
    for row, prompt in zip(new, PROMPT, strict=True):
        assert len({*row.tolist(), *prompt.tolist()}) == 10 + len(set(prompt.tolist()))
    padded = np.concatenate([np.full((2, 3), 9, np.int32), PROMPT], axis=1)
    mask = np.arange(10)[None] >= np.array([3, 3])[:, None]
    same = run(padded, mask, count=10, sampling=Sampling(temperature=0, repetition_penalty=1e6))
    assert np.array_equal(same, new)


# End of sequence


@pytest.mark.slow
def test_finished_rows_are_padded() -> None:
    """Each row keeps its end token and is padded after it; generation stops when all rows are finished."""
    free = run(count=8)
    eos = int(free[0, 2])
    stop = int(np.argmax(free[0] == eos))
    assert eos not in free[1, : stop + 1]
    second = int(np.argmax(free[1] == eos)) if eos in free[1] else None
    got = run(count=8, eos_token_id=eos)
    assert np.array_equal(got[0, : stop + 1], free[0, : stop + 1])
    assert np.all(got[0, stop + 1 :] == 0)
    assert np.array_equal(got[1, :second], free[1, :second])
    both = [eos, int(free[1, 4])]
    ends = [next(i for i, t in enumerate(row.tolist()) if t in both) for row in free]
    got = run(count=8, eos_token_id=both)
    assert got.shape[1] == max(ends) + 1 < 8
    for row, end, all_of_it in zip(got, ends, free, strict=True):
        assert np.array_equal(row[: end + 1], all_of_it[: end + 1]) and np.all(row[end + 1 :] == 0)


@pytest.mark.slow
def test_a_finished_row_still_counts_for_dynamic_rope() -> None:
    """As in transformers: the frequencies of all rows follow the longest, which goes on after its end."""
    rope = {"rope_type": "dynamic", "factor": 8.0}
    model = build_tiny("mixtral", max_position_embeddings=9, rope_scaling=rope)
    tokens, mask = random_tokens(2, 11), np.ones((2, 11), np.int32)
    mask[0, :8] = 0
    whole = nnxmoe.generate(model, tokens, mask, 12, eos_token_id=None)[:, 11:]
    end = next(i for i, one in enumerate(whole[1]) if one not in whole[0])
    ended = nnxmoe.generate(model, tokens, mask, 12, eos_token_id=int(whole[1, end]))[:, 11:]
    assert ended[0].tolist() == whole[0].tolist()
    first = whole[1].tolist().index(whole[1, end])
    assert ended[1].tolist() == [*whole[1, : first + 1], *[0] * (11 - first)]


def test_default_eos_token_ids() -> None:
    """Taken from generation_config.json, else config.json. None never stops; one or several ids are accepted."""
    model = build_tiny("llama", eos_token_id=[5, 6])
    assert eos_ids(model, ...) == (5, 6)
    model.generation_config = {"eos_token_id": 9}
    assert eos_ids(model, ...) == (9,)
    model.generation_config = {"eos_token_id": [9, 10]}
    assert eos_ids(model, ...) == (9, 10)
    model.generation_config = {"eos_token_id": None}
    assert eos_ids(model, ...) == ()
    model.generation_config = {"pad_token_id": 3}
    assert eos_ids(model, ...) == (5, 6)
    for given, wanted in ((None, ()), (4, (4,)), (np.int64(4), (4,)), ([4, 7], (4, 7)), ((), ())):
        assert eos_ids(model, given) == wanted


def test_default_eos_token_ids_stop_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    free = run(count=8)
    monkeypatch.setattr(decode, "eos_ids", lambda model, eos: (int(free[0, 0]), int(free[1, 0])))
    assert run(count=8, eos_token_id=...).shape == (2, 1)


# Prompts


@pytest.mark.slow
def test_padding_does_not_change_the_continuation() -> None:
    """Left, right and two-sided padding, and holes."""
    alone = [run(PROMPT[:1, :4])[0], run(PROMPT[1:])[0]]
    for at in (slice(3, 7), slice(0, 4), slice(1, 5), [0, 2, 3, 6]):
        prompt, mask = PROMPT.copy(), np.ones((2, 7), np.int32)
        mask[0] = 0
        mask[0, at] = 1
        prompt[0, at] = PROMPT[0, :4]
        got = run(prompt, mask)
        assert np.array_equal(got[0], alone[0]) and np.array_equal(got[1], alone[1]), at


def test_prompt_types() -> None:
    """Lists, NumPy and JAX arrays of any integer dtype, which the result keeps if it has 32 bits or more."""
    wanted, narrow = run(count=2), (np.int8, np.uint8, np.int16, np.uint16, jnp.int4)
    small = PROMPT % 8
    for prompt in (PROMPT.tolist(), jnp.asarray(PROMPT), *map(PROMPT.astype, (np.int64, np.uint32, np.uint64))):
        ids = nnxmoe.generate(tiny(), prompt, max_new_tokens=2, eos_token_id=None)
        assert np.array_equal(ids[:, 7:], wanted)
        assert ids.dtype == np.asarray(prompt).dtype
    wanted = nnxmoe.generate(tiny(), small, max_new_tokens=2, eos_token_id=None)
    for dtype in narrow:
        for prompt in (small.astype(dtype), jnp.asarray(small, dtype)):
            ids = nnxmoe.generate(tiny(), prompt, max_new_tokens=2, eos_token_id=None)
            assert np.array_equal(ids, wanted) and ids.dtype == np.int32


@pytest.mark.slow
def test_new_ids_may_be_beyond_the_dtype_of_the_prompt() -> None:
    model = build_tiny("llama", num_hidden_layers=1, vocab_size=400)
    model.generation_config = {"pad_token_id": 399}
    free = nnxmoe.generate(model, [[3, 4]], max_new_tokens=9, eos_token_id=None)
    assert free.max() > 255
    for dtype in (np.uint8, np.int8):
        narrow = np.array([[3, 4]], dtype)
        assert np.array_equal(nnxmoe.generate(model, narrow, max_new_tokens=9, eos_token_id=None), free)
        padded = nnxmoe.generate(model, np.repeat(narrow, 2, 0), [[1, 1], [0, 1]], 3, eos_token_id=int(free[0, 2]))
        assert padded.dtype == np.int32


@pytest.mark.wrong_types
@pytest.mark.parametrize("mask", [[[1, "x"]], [["1", "1"]], [[None, 1]], np.array([[1j, 1]])])
def test_masks_that_are_not_numbers_are_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match="attention_mask must contain numbers"):
        run([[1, 2]], mask)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.float32, jnp.bfloat16])
def test_masks_of_any_dtype(dtype: Any) -> None:
    mask = np.ones((2, 7))
    mask[0, :3] = 0
    wanted = run(mask=mask, count=2)
    for one in (jnp.asarray(mask, dtype), np.asarray(jnp.asarray(mask, dtype))):
        assert np.array_equal(run(mask=one, count=2), wanted)


@pytest.mark.wrong_types
def test_max_new_tokens() -> None:
    assert run(count=0).shape == (2, 0)
    assert np.array_equal(run(count=1), run(count=5)[:, :1])
    assert run(count=np.int64(3)).shape == (2, 3)
    assert run(count=3.0).shape == (2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, 1.5, True, float("inf")])
@pytest.mark.wrong_types
def test_invalid_max_new_tokens(count: Any) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens must be a 64-bit integer >= 0, got {count}"):
        run(count=count)


@pytest.mark.wrong_types
def test_invalid_prompts() -> None:
    with pytest.raises(ValueError, match=r"token ids must be in 0 … 52, got 53"):
        run([[1, 53]])
    with pytest.raises(ValueError, match=r"token ids must be in 0 … 52, got -1"):
        run([[1, -1]])
    with pytest.raises(ValueError, match=r"token ids .* got 53"):
        run([[53]], count=0)
    for empty in (np.zeros((2, 0), np.int32), np.zeros((0, 3), np.int32), [], [[]]):
        with pytest.raises(ValueError, match="the prompt is empty"):
            nnxmoe.generate(tiny(), empty)
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\].* float64"):
        nnxmoe.generate(tiny(), [[1.0]])
    with pytest.raises(ValueError, match=r"tokens must be integers.* single prompt as \[ids\]"):
        nnxmoe.generate(tiny(), [1, 2])
    for flags in ([[True, False]], np.ones((1, 3), bool), jnp.ones((1, 3), bool), [[1, True]], [[1, np.True_]]):
        with pytest.raises(ValueError, match=r"tokens must be integers|True"):
            nnxmoe.generate(tiny(), flags)
    with pytest.raises(ValueError, match=r"lengths \[3, 1\]: pad them"):
        nnxmoe.generate(tiny(), [[1, 2, 3], [4]])
    for text in ("text", ["one", "four"]):
        with pytest.raises(ValueError, match=r"text: pass \[tokenizer.encode\(text\)\], or use nnxmoe.stream"):
            nnxmoe.generate(tiny(), text)
    with pytest.raises(ValueError, match=r"attention_mask must have the tokens' shape \[2, 7\], got \[2, 6\]"):
        run(mask=np.ones((2, 6)))
    with pytest.raises(ValueError, match=r"row 1 of the prompts has no tokens"):
        run(mask=[[1] * 7, [0] * 7])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_64_bit_indices(kind: str) -> None:
    """JAX_ENABLE_X64 changes no id: caches, also in int8, are written and read with indices of 32 bits."""
    wanted: list[Any] = []
    for wide in (False, True):
        jax.config.update("jax_enable_x64", wide)
        try:
            model = build_tiny(kind, nnxmoe.Strategy(cache=nnxmoe.Int8Cache()))
            one = nnxmoe.generate(model, [[3, 4, 5]], max_new_tokens=3, sampling=nnxmoe.Sampling(top_k=1))
            (many,) = nnxmoe.complete(
                model, [[3, 4, 5] * 3], draft=nnxmoe.PromptLookup(2), max_new_tokens=4, logprobs=1
            )
        finally:
            jax.config.update("jax_enable_x64", False)
        wanted.append((one.tolist(), many.ids))
    assert wanted[0] == wanted[1]


def test_left_aligned_keeps_order() -> None:
    tokens, mask = np.arange(1, 13).reshape(2, 6), np.array([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]])
    ids, valid = left_pad(tokens, mask)
    assert ids.tolist() == [[0, 1, 3, 4], [8, 9, 11, 12]]
    assert valid.tolist() == [[False, True, True, True], [True] * 4]


def test_buckets() -> None:
    sizes = [bucket_size(n, 16) for n in range(1, 3000)]
    assert all(size >= n for n, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size <= max(16, 1.5 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 17


def test_chunk_sizes() -> None:
    """They hold the prompt, and padding is less than a chunk, or than what the small chunks would cost."""
    assert [chunk_sizes(n) for n in (1, 64, 65, 384, 385, 512)] == [[64], [64], [64] * 2, [64] * 6, [512], [512]]
    for length in range(1, 3000):
        sizes = chunk_sizes(length)
        assert 0 <= sum(sizes) - length < (64 if sizes[-1] == 64 else 128) and sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "deepseek_v3"))]
)
def test_prompts_of_several_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 3 to 21 tokens in chunks of 4 and 8, with a window of 6, continue as the prompt in one piece does."""
    for module in (engine, grouping):
        for name, value in (("SMALL", 4), ("LARGE", 8), ("MAX_SMALL", 1)):
            monkeypatch.setattr(module, name, value)
    model = build_tiny(kind, **({} if kind == "deepseek_v3" else {"sliding_window": 6}))
    tokens, mask = random_tokens(3, 21), np.arange(21) >= np.array([[0], [9], [18]])
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
    penalty = Sampling(temperature=0.0, repetition_penalty=1.7)
    for sampling in (None, penalty):
        ids = nnxmoe.generate(model, tokens, mask, sampling=sampling, **options)[:, 21:]
        for row, start in enumerate((0, 9, 18)):
            prompt = tokens[row : row + 1, start:]
            for new in ids[row]:
                logits = np.array(model(prompt).logits[0, -1])
                if sampling is not None:
                    seen = logits[prompt[0]]
                    logits[prompt[0]] = np.where(seen < 0, seen * 1.7, seen / 1.7)
                assert int(logits.argmax()) == new
                prompt = np.append(prompt, [[new]], axis=1)


@pytest.mark.slow
def test_tokens_that_compete_are_read_in_one_piece() -> None:
    """With a capacity it matters which tokens are read together."""
    model = build_tiny("mixtral", nnxmoe.Strategy(dispatch=nnxmoe.Capacity(1.0)))
    tokens = random_tokens(2, 96)  # two small chunks, and a size that needs no padding
    one = nnxmoe.generate(model, tokens, max_new_tokens=1)[:, 96:]
    logits = np.asarray(model(np.pad(tokens, ((0, 6), (0, 0))), np.pad(np.ones((2, 96), int), ((0, 6), (0, 0)))).logits)
    assert one[:, 0].tolist() == logits[:2, -1].argmax(axis=-1).tolist()


# Compilation


@pytest.mark.program
def test_programs_are_reused_across_lengths_seeds_and_values() -> None:
    """Lengths of a prompt, numbers of prompts and tokens, seeds and sampling values do not recompile."""
    tiny()
    run(sampling=Sampling(temperature=0.9, top_k=7))
    run()

    def others() -> None:
        for length in (1, 3, 64):
            for count in (1, 5):
                run(random_tokens(2, length), count=count)
        for rows in (3, 4):
            run(random_tokens(rows, 5), count=2)
        run(count=10, sampling=Sampling(temperature=0.2, top_k=3, top_p=0.5, min_p=0.1), seed=7)
        run(mask=np.tril(np.ones((7, 7)))[[3, 6]])

    assert compiled_in(others) == 0
    # A second chunk of a prompt is another beginning, other layers and another choice of a token than the first.
    assert compiled_in(lambda: run(random_tokens(2, 65), count=2)) <= 4
    assert compiled_in(lambda: [run(random_tokens(2, length), count=2) for length in (150, 384)]) == 0


@pytest.mark.program
def test_programs_are_shared_between_models_and_hold_no_weights() -> None:
    """A second model of the same structure does not compile; deleting a model frees its weights."""
    first, second = (build_tiny("llama", num_hidden_layers=1, seed=seed) for seed in (0, 1))
    known = passes._sizes.cache_info().currsize
    one = nnxmoe.generate(first, PROMPT, max_new_tokens=4, eos_token_id=None)
    before = passes._sizes.cache_info().currsize
    two = nnxmoe.generate(second, PROMPT, max_new_tokens=4, eos_token_id=None)
    assert before == passes._sizes.cache_info().currsize <= known + 1
    assert not np.array_equal(one, two)
    gone = weakref.ref(first.embed.table[...])
    del first
    gc.collect()
    assert gone() is None


# Text


@pytest.mark.slow
def test_stream_equals_generate_and_decode() -> None:
    """For text and ids as prompts; the end token is not part of the text."""
    model = load_case_model("llama_basic", nnxmoe.Strategy())
    tokenizer = nnxmoe.Tokenizer.from_pretrained(HF_CASES / "llama_basic" / "model")
    prompt = "The quick brown fox"
    ids = tokenizer.encode(prompt)
    for options in ({}, {"sampling": Sampling(temperature=1.5), "seed": 3}):
        new = nnxmoe.generate(model, [ids], max_new_tokens=24, eos_token_id=None, **options)[0, len(ids) :]
        keep = [int(i) for i in new if i < tokenizer.vocab_size]  # skip ids beyond the vocabulary
        pieces = list(nnxmoe.stream(model, tokenizer, prompt, max_new_tokens=24, eos_token_id=None, **options))
        text = "".join(pieces)
        assert text == tokenizer.decode(keep, skip_special_tokens=True)
        assert len(pieces) > 1
        assert "".join(nnxmoe.stream(model, tokenizer, ids, max_new_tokens=24, eos_token_id=None, **options)) == text
    stop = int(new[5])
    short = "".join(nnxmoe.stream(model, tokenizer, ids, max_new_tokens=24, eos_token_id=stop, **options))
    head = [int(i) for i in new[: int(np.argmax(new == stop))] if i < tokenizer.vocab_size]
    assert short == tokenizer.decode(head, skip_special_tokens=True)


def test_stream_is_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It yields text as soon as there is some, and can be closed then."""
    drawn, put = [], TextStream.put
    monkeypatch.setattr(TextStream, "put", lambda self, token: drawn.append(token) or put(self, token))
    model = load_case_model("llama_basic", nnxmoe.Strategy())
    tokenizer = nnxmoe.Tokenizer.from_pretrained(HF_CASES / "llama_basic" / "model")
    pieces = nnxmoe.stream(model, tokenizer, [1, 2, 3], max_new_tokens=40, eos_token_id=None)
    assert next(iter(pieces)) and 0 < len(drawn) < 20
    pieces.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_models_work_under_jax_transformations(case_model: Any) -> None:
    """Tokens are closed over or passed as arguments; parameters are closed over or differentiated."""
    model, tokens = case_model("mixtral_basic"), jnp.array([[0, 5, 9]])
    expected = np.asarray(model(tokens).logits)
    np.testing.assert_allclose(jax.jit(lambda: model(tokens).logits)(), expected, atol=1e-5)
    np.testing.assert_allclose(nnx.jit(lambda m, t: m(t).logits)(model, tokens), expected, atol=1e-5)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = jax.checkpoint(lambda p: nnx.merge(graph, p, rest)(tokens).logits.sum())
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(jax.grad(loss)(params)))


@pytest.mark.wrong_types
def test_strategy_rejects_strings_and_classes() -> None:
    for wrong in ("dense", nnxmoe.Dense):
        with pytest.raises(ValueError, match=r"dispatch=.*Sorted\(\)"):
            nnxmoe.Strategy(dispatch=wrong)  # pyright: ignore


@pytest.mark.wrong_types
def test_tokens_may_be_lists(case_model: Any) -> None:
    model = case_model("mixtral_basic")
    expected = model(jnp.array([[0, 5, 9]])).logits
    np.testing.assert_allclose(model([[0, 5, 9]]).logits, expected, atol=1e-5)


@pytest.mark.slow
def test_interrupted_decode_step_raises_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's buffers were donated; no deleted-buffer error replaces the interrupt."""

    def interrupted(run: Any, *arguments: Any) -> Any:
        result = run(*arguments)
        if arguments[0].shape[1] == 1:
            raise KeyboardInterrupt
        return result

    _wrap_passes(monkeypatch, interrupted)
    tokens = greedy_ids(build_tiny("mixtral", nnxmoe.Strategy()), np.ones((1, 4), np.int32), 6)
    with pytest.raises(KeyboardInterrupt):
        next(tokens)


@pytest.mark.slow
def test_next_step_starts_before_the_last_token_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No step starts beyond ``max_new_tokens``; drops are counted."""
    model = build_tiny("mixtral", nnxmoe.Strategy())
    started: list[None] = []

    def one_more_dropped(run: Any, *arguments: Any) -> Any:
        passed = run(*arguments)
        decoding = arguments[0].shape[1] == 1
        started.extend([None] * decoding)
        return passed._replace(dropped=passed.dropped + decoding)

    _wrap_passes(monkeypatch, one_more_dropped)
    tokens = greedy_ids(model, np.ones((1, 4), np.int32), 5)
    assert [len(started) for _ in tokens] == [1, 2, 3, 4, 4]
    assert [record.args and record.args[0] for record in caplog.records] == [4]


def _wrap_passes(monkeypatch: pytest.MonkeyPatch, wrapper: Any) -> None:
    """Calls ``wrapper(pass, *arguments)`` in place of each pass of generation."""
    of = passes.passes
    monkeypatch.setattr(passes, "passes", lambda model: functools.partial(wrapper, of(model)))
