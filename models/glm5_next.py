"""The text model of GLM-5.3 Flash (Zhipu AI, 2026), based on the implementation in transformers.

Three of four layers are Kimi Linear's recurrent layers with bounded decays. The other layers have GLM-5's sparse
attention without rotary embedding, and indexers that select pools of keys. There are several residual streams as in
DeepSeek-V4. The final norm normalizes the mean of the streams. The multi-token prediction layer is not loaded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_multiple, count, number, one_of, per_layer
from nnxmoe.layers.activations import LimitedSwiGLU
from nnxmoe.layers.attention.pooled_indexer import PooledIndexer
from nnxmoe.layers.hyper import MeanNorm
from nnxmoe.layers.recurrent.kimi_delta import BoundedDecays, KimiDelta, unbounded_decays
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.deepseek_v32 import DeepSeekV32
from nnxmoe.models.glm_moe_dsa import FAMILY as GLM_MOE_DSA
from nnxmoe.models.glm_moe_dsa import GlmMoeDsaConfig
from nnxmoe.models.shared.kimi_hybrid import FULL, HF_KIMI_DELTA, LINEAR, KimiHybrid, NestedDeltaConfig
from nnxmoe.models.shared.streamed import StreamedLM
from nnxmoe.models.shared.tables import Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm5NextTextConfig(GlmMoeDsaConfig, NestedDeltaConfig):
    """Text config of GLM-5.3 Flash.

    ``hc_mult``, ``hc_sinkhorn_iters`` and ``hc_eps`` configure the residual streams, as in `DeepSeekV4Config`.

    Attributes:
        linear_lower_bound: Lower bound of the log decays. If null, the decays are not bounded.
        index_kpool: Keys per pool. ``index_topk`` must be a multiple of this number.
        swiglu_limit: Bound of the outputs of the gate and up projections.
        indexer_types: Must be ``full`` for all attention layers.
    """

    model_type = "glm5_next_text"
    architecture = "Glm5NextForCausalLM"
    fixed = {"index_kpool_always_select_tail": (True,)}
    nested = {**NestedDeltaConfig.nested, "gate_lower_bound": "linear_lower_bound"}
    rotates = False

    num_hidden_layers: int = 45
    hidden_size: int = 4096
    max_position_embeddings: int = 1048576
    q_lora_rank: int = count(1536, most=2**20)
    qk_nope_head_dim: int = count(256, most=2**16)
    qk_rope_head_dim: int = one_of(0)
    head_dim: int | None = count(None, least=0, most=2**16)  # ignored; transformers saves the rotated width here
    n_routed_experts: int = count(288, most=4096)
    layer_types: Sequence[str] | None = per_layer(LINEAR, "indexed_attention", FULL)
    linear_num_heads: int | None = count(64, most=2**14)
    linear_lower_bound: float | None = number(-5.0, above=-1e3, most=-1e-6)
    index_kpool: int = count(16, most=2**16)
    hc_mult: int = count(4, most=64)
    hc_eps: float = number(1e-6, above=0.0, most=1.0)
    hc_sinkhorn_iters: int = count(20, most=1000)
    swiglu_limit: float = 10.0
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = 154820

    def unnested(self, given: Mapping[str, Any]) -> dict[str, Any]:
        delta_fields = super().unnested(given)
        if given.get("safe_gate", True) and delta_fields.get("linear_lower_bound", self.linear_lower_bound) is None:
            delta_fields["linear_lower_bound"] = -5.0
        return delta_fields

    def _check(self) -> None:
        super()._check()
        check_multiple(self, "index_topk", "index_kpool")
        shared_layers = [
            i for i, is_recurrent in enumerate(self.recurrent_layers) if not is_recurrent and not self.indexed[i]
        ]
        if shared_layers:
            raise ConfigError(
                f"layer {shared_layers[0]} has a shared indexer, but recurrent layers do not pass selected keys to the "
                "next attention layer. Set indexer_types to full for all attention layers"
            )

    @property
    def latent_norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def keys_per_query(self) -> int:
        return self.index_topk + self.index_kpool - 1


class Glm5NextText(StreamedLM, KimiHybrid, DeepSeekV32):
    """The text model of GLM-5.3 Flash."""

    configs = (Glm5NextTextConfig,)

    def final_norm(self, **kw: Unpack[ParamOptions]) -> MeanNorm:
        return MeanNorm(self.config.hidden_size, self.config.hc_mult, self.config.rms_norm_eps, **kw)

    def recurrent(self, **kw: Unpack[ParamOptions]) -> KimiDelta:
        c, bound = self.config, self.config.linear_lower_bound
        decays = unbounded_decays if bound is None else BoundedDecays(bound)
        return self.delta(decays, (c.linear_head_dim, c.linear_head_dim), (c.linear_num_heads,), **kw)

    def indexer(self, index: int, **kw: Unpack[ParamOptions]) -> PooledIndexer:
        c = self.config
        return PooledIndexer(
            c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim, pool=c.index_kpool, **kw
        )  # fmt: skip

    @property
    def activation(self) -> LimitedSwiGLU:
        return LimitedSwiGLU(self.config.swiglu_limit)


_STREAMS = {"fn.kernel": "fn", "base": "base", "scale": "scale"}
_BRANCH_NAMES = (("attention", "attn"), ("mlp", "ffn"), ("moe", "ffn"))
_HF: Hf = {
    **{key: row for key, row in GLM_MOE_DSA.hf.items() if not key.startswith("layer.mtp.")},
    **HF_KIMI_DELTA,
    "layer.attention.indexer.gate.kernel": W("self_attn.indexer.index_kpool_compress_gate"),
    "layer.attention.indexer.place": W("self_attn.indexer.index_kpool_compress_ape"),
    **{
        f"layer.{branch}_streams.weights.{part}": (W(f"hc_{name}_{end}"), W(f"{name}_hc.{end}"))
        for branch, name in _BRANCH_NAMES
        for part, end in _STREAMS.items()
    },
}

FAMILY = Family(model=Glm5NextText, hf=_HF)
