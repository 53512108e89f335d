"""Ministral 3 (Mistral AI, 2025), the text model of ``mistral3`` checkpoints.

The layers are as in Mistral, with queries scaled by position.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.gqa import GQA, PositionScaledGQA
from nnxmoe.model.family import Family
from nnxmoe.models.llama import FAMILY as LLAMA
from nnxmoe.models.llama import LlamaLike

BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """Config of Ministral 3.

    The field ``llama_4_scaling_beta`` of the rope object determines how fast the scale of queries grows with their
    position. A query attends to the last ``sliding_window`` keys, including its own, or to all keys if the field is
    null.
    """

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    scale_in_queries = False
    mlp_bias = False
    rope_keys = DecoderConfig.rope_keys | {BETA}
    default_ropes = FrozenDict(
        {
            "type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
        }
    )  # fmt: skip
    ignored = "rope_parameters.max_position_embeddings rope_scaling.max_position_embeddings"

    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = count(None)
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    pad_token_id: int | None = 11

    def _check(self) -> None:
        super()._check()
        position_scale(self.rope_fields)

    @property
    def window(self) -> int | None:
        return self.sliding_window


def position_scale(rope_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arguments of `PositionScaledGQA` from a rope object. Raises ConfigError if they are missing."""
    beta, original = rope_fields.get(BETA), rope_fields.get(ORIGINAL)
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta <= 100:
        raise ConfigError(f"rope: {BETA} must be a number from 0 to 100, got {short(beta)}; 0 disables the scale")
    if original is None:
        raise ConfigError(f"rope: {ORIGINAL} is missing, but the scale of the queries depends on this field")
    return {"beta": float(beta), "original": original}


class Ministral3(LlamaLike):
    """Ministral 3 language model."""

    configs = (Ministral3Config,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        scale_arguments = position_scale(self.config.rope_fields)
        return self.gqa(index, PositionScaledGQA, bias=False, **scale_arguments, **kw)


FAMILY = Family(model=Ministral3, hf=LLAMA.hf)
