"""Hy4: names on disk, rotation of pairs, float32 parameters, the prediction layer, and the text of multimodal files."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe import Engine, MTPDraft
from nnxmoe.config.bounds import ConfigError
from nnxmoe.generation.request import RequestOptions
from nnxmoe.models import config_from_hf
from tests.support.arrays import max_error
from tests.support.families import load, tokens_of, weights_of
from tests.support.mtp import logits_ahead
from tests.support.running import MODEL_TOLERANCE, eager_logits
from tests.support.tiny import ORACLE, Fields, Weights, build, write_checkpoint

CASE = load("hy_v4")
TOKENS = CASE.arrays["tokens"]
ROPE, LAST, MTP = CASE.fields["qk_rope_head_dim"], "model.layers.3.", "model.mtp_layers.0."


def with_mtp(seed: int = 0) -> tuple[Fields, Weights]:
    """The frozen case with a prediction layer, as in published files: the parts of a layer without its streams."""
    layer = {
        name.replace(LAST, MTP): a.shape for name, a in CASE.weights.items() if LAST in name and ".hc_" not in name
    }
    dim = CASE.fields["hidden_size"]
    layer |= {f"{MTP}{name}.weight": (dim,) for name in ("enorm", "hnorm", "final_layernorm")}
    layer[f"{MTP}eh_proj.weight"] = (dim, 2 * dim)
    return CASE.fields | {"num_nextn_predict_layers": 1}, CASE.weights | weights_of(layer, seed)


@pytest.mark.slow
def test_names_that_transformers_saves_are_loaded(tmp_path: Path) -> None:
    """transformers 5.24 moves ``hc_pre``, and renames the gates of feed-forwards like those of attention."""

    def saved(name: str) -> str:
        for part in ("attn_layer", "mlp_layer"):
            name = name.replace(f"hc_{part}.hc_pre.", f"hc_pre.hc_{part}.")
        name = name.replace("hc_head.hc_head", "hc_pre.hc_head.hc_head")
        return name.replace("gate_proj.weight", "linear_gate.weight")

    weights = {saved(name): array for name, array in CASE.weights.items()}
    assert len(weights.keys() - CASE.weights.keys()) == 4 * 6 + 3 + 4
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path, CASE.fields, weights), strategy=ORACLE)
    assert not model.load_report.unexpected
    assert max_error(eager_logits(model, TOKENS), CASE.arrays["logits"]) < MODEL_TOLERANCE


@pytest.mark.slow
def test_rotation_of_pairs_is_a_permutation_of_halves() -> None:
    """As in vLLM and llama.cpp, with ``rope_interleave``."""
    pairs = np.r_[0:ROPE:2, 1:ROPE:2]

    def permuted(name: str, array: np.ndarray) -> np.ndarray:
        heads = {"q_b_proj": "num_attention_heads", "wq_b": "index_n_heads"}.get(name.split(".")[-2])
        if heads is None and not name.endswith(
            ("kv_a_proj_with_mqa.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
        ):
            return array
        rows = array.reshape(CASE.fields[heads] if heads else 1, -1, *array.shape[1:]).copy()
        rows[:, -ROPE:] = rows[:, -ROPE:][:, pairs]
        return rows.reshape(array.shape)

    weights = {name: permuted(name, array) for name, array in CASE.weights.items()}
    wanted = eager_logits(build(CASE.fields | {"rope_interleave": True}, CASE.weights, ORACLE), TOKENS)
    assert max_error(eager_logits(build(CASE.fields, weights, ORACLE), TOKENS), wanted) < 1e-5
    assert max_error(CASE.arrays["logits"], wanted) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_no_limit_of_the_activation(limit: float) -> None:
    """As vLLM and the documentation of transformers 5.24, which clamps nevertheless."""
    logits = [
        eager_logits(build(CASE.fields | {"swiglu_limit": x}, CASE.weights, ORACLE), TOKENS) for x in (limit, 1e6)
    ]
    assert np.array_equal(*logits)
    assert max_error(logits[0], CASE.arrays["logits"]) > 0.1


@pytest.mark.slow
def test_parameters_in_float32(tmp_path: Path) -> None:
    """Of the router, the head, the sinks and the streams, in a model in bfloat16."""
    fields, weights = with_mtp()
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "a", fields, weights), dtype="bfloat16", mtp=True)
    nnxmoe.save_pretrained(model, tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    ends = "hc_fn hc_base hc_scale head_fn head_base head_scale .gate.weight correction_bias sink_param lm_head.weight"
    ends += " k_norm.weight k_norm.bias weights_proj.weight"
    exact = {name for name, array in saved.items() if array.dtype == np.float32}
    assert exact == {name for name in weights if name.endswith(tuple(ends.split()))}
    assert all(saved[name].tobytes() == weights[name].tobytes() for name in exact)
    assert np.isfinite(model(TOKENS).logits).all()


@pytest.mark.slow
def test_prediction_layer(tmp_path: Path) -> None:
    """It is loaded on request, saved as it was, and drafts tokens without changing them."""
    fields, weights = with_mtp()
    folder = write_checkpoint(tmp_path / "a", fields, weights)
    report = nnxmoe.from_pretrained(folder).load_report
    (skipped,) = report.skipped.values()
    assert {name.partition("[")[0] for name in skipped} == {name for name in weights if name.startswith(MTP)}
    assert not report.unexpected
    model = nnxmoe.from_pretrained(folder, mtp=True)
    assert not model.load_report.unexpected
    nnxmoe.save_pretrained(model, tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == weights.keys() and all(np.array_equal(saved[name], weights[name]) for name in weights)

    def ids(draft: Any) -> list[list[int]]:
        engine = Engine(model, slots=2, capacity=40, draft=draft)
        prompts = [[3, 4, 5, 3, 4, 5, 3, 4, 5], [7, 1, 30], [9, 9, 2]]
        requests = [engine.submit(prompt, RequestOptions(8, stop_ids=None)) for prompt in prompts]
        engine.run()
        return [request.ids for request in requests]

    assert ids(None) == ids(MTPDraft.of(model, 2))


@pytest.mark.slow
def test_text_of_multimodal_files(tmp_path: Path) -> None:
    """Pairs are rotated, and the norms of the latents have the eps of the other norms."""
    text = CASE.fields | {"model_type": "hy_v4_vl_text"}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [1, 1, 0]}
    around = {"model_type": "hy_v4_vl", "architectures": ["HYV4VLForConditionalGeneration"], "text_config": text}
    stored = dict(CASE.weights) | {"vit.layers.0.input_layernorm.weight": np.ones(3, np.float32)}
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path, around, stored), strategy=ORACLE)
    assert (model.load_report.towers, model.load_report.unexpected, model.load_report.notes) == (("vit",), (), ())
    assert model.config.latent_norm_eps == CASE.fields["rms_norm_eps"]
    other = build(CASE.fields | {"rope_interleave": True}, CASE.weights, ORACLE)
    assert max_error(eager_logits(model, TOKENS), eager_logits(other, TOKENS)) < 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gated_mla", False),
        ("gating_type", "headwise"),
        ("learnable_sink", False),
        ("enable_ihc", False),
        ("first_k_dense_replace", 2),
        ("indexer_rope_interleave", True),
        ("index_topk_freq", 2),
        ("index_topk_pattern", "FFFF"),
        ("indexer_types", ["shared", "full", "full", "full"]),
        ("hc_mult", 0),
        ("hc_magnitude", 0.0),
        ("layer_types", ["full_attention"] * 4),
    ],
)
def test_refused_fields(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="indexer type must be full" if name == "indexer_types" else name):
        config_from_hf(CASE.fields | {name: value})


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_prediction_layer_equals_parts_of_transformers(seed: int, tmp_path: Path) -> None:
    """As vLLM combines them (``hy_v4/nvidia/mtp.py``): transformers ignores the layer, but has its attention, experts
    and norms."""
    torch = pytest.importorskip("torch")
    from transformers.models.hy_v4 import modeling_hy_v4 as parts

    from tests.support.reference import load_theirs

    fields, weights = with_mtp(seed)
    folder = write_checkpoint(tmp_path, fields, weights)
    main = load_theirs(folder, "hy_v4")
    config = copy.deepcopy(main.config)
    config.indexer_types, config.mlp_layer_types, config.layer_types = ["full"], ["sparse"], ["indexed_attention"]
    given = {name.removeprefix(MTP): torch.tensor(a) for name, a in weights.items() if name.startswith(MTP)}
    given = {
        n.replace("linear_gate", "gate_proj").replace("learnable_sink_param", "sinks"): a for n, a in given.items()
    }
    if "mlp.experts.0.up_proj.weight" in given:
        raise AssertionError("transformers saves all experts in one tensor")
    attention, experts = parts.HYV4Attention(config, 0), parts.HYV4MoE(config)
    for module, prefix in ((attention, "self_attn."), (experts, "mlp.")):
        module.load_state_dict({n.removeprefix(prefix): a for n, a in given.items() if n.startswith(prefix)})

    def norm(name: str, x: Any) -> Any:
        part = parts.HYV4RMSNorm(x.shape[-1], config.rms_norm_eps)
        part.load_state_dict({"weight": given[f"{name}.weight"]})
        return part(x)

    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state[:, :-1]
        inputs = norm("enorm", main.model.embed_tokens(tokens[:, 1:])), norm("hnorm", hidden)
        x = torch.cat(inputs, -1) @ given["eh_proj.weight"].T
        size = x.shape[1]
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None].expand(len(x), 1, -1, -1)
        angles = main.model.rotary_emb(x, torch.arange(size)[None].expand(len(x), -1))
        x = x + attention(norm("input_layernorm", x), angles, mask)[0]
        x = x + experts(norm("post_attention_layernorm", x))
        wanted = main.lm_head(norm("final_layernorm", x)).numpy()
    ours = logits_ahead(nnxmoe.from_pretrained(folder, mtp=True), TOKENS)[1]
    assert max_error(ours, wanted) < MODEL_TOLERANCE


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_text_of_multimodal_files_equals_that_of_transformers(seed: int, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = {name: value for name, value in CASE.fields.items() if name not in ("model_type", "architectures")}
    text |= {"rms_norm_eps": (1e-5, 1e-2)[seed % 2], "hc_mult": 2 + seed % 3}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [1, 1, 0]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"out_hidden_size": text["hidden_size"], "patch_size": 2, "max_image_size": 8}
    config = transformers.AutoConfig.for_model("hy_v4_vl", text_config=text, vision_config=vision)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(weights_of({n: a.shape for n, a in load_file(path).items()}, seed), path, {"format": "pt"})
    load_theirs = transformers.AutoModelForImageTextToText.from_pretrained
    theirs = load_theirs(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ours = nnxmoe.from_pretrained(tmp_path)
    assert ours.load_report.towers and not ours.load_report.unexpected
    tokens, mask = tokens_of(text["vocab_size"], seed=seed)
    for used in (np.ones_like(mask), mask):
        positions = torch.tensor(np.maximum(np.cumsum(used, axis=1) - 1, 0))
        given = {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(used)}
        with torch.no_grad():
            wanted = theirs(**given, position_ids=positions).logits.numpy()
        assert max_error(ours(tokens, used).logits, wanted, used) < MODEL_TOLERANCE
