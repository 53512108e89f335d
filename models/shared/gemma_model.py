"""Scaled embeddings and capped logits, shared by Gemma 3 and Gemma 4."""

from collections.abc import Callable
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.layers.embed import Embed, ScaledEmbed
from nnxmoe.layers.linear.head_kernel import CappedKernel
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.model.causal_lm import CausalLM


class GemmaModel(CausalLM):
    """A decoder with embeddings scaled by ``sqrt(D)``. If ``final_logit_softcapping`` is set, the logits are capped."""

    def __init__(self, config: DecoderConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.logit_cap: float | None = self.config.final_logit_softcapping

    def embedding(self, form: Callable[..., Embed] = ScaledEmbed, **options: Any) -> Embed:
        return super().embedding(form, **options)

    def head_weight(self) -> Kernel:
        kernel = super().head_weight()
        return kernel if self.logit_cap is None else CappedKernel(kernel, self.logit_cap)
