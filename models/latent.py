"""The config of families with latent attention and routed experts in groups (DeepSeek-V3 and its relatives)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.rope import yarn_mscale
from nnxmoe.config.rope_fields import kind_of
from nnxmoe.layers.mla import LATENT_NORM_EPS
from nnxmoe.models.grouped_experts import GroupedExpertsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMoEConfig(GroupedExpertsConfig):
    """The fields of families with DeepSeek-V3's layers, with its values; which layers are dense is up to the family.

    ``q_lora_rank`` None: a single query projection. ``head_dim`` is ignored: the rotated width is
    ``qk_rope_head_dim``."""

    rope_field = "qk_rope_head_dim"
    ignored = "qk_head_dim"
    rotates: ClassVar[bool] = True  # False: no rotary embedding; the rope fields are ignored

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
        """1 / sqrt(query width), times YaRN's temperature squared if ``mscale_all_dim`` is set."""
        fields, scale = self.rope_fields, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if kind_of(fields) != "default" and fields.get("mscale_all_dim"):
            stretch = float(fields.get("factor") or getattr(self.rope, "scale", 1.0))
            scale *= yarn_mscale(stretch, float(fields["mscale_all_dim"])) ** 2
        return scale
