"""DeepSeek-V3 and R1 (DeepSeek-V3 technical report, 2024).

Latent attention (MLA) rotates adjacent pairs. The first layers are dense. The other layers have a shared expert and
routed experts. The router selects experts within the best groups by sigmoid scores plus a correction bias, and weights
them by the scores without the bias. Multi-token prediction layers are loaded only with ``mtp=True``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.rope_parameters import rope_type, yarn_mscale
from nnxmoe.layers.attention.mla import LATENT_NORM_EPS, MLA, MLADims
from nnxmoe.layers.context import Attention
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.model.family import Family, LayerGroups, MaxTextNames
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE, GroupedExpertsConfig
from nnxmoe.models.shared.tables import (
    HF_DECODER,
    HF_LATENT,
    HF_MTP,
    MAXTEXT_DECODER,
    MAXTEXT_LATENT,
    MAXTEXT_MLP,
    Linen,
    maxtext_experts,
    maxtext_mlp,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(GroupedExpertsConfig):
    """Config of DeepSeek-V3. ``head_dim`` is ignored, because the rotated width is ``qk_rope_head_dim``.

    Attributes:
        first_k_dense_replace: Number of dense layers at the start.
        q_lora_rank: Rank of the query projection. If None, queries have a single full-rank projection.
    """

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rope_field = "qk_rope_head_dim"
    ignored = "qk_head_dim"
    rotates: ClassVar[bool] = True  # whether there is a rotary embedding; if False, the rope fields are ignored

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    q_lora_rank: int | None = count(1536, most=2**20)
    kv_lora_rank: int = count(512, most=2**20)
    qk_nope_head_dim: int = count(128, most=2**16)
    qk_rope_head_dim: int = count(64, most=2**16)
    v_head_dim: int = count(128, most=2**16)
    rope_interleave: bool = True
    moe_intermediate_size: int = count(2048, most=2**24)
    n_routed_experts: int = count(256, most=4096)
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = count(3, least=0)
    num_nextn_predict_layers: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | Sequence[int] | None = 1

    def _check(self) -> None:
        super()._check()
        if self.kv_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads {self.kv_heads} must equal num_attention_heads {self.num_attention_heads}: "
                "latent attention has no grouped heads"
            )

    @property
    def head_width(self) -> int:
        return self.qk_rope_head_dim

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return super().rope_fields if self.rotates else {}

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of the norms of the query and key/value latents."""
        return LATENT_NORM_EPS

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores: 1 / sqrt(query width), times YaRN's squared temperature if ``mscale_all_dim`` is set."""
        fields, scale = self.rope_fields, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if rope_type(fields) != "default" and fields.get("mscale_all_dim"):
            factor = float(fields.get("factor") or getattr(self.rope, "scale", 1.0))
            scale *= yarn_mscale(factor, float(fields["mscale_all_dim"])) ** 2
        return scale


class DeepSeekV3(DenseOrMoE):
    """DeepSeek-V3 and R1 language models."""

    configs = (DeepSeekV3Config,)
    supports_mtp = True

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.mla(**kw)

    def mla(self, form: type[MLA] = MLA, **options: Any) -> MLA:
        """Build latent attention from the config, as an instance of ``form`` with the further arguments ``options``."""
        c = self.config
        return form(
            MLADims(
                c.hidden_size,
                c.num_attention_heads,
                q_rank=c.q_lora_rank,
                kv_rank=c.kv_lora_rank,
                nope=c.qk_nope_head_dim,
                rope=c.qk_rope_head_dim,
                v_dim=c.v_head_dim,
                eps=c.latent_norm_eps,
            ),
            scale=c.softmax_scale,
            bias=c.attention_bias,
            rotary=c.rope if c.rotates else None,
            rotate=rotate_pairs if c.rope_interleave else rotate_halves,
            mla=self.strategy.mla,
            attention_fn=self.strategy.attention_fn,
            **options,
        )


_BLOCK = "DeepSeekMoeBlock_0"
_MAXTEXT: Linen = {
    **MAXTEXT_DECODER, **MAXTEXT_LATENT, **MAXTEXT_MLP,
    **maxtext_mlp("layer.moe.shared", f"{_BLOCK}/shared_experts"), **maxtext_experts(f"{_BLOCK}/MoeBlock_0"),
    "layer.moe.router.kernel": (f"{_BLOCK}/MoeBlock_0/gate/kernel", ("embed_moe", None)),
    "layer.moe.router.bias": (f"{_BLOCK}/MoeBlock_0/gate/bias", (None,)),
}  # fmt: skip

FAMILY = Family(
    model=DeepSeekV3,
    hf=HF_DECODER | HF_LATENT | HF_GROUPED_EXPERTS | HF_MTP,
    maxtext=MaxTextNames(_MAXTEXT, LayerGroups("dense_layers", "moe_layers")),
)
