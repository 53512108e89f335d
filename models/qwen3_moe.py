"""Qwen3's mixture-of-experts models (Qwen3 technical report, 2025).

Attention is as in Qwen3. The router applies a softmax over all experts, selects the top experts and usually rescales
their weights. Some layers may be dense. There are no shared experts.
"""

import dataclasses
from typing import Any

from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.model.family import Family, MaxTextNames
from nnxmoe.models.qwen import QWEN3, NormedHeads
from nnxmoe.models.shared.qwen_moe import QwenMoe, QwenMoeConfig
from nnxmoe.models.shared.tables import HF_DECODER, HF_MOE, Linen, maxtext_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(QwenMoeConfig):
    """Config of Qwen3's mixture-of-experts models.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        use_sliding_window: Whether all layers attend to a window of ``sliding_window`` keys.
    """

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    fixed = {"use_qk_norm": (True,), "qkv_bias": (False,), "shared_expert_intermediate_size": (None, 0)}

    intermediate_size: int = 6144
    num_key_value_heads: int | None = 4
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = count(4096)
    max_window_layers: int | None = count(None, least=0)

    def _check(self) -> None:
        super()._check()
        if self.use_sliding_window and self.max_window_layers:
            raise ConfigError(
                f"max_window_layers {self.max_window_layers} is not supported with use_sliding_window true, because "
                "transformers ignores max_window_layers and uses the window in all layers. "
                "Remove max_window_layers to do the same"
            )

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


class Qwen3Moe(NormedHeads, QwenMoe):
    """Qwen3's mixture-of-experts models."""

    configs = (Qwen3MoeConfig,)


def _preset(hidden: int, dense: int, layers: int, heads: int, width: int, experts: int = 128) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=hidden, intermediate_size=dense, num_hidden_layers=layers, num_attention_heads=heads, head_dim=128,
        num_key_value_heads=4, moe_intermediate_size=width, num_experts=experts, norm_topk_prob=True,
        max_position_embeddings=40960, sliding_window=None, rope_theta=1e6, bos_token_id=151643, eos_token_id=151645,
        dtype="bfloat16",
    )  # fmt: skip


_30B = _preset(2048, 6144, 48, 32, 768)
_CODER: dict[str, Any] = {"max_position_embeddings": 262144, "rope_theta": 1e7, "bos_token_id": None}
_480B = dataclasses.replace(_preset(6144, 8192, 62, 96, 2560, 160), num_key_value_heads=8, **_CODER)
_MAXTEXT: Linen = {
    **QWEN3.maxtext.table,
    **maxtext_experts("moe_block"),
    "layer.moe.router.kernel": ("moe_block/gate/kernel", ("embed", None)),
}
_PRESETS = {
    "qwen3-30b-a3b": _30B,
    "qwen3-235b-a22b": _preset(4096, 12288, 94, 64, 1536),
    "qwen3-coder-30b-a3b": dataclasses.replace(_30B, intermediate_size=5472, **_CODER),
    "qwen3-coder-480b-a35b": _480B,
}

FAMILY = Family(
    model=Qwen3Moe,
    hf=HF_DECODER | HF_MOE,
    maxtext=MaxTextNames(_MAXTEXT),
    presets=_PRESETS,
    hub_ids={
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
        "qwen3-coder-30b-a3b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "qwen3-coder-480b-a35b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    },
)
