"""gpt-oss: the stored outputs of transformers, MXFP4 to the bit, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import nnxmoe
from nnxmoe import train
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.convert import maxtext
from nnxmoe.layers.activations import ClampedSwiGLU
from nnxmoe.layers.cache import TokenCache
from nnxmoe.linen import LinenCausalLM
from nnxmoe.models import PRESETS, GptOssConfig, config_from_hf
from nnxmoe.train import lora
from tests.support import gpt_oss
from tests.support.arrays import flat, identical, max_error
from tests.support.gpt_oss import CASES, FIELDS, LENGTH, by_the_formula, in_mxfp4, load_reference
from tests.support.numpy_decoder import reference_logits
from tests.support.quantised import read_tensors
from tests.support.running import MODEL_TOLERANCE, PART_TOLERANCE, feed, variables
from tests.support.tiny import TINY, Weights, build, build_tiny, random_tokens, tiny_weights, write_checkpoint

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
STRATEGIES = {
    "square": nnxmoe.Strategy(),
    "mxfp4": nnxmoe.Strategy(
        attention_fn=nnxmoe.FlashAttention(8, 4), dispatch=nnxmoe.Dense(), stacking=nnxmoe.Scanned()
    ),
}


@pytest.fixture(scope="module")
def model() -> Callable[[str], nnxmoe.CausalLM]:
    """``model(name)``: the model of a case in float32; must not be modified."""
    found: dict[str, nnxmoe.CausalLM] = {}

    def load(name: str) -> nnxmoe.CausalLM:
        if name not in found:
            found[name] = nnxmoe.from_pretrained(CASES / name / "model", dtype="float32", strategy=STRATEGIES[name])
        return found[name]

    return load


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(model: Any, name: str) -> None:
    """Whole, padded, one token at a time with a cache, and generated."""
    arrays, ours = load_reference(name), model(name)
    tokens, mask = arrays["input_ids"], arrays["padded.attention_mask"]
    assert max_error(ours(tokens).logits, arrays["logits"]) < MODEL_TOLERANCE
    padded = ours(tokens, attention_mask=mask).logits
    assert max_error(padded, arrays["padded.logits"], mask) < MODEL_TOLERANCE
    one_by_one, cache = feed(ours, tokens, [7, *[1] * (LENGTH - 7)], mask=None, capacity=LENGTH)
    assert max_error(one_by_one, arrays["logits"]) < MODEL_TOLERANCE
    rings = [layer.ring for layer in jax.tree.leaves(cache.layers, is_leaf=lambda c: isinstance(c, TokenCache))]
    assert rings == [True, False, True]
    ids = nnxmoe.generate(
        ours, tokens, arrays["generate.attention_mask"], max_new_tokens=gpt_oss.NEW, eos_token_id=None
    )
    np.testing.assert_array_equal(ids, arrays["generate.ids"])


def test_tiny_checkpoints_give_the_logits_of_the_numpy_decoder() -> None:
    fields = TINY["gpt_oss"] | {"layer_types": ["full_attention"] * 2, "sliding_window": None, "attention_bias": False}
    weights, tokens = tiny_weights(fields), random_tokens(2, 9)
    assert max_error(build(fields, weights)(tokens).logits, reference_logits(fields, weights, tokens)) < MODEL_TOLERANCE


def test_clamped_swiglu_by_its_formula() -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.normal(0, 8, (3, 50)).astype(np.float32) for _ in range(2))
    wanted = (np.clip(up, -7, 7) + 1) * (g := np.minimum(gate, 7)) / (1 + np.exp(-1.702 * g.astype(np.float64)))
    assert max_error(ClampedSwiGLU(1.702, 7.0)(jnp.asarray(gate), jnp.asarray(up)), wanted) < 1e-5
    assert (abs(gate) > 7).any() and (up > 7).any() and (up < -7).any()


# Checkpoints


@pytest.mark.slow
def test_saving_writes_the_same_bits(model: Any, tmp_path: Path) -> None:
    """bfloat16 is read and written unchanged; what was MXFP4 becomes the floats that it stands for."""
    for name in FIELDS:
        folder = CASES / name / "model"
        nnxmoe.save_pretrained(nnxmoe.from_pretrained(folder), tmp_path / name)
        wanted = gpt_oss.weights_of(name)
        for weight in ("gate_up_proj", "down_proj"):
            for scales in [n for n in wanted if n.endswith(f"{weight}_scales")]:
                of, exponents = scales.removesuffix("_scales"), wanted.pop(scales)
                wanted[of] = by_the_formula(wanted.pop(f"{of}_blocks"), exponents).astype(jnp.bfloat16)
        identical(read_tensors(tmp_path / name), wanted)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in written and written["dtype"] == "bfloat16"
        assert config_from_hf(written) == dataclasses.replace(model(name).config, dtype="bfloat16")
    nnxmoe.save(model("square"), tmp_path / "ours")
    again = nnxmoe.load(tmp_path / "ours")
    identical(*({path: np.asarray(v[...]) for path, v in variables(m)} for m in (again, model("square"))))


def test_mxfp4_is_read_to_the_bit(tmp_path: Path) -> None:
    """As floats and as codes, from every code with every usable exponent; in any box, as shards are read."""
    fields, weights = FIELDS["mxfp4"], tiny_weights(FIELDS["mxfp4"])
    stored, plain = in_mxfp4(weights)
    every = np.arange(2 * 64 * 16, dtype=np.uint32)
    stored[f"{GATE_UP}_blocks"][0] = ((every * 17) & 255).astype(np.uint8).reshape(128, 1, 16)
    stored[f"{GATE_UP}_scales"][0] = (np.arange(128) + 64).astype(np.uint8)[:, None]
    plain[GATE_UP] = by_the_formula(stored[f"{GATE_UP}_blocks"], stored[f"{GATE_UP}_scales"])
    codes = write_checkpoint(tmp_path / "codes", fields, stored)
    floats = write_checkpoint(tmp_path / "floats", {**fields, "quantization_config": None}, plain)
    wanted = {path: np.asarray(v[...]) for path, v in variables(nnxmoe.from_pretrained(floats))}
    read = nnxmoe.from_pretrained(codes, dtype="float32")
    identical({path: np.asarray(v[...]) for path, v in variables(read)}, wanted)
    assert not read.load_report.unexpected and set(read.load_report.loaded) == set(stored)
    narrow = nnxmoe.from_pretrained(codes, dtype="bfloat16")
    identical({p: np.asarray(v[...], np.float32) for p, v in variables(narrow) if p.endswith(KERNELS)},
              {p: v for p, v in wanted.items() if p.endswith(KERNELS)})  # fmt: skip
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    identical({path: np.asarray(v[...]) for path, v in variables(nnxmoe.dequantize(kept))}, wanted)
    assert set(kept.load_report.weights) == {"fp4", "float32"}
    assert summarize(codes, dtype="float32", keep_quantized=True).weights == dict(kept.load_report.weights)


def test_scales_of_nan_are_refused(tmp_path: Path) -> None:
    stored, _ = in_mxfp4(tiny_weights(FIELDS["mxfp4"]))
    stored[f"{GATE_UP}_scales"][1, 2, 0] = 255
    with pytest.raises(nnxmoe.CheckpointError, match=r"_scales in .* has a scale of nan at tile \[1, 2, 0\]"):
        nnxmoe.from_pretrained(write_checkpoint(tmp_path, FIELDS["mxfp4"], stored))


KERNELS = ("experts.gate", "experts.up", "experts.down")


@pytest.mark.slow
def test_kept_codes_give_the_logits_of_the_floats(model: Any, tmp_path: Path) -> None:
    """Also after saving them, in our own format and in that of the files, to the bit."""
    arrays = load_reference("mxfp4")
    kept = nnxmoe.from_pretrained(CASES / "mxfp4" / "model", dtype="float32", keep_quantized=True)
    assert max_error(kept(arrays["input_ids"]).logits, arrays["logits"]) < MODEL_TOLERANCE
    nnxmoe.save(kept, tmp_path / "ours")
    again = nnxmoe.load(tmp_path / "ours")
    assert (again(arrays["input_ids"]).logits == kept(arrays["input_ids"]).logits).all()
    nnxmoe.save_pretrained(kept, tmp_path / "hf", dtype="bfloat16")
    identical(read_tensors(tmp_path / "hf"), read_tensors(CASES / "mxfp4" / "model"))
    mixed = nnxmoe.quantize(model("square"), nnxmoe.Int8())
    with pytest.raises(nnxmoe.CheckpointError, match=r"shares its tensor with other parameters.*nnxmoe.dequantize"):
        nnxmoe.save_pretrained(mixed, tmp_path / "mixed")


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_mxfp4_that_we_save(tmp_path: Path) -> None:
    """And the stored outputs are still those of transformers."""
    pytest.importorskip("transformers")
    for name in FIELDS:
        kept = nnxmoe.from_pretrained(CASES / name / "model", keep_quantized=True)
        nnxmoe.save_pretrained(kept, tmp_path / name)
        found, wanted = gpt_oss.reference(tmp_path / name), load_reference(name)
        assert found.keys() == wanted.keys()
        assert all(max_error(found[key], wanted[key]) < PART_TOLERANCE for key in wanted)


def test_inspect_sizes_of_the_presets() -> None:
    """The published sizes are 20.9 and 116.8 billion parameters, of which 3.6 and 5.1 are active."""
    for name, total, active in (("gpt-oss-20b", 20.91, 4.19), ("gpt-oss-120b", 116.83, 5.71)):
        found, layers = summarize(name), PRESETS[name].num_hidden_layers
        assert found.parameters / 1e9 == pytest.approx(total, abs=0.01)
        assert found.active / 1e9 == pytest.approx(active, abs=0.01)
        assert found.cache == {128: layers // 2 * 2048, None: layers // 2 * 2048}
        assert found.cache_bytes(2, 1000) == layers // 2 * 2048 * 2 * 1128


# Training


@pytest.mark.slow
def test_gradients_reach_every_parameter_and_adapters_change_nothing_at_first() -> None:
    """Sinks and the biases of experts and router included."""
    ours, tokens = build_tiny("gpt_oss", nnxmoe.Strategy()), jnp.asarray(random_tokens(2, 9))
    graph, params, rest = nnx.split(ours, nnx.Param, ...)
    slopes = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p, rest)(tokens).logits))))(params)
    assert not [path for path, slope in variables(slopes) if not np.abs(np.asarray(slope[...])).max() > 1e-6]
    before = ours(tokens).logits
    lora.add(ours, 2, rngs=nnx.Rngs(0))
    assert max_error(ours(tokens).logits, before) == 0


@pytest.mark.slow
def test_training_lowers_the_loss() -> None:
    ours, batch = build_tiny("gpt_oss", nnxmoe.Strategy(stacking=nnxmoe.Scanned())), {"tokens": random_tokens(4, 9)}
    history = train.fit(ours, [batch], optimizer=optax.adam(1e-2), steps=6).history
    assert history[-1]["loss"] < history[0]["loss"] - 0.5


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, not 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: 'chunked_attention' is not supported"),
        ({"sliding_window": None}, "which need a sliding_window: got None"),
        pytest.param({"head_dim": None}, "head_dim must be a positive integer", marks=pytest.mark.wrong_types),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than"),
        ({"experts_per_token": 3}, "num_experts_per_tok 2 and experts_per_token 3 set the same field"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(nnxmoe.ConfigError, match=message):
        config_from_hf(TINY["gpt_oss"] | changes)


def test_config_defaults_are_those_of_the_family() -> None:
    config = config_from_hf({"model_type": "gpt_oss"})
    assert isinstance(config, GptOssConfig) and (config.bos_token_id, config.eos_token_id) == (None, None)
    assert config.rope == PRESETS["gpt-oss-120b"].rope
    assert config.rope.attention_factor == pytest.approx(1.3465735902799727)
    assert config.windows == (128, None) * 18 and config.head_dim == 64
    hub = {"num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4, "initial_context_length": 4096}
    hub |= {"rope_scaling": dict(config.rope_fields), "rope_theta": 150000, "eos_token_id": 200002}
    found = config_from_hf({"model_type": "gpt_oss", "dtype": "bfloat16", "pad_token_id": 199999, **hub})
    assert dataclasses.replace(found, rope_scaling=None, rope_parameters=found.rope_fields) == PRESETS["gpt-oss-20b"]


# MaxText's layout


def in_maxtext(weights: Weights, layers: int) -> dict[str, np.ndarray]:
    """Tensors under the names and in the shapes of MaxText's converters, layers not stacked (convert_gpt_oss_ckpt.py in
    https://github.com/AI-Hypercomputer/maxtext)."""
    dim, width = TINY["gpt_oss"]["hidden_size"], TINY["gpt_oss"]["head_dim"]
    found = {
        "token_embedder/embedding": weights["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": weights["model.norm.weight"],
        "decoder/logits_dense/kernel": weights["lm_head.weight"].T,
    }
    for i in range(layers):
        theirs, ours = f"decoder/layers_{i}/", f"model.layers.{i}."
        attention, mlp = theirs + "GptOssAttention/", theirs + "GptOssMlp/"
        for x, name in (("q", "query"), ("k", "key"), ("v", "value")):
            found[f"{attention}{name}/kernel"] = weights[f"{ours}self_attn.{x}_proj.weight"].T.reshape(dim, -1, width)
            found[f"{attention}{name}/bias"] = weights[f"{ours}self_attn.{x}_proj.bias"].reshape(-1, width)
        found[attention + "out/kernel"] = weights[ours + "self_attn.o_proj.weight"].T.reshape(-1, width, dim)
        found[attention + "out/bias"] = weights[ours + "self_attn.o_proj.bias"]
        found[attention + "sinks"] = weights[ours + "self_attn.sinks"]
        found[theirs + "pre_self_attention_layer_norm/scale"] = weights[ours + "input_layernorm.weight"]
        found[theirs + "post_self_attention_layer_norm/scale"] = weights[ours + "post_attention_layernorm.weight"]
        found[mlp + "gate/kernel"] = weights[ours + "mlp.router.weight"].T
        found[mlp + "gate/bias"] = weights[ours + "mlp.router.bias"]
        for ending in ("", "_bias"):
            both = weights[f"{ours}mlp.experts.gate_up_proj{ending}"]
            found |= {f"{mlp}wi_0{ending}": both[..., ::2], f"{mlp}wi_1{ending}": both[..., 1::2]}
            found[f"{mlp}wo{ending}"] = weights[f"{ours}mlp.experts.down_proj{ending}"]
    return {f"params/{name}": array for name, array in found.items()}


def scanned(arrays: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The same with layers i and i + 2 of a block of two stacked on axis 1."""
    found = {name: array for name, array in arrays.items() if "/layers_" not in name}
    for first in (0, 1):
        for name in [name for name in arrays if f"/layers_{first}/" in name]:
            same = [arrays[name.replace(f"/layers_{first}/", f"/layers_{i}/")] for i in range(first, layers, 2)]
            found[name.replace("/layers_", "/layers/layers_")] = np.stack(same, axis=1)
    return found


@pytest.mark.slow
def test_maxtext_layout(tmp_path: Path) -> None:
    """Both forms there and back bit for bit, in memory and on disk, from either stacking, and as Linen modules."""
    layers, tokens, stacked = 6, random_tokens(2, 9), nnxmoe.Strategy(stacking=nnxmoe.Scanned())
    fields = TINY["gpt_oss"] | {"num_hidden_layers": layers, "layer_types": None}
    weights = tiny_weights(fields)
    ours = build(fields, weights)
    wanted = {False: in_maxtext(weights, layers)}
    wanted[True] = scanned(wanted[False], layers)
    logits = ours(tokens).logits
    for scan, arrays in wanted.items():
        tree = maxtext.to_tree(ours, scan_layers=scan)
        identical(flat(tree), arrays)
        again = maxtext.from_tree(tree, ours.config, stacked)
        identical(flat(maxtext.to_tree(again, scan_layers=not scan)), wanted[not scan])
        maxtext.save(ours, tmp_path / f"{scan}", scan)
        identical(*(flat(maxtext.to_tree(each)) for each in (maxtext.load(tmp_path / f"{scan}"), ours)))
        linen = LinenCausalLM(ours.config, scan_layers=scan)
        assert max_error(jax.jit(linen.apply)(tree, tokens).logits, logits) < MODEL_TOLERANCE
        drawn = jax.eval_shape(lambda linen=linen: linen.init(jax.random.key(0), tokens))
        boxes = flatten_dict(drawn, sep="/")
        assert {n: box.unbox().shape for n, box in boxes.items()} == {n: array.shape for n, array in arrays.items()}
    mlp = "params/decoder/layers/layers_1/GptOssMlp/"
    assert boxes[mlp + "wi_0_bias"].names == ("exp", "layers", "activation_mlp")
    assert boxes[mlp + "gate/bias"].names == (None, "layers")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "gpt_oss repeats blocks of local, global layers, but this model's layers are global, local, or",
        ),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, "layers are global, global, or"),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            "blocks of 2 layers, but this model has 3 layers: save .*=False",
        ),
    ],
)
def test_layers_that_maxtext_does_not_have_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(nnxmoe.CheckpointError, match=message):
        maxtext.to_tree(build_tiny("gpt_oss", nnxmoe.Strategy(), **changes))


# Meshes


def on_mesh(dispatch: Any, sizes: dict[str, int], keep: bool) -> tuple[float, list[str]]:
    """Largest error of logits and next tokens of a case on eight devices, loaded shard by shard; and its shardings."""
    rules = {**nnxmoe.RULES, "vocab": None}  # of 53, which does not divide
    strategy = nnxmoe.Strategy(dispatch=dispatch, mesh=nnxmoe.make_mesh(**sizes), rules=rules)
    plain = nnxmoe.Strategy(dispatch=nnxmoe.Dense())
    folder, tokens = CASES / "mxfp4" / "model", np.tile(random_tokens(2, 9), (4, 1))
    ours, wanted = (
        nnxmoe.from_pretrained(folder, dtype="float32", strategy=s, keep_quantized=k)
        for s, k in ((strategy, keep), (plain, False))
    )
    one, other = (np.asarray(m(tokens).logits) for m in (ours, wanted))
    if keep:
        one_by_one = (nnxmoe.generate(m, tokens, max_new_tokens=3) for m in (ours, wanted))
        np.testing.assert_array_equal(*one_by_one)
    split = [path for path, v in variables(ours) if not v[...].sharding.is_fully_replicated]
    return float(np.abs(one - other).max()), split


WAYS = {
    "ragged": nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll()),
    "ring": nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RingOfExperts()),
    "sorted": nnxmoe.Sorted(),
    "dense": nnxmoe.Dense(),
    "capacity": nnxmoe.Capacity(8.0),
}
MESHES = {"expert2 tensor2 fsdp2": {"expert": 2, "tensor": 2, "fsdp": 2}, "expert4 data2": {"expert": 4, "data": 2}}


CELLS = [(way, mesh, keep) for way in WAYS for mesh in MESHES for keep in (False, True)]


@pytest.mark.parametrize(
    ("way", "mesh", "keep"),
    [
        pytest.param(*cell, marks=[] if cell == ("ragged", "expert2 tensor2 fsdp2", False) else pytest.mark.slow)
        for cell in CELLS
        if cell[1:] != ("expert2 tensor2 fsdp2", True)  # blocks of 32 inputs cannot be split
    ],
)
def test_meshes_give_the_logits_of_one_device(eight: Callable[..., Any], way: str, mesh: str, keep: bool) -> None:
    error, split = eight(on_mesh, WAYS[way], MESHES[mesh], keep)
    assert error < PART_TOLERANCE
    named = ("experts.biases.gate", "experts.biases.down", *(["attention.sinks.scores"] if "tensor" in mesh else []))
    assert all(any(path.endswith(name) for path in split) for name in named)
