"""Adds outputs of transformers to ``tests/data/families``: ``python -m tests.support.freeze [FAMILY…]``."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
from safetensors.numpy import save_file

from tests.support.families import FAMILIES, FOLDER, tokens_of
from tests.support.reference import MARGIN, greedy_theirs, load_theirs, run_theirs, write_theirs
from tests.support.tiny import Fields, Weights


def frozen(kind: str) -> tuple[dict[str, np.ndarray], Weights]:
    """The outputs of transformers for the frozen case of a family, and its tensors."""
    family = FAMILIES[kind]
    tokens, mask = tokens_of(family.frozen["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = write_theirs(folder, family.theirs, _theirs(family.frozen), seed=0)
        model = load_theirs(folder, family.theirs)
    arrays = {"tokens": tokens, "mask": mask}
    for prefix, used in (("", np.ones_like(mask)), ("padded.", mask)):
        seen = run_theirs(model, tokens, used)
        assert np.isfinite(seen.logits).all() and seen.logits.std() > 0.3, kind
        arrays[prefix + "logits"] = seen.logits
        for layer, experts in seen.experts.items():
            arrays[f"{prefix}experts.{layer}"] = experts.astype(np.int32)
            arrays[f"{prefix}weights.{layer}"] = seen.weights[layer]
        greedy, margins = greedy_theirs(model, tokens, used)
        assert margins.min() > MARGIN, f"{kind}: greedy tokens are too close to call, change the config"
        arrays[prefix + "greedy"] = greedy.astype(np.int32)
    return arrays, weights


def freeze(kind: str) -> None:
    """Writes the case of a family: its stored config, names and shapes as JSON, and the outputs as safetensors."""
    arrays, weights = frozen(kind)
    FOLDER.mkdir(exist_ok=True)
    save_file(arrays, FOLDER / f"{kind}.safetensors")
    stored = {
        "transformers": transformers.__version__,
        "config": FAMILIES[kind].frozen,
        "shapes": {name: list(array.shape) for name, array in weights.items()},
    }
    (FOLDER / f"{kind}.json").write_text(json.dumps(stored, indent=1) + "\n")


def _theirs(fields: Fields) -> Fields:
    """The fields for a config class of transformers, which reads the old names of the hub's files itself."""
    return {name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")}


if __name__ == "__main__":
    for each in sys.argv[1:] or FAMILIES:
        freeze(each)
