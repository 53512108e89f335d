"""Published config.json files by preset, with the fields that a config ignores."""

import json
from pathlib import Path

from nnxmoe.config.base import DecoderConfig
from tests.support.tiny import Fields

_DATA = Path(__file__).parents[1] / "data"
PUBLISHED: dict[str, Fields] = json.loads((_DATA / "published.json").read_text())
# Multimodal models, whose language model is in text_config.
PUBLISHED_TEXTS: dict[str, Fields] = json.loads((_DATA / "published_texts.json").read_text())
# Fields that have no effect, or that files use in different combinations -> compared by the properties below.
_FIELDS = """sliding_window max_window_layers mlp_only_layers layer_types mlp_layer_types indexer_types index_topk_freq
    index_skip_topk_offset first_k_dense_replace rope_theta rope_scaling rope_parameters partial_rotary_factor"""
_PROPERTIES = """window windows sparse_layers indexed recurrent_layers attention_types rope rope_dim
    compressed_rope hashed_layers"""


def described(config: DecoderConfig) -> Fields:
    """The fields of a config, with its layers and rotation as properties. Equal for a published file and its preset."""
    fields: Fields = {name: value for name, value in vars(config).items() if name not in _FIELDS.split()}
    for name in _PROPERTIES.split():
        value = getattr(config, name, None)
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields | {"model_type": config.saved_type or config.model_type}
