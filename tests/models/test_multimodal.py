"""Checkpoints of multimodal models, of which the text model is loaded, listed, saved and adapted."""

import functools
import itertools
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe.apps.cli import main
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.config.bounds import ConfigError
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.models import PRESETS, config_from_hf, model_class
from nnxmoe.train import lora
from tests.support.adapters import fill
from tests.support.arrays import max_error
from tests.support.families import FAMILIES, fused, load, tokens_of, weights_of
from tests.support.published import PUBLISHED_TEXTS, described
from tests.support.quantised import FORMATS
from tests.support.running import MODEL_TOLERANCE
from tests.support.tiny import TINY, Fields, Weights, random_tokens, tiny_weights, write_checkpoint

TEXT = TINY["mixtral"] | {"architectures": ["MixtralForCausalLM"]}
OTHERS = {
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight": (6, 6),
    "model.vision_tower.encoder.layers.0.mlp.fc1.weight": (6, 6),
    "multi_modal_projector.linear_1.weight": (24, 6),
}


def nested(folder: Path, prefix: str, head: str, **changes: object) -> Path:
    """A tiny Mixtral as the text model of a multimodal checkpoint, with ``prefix`` for ``model.``."""
    fields = {name: value for name, value in TEXT.items() if name not in ("eos_token_id", "pad_token_id")}
    around = {"eos_token_id": 2, "pad_token_id": 0, "vision_config": {"hidden_size": 6, "num_hidden_layers": 1}}
    around |= {"model_type": "toy_vl", "architectures": ["ToyForConditionalGeneration"], "text_config": fields}
    weights = {
        (head if name == "lm_head.weight" else prefix + name.removeprefix("model.")): value
        for name, value in tiny_weights(TEXT).items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(around | changes))
    save_file(
        weights | {name: np.ones(shape, np.float32) for name, shape in OTHERS.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
        ("language_model.", "lm_head.weight"),
    ],
)
def test_the_text_model_is_loaded_listed_saved_and_adapted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, prefix: str, head: str
) -> None:
    folder, tokens = nested(tmp_path / "nested", prefix, head), random_tokens(2, 7)
    write_checkpoint(tmp_path / "flat", TEXT, tiny_weights(TEXT))
    flat, model = nnxmoe.from_pretrained(tmp_path / "flat"), nnxmoe.from_pretrained(folder)
    assert model.config == flat.config
    np.testing.assert_array_equal(model(tokens).logits, flat(tokens).logits)
    report = model.load_report
    assert report.towers == ("multi_modal_projector", "vision_tower")
    assert {name for names in report.skipped.values() for name in names} == OTHERS.keys()
    assert not report.unexpected
    assert "without multi_modal_projector, vision_tower" in caplog.text

    assert main(["inspect", str(folder)]) == 0
    assert "2 tensors: vision_tower" in (listed := capsys.readouterr().out)
    assert "0 missing, 0 belong to no parameter" in listed

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        nnxmoe.save_pretrained(model, tmp_path / "saved")
    assert "only the text model is saved, without multi_modal_projector, vision_tower" in caplog.text
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["model_type"], written["eos_token_id"]) == ("mixtral", 2)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == tiny_weights(TEXT).keys()
    assert nnxmoe.from_pretrained(tmp_path / "saved").load_report.towers == ()

    lora.add(model, rank=2, rngs=nnx.Rngs(0))
    fill(model)
    lora.save(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    lora.load(flat, tmp_path / "adapter")
    wanted = np.asarray(model(tokens).logits)
    np.testing.assert_array_equal(flat(tokens).logits, wanted)
    # The adapter of the multimodal model, with a pattern of whole names.
    settings = json.loads((file.parent / "adapter_config.json").read_text())
    names = [name.replace("layers", f"{prefix}layers") for name in settings["target_parameters"]]
    fields = settings | {"target_modules": f"{prefix}layers.*_proj", "target_parameters": names}
    (file.parent / "adapter_config.json").write_text(json.dumps(fields))
    renamed = {
        name.replace("base_model.model.model.", f"base_model.model.{prefix}"): a for name, a in load_file(file).items()
    }
    save_file(renamed, file)
    again = nnxmoe.from_pretrained(folder)
    lora.load(again, file.parent)
    np.testing.assert_array_equal(again(tokens).logits, wanted)


def test_fields_around_the_text_model() -> None:
    """The head is tied if either config says so; other shared fields count where the text model has none."""
    for outer, inner, tied in ((True, False, True), (False, True, True), (None, True, True), (True, None, True)):
        fields = {"model_type": "toy_vl", "tie_word_embeddings": outer, "dtype": "float16", "eos_token_id": 9}
        fields["text_config"] = TEXT | {"tie_word_embeddings": inner, "eos_token_id": 7}
        config = config_from_hf({name: value for name, value in fields.items() if value is not None})
        assert (config.tie_word_embeddings, config.dtype, config.eos_token_id) == (tied, "float16", 7)


def test_what_is_no_text_model_is_refused(tmp_path: Path) -> None:
    """A classifier, a text model of an unsupported family, and tensors of an unknown part, which are reported."""
    for name, changes, message in (
        ("classifier", {"architectures": ["ToyForSequenceClassification"]}, "only causal language models"),
        ("family", {"text_config": TEXT | {"model_type": "gemma2_text"}}, "model_type 'gemma2_text'"),
        ("twice", {"text_config": TEXT | {"text_config": TEXT}}, "text_config"),
        ("no object", {"text_config": [1]}, "model_type 'toy_vl'"),
    ):
        with pytest.raises(ConfigError, match=message):
            nnxmoe.from_pretrained(nested(tmp_path / name, "language_model.model.", "lm_head.weight", **changes))
    folder = nested(tmp_path / "unknown", "language_model.model.", "lm_head.weight")
    weights = load_file(folder / "model.safetensors") | {"tower_of_babel.weight": np.ones(3, np.float32)}
    shutil.rmtree(folder)
    folder = nested(folder, "language_model.model.", "lm_head.weight")
    save_file(weights, folder / "model.safetensors")
    assert nnxmoe.from_pretrained(folder).load_report.unexpected == ("tower_of_babel.weight",)


def _as_minimax_publishes(name: str) -> str:
    moe, sparse = ".mlp.experts." in name or ".mlp.shared_experts." in name or ".mlp.gate." in name, "block_sparse_moe"
    name = name.replace(".indexer.", ".index_").replace(".mlp.", f".{sparse}." if moe else ".mlp.")
    name = name.replace(f"{sparse}.gate.e_score", f"{sparse}.e_score")
    return "language_model." + name


def _parts(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What transformers joins: gate and up, and the experts."""
    for end, ours in ((".gate_up_proj", ("w1", "w3")), (".down_proj", ("w2",))):
        if name.endswith("experts" + end):
            for e, (expert, w) in itertools.product(range(len(array)), enumerate(ours)):
                yield name.replace(end, f".{e}.{w}.weight"), np.split(array[e], len(ours))[expert]
            return
    for part, half in zip(("gate", "up"), np.split(array, 2) if ".gate_up_proj." in name else (), strict=False):
        yield name.replace("gate_up", part), half
    if ".gate_up_proj." not in name:
        yield name, array


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["minimax_m3_vl", "step3p7"])
def test_published_files_of_newer_families(kind: str, tmp_path: Path) -> None:
    """With their names and towers, nested: MiniMax-M3 and Step-3.7. What is saved has transformers' names."""
    case = load("minimax_m3_vl_text" if kind.startswith("minimax") else "step3p5")
    text = {name: value for name, value in case.fields.items() if name != "model_type"}
    weights: Weights = dict(case.weights)
    if kind == "minimax_m3_vl":
        pairs = ((_as_minimax_publishes(name), a) for name, a in case.weights.items())
        weights = {name: a for pair in pairs for name, a in _parts(*pair)}
        assert "language_model.model.layers.1.block_sparse_moe.experts.7.w3.weight" in weights
        assert "language_model.model.layers.1.self_attn.index_q_proj.weight" in weights
    towers = "vision_tower.x", "vision_model.x", "patch_merge_mlp.linear_1", "vit_large_projector", "model.mtp.fc"
    weights |= {f"{name}.weight": np.ones(3, np.float32) for name in towers}
    fields = {"model_type": kind, "architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "nested", fields, weights))
    assert not model.load_report.unexpected and set(model.load_report.towers) == {n.split(".")[0] for n in towers[:4]}
    tokens = case.arrays["tokens"]
    np.testing.assert_allclose(model(tokens).logits, case.arrays["logits"], atol=MODEL_TOLERANCE)
    nnxmoe.save_pretrained(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == case.weights.keys()
    assert all(np.array_equal(saved[name], case.weights[name]) for name in saved)


MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "turned"), [("qwen3", False), ("qwen3_moe", False), ("qwen3_moe", True)])
def test_the_text_of_qwen3_vl_is_qwen3(tmp_path: Path, kind: str, turned: bool) -> None:
    """With all experts of a layer in two tensors, which have inputs before outputs on the hub and are the other way
    round if transformers saved them."""
    fields = {k: v for k, v in FAMILIES[kind].frozen.items() if k not in ("layer_types", "use_qk_norm")}
    fields |= {"use_sliding_window": False, "rope_scaling": None}
    fields |= {"moe_intermediate_size": 10} if kind == "qwen3_moe" else {}  # not half of hidden_size
    config = config_from_hf(fields)
    weights = weights_of({n: leaf.shape for n, leaf in tensor_layout(model_class(config)(config, rngs=None)).items()})
    flat = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "flat", fields, weights))
    text = {k: v for k, v in fields.items() if "sliding" not in k and v is not None}
    text |= {"model_type": kind.replace("qwen3", "qwen3_vl") + "_text", "rope_scaling": MROPE}
    around = {"model_type": kind.replace("qwen3", "qwen3_vl"), "architectures": ["Qwen3VLForConditionalGeneration"]}
    stored = {
        name.replace("model.", "model.language_model."): value.mT.copy() if turned and ".experts." in name else value
        for name, value in fused(weights).items()
    }
    stored["model.visual.blocks.0.attn.qkv.weight"] = np.ones((6, 2), np.float32)
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "nested", around | {"text_config": text}, stored))
    assert (model.load_report.towers, model.load_report.unexpected, model.load_report.notes) == (("visual",), (), ())
    tokens = random_tokens(2, 7)
    np.testing.assert_array_equal(model(tokens).logits, flat(tokens).logits)
    nnxmoe.save_pretrained(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(np.array_equal(saved[name], weights[name]) for name in saved)
    assert nnxmoe.from_pretrained(tmp_path / "saved").config.model_type == kind
    with pytest.raises(ConfigError, match="use_sliding_window"):
        config_from_hf(around | {"text_config": text | {"use_sliding_window": True}})


def _as_published(kind: str, weights: Weights, experts: int) -> Weights:
    """The tensors of a multimodal file with this text model: its prefixes and towers, and ERNIE's image experts."""
    ones = np.ones((2, 2), np.float32)
    if kind == "qwen3_omni_moe":
        others = "thinker.audio_tower.proj1", "thinker.visual.blocks.0", "talker.model.layers.0", "code2wav.decoder.0"
        return {f"thinker.{n}": a for n, a in weights.items()} | {f"{name}.weight": ones for name in others}
    if kind == "glm4v_moe":
        stored = {n.replace("model.", "model.language_model."): a for n, a in weights.items()}
        return stored | {"model.visual.merger.proj.weight": ones}
    stored = dict(weights) | {"model.vision_model.ln.weight": ones, "model.resampler_model.mlp.weight": ones}
    for name, array in weights.items():
        if name.endswith("mlp.gate.weight"):
            stored |= {name: array.T.copy(), f"{name}_1": array.T.copy()}
        elif name.endswith("e_score_correction_bias"):
            stored[name] = np.concatenate([array, array + 1])
        elif ".experts." in name:
            head, number = name.split(".experts.")[0], int(name.split(".")[-3])
            stored[f"{head}.experts.{number + experts}.{name.split('.', 6)[-1]}"] = ones
    return stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inner", "towers"),
    [
        ("qwen3_omni_moe", "qwen3_moe", ("audio_tower", "code2wav", "talker", "visual")),
        ("glm4v_moe", "glm4_moe", ("visual",)),
        ("ernie4_5_vl_moe", "ernie4_5_moe", ("resampler_model", "vision_model")),
    ],
)
def test_text_models_in_published_files(tmp_path: Path, kind: str, inner: str, towers: tuple[str, ...]) -> None:
    """The text model equals the family of which it is a variant, and is saved as that family."""
    fields = {k: v for k, v in FAMILIES[inner].frozen.items() if k not in ("use_qk_norm", "max_window_layers")}
    weights = {n: a for n, a in load(inner).weights.items() if inner == "qwen3_moe" or "_norm." not in n}
    flat = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "flat", fields, weights))
    text = fields | {"model_type": f"{kind}_text", "rope_scaling": MROPE}
    if inner == "ernie4_5_moe":
        text = {name: value for name, value in text.items() if not name.startswith("moe_layer")}
        text |= {"moe_intermediate_size": [16, 6], "mlp_layer_types": ["dense", "sparse", "sparse"]}
    around = {"model_type": kind, "architectures": ["AForConditionalGeneration"], "text_config": text}
    if kind == "qwen3_omni_moe":
        around = around | {"text_config": None, "thinker_config": {"dtype": "float32", "text_config": text}}
    stored = _as_published(kind, dict(weights), flat.config.experts)
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "nested", around, stored))
    report = model.load_report
    assert (report.towers, report.unexpected, report.notes) == (towers, (), ())
    unused = report.skipped.get("tensors that the family does not use", ())
    assert len(unused) == (2 * (1 + 3 * 6) if inner == "ernie4_5_moe" else 0)
    tokens = random_tokens(2, 7)
    np.testing.assert_array_equal(model(tokens).logits, flat(tokens).logits)
    nnxmoe.save_pretrained(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == weights.keys() and all(np.array_equal(saved[name], weights[name]) for name in saved)
    assert nnxmoe.from_pretrained(tmp_path / "saved").config.model_type == inner


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("qwen3_omni_moe", "use_sliding_window", True),
        ("qwen3_omni_moe", "sliding_window", 4),
        ("glm4v_moe", "use_qk_norm", True),
        ("ernie4_5_vl_moe", "mlp_layer_types", ["sparse", "dense"]),
        ("ernie4_5_vl_moe", "mlp_layer_types", "dense"),
        pytest.param("ernie4_5_vl_moe", "moe_intermediate_size", [1, 2, 3], marks=pytest.mark.wrong_types),
    ],
)
def test_refused_fields_of_text_models(kind: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        config_from_hf({"model_type": kind, "text_config": {"model_type": f"{kind}_text", "head_dim": 8, name: value}})


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_kimi_k25_with_experts_in_packed_int4(tmp_path: Path, keep: bool) -> None:
    """As published: the text model under ``language_model.``, and the tower and the projector beside it as floats."""
    form, fields = FORMATS["pack-4-16"], load("kimi_k2").fields | {"hidden_size": 32, "moe_intermediate_size": 16}
    config = config_from_hf(fields)
    weights = weights_of({n: leaf.shape for n, leaf in tensor_layout(model_class(config)(config, rngs=None)).items()})
    stored, plain = form.checkpoint(weights, lambda name: ".experts." in name)
    stored = {f"language_model.{name}": value for name, value in stored.items()}
    stored |= {
        f"{name}.weight": np.ones(2, np.float32) for name in ("mm_projector.proj.0", "vision_tower.encoder.norm")
    }
    scheme = {**form.config, "ignore": PUBLISHED_TEXTS["kimi-k2.5"]["quantization_config"]["ignore"]}
    around = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
    around |= {"quantization_config": scheme, "text_config": fields | {"quantization_config": scheme}}
    folder, tokens = write_checkpoint(tmp_path / "nested", around, stored), random_tokens(2, 7)
    flat = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "flat", fields, plain))
    model = nnxmoe.from_pretrained(folder, dtype="float32", keep_quantized=keep)
    report = model.load_report
    assert (report.towers, report.unexpected) == (("mm_projector", "vision_tower"), ())
    assert set(report.weights) == ({"int4", "float32"} if keep else {"float32"})
    assert max_error(model(tokens).logits, flat(tokens).logits) < (2e-4 if keep else 1e-7)
    assert not summarize(folder).missing
    nnxmoe.save_pretrained(model, tmp_path / "saved")
    again = nnxmoe.from_pretrained(tmp_path / "saved", keep_quantized=keep)
    assert again.config.model_type == "deepseek_v3" and again.load_report.towers == ()
    np.testing.assert_array_equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_kimi_k3_as_published(tmp_path: Path, keep: bool) -> None:
    """The text model has the type of Kimi Linear, experts are in MXFP4, and log rates are padded to a head's width."""
    form, published = next(f for f in FORMATS.values() if f.name == "mxfp4-pack"), PUBLISHED_TEXTS["kimi-k3"]
    fields = load("kimi_k3").fields | {"routed_expert_hidden_size": 32, "moe_intermediate_size": 32}
    config = config_from_hf(fields)
    weights = weights_of({n: leaf.shape for n, leaf in tensor_layout(model_class(config)(config, rngs=None)).items()})
    stored, plain = form.checkpoint(weights, lambda name: ".experts." in name)
    rates = {name: np.pad(value, (0, 2)) for name, value in stored.items() if name.endswith("A_log")}
    stored = {f"language_model.{name}": value for name, value in (stored | rates).items()}
    stored |= {f"{name}.weight": np.ones(2, np.float32) for name in ("mm_projector.post_norm", "vision_tower.norm")}
    scheme = {**form.config, "ignore": published["text_config"]["quantization_config"]["ignore"]}
    text = fields | {"model_type": "kimi_linear", "quantization_config": scheme}
    around = {name: published[name] for name in ("model_type", "architectures", "auto_map")} | {"text_config": text}
    model = nnxmoe.from_pretrained(
        write_checkpoint(tmp_path / "nested", around, stored), dtype="float32", keep_quantized=keep
    )
    report, tokens = model.load_report, random_tokens(2, 7)
    assert (report.towers, report.unexpected) == (("mm_projector", "vision_tower"), ())
    flat = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "flat", fields, plain))
    assert max_error(model(tokens).logits, flat(tokens).logits) < (2e-4 if keep else 1e-6)


@pytest.mark.slow
def test_deepseek_v41_as_published(tmp_path: Path) -> None:
    """DeepSeek's names, towers, draft layers, and a correction bias for image tokens; memory layers are refused."""
    case = load("deepseek_v41_text")
    names = (("model.embed_tokens.", "embed."), ("model.", ""))
    stored = {functools.reduce(lambda n, pair: n.replace(*pair), names, name): v for name, v in case.weights.items()}
    more = "vision.blocks.0.norm.weight", "aligner.w1.weight", "mtp.0.attn_norm.weight", "layers.0.ffn.gate.bias_vl"
    stored |= {name: np.ones(2, np.float32) for name in more}
    text = {name: value for name, value in case.fields.items() if name not in ("model_type", "architectures")}
    around = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": text}
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "published", around, stored))
    report = model.load_report
    assert (report.towers, report.unexpected) == (("aligner", "vision"), ())
    assert max_error(model(case.arrays["tokens"]).logits, case.arrays["logits"]) < MODEL_TOLERANCE
    folder = write_checkpoint(tmp_path / "memory", around | {"text_config": text | {"engram_layer_ids": [1]}}, stored)
    with pytest.raises(ConfigError, match=r"engram_layer_ids \[1\]: memory layers"):
        nnxmoe.from_pretrained(folder)


def test_published_text_models() -> None:
    """Config files of the hub have the presets' numbers."""
    for name, fields in PUBLISHED_TEXTS.items():
        assert described(config_from_hf(fields)) == described(PRESETS[name]), name


# Multimodal model_type -> the family of its text model, the towers, and the number of random configurations.
TEXTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "qwen3_vl": ("qwen3", ("visual",), 5),
    "qwen3_vl_moe": ("qwen3_moe", ("visual",), 5),
    "qwen3_omni_moe_thinker": ("qwen3_moe", ("audio_tower", "visual"), 12),
    "glm4v_moe": ("glm4_moe", ("visual",), 12),
    "ernie4_5_vl_moe": ("ernie4_5_moe", ("resampler_model", "vision_model"), 12),
}
AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 16, "num_mel_bins": 16}


def draw_text(kind: str, rng: random.Random) -> Fields:
    """Random fields of a text_config, from those of the text model's family."""
    text = FAMILIES[TEXTS[kind][0]].draw(rng)
    for name in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "use_qk_norm"):
        text.pop(name, None)
    width = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    if kind.startswith("qwen3_vl"):
        text.pop("norm_topk_prob", None)
    if kind == "glm4v_moe":
        width = int(width * text["partial_rotary_factor"])
        text["rope_parameters"] |= {"mrope_section": [width // 2, 0, 0]}
    elif kind == "ernie4_5_vl_moe":
        layers, dense = text["num_hidden_layers"], rng.choice([0, 1, 2])
        text = {name: value for name, value in text.items() if not name.startswith("moe_layer")}
        text |= {"moe_intermediate_size": [text["moe_intermediate_size"], 7]}
        text |= rng.choice([{}, {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}])
        sections = [width // 6, width // 6, width // 2 - width // 6 * 2]  # two equal sections, or transformers fails
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": sections}
    else:
        text["rope_parameters"] |= {"mrope_section": [width // 2 - 2, 1, 1], "mrope_interleaved": True}
    return text


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in TEXTS for number in range(TEXTS[kind][2])])
def test_random_text_models_equal_those_of_transformers(
    tmp_path: Path, record_property: Callable[[str, object], None], kind: str, number: int
) -> None:
    """Logits, padded or not, and those of the saved text model in transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = draw_text(kind, random.Random(f"{kind} {number}"))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2}
    vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    vision |= {"image_size": 8, "spatial_merge_size": 2}
    audio = {"audio_config": AUDIO | {"output_dim": text["hidden_size"], "downsample_hidden_size": 8}}
    config = transformers.AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        eos_token_id=2,
        **(audio if "omni" in kind else {}),
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    shapes = {name: value.shape for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights_of(shapes, seed=number), tmp_path / "model.safetensors", {"format": "pt"})
    load_theirs = transformers.AutoModelForImageTextToText.from_pretrained
    theirs = load_theirs(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ours = nnxmoe.from_pretrained(tmp_path)
    report = ours.load_report
    assert (report.towers, report.unexpected, report.notes) == (TEXTS[kind][1], (), ())
    assert ours.config.model_type == f"{kind.removesuffix('_thinker')}_text"
    nnxmoe.save_pretrained(ours, tmp_path / "saved")
    load_text = transformers.AutoModelForCausalLM.from_pretrained
    again = load_text(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager").eval()
    tokens, mask = tokens_of(text["vocab_size"], seed=number)
    for used in (np.ones_like(mask), mask):
        given = {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(used)}
        positions = np.maximum(np.cumsum(used, axis=1) - 1, 0)
        with torch.no_grad():
            wanted, saved = (
                each(**given, position_ids=torch.tensor(positions)).logits.numpy() for each in (theirs, again)
            )
        error = max_error(ours(tokens, used).logits, wanted, used)
        record_property("logits error", error)
        assert error < 2e-4
        assert max_error(saved, wanted, used) < 5e-5


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("llava", "llama"),
        ("kimi_k25", "deepseek_v3"),
        ("mistral3", "mistral"),
        ("mistral3", "ministral3"),
        ("mistral3", "mistral4"),
        ("gemma4", "gemma4_text"),
        ("gemma3", "gemma3_text"),
    ],
)
def test_logits_of_a_text_equal_those_of_transformers(tmp_path: Path, kind: str, inner: str) -> None:
    """As transformers writes them, and Kimi K2.5 as it is in memory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = FAMILIES[inner].frozen if inner in FAMILIES else TINY["llama" if inner == "mistral" else inner]
    text = text | {"moe_intermediate_size": 16}  # torch's grouped matmul requires rows that are multiples of 16 bytes
    text |= {"model_type": inner}
    if kind == "gemma3":  # the multimodal model of transformers 5.24 ignores the field
        text |= {"final_logit_softcapping": None}
    if inner not in FAMILIES:
        text |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": text["rope_theta"]}}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gemma4":
        vision |= {"num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 16}
    elif kind != "kimi_k25":
        vision |= {"image_size": 16, "patch_size": 8, "head_dim": 8}
        vision["model_type"] = {"llava": "clip_vision_model", "gemma3": "siglip_vision_model"}.get(kind, "pixtral")
    around = {"text_config": text, "vision_config": vision, "tie_word_embeddings": kind.startswith("gemma")}
    around |= {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **around)
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    if kind == "kimi_k25":  # transformers 5.24 writes the layers of its text model as "blocks", a word of its tower's
        save_file({name: value.numpy() for name, value in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    ours = nnxmoe.from_pretrained(tmp_path)
    assert {"vision_tower"} < set(ours.load_report.towers)
    assert not ours.load_report.unexpected
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(np.asarray(tokens))).logits.numpy()
    assert max_error(ours(tokens).logits, wanted) < 2e-4 * np.abs(wanted).max()
