"""Reference checkpoints of ``tests/data/hf`` with the outputs of transformers."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import nnxmoe
from tests.support.tiny import ORACLE, Fields, Weights

HF_CASES = Path(__file__).parents[1] / "data" / "hf"
NAMES = tuple(sorted(folder.name for folder in HF_CASES.iterdir()))
LLAMA_NAMES = tuple(name for name in NAMES if name.startswith(("llama", "mistral")))
DEEPSEEK_NAMES = tuple(name for name in NAMES if name.startswith("deepseek"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A reference checkpoint: config fields, tensors by name, and outputs of transformers."""

    name: str
    folder: Path
    fields: Fields
    weights: Weights
    arrays: Mapping[str, np.ndarray]


@functools.cache
def load_case(name: str) -> Case:
    """Loads a case of ``tests/data/hf``, cached."""
    folder = HF_CASES / name
    weights: Weights = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        weights |= load_file(file)
    fields = json.loads((folder / "model" / "config.json").read_text())
    return Case(name, folder, fields, weights, load_file(folder / "reference.safetensors"))


@functools.cache
def load_case_model(name: str, strategy: nnxmoe.Strategy = ORACLE) -> nnxmoe.CausalLM:
    """The model of a case, cached: callers must not modify it."""
    return nnxmoe.from_pretrained(HF_CASES / name / "model", strategy=strategy)
