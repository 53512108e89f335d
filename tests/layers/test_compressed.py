"""Compressed keys, residual streams and routing by token ids: the parts of DeepSeek-V4 and V4.1, with the frozen
outputs of transformers (`tests.support.families`)."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Int8Cache
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import RequestOptions
from nnxmoe.layers import hyper
from nnxmoe.layers.attention import compressed, indexer, shared_kv
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.layers.rope import TrailingPairs
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels
from nnxmoe.moe.selection import SqrtSoftplusTopK
from tests.support.arrays import max_error
from tests.support.families import NEW, PROMPT, Frozen, load
from tests.support.quantised import read_tensors, write_deepseek_v4
from tests.support.running import MODEL_TOLERANCE, PART_TOLERANCE, eager_logits, feed
from tests.support.tiny import ORACLE, build, write_checkpoint

KIND = "deepseek_v4"
CASE = load(KIND)
TOKENS, LOGITS = CASE.arrays["tokens"], CASE.arrays["logits"]


@pytest.fixture(scope="module", params=[KIND, "deepseek_v41_text"])
def case(request: pytest.FixtureRequest) -> Frozen:
    return load(request.param)


@pytest.fixture(scope="module")
def model(case: Frozen) -> nnxmoe.CausalLM:
    return build(case.fields, case.weights, ORACLE)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(5, 1, 1, 7, 3), pytest.param((2, 9, 6), marks=pytest.mark.slow)])
def test_any_split_of_a_prompt(model: nnxmoe.CausalLM, case: Frozen, chunks: tuple[int, ...]) -> None:
    """Windows of entries begin in one pass and end in another."""
    logits, _ = feed(model, TOKENS, chunks, mask=None, capacity=20)
    assert max_error(logits, case.arrays["logits"]) < MODEL_TOLERANCE


@pytest.mark.slow
def test_packed_segments_equal_separate_rows(model: nnxmoe.CausalLM, case: Frozen) -> None:
    """Windows of entries are counted from the start of a segment, with a cache too."""
    lengths = 7, 10
    packed = np.concatenate([TOKENS[:1, :7], TOKENS[1:, :10]], axis=1)
    segments, positions = np.repeat([3, 1], lengths)[None], np.concatenate([np.arange(n) for n in lengths])[None]
    wanted = np.concatenate([case.arrays["logits"][:1, :7], case.arrays["logits"][1:, :10]], axis=1)
    out = model(packed, segment_ids=segments, positions=positions)
    assert max_error(out.logits, wanted) < MODEL_TOLERANCE
    cache, found = model.empty_cache(1, 17), []
    for part in (slice(0, 6), slice(6, 15), slice(15, 17)):
        out = model(packed[:, part], segment_ids=segments[:, part], positions=positions[:, part], cache=cache)
        cache = out.cache
        found.append(out.logits)
    assert max_error(jnp.concatenate(found, axis=1), wanted) < MODEL_TOLERANCE


@pytest.mark.slow
def test_tokens_taken_back(model: nnxmoe.CausalLM, case: Frozen) -> None:
    """Entries and windows that rejected tokens have written are as if these had never been."""
    cache = model(TOKENS[:, :6], cache=model.empty_cache(2, 20, lookahead=4)).cache
    tried = model(np.roll(TOKENS, 1, axis=1)[:, 6:10], cache=cache).cache
    assert tried is not None
    back = dataclasses.replace(tried, length=tried.length - 4)
    found = model(TOKENS[:, 6:10], cache=back)
    assert np.array_equal(found.logits, model(TOKENS[:, 6:10], cache=cache).logits)
    rest = model(TOKENS[:, 10:], cache=found.cache).logits
    assert max_error(rest, case.arrays["logits"][:, 10:]) < MODEL_TOLERANCE


@pytest.mark.slow
def test_requests_of_an_engine(model: nnxmoe.CausalLM, case: Frozen) -> None:
    """Of different lengths, with drafts that are taken back: each as in transformers, alone."""
    wanted = case.arrays["padded.greedy"]
    prompts = [
        row[used > 0].tolist() for row, used in zip(TOKENS[:, :PROMPT], case.arrays["mask"][:, :PROMPT], strict=True)
    ]
    for draft in (None, nnxmoe.PromptLookup(3)):
        engine = Engine(model, slots=2, capacity=32, draft=draft)
        requests = [engine.submit(prompt, RequestOptions(NEW, stop_ids=None)) for prompt in prompts]
        engine.run()
        assert [request.ids for request in requests] == wanted.tolist(), draft


@pytest.mark.slow
def test_blocks_of_queries(model: nnxmoe.CausalLM, case: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of long passes is computed a block of queries at a time, each with its part of the window."""
    mask = case.arrays["mask"]
    wanted = [eager_logits(model, TOKENS, used) for used in (None, mask)]
    monkeypatch.setattr(shared_kv, "MAX_QUERIES", 8)
    monkeypatch.setattr(indexer, "BLOCK_SCORES", 1)
    for used, logits in zip((None, mask), wanted, strict=True):
        error = max_error(eager_logits(model, TOKENS, used), logits, np.ones_like(mask) if used is None else used)
        assert error < PART_TOLERANCE


@pytest.mark.slow
def test_names_of_deepseek(case: Frozen, tmp_path: Path) -> None:
    """DeepSeek's own files have no prefix, and other names of the embedding and of the last sum."""
    names = (("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", ""))
    names += ((".attn.norm.", ".attn.kv_norm."),)
    stored = {functools.reduce(lambda n, pair: n.replace(*pair), names, name): v for name, v in case.weights.items()}
    loaded = nnxmoe.from_pretrained(write_checkpoint(tmp_path, case.fields, stored))
    assert max_error(loaded(TOKENS).logits, case.arrays["logits"]) < MODEL_TOLERANCE


@pytest.mark.slow
def test_memory_of_a_cache() -> None:
    """A window and an entry for every few tokens, however long the rows; entries are int8 if asked for, the open
    windows are not."""
    model = build(CASE.fields, CASE.weights, dataclasses.replace(ORACLE, cache=Int8Cache()))
    short, long = (sum(a.nbytes for a in jax.tree.leaves(model.empty_cache(1, n).layers)) for n in (600, 1200))
    rates, width, index = (3, 4, 3), 12 + 4, 10 + 4  # an int8 value per component and a scale per entry
    assert long - short == sum(600 // rate * width for rate in rates) + 2 * 600 // 3 * index
    assert max_error(feed(model, TOKENS, [9, *[1] * 8], mask=None, capacity=20)[0], LOGITS) < 0.3


def closing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries exist from the token after their window on."""
    old = compressed.RowMetadata.slots
    monkeypatch.setattr(
        compressed.RowMetadata, "slots", lambda self, index: old(self, jnp.where(index < 0, -1, index + 1))
    )


def entries_from_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    old = shared_kv.SharedKV._attend_block

    def block(self: Any, q: Any, kv: Any, mask: Any, entries: Any) -> Any:
        slots = dataclasses.replace(entries.slots, index=jnp.minimum(entries.slots.index, 0))
        return old(self, q, kv, mask, dataclasses.replace(entries, slots=slots))

    monkeypatch.setattr(shared_kv.SharedKV, "_attend_block", block)


def index_without_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer.jax.nn, "relu", lambda x: x)


def outputs_stay_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrailingPairs, "inverse", lambda self, x, rotation: x)


def series_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    old = compressed.gather_by_index
    monkeypatch.setattr(compressed, "gather_by_index", lambda v, *a: jnp.roll(old(v, *a), v.shape[-1] // 4, axis=-1))


def streams_mixed_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    old = hyper.HyperConnection.__call__

    def turned(self: Any, streams: Any) -> Any:
        found = old(self, streams)
        return found._replace(mix=jnp.swapaxes(found.mix, -1, -2))

    monkeypatch.setattr(hyper.HyperConnection, "__call__", turned)


def one_round_of_sinkhorn(monkeypatch: pytest.MonkeyPatch) -> None:
    old = hyper.HyperConnection.__init__
    monkeypatch.setattr(hyper.HyperConnection, "__init__", lambda self, *a, **k: old(self, *a, **k | {"iterations": 1}))


def weights_of_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqrtSoftplusTopK, "compute_scores", lambda self, logits: jax.nn.softmax(logits, -1))


def tokens_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Context.for_output_tokens

    def shifted(self: Any) -> Any:
        found = old(self)
        return dataclasses.replace(found, tokens=jnp.roll(jnp.asarray(found.tokens), 1, axis=1))

    monkeypatch.setattr(Context, "for_output_tokens", shifted)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    closing_late, entries_from_the_future, index_without_relu, outputs_stay_rotated, series_swapped,
    streams_mixed_backwards, one_round_of_sinkhorn, weights_of_softmax, tokens_shifted,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_planted_mistakes_change_the_logits(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    moved = max_error(eager_logits(build(CASE.fields, CASE.weights, ORACLE), TOKENS), LOGITS)
    assert 1e-3 < moved < np.inf


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_deepseek_v4(tmp_path_factory.mktemp("published"))


@pytest.mark.slow
def test_published_codes(published: tuple[Path, Path]) -> None:
    """FP8 blocks and FP4 experts are exactly the floats that they stand for, and stay codes on request."""
    codes, floats = published
    loaded, twin = nnxmoe.from_pretrained(codes, dtype="float32"), nnxmoe.from_pretrained(floats)
    assert loaded.load_report is not None and [*loaded.load_report.skipped.values()] == [("mtp.0.e_proj.weight",)]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(twin), nnx.state(loaded)))
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert {
        one.weight.format.code_dtype for one in quantizable_kernels(kept) if isinstance(one.weight, QuantizedWeight)
    } == {"fp4", "fp8"}
    assert max_error(kept(TOKENS).logits, twin(TOKENS).logits) < MODEL_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts.1.w2.scale": None}, r"experts\.1\.w2\.weight_scale_inv is missing"),
        ({"experts.1.w2.scale": (64, 2)}, r"w2\.scale .* has shape \[64, 2\]: its scales must be \[64, 1\]"),
        ({"experts.1.w2.weight": (64, 15)}, "has rows of 30 codes: FP4 has groups of 32 here"),
        ({"gate.tid2eid": (48, 2)}, r"gate\.tid2eid in .* has 6: its values must be integers from 0 to 5"),
        ({"experts.1.w2.weight_scale_inv": (64, 1)}, "has both weight_scale_inv and scale: remove one of them"),
    ],
)
def test_malformed_codes(
    published: tuple[Path, Path], tmp_path: Path, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    tensors = read_tensors(published[0])
    for end, shape in change.items():
        name = f"model.layers.1.ffn.{end}"
        if shape is None:
            del tensors[name]
        elif end == "gate.tid2eid":
            tensors[name] = np.full(shape, 6)
        else:
            kind = np.int8 if end.endswith("w2.weight") else ml_dtypes.float8_e8m0fnu
            tensors[name] = np.ones(shape, np.float32).astype(kind)
    write_checkpoint(tmp_path, json.loads((published[0] / "config.json").read_text()), tensors)
    with pytest.raises(nnxmoe.CheckpointError, match=message):
        nnxmoe.from_pretrained(tmp_path)
