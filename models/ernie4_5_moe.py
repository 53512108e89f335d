"""ERNIE 4.5 and the text model of ERNIE-4.5-VL (Baidu, 2025).

The rotary embedding rotates adjacent pairs. Layers have routed and shared experts. The router selects experts by a
softmax plus a correction bias.

ERNIE-4.5-VL has separate routers and experts for text and for images. Only the router and experts for text are
loaded. A position in ERNIE-4.5-VL has three components. They are equal for text, so the rotary embedding equals ERNIE
4.5's. Saved models have the model_type ``ernie4_5_moe``.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count, number
from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import MROPE_FIELDS
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.layers.rope import rotate_pairs
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W, prefix_of
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45MoeConfig(DecoderConfig):
    """Config of ERNIE 4.5.

    Attributes:
        moe_layer_start_index: First layer that may have experts.
        moe_layer_end_index: Last layer that may have experts. -1 is the model's last layer.
        moe_layer_interval: In this range, layers have experts if their 1-based index is a multiple of this interval.
        moe_k: Experts per token.
        moe_norm_min: Lower bound of the sum by which the weights of the selected experts are divided.
    """

    model_type = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    experts_field, experts_per_token_field = "moe_num_experts", "moe_k"
    scale_in_queries = False
    n_shared_experts = property(lambda self: self.moe_num_shared_experts)  # DeepSeek-V3's name, used by shared code
    aliases = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    fixed = {"use_bias": (None, False)}
    ignored = "output_router_logits router_aux_loss_coef"

    vocab_size: int = 103424
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    moe_intermediate_size: int = count(1536, most=2**24)
    moe_k: int = count(6, most=4096)
    moe_num_experts: int = count(64, most=4096)
    moe_num_shared_experts: int = count(2, least=0, most=4096)
    moe_layer_start_index: int = count(1, least=0)
    moe_layer_end_index: int = count(-1, least=-1)
    moe_layer_interval: int = count(1)
    moe_norm_min: float = number(1e-12, above=0.0, most=1.0)
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2

    @property
    def sparse_layers(self) -> Sequence[bool]:
        first, interval = self.moe_layer_start_index, self.moe_layer_interval
        last = self.num_hidden_layers if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return tuple(first <= i <= last and (i + 1) % interval == 0 for i in range(self.num_hidden_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45VLMoeTextConfig(Ernie45MoeConfig):
    """Text config of ERNIE-4.5-VL.

    In config.json, ``moe_intermediate_size`` lists the widths of the experts for text and for images, and
    ``mlp_layer_types`` determines ``moe_layer_start_index``.
    """

    model_type = "ernie4_5_vl_moe_text"
    saved_type = "ernie4_5_moe"
    ignored = f"mlp_layer_types {MROPE_FIELDS}"

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._standard_fields(fields)
        widths, layer_types = values.get("moe_intermediate_size"), values.get("mlp_layer_types")
        if isinstance(widths, list) and len(widths) == 2:
            values["moe_intermediate_size"] = widths[0]
        if layer_types is not None:
            layers = layer_types if isinstance(layer_types, list) else []
            dense = layers.count("dense")
            if layer_types != ["dense"] * dense + ["sparse"] * (len(layers) - dense):
                raise ConfigError(f"mlp_layer_types {short(layer_types)} must list dense layers, then sparse layers")
            values["moe_layer_start_index"] = dense
        return values

    @property
    def unused_tensors(self) -> Collection[str]:
        """Tensors of routers and experts for images. These experts are numbered after the experts for text."""
        experts = range(self.moe_num_experts, 2 * self.moe_num_experts)
        names = [f"mlp.experts.{e}.{x}_proj.weight" for e in experts for x in ("gate", "up", "down")]
        layers = (i for i, is_sparse in enumerate(self.sparse_layers) if is_sparse)
        return {prefix_of(layer) + name for layer in layers for name in ("mlp.gate.weight_1", *names)}


class Ernie45Moe(DenseOrMoE):
    """ERNIE 4.5 language model with experts, and the text model of ERNIE-4.5-VL."""

    configs = (Ernie45MoeConfig, Ernie45VLMoeTextConfig)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        return self.gqa(index, bias=False, rotate=rotate_pairs, **kw)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        c = self.config
        router = Router(c.hidden_size, c.experts, SoftmaxTopK(c.moe_k, min_weight_sum=c.moe_norm_min), bias=True, **kw)
        assert router.bias is not None
        router.bias.set_metadata(inputs=1)  # checkpoints store the bias as a matrix [1, E]
        return router


_BIAS = W("mlp.moe_statics.e_score_correction_bias")
_HF: Hf = {  # ERNIE-4.5-VL's files store the router's kernel as [in, out], and the biases of both routers in one tensor
    **HF_DECODER, **HF_GROUPED_EXPERTS,
    "layer.moe.router.kernel": (W("mlp.gate.weight"), W("mlp.gate.weight").T.files_only),
    "layer.moe.router.bias": (_BIAS, _BIAS.rows(0, 2).files_only, W("mlp.gate.moe_statics.e_score_correction_bias")),
}  # fmt: skip

FAMILY = Family(model=Ernie45Moe, hf=_HF)
