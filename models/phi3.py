"""Phi-3, Phi-3.5 and Phi-4 (Microsoft, 2024 and 2025): Llama's layers with partially rotated heads and LongRoPE.

Checkpoints store the kernels of queries, keys and values in one tensor, and the kernels of gate and up in another.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.partial_rotary import PartialRotaryConfig
from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import rope_type
from nnxmoe.layers.context import Attention
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.llama import FAMILY as LLAMA
from nnxmoe.models.llama import LlamaLike
from nnxmoe.models.shared.tables import Hf, hf_fused_qkv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(PartialRotaryConfig):
    """Config of Phi-3 and Phi-4.

    A query attends to the last ``sliding_window`` keys, including its own, or to all keys if the field is null.
    LongRoPE uses ``long_factor`` for lengths above ``original_max_position_embeddings``.
    """

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    scale_in_queries = False
    mlp_bias = False
    # Fields that only the published code reads, with their values in Phi-4.
    fixed = {
        "attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,), "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }  # fmt: skip

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int | None = count(4096)
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = count(None)
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 32000
    pad_token_id: int | None = 32000

    def _check(self) -> None:
        if (name := rope_type(self.rope_fields)) not in ("default", "longrope"):
            raise ConfigError(f"rope type {short(name)} is not supported for phi3 models; supported: default, longrope")
        super()._check()

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        """Rope object in which the old names ``su`` and ``yarn`` are replaced by ``longrope``."""
        fields = super().rope_fields
        return {**fields, "rope_type": "longrope"} if rope_type(fields) in ("su", "yarn") else fields

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Phi3(LlamaLike):
    """Phi-3 and Phi-4 language models."""

    configs = (Phi3Config,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.gqa(index, bias=False, rotate=PartialRotary(self.config.rope_dim), **kw)


def _fused_rows(config: Phi3Config) -> Hf:
    """Return the rows of fused tensors, with the names of Llama's separate tensors as alternatives."""
    gate_up = W("mlp.gate_up_proj.weight")
    rows = hf_fused_qkv(config, "self_attn.qkv_proj")
    rows |= {"layer.mlp.gate.kernel": gate_up.rows(0, 2), "layer.mlp.up.kernel": gate_up.rows(1, 2)}
    return {key: (fused, *options(LLAMA.hf, key)) for key, fused in rows.items()}


FAMILY = Family(
    model=Phi3,
    hf=LLAMA.hf,
    hf_of_config=_fused_rows,
    # transformers has one linear layer for queries, keys and values, and another for gate and up.
    peft_excluded=("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"),
)
