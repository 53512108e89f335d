"""DeepSeek-V3 and R1 (DeepSeek-V3 technical report, 2024).

Latent attention (MLA) with rotary embedding of neighbouring pairs. The first layers are dense; the others have a shared
expert and routed experts, chosen by sigmoid affinities plus a correction bias within the best groups and weighted
without the bias. The multi-token-prediction layers of a checkpoint are skipped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.rope import yarn_mscale
from nnxmoe.config.rope_fields import kind_of
from nnxmoe.layers.mla import MLA
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.model.causal_lm import CausalLM, Runs
from nnxmoe.model.layer import Layer
from nnxmoe.model.strategy import Strategy
from nnxmoe.models.llama import HF_DECODER, HF_MLP, MAXTEXT_DECODER, MAXTEXT_MLP
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router, SigmoidGroupTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(DecoderConfig):
    """``intermediate_size``: width of the dense layers; ``moe_intermediate_size``: width of one expert. ``q_lora_rank``
    None: a single query projection. ``head_dim`` is ignored: the rotated width is ``qk_rope_head_dim``."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rope_field = "qk_rope_head_dim"
    grouped = False
    aliases = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    fixed = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    ignored = "aux_loss_alpha seq_aux ep_size qk_head_dim output_router_logits router_aux_loss_coef"

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
    n_shared_experts: int | None = count(1, least=0, most=4096)
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = count(3, least=0)
    num_nextn_predict_layers: int = count(1, least=0, most=1024)
    bos_token_id: int | None = 0
    eos_token_id: int | Sequence[int] | None = 1

    def _check(self) -> None:
        super()._check()
        if self.kv_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads {self.kv_heads} must equal num_attention_heads {self.num_attention_heads}: "
                "latent attention has no grouped heads"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or size < 2:
            raise ConfigError(
                f"n_group {self.n_group} must divide n_routed_experts {self.n_routed_experts} into groups of at least 2"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(f"topk_group {self.topk_group} is more than n_group {self.n_group}")
        if self.num_experts_per_tok > self.topk_group * size:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the {self.topk_group * size} experts "
                f"of topk_group {self.topk_group} groups"
            )

    @property
    def head_width(self) -> int:
        return self.qk_rope_head_dim

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(query width), times YaRN's temperature squared if ``mscale_all_dim`` is set."""
        fields, scale = self.rope_fields, (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if kind_of(fields) != "default" and fields.get("mscale_all_dim"):
            stretch = float(fields.get("factor") or getattr(self.rope, "scale", 1.0))
            scale *= yarn_mscale(stretch, float(fields["mscale_all_dim"])) ** 2
        return scale


_DEEPSEEK_V3 = DeepSeekV3Config(
    max_position_embeddings=163840,
    rope_scaling={
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    dtype="bfloat16",
)

PRESETS: dict[str, DecoderConfig] = {"deepseek-v3": _DEEPSEEK_V3, "deepseek-r1": _DEEPSEEK_V3}
HUB_IDS = {"deepseek-v3": "deepseek-ai/DeepSeek-V3", "deepseek-r1": "deepseek-ai/DeepSeek-R1"}

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

HF_TABLE = (
    HF_DECODER
    | HF_MLP
    | {
        "layer.moe_norm.scale": ("model.layers.{layer}.post_attention_layernorm.weight",),
        "layer.attention.q.kernel": (_ATTENTION + "q_proj.weight",),
        "layer.attention.q.a.kernel": (_ATTENTION + "q_a_proj.weight",),
        "layer.attention.q.a.bias": (_ATTENTION + "q_a_proj.bias",),
        "layer.attention.q.norm.scale": (_ATTENTION + "q_a_layernorm.weight",),
        "layer.attention.q.b.kernel": (_ATTENTION + "q_b_proj.weight",),
        "layer.attention.kv_a.kernel": (_ATTENTION + "kv_a_proj_with_mqa.weight",),
        "layer.attention.kv_a.bias": (_ATTENTION + "kv_a_proj_with_mqa.bias",),
        "layer.attention.kv_norm.scale": (_ATTENTION + "kv_a_layernorm.weight",),
        "layer.attention.kv_b.kernel": (_ATTENTION + "kv_b_proj.weight",),
        "layer.attention.o.kernel": (_ATTENTION + "o_proj.weight",),
        "layer.attention.o.bias": (_ATTENTION + "o_proj.bias",),
        "layer.moe.router.kernel": (_MLP + "gate.weight",),
        "layer.moe.router.bias": (_MLP + "gate.e_score_correction_bias",),
        "layer.moe.experts.gate": (_MLP + "experts.{expert}.gate_proj.weight", _MLP + "experts.gate_up_proj[0/2]"),
        "layer.moe.experts.up": (_MLP + "experts.{expert}.up_proj.weight", _MLP + "experts.gate_up_proj[1/2]"),
        "layer.moe.experts.down": (_MLP + "experts.{expert}.down_proj.weight", _MLP + "experts.down_proj"),
        "layer.moe.shared.gate.kernel": (_MLP + "shared_experts.gate_proj.weight",),
        "layer.moe.shared.up.kernel": (_MLP + "shared_experts.up_proj.weight",),
        "layer.moe.shared.down.kernel": (_MLP + "shared_experts.down_proj.weight",),
    }
)


_SELF = "decoder/{layer}/self_attention/"
_BLOCK = "decoder/{layer}/DeepSeekMoeBlock_0/"
_EXPERT_IN = ("exp", "embed_moe", "mlp_moe")
MAXTEXT_TABLE = (
    MAXTEXT_DECODER
    | MAXTEXT_MLP
    | {
        "layer.attention.q.kernel": (_SELF + "query/kernel", ("embed", "q_heads", "kv")),
        "layer.attention.q.a.kernel": (_SELF + "wq_a/kernel", ("embed", "q_lora_up_proj")),
        "layer.attention.q.a.bias": (_SELF + "wq_a/bias", ("q_lora_up_proj",)),
        "layer.attention.q.norm.scale": (_SELF + "q_norm/scale", ("norm",)),
        "layer.attention.q.b.kernel": (_SELF + "wq_b/kernel", ("q_lora", "q_heads", "kv")),
        "layer.attention.kv_a.kernel": (_SELF + "wkv_a/kernel", ("embed", "kv_lora_up_proj")),
        "layer.attention.kv_a.bias": (_SELF + "wkv_a/bias", ("kv_lora_up_proj",)),
        "layer.attention.kv_norm.scale": (_SELF + "kv_norm/scale", ("norm",)),
        "layer.attention.kv_b.kernel": (_SELF + "wkv_b/kernel", ("kv_lora", "kv_heads", "kv_head_dim")),
        "layer.attention.o.kernel": (_SELF + "out/kernel", ("heads", "kv", "embed")),
        "layer.attention.o.bias": (_SELF + "out/bias", ("embed",)),
        "layer.moe.router.kernel": (_BLOCK + "MoeBlock_0/gate/kernel", ("embed_moe", None)),
        "layer.moe.router.bias": (_BLOCK + "MoeBlock_0/gate/bias", (None,)),
        "layer.moe.experts.gate": (_BLOCK + "MoeBlock_0/wi_0", _EXPERT_IN),
        "layer.moe.experts.up": (_BLOCK + "MoeBlock_0/wi_1", _EXPERT_IN),
        "layer.moe.experts.down": (_BLOCK + "MoeBlock_0/wo", ("exp", "mlp_moe", "embed_moe")),
        "layer.moe.shared.gate.kernel": (_BLOCK + "shared_experts/wi_0/kernel", ("embed", "mlp")),
        "layer.moe.shared.up.kernel": (_BLOCK + "shared_experts/wi_1/kernel", ("embed", "mlp")),
        "layer.moe.shared.down.kernel": (_BLOCK + "shared_experts/wo/kernel", ("mlp", "embed")),
    }
)


class DeepSeekV3(CausalLM):
    """DeepSeek-V3 and R1."""

    configs = (DeepSeekV3Config,)
    presets = PRESETS
    hub_ids = HUB_IDS
    hub_note = (
        "685B parameters in FP8 blocks, 0.69 TB, loaded as bfloat16; the layer for multi-token prediction (11.5B "
        "parameters) is left out"
    )
    hf_table = HF_TABLE
    maxtext_table = MAXTEXT_TABLE
    maxtext_layers = ("dense_layers", "moe_layers")

    def runs(self, config: DeepSeekV3Config, strategy: Strategy, dtype: jnp.dtype) -> Runs:
        c, dim, eps = config, config.hidden_size, config.rms_norm_eps

        def attention(**kw: Any) -> MLA:
            return MLA(
                dim,
                c.num_attention_heads,
                q_rank=c.q_lora_rank,
                kv_rank=c.kv_lora_rank,
                nope=c.qk_nope_head_dim,
                rope=c.qk_rope_head_dim,
                v_dim=c.v_head_dim,
                scale=c.softmax_scale,
                bias=c.attention_bias,
                rotate=rotate_pairs if c.rope_interleave else rotate_halves,
                form=strategy.latent,
                attend=strategy.attend,
                **kw,
            )

        def dense(rngs: nnx.Rngs | None) -> Layer:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            mlp = MLP(dim, c.intermediate_size, bias=False, **kw)
            return Layer(RMSNorm(dim, eps, **kw), attention(**kw), RMSNorm(dim, eps, **kw), mlp)

        def sparse(rngs: nnx.Rngs | None) -> Layer:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            select = SigmoidGroupTopK(
                c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor
            )
            router = Router(dim, c.n_routed_experts, select, bias=True, **kw)
            experts = Experts(
                dim, c.moe_intermediate_size, c.n_routed_experts, matmul=strategy.matmul, rules=strategy.rules, **kw
            )
            width = c.moe_intermediate_size * (c.n_shared_experts or 0)
            shared = MLP(dim, width, bias=False, **kw) if width else None
            moe = MoE(router, experts, strategy.dispatch, shared, strategy.mesh)
            return Layer(RMSNorm(dim, eps, **kw), attention(**kw), RMSNorm(dim, eps, **kw), moe)

        dense_count = min(c.first_k_dense_replace, c.num_hidden_layers)
        return [(dense_count, dense), (c.num_hidden_layers - dense_count, sparse)]
