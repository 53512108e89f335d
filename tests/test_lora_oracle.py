"""Adapter files exchanged with peft and transformers in both directions, compared by logits."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.train import lora
from tests.support.adapters import fill
from tests.support.arrays import max_error
from tests.support.tiny import TINY, random_tokens, tiny_weights, write_checkpoint

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
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(scan_layers=scan))
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
    model = nnxmoe.from_pretrained(base, strategy=nnxmoe.Strategy(scan_layers=scan))
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
