"""Reference checkpoints of ``tests/data/maxtext``: parameters, logits, losses and gradients from MaxText."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import nnxmoe
from tests.support.arrays import Flat

CASES = Path(__file__).parents[1] / "data" / "maxtext"
NAMES = sorted(path.name for path in CASES.iterdir() if (path / "params.safetensors").is_file())


def config_of(name: str) -> Any:
    return nnxmoe.config_from_hf(json.loads((CASES / name / "hf_config.json").read_text()))


def params_of(name: str) -> Flat:
    return load_file(CASES / name / "params.safetensors")


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biased and tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_scaling": LLAMA_3}),
    "mixtral": ("mixtral", {}),
    "deepseek, biased": ("deepseek_v3", {"attention_bias": True}),
}
