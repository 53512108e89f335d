"""The text model of a config.json that describes a multimodal model."""

from collections.abc import Mapping
from typing import Any

# Taken from around the text model where its own config lacks them.
_SHARED = "dtype torch_dtype quantization_config quantization bos_token_id eos_token_id pad_token_id".split()


def text_fields(fields: Any) -> Any:
    """The fields of the text model, if a parsed config.json nests it in ``text_config``; else the fields as they are.

    The embedding and the head are tied if either config says so, as in transformers.
    """
    nested = fields.get("text_config") if isinstance(fields, Mapping) else None
    if not isinstance(nested, Mapping) or "num_hidden_layers" in fields:
        return fields
    found = {name: fields[name] for name in _SHARED if fields.get(name) is not None}
    found |= {name: value for name, value in nested.items() if value is not None or name not in found}
    found.setdefault("model_type", fields.get("model_type"))
    names = fields.get("architectures")
    if names and not (isinstance(names, list) and all(str(n).endswith("ForConditionalGeneration") for n in names)):
        found["architectures"] = names  # such as a classifier, which is refused
    if fields.get("tie_word_embeddings"):
        found["tie_word_embeddings"] = True
    return found
