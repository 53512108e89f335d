"""The fields of config.json that the installed transformers reads, per family, and in code that all models share, and
the types of its decoders.

    python -m tests.support.declared

writes them to ``tests/data/declared_fields.json``. An oracle test compares: a release with new fields fails it, and the
fields are then to be read, fixed, ignored or refused by the family here, which a test without transformers checks.
"""

import ast
import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from nnxmoe.models import MODELS
from nnxmoe.models.registry import TEXT_OF

FILE = Path(__file__).parents[1] / "data" / "declared_fields.json"
# Files of transformers through which every causal language model runs.
SHARED = """masking_utils cache_utils modeling_utils modeling_layers modeling_rope_utils configuration_utils
core_model_loading generation.utils utils.generic utils.output_capturing
integrations.moe integrations.sdpa_attention integrations.finegrained_fp8 integrations.mxfp4""".split()
_NAMES = {"config", "text_config", "layer_config", "mtp_config", "model_config"}


def declared() -> dict[str, Any]:
    """What ``FILE`` holds."""
    import transformers
    from transformers import PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.support import reference as reference  # which registers a model that transformers only has in another

    own = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    methods = {name for name in dir(PreTrainedConfig) if name not in own}
    shared = set[str]().union(*(_reads(f"transformers.{name}") for name in SHARED)) - methods - own
    families, outside = {}, {text: outer for outer, text in TEXT_OF.items()}
    for kind, (config, _) in MODELS.items():
        theirs = transformers.CONFIG_MAPPING[config.saved_type or kind]
        names = {field.name for field in dataclasses.fields(theirs)} | theirs.attribute_map.keys()
        mappings = transformers.AutoModelForCausalLM._model_mapping, transformers.AutoModel._model_mapping
        read = _reads(next(mapping for mapping in mappings if theirs in mapping)[theirs].__module__)
        outer = outside.get(kind, kind.removesuffix("_text"))
        if outer != kind and outer in transformers.CONFIG_MAPPING:
            wrapper = transformers.CONFIG_MAPPING[outer]
            for around in (
                wrapper,
                *filter(dataclasses.is_dataclass, wrapper.sub_configs.values()),
            ):  # their code is in the same file
                read -= {field.name for field in dataclasses.fields(around)} | {
                    *around.attribute_map,
                    *wrapper.sub_configs,
                }
        names |= read
        families[kind] = sorted(names - own - methods)
    return {
        "transformers": transformers.__version__,
        "all": sorted(own),
        "shared": sorted(shared),
        "families": families,
        "decoders": sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    }


def _reads(module: str) -> set[str]:
    """The names that a module reads from a config: ``config.name``, and those given to getattr and hasattr."""
    found = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            target, name = node.args[:2]
            if _is_config(target) and isinstance(name, ast.Constant):
                found.add(name.value)
    return found


def _is_config(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):  # config.get_text_config().name
        return getattr(node.func, "attr", "") == "get_text_config"
    return getattr(node, "attr", getattr(node, "id", "")) in _NAMES


if __name__ == "__main__":
    FILE.write_text(json.dumps(declared(), indent=1) + "\n")
