"""Checkpoints with quantised weights: read to the bit as floats and as codes, saved, and refused where malformed."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.model.quantization.quantized_kernels import quantized_kernels
from nnxmoe.models import model_class
from tests.support import gpt_oss, quantised
from tests.support.arrays import identical, max_error
from tests.support.families import fused as fuse
from tests.support.families import load, weights_of
from tests.support.published import PUBLISHED
from tests.support.quantised import FIELDS, FOLDER, FORMATS, MODULE, is_linear, read_tensors, write_quantised
from tests.support.running import MODEL_TOLERANCE, variables
from tests.support.tiny import Fields, Weights, random_tokens, tiny_weights, write_checkpoint

KINDS = tuple(FIELDS)
Q = "model.layers.1.self_attn.q_proj"
SCANNED = nnxmoe.Strategy(stacking=nnxmoe.Scanned())


def arrays(model: nnxmoe.CausalLM) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable[...]) for path, variable in variables(model)}


def family(name: str) -> str:
    """One of the families for each format, so that all formats together cover all of them."""
    return KINDS[sorted(FORMATS).index(name) % len(KINDS)]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_read_to_the_bit(tmp_path: Path, name: str) -> None:
    """As floats, and as codes that are dequantised afterwards."""
    form, kind = FORMATS[name], family(name)
    codes, floats = write_quantised(tmp_path, kind, form)
    wanted = arrays(nnxmoe.from_pretrained(floats))
    read = nnxmoe.from_pretrained(codes, dtype="float32")
    identical(arrays(read), wanted)
    assert not read.load_report.unexpected and any(cast.startswith(form.kept) for cast in read.load_report.casts)
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert set(kept.load_report.weights) == {form.kept, "float32"}
    assert set(kept.load_report.loaded) | {n for names in kept.load_report.skipped.values() for n in names} == set(
        read_tensors(codes)
    )
    identical(arrays(nnxmoe.dequantize(kept)), wanted)
    assert summarize(codes, dtype="float32", keep_quantized=True).weights == dict(kept.load_report.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack-4-16-zero", "deepseek-24x40-float32", "awq-16", "gptq-4-16-v1-act", "nf4"])
def test_a_quantised_head_is_read_and_kept(tmp_path: Path, name: str) -> None:
    codes, floats = write_quantised(
        tmp_path,
        family(name),
        FORMATS[name],
        chosen=lambda name: is_linear(name) or name == "lm_head.weight",
        more={"vocab_size": 56},
    )
    wanted, tokens = nnxmoe.from_pretrained(floats), random_tokens(2, 7, 48)
    identical(arrays(nnxmoe.from_pretrained(codes, dtype="float32")), arrays(wanted))
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert any(place.head for place in quantized_kernels(kept))
    assert max_error(kept(tokens).logits, wanted(tokens).logits) < MODEL_TOLERANCE


def test_fp8_blocks_of_minimax_are_read_to_the_bit(tmp_path: Path) -> None:
    """The older name of the format, with the router, its bias and the head as floats."""
    case, form = load("minimax_m2"), FORMATS["deepseek-24x40-float32"]
    chosen = r"_proj\.weight$|\.w[123]\.weight$"
    stored, plain = form.checkpoint(case.weights, lambda name: re.search(chosen, name) is not None)
    kept = {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    config = {"quantization_config": {**form.config, **kept, "fmt": "float8_e4m3fn"}}
    codes = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "codes", case.fields | config, stored), dtype="float32")
    floats = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "floats", case.fields, plain))
    identical(arrays(codes), arrays(floats))
    assert not codes.load_report.unexpected


STRUCTURES = [
    "deepseek-24x40-float32",
    "autofp8-static",
    "float-quantized-channel",
    "int-quantized",
    "pack-4-16",
    "pack-8-32-zero",
    "awq-16",
    "gptq-8-32-v1-act",
    "nf4-nested",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_kept_codes_give_the_logits_of_the_floats(tmp_path: Path, name: str) -> None:
    """Prefill with padding, and a step with a cache; one family scanned."""
    kind = KINDS[STRUCTURES.index(name) % len(KINDS)]
    codes, floats = write_quantised(tmp_path, kind, FORMATS[name])
    tokens, mask = random_tokens(2, 7, 48), np.ones((2, 7), np.int32)
    mask[0, :3] = 0
    strategy = SCANNED if kind == "mixtral" else nnxmoe.Strategy()
    found, wanted = (
        _prefill_and_step(nnxmoe.from_pretrained(folder, dtype="float32", strategy=strategy, **options), tokens, mask)
        for folder, options in ((codes, {"keep_quantized": True}), (floats, {}))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        where = np.broadcast_to(mask[..., None] > 0, ours.shape) if ours.shape[1] > 1 else None
        assert max_error(ours, theirs, where) < MODEL_TOLERANCE


def _prefill_and_step(model: nnxmoe.CausalLM, tokens: np.ndarray, mask: np.ndarray) -> tuple[Any, Any]:
    first = model(tokens, attention_mask=mask, cache=model.empty_cache(2, 12))
    return first.logits, model(tokens[:, :1], cache=first.cache).logits


@pytest.mark.parametrize("name", ["deepseek-24x40-float32", "pack-4-16-zero", "awq-16", "gptq-8-32-v1-act", "nf4"])
def test_any_box_of_a_weight_can_be_read(tmp_path: Path, name: str) -> None:
    """As the processes of a mesh read their shards: rows and columns within and across tiles."""
    codes, floats = write_quantised(tmp_path, "llama", FORMATS[name])
    whole = read_tensors(floats)[f"{Q}.weight"]
    with Checkpoint.open(codes) as checkpoint:
        array = tensor_arrays(checkpoint.tensors, checkpoint.config, "config.json", checkpoint)[f"{Q}.weight"]
        rng = np.random.default_rng(0)
        for _ in range(30):
            (top, bottom), (left, right) = (np.sort(rng.choice(65, 2, replace=False)).tolist() for _ in range(2))
            box = slice(top, bottom), slice(left, right)
            np.testing.assert_array_equal(array.read_box(box, np.empty), whole[box])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("pack-4-16", "pack-4-16-zero", "int-quantized-zero", "awq-16", "gptq-4-16-v2", "autofp8-dynamic"),
        *("mxfp4-pack", "mxfp8", "modelopt-fp8-channel"),
    ],
)
def test_saving_writes_the_same_bits(tmp_path: Path, name: str) -> None:
    """In compressed-tensors' formats, and in our own with scanned layers."""
    codes, _ = write_quantised(tmp_path, family(name), FORMATS[name])
    model = nnxmoe.from_pretrained(codes, keep_quantized=True)
    nnxmoe.save_pretrained(model, tmp_path / "again")
    again = nnxmoe.from_pretrained(tmp_path / "again", keep_quantized=True)
    identical(arrays(again), arrays(model))
    fields = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert fields["quant_method"] == "compressed-tensors" and not again.load_report.unexpected
    scanned = nnxmoe.from_pretrained(codes, keep_quantized=True, strategy=SCANNED)
    nnxmoe.save(scanned, tmp_path / "native")
    identical(arrays(nnxmoe.load(tmp_path / "native")), arrays(model))
    identical(arrays(nnxmoe.load(tmp_path / "native", strategy=SCANNED)), arrays(scanned))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("gptq-4-16-v1-act", "act order"), ("nf4", "NF4"), ("nvfp4-pack", "FP4")])
def test_what_compressed_tensors_cannot_store_is_refused(tmp_path: Path, name: str, what: str) -> None:
    codes, _ = write_quantised(tmp_path, "llama", FORMATS[name])
    model = nnxmoe.from_pretrained(codes, keep_quantized=True)
    with pytest.raises(ValueError, match=rf"_proj has .*{what}.*nnxmoe.dequantize"):
        nnxmoe.save_pretrained(model, tmp_path / "again")
    nnxmoe.save(model, tmp_path / "native")
    identical(arrays(nnxmoe.load(tmp_path / "native")), arrays(model))


@pytest.mark.parametrize("experts", ["pack-4-16", "nvfp4-pack"])
def test_mixed_precision(tmp_path: Path, experts: str) -> None:
    """FP8 attention beside int4 experts, as in Kimi-K2, or beside NVFP4, read, and written with two groups if the
    format has them."""
    fp8, int4 = FORMATS["float-quantized-channel"], FORMATS[experts]
    fields, weights = FIELDS["mixtral"], tiny_weights(FIELDS["mixtral"])
    stored, plain = int4.checkpoint(weights, lambda name: ".experts." in name)
    stored, plain = (
        fp8.checkpoint(stored, lambda name: "_proj" in name)[0],
        fp8.checkpoint(plain, lambda n: "_proj" in n)[1],
    )
    groups = [
        {**form.config["config_groups"]["group_0"], "targets": [target], "format": form.config["format"]}
        for form, target in ((fp8, "re:.*self_attn.*"), (int4, "re:.*block_sparse_moe.experts.*"))
    ]
    config = dict(fp8.config) | {"format": "mixed-precision", "config_groups": {"a": groups[0], "b": groups[1]}}
    codes = write_checkpoint(tmp_path / "codes", {**fields, "quantization_config": config}, stored)
    floats = write_checkpoint(tmp_path / "floats", fields, plain)
    wanted = arrays(nnxmoe.from_pretrained(floats))
    model = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert set(model.load_report.weights) == {"fp8", int4.kept, "float32"}
    identical(arrays(nnxmoe.dequantize(model)), wanted)
    if experts == "nvfp4-pack":
        return
    nnxmoe.save_pretrained(model, tmp_path / "again")
    identical(arrays(nnxmoe.from_pretrained(tmp_path / "again", keep_quantized=True)), arrays(model))


def fuse_experts(tensors: dict[str, np.ndarray], weights: bool) -> dict[str, np.ndarray]:
    """FP8 as transformers saves it: the scales of all experts in one tensor, in older versions the weights as well,
    or one scale for the gate and the up kernel of an expert."""
    roles = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
    roles |= {"gate_proj": roles["w1"], "up_proj": roles["w3"], "down_proj": roles["w2"]}
    found, parts = dict(tensors), dict[str, dict[tuple[int, int], np.ndarray]]()
    for name in tensors:
        match = re.fullmatch(r"(.*)\.experts\.([0-9]+)\.(\w+)\.weight(_scale_inv)?", name)
        if match is not None and (weights or match[4]):
            block = match[1].replace("block_sparse_moe", "mlp" if weights else "block_sparse_moe")
            fused, row = roles[match[3]]
            parts.setdefault(f"{block}.experts.{fused}{match[4] or ''}", {})[int(match[2]), row] = found.pop(name)
    for name, cells in parts.items():
        rows = [[cells[e, row] for row in range(2 if "gate_up" in name else 1)] for e in range(max(cells)[0] + 1)]
        if name.endswith("_scale_inv") and cells[0, 0].ndim == 0:
            rows = [[value.reshape(1, 1) for value in each[:1]] for each in rows]
        found[name] = np.stack([np.concatenate(each) for each in rows])
    return found


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("kind", "form"),
    [("mixtral", "deepseek-16x32-float32"), ("deepseek_v3", "deepseek-16x32-float32"), ("mixtral", "fp8-tensor")],
)
def test_fused_scales_of_fp8_experts(tmp_path: Path, kind: str, form: str, weights: bool) -> None:
    """As transformers saves them, with blocks and with one scale for gate and up."""
    fields, source = FIELDS[kind], tiny_weights(FIELDS[kind])
    if form == "fp8-tensor":  # equal largest values, so that gate and up have the same scale
        for name in source:
            if ".experts." in name:
                source[name].flat[0] = 3.0
    made = FORMATS[form]
    stored, plain = made.checkpoint(source, is_linear)
    stored = fuse_experts(stored, weights)
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in stored)
    codes = write_checkpoint(tmp_path / "codes", {**fields, "quantization_config": dict(made.config)}, stored)
    wanted = arrays(nnxmoe.from_pretrained(write_checkpoint(tmp_path / "floats", fields, plain)))
    read = nnxmoe.from_pretrained(codes, dtype="float32")
    identical(arrays(read), wanted)
    assert not read.load_report.unexpected
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert set(kept.load_report.weights) == {"fp8", "float32"}
    identical(arrays(nnxmoe.dequantize(kept)), wanted)
    name = next(name for name in stored if name.endswith("gate_up_proj_scale_inv"))
    cut = write_checkpoint(
        tmp_path / "cut", {**fields, "quantization_config": dict(made.config)}, stored | {name: stored[name][1:]}
    )
    with pytest.raises(ValueError, match=r"scales must be|scale_inv is missing|weight_scale is missing"):
        nnxmoe.from_pretrained(cut)


def split_experts(weights: Mapping[str, np.ndarray], alternate: bool) -> dict[str, np.ndarray]:
    """Tensors of all experts of a layer as tensors of each expert, as tools write them that quantise linear layers.
    ``alternate``: gpt-oss, whose gate and up outputs alternate, and whose tensors have inputs before outputs."""
    found = {}
    for name, tensor in weights.items():
        head, _, tail = name.partition(".experts.")
        kind, ending = ("bias" if tail.endswith("_bias") else "weight"), tail.removesuffix("_bias")
        for e, each in enumerate(tensor if tail else ()):
            rows = each.T if alternate else each
            parts = (rows[::2], rows[1::2]) if alternate else np.split(rows, 2)
            pairs = zip(("gate_proj", "up_proj"), parts, strict=True) if "gate_up" in tail else [(ending, rows)]
            found |= {f"{head}.experts.{e}.{part}.{kind}": np.ascontiguousarray(x) for part, x in pairs}
        if not tail:
            found[name] = tensor
    return found


SPLIT = [("gemma4_text", "int-quantized"), ("deepseek_v4", "int-quantized"), ("gpt_oss", "auto-round-gptq-4-16-v1")]


@pytest.mark.parametrize(("kind", "form"), SPLIT)
def test_quantised_experts_in_tensors_of_their_own(tmp_path: Path, kind: str, form: str) -> None:
    """Of families that transformers, and most float files, give one tensor for all experts of a layer."""
    fields, published = gpt_oss.FIELDS["square"], gpt_oss.weights_of("square")
    if kind != "gpt_oss":
        fields, published = load(kind).fields, load(kind).weights
    weights = fuse(published) if kind == "deepseek_v4" else published
    floats = {name: np.asarray(x, x.dtype if x.dtype.kind == "i" else np.float32) for name, x in weights.items()}
    split, made = split_experts(floats, kind == "gpt_oss"), FORMATS[form]
    together = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "together", fields, weights), dtype="float32")
    one_by_one = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "floats", fields, split), dtype="float32")
    identical(arrays(one_by_one), arrays(together))
    stored, plain = made.checkpoint(split, lambda name: ".experts." in name and name.endswith("weight"))
    more = {"quantization_config": dict(made.config)}
    codes = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "codes", fields | more, stored), dtype="float32")
    wanted = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "plain", fields, plain), dtype="float32")
    identical(arrays(codes), arrays(wanted))
    assert not codes.load_report.unexpected
    nnxmoe.save_pretrained(wanted, tmp_path / "saved")
    assert read_tensors(tmp_path / "saved").keys() == published.keys()


def qwen38() -> tuple[Fields, Weights]:
    """A tiny Qwen3.8-2.4T-A95B with its prediction layer: config.json, and bfloat16 tensors with experts one by one."""
    fields = PUBLISHED["qwen3.8-2.4t-a95b"] | {"hidden_size": 32, "num_hidden_layers": 4, "head_dim": 16}
    fields |= {"layer_types": fields["layer_types"][:4], "vocab_size": 48, "eos_token_id": 2, "bos_token_id": 1}
    fields |= {"num_attention_heads": 16, "num_key_value_heads": 1, "num_experts": 24, "moe_intermediate_size": 16}
    fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 16, "linear_key_head_dim": 4}
    fields |= {"linear_value_head_dim": 4, "shared_expert_intermediate_size": 12}
    config = nnxmoe.config_from_hf(fields)
    model = model_class(config)(config, nnxmoe.Strategy(), rngs=None, mtp=True)  # type: ignore[call-arg]
    weights = weights_of({name: leaf.shape for name, leaf in tensor_layout(model).items()})
    return fields, {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}


def write_shards(folder: Path, fields: Fields, weights: Mapping[str, np.ndarray]) -> Path:
    """A checkpoint whose tensors are divided over three files with an index."""
    files = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(sorted(weights))}
    folder.mkdir()
    for file in {*files.values()}:
        save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("mtp", [False, True])
def test_both_layouts_of_qwen38(tmp_path: Path, mtp: bool) -> None:
    """Grouped experts in bfloat16, and one by one in FP8 blocks with bfloat16 scales, in shards: the same model within
    the rounding of FP8. Experts are saved one by one, as transformers saves them, and codes in compressed-tensors."""
    fields, weights = qwen38()
    form = quantised.deepseek((16, 8), ml_dtypes.bfloat16)
    stored, plain = form.checkpoint(weights, lambda name: ".experts." in name)
    assert "mtp.layers.0.mlp.experts.23.down_proj.weight_scale_inv" in stored
    scheme = {k: v for k, v in form.config.items() if k != "fmt"} | {
        "weight_per_tensor": False,
        "act_per_tensor": False,
    }
    scheme["modules_to_not_convert"] = [n.removesuffix(".weight") for n in stored if ".experts." not in n]
    grouped = nnxmoe.from_pretrained(write_shards(tmp_path / "grouped", fields, fuse(weights)), mtp=mtp)
    codes = write_shards(tmp_path / "codes", fields | {"quantization_config": scheme}, stored)
    floats = nnxmoe.from_pretrained(codes, dtype="float32", mtp=mtp)
    kept = nnxmoe.from_pretrained(codes, keep_quantized=True, mtp=mtp)
    twin = nnxmoe.from_pretrained(write_shards(tmp_path / "twin", fields, plain), dtype="float32", mtp=mtp)
    identical(arrays(floats), arrays(twin))
    wanted = arrays(grouped)
    for path, array in arrays(floats).items():
        error = np.abs(array - wanted[path].astype(np.float32)).max()
        assert error <= (2**-4 * np.abs(array).max() if ".experts." in path else 0), path
    assert not grouped.load_report.unexpected and not kept.load_report.unexpected
    for model, names in ((grouped, weights), (kept, stored)):
        folder = tmp_path / ("saved codes" if model is kept else "saved floats")
        nnxmoe.save_pretrained(model, folder)
        files = {name: array for name, array in names.items() if mtp or not name.startswith("mtp.")}
        for name in [name for name in files if name.endswith("_scale_inv")]:
            files[name.removesuffix("_inv")] = files.pop(name).astype(np.float32)
        identical(read_tensors(folder), files)
    identical(arrays(nnxmoe.from_pretrained(tmp_path / "saved codes", dtype="float32", mtp=mtp)), arrays(floats))


@pytest.mark.parametrize("form", [None, "nf4"])
def test_gpt_oss_as_unsloth_quantises_it(tmp_path: Path, form: str | None) -> None:
    """A linear layer per expert, whose outputs are gates and ups in turn, and another name for the router."""
    fields = gpt_oss.FIELDS["square"] | {"hidden_size": 64, "intermediate_size": 64}
    weights, stored = tiny_weights(fields), {}
    for name, tensor in weights.items():
        head, _, kind = name.partition(".experts.")
        ending = "bias" if kind.endswith("_bias") else "weight"
        for e, each in enumerate(tensor if kind else ()):
            stored[f"{head}.experts.{kind.removesuffix('_bias')}s.{e}.{ending}"] = np.ascontiguousarray(each.T)
        if not kind:
            stored[name.replace("router.", "router.linear.")] = tensor
    plain, more = stored, {}
    if form is not None:
        stored, plain = FORMATS[form].checkpoint(stored, lambda name: "projs." in name and name.endswith("weight"))
        more = {"quantization_config": dict(FORMATS[form].config)}
    codes = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "codes", fields | more, stored), dtype="float32")
    wanted = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "plain", fields, plain), dtype="float32")
    identical(arrays(codes), arrays(wanted))
    assert not codes.load_report.unexpected
    if form is None:
        identical(arrays(codes), arrays(nnxmoe.from_pretrained(write_checkpoint(tmp_path / "hub", fields, weights))))
    nnxmoe.save_pretrained(wanted, tmp_path / "saved")
    assert read_tensors(tmp_path / "saved").keys() == weights.keys()


@pytest.mark.parametrize(("index", "method"), [(True, "gptq"), (False, "gptq"), (False, "auto-round")])
def test_settings_per_module_of_gptq(tmp_path: Path, index: bool, method: str) -> None:
    """Modules of other bits and group sizes, and some that stay floats, as GPTQModel's ``dynamic`` makes them and
    AutoRound's ``extra_config``."""
    fields, stored = FIELDS["llama"], tiny_weights(FIELDS["llama"])
    plain = stored
    for name, part in (("gptq-4-16-v1", "gate_proj"), ("gptq-8-32-v1-act", "up_proj"), ("gptq-8-48-v1", "down_proj")):
        form = FORMATS.get(name) or quantised.gptq(8, 48, version=1, act_order=False)
        if not index and "act" in name:
            form = quantised.gptq(8, 32, version=1, act_order=False)
        stored = form.checkpoint(stored, lambda name, part=part: part in name)[0]
        plain = form.checkpoint(plain, lambda name, part=part: part in name)[1]
    dynamic = {"-:.*self_attn": {}, r"+:.*up_proj": {"bits": 8, "group_size": 32}, r".*down_proj": {"group_size": 48}}
    config = {"quant_method": method, "bits": 4, "group_size": 16, "dynamic": dynamic}
    if method == "auto-round":  # some files name modules, some patterns; transformers assumes this packing
        config["extra_config"] = {r".*up_proj": {"bits": 8, "group_size": 32}, "lm_head": {"bits": 16}} | dynamic
        del config["dynamic"]
    stored = {name: value for name, value in stored.items() if index or not name.endswith("g_idx")}
    codes = write_checkpoint(tmp_path / "codes", {**fields, "quantization_config": config}, stored)
    wanted = arrays(nnxmoe.from_pretrained(write_checkpoint(tmp_path / "floats", fields, plain)))
    identical(arrays(nnxmoe.from_pretrained(codes, dtype="float32")), wanted)
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert set(kept.load_report.weights) == {"int4", "int8", "float32"}
    identical(arrays(nnxmoe.dequantize(kept)), wanted)


@pytest.mark.parametrize("storage", [np.uint8, np.int8, np.float16, np.float32])
def test_nf4_blocks_cross_odd_rows(tmp_path: Path, storage: Any) -> None:
    """Bytes that hold codes of two rows, in every dtype of bnb_4bit_quant_storage."""
    form = quantised.nf4(nested=False, block=64, storage=storage)
    codes, floats = write_quantised(tmp_path, "llama", form, more={"intermediate_size": 33})
    wanted = arrays(nnxmoe.from_pretrained(floats))
    identical(arrays(nnxmoe.from_pretrained(codes, dtype="float32")), wanted)
    kept = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    assert "nf4" in kept.load_report.weights
    identical(arrays(nnxmoe.dequantize(kept)), wanted)


ROTATIONS = {
    "location 'input'": {"config_groups": {"v": {"apply": [{"location": "weight_input"}, {"location": "input"}]}}},
    "location 'k_cache', 'q_attn'": {
        "config_groups": {"a": {"apply": [{"location": "q_attn"}]}, "b": {"apply": [{"location": "k_cache"}]}}
    },
    "must have config_groups": {"config_groups": {"a": {"apply": [{"where": "input"}]}}},
}


def test_rotations_at_run_time_are_refused_and_fused_ones_load(tmp_path: Path) -> None:
    fused = {"config_groups": {"R1": {"apply": [{"location": "weight_output"}, {"location": "weight_input"}]}}}
    form = FORMATS["pack-4-16"]
    for i, transform in enumerate(({}, None, fused, {"config_groups": {}})):
        one = dataclasses.replace(form, config={**form.config, "transform_config": transform})
        nnxmoe.from_pretrained(write_quantised(tmp_path / str(i), "llama", one)[0])
    for i, (reason, transform) in enumerate(ROTATIONS.items()):
        one = dataclasses.replace(form, config={**form.config, "transform_config": transform})
        with pytest.raises(ValueError, match=rf"config\.json: quantization_config: transform_config .*{reason}"):
            nnxmoe.from_pretrained(write_quantised(tmp_path / f"r{i}", "llama", one)[0])


@pytest.mark.parametrize("name", ["pack-4-16", "gptq-4-16-v1", "nf4", "autofp8-static", "int-quantized"])
def test_tensors_beside_a_quantised_weight_are_refused(tmp_path: Path, name: str) -> None:
    """Biases that the config does not ask for, which AutoGPTQ writes, and scales of activations are reported only."""
    folder, _ = write_quantised(tmp_path, "llama", FORMATS[name], more={"attention_bias": False})
    found = {each: value for each, value in read_tensors(folder).items() if "self_attn.q_proj.bias" not in each}
    fields = json.loads((folder / "config.json").read_text())
    harmless = {f"{Q}.bias": np.zeros(64, np.float32), f"{Q}.output_zero_point": np.zeros(1, np.float32)}
    assert nnxmoe.from_pretrained(write_checkpoint(tmp_path / "a", fields, found | harmless)).load_report.unexpected
    for i, ending in enumerate(("v_input.weight", "smooth", "weight_global_scale")):
        odd = found | {f"{Q}.{ending}": np.ones((64, 64), np.float32)}
        folder = write_checkpoint(tmp_path / str(i), fields, odd)
        for keep in (False, True):
            with pytest.raises(ValueError, match=rf"{Q}\.{ending} belongs to the quantized {Q}, but is not"):
                nnxmoe.from_pretrained(folder, keep_quantized=keep)


def test_layers_that_stay_floats(tmp_path: Path) -> None:
    """Some layers quantised: read unrolled; scanned, one array would hold both."""
    fields, weights = FIELDS["llama"], tiny_weights(FIELDS["llama"])
    form = FORMATS["pack-4-16"]
    stored, plain = form.checkpoint(weights, lambda name: is_linear(name) and ".layers.1." in name)
    codes = write_checkpoint(tmp_path / "codes", {**fields, "quantization_config": dict(form.config)}, stored)
    model = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    identical(
        arrays(nnxmoe.dequantize(model)),
        arrays(nnxmoe.from_pretrained(write_checkpoint(tmp_path / "f", fields, plain))),
    )
    with pytest.raises(ValueError, match=r"stored in different formats.*keep_quantized.*Unrolled"):
        nnxmoe.from_pretrained(codes, keep_quantized=True, strategy=SCANNED)
    nnxmoe.save_pretrained(model, tmp_path / "again")
    identical(arrays(nnxmoe.from_pretrained(tmp_path / "again", keep_quantized=True)), arrays(model))


def test_old_gptq_checkpoints_have_their_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    form = FORMATS["gptq-4-16-v1"]
    codes, floats = write_quantised(tmp_path, "llama", form)
    fields = json.loads((codes / "config.json").read_text())
    settings = fields.pop("quantization_config")
    (codes / "config.json").write_text(json.dumps(fields))
    del settings["quant_method"]
    (codes / "quantize_config.json").write_text(json.dumps(settings))
    identical(arrays(nnxmoe.from_pretrained(codes, dtype="float32")), arrays(nnxmoe.from_pretrained(floats)))


# Malformed checkpoints

Edit = Callable[[dict[str, np.ndarray], dict[str, Any]], None]


def without(ending: str) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        del tensors[f"{Q}.{ending}"]

    return edit


def with_value(ending: str, value: Any) -> Edit:
    """The first number of a tensor."""

    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensor = tensors[f"{Q}.{ending}"] = tensors[f"{Q}.{ending}"].copy()
        tensor.reshape(-1)[:1] = np.asarray(value).astype(tensor.dtype)

    return edit


def cut(ending: str, axis: int = -1) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensor = tensors[f"{Q}.{ending}"]
        tensors[f"{Q}.{ending}"] = np.ascontiguousarray(np.delete(tensor, -1, axis))

    return edit


def as_dtype(ending: str, dtype: Any) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors[f"{Q}.{ending}"] = tensors[f"{Q}.{ending}"].astype(dtype)

    return edit


def adding(ending: str, value: np.ndarray) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        tensors[f"{Q}.{ending}"] = value

    return edit


def field(name: str, value: Any) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config[name] = value

    return edit


def both(*edits: Edit) -> Edit:
    return lambda tensors, config: [edit(tensors, config) for edit in edits] and None


def removed(*names: str) -> Edit:
    return lambda tensors, config: [config.pop(name) for name in names] and None


def weights(name: str, value: Any, *absent: str) -> Edit:
    """A field of the first group's weights; ``absent``: fields to remove."""

    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        fields = config["config_groups"]["group_0"]["weights"]
        fields[name] = value
        for other in absent:
            del fields[other]

    return edit


def group(name: str, value: Any) -> Edit:
    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"][name] = value

    return edit


def state(**changes: Any) -> Edit:
    """Fields of the description of an NF4 weight."""

    def edit(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
        fields = json.loads(tensors[name].tobytes()) | changes
        tensors[name] = np.frombuffer(json.dumps(fields).encode(), np.uint8).copy()

    return edit


NVFP4, OPT, ROUND = "nvfp4-pack", "modelopt-nvfp4", "auto-round-gptq-4-16-v1"
DEEPSEEK, PACK, ASYMMETRIC, AWQ, GPTQ, ACT = (
    *("deepseek-16x32-float32", "pack-4-16", "pack-4-16-zero", "awq-16", "gptq-4-16-v1", "gptq-4-16-v1-act"),
)
MALFORMED: list[tuple[str, str, Edit, str]] = [
    ("fp8 scales missing", DEEPSEEK, without("weight_scale_inv"), r"q_proj\.weight_scale_inv is missing"),
    ("fp8 scale NaN", DEEPSEEK, with_value("weight_scale_inv", np.nan), r"scale_inv in .* has a scale of nan"),
    ("fp8 scale zero", DEEPSEEK, with_value("weight_scale_inv", 0), r"has a scale of 0\.0 at tile \[0, 0\]"),
    ("fp8 scale negative", DEEPSEEK, with_value("weight_scale_inv", -1), "has a scale of -1"),
    ("fp8 scale infinite", DEEPSEEK, with_value("weight_scale_inv", np.inf), "has a scale of inf"),
    ("fp8 scale grid", DEEPSEEK, cut("weight_scale_inv"), r"has shape \[4, 1\]: its scales must be \[4, 2\]"),
    ("fp8 scale dtype", DEEPSEEK, as_dtype("weight_scale_inv", np.int32), "is I32: it must be F32"),
    ("fp8 e8m0 as bytes without scale_fmt", DEEPSEEK, as_dtype("weight_scale_inv", np.uint8), "is U8: it must be"),
    (
        "fp8 three dimensions",
        DEEPSEEK,
        adding("weight", np.zeros((1, 64, 64), quantised.ml_dtypes.float8_e4m3fn)),
        "two",
    ),
    ("fp8 block not a pair", DEEPSEEK, field("weight_block_size", [16]), "two positive integers"),
    ("fp8 block null", DEEPSEEK, field("weight_block_size", None), r"has shape \[4, 2\]"),
    ("fp8 block zero", DEEPSEEK, field("weight_block_size", [0, 32]), "two positive integers"),
    ("fp8 fmt", DEEPSEEK, field("fmt", "e5m2"), "fmt 'e5m2' is not supported"),
    ("fp8 without method", DEEPSEEK, field("quant_method", None), "lacks quant_method"),
    ("a method that is a list", DEEPSEEK, field("quant_method", ["fp8"]), "method .* is not supported"),
    ("unknown method", DEEPSEEK, field("quant_method", "hqq"), "method 'hqq' is not supported"),
    ("another method", DEEPSEEK, field("quant_method", "awq"), "is FP8, but config.json has quant_method 'awq'"),
    ("both scales", DEEPSEEK, adding("weight_scale", np.ones(1, np.float32)), "both weight_scale_inv and weight_scale"),
    ("scalar missing", "autofp8-static", without("weight_scale"), "weight_scale is missing"),
    ("scalar shape", "autofp8-static", adding("weight_scale", np.ones(2, np.float32)), r"has shape \[2\]"),
    ("scalar zero", "autofp8-static", with_value("weight_scale", 0), "has a scale of 0"),
    ("channel scales cut", "float-quantized-channel", cut("weight_scale", 0), r"must be \[64, 1\]"),
    ("int8 scales missing", "int-quantized", without("weight_scale"), "weight_scale is missing"),
    ("int8 scale dtype", "int-quantized", as_dtype("weight_scale", np.float64), "is F64: it must be"),
    (
        "wide zero points",
        "int-quantized-zero",
        adding("weight_zero_point", np.full((64, 1), 200, np.int32)),
        "from -128 to 127",
    ),
    (
        "zero points of fp8",
        "float-quantized-channel",
        adding("weight_zero_point", np.zeros((64, 1), np.int8)),
        "no zero",
    ),
    ("words cut", PACK, cut("weight_packed"), "needs .*words"),
    ("rows of words cut", PACK, cut("weight_packed", 0), "needs .*words"),
    ("words of another dtype", PACK, as_dtype("weight_packed", np.uint8), "FP4 requires type 'float' and groups of 16"),
    ("scales of packed missing", PACK, without("weight_scale"), "weight_scale is missing"),
    ("shape missing", PACK, without("weight_shape"), "weight_shape is missing"),
    ("shape wrong", PACK, with_value("weight_shape", 63), "weight_shape"),
    ("shape of three", PACK, adding("weight_shape", np.array([64, 64, 1])), "weight_shape .*must be"),
    (
        "stored twice",
        PACK,
        adding("weight", np.zeros((64, 64), np.float32)),
        "stored twice, as weight_packed and as weight",
    ),
    (
        "two formats",
        PACK,
        adding("qweight", np.zeros((64, 8), np.int32)),
        "stored twice, as weight_packed and as qweight",
    ),
    ("groups that do not divide", PACK, weights("group_size", 24), "groups of 24 do not divide the 64 inputs"),
    ("another group size", PACK, weights("group_size", 32), r"has shape \[64, 4\]: its scales must be \[64, 2\]"),
    ("group size zero", PACK, weights("group_size", 0), "positive|must be"),
    ("five bits", PACK, weights("num_bits", 5), "num_bits 5 is not supported"),
    ("eight bits in words of four", PACK, weights("num_bits", 8), "with 8 bits, weight_shape"),
    ("another type", PACK, weights("type", "flt"), "type 'flt' is not supported; supported: int, float"),
    ("scales of another default strategy", PACK, weights("strategy", None, "group_size"), r"its scales must be \[1\]"),
    ("strategy", PACK, weights("strategy", "tensor_group"), "strategy 'tensor_group' is supported for type 'float'"),
    ("no group names it", PACK, group("targets", ["re:.*mlp.*"]), "no group in config_groups targets it"),
    ("a target that is no expression", PACK, group("targets", ["re:("]), "is not a valid regular expression"),
    ("targets no list", PACK, group("targets", "Linear"), "must be a list of strings"),
    ("a group without weights", PACK, group("weights", None), "no group in config_groups targets it"),
    ("weights no object", PACK, group("weights", [4]), "requires an object 'weights'"),
    ("asymmetric without zero points", ASYMMETRIC, without("weight_zero_point"), "weight_zero_point is missing"),
    ("mxfp6", PACK, field("format", "mxfp6-pack-quantized"), "format 'mxfp6-pack-quantized' is not supported"),
    ("floats in words", PACK, weights("type", "float"), "floats must be packed in U8"),
    ("nvfp4 factor missing", NVFP4, without("weight_global_scale"), "weight_global_scale is missing"),
    ("nvfp4 factor zero", NVFP4, with_value("weight_global_scale", 0), "is 0.0: it must be positive and finite"),
    ("nvfp4 factor per row", NVFP4, adding("weight_global_scale", np.ones(64, np.float32)), r"must be \[\] or \[1\]"),
    ("nvfp4 scale NaN", NVFP4, with_value("weight_scale", np.nan), "has a scale of nan"),
    ("nvfp4 scale negative", NVFP4, with_value("weight_scale", -1), "must be finite and not negative"),
    ("nvfp4 scales cut", NVFP4, cut("weight_scale"), r"its scales must be \[64, 4\]"),
    ("nvfp4 in groups of 32", NVFP4, weights("group_size", 32), "FP4 requires type 'float' and groups of 16"),
    ("nvfp4 zero points", NVFP4, adding("weight_zero_point", np.zeros((64, 4), np.int8)), "but is not supported"),
    ("modelopt factor negative", OPT, with_value("weight_scale_2", -1), "is -1.0: it must be positive and finite"),
    ("modelopt, bytes of another dtype", OPT, as_dtype("weight", np.int8), "with weight_scale_2 it must be U8"),
    (
        "modelopt, scales of inputs",
        OPT,
        adding("pre_quant_scale", np.ones(64, np.float32)),
        "pre_quant_scale belongs to",
    ),
    ("modelopt AWQ", OPT, field("quant_algo", "NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' is not supported"),
    ("modelopt scale of FP8", "modelopt-fp8-channel", cut("weight_scale"), r"its scales must be \[64\] or \[64, 1\]"),
    ("modelopt blocks", "modelopt-fp8-blocks", adding("weight_scale", np.ones((2, 1, 1, 1), np.float32)), "must be"),
    ("mxfp8 NaN", "mxfp8", with_value("weight_scale", 255), "has a scale of nan"),
    ("2:4", PACK, field("format", "marlin-24"), "is not supported"),
    (
        "column order",
        PACK,
        adding("weight_g_idx", np.zeros(64, np.int32)),
        "reordered groups of columns are not supported",
    ),
    ("zero points cut", ASYMMETRIC, cut("weight_zero_point", 0), r"must be \[8, 4\]"),
    ("awq scales missing", AWQ, without("scales"), "scales is missing"),
    ("awq zero points missing", AWQ, without("qzeros"), "qzeros is missing"),
    ("awq zero points cut", AWQ, cut("qzeros"), "must be"),
    ("awq scale NaN", AWQ, with_value("scales", np.nan), "has a scale of nan"),
    ("awq gemv", AWQ, field("version", "gemv"), "version 'gemv' is not supported"),
    ("awq gemv by its newer name", AWQ, both(removed("version"), field("format", "gemv")), "version 'gemv' is not"),
    ("awq of llm-awq", AWQ, both(removed("version"), field("backend", "llm-awq")), "version 'llm-awq' is not"),
    ("awq three bits", AWQ, field("bits", 3), "bits 3 is not supported"),
    ("awq group size", AWQ, field("group_size", 24), "must be|group"),
    ("gptq scale zero", GPTQ, with_value("scales", 0), "must be finite and not zero"),
    ("gptq settings per module", GPTQ, field("dynamic", ["-:.*"]), "dynamic must be an object"),
    (
        "gptq bits per module",
        GPTQ,
        both(field("dynamic", {"+:.*": {"bits": 3}}), adding("qzeros", np.zeros((4, 6), np.int32))),
        r"its scales|it must be \[4, 8\]",
    ),
    ("gptq words cut", GPTQ, cut("qweight", 0), "must be|g_idx"),
    (
        "gptq group out of range",
        GPTQ,
        with_value("g_idx", 9),
        "group 9 is out of range",
    ),
    ("gptq negative group", GPTQ, with_value("g_idx", -1), "group -1 is out of range"),
    ("gptq groups of unequal size", GPTQ, with_value("g_idx", 1), "group 0 has 15 inputs, but must have 16"),
    ("gptq g_idx cut", ACT, cut("g_idx"), r"must be \[64\]"),
    ("gptq scales cut", GPTQ, cut("scales"), "must be"),
    ("gptq bits", GPTQ, field("bits", 2), "bits 2 is not supported"),
    ("gptq bits absent", GPTQ, removed("bits"), "quantization_config lacks bits: set it to one of 4, 8"),
    ("gptq marlin by its newer name", GPTQ, field("format", "marlin"), "checkpoint_format 'marlin' is not supported"),
    ("gptq rotation", GPTQ, field("rotation", "hadamard"), "rotation 'hadamard' rotates activations at run time"),
    ("awq rotation", AWQ, field("rotation", "random"), "rotation 'random' rotates activations at run time"),
    ("gptq rotation config", GPTQ, field("rotation_config", {"a": 1}), "rotation_config .* rotates activations"),
    ("auto-round packing", ROUND, field("packing_format", "auto_round:fp8_static"), "packing_format 'auto_round:fp8"),
    ("auto-round floats", ROUND, field("data_type", "mx_fp"), "data_type 'mx_fp' is not supported; supported: 'int'"),
    ("auto-round bits", ROUND, field("bits", 3), "of AutoRound: bits 3 is not supported"),
    ("auto-round spin", ROUND, field("spinquant_config", {"online_r1_rotation": True}), "spinquant_config .* rotates"),
    ("gptq version", GPTQ, field("checkpoint_format", "marlin"), "checkpoint_format 'marlin' is not supported"),
    ("gptq group size", GPTQ, field("group_size", "big"), "group_size must be a positive integer or -1"),
    ("nf4 state missing", "nf4", without("weight.quant_state.bitsandbytes__nf4"), "nf4 is missing"),
    ("nf4 levels", "nf4", with_value("weight.quant_map", 0.5), "does not contain the NF4 levels"),
    ("nf4 fp4", "nf4", state(quant_type="fp4"), "is not a valid NF4 state"),
    ("nf4 shape", "nf4", state(shape=[64, 62]), r"needs \[1984, 1\]"),
    (
        "nf4 no JSON",
        "nf4",
        adding("weight.quant_state.bitsandbytes__nf4", np.zeros(3, np.uint8)),
        "not a valid NF4 state",
    ),
    ("nf4 scale NaN", "nf4", with_value("weight.absmax", np.nan), "scales must be finite"),
    ("nf4 nested scales missing", "nf4-nested", without("weight.nested_quant_map"), "nested_quant_map is missing"),
    ("nf4 offset", "nf4-nested", state(nested_offset="much"), "nested_offset"),
    ("bitsandbytes int8", "nf4", field("load_in_8bit", True), "load_in_8bit True is not supported"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny Llama in a format, written once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = write_quantised(tmp_path_factory.mktemp(name), "llama", FORMATS[name])[0]
        return made[name]

    return folder


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("name", "edit", "said"), [pytest.param(*case[1:], id=case[0]) for case in MALFORMED])
def test_malformed_checkpoints_are_refused(
    tmp_path: Path, whole: Callable[[str], Path], name: str, edit: Edit, said: str, keep: bool
) -> None:
    source = whole(name)
    tensors, fields = read_tensors(source), json.loads((source / "config.json").read_text())
    edit(tensors, fields["quantization_config"])
    folder = write_checkpoint(tmp_path / "m", fields, tensors)
    with pytest.raises(ValueError, match=said):
        nnxmoe.from_pretrained(folder, keep_quantized=keep)


BLOCKS_OF_128 = quantised.deepseek((128, 128))
DEFAULTS: list[tuple[str, quantised.Format, Edit]] = [
    ("fp8 blocks", BLOCKS_OF_128, removed("weight_block_size", "activation_scheme", "fmt")),
    ("gptq version by its newer name", FORMATS["gptq-4-16-v2"], both(removed("checkpoint_format"),
                                                                     field("format", "gptq_v2"))),
    ("gptq version in capitals", FORMATS["gptq-4-16-v2"], field("checkpoint_format", "GPTQ_V2")),
    ("gptq version by both names", FORMATS["gptq-4-16-v2"], field("format", "gptq")),
    ("gptq order", FORMATS[GPTQ], removed("desc_act", "sym")),
    ("awq", FORMATS[AWQ], removed("bits", "version", "zero_point")),
    ("auto-round bits", FORMATS["auto-round-gptq-4-16-v1"], removed("bits", "data_type", "sym")),
    ("eight bits", FORMATS["int-quantized"], weights("dynamic", False, "num_bits", "type", "symmetric")),
    ("one scale", FORMATS["float-quantized-tensor"], weights("dynamic", False, "strategy")),
    ("one scale per output", FORMATS["float-quantized-channel"], weights("group_size", -1, "strategy")),
    ("groups", FORMATS[PACK], weights("dynamic", False, "strategy")),
    ("a group for activations", FORMATS[PACK], lambda _, config: config["config_groups"].update(
        other={"targets": ["re:nothing"]})),
]  # fmt: skip


@pytest.mark.parametrize(("form", "edit"), [pytest.param(*case[1:], id=case[0]) for case in DEFAULTS])
def test_absent_settings_have_the_default_of_their_tool(tmp_path: Path, form: quantised.Format, edit: Edit) -> None:
    more = {"intermediate_size": 160} if form is BLOCKS_OF_128 else {}  # the others fit into one block
    codes, floats = write_quantised(tmp_path, "llama", form, more=more)
    fields = json.loads((codes / "config.json").read_text())
    edit({}, fields["quantization_config"])
    (codes / "config.json").write_text(json.dumps(fields))
    identical(arrays(nnxmoe.from_pretrained(codes, dtype="float32")), arrays(nnxmoe.from_pretrained(floats)))


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Older releases have hf_quant_config.json, or no quant_method. Scales of caches are left out, and named."""
    codes, floats = write_quantised(tmp_path, "llama", FORMATS["modelopt-nvfp4"])
    fields, tensors = json.loads((codes / "config.json").read_text()), read_tensors(codes)
    settings = fields.pop("quantization_config")
    del settings["quant_method"]
    tensors[f"{Q.replace('q_proj', 'k_proj')}.k_scale"] = np.array(0.5, np.float32)
    apart = write_checkpoint(tmp_path / "apart", fields, tensors)
    (apart / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    inside = write_checkpoint(tmp_path / "inside", {**fields, "quantization_config": settings}, tensors)
    wanted = arrays(nnxmoe.from_pretrained(floats))
    for folder in (apart, inside):
        model = nnxmoe.from_pretrained(folder, dtype="float32")
        identical(arrays(model), wanted)
        skipped = model.load_report.skipped["scales of activations and caches (which are not quantized)"]
        assert any(name.endswith("k_proj.k_scale") for name in skipped)
    with pytest.raises(
        nnxmoe.CheckpointError, match="has FP4 codes with a group size other than 32, which compressed-tensors cannot"
    ):
        nnxmoe.save_pretrained(nnxmoe.from_pretrained(apart, keep_quantized=True), tmp_path / "saved")
    (apart / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(nnxmoe.CheckpointError, match=r"hf_quant_config\.json: quantization must be an object"):
        nnxmoe.from_pretrained(apart)


@pytest.mark.parametrize("name", ["gptq-4-16-v1", "awq-16", "pack-4-16", "nf4", "autofp8-static"])
def test_settings_without_quantised_weights_are_refused(tmp_path: Path, name: str) -> None:
    fields = {**FIELDS["llama"], "quantization_config": dict(FORMATS[name].config)}
    folder = write_checkpoint(tmp_path / "m", fields, tiny_weights(FIELDS["llama"]))
    with pytest.raises(ValueError, match=r"quant_method .*no tensor contains quantized weights"):
        nnxmoe.from_pretrained(folder)


def test_nan_codes_cannot_be_kept(tmp_path: Path) -> None:
    codes, _ = write_quantised(tmp_path, "llama", FORMATS[DEEPSEEK])
    tensors = read_tensors(codes)
    tensors[f"{Q}.weight"].view(np.uint8)[3, 5] = 0xFF
    save_file(tensors, codes / "model.safetensors")
    assert nnxmoe.from_pretrained(codes).load_report.nonfinite == {f"{Q}.weight": 1}
    with pytest.raises(ValueError, match=r"q_proj\.weight.* contains NaN: load the model without keep_quantized"):
        nnxmoe.from_pretrained(codes, keep_quantized=True)


def test_scales_that_no_weight_uses_are_reported(tmp_path: Path) -> None:
    codes, _ = write_quantised(tmp_path, "llama", FORMATS[PACK])
    tensors = read_tensors(codes)
    tensors["model.norm.weight_scale"] = np.ones(1, np.float32)
    save_file(tensors, codes / "model.safetensors")
    assert nnxmoe.from_pretrained(codes).load_report.unexpected == ("model.norm.weight_scale",)


def test_experts_stored_in_different_ways_are_refused(tmp_path: Path) -> None:
    form = FORMATS[PACK]
    fields, weights_ = FIELDS["mixtral"], tiny_weights(FIELDS["mixtral"])
    stored, _ = form.checkpoint(weights_, lambda name: ".experts." in name and ".experts.2.w1" not in name)
    codes = write_checkpoint(tmp_path / "m", {**fields, "quantization_config": dict(form.config)}, stored)
    nnxmoe.from_pretrained(codes)
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight and .* are stored in different formats"):
        nnxmoe.from_pretrained(codes, keep_quantized=True)


def test_the_choice_is_refused_twice() -> None:
    with pytest.raises(ValueError, match="keep_quantized=True cannot be combined with quantize="):
        nnxmoe.from_pretrained("demo", keep_quantized=True, quantize=nnxmoe.Int8())


BY_TOOLS = {
    "awq": quantised.awq(32),
    "gptq-4": quantised.gptq(4, 32, version=1, act_order=False),
    "gptq-8": quantised.gptq(8, 32, version=1, act_order=False),
    "nf4": quantised.nf4(nested=False),
    "nf4-nested": quantised.nf4(nested=True),
}


@pytest.mark.parametrize("name", BY_TOOLS)
def test_what_the_tools_wrote_is_read_to_the_bit(tmp_path: Path, name: str) -> None:
    """One projection, quantised and dequantised by autoawq, auto-gptq and bitsandbytes; the first two in float16."""
    stored = load_file(FOLDER / f"{name}.safetensors")
    values = stored.pop("values")
    weights = tiny_weights(FIELDS["llama"])
    assert values.shape == weights.pop(f"{MODULE}.weight").shape
    weights |= {f"{MODULE}.{ending}": value for ending, value in stored.items()}
    folder = write_checkpoint(tmp_path, FIELDS["llama"] | {"quantization_config": dict(BY_TOOLS[name].config)}, weights)
    for model in (
        nnxmoe.from_pretrained(folder, dtype="float32"),
        nnxmoe.dequantize(nnxmoe.from_pretrained(folder, dtype="float32", keep_quantized=True)),
    ):
        read = np.asarray(model.stacks[0].layers[1].attention.q.kernel[...]).reshape(values.shape)
        np.testing.assert_array_equal(read if "nf4" in name else read.astype(np.float16), values)
