"""Tiny models with the fields of published config.json files, against a live transformers."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import nnxmoe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.against_theirs import check_outputs, check_saved  # noqa: E402
from tests.support.families import write_config  # noqa: E402
from tests.support.programs import drop_programs  # noqa: E402
from tests.support.published import PUBLISHED, PUBLISHED_TEXTS  # noqa: E402
from tests.support.reference import load_theirs, write_theirs  # noqa: E402
from tests.support.tiny import Fields, write_checkpoint  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    drop_programs()


class Shape(NamedTuple):
    """A tiny version of a published file.

    Attributes:
        kind: The model_type of the text model in transformers.
        layers: The published layers that it keeps.
        sizes: Fields with other values.
    """

    kind: str
    layers: tuple[int, ...]
    sizes: Fields


# Indexers have many heads, since all scores of a few heads may be 0, and then the choice of a key is arbitrary.
_TOKENS: Fields = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DELTA: Fields = {"linear_key_head_dim": 6, "linear_value_head_dim": 10}
_LATENT: Fields = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 12, "kv_lora_rank": 17}
_LATENT |= {"q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
_LATENT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16}
_V4: Fields = {"hidden_size": 32, "moe_intermediate_size": 12, "num_attention_heads": 4, "head_dim": 16, "o_groups": 2}
_V4 |= {"q_lora_rank": 12, "qk_rope_head_dim": 4, "o_lora_rank": 8, "index_n_heads": 24, "index_head_dim": 8}
_V4 |= {"index_topk": 2, "sliding_window": 6, "n_routed_experts": 12, "num_hash_layers": 1}
_V4 |= {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}}
_M3: Fields = {"hidden_size": 32, "intermediate_size": 12, "dense_intermediate_size": 20, "num_attention_heads": 8}
_M3 |= {"shared_intermediate_size": 12, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4}
_M3 |= {"num_local_experts": 16}
_BLOCKS: Fields = {"sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 3, "sparse_topk_blocks": 2}
SHAPES = {
    "qwen3.8-27b": Shape(
        "qwen3_5_text", (0, 1, 2, 3),
        {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 6, **_DELTA},
    ),
    "qwen3.8-2.4t-a95b": Shape(  # all 512 experts, of which 10 are selected
        "qwen3_5_moe_text", (0, 2, 3, 4),
        {"hidden_size": 32, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 16, "moe_intermediate_size": 4,
         "shared_expert_intermediate_size": 12, **_DELTA},
    ),
    "ling-3.0-tiny": Shape(  # transformers refuses the integer that the file has as kda_lower_bound
        "bailing_hybrid", (0, 1, 2, 3),
        {**_LATENT, "n_routed_experts": None, "num_experts": 16, "head_dim": 8, "kda_lower_bound": -5.0},
    ),
    "nemotron-3.5-lightning-30b-a3b": Shape(
        "nemotron_h", (0, 1, 4, 5, 6),
        {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 8, "head_dim": 6, "mamba_head_dim": 6,
         "mamba_num_heads": 8, "n_groups": 4, "ssm_state_size": 10, "chunk_size": 4, "n_routed_experts": 16,
         "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20, "num_key_value_heads": 2},
    ),
    "deepseek-v4-flash-0731": Shape("deepseek_v4", (0, 2, 3), _V4),
    "deepseek-v4-pro-0813": Shape("deepseek_v4", (0, 2, 3), _V4),
    "glm-5.3": Shape(
        "glm_moe_dsa", (0, 2, 3, 6, 7), {**_LATENT, "index_n_heads": 24, "index_head_dim": 8, "index_topk": 5}
    ),
    "kimi-k2.7-code": Shape("deepseek_v3", (0, 1), _LATENT),
    "minimax-m3": Shape("minimax_m3_vl_text", (0, 2, 3, 4), _M3),
    "minimax-m3.1": Shape("minimax_m3_vl_text", (0, 2, 3, 4), _M3),
}  # fmt: skip


def tiny(name: str) -> Fields:
    """A published config.json with few layers and small sizes, and every other field as published.

    MiniMax-M3.1 is MiniMax-M3 with sparse attention in all layers, also in the dense layers at the start.
    """
    _, layers, sizes = SHAPES[name]
    fields = copy.deepcopy((PUBLISHED | PUBLISHED_TEXTS)[name.replace("m3.1", "m3")])
    text = fields.get("text_config", fields)
    depth = text["num_hidden_layers"]

    def selected(value: Any) -> Any:
        """Lists with a value per layer, which may go on with the prediction layers."""
        return [value[i] for i in layers] + value[depth:] if isinstance(value, list) and len(value) >= depth else value

    if "sparse_attention_config" in text:
        text["sparse_attention_config"] |= _BLOCKS
        if name == "minimax-m3.1":
            text["sparse_attention_config"] |= {"sparse_attention_freq": [1] * depth}
        text["sparse_attention_config"] = {k: selected(v) for k, v in text["sparse_attention_config"].items()}
    for key, value in text.items():
        text[key] = selected(value)
    text |= {"num_hidden_layers": len(layers), **_TOKENS, **sizes}
    text["dtype"] = "float32"
    return {k: v for k, v in fields.items() if k not in ("quantization_config", "torch_dtype")} | _TOKENS


@pytest.mark.parametrize("name", SHAPES)
def test_tiny_versions_of_published_files(name: str, tmp_path: Path, record_property: Any) -> None:
    """Logits, steps, greedy tokens and saved tensors. transformers reads the fields of the text model."""
    kind, fields, seed = SHAPES[name].kind, tiny(name), len(name)
    text = fields.get("text_config", fields)
    given = {k: v for k, v in text.items() if k not in ("auto_map", "architectures", "model_type") and v is not None}
    folder = tmp_path / "theirs"
    weights = write_theirs(folder, kind, given, seed=seed)
    reference = load_theirs(folder, kind)
    write_config(folder, fields)
    model = nnxmoe.from_pretrained(folder)
    assert not model.load_report.unexpected and not model.load_report.notes
    check_outputs(model, reference, seed, record_property)
    check_saved(model, reference, weights, kind, tmp_path / "again")


DRAFTS = {  # tensors of prediction layers and drafts in the files
    "deepseek-v4-flash-0731": ("mtp.0.main_proj.weight", "mtp.2.markov_head.w1.weight", "mtp.1.ffn.gate.weight"),
    "nemotron-3.5-lightning-30b-a3b": ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_layers_that_are_not_loaded(name: str, tmp_path: Path) -> None:
    """The layers of DSpark and of Nemotron's prediction are skipped by name, and refused if they are asked for."""
    kind, fields = SHAPES[name].kind, tiny(name)
    given = {k: v for k, v in fields.items() if k not in ("architectures", "model_type") and v is not None}
    weights = write_theirs(tmp_path / "plain", kind, given, seed=1)
    weights |= {draft: np.ones((2, 2), np.float32) for draft in DRAFTS[name]}
    folder = write_checkpoint(tmp_path / "drafts", fields, weights)
    report = nnxmoe.from_pretrained(folder).load_report
    assert not report.unexpected and sum(map(len, report.skipped.values())) == len(DRAFTS[name]), report
    with pytest.raises(nnxmoe.ConfigError, match=r"DSpark|no multi-token prediction layers"):
        nnxmoe.from_pretrained(folder, mtp=True)
