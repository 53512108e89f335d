"""Hashed n-grams and their embeddings: hashes, the state of a row, planted mistakes, and the tensors of tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.layers import hyper
from nnxmoe.layers.context import Context
from nnxmoe.layers.hyper import GatedConnection, StreamMixer
from nnxmoe.layers.recurrent import ngram
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.delta import GatedDeltaNet
from nnxmoe.layers.recurrent.ngram import NGramBranch, NGramHash
from nnxmoe.models import config_from_hf
from tests.support.arrays import max_error
from tests.support.families import load
from tests.support.running import eager_logits
from tests.support.tiny import build, write_checkpoint

KIND, NOTICED = "qwen4_exp_text", 1e-3
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
Made = tuple[Any, Any]


@pytest.fixture(scope="module")
def made() -> Made:
    """The frozen case, and its model, which must not be modified."""
    case = load(KIND)
    return case, build(case.fields, case.weights)


# Hashes


@pytest.mark.parametrize(
    ("vocab", "length", "heads", "min_rows", "layer"),
    [(248320, 3, 8, 20_000_000, 0), (64, 2, 3, 5, 1), (1000, 4, 2, 97, 2), (2**24, 4, 1, 2**25, 0), (50, 3, 1, 1, 0)],
)
def test_rows_equal_those_of_64_bit_integers(vocab: int, length: int, heads: int, min_rows: int, layer: int) -> None:
    hashes = NGramHash.from_seed(1234, layer=layer, length=length, heads=heads, min_rows=min_rows, vocab=vocab, eos=1)
    tokens = np.random.default_rng(0).integers(0, vocab, (length, 3, 50))
    mixed, wanted = tokens[0] * hashes.multipliers[0], []
    for i in range(1, length):
        mixed = mixed ^ (tokens[i] * hashes.multipliers[i])
        wanted.append(mixed[..., None] % np.array(hashes.primes[(i - 1) * heads : i * heads]))
    found = jax.jit(lambda tokens: hashes.rows(list(tokens)))(jnp.asarray(tokens, jnp.int32))
    assert np.array_equal(found, np.concatenate(wanted, -1) + np.cumsum([0, *hashes.primes[:-1]]))


def test_constants_of_the_published_model() -> None:
    """The table has 320,001,536 rows in 128 tensors of 2,500,012 (model.safetensors.index.json on the hub)."""
    config: Any = nnxmoe.models.PRESETS["qwen3.8-flash-next"]
    hashes = config.ngram_hashes[1]
    assert hashes.primes[:2] == (20_000_003, 20_000_023) and len(hashes.primes) == 16
    assert -(-sum(hashes.primes) // 128) * 128 == 320_001_536 == 128 * 2_500_012
    assert max(hashes.multipliers) * (config.vocab_size - 1) < 2**63


# Tokens before each token


def previous(made: Made, tokens: list[int], segments: list[int] | None = None) -> np.ndarray:
    """The tokens, and the one and two tokens before each."""
    _, model = made
    branch = model.stacks[1].layers[0].ngram
    segment = None if segments is None else jnp.asarray([segments])
    context = Context(jnp.arange(len(tokens)), segment=segment, tokens=jnp.asarray([tokens]))
    order = ngram.OrderedTokens.from_context(context, 1, len(tokens), cached=False)
    ids = jnp.concatenate([jnp.zeros((1, 2), jnp.int32), context.tokens + 1], axis=1)
    return np.asarray(branch._previous_tokens(ids, order))[:, 0]


def test_ngrams_end_at_the_end_token_and_at_segments(made: Made) -> None:
    eos = 24
    found = previous(made, [5, 6, eos, 7, 8, 9])
    assert found[1].tolist() == [eos, 5, 6, eos, 7, 8]
    assert found[2].tolist() == [eos, eos, 5, eos, eos, 7]
    found = previous(made, [5, 6, 7, 8, 9], [3, 3, 4, 4, 4])
    assert found[1].tolist() == [eos, 5, eos, 7, 8]
    assert found[2].tolist() == [eos, eos, eos, eos, 7]


def test_layers_need_token_ids(made: Made) -> None:
    _, model = made
    branch = model.stacks[1].layers[0].ngram
    with pytest.raises(ValueError, match="n-gram embeddings need token ids"):
        branch(jnp.zeros((1, 3, 3, 24)), Context(jnp.arange(3)))


# Planted mistakes

Plant = Callable[[Any, pytest.MonkeyPatch], None]


def branches(model: Any) -> list[NGramBranch]:
    return [part for _, part in nnx.iter_graph(model.stacks) if isinstance(part, NGramBranch)]


def end_tokens_forgotten(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = NGramBranch._previous_tokens

    def wrong(self: Any, ids: Any, tokens: Any) -> Any:
        found = right(self, jnp.where(ids == self.ngrams.eos + 1, 1000, ids), tokens)
        return [jnp.where(token == 999, self.ngrams.eos, token) for token in found]

    patch.setattr(NGramBranch, "_previous_tokens", wrong)


def no_bigrams(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = NGramBranch._previous_tokens

    def wrong(self: Any, ids: Any, tokens: Any) -> Any:
        token, _, *rest = right(self, ids, tokens)
        return [token, jnp.full_like(token, self.ngrams.eos), *rest]

    patch.setattr(NGramBranch, "_previous_tokens", wrong)


def one_table_for_all_functions(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NGramHash, "offsets", property(lambda self: (0,) * len(self.primes)))


def low_words_only(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = ngram._remainder
    patch.setattr(ngram, "_remainder", lambda high, low, divisors: right(jnp.zeros_like(high), low, divisors))


def no_dilation(model: Any, patch: pytest.MonkeyPatch) -> None:
    for branch in branches(model):
        branch.conv.dilation = 1


def no_convolution(model: Any, patch: pytest.MonkeyPatch) -> None:
    for branch in branches(model):
        branch.conv.weight.set_value(jnp.zeros_like(branch.conv.weight[...]))


def gates_without_root(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ngram.jnp, "sqrt", lambda x: x)


def one_scale_for_all_streams(model: Any, patch: pytest.MonkeyPatch) -> None:
    for _, part in nnx.iter_graph(model.stacks):
        if isinstance(part, hyper.StreamNorm):
            scale = part.scale[...].reshape(part.streams, -1)
            part.scale.set_value(jnp.tile(scale[:1], (part.streams, 1)).ravel())


def inputs_not_divided(model: Any, patch: pytest.MonkeyPatch) -> None:
    for _, part in nnx.iter_graph(model.stacks):
        if isinstance(part, GatedConnection):
            part.down.kernel.set_value(part.down.kernel[...] * part.streams)


def injections_of_one(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = GatedConnection.__call__
    patch.setattr(
        GatedConnection, "__call__", lambda self, x: (lambda c: c._replace(post=jnp.ones_like(c.post)))(right(self, x))
    )


def last_mixer_without_gates(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamMixer, "mix", lambda self, normalized: jnp.mean(normalized, axis=2))


def silu_gates(model: Any, patch: pytest.MonkeyPatch) -> None:
    for _, part in nnx.iter_graph(model.stacks):
        if isinstance(part, GatedDeltaNet):
            part.norm.activation = jax.nn.silu


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        end_tokens_forgotten, no_bigrams, one_table_for_all_functions, low_words_only, no_dilation, no_convolution,
        gates_without_root, one_scale_for_all_streams, inputs_not_divided, injections_of_one, last_mixer_without_gates,
        silu_gates,
    ],
)  # fmt: skip
def test_mistakes_change_the_logits(plant: Plant, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = made
    model = nnx.merge(*nnx.split(right))
    plant(model, monkeypatch)
    assert NOTICED < max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"]) < np.inf


def test_dilated_convolution_equals_its_definition() -> None:
    conv = ShortConv(3, 4, dilation=2, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 9, 3)).astype(np.float32)
    found, inputs = conv(jnp.asarray(x), jnp.zeros((2, conv.window_size, 3)), None)
    weight, padded = np.asarray(conv.weight[...])[:, 0], np.pad(x, ((0, 0), (6, 0), (0, 0)))
    sums = sum(padded[:, 2 * j : 2 * j + 9] * weight[:, j] for j in range(4))
    assert max_error(found, sums / (1 + np.exp(-sums))) < 1e-6
    windows = conv.windows(inputs, jnp.asarray([[0, 8], [3, 7]]), None)
    assert np.array_equal(windows[0, 1], x[0, 3:9]) and np.array_equal(windows[1, 0], padded[1, 4:10])


# Tensors of tables


def test_tables_are_read_from_shards_or_whole(made: Made, tmp_path: Path) -> None:
    """The shards of any number, and one tensor under transformers' name in memory; saved as config.json says."""
    case, _ = made
    shards = [case.weights[f"{TABLE}.shard_{i}.weight"] for i in range(4)]
    rest, table = {n: a for n, a in case.weights.items() if ".shard_" not in n}, np.concatenate(shards)
    halves = {f"{TABLE}.shard_{i}.weight": half for i, half in enumerate(np.array_split(table, [100]))}
    for i, stored in enumerate((halves, {f"{TABLE}.weight": table})):
        folder = write_checkpoint(tmp_path / str(i), case.fields, rest | stored)
        again = nnxmoe.from_pretrained(folder)
        assert np.array_equal(again.stacks[1].layers[0].ngram.embed.table[...], table)
        assert set(again.load_report.loaded) >= stored.keys() and not again.load_report.unexpected
    nnxmoe.save_pretrained(again, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == case.weights.keys()
    assert all(saved[name].tobytes() == case.weights[name].tobytes() for name in saved)


def test_shards_that_do_not_fit_are_named(made: Made, tmp_path: Path) -> None:
    case, _ = made
    name = f"{TABLE}.shard_1.weight"
    without = {n: array for n, array in case.weights.items() if n != name}
    narrow = {name: np.ascontiguousarray(case.weights[name][:, :-1])}
    constant = "model.layers.1.ple.ple_embedding.layer_multipliers"
    for number, (weights, message) in enumerate(
        (
            (without, r"ngram_embedding\.shard_1\.weight is missing"),
            (without | narrow, r"shard_1\.weight differs in width or dtype from .*shard_0"),
            (case.weights | {name: case.weights[name][:-1]}, r"has shape \[\d+, 4\], but the config requires"),
            (case.weights | {constant: case.weights[constant] + 2}, "layer_multipliers does not fit config.json"),
        )
    ):
        with pytest.raises(nnxmoe.CheckpointError, match=message):
            nnxmoe.from_pretrained(write_checkpoint(tmp_path / str(number), case.fields, weights))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_head_dim": None}, "indexer_head_dim is required"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        ({"indexer_budget": 5}, "indexer_budget 5 is not a multiple of indexer_compress_ratio 2"),
        ({"indexer_head_dim": 2}, "indexer_head_dim 2 is less than the rotary width 4"),
        ({"eos_token_id": None}, "eos_token_id is required"),
        ({"eos_token_id": []}, r"eos_token_id \(\) must be a token id"),
        ({"ple_layer_ids": [3]}, "ple_layer_ids: 3 must be a linear_attention layer"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids: 0 must be"),
        pytest.param({"ple_layer_ids": ["2"]}, "ple_layer_ids must list int values", marks=pytest.mark.wrong_types),
        ({"ple_embed_dim": 10}, "ple_embed_dim 10 is not a multiple of the 4 hash functions"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not supported"),
        ({"hc_count": 1}, "hc_count must be"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: 'sliding_attention' is not supported"),
    ],
)
def test_configs_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(nnxmoe.ConfigError, match=message):
        config_from_hf(load(KIND).fields | fields)


def test_gradients_reach_the_table(made: Made) -> None:
    case, model = made
    tokens = jnp.asarray(case.arrays["tokens"])
    graph, state = nnx.split(model)

    @jax.jit
    @jax.grad
    def gradients(state: nnx.State) -> Any:
        merged = nnx.merge(graph, state)
        return jnp.sum(merged.logits(merged.body(tokens).x) ** 2)

    table = gradients(state)["stacks"][1]["layers"][0]["ngram"]["embed"]["table"].get_value()
    used = np.abs(np.asarray(table)).max(axis=1) > 0
    assert 0 < used.sum() < len(used)  # only the rows of the tokens' n-grams
