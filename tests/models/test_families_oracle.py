"""Random configurations of every row of `tests.support.families` against a live transformers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import models
from nnxmoe.convert.peft.adapter_slots import adapter_slots
from nnxmoe.convert.peft.layer_adapters import parameter_name
from nnxmoe.models import model_class
from nnxmoe.train import lora

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


from tests.support.adapters import fill  # noqa: E402
from tests.support.against_theirs import check_outputs, check_saved  # noqa: E402
from tests.support.arrays import max_error  # noqa: E402
from tests.support.declared import FILE, declared  # noqa: E402
from tests.support.families import FAMILIES, fused, load, tokens_of, write_config  # noqa: E402
from tests.support.freeze import frozen  # noqa: E402
from tests.support.programs import drop_programs  # noqa: E402
from tests.support.reference import load_theirs, run_theirs, write_theirs  # noqa: E402
from tests.support.running import MODEL_TOLERANCE  # noqa: E402
from tests.support.tiny import Fields, write_checkpoint  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

EACH = max(4, -(-45 // len(FAMILIES)))  # configurations per family: at least 45 in all
MORE = {"deepseek_v4": 40, "deepseek_v32": 20, "glm_moe_dsa": 24, "gemma4_text": 16}  # at least 40 with an indexer
MORE |= {"qwen3_next": 12, **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid"), 8)}
MORE |= {
    "minimax_m3_vl_text": 24,
    "nemotron_h": 40,
    "hy_v4": 24,
    "kimi_k3": 12,
    "qwen4_exp_text": 16,
    "deepseek_v41_text": 24,
}
MORE |= dict.fromkeys(("smollm3", "olmo3", "phi3", "gemma3_text", "exaone4"), 12)
MORE |= dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "lfm2", "lfm2_moe"), 12)
# Families whose names, or the order of these, differ.
ADAPTED = """sarvam_moe hy_v3 qwen3_next qwen3_5_moe_text deepseek_v32 deepseek_v4 mistral4 ernie4_5_moe afmoe
gemma4_text kimi_linear bailing_hybrid glm5_next_text step3p5
nemotron_h minimax_m3_vl_text granite granitemoeshared granitemoehybrid lfm2 lfm2_moe
smollm3 olmo3 phi3 gemma3_text exaone4 hy_v4 kimi_k3 qwen4_exp_text deepseek_v41_text""".split()
CASES = [(kind, number) for kind in FAMILIES for number in range(MORE.get(kind, EACH))]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    drop_programs()  # the compiler crashes where a process has too many


def hub_style(fields: Fields, kind: Any) -> Fields:
    """config.json of transformers 5 as the hub has it: the older names, without fields that have their defaults."""
    defaults = kind().to_dict()
    left = {k: v for k, v in fields.items() if k == "model_type" or v != defaults.get(k, ...)}
    rope = dict(left.get("rope_parameters", defaults.get("rope_parameters", {})))
    new = "full_attention", "main", "llama_4_scaling_beta"  # a rope object per kind of layers, and with more fields
    if not rope or any(name in rope for name in new):
        return left
    left.pop("rope_parameters", None)
    left["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        left["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    turned = rope.pop("rope_type")
    left["rope_scaling"] = None if turned == "default" else {"type": turned, **rope}
    left["torch_dtype"] = left.pop("dtype", "float32")
    if "num_local_experts" in left:
        left["num_experts"] = left.pop("num_local_experts")
    return left


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_random_configurations(kind: str, number: int, tmp_path: Path, record_property: Any) -> None:
    """Logits and routing, padded or not, in both styles of config.json and from fused experts; single steps with a
    cache; greedy tokens; and what is saved, which transformers loads again."""
    family, rng = FAMILIES[kind], random.Random(f"{kind} {number}")
    given = family.draw(rng)
    folder = tmp_path / "theirs"
    weights = write_theirs(folder, family.theirs, given, seed=number)
    reference = load_theirs(folder, family.theirs)
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    if number % 2:
        fields = hub_style(fields, transformers.CONFIG_MAPPING[family.theirs])
    write_config(folder, fields)
    if number % 3 == 2:
        write_checkpoint(folder, fields, fused(weights))
    scanned = number % 4 == 3
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned()) if scanned else nnxmoe.Strategy()
    model = nnxmoe.from_pretrained(folder, strategy=strategy)
    assert not model.load_report.unexpected
    check_outputs(model, reference, number, record_property)
    check_saved(model, reference, weights, family.theirs, tmp_path / "again")


@pytest.mark.parametrize("kind", ADAPTED)
def test_peft_loads_adapters(kind: str, tmp_path: Path) -> None:
    """Of the default targets, with transformers' names."""
    family = FAMILIES[kind]
    given = family.draw(random.Random(f"{kind} 1"))
    write_theirs(tmp_path, family.theirs, given, seed=1)
    reference = load_theirs(tmp_path, family.theirs)
    write_config(tmp_path, json.loads((tmp_path / "config.json").read_text()) | {"model_type": kind})
    model, (tokens, _) = nnxmoe.from_pretrained(tmp_path), tokens_of(given["vocab_size"])
    before = np.asarray(model(tokens).logits)
    lora.add(model, 4, alpha=6, rngs=nnx.Rngs(0))
    fill(model)
    lora.save(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    ours = model(tokens).logits
    assert max_error(run_theirs(theirs.base_model.model, tokens, np.ones_like(tokens)).logits, ours) < MODEL_TOLERANCE
    assert max_error(ours, before) > 0.1


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_have_the_names_of_transformers(kind: str) -> None:
    """PEFT ignores adapters whose names it does not know, without a warning; `Family.peft_excluded` is excepted."""
    family = FAMILIES[kind]
    theirs = transformers.CONFIG_MAPPING[family.theirs](**family.draw(random.Random(f"{kind} 1")))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(theirs)
    known = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
    config = nnxmoe.config_from_hf(theirs.to_dict() | {"model_type": kind})
    model = model_class(config)(config, nnxmoe.Strategy(), rngs=None)
    found = [slot for slot in adapter_slots(model) if not slot.name.startswith(models.family_of(model).peft_excluded)]
    assert {parameter_name(model, slot, layer) for slot in found for layer in slot.layers} <= known


def test_enough_configurations() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("kind", FAMILIES)
def test_frozen_cases_are_current(kind: str) -> None:
    """The installed transformers gives the stored outputs. torch's delta rules differ by 3e-5 between processors."""
    arrays, _ = frozen(kind)
    stored = load(kind).arrays
    assert arrays.keys() == stored.keys()
    for name, array in arrays.items():
        assert np.allclose(array, stored[name], atol=MODEL_TOLERANCE), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_of_absent_fields(kind: str) -> None:
    """Fields that both configs have are equal where config.json is empty."""
    required = FAMILIES[kind].required
    theirs = transformers.CONFIG_MAPPING[FAMILIES[kind].theirs](**required)
    ours = nnxmoe.config_from_hf({"model_type": kind} | required)
    own = "head_dim layer_types mlp_layer_types mlp_only_layers rope_parameters rope_theta rope_scaling dtype"
    own += " qk_rope_head_dim partial_rotary_factor indexer_types compress_rates moe_layer_end_index per_layer_config"
    own += " num_attention_heads_per_layer num_sliding_attention_heads query_pre_attn_scalar"
    own += " full_attn_idxs mamba_d_head no_rope_layers"
    own += " ple_layer_ids ple_embed_dim"
    skipped = {"architectures", "model_type", "num_key_value_heads", *own.split()}
    for name in vars(ours).keys() - skipped:
        if hasattr(theirs, name) and not (name == "sliding_window" and theirs.sliding_window is None):
            value = getattr(theirs, name)
            assert getattr(ours, name) == (tuple(value) if isinstance(value, list) else value), name
    if (rope := getattr(theirs, "rope_parameters", None)) is not None:
        assert ours.rope_theta == rope.get("full_attention", rope.get("main", rope))["rope_theta"]
    assert ours.kv_heads == theirs.num_key_value_heads


def test_groups_of_one_expert(tmp_path: Path) -> None:
    """DeepSeek-V2 scores a group by its best expert, so that groups may have a single one."""
    given = FAMILIES["deepseek_v2"].draw(random.Random(0)) | {"topk_method": "group_limited_greedy"}
    given |= {"n_routed_experts": 8, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 3}
    write_theirs(tmp_path, "deepseek_v2", given, seed=3)
    tokens, mask = tokens_of(given["vocab_size"])
    theirs = run_theirs(load_theirs(tmp_path, "deepseek_v2"), tokens, mask)
    assert max_error(nnxmoe.from_pretrained(tmp_path)(tokens, mask).logits, theirs.logits, mask) < MODEL_TOLERANCE


def test_declared_fields_are_current() -> None:
    """The installed transformers reads the fields that the stored list has."""
    stored = json.loads(FILE.read_text())
    assert declared() == stored, "run python -m tests.support.declared, and test_config.py"


HARMLESS = {"mask_value": -10000, "tokenizer": "x", "moe_frequency": 1, "capacity_factor": 1.25, "badwordsids": [[0]]}
HARMLESS |= {"use_flash_attention": True, "unk_token_id": 0, "decoder_sparse_step": 1, "moe_router_dtype": "float32"}
HARMLESS |= {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "final_logit_softcapping": 30.0, "qk_norm": True}
HARMFUL = {"is_causal": False, "sliding_window": 4, "attention_chunk_size": 4}


@pytest.mark.parametrize("kind", ["llama", "olmoe", "minimax_m2"])
def test_undeclared_fields_change_nothing_or_are_refused(kind: str, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "model", np.arange(3, 20)[None]
    given = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "eos_token_id": None}
    given |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 1,
        "pad_token_id": None,
    }
    weights = write_theirs(folder, kind, given, seed=1)
    plain = json.loads((folder / "config.json").read_text())

    def run(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
        write_checkpoint(folder, plain | fields, weights)
        model = load_theirs(folder, kind)
        options = {"max_new_tokens": 8, "do_sample": False}
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy(), model.generate(torch.tensor(tokens), **options).numpy()

    logits, ids = run({})
    dropped = {
        name: value
        for name, value in HARMLESS.items()
        if name in type(nnxmoe.config_from_hf(plain)).unknown_fields(HARMLESS)
    }
    same, same_ids = run(dropped)
    assert np.array_equal(logits, same) and np.array_equal(ids, same_ids)
    model = nnxmoe.from_pretrained(folder)
    assert np.abs(model(tokens).logits - logits).max() < MODEL_TOLERANCE
    assert all(name in model.load_report.notes[0] for name in dropped)
    for name, value in HARMFUL.items():
        other, other_ids = run({name: value})
        assert np.abs(other - logits).max() > 0.01 or not np.array_equal(other_ids, ids), name
        with pytest.raises(nnxmoe.ConfigError, match=name):
            nnxmoe.from_pretrained(folder)
