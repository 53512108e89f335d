"""Reading config.json: defaults, rope styles, error messages, round trips and presets."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import ConfigError
from nnxmoe.apps.cli.tensor_headers import read_headers
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.config_json import FP8_EXPERTS, PREDICTION
from nnxmoe.config.frozen import FrozenDict, thaw
from nnxmoe.config.layer_types import PartialRopesConfig
from nnxmoe.config.rope_parameters import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.convert.hf.auxiliary_files import read_config
from nnxmoe.model.family import Family
from nnxmoe.model.family_checks import check_rows
from nnxmoe.models import (
    MODELS,
    PRESETS,
    DeepSeekV3,
    DeepSeekV3Config,
    Llama,
    LlamaConfig,
    MistralConfig,
    Mixtral,
    MixtralConfig,
    config_from_hf,
    family_of,
    model_class,
)
from tests.support.cases import NAMES, load_case
from tests.support.declared import FILE
from tests.support.families import FAMILIES
from tests.support.published import PUBLISHED, described
from tests.support.tiny import TINY, stacking_of
from tests.support.unread_fields import refuse_unread_fields

DATA = Path(__file__).parents[1] / "data"


# Fields without a valid default, of text models that are no rows of ``FAMILIES``.
REQUIRED: dict[str, dict[str, Any]] = {kind: {"head_dim": 128} for kind in ("glm4v_moe_text", "qwen3_omni_moe_text")}


def read(kind: str, **fields: Any) -> Any:
    required = FAMILIES[kind].required if kind in FAMILIES else REQUIRED.get(kind, {})
    return config_from_hf({"model_type": kind, **required, **fields})


# Absent fields

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "kv_heads": 32,
        "head_width": 128,
        "window": None,
        "max_position_embeddings": 2048,
        "intermediate_size": 11008,
        "attention_bias": False,
        "mlp_bias": False,
        "experts_per_token": 0,
    },
    "mistral": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "kv_heads": 8,
        "head_width": 128,
        "window": 4096,
        "max_position_embeddings": 131072,
        "intermediate_size": 14336,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "kv_heads": 8,
        "head_width": 128,
        "window": None,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
    },
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "kv_heads": 128,
        "rope_dim": 64,
        "window": None,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "kv_heads": 20,
        "rope_dim": 64,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "sparse_layers": (False, *(True,) * 46),
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "kv_heads": 32,
        "head_width": 128,
        "intermediate_size": 22016,
        "windows": (None,) * 32,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "kv_heads": 4,
        "head_width": 64,
        "window": None,
        "num_experts": 128,
        "norm_topk_prob": False,
        "sparse_layers": (True,) * 24,
        "bos_token_id": None,
    },
}
DEFAULTS["olmoe"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 16,
    "head_width": 128,
    "intermediate_size": 2048,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
DEFAULTS["deepseek_v2"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "kv_heads": 32,
    "rope_dim": 64,
    "q_lora_rank": 1536,
    "moe_intermediate_size": 1407,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "sparse_layers": (True,) * 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEFAULTS["qwen2_moe"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "kv_heads": 16,
    "head_width": 128,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "sparse_layers": (True,) * 24,
    "qkv_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULTS["glm4_moe"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 8,
    "num_attention_heads": 96,
    "default_rotary_factor": 0.5,
    "window": None,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "attention_bias": False,
    "sparse_layers": (False, *(True,) * 45),
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULTS["solar_open"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "kv_heads": 8,
    "head_width": 128,
    "rope_dim": 128,
    "moe_intermediate_size": 1280,
    "sparse_layers": (True,) * 48,
    "bos_token_id": None,
}
DEFAULTS["dots1"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "kv_heads": 32,
    "head_width": 144,
    "n_shared_experts": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "windows": (None,) * 62,
    "sparse_layers": (True,) * 62,
    "bos_token_id": None,
}
DEFAULTS["minimax_m2"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "kv_heads": 8,
    "head_width": 128,
    "rope_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "intermediate_size": 1536,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}
DEFAULTS["hy_v3"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "kv_heads": 8,
    "head_width": 128,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "router_scaling_factor": 2.826,
    "sparse_layers": (False, *(True,) * 79),
    "eos_token_id": None,
}
DEFAULTS["sarvam_moe"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 8e6,
    "kv_heads": 4,
    "head_width": 64,
    "rope_dim": 64,
    "use_qk_norm": True,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
    "sparse_layers": (False, *(True,) * 18),
}
DEFAULTS["exaone_moe"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 32,
    "windows": (4096, 4096, 4096, None) * 8,
    "num_experts": 64,
    "n_group": 1,
    "routed_scaling_factor": 2.5,
    "sparse_layers": (False, *(True,) * 31),
    "eos_token_id": 53,
}
DEFAULTS["mellum"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "kv_heads": 4,
    "head_width": 128,
    "windows": (None,) * 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "sparse_layers": (True,) * 28,
    "bos_token_id": None,
}
DEFAULTS["afmoe"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 16,
    "head_width": 128,
    "windows": (1024, 1024, 1024, None) * 8,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
    "mup_enabled": False,
    "sparse_layers": (False, *(True,) * 31),
    "eos_token_id": None,
}
DEFAULTS["sarvam_mla"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "kv_heads": 64,
    "rope_dim": 64,
    "q_lora_rank": None,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "sparse_layers": (False, *(True,) * 31),
}
DEFAULTS["smollm3"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
    "kv_heads": 4,
    "windows": (None,) * 36,
    "rotated_layers": [True, True, True, False] * 9,
    "tie_word_embeddings": True,
}
DEFAULTS["olmo3"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "kv_heads": 32,
    "windows": (4096, 4096, 4096, None) * 8,
    "eos_token_id": 50279,
}
DEFAULTS["phi3"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 32,
    "rope_dim": 96,
    "window": None,
    "original_max_position_embeddings": 4096,
}
DEFAULTS["gemma3_text"] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_theta": 1e4,
    "kv_heads": 4,
    "head_width": 256,
    "query_scale": 1 / 16,
    "windows": ((4096,) * 5 + (None,)) * 4 + (4096, 4096),
    "tie_word_embeddings": True,
}
DEFAULTS["exaone4"] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_heads": 32,
    "windows": (4096, 4096, 4096, None) * 8,
    "eos_token_id": 2,
}
DEFAULTS["kimi_k2"] = DEFAULTS["deepseek_v3"]
DEFAULTS["qwen3"] = DEFAULTS["qwen2"] | {"attention_bias": False}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_of_absent_fields(kind: str) -> None:
    config = read(kind, **(FAMILIES[kind].required if kind in FAMILIES else {}))
    for name, value in ({"tie_word_embeddings": False, "hidden_act": "silu"} | DEFAULTS[kind]).items():
        assert getattr(config, name) == value, name
    assert isinstance(config.rope, Rope) and type(config.rope) is Rope
    assert config.rope.theta == DEFAULTS[kind]["rope_theta"]
    assert type(config) is MODELS[kind][0]


@pytest.mark.wrong_types
def test_null_fields() -> None:
    """Null means no window, as many KV heads as query heads, head width by division, and no query latents."""
    assert read("mistral", sliding_window=None).window is None
    for kind in ("llama", "mistral", "mixtral"):
        config = read(kind, num_key_value_heads=None, head_dim=None, hidden_size=1024, num_attention_heads=16)
        assert (config.kv_heads, config.head_width) == (16, 64)
    deepseek = read("deepseek_v3", num_key_value_heads=None, q_lora_rank=None, n_shared_experts=None, head_dim=None)
    assert (deepseek.kv_heads, deepseek.q_lora_rank, deepseek.n_shared_experts) == (128, None, None)
    assert read("llama", rope_scaling=None, rope_parameters=None).rope == Rope(128, 1e4)
    assert read("llama", eos_token_id=None, pad_token_id=None, bos_token_id=None).eos_token_id is None
    for name in ("rms_norm_eps", "vocab_size", "hidden_act", "num_hidden_layers", "tie_word_embeddings"):
        with pytest.raises(ConfigError, match=rf"{name}.* None"):
            read("llama", **{name: None})


@pytest.mark.wrong_types
def test_token_ids() -> None:
    """Ids of no token are reported, as transformers warns; a pad id beyond the vocabulary is refused, as it does."""
    assert read("llama", eos_token_id=[7, 9]).eos_token_id == (7, 9)
    for fields in ({"eos_token_id": [2, 32000]}, {"eos_token_id": -1}, {"bos_token_id": 32000}):
        assert read("llama", **fields) and "not in the vocabulary" in LlamaConfig.notes(fields)[0]
    for pad in (-1, -32000, 0):
        assert read("llama", pad_token_id=pad) and not LlamaConfig.notes({"pad_token_id": pad})
    wrong = ({"eos_token_id": "2"}, {"eos_token_id": []}, {"bos_token_id": [1]}, {"bos_token_id": 1.0})
    for fields in (*wrong, {"pad_token_id": 32000}, {"pad_token_id": -32001}, {"eos_token_id": True}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            read("llama", **fields)


def test_dtype_and_torch_dtype() -> None:
    assert read("llama", torch_dtype="bfloat16").dtype == "bfloat16"
    assert read("llama", dtype="float16").dtype == "float16"
    assert read("llama", dtype="float16", torch_dtype="bfloat16").dtype == "float16"


def test_field_aliases() -> None:
    assert read("mixtral", num_experts=16).num_local_experts == 16
    assert read("deepseek_v3", num_local_experts=64).n_routed_experts == 64
    assert read("deepseek_v3", num_mtp_layers=3).num_nextn_predict_layers == 3
    assert read("qwen3_moe", num_local_experts=16).num_experts == read("qwen3_moe", num_experts=16).num_experts == 16
    assert read("glm4_moe_lite", head_dim=32, num_local_experts=32).qk_rope_head_dim == 32


def test_kinds_of_layers() -> None:
    """Layers with experts and with a window, by each of the fields that name them."""
    assert read("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2).sparse_layers == (False, True, False, True)
    only = read("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1])
    assert only.sparse_layers == (False, False, False, True)
    lite = read("glm4_moe_lite", num_hidden_layers=2, mlp_layer_types=["sparse", "dense"])
    assert lite.sparse_layers == (True, False) and lite.to_hf()["mlp_layer_types"] == ["sparse", "dense"]
    four: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 7}
    kinds = ["full_attention", "sliding_attention"] * 2
    for kind in ("qwen2", "qwen3"):
        assert read(kind, **four, max_window_layers=0).windows == (None,) * 4
        used = four | {"use_sliding_window": True}
        assert read(kind, **used).windows == (None,) * 4
        assert read(kind, **used, max_window_layers=3).windows == (None, None, None, 7)
        assert read(kind, **used, max_window_layers=0, layer_types=kinds).windows == (None, 7, None, 7)
    assert read("qwen3_moe", **four, use_sliding_window=True).window == 7
    experts = four | FAMILIES["dots1"].required
    assert read("dots1", **experts, max_window_layers=3).windows == (None, None, None, 7)
    assert read("dots1", **experts, layer_types=kinds).windows == (None, 7, None, 7)
    assert read("dots1", **experts | {"sliding_window": None}, max_window_layers=0).windows == (None,) * 4
    assert read("dots1", **experts, first_k_dense_replace=3).sparse_layers == (False, False, False, True)


def test_deepseek_head_dim_is_ignored_for_the_rope_width() -> None:
    for given in (None, 1, 128):
        config = read("deepseek_v3", head_dim=given, qk_rope_head_dim=32)
        assert config.rope_dim == config.rope.dim == 32


# Rope


def test_rope_precedence() -> None:
    """rope_scaling over rope_parameters; rope_type over type; the nested theta over the top-level one."""
    linear, dynamic = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 3.0}
    assert isinstance(read("llama", rope_scaling=linear, rope_parameters=dynamic).rope, LinearRope)
    assert isinstance(read("llama", rope_parameters=dynamic).rope, DynamicRope)
    assert isinstance(read("llama", rope_scaling={}, rope_parameters=dynamic).rope, DynamicRope)
    assert isinstance(read("llama", rope_scaling={"type": "linear", "factor": 2}).rope, LinearRope)
    both = {"type": "linear", "rope_type": "dynamic", "factor": 2.0}
    assert isinstance(read("llama", rope_scaling=both).rope, DynamicRope)
    assert read("llama", rope_theta=5.0, rope_parameters={"rope_theta": 7.0}).rope.theta == 7
    assert read("llama", rope_theta=5.0, rope_parameters={"rope_type": "default"}).rope.theta == 5
    assert read("mixtral", rope_parameters={"rope_type": "default"}).rope.theta == 1e6


def test_partial_rotation() -> None:
    """The fraction of the head width, in both styles; the rest of the rope object is kept."""
    read_glm = functools.partial(read, "glm4_moe", head_dim=10)
    for factor, width in ((0.45, 4), (0.6, 6), (1.0, 10), (1, 10)):
        for fields in ({"partial_rotary_factor": factor}, {"rope_parameters": {"partial_rotary_factor": factor}}):
            config = read_glm(**fields)
            assert (config.rope_dim, config.rope, config.head_width) == (width, Rope(width, 1e4), 10)
            assert config_from_hf(config.to_hf()) == config
    both = {"partial_rotary_factor": 0.6, "rope_theta": 50.0, "rope_type": "linear", "factor": 3.0}
    assert read_glm(rope_parameters=both, partial_rotary_factor=0.6).rope == LinearRope(6, 50.0, 3.0)
    assert read_glm(rope_scaling={"type": "linear", "factor": 3.0}, rope_parameters=both, head_dim=12).rope_dim == 6
    assert read("glm4_moe", head_dim=128).rope_dim == 64
    assert "partial_rotary_factor" not in read("glm4_moe", head_dim=128).to_hf()
    minimax = functools.partial(read, "minimax_m2", head_dim=22)
    assert (minimax().rope_dim, minimax(rotary_dim=6).rope, minimax(rotary_dim=None).rope_dim) == (22, Rope(6, 5e6), 22)
    for fields in ({}, {"rotary_dim": 6}):
        nested = minimax(rope_parameters={"partial_rotary_factor": 0.3}, **fields)
        assert nested.rope_dim == 6 and config_from_hf(nested.to_hf()) == nested


def test_original_positions_precedence() -> None:
    """A top-level key wins over the one in the rope object, which wins over max_position_embeddings."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    inside = rope | {"original_max_position_embeddings": 100}
    made = read("llama", rope_scaling=inside, original_max_position_embeddings=50).rope
    assert isinstance(made, Llama3Rope) and made.original_positions == 50
    assert read("llama", rope_scaling=inside).rope.original_positions == 100
    assert read("llama", rope_scaling=rope, max_position_embeddings=300).rope.original_positions == 300


def temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def test_yarn() -> None:
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    made = read("llama", rope_scaling=rope).rope
    assert isinstance(made, YarnRope)
    assert (made.beta_fast, made.beta_slow, made.truncate) == (32, 1, True)
    assert made.attention_factor == pytest.approx(temperature(40))
    assert read("llama", rope_scaling=rope | {"attention_factor": 0.5}).rope.attention_factor == 0.5
    assert read("llama", rope_scaling=rope | {"mscale": 1.0}).rope.attention_factor == pytest.approx(temperature(40))
    one = read("llama", rope_scaling=rope | {"mscale": 0.7, "mscale_all_dim": 1.3}).rope.attention_factor
    assert one == pytest.approx(temperature(40, 0.7) / temperature(40, 1.3))
    null = {"type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert read("llama", rope_scaling=null, max_position_embeddings=2048).rope.scale == 4
    plain = read("deepseek_v3")
    assert plain.softmax_scale == pytest.approx(192**-0.5)
    scaled = read("deepseek_v3", rope_scaling=rope | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert scaled.rope.attention_factor == 1
    assert scaled.softmax_scale == pytest.approx(192**-0.5 * temperature(40) ** 2)
    assert read("deepseek_v3", rope_scaling=rope).softmax_scale == pytest.approx(192**-0.5)


def test_rope_frequencies_of_llama3_and_yarn() -> None:
    """Llama 3.1 keeps high frequencies and divides low ones by 8; YaRN keeps high ones and divides low ones by 40."""
    plain = np.asarray(Rope(128, 5e5).frequencies(jnp.int32(1)))
    llama3 = np.asarray(PRESETS["llama-3.1-8b"].rope.frequencies(jnp.int32(1)))
    assert np.allclose(llama3[:20], plain[:20]) and np.allclose(llama3[-20:], plain[-20:] / 8)
    assert np.all(np.diff(llama3) < 0)
    yarn = np.asarray(PRESETS["deepseek-v3"].rope.frequencies(jnp.int32(1)))
    plain = np.asarray(Rope(64, 1e4).frequencies(jnp.int32(1)))
    assert np.allclose(yarn[:8], plain[:8]) and np.allclose(yarn[-6:], plain[-6:] / 40)


# Errors

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
    ("llama", {"hidden_size": -1}, "hidden_size must be a positive integer, got -1"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers .* 2.5"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers .* True"),
    ("llama", {"num_attention_heads": "32"}, "num_attention_heads .* '32'"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads .* 0"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads .* 0"),
    ("llama", {"num_key_value_heads": 5}, "num_attention_heads 32 .* num_key_value_heads 5"),
    ("llama", {"hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 100 .* head_dim"),
    ("llama", {"head_dim": 7}, "even width, got 7"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps .* -1e-05"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps .* nan"),
    ("llama", {"rope_theta": 0}, "rope_theta .* 0"),
    ("llama", {"rope_theta": "10000"}, "rope_theta .* '10000'"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings .* 'false'"),
    ("llama", {"attention_bias": "false"}, "attention_bias .* 'false'"),
    ("llama", {"mlp_bias": None}, "mlp_bias .* None"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object or null, got 'yarn'"),
    ("llama", {"rope_scaling": {"type": "su"}}, "rope type 'su' is not supported"),
    ("llama", {"rope_scaling": {"type": "longrope"}}, "rope: short_factor must list 64 numbers, .* got None"),
    (
        "qwen2",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0]}},
        "rope: long_factor must list 64 numbers, one per frequency",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [0] * 64}},
        "rope: long_factor must be a positive number|rope: long_factor 0 is out of range",
    ),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported for phi3"),
    ("phi3", {"rope_scaling": {"type": "su"}}, "rope: short_factor must list 48 numbers"),
    ("phi3", {"partial_rotary_factor": 0.01}, "rotates no dimensions"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias True is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers \(1, 0\) must list 1 or 0 for each of the 36 layers"),
    ("smollm3", {"no_rope_layers": [2] * 36}, "no_rope_layers .* must list 1 or 0"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive integer, got 0"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "use_sliding_window true and a sliding_window; got False"),
    ("olmo3", {"rope_theta": 1e4}, "rope_theta 10000.0 is not supported without rope_parameters"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has the field 'rope_theta': set one object"),
    ("olmo3", {"rope_scaling": [1]}, r"rope_scaling must be an object or null, got \[1\]"),
    ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "factor 8.0 has no effect without a rope_type"),
    ("olmo3", {"sliding_window": None}, "'sliding_attention' layers, which need a sliding_window: got None"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; supported: None"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern 0 must be an integer >= 1"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive integer, got 0"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG' must be an integer >= 1"),
    ("exaone4", {"layer_types": ["chunked"] * 32}, "layer_types: 'chunked' is not supported"),
    ("llama", {"auto_map": {"AutoConfig": "a.B"}, "rope_scaling": {"type": "su", "long_factor": [1]}}, "type 'su'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor .* 0"),
    ("llama", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}, "rope: yarn needs factor"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor .* '2'"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": "1", "mscale_all_dim": 1}}, "mscale .* '1'"),
    (
        "llama",
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor 4.* high_freq_factor 4",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings .* 0.5",
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window .* 0"),
    ("mixtral", {"sliding_window": -4}, "sliding_window .* -4"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts .* 0"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* num_local_experts 8"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek_v3", {"n_group": 7}, "n_group 7 .* n_routed_experts 256"),
    ("deepseek_v3", {"n_group": 256, "topk_group": 8}, "n_group 256 .* at least 2"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 65, "topk_group": 1}, "n_group 65 .* least 1"),
    ("deepseek_v3", {"topk_group": 9}, "topk_group 9 .* n_group 8"),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok 33 .* 32 experts"),
    ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads 8 must equal num_attention_heads 128"),
    ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank .* 0"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank .* None"),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, "even width, got 5"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace .* -1"),
    ("deepseek_v3", {"n_shared_experts": 1.5}, "n_shared_experts .* 1.5"),
    ("deepseek_v3", {"norm_topk_prob": "false"}, "norm_topk_prob .* 'false'"),
    ("deepseek_v3", {"rope_interleave": 1}, "rope_interleave .* 1"),
    ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor .* None"),
    ("deepseek_v3", {"routed_scaling_factor": -2.5}, "routed_scaling_factor .* -2.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported: None, 1"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("kimi_k2", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types lists 1 layers, not 80"),
    ("sarvam_moe", {"use_bias": True}, "use_bias True is not supported"),
    (
        "sarvam_moe",
        {"use_qkv_bias": True, "attention_bias": False},
        "use_qkv_bias True and attention_bias False set the same",
    ),
    ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG' must be an integer"),
    ("exaone_moe", {"sliding_window_pattern": 0}, "sliding_window_pattern 0 must be an integer >= 1"),
    ("exaone_moe", {"n_group": 3}, "n_group 3 must divide num_experts 64"),
    ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types lists 1 layers, not 32"),
    ("mellum", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
    ("mellum", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has no object for 'full_attention' layers"),
    ("mellum", {"layer_types": ["sliding_attention"] * 28, "sliding_window": None}, "need a sliding_window"),
    ("mellum", {"mlp_layer_types": ["sparse", 1]}, "mlp_layer_types: 1 is not supported"),
    ("mellum", {"num_experts": 4}, "num_experts_per_tok 8 is more than num_experts 4"),
    (
        "mimo_v2_flash",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters has no object for 'sliding_atten",
    ),
    *(
        (
            kind,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}, "rope_theta": 5.0},
            "rope_parameters: sliding_attention: rope_theta is missing and has no default",
        )
        for kind in ("gemma4_text", "mimo_v2_flash")
    ),
    ("deepseek_v4", {"rope_parameters": {"main": {"rope_theta": 5.0}}}, "has 'main', but must have both main and"),
    ("deepseek_v41_text", {"engram_layer_ids": [1, 14]}, r"engram_layer_ids \[1, 14\]: memory layers"),
    ("deepseek_v41_text", {"compress_ratios": [2] * 39}, "compress_ratios lists 39 layers, not 40"),
    (
        "deepseek_v41_text",
        {"compress_ratios": [1 << 17] * 40},
        "compress_ratios: expected integers from 0 to 65536, got 131072",
    ),
    ("deepseek_v41_text", {"kv_source_layer_ids": [3, 20]}, "layer 2 with compress ratio 2 requires that it or the"),
    (
        "deepseek_v41_text",
        {"kv_source_layer_ids": [2, 8, 14]},
        "layer 20 with compress ratio 1 requires that it or the",
    ),
    (
        "deepseek_v41_text",
        {"kv_source_layer_ids": [0, 2, 8, 14, 20]},
        "kv_source_layer_ids: 0 is not a layer with compr",
    ),
    ("deepseek_v41_text", {"index_source_layer_ids": [1]}, "index_source_layer_ids: 1 is not a layer with compressed"),
    (
        "deepseek_v41_text",
        {"index_source_layer_ids": [2, 20]},
        "layer 8 with compress ratio 2 .* is in index_source_lay",
    ),
    (
        "deepseek_v41_text",
        {"candidate_source_layer_id": 14},
        "candidate_source_layer_id 14 must be in index_source_lay",
    ),
    (
        "deepseek_v41_text",
        {"candidate_topk_blocks": 64},
        "candidate_topk_blocks 64 with candidate_block_size 8 may",
    ),
    ("deepseek_v41_text", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ("deepseek_v41_text", {"gate_temp": 0}, "gate_temp must be a positive number, got 0"),
    ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
    ("mimo_v2_flash", {"n_group": 3}, "n_group 3 must divide n_routed_experts 256"),
    (
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse"] * 60, "index_n_heads": 3},
        "index_n_heads 3 must divide num_key_value_heads 4, or be a multiple of num_key_value_heads",
    ),
    (
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse"] * 60, "index_head_dim": 64},
        "index_head_dim 64 is le",
    ),
    (
        "minimax_m3_vl_text",
        {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_local_block": 17}},
        "index_local_blocks 17 is more than index_topk_blocks 16",
    ),
    ("minimax_m3_vl_text", {"sparse_attention_config": 3}, "sparse_attention_config must be an object or null, got 3"),
    ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_attention_freq": [1]}}, "layer_types lists 1 layers"),
    ("minimax_m3_vl_text", {"moe_layer_freq": 1}, "mlp_layer_types: expected a list with 0 or 1 for each layer, got 1"),
    ("step3p5", {"swiglu_limits": [1.0]}, "swiglu_limits .* must list 45 numbers, one per layer"),
    ("step3p5", {"swiglu_limits_shared": [-1.0] * 45}, "swiglu_limits_shared must be a positive number, got -1.0"),
    (
        "step3p5",
        {"attention_other_setting": {"num_attention_heads": 12}},
        "num_sliding_attention_heads 12 is not a mul",
    ),
    (
        "step3p5",
        {"per_layer_config": {"0": {"num_attention_heads": 8}}},
        "differs from num_sliding_attention_heads None",
    ),
    ("step3p5", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has no object for 'full_attention' layers"),
    ("step3p5", {"moe_layers_enum": "3,x"}, "moe_layers_enum must list layer indices, got '3,x'"),
    ("step3p5", {"moe_layers_enum": 3}, "moe_layers_enum must list layer indices, got 3"),
    ("step3p5", {"rope_theta": [1e4]}, "rope_theta lists 1 layers, not 45 as in num_hidden_layers"),
    ("step3p5", {"partial_rotary_factors": ["x"] * 45}, "partial_rotary_factor must be a positive number, got 'x'"),
    ("step3p5", {"attention_other_setting": 3}, "attention_other_setting must be an object or null, got 3"),
    ("step3p5", {"num_hidden_layers": "x", "layer_types": 3}, "num_hidden_layers must be a positive integer"),
    ("step3p5", {"layer_types": "full"}, "layer_types must list the type of each layer, got 'full'"),
    ("step3p5", {"rope_scaling": "linear"}, "rope_scaling must be an object or null, got 'linear'"),
    ("step3p5", {"sink": True}, "sink True is not supported"),
    ("laguna", {"gating": False}, "gating False is not supported; supported: True, 'per-head', 'per-element'"),
    ("laguna", {"num_attention_heads_per_layer": [48] * 39}, "must list a multiple of num_key_value_heads 8 for each"),
    ("laguna", {"num_attention_heads_per_layer": [12] * 40}, "must list a multiple of num_key_value_heads 8 for each"),
    ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input True is not supported"),
    ("laguna", {"moe_router_logit_softcapping": -1}, "moe_router_logit_softcapping -1 is out of range"),
    ("kimi_linear", {"linear_attn_config": [1]}, r"linear_attn_config must be an object or null, got \[1\]"),
    (
        "kimi_linear",
        {"num_hidden_layers": 3, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
        r"kda_layers \[1, 2\] and full_attn_layers \[2\] must list each of the layers 1 … 3 once",
    ),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "linear_head_dim must be a positive integer, got 0"),
    ("bailing_hybrid", {"linear_head_dim": 0}, "linear_head_dim must be a positive integer, got 0"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False is not supported"),
    ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ("kimi_linear", {"layer_types": ["linear"] * 27}, "layer_types: 'linear' is not supported"),
    ("kimi_linear", {"num_experts": 4, "n_routed_experts": 8}, "num_experts 4 and n_routed_experts 8 set the same"),
    ("kimi_k3", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: 'situ'"),
    ("kimi_linear", {"hidden_act": "situ", "attn_res_block_size": None}, "attn_res_block_size must be a positive int"),
    ("kimi_k3", {"activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta must be a positive number, got 0.0"),
    ("kimi_k3", {"linear_attn_config": {"gate_lower_bound": 1}}, "linear_lower_bound 1 is out of range"),
    ("kimi_k3", {"mlp_layer_types": ["dense"] * 93}, "mlp_layer_types .* is not supported"),
    ("kimi_k3", {"mla_use_nope": False}, "mla_use_nope False is not supported"),
    ("kimi_k3", {"routed_expert_hidden_size": 0}, "routed_expert_hidden_size must be a positive integer"),
    ("glm5_next_text", {"index_topk": 100}, "index_topk 100 is not a multiple of index_kpool 16"),
    (
        "glm5_next_text",
        {"indexer_types": ["full"] * 3 + ["shared"] * 42},
        "layer 3 has a shared indexer, but recurrent layers",
    ),
    ("glm5_next_text", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False is not supp"),
    ("glm5_next_text", {"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported; supported: 0"),
    ("glm5_next_text", {"linear_attn_config": {"gate_lower_bound": 1}}, "linear_lower_bound 1 is out of range"),
    ("glm5_next_text", {"layer_types": ["window"] * 45}, "layer_types: 'window' is not supported"),
    ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "vocab_size .* is more than"),
    ("gemma4_text", {"num_kv_shared_layers": 30}, "layer 0 requires a sliding_attention layer before layer 0"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 30},
        "num_kv_shared_layers 1: layer 29 requires a full_attention layer before layer 29",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MEX"}, r"hybrid_override_pattern must have one of M \* - E per layer"),
    ("nemotron_h", {"hybrid_override_pattern": ["M"]}, r"hybrid_override_pattern must have .*, got \['M'\]"),
    ("nemotron_h", {"layers_block_type": ["mamba", "window"]}, "layer_types: 'window' is not supported"),
    ("nemotron_h", {"layers_block_type": []}, "layer_types must list the type of each layer"),
    ("nemotron_h", {"mamba_num_heads": 12}, "mamba_num_heads 12 is not a multiple of n_groups 8"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: 'relu2'"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
    ("nemotron_h", {"time_step_min": -1}, "time_step_min -1 is out of range"),
    ("nemotron_h", {"time_step_min": float("inf")}, "time_step_min must be a finite number, got inf"),
    ("granite", {"embedding_multiplier": 0}, "embedding_multiplier must be a positive number, got 0"),
    ("granite", {"attention_multiplier": None}, "attention_multiplier must be a positive number, got None"),
    ("granite", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is not supported for granite"),
    ("granitemoe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
    ("granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size must be .* got -1"),
    ("granitemoehybrid", {"layer_types": ["window"] * 32}, "layer_types: 'window' is not supported"),
    ("granitemoehybrid", {"layer_types": "mamba"}, "layer_types must list the type of each layer, got 'mamba'"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    ("granitemoehybrid", {"time_step_limit": [0.1, 1.0]}, r"time_step_limit \[0.1, 1.0\] is not supported"),
    ("granitemoehybrid", {"mamba_d_head": 3}, "mamba_n_heads 128 times mamba_d_head 3 must equal mamba_expand 2 times"),
    ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_heads 128 is not a multiple of mamba_n_groups 3"),
    ("granitemoehybrid", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer unless"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size must be a positive integer, got 0"),
    ("lfm2", {"layer_types": ["conv"]}, "layer_types lists 1 layers, not 32"),
    ("lfm2", {"layer_types": ["mamba"] * 32}, "layer_types: 'mamba' is not supported; supported: conv, full_attention"),
    ("lfm2", {"block_ff_dim": 8, "intermediate_size": 9}, "block_ff_dim 8 and intermediate_size 9 set the same field"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be a positive integer, got 1"),
    ("lfm2", {"intermediate_size": 1}, "intermediate_size 1: block_auto_adjust_ff_dim reduces it to 0"),
    ("lfm2_moe", {"num_experts": 1}, "num_experts must be a positive integer, got 1"),
    ("lfm2_moe", {"num_experts": 3}, "num_experts_per_tok 4 is more than num_experts 3"),
    ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound 0.5 is out of range: .* above -1000"),
    ("bailing_hybrid", {"kda_lower_bound": "-5"}, "kda_lower_bound must be a finite number, got '-5'"),
    ("bailing_hybrid", {"layer_group_size": 0}, "layer_group_size must be a positive integer, got 0"),
    ("afmoe", {"route_norm": False}, "route_norm False is not supported"),
    ("afmoe", {"num_expert_groups": 2}, "num_expert_groups 2 is not supported"),
    ("afmoe", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers .* 0"),
    ("afmoe", {"num_experts": 4}, "num_experts_per_tok 6 is more than num_experts 4"),
    ("ministral3", {"rope_parameters": {"type": "default"}}, "llama_4_scaling_beta must be a number .* None"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta must be .* -1"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings is missing"),
    ("sarvam_mla", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
    ("sarvam_mla", {"num_experts": 4, "n_routed_experts": 8}, "num_experts 4 and n_routed_experts 8 set the same"),
    ("sarvam_mla", {"rope_scaling": {"type": "deepseek_yarn"}}, "yarn needs factor"),
    ("hy_v3", {"route_norm": False}, "route_norm False is not supported"),
    (
        "hy_v3",
        {"expert_hidden_dim": 8, "moe_intermediate_size": 16},
        "expert_hidden_dim 8 and moe_intermediate_size 16",
    ),
    ("hy_v3", {"num_experts": 4}, "num_experts_per_tok 8 is more than num_experts 4"),
    ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts .* 0"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types lists 1 layers, not 47"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", 3]}, "mlp_layer_types: 3 is not supported; .* dense, sparse"),
    ("glm4_moe_lite", {"mlp_layer_types": "dense"}, "mlp_layer_types must list .* 'dense'"),
    ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace 3 is not supported"),
    ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("glm4_moe_lite", {"head_dim": 128, "qk_rope_head_dim": 64}, "head_dim 128 and qk_rope_head_dim 64"),
    ("glm4_moe", {"head_dim": 10}, "partial_rotary_factor: .* even width, got 5"),
    ("glm4_moe", {"head_dim": 6, "partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 of .* 6 rotates no dim"),
    ("glm4_moe", {"head_dim": 8, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 is out of range"),
    ("glm4_moe", {"head_dim": 8, "partial_rotary_factor": "0.5"}, "partial_rotary_factor .* '0.5'"),
    ("glm4_moe", {"head_dim": 8, "rope_parameters": {"partial_rotary_factor": True}}, "rope: partial_.* True"),
    (
        "glm4_moe",
        {"head_dim": 8, "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor 0.5 and the rope object's 0.25 differ: remove one",
    ),
    ("glm4_moe", {"head_dim": None}, "hidden_size 4096 is not a multiple of num_attention_heads 96: set head_dim"),
    ("glm4_moe", {"head_dim": 8, "topk_group": 2}, "topk_group 2 is more than n_group 1"),
    ("glm4_moe", {"head_dim": 8, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ("dots1", {"n_routed_experts": None}, "n_routed_experts must be a positive integer, got None"),
    ("dots1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (
        "dots1",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "num_hidden_layers": 1}
        | {"layer_types": ["sliding_attention"]},
        "layer_types has 'sliding_attention' layers, which need a sliding_window: got None",
    ),
    ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace 1 is not supported; supported: 0"),
    ("solar_open", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
    ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("minimax_m2", {"rotary_dim": 5}, "rotary_dim: .* even width, got 5"),
    ("minimax_m2", {"rotary_dim": 0}, "rotary_dim .* 0"),
    ("minimax_m2", {"rotary_dim": 256}, "rotary_dim 256 is more than head_dim 128"),
    ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}, "rotary_dim 64 and partial_.* 0.25 differ"),
    ("minimax_m2", {"rotary_dim": 64, "rope_scaling": {"partial_rotary_factor": 1}}, "64 and partial_.* 1 differ"),
    ("minimax_m2", {"attn_type_list": [1] * 61}, "attn_type_list .* is not supported; .* each of the 62 layers"),
    ("minimax_m2", {"attn_type_list": [0, 1] * 31}, "attn_type_list .* is not supported"),
    ("minimax_m2", {"num_local_experts": 1}, "num_local_experts 1 must be at least 2"),
    ("minimax_m2", {"num_experts": 4}, "num_experts_per_tok 8 is more than num_local_experts 4"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported; supported: 'per_layer'"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False"),
    ("minimax_m2", {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01 is not supported"),
    ("minimax_m2", {"shared_intermediate_size": 512}, "shared_intermediate_size 512"),
    ("qwen2", {"layer_types": ["linear_attention"] * 32}, "layer_types: 'linear_attention' is not supported"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "layer_types .* use_sliding_window true"),
    ("qwen3", {"sliding_window": 0}, "sliding_window .* 0"),
    ("qwen3", {"query_pre_attn_scalar": 1.0}, "query_pre_attn_scalar is not supported for qwen3"),
    ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok 8 is more than num_experts 4"),
    ("qwen3_moe", {"num_experts": 64, "num_local_experts": 32}, "num_experts 64 and num_local_experts 32"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step .* 0"),
    ("qwen3_moe", {"mlp_only_layers": [24]}, r"mlp_only_layers must list .* 0 to 23, got .24"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must list .* 3"),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "max_window_layers": 12},
        "max_window_layers 12 is not supported with use_sliding_window",
    ),
    ("qwen3_moe", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size 512 is not supported"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm False"),
    ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is null or missing"),
    ("deepseek_v2", {"topk_method": "gready"}, "topk_method 'gready' is not supported; supported: 'greedy', 'group"),
    ("deepseek_v2", {"topk_method": None}, "topk_method None is not supported"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "requires n_group and topk_group, got None and None"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported; supported: False"),
    ("deepseek_v2", {"rope_interleave": False}, "rope_interleave False is not supported"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not supported"),
    ("deepseek_v2", {"num_experts_per_tok": 65}, "num_experts_per_tok 65 is more than n_routed_experts 64"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window True is not supported; supported: None, False"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 24}, "layer_types: 'sliding_attention' is not supported"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size .* 0"),
    ("qwen2_moe", {"mlp_only_layers": [24]}, r"mlp_only_layers must list .* 0 to 23, got .24"),
    ("qwen2_moe", {"num_experts": 3}, "num_experts_per_tok 4 is more than num_experts 3"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; supported: None"),
    ("deepseek_v2", {"num_experts": 64, "num_local_experts": 32}, "num_experts 64 and num_local_experts 32"),
    ("qwen3", {"partial_rotary_factor": True}, "partial_rotary_factor True is not supported"),
    ("minimax_m2", {"use_grouped_topk": True}, "use_grouped_topk True is not supported"),
    ("olmoe", {"num_experts": 4}, "num_experts_per_tok 8 is more than num_experts 4"),
    ("olmoe", {"query_pre_attn_scalar": 1.0}, "query_pre_attn_scalar is not supported for olmoe"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
@pytest.mark.wrong_types
def test_errors_name_the_field_and_the_value(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(kind, **fields)


def test_unknown_model_type_error_lists_the_supported_ones() -> None:
    """A relative is named as where to begin with a new family, never so that somebody changes the model_type."""
    relatives = {"longcat_flash": "deepseek_v3", "hunyuan_v1_moe": "qwen3_moe", "flex_olmo": "olmoe", "olmo2": "qwen3"}
    for kind in ("gpt2", None, 3, "Llama", *relatives):
        with pytest.raises(ConfigError, match=rf"model_type {kind!r} .*llama, mistral, mixtral, deepseek_v3") as error:
            config_from_hf({"model_type": kind})
        assert str(error.value).endswith(f", {list(MODELS)[-1]}") and len(str(error.value)) < 1200
        relative = relatives.get(kind)
        assert ("changing the model_type would change the results" in str(error.value)) == (relative is not None)
        assert relative is None or f"Its layers differ from the layers of {relative}," in str(error.value)


def test_text_models_without_a_type_of_their_own() -> None:
    """Nested in a multimodal config, or flat under its type, as files of GLM-5.3 without a vision tower."""
    for kind, around in (("glm5_next_text", "glm5_next"), ("step3p5", "step3p7")):
        fields = FAMILIES[kind].frozen
        inner = {name: value for name, value in fields.items() if name != "model_type"}
        for given in (inner | {"model_type": around}, {"model_type": around, "text_config": inner}):
            assert config_from_hf(given) == config_from_hf(fields)


def test_a_declared_field_that_nothing_reads_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class GraniteConfig(LlamaConfig):
        model_type = "granite"
        embedding_multiplier: float = 1.0
        attention_multiplier: float = 1.0

    class Granite(Llama):
        configs = (GraniteConfig,)

        def attention(self, index: int, **kw: Any) -> Any:
            return self.config.attention_multiplier

    with pytest.raises(ConfigError, match="GraniteConfig declares embedding_multiplier, which nothing"):
        refuse_unread_fields(Family(model=Granite, hf={}))


@pytest.mark.parametrize("kind", FAMILIES)
def test_tables_of_the_families_are_complete(kind: str) -> None:
    """Families of the package are not passed to `register`, so its checks run here."""
    config = config_from_hf(FAMILIES[kind].frozen)
    family = family_of(config)
    refuse_unread_fields(family)
    check_rows(family.model(config, rngs=None), family)


@pytest.mark.wrong_types
def test_empty_and_non_dict_configs() -> None:
    with pytest.raises(ConfigError, match="model_type None"):
        config_from_hf({})
    with pytest.raises(ConfigError, match=r"config\.json must contain an object, got list"):
        config_from_hf([])  # type: ignore[arg-type]


@pytest.mark.wrong_types
def test_models_reject_configs_of_other_families() -> None:
    pairs: list[tuple[Any, Any]] = [(Llama, MixtralConfig()), (Mixtral, LlamaConfig()), (DeepSeekV3, MistralConfig())]
    for model, config in pairs:
        with pytest.raises(ConfigError, match=type(config).__name__):
            model(config, rngs=None)


def test_undeclared_fields_are_reported_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Except null, false and empty ones, which ask for nothing, and known harmless ones."""
    nothing = {"a": None, "b": False, "c": {}, "d": [], "e": ""}
    harmless = {"use_cache": True, "transformers_version": "5", "temperature": 0.6, "_name_or_path": "x"}
    harmless |= {"base_model_ep_plan": {"layers.*": "x"}, "base_model_tp_plan": {"a": "b"}, "unk_token_id": 0}
    linear = {"type": "linear", "factor": 2.0}
    fields = {"model_type": "llama", "rope_scaling": linear} | nothing | harmless
    plain = read("llama", rope_scaling=linear)
    assert config_from_hf(fields) == plain and not caplog.text and not LlamaConfig.notes(fields)
    fields |= {"mask_value": -10000, "zero": 0, "rope_scaling": linear | {"mrope_section": [1, 2]}}
    with caplog.at_level("WARNING", logger="nnxmoe"):
        config = config_from_hf(fields)
    assert config == plain and config.to_hf() == plain.to_hf() and len(caplog.records) == 1
    (note,) = LlamaConfig.notes(fields)
    for text in (note, caplog.text):
        assert all(part in text for part in ("mask_value -10000", "zero 0", "rope_scaling.mrope_section [1, 2]"))
        assert "use_cache" not in text and "ep_plan" not in text


@pytest.mark.parametrize("kind", ["mellum", "gemma4_text", "laguna"])
def test_rope_objects_of_two_kinds_of_layers_are_read(kind: str) -> None:
    """Only what a rope object has beyond its known fields is reported."""
    fields = FAMILIES[kind].frozen
    assert not type(config_from_hf(fields)).notes(fields)
    ropes = fields["rope_parameters"]
    odd = fields | {"rope_parameters": ropes | {"full_attention": ropes["full_attention"] | {"mrope_section": [1]}}}
    (note,) = type(config_from_hf(fields)).notes(odd)
    assert note.endswith("rope_parameters.full_attention.mrope_section [1]")


LAYERS = {"num_hidden_layers": 2}
# Undeclared fields, with values that change nothing, and values with which transformers computes something else.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "is_causal": ([None, True], [False, 0, 1, "x"]),
    "is_encoder_decoder": ([None, False], [True]),
    "sliding_window": ([None], [5, 0, False]),
    "attention_chunk_size": ([None], [5, 0, False]),
    "layer_types": ([None, ["full_attention"] * 2], [["full_attention"], ["sliding_attention", "full_attention"], []]),
    "mtp_layer_types": ([None], [["full_attention"]]),
    "kv_sharing_modes": ([None, []], [["reuse", "store"]]),
    "per_layer_config": ([None, {}], [{"0": {"intermediate_size": 16}}, {"1": {"skip": ["mlp"]}}]),
    "attribute_map": ([None], [{"intermediate_size": "hidden_size"}]),
    "text_config": ([None], [{}, {"vocab_size": 3}]),
    "decoder": ([None], [{}]),
    "generator": ([None], ["x"]),
    "cache_implementation": ([None, "static", "dynamic"], ["x", "quantized"]),
    "vision_feature_select_strategy": ([None, "default"], ["x"]),
    "transformers_weights": ([None], ["other.safetensors"]),
}


def test_undeclared_fields_that_transformers_reads_are_refused() -> None:
    for kind in MODELS:
        few = {"num_hidden_layers": 2, "first_k_dense_replace": 0} if kind == "dots1" else LAYERS
        known = MODELS[kind][0].unknown_fields(dict.fromkeys(SHARED, 1))
        for name in known:
            good, bad = SHARED[name]
            for value in good:
                assert read(kind, **few, **{name: value}), (kind, name, value)
            for value in bad:
                with pytest.raises(ConfigError, match=f"{name} .* is not supported for {kind} models"):
                    read(kind, **few, **{name: value})
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    for name in ("swiglu_limit", "hidden_activation", "mlp_gate_softcap"):
        assert read("mixtral", **{name: 7.0}) and read("llama", quantization_config=fp8, **{name: 7.0})
        with pytest.raises(ConfigError, match=f"{name} 7.0 is not supported"):
            read("mixtral", quantization_config=fp8, **{name: 7.0})
    assert read("deepseek_v3", num_nextn_predict_layers=0, chain_hidden_post_norm=False)
    with pytest.raises(ConfigError, match="chain_hidden_post_norm False is not supported"):
        read("deepseek_v3", num_nextn_predict_layers=1, chain_hidden_post_norm=False)


# Read by shared code of transformers, without effect on the logits and ids of a language model that is loaded: they are
# for initialisation, saving, dropout, heads of classifiers, static caches, convolutions and prediction layers.
WITHOUT_EFFECT = """classifier_dropout token_classification_bias distributed_config fusion_config init_std
    initializer_factor encoder tie_last_hidden_states number_of_conv_states qk_head_dim first_k_dense_replace
    mlp_layer_types num_mtp_layers num_local_experts""".split()


def test_every_field_that_transformers_reads_is_field_names() -> None:
    """The list is generated: see `tests.support.declared`."""
    found = json.loads(FILE.read_text())
    assert found["families"].keys() == MODELS.keys()
    judged = SHARED.keys() | {*PREDICTION, *FP8_EXPERTS, *WITHOUT_EFFECT}
    for kind, (config, _) in MODELS.items():
        declared, shared = (dict.fromkeys(found[name], 1) for name in ("all", "shared"))
        own = config.unknown_fields(declared | dict.fromkeys(found["families"][kind], 1))
        assert not own.keys() - SHARED.keys(), (kind, own)
        assert not (left := config.unknown_fields(shared).keys() - judged), (kind, left)
    assert len(found["families"]["deepseek_v3"]) > 30 and "is_causal" in found["shared"]


def test_undeclared_fields_with_code_of_the_repository_are_refused() -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    assert read("llama", **code, use_cache=True, attn_bias_x=False)
    for fields, name in (({"depth_scale": 2}, "depth_scale 2"), ({"rope_scaling": {"finetuned": True}}, "finetuned")):
        with pytest.raises(ConfigError, match=f"{name}.*: unknown to llama models, .*auto_map"):
            read("llama", **code, **fields)


DRAFT, HEAD, OTHER = (
    "draft models for speculative decoding",
    "only causal language models",
    "this language model is not",
)
OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"architectures": [name]}, f"architectures .*{name}.*: {DRAFT} are not supported$")
        for name in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "DFlashDraftModel", "PEagleDraftModel")
    ),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, f"draft_vocab_size 32000: {DRAFT}"),
    ({"eagle_config": {"a": 1}}, f"eagle_config .*: {DRAFT}"),
    ({"architectures": ["LlamaForSequenceClassification"]}, HEAD),
    ({"architectures": ["Qwen3ForTokenClassification"]}, HEAD),
    ({"architectures": ["LlamaForQuestionAnswering"]}, HEAD),
    ({"architectures": ["Grok1ModelForCausalLM"]}, OTHER),
    ({"architectures": ["ForCausalLM"]}, OTHER),
    ({"architectures": ["LlamaModel"]}, "models without an output head"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names or null, got 'LlamaForCausalLM'"),
    ({"architectures": [3]}, "architectures must be a list"),
    (
        {"quantization": {"group_size": 64, "bits": 4}},
        "^quantization .*: checkpoints quantized by MLX .mlx-lm. are not",
    ),
    ({"quantization_config": {"group_size": 64, "bits": 4}}, "^quantization_config .*: checkpoints quantized by MLX"),
]


def test_files_of_other_models_are_refused_in_words() -> None:
    for fields, message in OTHER_MODELS:
        with pytest.raises(ConfigError, match=message):
            read("llama", **fields)
    for names in (None, [], ["LLaMAForCausalLM"], ["DeepseekV3ForCausalLM"], ["Foo", "MistralForCausalLM"]):
        assert read("kimi_k2", architectures=names)
    assert read("qwen3", architectures=["Qwen3Model"], tie_word_embeddings=True)  # saved without the shared head
    for kind, (family, _) in MODELS.items():
        assert read(kind, architectures=[family.architecture])


def test_real_files_are_accepted_and_refused_as_they_should(tmp_path: Path) -> None:
    """config.json files of the hub, alone in a folder too. Those that are refused are of drafts, Grok-1 and MLX."""
    files = [json.loads(line) for line in (DATA / "real_configs.jsonl").read_text().splitlines()]
    assert len(files) > 100
    for file in files:
        if file["accept"]:
            config = config_from_hf(file["fields"])
            assert config_from_hf(config.to_hf()) == config, file["name"]
            (tmp_path / "config.json").write_text(json.dumps(file["fields"]))
            assert read_headers(tmp_path, None, False) == (config, {}) and read_config(tmp_path) == config
        else:
            with pytest.raises(ConfigError, match=r"draft model|Grok1|MLX"):
                config_from_hf(file["fields"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_equal_the_presets(name: str) -> None:
    config = config_from_hf(PUBLISHED[name])
    assert described(config) == described(PRESETS[name]) and type(config) is type(PRESETS[name])


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3.8-2.4t-a95b", "output_gate_type", "sigmoid"),
        ("ling-3.0-tiny", "expert_swiglu_limit_list", [0, 7.0]),
        ("ling-3.0-tiny", "gated_attention_proj_granularity_type", "element_wise"),
        ("ling-3.0-tiny", "partial_rotary_factor", 0.25),
        ("glm-5.3", "moe_router_dtype", "bfloat16"),
    ],
)
def test_published_fields_with_other_values_are_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} .* is not supported"):
        config_from_hf(PUBLISHED[name] | {field: value})


def test_prediction_layers_of_other_structures_are_refused() -> None:
    for name in ("deepseek-v4-flash-0731", "deepseek-v4-pro-0813"):
        with pytest.raises(ConfigError, match="dspark_block_size 5: the layers of the draft model DSpark"):
            model_class(PRESETS[name])(PRESETS[name], nnxmoe.Strategy(), rngs=None, mtp=True)  # type: ignore[call-arg]


# Values


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), *(config_from_hf(f) for f in (*TINY.values(), *(row.frozen for row in FAMILIES.values())))],
)
def test_to_hf_round_trip(config: DecoderConfig) -> None:
    fields = config.to_hf()
    again = config_from_hf(fields)
    assert again == config and type(again) is type(config) and hash(again) == hash(config)
    assert fields["model_type"] == config.model_type and fields["architectures"] == [config.architecture]
    assert fields["rope_theta"] == config.rope.theta, "the only theta of readers of transformers 4"


@pytest.mark.parametrize("name", NAMES)
def test_to_hf_round_trip_of_reference_cases(name: str) -> None:
    """Every supported field of the file is written back with its value."""
    fields = load_case(name).fields
    config = config_from_hf(fields)
    written = config.to_hf()
    assert config_from_hf(written) == config
    assert all(written[key] == value for key, value in fields.items() if key in written and value is not None)


def test_values_that_decide_the_routing_elsewhere_are_saved() -> None:
    for name, scores in (("deepseek-v3", "sigmoid"), ("deepseek-v2", "softmax"), ("minimax-m2", "sigmoid")):
        assert PRESETS[name].to_hf()["scoring_func"] == scores
    assert PRESETS["deepseek-v3"].to_hf()["topk_method"] == "noaux_tc"
    assert PRESETS["minimax-m2"].to_hf()["use_routing_bias"] is True


def test_null_leaves_a_field_to_its_other_name() -> None:
    assert read("qwen3_moe", num_experts=None, num_local_experts=16).experts == 16
    assert read("qwen3_moe", num_local_experts=16, num_experts=None).experts == 16


def test_configs_are_frozen_and_hashable() -> None:
    one, two = (LlamaConfig(rope_scaling={"type": "linear", "factor": 2.0}, eos_token_id=[1, 2]) for _ in range(2))  # type: ignore[arg-type]
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    assert one != dataclasses.replace(one, rope_scaling={"type": "linear", "factor": 3.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.vocab_size = 3  # type: ignore[misc]
    fields: dict[str, Any] = {"type": "linear", "factor": 2.0}
    config = LlamaConfig(rope_scaling=fields)
    fields["factor"] = 5.0
    assert config.rope_scaling is not None and config.rope_scaling["factor"] == 2.0
    with pytest.raises(TypeError):
        config.rope_scaling["factor"] = 3.0  # type: ignore[index]
    ropes = PRESETS["step-3.5-flash"].rope_parameters
    with pytest.raises(TypeError):
        ropes["full_attention"]["rope_theta"] = 1  # type: ignore[index]
    PRESETS["step-3.5-flash"].to_hf()["rope_parameters"]["full_attention"]["rope_theta"] = 1
    assert ropes is not None and ropes["full_attention"]["rope_theta"] != 1, "to_hf returns a copy"


@pytest.mark.wrong_types
def test_window_size_of_mimo_is_an_integer_of_any_library() -> None:
    for size in (63, np.int64(63), np.int16(63)):
        assert (
            dataclasses.replace(config_from_hf(BY_TYPE["mimo_v2_flash"]), sliding_window_size=size).sliding_window == 64
        )
    with pytest.raises(ConfigError, match="sliding_window_size"):
        dataclasses.replace(config_from_hf(BY_TYPE["mimo_v2_flash"]), sliding_window_size=True)


def test_equal_configs_have_equal_hashes() -> None:
    """8 == 8.0, so configs that differ only in this must have equal hashes."""
    nested = FrozenDict({"list": [{"a": 1}]})
    with pytest.raises(TypeError):
        nested["list"][0]["a"] = 2
    assert thaw(nested) == {"list": [{"a": 1}]} and hash(nested) == hash(copy.deepcopy(nested))
    one, two = FrozenDict({"factor": 8, "betas": [1, 2]}), FrozenDict({"betas": (1, 2), "factor": 8.0})
    assert one == two and hash(one) == hash(two)


# Presets

SIZES = {
    "gemma-4-26b-a4b": 25.2e9,
    "gemma-4-31b": 30.7e9,
    "ernie-4.5-21b-a3b": 21.8e9,
    "ernie-4.5-vl-28b-a3b": 21.8e9,  # of the text model
    "mistral-small-4": 119e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.1-405b": 405.9e9,
    "llama-3.2-1b": 1.236e9,
    "mistral-7b-v0.1": 7.24e9,
    "mistral-7b-v0.3": 7.25e9,
    "mixtral-8x7b": 46.7e9,
    "mixtral-8x22b": 140.6e9,
    "deepseek-v3": 671.0e9,
    "deepseek-r1": 671.0e9,
    "deepseek-v3.2-exp": 671.9e9,  # 671.0e9, and 0.85e9 of the indexers
    "deepseek-v3.2": 671.9e9,
    "deepseek-v4-flash": 284e9,
    "deepseek-v4-flash-0731": 284e9,
    "deepseek-v4-pro": 1.6e12,
    "deepseek-v4-pro-0813": 1.6e12,
    "qwen3-next-80b-a3b": 80e9,
    "qwen3.5-35b-a3b": 34.7e9,  # of the text model
    "qwen3.5-397b-a17b": 396.3e9,
    "qwen3.8-27b": 26.9e9,  # of the text model
    "qwen3.8-2.4t-a95b": 2.42e12,  # 2.45e12 with the prediction layer
    "qwen3.8-flash-next": 176.9e9,  # 180.0 in all files with the vision tower and the prediction layer
    "glm-5": 744e9,
    "glm-5.2": 743e9,
    "glm-5.3": 743e9,  # published for GLM-5, which has an indexer in every layer: 744e9
    "kimi-k2": 1.03e12,
    "kimi-k2.5": 1.03e12,
    "kimi-k2.7-code": 1.03e12,
    "moonlight-16b-a3b": 16.0e9,
    "glm-4.7-flash": 30e9,
    "qwen2.5-0.5b": 0.49e9,
    "qwen2.5-1.5b": 1.54e9,
    "qwen2.5-3b": 3.09e9,
    "qwen2.5-7b": 7.62e9,
    "qwen2.5-72b": 72.7e9,
    "qwen3-0.6b": 0.6e9,
    "qwen3-1.7b": 1.7e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.8e9,
    "qwen3-32b": 32.8e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235.1e9,
    "qwen3-coder-30b-a3b": 30.5e9,
    "qwen3-omni-30b-a3b": 30.5e9,  # of the thinker's text model
    "qwen3-coder-480b-a35b": 480.2e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
    "olmoe-1b-7b": 6.92e9,
    "deepseek-v2": 235.7e9,
    "qwen1.5-moe-a2.7b": 14.3e9,
    "qwen2-57b-a14b": 57.4e9,
    "deepseek-v2-lite": 15.7e9,
    "glm-4.5-air": 106.9e9,
    "glm-4.5v": 106.9e9,  # of the text model
    "glm-4.5": 352.8e9,
    "glm-4.6": 352.8e9,
    "glm-4.7": 352.8e9,
    "dots.llm1": 142.8e9,
    "solar-open-100b": 102.7e9,
    "minimax-m2": 228.7e9,
    "hy3": 295e9,
    "hy4-preview": 770e9,
    "sarvam-105b": 106e9,
    "sarvam-30b": 32e9,
    "mistral-small-3.1-24b": 23.6e9,
    "ministral-3-8b": 8.4e9,
    "k-exaone-236b-a23b": 236e9,
    "mellum2-12b-a2.5b": 12e9,
    "mimo-v2-flash": 309e9,
    "step-3.5-flash": 196e9,
    "kimi-linear-48b-a3b": 49.1e9,
    "kimi-k3": 2.78e12,  # 2.8e12 with the vision tower
    "nemotron-3-nano-30b-a3b": 31.6e9,
    "nemotron-3.5-lightning-30b-a3b": 31.6e9,
    "minimax-m3": 426e9,  # of the text model; 427e9 with the vision tower and projector
    "granite-3.3-8b": 8.17e9,
    "granite-3.1-1b-a400m": 1.33e9,
    "granite-4.0-h-350m": 0.34e9,
    "lfm2-1.2b": 1.17e9,
    "lfm2.5-2.6b": 2.6e9,
    "lfm2-8b-a1b": 8.3e9,
    "glm-5.3-flash": 313e9,  # 321 with the layer for multi-token prediction
    "ling-3.0-flash": 124e9,
    "ling-3.0-tiny": 7.9e9,
    "trinity-nano": 6e9,
    "trinity-mini": 26e9,
    "smollm3-3b": 3.08e9,
    "olmo-3-7b": 7.3e9,
    "olmo-3-32b": 32.2e9,
    "phi-4": 14.7e9,
    "phi-4-mini": 3.84e9,
    "gemma-3-270m": 268e6,
    "gemma-3-1b": 1.0e9,
    "gemma-3-4b": 3.88e9,  # of the text models
    "gemma-3-12b": 11.8e9,
    "gemma-3-27b": 27.0e9,
    "exaone-4.0-1.2b": 1.28e9,
    "exaone-4.0-32b": 32.0e9,
    "qwen3-vl-2b": 1.72e9,
    "qwen3-vl-4b": 4.02e9,
    "qwen3-vl-8b": 8.19e9,
    "qwen3-vl-30b-a3b": 30.5e9,
}

# Published numbers of parameters that a token uses. Most of them leave out the embedding, and some also the head.
ACTIVE = {
    "qwen3.8-2.4t-a95b": 95e9,
    "ling-3.0-flash": 5.1e9,
    "ling-3.0-tiny": 1.3e9,
    "nemotron-3.5-lightning-30b-a3b": 3.6e9,
    "deepseek-v4-flash-0731": 13e9,
    "deepseek-v4-pro-0813": 49e9,
    "glm-5.3": 40e9,
    "kimi-k2.7-code": 32e9,
    "minimax-m3": 23e9,
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_preset_parameter_counts(name: str, scan: bool) -> None:
    """Models are built from shapes only and match the published counts to their precision."""
    config = PRESETS[name]
    model = model_class(config)(config, nnxmoe.Strategy(stacking=stacking_of(scan)), rngs=None)  # type: ignore[call-arg]
    count = sum(math.prod(v.shape) for _, v in nnx.to_flat_state(nnx.state(model)))
    digits = len(str(SIZES[name] / 10 ** math.floor(math.log10(SIZES[name]))).replace(".", "").rstrip("0"))
    assert abs(count / SIZES[name] - 1) < 0.6 * 10 ** -(digits - 1), count
    if name in ACTIVE and not scan:
        active = sum(
            math.prod(p.shape) * (config.experts_per_token / p.experts if p.experts else 1) for p in parameters(model)
        )
        assert 0.97 * (active - 2 * config.vocab_size * config.hidden_size) < ACTIVE[name] < 1.01 * active, active


@pytest.mark.parametrize(
    ("name", "size", "tower"),
    [("qwen3.8-27b", 27_781_427_952, 460_730_096), ("qwen3.8-2.4t-a95b", 2_446_182_725_504, 0)],
)
def test_exact_sizes_of_published_files(name: str, size: int, tower: int) -> None:
    """As the hub counts them, with the prediction layer, and with the vision tower as in transformers."""
    model = model_class(PRESETS[name])(PRESETS[name], nnxmoe.Strategy(), rngs=None, mtp=True)  # type: ignore[call-arg]
    assert sum(math.prod(v.shape) for _, v in nnx.to_flat_state(nnx.state(model))) + tower == size


def test_fields_that_published_files_hold_without_effect() -> None:
    """Qwen3.5-35B-A3B lists no dense layers, in a field that transformers does not read."""
    text = {"model_type": "qwen3_5_moe_text", "mlp_only_layers": [], "attn_output_gate": True, "dtype": "bfloat16"}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}}
    text |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "mamba_ssm_dtype": "float32"}
    text |= {"max_position_embeddings": 262144, "eos_token_id": 248044, "mtp_use_dedicated_embeddings": False}
    found, preset = (
        nnxmoe.config_from_hf({"model_type": "qwen3_5_moe", "text_config": text}),
        PRESETS["qwen3.5-35b-a3b"],
    )
    for name in ("rope", "rope_dim", "sparse_layers", "recurrent_layers", "delta_heads", "experts", "hidden_size"):
        assert getattr(found, name) == getattr(preset, name), name
    with pytest.raises(nnxmoe.ConfigError, match="mlp_only_layers"):
        nnxmoe.config_from_hf(text | {"mlp_only_layers": [1]})


def test_fields_that_are_not_numbers() -> None:
    """JSON's NaN in a field that no model reads is like any other value; elsewhere it is named."""
    fields = {"model_type": "qwen3_moe", "router_aux_loss_coef": math.nan, "x_custom": math.nan}
    assert nnxmoe.config_from_hf(fields) == nnxmoe.config_from_hf({"model_type": "qwen3_moe"})
    with pytest.raises(nnxmoe.ConfigError, match=r"rms_norm_eps .*nan"):
        nnxmoe.config_from_hf(fields | {"rms_norm_eps": math.nan})


def test_presets_have_registered_model_classes() -> None:
    assert set(PRESETS) == set(SIZES)  # so that every preset's parameters are counted
    assert isinstance(PRESETS["deepseek-v3"], DeepSeekV3Config)
    for config in PRESETS.values():
        assert model_class(config) is MODELS[config.model_type][1]


def test_conflicting_alias_is_refused() -> None:
    fields = {"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}
    with pytest.raises(nnxmoe.ConfigError, match="num_experts 4 and num_local_experts 8"):
        nnxmoe.config_from_hf(fields)
    assert nnxmoe.config_from_hf(fields | {"num_experts": 8}).num_local_experts == 8  # pyright: ignore


ODD: tuple[Any, ...] = (True, False, None, 0, -1, 3, 10**30, 1.5, float("nan"), "x", "", [], [None], ["x"], [1.5], [[]])
ODD += ({}, {"a": 1}, {"rope_type": []}, {"full_attention": 3})
BY_TYPE = {fields["model_type"]: fields for fields in (*TINY.values(), *(row.frozen for row in FAMILIES.values()))}


@pytest.mark.wrong_types
@pytest.mark.parametrize("kind", MODELS)
def test_odd_values_of_every_field_are_valid_or_raise_config_errors(kind: str) -> None:
    """In config.json and in ``dataclasses.replace``. The caller's dict is unchanged."""
    config_class = MODELS[kind][0]
    fields = dict(BY_TYPE.get(kind) or config_class(**REQUIRED.get(kind, {})).to_hf())
    names = config_class._field_names()
    names |= config_class._inherited("fixed").keys() | config_class._inherited("aliases").keys()
    config = config_from_hf(fields)
    fields = config.to_hf() | fields  # with layer types, even if they are the default
    for name in sorted(names | {"architectures", "auto_map", "quantization_config", "text_config"}):
        for value in ODD:
            changed = copy.deepcopy(fields | {name: value})
            before = repr(changed)
            with contextlib.suppress(ConfigError):
                config_from_hf(changed)
            assert repr(changed) == before
            if name in config_class._field_names():
                with contextlib.suppress(ConfigError):
                    dataclasses.replace(config, **{name: value})


def test_nested_dicts_of_the_caller_are_unchanged() -> None:
    for fields in BY_TYPE.values():
        nested = {"model_type": "around", "text_config": copy.deepcopy(fields), "vision_config": {"depth": 1}}
        before = repr(nested)
        config_from_hf(nested)
        assert repr(nested) == before
    fields = {**BY_TYPE["llama"], "rope_scaling": {"rope_type": "linear", "factor": 2.0, "unknown": 1}}
    config = config_from_hf(fields)
    fields["rope_scaling"]["factor"] = 3.0
    assert config.rope_scaling["factor"] == 2.0, "the config has a copy"


def without_ropes(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_parameters")}


def check_advice(config: DecoderConfig, theta: float) -> None:
    """Follow the error message of a replaced theta in both ways."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(config, rope_theta=theta)
    (name,) = re.findall(r"or pass (\w+)=None", str(caught.value))
    rope = config.to_hf()[name]
    for fields in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if fields.get("rope_theta") == config.rope_theta:
            fields["rope_theta"] = theta
    for value in (rope, FrozenDict(rope), None):
        assert dataclasses.replace(config, rope_theta=theta, **{name: value}).rope_theta == theta


@pytest.mark.parametrize("kind", [kind for kind in BY_TYPE if kind != "olmo3"])
def test_a_theta_can_be_replaced_twice(kind: str) -> None:
    config = dataclasses.replace(config_from_hf(without_ropes(BY_TYPE[kind])), rope_parameters=None)
    first = dataclasses.replace(config, rope_theta=12345.0)
    for theta in (12345.0, 54321.0, type(config).rope_theta):
        second = dataclasses.replace(first, rope_theta=theta)
        assert second == dataclasses.replace(config, rope_theta=theta) == dataclasses.replace(second)
        read = config_from_hf(second.to_hf())
        assert read.rope == second.rope
        assert read == second or kind == "step3p5", "Step 3.5 always reads rope_parameters from a file"
    assert dataclasses.replace(first, rope_theta=config.rope_theta) == config


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), "x"])
@pytest.mark.parametrize("kind", BY_TYPE)
def test_a_theta_that_is_no_number_is_refused(kind: str, value: Any) -> None:
    for fields in (BY_TYPE[kind], without_ropes(BY_TYPE[kind])):
        with pytest.raises(ConfigError, match=r"rope_theta (must be a|.* is not supported without)"):
            dataclasses.replace(config_from_hf(fields), rope_theta=value)


def test_a_theta_in_rope_scaling_takes_precedence_and_is_named() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    config = config_from_hf({"model_type": "llama", "rope_scaling": scaling})
    for theta in (3e4, 5e5):
        with pytest.raises(ConfigError, match=r"is 30000.0, but rope_scaling sets 500000.0: .*pass rope_scaling=None"):
            dataclasses.replace(config, rope_theta=3e4, rope_parameters={"rope_theta": theta})
    parameters = {"rope_theta": 3e4}
    changed = dataclasses.replace(config, rope_theta=3e4, rope_scaling=None, rope_parameters=parameters)
    assert changed.rope.theta == changed.rope_theta == 3e4


@pytest.mark.parametrize("has_ropes", [True, False])
@pytest.mark.parametrize("kind", BY_TYPE)
def test_a_replaced_theta_has_an_effect_or_names_the_rope_object(kind: str, has_ropes: bool) -> None:
    config = config_from_hf(BY_TYPE[kind] if has_ropes else without_ropes(BY_TYPE[kind]))
    overridden = {
        n for n, v in config.rope_overrides(config.rope_scaling, config.rope_parameters).items() if v is not None
    }
    for theta in (54321.0, type(config).rope_theta):
        if "rope_theta" in overridden and theta != config.rope_theta:
            with pytest.raises(ConfigError, match=r"rope_theta is .*, but rope_(parameters|scaling) sets .* there as"):
                dataclasses.replace(config, rope_theta=theta)
            check_advice(config, theta)
        elif kind != "olmo3":
            changed = dataclasses.replace(config, rope_theta=theta)
            assert changed.rope.theta == changed.rope_theta == theta
            assert config_from_hf(changed.to_hf()) == changed
    if overridden == {"rope_theta"} and config.rope_parameters and "rope_theta" in config.rope_parameters:
        rope = config.to_hf()["rope_parameters"] | {"rope_theta": 54321.0}
        changed = dataclasses.replace(config, rope_parameters=rope)
        assert changed.rope.theta == changed.rope_theta == 54321.0
        assert config_from_hf(changed.to_hf() | {"rope_theta": 5.0}) == changed  # as transformers reads it


IGNORE_THETA = {
    "laguna": 5e5,
    "gemma4_text": 1e6,
    "mellum": 5e5,
    "mimo_v2_flash": 5e6,
    "ministral3": 1e6,
    "mistral4": 1e4,
}


@pytest.mark.parametrize("kind", (*IGNORE_THETA, "step3p5", "gemma3_text", "mixtral"))
def test_a_theta_without_a_rope_object_is_reported_if_transformers_ignores_it(kind: str) -> None:
    fields = {"model_type": kind, "rope_theta": 54321.0}
    expected = IGNORE_THETA.get(kind, 54321.0)
    assert config_from_hf(fields).rope.theta == config_from_hf(fields).rope_theta == expected
    assert ["rope_theta 54321.0" in note for note in MODELS[kind][0].notes(fields)] == [True] * (kind in IGNORE_THETA)
    assert not MODELS[kind][0].notes(fields | {"rope_theta": expected})


def test_a_field_is_compared_with_the_rope_object_that_sets_it() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    gemma3 = config_from_hf({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_scaling": linear})
    changed = dataclasses.replace(gemma3, rope_parameters={"sliding_attention": {"rope_theta": 2e4}})
    assert changed.rope_local_base_freq == changed.rope_of("sliding_attention").theta == 2e4
    for name in ("rope_theta", "rope_local_base_freq"):
        ropes = {layer_type: {"rope_theta": 2e4} for layer_type in ("full_attention", "sliding_attention")}
        config = config_from_hf({"model_type": "gemma3_text", "rope_parameters": ropes})
        with pytest.raises(
            ConfigError, match=f"{name} is 30000.0, but rope_parameters sets 20000.0: set 30000.0 there"
        ):
            dataclasses.replace(config, rope_scaling=linear, **{name: 3e4})
    for kind in ("laguna", "step3p5"):
        config = config_from_hf(BY_TYPE[kind])
        assert dataclasses.replace(config, rope_parameters=None).rope.theta == config.rope_theta


def test_thetas_of_other_layers_are_not_replaced_silently() -> None:
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    gemma3 = config_from_hf({"model_type": "gemma3_text", "rope_parameters": ropes})
    assert (gemma3.rope_theta, gemma3.rope_local_base_freq) == (5e5, 2e4)
    ropes = {"main": {"rope_theta": 2e4}, "compress": {"rope_theta": 3e4}}
    v4 = config_from_hf(BY_TYPE["deepseek_v4"] | {"rope_parameters": ropes, "rope_scaling": None})
    assert (v4.rope_theta, v4.compress_rope_theta) == (2e4, 3e4)
    for config, name in ((gemma3, "rope_local_base_freq"), (v4, "compress_rope_theta")):
        with pytest.raises(ConfigError, match=f"{name} is 12345.0, but rope_(parameters|scaling) sets"):
            dataclasses.replace(config, **{name: 12345.0})
        assert config_from_hf(config.to_hf()) == config


def test_heads_of_recurrent_layers_follow_the_heads_that_they_default_to() -> None:
    config = config_from_hf({"model_type": "bailing_hybrid"})
    changed = dataclasses.replace(config, head_dim=64, num_attention_heads=16, num_key_value_heads=16)
    assert (changed.delta_heads.key_dim, changed.delta_heads.key_heads) == (64, 16)
    fields = changed.to_hf()
    assert (fields["head_dim"], fields["linear_head_dim"], fields["linear_num_heads"]) == (64, 64, 16)
    assert config_from_hf(fields) == changed
    saved_by_transformers = config_from_hf(fields | {"head_dim": 32, "linear_num_heads": 8})
    assert (saved_by_transformers.delta_heads.key_dim, saved_by_transformers.delta_heads.key_heads) == (64, 8)
    assert dataclasses.replace(saved_by_transformers, head_dim=32).delta_heads.value_dim == 32


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "mimo_v2_flash",
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            "6 is not a multiple of the 4 ",
        ),
        ("step3p5", {"num_sliding_attention_heads": 3}, "num_sliding_attention_heads 3 is not a multiple of"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 4]}, "must list a multiple of num_key_value_heads 2 "),
        ("gemma4_text", {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "num_global_key_value_heads 3"),
    ],
)
def test_heads_per_layer_type_must_divide(kind: str, changes: dict[str, Any], message: str) -> None:
    """The error is raised when the config is read, not in the first forward pass."""
    with pytest.raises(ConfigError, match=message):
        config_from_hf(BY_TYPE[kind] | changes)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config_from_hf(BY_TYPE[kind]), **changes)


GUIDE = (Path(nnxmoe.__file__).parents[1] / "models" / "README.md").read_text(encoding="utf-8")
ROWS = [row.split(" | ") for row in GUIDE.partition("| family")[2].partition("\n\n")[0].splitlines()[2:]]
DECLARED = json.loads(FILE.read_text(encoding="utf-8"))["families"]


def refused_fields(kind: str) -> set[str]:
    """Fields that transformers reads for a family and of which the family refuses some value."""
    fields, refused = dict(BY_TYPE.get(kind) or MODELS[kind][0](**REQUIRED.get(kind, {})).to_hf()), set()
    for name in {*DECLARED[kind]} - {"architectures", "model_type", "dtype"}:
        for value in (True, False, 0.5, 2, "gelu"):
            try:
                config_from_hf(fields | {name: value})
            except ConfigError as error:
                refused |= {name} if "is not supported" in str(error) else set()
    return refused


@pytest.mark.wrong_types
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| `").partition("`")[0])
def test_guide_names_every_field_that_a_family_refuses(row: list[str]) -> None:
    kinds = re.findall(r"`(\w+)`", row[0])
    refused = set[str]().union(*map(refused_fields, kinds)) - {"hidden_act"}
    named = set(re.findall(r"`(\w+)`", row[-1]))
    assert refused <= named, "add the missing fields to the column"
    declared = set[str]().union(*(DECLARED[kind] for kind in kinds))
    assert named & declared <= refused, "remove fields that are supported now"


PARTIAL = ("glm4_moe", "minimax_m2", "sarvam_moe", "minimax_m3_vl_text", "qwen3_next", "qwen3_5_text")
PARTIAL += ("qwen3_5_moe_text", "mimo_v2_flash", "laguna", "step3p5")


@pytest.mark.parametrize("kind", PARTIAL)
def test_odd_rotated_widths_are_refused(kind: str) -> None:
    """A quarter of 20 is odd. ``rope_parameters`` are one object, or one object per layer type."""
    config_class = MODELS[kind][0]
    dropped = ("rope_scaling", "rotary_dim", "partial_rotary_factor")
    fields = {name: value for name, value in BY_TYPE[kind].items() if name not in dropped}
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    nested = issubclass(config_class, PartialRopesConfig)
    ropes = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    with pytest.raises(ConfigError, match="needs an even width, got 5"):
        config_class.from_hf(fields | {"head_dim": 20, "rope_parameters": ropes if nested else rope})
