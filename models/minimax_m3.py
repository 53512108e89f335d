"""The text model of MiniMax-M3 (MiniMax, 2026), based on the implementation in transformers.

Grouped-query attention normalizes each head and rotates its first components. In most layers, an indexer selects blocks
of keys per key/value head. The experts are as in DeepSeek-V3, with a single group and a shared expert. The activation
is as in gpt-oss.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_at_most, count, number, per_layer
from nnxmoe.config.partial_rotary import PartialRotaryConfig
from nnxmoe.config.printable import short
from nnxmoe.layers.activations import ClampedSwiGLU
from nnxmoe.layers.attention.block_indexer import BlockIndexer, IndexedGQA, KeyBlocks
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import corrected_router
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.block import MoE

_SPARSE = "minimax_m3_sparse"
# Field of sparse_attention_config in published files -> field name in transformers.
_NESTED = {
    "sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM3VLTextConfig(PartialRotaryConfig):
    """Text config of MiniMax-M3.

    Published files have the indexer's fields in ``sparse_attention_config``, and ``moe_layer_freq`` instead of
    ``mlp_layer_types``.

    Attributes:
        intermediate_size: Width of a routed expert.
        dense_intermediate_size: Width of a dense layer.
        shared_intermediate_size: Width of the shared expert.
        layer_types: ``full_attention``, or ``minimax_m3_sparse`` for layers with an indexer. If null, all layers are
            ``full_attention``.
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers have experts.
        routed_scaling_factor: Factor that multiplies the normalized weights of the selected experts.
        index_block_size: Keys per block.
        index_topk_blocks: Number of selected blocks, including the last ``index_local_blocks`` blocks.
    """

    model_type = "minimax_m3_vl_text"
    architecture = "MiniMaxM3VLForCausalLM"
    published_architectures = "MiniMaxM3SparseForCausalLM"
    experts_field = "num_local_experts"
    scale_in_queries = False
    aliases = {"num_experts": "num_local_experts"}
    fixed = {
        "scoring_func": ("sigmoid",), "use_qk_norm": (True,), "use_routing_bias": (True,),
        "n_shared_experts": (None, 1), "attention_output_gate": (None, False), "swiglu_beta": (None, 1),
    }  # fmt: skip
    # Fields of published files that transformers does not read. `_standard_fields` reads the last two.
    ignored = """rotary_dim router_jitter_noise output_router_logits router_aux_loss_coef qk_norm_type use_gemma_norm
        merged_hidden_size use_mtp num_mtp_modules num_nextn_predict_layers mtp_transformer_layers max_model_len
        sparse_attention_config moe_layer_freq"""

    vocab_size: int = 200064
    hidden_size: int = 6144
    intermediate_size: int = 3072
    dense_intermediate_size: int = count(12288, most=2**24)
    shared_intermediate_size: int = count(3072, most=2**24)
    num_hidden_layers: int = 60
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 524288
    rope_theta: float = 5e6
    layer_types: Sequence[str] | None = per_layer("full_attention", _SPARSE)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    num_local_experts: int = count(128, most=4096)
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = number(1.702, above=0.0, most=1e6)
    swiglu_limit: float = number(7.0, above=0.0, most=1e6)
    index_n_heads: int = count(4, most=2**14)
    index_head_dim: int = count(128, most=2**16)
    index_block_size: int = count(128, most=2**16)
    index_topk_blocks: int = count(16, most=2**16)
    index_local_blocks: int = count(1, least=0, most=2**16)
    bos_token_id: int | None = 200034
    eos_token_id: int | Sequence[int] | None = 200020

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._standard_fields(fields) | {"hidden_act": "silu"}  # transformers ignores the field
        nested = values.get("sparse_attention_config") or {}
        if not isinstance(nested, Mapping):
            raise ConfigError(f"sparse_attention_config must be an object or null, got {short(nested)}")
        values |= {name: nested[published_name] for published_name, name in _NESTED.items() if published_name in nested}
        for name, flags, types in (
            ("layer_types", nested.get("sparse_attention_freq"), ("full_attention", _SPARSE)),
            ("mlp_layer_types", values.get("moe_layer_freq"), ("dense", "sparse")),
        ):
            if flags is not None and not isinstance(flags, list):
                raise ConfigError(f"{name}: expected a list with 0 or 1 for each layer, got {short(flags)}")
            if flags is not None and values.get(name) is None:
                values[name] = [types[bool(flag)] for flag in flags]
        return values

    def _check(self) -> None:
        super()._check()
        if _SPARSE not in (self.layer_types or ()):
            return
        (larger, smaller), heads = sorted((self.index_n_heads, self.kv_heads), reverse=True), self.num_attention_heads
        if larger % smaller or heads % larger:
            raise ConfigError(
                f"index_n_heads {self.index_n_heads} must divide num_key_value_heads {self.kv_heads}, or be a multiple "
                f"of num_key_value_heads that divides num_attention_heads {heads}"
            )
        check_at_most(self, "index_local_blocks", "index_topk_blocks")
        if self.index_head_dim < self.rope_dim:
            raise ConfigError(f"index_head_dim {self.index_head_dim} is less than the rotated width {self.rope_dim}")

    @property
    def indexed(self) -> Sequence[bool]:
        """Whether each layer has an indexer."""
        return tuple(layer_type == _SPARSE for layer_type in self.layer_types or [""] * self.num_hidden_layers)


class MiniMaxM3VLText(CausalLM):
    """The text model of MiniMax-M3."""

    norm_class = OffsetNorm
    configs = (MiniMaxM3VLTextConfig,)

    def layer_type(self, index: int) -> Hashable:
        return self.config.indexed[index], self.config.sparse_layers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c, rotate = self.config, PartialRotary(self.config.rope_dim)
        norm = QKNorm.per_head(c.head_width, c.rms_norm_eps, norm=OffsetNorm, **kw)
        options: dict[str, Any] = {"bias": False, "qk_norm": norm, "rotate": rotate, **kw}
        if not c.indexed[index]:
            return self.gqa(index, **options)
        indexer = BlockIndexer(
            c.hidden_size, c.index_n_heads, c.index_head_dim,
            blocks=KeyBlocks(c.index_block_size, c.index_topk_blocks, c.index_local_blocks),
            eps=c.rms_norm_eps, rotary=c.rope, rotate=rotate, **kw,
        )  # fmt: skip
        return self.gqa(index, IndexedGQA, indexer=indexer, **options)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c, dim = self.config, self.config.hidden_size
        activation = ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit)
        dense = functools.partial(MLP, dim, bias=False, activation=activation, **kw)
        if not c.sparse_layers[index]:
            return dense(width=c.dense_intermediate_size)
        router = corrected_router(c, scale=c.routed_scaling_factor, **kw)
        shared = dense(width=c.shared_intermediate_size)
        return self.moe(router, c.intermediate_size, shared, activation=activation, **kw)


_MOE, _GATE_UP = "block_sparse_moe", W("mlp.experts.gate_up_proj")
_PARTS = (("gate", "w1", 0), ("up", "w3", 1))


def _mlp(block: str, published_block: str) -> dict[str, tuple[W, ...]]:
    """Return the name-table rows for a dense or shared feed-forward. transformers stores gate and up in one tensor."""
    rows = {
        x: (W(f"{block}.gate_up_proj.weight").rows(i, 2), W(f"{published_block}.{x}_proj.weight")) for x, _, i in _PARTS
    }
    return rows | {"down": (W(f"{block}.down_proj.weight"), W(f"{published_block}.down_proj.weight").files_only)}


# The first alternatives are the names in transformers' text model. The second alternatives are the published names.
_HF: Hf = {
    **HF_DECODER,
    **{
        f"layer.attention.indexer.{x}{suffix}": (
            W(f"self_attn.indexer.{x}_{end}"), W(f"self_attn.index_{x}_{end}").files_only
        )
        for x in "qk"
        for suffix, end in ((".kernel", "proj.weight"), ("_norm.scale", "norm.weight"))
    },
    **{f"layer.{name}_norm.scale": W("post_attention_layernorm.weight") for name in ("mlp", "moe")},
    **{f"layer.mlp.{x}.kernel": row for x, row in _mlp("mlp", "mlp").items()},
    **{
        f"layer.moe.shared.{x}.kernel": row
        for x, row in _mlp("mlp.shared_experts", f"{_MOE}.shared_experts").items()
    },
    "layer.moe.router.kernel": (W("mlp.gate.weight"), W(f"{_MOE}.gate.weight").files_only),
    "layer.moe.router.bias": (W("mlp.gate.e_score_correction_bias"), W(f"{_MOE}.e_score_correction_bias").files_only),
    **{
        f"layer.moe.experts.{x}": (_GATE_UP.rows(i, 2), W(f"{_MOE}.experts").each(f"{w}.weight"))
        for x, w, i in _PARTS
    },
    "layer.moe.experts.down": (W("mlp.experts.down_proj"), W(f"{_MOE}.experts").each("w2.weight")),
}  # fmt: skip


FAMILY = Family(
    model=MiniMaxM3VLText,
    hf=_HF,
    # transformers stores each pair of these projections as halves of one linear layer.
    peft_excluded=("mlp.gate", "mlp.up", "shared.gate", "shared.up"),
)
