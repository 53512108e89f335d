"""Grouped-query attention with normalized heads of queries and keys, shared by Qwen3 and similar families."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.attention.gqa import QKNorm
from nnxmoe.layers.context import Attention
from nnxmoe.model.causal_lm import CausalLM


class NormedHeads(CausalLM):
    """A decoder with Qwen3's attention, which normalizes each head of queries and keys.

    ``attention`` passes ``options`` to `CausalLM.gqa`.
    """

    def attention(self, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None, **options: Any) -> Attention:
        c, kw = self.config, ParamOptions(dtype=dtype, rngs=rngs)
        norm = QKNorm.per_head(c.head_width, c.rms_norm_eps, norm=self.norm_class, **kw)
        return self.gqa(index, bias=c.attention_bias, qk_norm=norm, **options, **kw)
