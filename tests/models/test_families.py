"""The families beyond the first three: frozen outputs of transformers, decoding, names, meshes, and planted mistakes.

`tests.support.families` has their tiny models; random configurations against a live transformers are in
test_families_oracle.py.
"""

import contextlib
import dataclasses
import functools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe import Capacity, Chunked, Dense, ExpertParallel, RaggedAllToAll, RingOfExperts, Scanned, Sorted, Strategy
from nnxmoe.apps.cli import main
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.convert import maxtext
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.convert.peft.adapter_slots import adapted_slots, adapter_slots
from nnxmoe.convert.peft.layer_adapters import parameter_name
from nnxmoe.layers.activations import LimitedSwiGLU, swiglu
from nnxmoe.layers.attention.block_indexer import BlockIndexer, IndexedGQA, KeyBlocks
from nnxmoe.layers.attention.cross_layer import CrossLayerAttention
from nnxmoe.layers.attention.gqa import GQA, AllHeadsNorm, AttentionDims, QKNorm
from nnxmoe.layers.attention.indexer import Indexer
from nnxmoe.layers.attention.shared_kv import SharedKV
from nnxmoe.layers.hyper import HyperConnection, IndependentConnection
from nnxmoe.layers.norm import RMSNorm, rms_normalize
from nnxmoe.layers.recurrent.kimi_delta import unbounded_decays
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.linen import LinenCausalLM
from nnxmoe.models import model_class
from nnxmoe.moe.block import MoE
from nnxmoe.moe.selection import Routing, SoftmaxGroupTopK, SoftmaxTopK
from nnxmoe.sharding_rules import sharding_of
from nnxmoe.train import Objective, lora
from tests.support.arrays import max_error
from tests.support.families import (
    FAMILIES,
    NEW,
    PROMPT,
    Frozen,
    constants_of,
    fused,
    load,
    positions_of,
    tokens_of,
    weights_of,
)
from tests.support.fp8 import quantise
from tests.support.maxtext_cases import LLAMA_3
from tests.support.running import MODEL_TOLERANCE, PART_TOLERANCE, eager_logits, feed, randomise, set_rope, tabulate
from tests.support.tiny import ORACLE, build, write_checkpoint

KINDS = tuple(FAMILIES)
SPARSE = tuple(kind for kind in KINDS if any(name.startswith("experts.") for name in load(kind).arrays))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(kind)``: the checkpoint of a frozen case."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            case = load(kind)
            made[kind] = write_checkpoint(tmp_path_factory.mktemp(kind), case.fields, case.weights)
        return made[kind]

    return folder


def errors(model: nnxmoe.CausalLM, case: Frozen) -> Iterator[tuple[str, float]]:
    """The largest error of the logits and of the routing weights per layer, unpadded and padded; asserts equal
    experts."""
    for prefix in ("", "padded."):
        mask = case.arrays["mask"] if prefix else np.ones_like(case.arrays["mask"])
        out = model(case.arrays["tokens"], mask, positions_of(mask), return_routing=True)
        yield prefix + "logits", max_error(out.logits, case.arrays[prefix + "logits"], mask)
        assert out.routing is not None
        layers = {int(name.split(".")[-1]) for name in case.arrays if name.startswith("experts.")}
        assert out.routing.keys() == layers, "layers with experts"
        for layer, routing in out.routing.items():
            order = np.argsort(np.asarray(routing.experts), axis=-1)
            pair = routing.experts, routing.weights
            experts, weights = (np.take_along_axis(np.asarray(array), order, -1) for array in pair)
            assert np.array_equal(experts[mask > 0], case.arrays[f"{prefix}experts.{layer}"][mask > 0])
            yield f"{prefix}weights.{layer}", max_error(weights, case.arrays[f"{prefix}weights.{layer}"], mask)


SCANNED = "deepseek_v2", "olmoe", "glm4_moe", "dots1", "solar_open", "minimax_m2", "hy_v3"  # equal layers compile once


@pytest.mark.every_set
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_match_transformers(kind: str, folders: Callable[[str], Path]) -> None:
    """Logits and routing of whole rows, padded or not."""
    strategy = Strategy(stacking=Scanned()) if kind in SCANNED else None
    case, model = load(kind), nnxmoe.from_pretrained(folders(kind), strategy=strategy)
    assert not model.load_report.unexpected and model.config.model_type == kind
    for name, error in errors(model, case):
        assert error < MODEL_TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_single_steps_match_transformers(kind: str, folders: Callable[[str], Path]) -> None:
    case, model = load(kind), nnxmoe.from_pretrained(folders(kind))
    tokens, mask = case.arrays["tokens"], case.arrays["mask"]
    for used, prefix in ((np.ones_like(mask), ""), (mask, "padded.")):
        stepwise, _ = feed(model, tokens, [1] * tokens.shape[1], mask=used, capacity=tokens.shape[1])
        assert max_error(stepwise, case.arrays[prefix + "logits"], used) < MODEL_TOLERANCE, prefix


# Decoding depends on a family by its caches: rings beside whole ones, latent ones, with keys of an indexer, or neither.
@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("qwen3", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2")
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_greedy_tokens_match_transformers(kind: str, folders: Callable[[str], Path]) -> None:
    """Left-padded too."""
    case, model = load(kind), nnxmoe.from_pretrained(folders(kind))
    tokens, mask = case.arrays["tokens"][:, :PROMPT], case.arrays["mask"][:, :PROMPT]
    for used, prefix in ((np.ones_like(mask), ""), (mask, "padded.")):
        ids = nnxmoe.generate(model, tokens, used, NEW, eos_token_id=None)
        assert np.array_equal(ids[:, PROMPT:], case.arrays[prefix + "greedy"]), prefix


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("ministral3", "exaone_moe", "mellum", "afmoe") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_packed_documents_equal_rows_of_their_own(kind: str, folders: Callable[[str], Path]) -> None:
    model, tokens = nnxmoe.from_pretrained(folders(kind)), load(kind).arrays["tokens"]
    parts = slice(0, 7), slice(7, tokens.shape[1])
    segments, positions = (
        np.concatenate([make(part.stop - part.start, i) for i, part in enumerate(parts)])[None].repeat(2, axis=0)
        for make in (lambda size, i: np.full(size, i + 1), lambda size, _: np.arange(size))
    )
    packed = model(tokens, positions=positions, segment_ids=segments).logits
    for part in parts:
        assert max_error(packed[:, part], model(tokens[:, part]).logits) < MODEL_TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_kept_bit_for_bit(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Saved with the hub's names; the fused names of transformers 5 load to the same parameters; scanned too."""
    case = load(kind)
    model = nnxmoe.from_pretrained(folders(kind), strategy=Strategy(stacking=Scanned()))
    nnxmoe.save_pretrained(model, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == case.weights.keys()
    assert all(saved[name].tobytes() == case.weights[name].tobytes() for name in saved)
    again = nnxmoe.from_pretrained(tmp_path / "again")
    assert vars(again.config) | {"dtype": None} == vars(model.config) | {"dtype": None}
    assert again.config.model_type == (model.config.saved_type or kind)
    one = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "fused", case.fields, fused(case.weights)))
    for mine, other in zip(*(jax.tree.leaves(nnx.state(each)) for each in (one, again)), strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("kind", ["glm4_moe", "hy_v3"])
def test_prediction_layer_is_skipped(kind: str, tmp_path: Path) -> None:
    """It has the number num_hidden_layers and, besides its own tensors, those of a layer with experts."""
    case = load(kind)
    extra = {name.replace("layers.2.", "layers.3."): x for name, x in case.weights.items() if "layers.2." in name}
    extra["model.layers.3.eh_proj.weight"] = np.zeros((24, 48), np.float32)
    folder = write_checkpoint(tmp_path, case.fields | {"num_nextn_predict_layers": 1}, case.weights | extra)
    report = nnxmoe.from_pretrained(folder).load_report
    assert not report.unexpected and [set(names) for names in report.skipped.values()] == [set(extra)]


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_reads_headers(kind: str, folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folders(kind))]) == 0 and kind in capsys.readouterr().out
    found = summarize(folders(kind))
    case = load(kind)
    constants = constants_of(case.fields)
    assert found.parameters == sum(array.size for name, array in case.weights.items() if name not in constants)
    assert not found.missing and not found.unexpected


def test_inspect_counts_the_windows_of_each_layer(folders: Callable[[str], Path]) -> None:
    found = summarize(folders("qwen3"))
    token = 2 * 2 * 10 * 4  # keys and values of two heads of width 10, in float32
    assert found.cache == {5: 2 * token, None: token} and found.cache_bytes(3, 9) == 3 * (5 * 2 + 9) * token


def test_undeclared_fields_are_in_the_load_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = load("qwen2")
    folder = write_checkpoint(tmp_path / "model", case.fields | {"new_attention": 2}, case.weights)
    model = nnxmoe.from_pretrained(folder)
    assert "new_attention 2" in str(model.load_report) and caplog.text.count("new_attention 2") == 1
    assert main(["inspect", str(folder)]) == 0
    assert model.config == nnxmoe.config_from_hf(case.fields)
    write_checkpoint(folder, case.fields | {"is_causal": False}, case.weights)
    with pytest.raises(nnxmoe.ConfigError, match=r"config\.json: is_causal False is not supported for qwen2"):
        nnxmoe.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind", [kind if kind == "minimax_m2" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_fp8_blocks(kind: str, tmp_path: Path) -> None:
    """Kept or as floats, they give the logits of a model with the dequantised weights."""
    case, block = load(kind), (8, 12)
    stored, floats = dict(case.weights), dict(case.weights)
    for name, weight in case.weights.items():
        if weight.ndim == 2 and ("_proj." in name or ".experts." in name):
            stored[name], scale = quantise(weight, block)
            stored[name + "_scale_inv"], (rows, columns) = scale, weight.shape
            floats[name] = stored[name].astype(np.float32) * np.kron(scale, np.ones(block))[:rows, :columns]
    scheme = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": list(block)}
    folder = write_checkpoint(tmp_path / "fp8", case.fields | {"quantization_config": scheme}, stored)
    floats = {name: a if a.dtype.kind == "i" else a.astype(np.float32) for name, a in floats.items()}
    plain = write_checkpoint(tmp_path / "floats", case.fields, floats)
    tokens, _ = tokens_of(case.fields["vocab_size"])
    wanted = nnxmoe.from_pretrained(plain)(tokens).logits
    for keep in (False, True):
        found = nnxmoe.from_pretrained(folder, dtype="float32", keep_quantized=keep)(tokens).logits
        assert max_error(found, wanted) < MODEL_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_next", "kimi_linear", "glm_moe_dsa", "deepseek_v4", "minimax_m3_vl_text", "nemotron_h"]
)
def test_tables_of_modules(kind: str) -> None:
    """`nnx.tabulate` compiles every public method, and takes no named tuple inside of a tuple."""
    case = load(kind)
    assert "Linear" in tabulate(build(case.fields, case.weights), case.arrays["tokens"])


@pytest.mark.parametrize(
    "kind", [kind if kind == "qwen3" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_training_and_adapters(kind: str, folders: Callable[[str], Path]) -> None:
    """Every parameter has a gradient but those of an indexer and of a first layer's sum over the embedding alone; a
    step along it lowers the loss; and new adapters change nothing."""
    model, tokens = nnxmoe.from_pretrained(folders(kind)), load(kind).arrays["tokens"]
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def losses(params: Any) -> Any:
        return jax.value_and_grad(lambda p: Objective()(nnx.merge(graph, p, rest), {"tokens": tokens})[0])(params)

    before, grads = losses(params)
    flat = nnx.to_flat_state(grads)
    for path, grad in flat:
        constant = "indexer" in path or path[:5] == ("stacks", 0, "layers", 0, "attention_residual")
        assert (float(jnp.abs(grad.get_value()).max()) > 0) != constant and jnp.isfinite(grad[...]).all()
    size = sum(float(jnp.sum(grad.get_value() ** 2)) for _, grad in flat)
    after, _ = losses(jax.tree.map(lambda p, g: p - 1e-4 * before / size * g, params, grads))
    assert after < before
    lora.add(model, 2, rngs=nnx.Rngs(0))
    assert max_error(model(tokens).logits, load(kind).arrays["logits"]) < MODEL_TOLERANCE


def test_adapters_have_the_names_of_transformers_in_memory() -> None:
    """Also where files have others, or several parameters in one tensor."""
    ends = [f"self_attn.{x}_proj" for x in "qkvo"] + ["mlp.shared_experts.up_proj"]
    for kind in ("sarvam_moe", "hy_v3"):
        model = build(load(kind).fields, load(kind).weights)
        names = {parameter_name(model, slot, 1) for slot in adapter_slots(model) if 1 in slot.layers}
        assert {f"model.layers.1.{end}.weight" for end in ends} <= names


def test_adapters_that_peft_has_no_layers_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gate and up of MiniMax-M3's shared expert, which are one layer in transformers, are named; others fit."""
    model = build(load("minimax_m3_vl_text").fields, load("minimax_m3_vl_text").weights)
    lora.add(model, 2, targets=["router", "shared"], rngs=nnx.Rngs(0))
    lora.save(model, tmp_path / "adapter")
    assert "of shared.gate, shared.up: use nnxmoe to load them" in caplog.text
    modules = {name.split(".layers.1.")[-1] for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    assert {"mlp.gate.lora_A.weight", "mlp.shared_experts.down_proj.lora_A.weight"} <= modules
    lora.remove(model)
    lora.load(model, tmp_path / "adapter")
    assert {slot.name for slot in adapted_slots(model)} == {"router", "shared.gate", "shared.up", "shared.down"}


def test_bounds_are_checked_before_lists_per_layer_are_made() -> None:
    """Otherwise a number in a file could take all memory."""
    for kind in KINDS:
        fields = load(kind).fields
        nnxmoe.config_from_hf(fields)  # fills caches
        tracemalloc.start()
        with contextlib.suppress(nnxmoe.ConfigError):  # Nemotron-H, as transformers, counts its list of layers
            nnxmoe.config_from_hf(fields | {"num_hidden_layers": 10**6})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10**6, (kind, peak)


@pytest.mark.slow
def test_gemma_without_inputs_per_layer() -> None:
    """A model without inputs per layer equals one in which these add nothing."""
    case = load("gemma4_text")
    fields = case.fields | {"num_kv_shared_layers": 0}
    config, other = (nnxmoe.config_from_hf(fields | more) for more in ({}, {"hidden_size_per_layer_input": 0}))
    whole = randomise(model_class(config)(config, rngs=nnx.Rngs(0)))
    for layer in each_layer(whole):
        layer.own.norm.scale.set_value(jnp.zeros_like(layer.own.norm.scale[...]))
    plain, given = model_class(config)(other, rngs=nnx.Rngs(1)), dict(nnx.to_flat_state(nnx.state(whole)))
    nnx.update(plain, nnx.from_flat_state([(path, given[path]) for path, _ in nnx.to_flat_state(nnx.state(plain))]))
    tokens = case.arrays["tokens"]
    assert max_error(whole(tokens).logits, plain(tokens).logits) < PART_TOLERANCE


@pytest.mark.slow
def test_unused_keys_of_gemma_are_skipped(tmp_path: Path) -> None:
    """Of layers that attend to the keys of others, which published files may have all the same."""
    case = load("gemma4_text")
    name = "model.layers.4.self_attn.k_proj.weight"
    weights = case.weights | {name: np.ones((32, 24), np.float32)}
    report = nnxmoe.from_pretrained(write_checkpoint(tmp_path, case.fields, weights)).load_report
    assert report.skipped == {"tensors that the family does not use": (name,)} and not report.unexpected


# Meshes

RAGGED, RING = ExpertParallel(Sorted(), RaggedAllToAll()), ExpertParallel(Sorted(), RingOfExperts())
WAYS: dict[str, Any] = {
    "dense": Dense(),
    "sorted": Sorted(),
    "capacity": Capacity(8.0),
    "ragged": RAGGED,
    "ring": RING,
    "chunked ring": Chunked(RING, 3),
}
# Recurrent, sparse and compressed attention; experts beside a dense feed-forward; tables of n-grams.
MECHANISMS = "qwen3_next", "deepseek_v32", "deepseek_v4", "gemma4_text", "bailing_hybrid", "nemotron_h", "lfm2_moe"
MECHANISMS += ("hy_v4", "kimi_k3", "qwen4_exp_text", "deepseek_v41_text")
PLANS = [
    ("qwen3", "dense", {"fsdp": 4, "tensor": 2}),
    ("qwen3_moe", "ragged", {"expert": 2, "tensor": 2, "data": 2}),
    ("olmoe", "ring", {"expert": 2, "tensor": 4}),
    ("glm_moe_dsa", "sorted", {"fsdp": 2, "data": 2, "tensor": 2}),
    ("qwen2_moe", "ragged", {"fsdp": 2, "expert": 2, "tensor": 2}),
    ("qwen2", "dense", {"data": 2, "fsdp": 2, "tensor": 2}),
    *((kind, "dense", {"data": 2, "fsdp": 2, "tensor": 2}) for kind in ("olmo3", "phi3", "gemma3_text")),
    *((kind, way, {"expert": 4, "tensor": 2}) for kind in ("olmoe", "qwen2_moe") for way in WAYS),
    *((kind, way, {"data": 2, "expert": 2, "tensor": 2}) for kind in MECHANISMS for way in WAYS),
    *((kind, "ragged", {"fsdp": 4, "expert": 2}) for kind in SPARSE),
    *((kind, "ragged", {"data": 2, "expert": 2, "tensor": 2}) for kind in ("glm5_next_text", "minimax_m3_vl_text")),
]


WHOLE_RANKS = {**nnxmoe.RULES, "q_rank": None, "kv_rank": None}  # of 9 or 10, which meshes do not divide


def on_mesh(kind: str, way: str, sizes: dict[str, int]) -> float:
    """The relative error of the logits on a mesh against `Dense` on one device."""
    case = load(kind)
    tokens = np.tile(case.arrays["tokens"], (4, 1))
    one = build(case.fields, case.weights)(tokens).logits
    strategy = Strategy(dispatch=WAYS[way], mesh=nnxmoe.make_mesh(**sizes), rules=WHOLE_RANKS)
    error = max_error(build(case.fields, case.weights, strategy)(tokens).logits, one)
    return error / max(1.0, float(jnp.abs(one).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "sizes"),
    [plan if i < 4 else pytest.param(*plan, marks=pytest.mark.slow) for i, plan in enumerate(PLANS)],
)
def test_meshes_match_one_device(eight: Callable[..., Any], kind: str, way: str, sizes: dict[str, int]) -> None:
    assert eight(on_mesh, kind, way, sizes) < PART_TOLERANCE


def gradients_on_mesh(kind: str) -> float:
    """The largest relative error of the gradients of all float parameters on a mesh, in its own expert exchange."""
    case, mesh = load(kind), nnxmoe.make_mesh(fsdp=2, expert=2, tensor=2)
    tokens = np.tile(case.arrays["tokens"], (2, 1))
    found = []
    for strategy in (None, Strategy(dispatch=RAGGED, mesh=mesh, rules=WHOLE_RANKS)):
        graph, params, rest = nnx.split(build(case.fields, case.weights, strategy), nnx.Param, ...)

        def loss(params: Any, graph: Any = graph, rest: Any = rest) -> Any:
            return jnp.mean(jnp.sin(nnx.merge(graph, params, rest)(tokens).logits))

        found.append(jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
    assert len(found[0]) == len(found[1]) > 20
    return max(max_error(a, b) / max(1e-3, float(jnp.abs(b).max())) for a, b in zip(found[1], found[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MECHANISMS)
def test_gradients_on_meshes_match_one_device(eight: Callable[..., Any], kind: str) -> None:
    assert eight(gradients_on_mesh, kind) < 10 * PART_TOLERANCE


class InParts(RMSNorm):
    """What a norm of the whole projection becomes if each of several shards, or heads, is normalised on its own."""

    parts = 4

    def __call__(self, x: Any) -> Any:
        parts = x.reshape(*x.shape[:-2], self.parts, -1)
        unit = parts * jax.lax.rsqrt(jnp.mean(parts * parts, axis=-1, keepdims=True) + self.eps)
        return (unit.reshape(*x.shape[:-2], -1) * self.scale[...]).reshape(x.shape)


def whole_norm_on_shards() -> tuple[float, float]:
    """The largest relative error of output and gradients of attention with a whole norm and heads split four ways, and
    the difference that a norm per shard would make."""
    f32 = jnp.dtype("float32")
    rngs = nnx.Rngs(0)
    norm = QKNorm.all_heads(8, 4, 6, 1e-5, dtype=f32, rngs=rngs)
    for each in (norm.q, norm.k):
        each.scale.set_value(1 + 0.5 * jax.random.normal(rngs.params(), each.scale.shape))
    options: dict[str, Any] = {"rotary": Rope(6, 100.0), "window": None, "attention_fn": nnxmoe.ReferenceAttention()}
    heads = AttentionDims(16, 8, 4, 6, bias=True, out_bias=False)
    gqa = GQA(heads, **options, qk_norm=norm, dtype=f32, rngs=rngs)
    x = jax.random.normal(jax.random.key(1), (2, 7, 16)) * jnp.arange(1, 17)  # heads of different sizes
    graph, params = nnx.split(gqa)

    def loss(params: Any) -> Any:
        y, _ = nnx.merge(graph, params)(x, nnxmoe.Context.from_lengths(Rope(6, 100.0), 2, 7))
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    mesh = nnxmoe.make_mesh(tensor=4, data=2)
    flat = [(p, v.replace(jax.device_put(v.get_value(), sharding_of(v, mesh)))) for p, v in nnx.to_flat_state(params)]
    (_, wanted), slopes = run(params)
    (_, got), grads = run(nnx.from_flat_state(flat))
    pairs = zip(*map(jax.tree.leaves, ((got, grads), (wanted, slopes))), strict=True)
    error = max(max_error(a, b) / max(1.0, float(jnp.abs(b).max())) for a, b in pairs)
    for each in ("q", "k"):
        setattr(norm, each, _in_parts(getattr(norm, each), 4))
    return error, max_error(gqa(x, nnxmoe.Context.from_lengths(Rope(6, 100.0), 2, 7))[0], wanted)


def _in_parts(norm: RMSNorm, parts: int) -> RMSNorm:
    made = InParts(norm.scale.shape[0], norm.eps, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    made.parts = parts
    made.scale.set_value(norm.scale[...])
    return made


@pytest.mark.slow
def test_whole_norm_with_heads_split_over_devices(eight: Callable[..., Any]) -> None:
    error, mistaken = eight(whole_norm_on_shards)
    assert error < PART_TOLERANCE and mistaken > 1e-2


# MaxText's layout


def made(kind: str, **changes: Any) -> nnxmoe.CausalLM:
    """A model with other fields than the frozen case, with weights by name."""
    fields = {name: value for name, value in (load(kind).fields | changes).items() if value is not ...}
    config = nnxmoe.config_from_hf(fields)
    shapes = {name: leaf.shape for name, leaf in tensor_layout(model_class(config)(config, rngs=None)).items()}
    return build(fields, weights_of(shapes))


EQUAL_LAYERS: dict[str, dict[str, Any]] = {
    "kimi_k2": {},
    "qwen2": {"use_sliding_window": False, "layer_types": ...},
    "qwen3": {
        "use_sliding_window": False,
        "layer_types": ...,
        "rope_scaling": LLAMA_3,
    },  # no pairs
    "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v2": {},
    "deepseek_v32": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EQUAL_LAYERS)
def test_maxtext_layout(kind: str) -> None:
    """There and back bit for bit, and the Linen module of that layout computes the same."""
    model = made(kind, **EQUAL_LAYERS[kind])
    tree = maxtext.to_tree(model, scan_layers=False)
    again = maxtext.from_tree(tree, model.config)
    for mine, other in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, again)), strict=True):
        assert np.array_equal(mine, other)
    tokens = load(kind).arrays["tokens"]
    logits = jax.jit(LinenCausalLM(model.config).apply)({"params": tree["params"]}, tokens).logits
    assert max_error(logits, model(tokens).logits) < 1e-4
    attention = tree["params"]["decoder"].get("layers_1", {}).get("self_attention", {})
    if kind.startswith("qwen3"):
        assert attention["query_norm"]["scale"].shape == (model.config.head_width,)
        q = model.stacks[0].layers[1].attention.q.kernel[...]
        assert np.array_equal(np.moveaxis(attention["query"]["kernel"], 0, 2), q), "carries no scale"
        assert ("moe_block" in tree["params"]["decoder"]["layers_1"]) == (kind == "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen3", "3 stacks of different layers"),
        ("qwen3_moe", "3 stacks of different layers"),
        ("qwen2", "stacks of different layers"),
        ("glm4_moe_lite", "the MaxText format does not support 'glm4_moe_lite'"),
        ("glm_moe_dsa", "the MaxText format does not support 'glm_moe_dsa'"),
        ("olmoe", "the MaxText format does not support 'olmoe'"),
        ("qwen2_moe", "the MaxText format does not support 'qwen2_moe'"),
        ("glm4_moe", "the MaxText format does not support 'glm4_moe'"),
        ("dots1", "the MaxText format does not support 'dots1'"),
        ("solar_open", "the MaxText format does not support 'solar_open'"),
        ("minimax_m2", "the MaxText format does not support 'minimax_m2'"),
        ("hy_v3", "the MaxText format does not support 'hy_v3'"),
        ("sarvam_mla", "the MaxText format does not support 'sarvam_mla'"),
        ("sarvam_moe", "the MaxText format does not support 'sarvam_moe'"),
        ("qwen3_5_text", "the MaxText format does not support 'qwen3_5_text'"),
        ("ministral3", "the MaxText format does not support 'ministral3'"),
        ("mistral4", "the MaxText format does not support 'mistral4'"),
        ("ernie4_5_moe", "the MaxText format does not support 'ernie4_5_moe'"),
        ("exaone_moe", "the MaxText format does not support 'exaone_moe'"),
        ("mellum", "the MaxText format does not support 'mellum'"),
        ("afmoe", "the MaxText format does not support 'afmoe'"),
        ("mimo_v2_flash", "the MaxText format does not support 'mimo_v2_flash'"),
        ("laguna", "the MaxText format does not support 'laguna'"),
        ("step3p5", "the MaxText format does not support 'step3p5'"),
        ("minimax_m3_vl_text", "the MaxText format does not support 'minimax_m3_vl_text'"),
        ("glm5_next_text", "the MaxText format does not support 'glm5_next_text'"),
        ("qwen4_exp_text", "the MaxText format does not support 'qwen4_exp_text'"),
        ("kimi_linear", "the MaxText format does not support 'kimi_linear'"),
        ("nemotron_h", "the MaxText format does not support 'nemotron_h'"),
        ("bailing_hybrid", "the MaxText format does not support 'bailing_hybrid'"),
        ("granite", "the MaxText format does not support 'granite'"),
        ("granitemoe", "the MaxText format does not support 'granitemoe'"),
        ("granitemoeshared", "the MaxText format does not support 'granitemoeshared'"),
        ("granitemoehybrid", "the MaxText format does not support 'granitemoehybrid'"),
        ("lfm2", "the MaxText format does not support 'lfm2'"),
        ("lfm2_moe", "the MaxText format does not support 'lfm2_moe'"),
        *((kind, f"the MaxText format does not support '{kind}'") for kind in ("smollm3", "olmo3", "phi3")),
        *((kind, f"the MaxText format does not support '{kind}'") for kind in ("gemma3_text", "exaone4")),
    ],
)
def test_what_maxtext_does_not_have_is_refused(kind: str, message: str, folders: Callable[[str], Path]) -> None:
    with pytest.raises(nnxmoe.CheckpointError, match=message):
        maxtext.to_tree(nnxmoe.from_pretrained(folders(kind)))


# Planted mistakes

Plant = Callable[[Any], None]


def attentions(model: Any) -> Iterator[Any]:
    return (layer.attention for stack in model.stacks for layer in stack.layers)


def routed(model: Any) -> Iterator[MoE]:
    return (layer.moe for stack in model.stacks for layer in stack.layers if hasattr(layer, "moe"))


def norm_after_rotation(model: Any) -> None:
    for x in (x for x in attentions(model) if hasattr(x, "qk_norm")):
        norm, turn, heads = x.qk_norm, x.rotate, x.q.outs[0]
        x.qk_norm = None
        x.rotate = lambda a, r, n=norm, t=turn, h=heads: (n.q if a.shape[2] == h else n.k)(t(a, r))


def whole_instead_of_per_head(model: Any) -> None:
    for x in attentions(model):
        for name, part in (("q", x.q), ("k", x.k)):
            one, (heads, width) = getattr(x.qk_norm, name), part.outs
            wide = AllHeadsNorm(heads * width, one.eps, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
            wide.scale.set_value(jnp.tile(one.scale[...], heads))
            setattr(x.qk_norm, name, wide)


def per_head_instead_of_whole(model: Any) -> None:
    for x in attentions(model):
        for name, part in (("q", x.q), ("k", x.k)):
            setattr(x.qk_norm, name, _in_parts(getattr(x.qk_norm, name), part.outs[0]))


def norm_per_shard(model: Any) -> None:
    for x in attentions(model):
        x.qk_norm.q, x.qk_norm.k = _in_parts(x.qk_norm.q, 4), _in_parts(x.qk_norm.k, 4)


def swap_norms(model: Any) -> None:
    for x in attentions(model):
        x.qk_norm.q, x.qk_norm.k = x.qk_norm.k, x.qk_norm.q


def forget_norm(model: Any) -> None:
    for x in attentions(model):
        x.qk_norm = None


def norm_eps(model: Any) -> None:
    for x in attentions(model):
        x.qk_norm.q.eps = x.qk_norm.k.eps = 0.1


def window_by(change: int) -> Plant:
    def plant(model: Any) -> None:
        for x in attentions(model):
            x.window = None if x.window is None else x.window + change

    plant.__qualname__ = f"window_by_{change}"
    return plant


def windows_of_other_layers(model: Any) -> None:
    found = list(attentions(model))
    windows = [x.window for x in found]
    for x, window in zip(found, windows[1:] + windows[:1], strict=True):
        x.window = window


def windows_everywhere(model: Any) -> None:
    size = next(x.window for x in attentions(model) if x.window)
    for x in attentions(model):
        x.window = size


def drop_bias(name: str) -> Plant:
    def plant(model: Any) -> None:
        for x in attentions(model):
            bias = getattr(x, name).bias
            bias.set_value(jnp.zeros_like(bias[...]))

    plant.__qualname__ = f"drop_bias_{name}"
    return plant


def shift_runs(model: Any) -> None:
    model.stacks = nnx.List([*model.stacks[1:], model.stacks[0]])


def select_with(**changes: Any) -> Plant:
    def plant(model: Any) -> None:
        for x in routed(model):
            x.router.select = dataclasses.replace(x.router.select, **changes)

    plant.__qualname__ = "select_with_" + "_".join(changes)
    return plant


@dataclasses.dataclass(frozen=True)
class BySum(SoftmaxGroupTopK):
    """Groups ranked by the sum of their two best scores, as in DeepSeek-V3."""

    def __call__(self, logits: Any, bias: Any) -> Any:
        scores = jax.nn.softmax(logits, axis=-1)
        grouped = scores.reshape(*scores.shape[:-1], self.groups, -1)
        _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), self.top_groups)
        kept = jax.nn.one_hot(best, self.groups).sum(-2)[..., None]
        weights, experts = jax.lax.top_k((grouped * kept).reshape(scores.shape), self.k)
        return Routing(experts, weights * self.scale, scores, logits)


def groups_by_sum(model: Any) -> None:
    for x in routed(model):
        x.router.select = BySum(**vars(x.router.select))


def greedy_instead_of_groups(model: Any) -> None:
    for x in routed(model):
        x.router.select = SoftmaxTopK(x.router.select.k, normalize=False, scale=x.router.select.scale)


def forget_shared_gate(model: Any) -> None:
    for x in routed(model):
        x.shared.output_gate = lambda a: jnp.full((*a.shape[:-1], 1), jnp.inf)  # whose sigmoid is 1


def gate_with_half(model: Any) -> None:
    for x in routed(model):
        kernel = x.shared.output_gate.kernel
        kernel.set_value(jnp.zeros_like(kernel[...]))


def forget_shared(model: Any) -> None:
    for x in routed(model):
        x.shared = None


def forget_mscale(model: Any) -> None:
    for x in attentions(model):
        x.scale = (model.config.qk_nope_head_dim + model.config.qk_rope_head_dim) ** -0.5


def rotate_whole_heads(model: Any) -> None:
    """As if partial_rotary_factor were 1."""
    set_rope(model, Rope(model.config.head_width, model.config.rope.theta))
    for x in attentions(model):
        x.rotate = rotate_halves


def rotate_last_components(model: Any) -> None:
    for x in attentions(model):
        part = x.rotate
        x.rotate = lambda a, r, p=part: jnp.flip(p(jnp.flip(a, -1), r), -1)


def rotate_neighbours(model: Any) -> None:
    """Pair 2i and 2i + 1 in the rotated part."""
    for x in attentions(model):
        x.rotate = lambda a, r, w=x.rotate.width: jnp.concatenate([rotate_pairs(a[..., :w], r), a[..., w:]], -1)


def frequencies_of_whole_heads(model: Any) -> None:
    """Rotate the right part, by the first frequencies of the whole width."""
    whole, half = Rope(model.config.head_width, model.config.rope.theta), model.config.rope.dim // 2

    class First(Rope):
        def frequencies(self, length: Any) -> Any:
            return whole.frequencies(length)[:half]

    set_rope(model, First(model.config.rope.dim, model.config.rope.theta))


def forget_scale(model: Any) -> None:
    for x in attentions(model):
        x.beta = 0.0


def scale_a_token_late(model: Any) -> None:
    for x in attentions(model):
        x.original += 1


def forget_values_norm(model: Any) -> None:
    for x in attentions(model):
        x.project_kv = lambda h, x=x: (x.k(h), x.k(h) if x.keys_as_values else x.v(h))


def normalised_keys_as_values(model: Any) -> None:
    """As if values were taken after the norm of the keys."""
    for x in attentions(model):
        if getattr(x, "keys_as_values", False):
            x.project_kv = lambda h, x=x: (x.k(h), rms_normalize(x.qk_norm.k(x.k(h)), 1e-6))


def each_layer(model: Any) -> list[Any]:
    return [layer for stack in model.stacks for layer in stack.layers]


def forget_output_scale(model: Any) -> None:
    each_layer(model)[1].output_scale.factor.set_value(jnp.ones(1))


def forget_own_inputs(model: Any) -> None:
    each_layer(model)[1].own = None


def inputs_of_other_layers(model: Any) -> None:
    """Only the part that is looked up."""
    table = model.embed.per_layer.table
    table.set_value(jnp.roll(table[...], model.embed.norm.scale.shape[0], axis=1))


def unscaled_own_inputs(model: Any) -> None:
    model.embed.norm.scale.set_value(2 * model.embed.norm.scale[...])


def keys_of_an_earlier_layer(model: Any) -> None:
    """The first layer with a window instead of the last one that has keys."""
    each_layer(model)[0].stores, each_layer(model)[2].stores = True, False


def forget_norm_of_queries(model: Any) -> None:
    for x in attentions(model):
        if isinstance(x, CrossLayerAttention):
            x.q_norm = lambda q: q


def forget_expert_factors(model: Any) -> None:
    for x in routed(model):
        x.router.per_expert.set_value(jnp.ones_like(x.router.per_expert[...]))


def route_by_normed(model: Any) -> None:
    """As if the router read what the experts read."""
    for x in routed(model):
        x.router = lambda h, context, mesh, router=x.router, norm=x.norm: router(norm(h), context, mesh)


def experts_without_norm(model: Any) -> None:
    for x in routed(model):
        x.norm = None


def swap_post_norms(model: Any) -> None:
    for layer in each_layer(model):
        layer.dense_post_norm, layer.experts_post_norm = layer.experts_post_norm, layer.dense_post_norm


def forget_logit_cap(model: Any) -> None:
    model.logit_cap = None


def swap_ropes(model: Any) -> None:
    """Rotate whole layers like those with a window, by the frequencies of their own width."""
    for x in attentions(model):
        if x.window is None:
            x.rotary = Rope(x.rotary.dim, x.rotary.theta)


def rotate_by_halves(model: Any) -> None:
    for x in attentions(model):
        x.rotate = rotate_halves


def rotate_everywhere(model: Any) -> None:
    for x in attentions(model):
        x.rotary = model.config.rope


def forget_output_gate(model: Any) -> None:
    for x in attentions(model):
        x.gate = None


def gate_by_sigmoid(model: Any) -> None:
    for x in attentions(model):
        x.gate.activation = jax.nn.sigmoid


def bound_before_the_activation(model: Any) -> None:
    """As DeepSeek-V4 does."""
    dense = (layer.mlp for stack in model.stacks for layer in stack.layers if hasattr(layer, "mlp"))
    for part in (*dense, *(part for x in routed(model) for part in (x.experts, x.shared))):
        if part.activation != swiglu:
            part.activation = LimitedSwiGLU(part.activation.limit)


def bounds_of_other_experts(model: Any) -> None:
    """The routed experts' for the shared ones, and the other way round."""
    for x in routed(model):
        x.experts.activation, x.shared.activation = x.shared.activation, x.experts.activation


def indexers(model: Any) -> Iterator[BlockIndexer]:
    return (x.indexer for x in attentions(model) if isinstance(x, IndexedGQA))


def forget_indexer(model: Any) -> None:
    for x in attentions(model):
        x.topk = 1 << 30


def no_local_block(model: Any) -> None:
    for x in indexers(model):
        x.blocks = dataclasses.replace(x.blocks, local=0)


def blocks_of_the_first_head(model: Any) -> None:
    """The same for all heads."""
    for x in indexers(model):
        kernel = x.q.kernel
        kernel.set_value(jnp.broadcast_to(kernel[...][:, :1], kernel.shape))


def blocks_of_other_sizes(model: Any) -> None:
    """As many keys in smaller blocks."""
    for x in indexers(model):
        x.blocks = KeyBlocks(x.blocks.count, x.blocks.size, x.blocks.local)


def blocks_from_the_end(model: Any) -> None:
    """Without the keys that complete the last block."""
    for x in indexers(model):
        x._select_places = lambda q, keys, allowed, *rest, p=x._select_places: p(
            q, keys, allowed & (rest[0][:, None] % 3 < 2), *rest
        )


def rank_by_the_last_keys(model: Any) -> None:
    """Instead of the best of each block."""
    for x in indexers(model):
        x._select_places = lambda q, keys, allowed, offset, packed, p=x._select_places: p(
            q, jnp.where((offset % 3 == 2)[..., None], keys, -jnp.abs(keys)), allowed, offset, packed
        )


def forget_sinks(model: Any) -> None:
    for x in attentions(model):
        x.sinks = None


def rotate_leading_index_components(model: Any) -> None:
    for x in (x.indexer for x in attentions(model) if x.indexer is not None):
        x._rotate = functools.partial(Indexer._rotate, x)


def connections(model: Any) -> Iterator[HyperConnection | IndependentConnection]:
    for stack in model.stacks:
        for layer in stack.layers:
            yield from (layer.attention_streams, layer.feed_forward_streams)


def unit_magnitude(model: Any) -> None:
    for x in connections(model):
        x.magnitude = 1.0


def forget_stream_eps(model: Any) -> None:
    for x in connections(model):
        x.eps = 0.0


def swap_stream_weights(model: Any) -> None:
    """The weights of the inputs for those of the outputs, and the other way round."""
    for x in connections(model):
        x.weights.base.set_value(jnp.roll(x.weights.base[...], x.weights.groups[0]))


def select_all_entries(model: Any) -> None:
    for x in (x.indexer for x in attentions(model) if x.indexer is not None):
        x.k = 1 << 30


def forget_candidates(model: Any) -> None:
    for x in (x.indexer for x in attentions(model) if x.indexer is not None):
        x.selects_candidates = False


def candidates_of_single_entries(model: Any) -> None:
    for x in (x.indexer for x in attentions(model) if x.indexer is not None):
        x.blocks = dataclasses.replace(x.blocks, size=1)


def normalize_queries(model: Any) -> None:
    """As DeepSeek-V4 does."""
    for x in attentions(model):
        x.project_queries = functools.partial(SharedKV.project_queries, x)


def rotate_entries_as_windows(model: Any) -> None:
    for x in attentions(model):
        x.rotary = model.config.rope


def index_keys_without_norm(model: Any) -> None:
    for x in (x.compressor for x in attentions(model) if x.compressor is not None):
        x.indexer.norm = jax.nn.identity


def mean_of_the_tokens(model: Any) -> None:
    """Without gates."""
    for x in (x.compressor for x in attentions(model) if x.compressor is not None and x.rate > 1):
        x.gate.kernel.set_value(jnp.zeros_like(x.gate.kernel[...]))


def equal_stream_weights(model: Any) -> None:
    """Attention and feed-forward read the mean of the streams."""

    def plant(connection: Any, streams: Any) -> Any:
        weights, *factors = HyperConnection.compute_weights(connection, streams)
        return jnp.full_like(weights, 1 / weights.shape[-1]), *factors

    for x in connections(model):
        x.compute_weights = functools.partial(plant, x)


def forget_post_norms(model: Any) -> None:
    for stack in model.stacks:
        for layer in stack.layers:
            layer.attention_post_norm = layer.feed_forward_post_norm = None


def norm_before_instead_of_after(model: Any) -> None:
    for layer in each_layer(model):
        for name in ("attention", "feed_forward"):
            norm = getattr(layer, f"{name}_post_norm")
            setattr(layer, f"{name}_post_norm", None)
            setattr(layer, f"{name}_norm", lambda x, norm=norm: norm(x))


def norms_without_offset(model: Any) -> None:
    for layer in each_layer(model):
        layer.attention_post_norm.scale.set_value(layer.attention_post_norm.scale[...] - 1)


def short_divisors(model: Any) -> None:
    rope = model.config.rope
    set_rope(model, dataclasses.replace(rope, long_factor=rope.short_factor))


def forget_attention_factor(model: Any) -> None:
    set_rope(model, dataclasses.replace(model.config.rope, attention_factor=1.0))


def scale_by_head_width(model: Any) -> None:
    for x in attentions(model):
        x.scale = model.config.head_width**-0.5


def forget_embedding_scale(model: Any) -> None:
    model.embed.table.set_value(model.embed.table[...] * model.config.hidden_size**-0.5)


def forget_embedding_factor(model: Any) -> None:
    model.embed.factor = 1.0


def forget_residual_factor(model: Any) -> None:
    for layer in each_layer(model):
        layer.scale = 1.0


def usual_attention_scale(model: Any) -> None:
    for x in attentions(model):
        x.scale = model.config.head_width**-0.5


def forget_logits_divisor(model: Any) -> None:
    model.logits_scaling = 1.0


def swap_gate_and_up_in_shared(model: Any) -> None:
    for x in routed(model):
        kernel = x.shared.gate_up.kernel
        kernel.set_value(jnp.roll(kernel[...], kernel.shape[0] // 2, axis=0))


def average_blocks(model: Any) -> None:
    for residual in (model.norm.residual, *(layer.attention_residual for layer in each_layer(model))):
        residual.query.kernel.set_value(jnp.zeros_like(residual.query.kernel[...]))


def a_single_block(model: Any) -> None:
    for layer in each_layer(model)[1:]:
        layer.starts_block = False


def forget_finished_blocks(model: Any) -> None:
    """In the last norm."""
    model.norm.residual = lambda sums: sums[:, :, -1]


def residual_of_attention(model: Any) -> None:
    """Also for the feed-forward."""
    for layer in each_layer(model):
        layer.feed_forward_residual = layer.attention_residual


def forget_latent_norm(model: Any) -> None:
    for x in routed(model):
        x.latent_norm = None


def change_activation(**changes: Any) -> Plant:
    def plant(model: Any) -> None:
        for part in (part for x in routed(model) for part in (x.experts, x.shared)):
            part.activation = dataclasses.replace(part.activation, **changes)

    plant.__qualname__ = "change_activation_" + "_".join(changes)
    return plant


def decays_without_bound(model: Any) -> None:
    for x in attentions(model):
        x.decays = unbounded_decays


def rotate_nowhere(model: Any) -> None:
    for x in attentions(model):
        x.rotary = None


def forget_correction(model: Any) -> None:
    for x in routed(model):
        x.router.bias = None


ROTARY_MISTAKES = rotate_whole_heads, rotate_last_components, rotate_neighbours, frequencies_of_whole_heads
NORM_MISTAKES = norm_after_rotation, whole_instead_of_per_head, swap_norms, forget_norm, norm_eps
WINDOW_MISTAKES = window_by(1), window_by(-1), windows_of_other_layers, windows_everywhere
MISTAKES: list[tuple[str, Plant]] = [
    *(("qwen3", plant) for plant in NORM_MISTAKES),
    *((kind, plant) for kind in ("qwen2", "qwen3") for plant in WINDOW_MISTAKES),
    *(("qwen2", drop_bias(name)) for name in "qkv"),
    ("qwen3", drop_bias("o")),
    *((kind, shift_runs) for kind in ("qwen3_moe", "glm4_moe_lite")),
    *(("qwen3_moe", plant) for plant in (select_with(normalize=False), select_with(k=2), norm_after_rotation)),
    *((kind, select_with(scale=1.0)) for kind in ("kimi_k2", "glm4_moe_lite")),
    *((kind, forget_mscale) for kind in ("kimi_k2", "sarvam_mla")),
    *(("deepseek_v2", plant) for plant in (groups_by_sum, greedy_instead_of_groups, select_with(scale=1.0))),
    ("deepseek_v2", forget_mscale),
    *(("qwen2_moe", plant) for plant in (forget_shared_gate, gate_with_half, forget_shared, shift_runs)),
    ("qwen2_moe", select_with(normalize=True)),
    *(("qwen2_moe", drop_bias(name)) for name in "qkv"),
    *(("olmoe", plant) for plant in (per_head_instead_of_whole, norm_per_shard, norm_after_rotation, forget_norm)),
    *(("olmoe", plant) for plant in (norm_eps, select_with(normalize=True), select_with(k=2))),
    *(("glm4_moe", plant) for plant in (*ROTARY_MISTAKES, norm_after_rotation, forget_norm)),
    *(("glm4_moe", plant) for plant in (forget_shared, forget_correction, shift_runs)),
    *(("glm4_moe", drop_bias(name)) for name in "qkv"),
    *(("dots1", plant) for plant in (norm_after_rotation, window_by(1), windows_of_other_layers, drop_bias("o"))),
    *(
        ("minimax_m2", plant)
        for plant in (*ROTARY_MISTAKES, norm_after_rotation, forget_norm, per_head_instead_of_whole)
    ),
    *(("minimax_m2", plant) for plant in (forget_correction, select_with(normalize=False))),
    *((kind, plant) for kind in ("ministral3", "mistral4") for plant in (forget_scale, scale_a_token_late)),
    *(("mistral4", plant) for plant in (forget_mscale, rotate_by_halves, select_with(normalize=False))),
    *(("gemma4_text", plant) for plant in (forget_values_norm, normalised_keys_as_values, forget_output_scale)),
    *(("gemma4_text", plant) for plant in (forget_expert_factors, route_by_normed, experts_without_norm)),
    *(("gemma4_text", plant) for plant in (swap_post_norms, forget_logit_cap, swap_ropes, forget_embedding_scale)),
    *(("gemma4_text", plant) for plant in (forget_post_norms, norm_after_rotation, window_by(1), forget_own_inputs)),
    *(("gemma4_text", plant) for plant in (inputs_of_other_layers, unscaled_own_inputs, keys_of_an_earlier_layer)),
    ("gemma4_text", forget_norm_of_queries),
    *(("ernie4_5_moe", plant) for plant in (rotate_by_halves, forget_correction, forget_shared, shift_runs)),
    ("ernie4_5_moe", select_with(min_weight_sum=0.0)),
    *(("mimo_v2_flash", plant) for plant in (forget_output_gate, forget_sinks, window_by(1), forget_correction)),
    *(("mimo_v2_flash", plant) for plant in (rotate_last_components, windows_of_other_layers)),
    *(("laguna", plant) for plant in (forget_output_gate, gate_by_sigmoid, select_with(cap=1e9), forget_shared)),
    *(("laguna", plant) for plant in (norm_after_rotation, rotate_last_components, select_with(scale=1.0))),
    *(("step3p5", plant) for plant in (bound_before_the_activation, bounds_of_other_experts, forget_output_gate)),
    *(("step3p5", plant) for plant in (norm_after_rotation, rotate_last_components, select_with(scale=1.0))),
    *(("step3p5", plant) for plant in (swap_ropes, window_by(1), forget_correction, forget_shared)),
    *(("minimax_m3_vl_text", plant) for plant in (forget_indexer, no_local_block, blocks_of_the_first_head)),
    *(("minimax_m3_vl_text", plant) for plant in (blocks_of_other_sizes, blocks_from_the_end, rank_by_the_last_keys)),
    *(("minimax_m3_vl_text", plant) for plant in (norm_after_rotation, forget_correction, forget_shared)),
    *(("afmoe", plant) for plant in (rotate_everywhere, window_by(-1), norm_after_rotation, forget_correction)),
    *(("afmoe", plant) for plant in (forget_output_gate, forget_post_norms, forget_embedding_scale)),
    *(("granite", plant) for plant in (forget_embedding_factor, forget_residual_factor, usual_attention_scale)),
    *(("granite", plant) for plant in (forget_logits_divisor, *(drop_bias(name) for name in "qkvo"))),
    *(("granitemoe", plant) for plant in (select_with(k=2), select_with(normalize=False), forget_logits_divisor)),
    *(("granitemoeshared", plant) for plant in (forget_shared, swap_gate_and_up_in_shared, forget_residual_factor)),
    *(("lfm2_moe", plant) for plant in (norm_after_rotation, forget_norm, forget_correction, shift_runs)),
    *(("lfm2_moe", plant) for plant in (select_with(scale=1.0), select_with(normalize=False))),
    *(("mellum", plant) for plant in (rotate_everywhere, windows_of_other_layers, norm_after_rotation, shift_runs)),
    *(("exaone_moe", plant) for plant in (rotate_everywhere, rotate_nowhere, window_by(1), windows_of_other_layers)),
    *(("exaone_moe", plant) for plant in (norm_after_rotation, forget_correction, select_with(groups=2, top_groups=1))),
    *(("sarvam_moe", plant) for plant in (norm_after_rotation, swap_norms, *(drop_bias(name) for name in "qkv"))),
    *(("hy_v3", plant) for plant in (norm_after_rotation, forget_correction, forget_shared, drop_bias("o"))),
    *(("kimi_k3", plant) for plant in (average_blocks, a_single_block, forget_finished_blocks, residual_of_attention)),
    *(("kimi_k3", plant) for plant in (forget_latent_norm, decays_without_bound, forget_output_gate, forget_shared)),
    *(("kimi_k3", plant) for plant in (change_activation(bound=1e9), change_activation(up_bound=None))),
    *((kind, select_with(scale=1.0)) for kind in ("glm4_moe", "dots1", "solar_open", "hy_v3")),
    *(("smollm3", plant) for plant in (rotate_everywhere, rotate_nowhere, window_by(1), drop_bias("o"), shift_runs)),
    *(("olmo3", plant) for plant in (norm_before_instead_of_after, forget_post_norms, per_head_instead_of_whole)),
    *(("olmo3", plant) for plant in (rotate_everywhere, norm_after_rotation, windows_of_other_layers)),
    *(("phi3", plant) for plant in (*ROTARY_MISTAKES[1:], short_divisors, forget_attention_factor, window_by(-1))),
    *(("gemma3_text", plant) for plant in (norms_without_offset, forget_post_norms, scale_by_head_width)),
    *(("gemma3_text", plant) for plant in (rotate_everywhere, swap_ropes, forget_logit_cap, forget_embedding_scale)),
    *(("exaone4", plant) for plant in (norm_before_instead_of_after, rotate_everywhere, rotate_nowhere, swap_norms)),
    *(("hy_v4", plant) for plant in (forget_sinks, forget_output_gate, forget_correction, bounds_of_other_experts)),
    *(("hy_v4", plant) for plant in (rotate_leading_index_components, forget_indexer, unit_magnitude)),
    *(("hy_v4", plant) for plant in (forget_stream_eps, swap_stream_weights)),
    *(("deepseek_v41_text", plant) for plant in (select_all_entries, forget_candidates, candidates_of_single_entries)),
    *(("deepseek_v41_text", plant) for plant in (normalize_queries, rotate_entries_as_windows, mean_of_the_tokens)),
    *(("deepseek_v41_text", plant) for plant in (index_keys_without_norm, equal_stream_weights, swap_stream_weights)),
    *(("deepseek_v41_text", plant) for plant in (select_with(temperature=1.0), forget_correction, forget_shared)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plant"), [pytest.param(kind, plant, id=f"{kind}-{plant.__qualname__}") for kind, plant in MISTAKES]
)
def test_planted_mistakes_change_the_logits(kind: str, plant: Plant) -> None:
    case = load(kind)
    model = build(case.fields, case.weights, ORACLE)
    plant(model)
    moved = max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"])
    assert 1e-3 < moved < np.inf
