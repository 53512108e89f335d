"""Qwen3's mixture-of-experts models (Qwen3 technical report, 2025).

Attention is as in Qwen3. The router applies a softmax over all experts, selects the top experts and usually rescales
their weights. Some layers may be dense. There are no shared experts.
"""

import dataclasses

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


_MAXTEXT: Linen = {
    **QWEN3.maxtext.table,
    **maxtext_experts("moe_block"),
    "layer.moe.router.kernel": ("moe_block/gate/kernel", ("embed", None)),
}

FAMILY = Family(model=Qwen3Moe, hf=HF_DECODER | HF_MOE, maxtext=MaxTextNames(_MAXTEXT))
