"""EXAONE 4.0 (LG AI Research, 2025): Qwen3's layers with norms after attention and feed-forward instead of before.

If some layers have a sliding window, only those layers rotate queries and keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count
from nnxmoe.config.layer_types import PatternWindowsConfig
from nnxmoe.layers.context import Attention
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, PostNormLayer
from nnxmoe.models.llama import LlamaLike
from nnxmoe.models.olmo3 import FAMILY as OLMO3
from nnxmoe.models.shared.normed_heads import NormedHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exaone4Config(PatternWindowsConfig):
    """Config of EXAONE 4.0. If ``sliding_window`` is null, all layers have full attention and rotation."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    scale_in_queries = False
    attention_bias = False
    mlp_bias = False

    vocab_size: int = 102400
    intermediate_size: int = 16384
    num_key_value_heads: int | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = count(4096)
    bos_token_id: int | None = 0
    eos_token_id: int | Sequence[int] | None = 2


class Exaone4(NormedHeads, LlamaLike):
    """EXAONE 4.0 language model."""

    configs = (Exaone4Config,)

    def layer(self, index: int, form: type[Layer] = PostNormLayer, **options: Any) -> Layer:
        return super().layer(index, form, **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        rotates = self.config.sliding_window is None or self.config.windows[index] is not None
        return super().attention(index, rotary=self.config.rope if rotates else None, **kw)


FAMILY = Family(model=Exaone4, hf=OLMO3.hf)
