"""Adapter files exchanged with peft and transformers in both directions, compared by logits."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe.convert.peft.peft_config import Settings
from nnxmoe.train import lora
from tests.support.adapters import fill
from tests.support.arrays import max_error
from tests.support.tiny import TINY, random_tokens, stacking_of, tiny_weights, write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 2e-4  # for whole models in float32
TOKENS = random_tokens(2, 9)
CASES = {
    "llama": ("llama", None),
    "llama attention": ("llama", ["attention"]),
    "mixtral": ("mixtral", None),
    "mixtral gate_up": ("mixtral", ["experts.gate_up"]),
    "mixtral down": ("mixtral", ["experts.down"]),
    "mixtral router": ("mixtral", ["router", "attention.q"]),
    "deepseek_v3": ("deepseek_v3", None),
    "deepseek_v3 dense": ("deepseek_v3", ["mlp"]),
    "deepseek_v3 shared": ("deepseek_v3", ["shared.up"]),
    "deepseek_v3 experts": ("deepseek_v3", ["experts", "router"]),
    "gpt_oss": ("gpt_oss", None),
    "gpt_oss gate_up and router": ("gpt_oss", ["experts.gate_up", "router"]),
}


def checkpoint(folder: Path, kind: str) -> Path:
    fields = dict(TINY[kind])
    if "moe_intermediate_size" in fields:
        fields["moe_intermediate_size"] = 16  # torch's grouped matmul requires rows that are multiples of 16 bytes
    fields["architectures"] = [nnxmoe.config_from_hf(fields).architecture]
    return write_checkpoint(folder / "base", fields, tiny_weights(fields))


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_our_adapters(tmp_path: Path, case: str, scan: bool) -> None:
    """As a ``PeftModel`` and after PEFT merged it."""
    kind, targets = CASES[case]
    base = checkpoint(tmp_path, kind)
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    before = np.asarray(model(TOKENS).logits)
    lora.add(model, 4, alpha=6, targets=targets, rngs=nnx.Rngs(0))
    fill(model)
    ours = np.asarray(model(TOKENS).logits)
    assert max_error(ours, before) > 1e-2
    lora.save(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(reference(base), tmp_path / "adapter")
    assert max_error(logits(theirs), ours) < TOLERANCE
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert stored.keys() == again.keys() and all((stored[name] == again[name]).all() for name in stored)
    assert max_error(logits(theirs.merge_and_unload()), ours) < TOLERANCE


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_peft_loads_adapters_sized_for_experts(tmp_path: Path, kind: str, scan: bool) -> None:
    """Gate and up, down and the rest differ in rank and alpha."""
    base = checkpoint(tmp_path, kind)
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    before, ranks = np.asarray(model(TOKENS).logits), lora.split_ranks(model, 6)
    assert {6, 6 // model.config.experts_per_token} == set(ranks.values())
    lora.add(model, ranks | {"experts.down": 5}, dict.fromkeys(ranks, 6) | {"experts.down": 3}, rngs=nnx.Rngs(0))
    ours = np.asarray(fill(model)(TOKENS).logits)
    lora.save(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(reference(base), tmp_path / "adapter")
    assert max_error(logits(theirs), ours) < TOLERANCE < max_error(ours, before)
    lora.remove(model)
    lora.load(model, tmp_path / "adapter")
    assert (np.asarray(model(TOKENS).logits) == ours).all()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3", "gpt_oss"])
def test_peft_adapters_are_loaded(tmp_path: Path, kind: str, scan: bool) -> None:
    """With rank and alpha patterns, and a matrix ``b`` that mixes gate and up."""
    base = checkpoint(tmp_path, kind)
    own = ["q_a_proj", "kv_b_proj"] if kind == "deepseek_v3" else ["q_proj", "v_proj"]
    experts = {} if kind == "llama" else {"target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=[*own, "o_proj"],
        rank_pattern={"o_proj": 2, "experts.down_proj": 4},
        alpha_pattern={r".*\.o_proj": 7},
        use_rslora=kind == "mixtral",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        **experts,
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(reference(base), config)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_B" in name:
                value.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    before = np.asarray(model(TOKENS).logits)
    lora.load(model, tmp_path / "adapter")
    assert max_error(model(TOKENS).logits, logits(theirs.eval())) < TOLERANCE < max_error(before, model(TOKENS).logits)
    lora.save(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(reference(base), tmp_path / "ours")
    assert max_error(logits(again), logits(theirs)) < 1e-5


def test_transformers_loads_our_adapters_without_peft_model(tmp_path: Path) -> None:
    """Uses the model's ``load_adapter``."""
    base = checkpoint(tmp_path, "deepseek_v3")
    model = nnxmoe.from_pretrained(base)
    lora.add(model, 4, rngs=nnx.Rngs(jax.random.key(3)))
    fill(model)
    lora.save(model, tmp_path / "adapter")
    theirs = reference(base)
    theirs.load_adapter(str(tmp_path / "adapter"))
    assert max_error(logits(theirs), model(TOKENS).logits) < TOLERANCE


def some_layers(names: list[str], rng: np.random.Generator) -> dict[str, Any]:
    """A random choice of targets in PEFT's spellings, with patterns that match some of them, or none."""
    ends = [name.rpartition(".")[2] for name in names]
    picked = sorted(set(rng.choice(ends, 3)))
    words = ["^q_proj", "q_proj", r".*\.v_proj", r"layers\.1\..*proj", "self_attn.o_proj", "proj", "1.self_attn.k_proj"]
    words += [r"model\.layers\.0\.self_attn\.q_proj$", "(q|k)_proj", str(rng.choice(names)), r".*layers\.[01]\.mlp\..*"]
    ranks = {str(word): int(rng.integers(1, 6)) for word in rng.choice(words, 2)}
    alphas = {str(word): float(rng.integers(1, 9)) for word in rng.choice(words, 2)}
    layers: dict[str, Any] = [
        {},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["blocks", "layers"]},
    ][rng.integers(4)]
    targets: Any = [picked, rf".*layers\.1\..*({'|'.join(picked)})", [*picked, str(rng.choice(names))]][rng.integers(3)]
    layers = {} if isinstance(targets, str) else layers
    exclude: Any = [None, [picked[0]], r".*layers\.0\.self_attn.*"][rng.integers(3)]
    return {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": targets,
        "exclude_modules": exclude,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": bool(rng.integers(2)),
        "task_type": "CAUSAL_LM",
        **layers,
    }


def randomised(base: Any, **fields: Any) -> Any:
    """A PeftModel with random adapters."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(**fields)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.2)
    return model


def check_both_ways(folder: Path, base: Path, theirs: Any, scan: bool) -> None:
    """PEFT's adapter here, and what is saved from it in PEFT again."""
    theirs.save_pretrained(folder / "adapter")
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    before = np.asarray(model(TOKENS).logits)
    lora.load(model, folder / "adapter")
    wanted = logits(peft.PeftModel.from_pretrained(reference(base), folder / "adapter").eval())
    assert max_error(model(TOKENS).logits, wanted) < TOLERANCE < max_error(before, wanted)
    lora.save(model, folder / "ours")
    again = peft.PeftModel.from_pretrained(reference(base), folder / "ours").eval()
    assert max_error(logits(again), wanted) < 1e-4


def test_patterns_and_targets_follow_peft(tmp_path: Path) -> None:
    """The rules for all projections of a model, and some of the models."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    base, loaded = checkpoint(tmp_path, "llama"), 0
    names = [name for name, module in reference(base).named_modules() if name.endswith("_proj")]
    for seed in range(300):
        fields = some_layers(names, np.random.default_rng(seed))
        config, ours = peft.LoraConfig(**fields), Settings(fields)
        for name in names:
            assert ours.has_module(name) == bool(check_target_module_exists(config, name)), (fields, name)
            rank, alpha = (
                patterns.get(get_pattern_key(patterns, name), default)
                for patterns, default in ((config.rank_pattern, 3), (config.alpha_pattern, 5))
            )
            assert ours.numbers(name) == (rank, alpha * (rank**0.5 if config.use_rslora else 1)), (fields, name)
        if seed % 60 == 0 and any(map(ours.has_module, names)):
            check_both_ways(tmp_path / str(seed), base, randomised(reference(base), **fields), bool(seed % 40))
            loaded += 1
    assert loaded >= 3


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "experts of a layer": ("mixtral", {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"]}),
    "experts unlike": (
        "mixtral",
        {
            "target_parameters": ["layers.1.mlp.experts.gate_up_proj", "experts.down_proj", "layers.0.mlp.gate.weight"],
            "rank_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 2},
            "alpha_pattern": {r"layers\.1\..*": 9},
        },
    ),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"], "rank_pattern": {"lm_head": 5}}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "both": ("deepseek_v3", {"target_modules": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("case", MORE)
def test_adapters_of_parts_of_a_model(tmp_path: Path, case: str, scan: bool) -> None:
    """PEFT stores the tables of embedding and head beside their adapters."""
    kind, fields = MORE[case]
    base = checkpoint(tmp_path, kind)
    fields = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": []} | fields
    check_both_ways(tmp_path, base, randomised(reference(base), **fields), scan)


@pytest.mark.parametrize("scan", [False, True])
def test_adapters_of_transformers_4_experts(tmp_path: Path, scan: bool) -> None:
    """One adapter per expert and projection, which PEFT converts as well."""
    base, rng, names = checkpoint(tmp_path, "mixtral"), np.random.default_rng(0), ("w1", "w3", "w2")
    fields = nnxmoe.from_pretrained(base).config
    count, width, dim = fields.num_local_experts, fields.intermediate_size, fields.hidden_size
    tensors: dict[str, np.ndarray] = {}

    def put(module: str, ins: int, outs: int) -> None:
        for which, shape in (("A", (3, ins)), ("B", (outs, 3))):
            name = f"base_model.model.model.layers.{module}.lora_{which}.weight"
            tensors[name] = (0.3 * rng.standard_normal(shape)).astype(np.float32)

    for layer in range(fields.num_hidden_layers):
        for expert in range(count):
            for name in names:
                sizes = (width, dim) if name == names[2] else (dim, width)
                put(f"{layer}.block_sparse_moe.experts.{expert}.{name}", *sizes)
        put(f"{layer}.block_sparse_moe.gate", dim, count)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["gate", *names],
    }
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(reference(base), tmp_path / "adapter").eval()
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    before = np.asarray(model(TOKENS).logits)
    lora.load(model, tmp_path / "adapter")
    assert max_error(model(TOKENS).logits, logits(theirs)) < TOLERANCE < max_error(before, model(TOKENS).logits)
    lora.save(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(reference(base), tmp_path / "ours").eval()
    assert max_error(logits(again), logits(theirs)) < 1e-4


def test_absent_fields_have_the_defaults_of_peft(tmp_path: Path) -> None:
    """Rank and alpha are 8. Without targets there is nothing to load."""
    base = checkpoint(tmp_path, "llama")
    theirs = randomised(reference(base), r=8, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    theirs.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    fields = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    path.write_text(json.dumps(fields))
    model = nnxmoe.from_pretrained(base)
    lora.load(model, tmp_path / "adapter")
    assert max_error(model(TOKENS).logits, logits(theirs)) < TOLERANCE
    path.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(nnxmoe.CheckpointError, match="q_proj"):
        lora.load(nnxmoe.from_pretrained(base), tmp_path / "adapter")


SMALL_ADAPTERS: dict[str, dict[str, Any]] = {
    **{kind: {"num_virtual_tokens": 2} for kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE")},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 2, "num_tasks": 2},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
    "ADALORA": {"total_step": 10, "target_modules": ["q_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "IA3": {"target_modules": ["q_proj"], "feedforward_modules": []},
    "TRAINABLE_TOKENS": {"token_indices": [1], "target_modules": ["embed_tokens"]},
}
SKIPPED = {"ADAMSS", "C3A", "MISS", "SHIRA", "ROAD", "VBLORA", "WAVEFT", "XLORA"}  # need more than a tiny Llama


@pytest.mark.filterwarnings("ignore")
def test_error_advises_merging_exactly_if_peft_can_merge(tmp_path: Path) -> None:
    """For every adapter type of the installed peft."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    configs = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind.value not in SKIPPED}
    assert len(configs) > 30
    for kind, peft_config in configs.items():
        options = SMALL_ADAPTERS.get(kind, {"target_modules": ["q_proj", "v_proj"]})
        base = transformers.LlamaForCausalLM(config)
        adapted = peft.get_peft_model(base, peft_config(task_type="CAUSAL_LM", **options))
        try:
            adapted.merge_and_unload()
        except (AttributeError, NotImplementedError, ValueError):
            wanted = "peft cannot merge it"
        else:
            wanted = "merge it into its base model with peft"
        if kind != "LORA":
            (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
            with pytest.raises(nnxmoe.CheckpointError, match=wanted):
                Settings.read(tmp_path / "adapter_config.json")
