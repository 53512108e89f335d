"""DeepSeek-V3 and R1 (DeepSeek-V3 technical report, 2024).

Latent attention (MLA) with rotary embedding of neighbouring pairs. The first layers are dense; the others have a shared
expert and routed experts, chosen by sigmoid affinities plus a correction bias within the best groups and weighted
without the bias. The multi-token-prediction layers of a checkpoint are skipped unless asked for with ``mtp=True``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from nnxmoe.config.bounds import count
from nnxmoe.layers.mla import MLA, LatentWidths
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.model.maxtext_layers import LayerGroups
from nnxmoe.models.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE
from nnxmoe.models.latent import LatentMoEConfig
from nnxmoe.models.tables import (
    HF_DECODER,
    HF_LATENT,
    HF_MLP,
    HF_MTP,
    MAXTEXT_DECODER,
    MAXTEXT_LATENT,
    MAXTEXT_MLP,
    maxtext_experts,
    maxtext_mlp,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(LatentMoEConfig):
    """``first_k_dense_replace``: number of dense layers, which come first."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"

    first_k_dense_replace: int = count(3, least=0)


_DEEPSEEK_V3 = DeepSeekV3Config(
    max_position_embeddings=163840,
    rope_scaling={
        "type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    dtype="bfloat16",
)  # fmt: skip

_BLOCK = "DeepSeekMoeBlock_0"


class DeepSeekV3(DenseOrMoE):
    """DeepSeek-V3 and R1."""

    configs = (DeepSeekV3Config,)
    presets = {"deepseek-v3": _DEEPSEEK_V3, "deepseek-r1": _DEEPSEEK_V3}
    hub_ids = {"deepseek-v3": "deepseek-ai/DeepSeek-V3", "deepseek-r1": "deepseek-ai/DeepSeek-R1"}
    hub_notes = dict.fromkeys(
        presets,
        "685B parameters in FP8 blocks, 0.69 TB, loaded as bfloat16; the layer for multi-token prediction (11.5B "
        "parameters) is left out without mtp=True",
    )
    hf_table = HF_DECODER | HF_LATENT | HF_MLP | HF_GROUPED_EXPERTS | HF_MTP
    maxtext_table = {
        **MAXTEXT_DECODER, **MAXTEXT_LATENT, **MAXTEXT_MLP,
        **maxtext_mlp("layer.moe.shared", f"{_BLOCK}/shared_experts"), **maxtext_experts(f"{_BLOCK}/MoeBlock_0"),
        "layer.moe.router.kernel": (f"{_BLOCK}/MoeBlock_0/gate/kernel", ("embed_moe", None)),
        "layer.moe.router.bias": (f"{_BLOCK}/MoeBlock_0/gate/bias", (None,)),
    }  # fmt: skip
    maxtext_layers = LayerGroups("dense_layers", "moe_layers")

    def attention(self, index: int, form: Callable[..., MLA] = MLA, **kw: Any) -> MLA:
        c = self.config
        return form(
            LatentWidths(
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
            form=self.strategy.latent,
            attend=self.strategy.attend,
            **kw,
        )
