"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3 with indexers that select 2048 keys per query.

The indexer rotates halves of a head. The attention rotates adjacent pairs. DeepSeek trains the indexer separately to
predict the attention. A loss on the model's output has no gradient with respect to the indexer's weights, so
`nnxmoe.train.fit` does not change these weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import check_at_most, count, one_of, per_layer
from nnxmoe.layers.attention.indexer import Indexer
from nnxmoe.layers.attention.sparse_mla import SparseMLA
from nnxmoe.layers.context import Attention
from nnxmoe.layers.rope import rotate_halves
from nnxmoe.model.family import Family, MaxTextNames
from nnxmoe.model.weight_names import W
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.models.shared.tables import Linen


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV32Config(DeepSeekV3Config):
    """Config of DeepSeek-V3.2.

    Attributes:
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, the first ``first_k_dense_replace`` layers are
            dense.
        index_topk: Maximum number of keys per query.
        index_head_dim: Width of an indexer head. The first ``qk_rope_head_dim`` components are rotated.
        index_n_heads: Number of indexer heads.
    """

    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    aliases = {"num_experts": "n_routed_experts"}
    fixed = {"indexer_rope_interleave": (False,)}
    ignored = "mlp_bias"  # the reference implementation ignores the field and has no biases

    max_position_embeddings: int = 163840
    q_lora_rank: int = count(1536, most=2**20)
    rope_interleave: bool = one_of(True)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    layer_types: Sequence[str] | None = per_layer("indexed_attention")
    index_topk: int = count(2048)
    index_head_dim: int = count(128, most=2**16)
    index_n_heads: int = count(64, most=2**14)

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Extend the base method: replace the older name of the attention type, as in transformers."""
        values = super()._standard_fields(fields)
        if isinstance(layer_types := values.get("layer_types"), list):
            renamed = {"deepseek_sparse_attention": "indexed_attention"}
            values["layer_types"] = [renamed.get(str(layer_type), layer_type) for layer_type in layer_types]
        return values

    def _check(self) -> None:
        super()._check()
        check_at_most(self, "qk_rope_head_dim", "index_head_dim")

    @property
    def keys_per_query(self) -> int:
        """Maximum number of keys per query."""
        return self.index_topk


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3.2 language model."""

    configs = (DeepSeekV32Config,)
    rotate_index = staticmethod(rotate_halves)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.mla(SparseMLA, indexer=self.indexer(index, **kw), topk=self.config.keys_per_query, **kw)

    def indexer(self, index: int, **kw: Unpack[ParamOptions]) -> Indexer | None:
        """Build the indexer of a layer."""
        c = self.config
        sizes = c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim
        return Indexer(*sizes, rotary=c.rope, rotate=self.rotate_index, **kw)


HF_INDEXER = {
    "layer.attention.indexer.q.kernel": W("self_attn.indexer.wq_b.weight"),
    "layer.attention.indexer.k.kernel": W("self_attn.indexer.wk.weight"),
    "layer.attention.indexer.k_norm.scale": W("self_attn.indexer.k_norm.weight"),
    "layer.attention.indexer.k_norm.bias": W("self_attn.indexer.k_norm.bias"),
    "layer.attention.indexer.weights.kernel": W("self_attn.indexer.weights_proj.weight"),
}
_MAXTEXT_INDEXER: Linen = {
    f"layer.attention.indexer.{key}": (f"self_attention/indexer/{name}", axes)
    for key, name, axes in (
        ("q.kernel", "wq_b/kernel", ("q_lora", "q_heads", "kv")),
        ("k.kernel", "wk/kernel", ("embed", "kv")),
        ("k_norm.scale", "k_norm/scale", (None,)),
        ("k_norm.bias", "k_norm/bias", (None,)),
        ("weights.kernel", "weights_proj/kernel", ("embed", "q_heads")),
    )
}

FAMILY = Family(
    model=DeepSeekV32,
    hf={**DEEPSEEK_V3.hf, **HF_INDEXER},
    maxtext=MaxTextNames({**DEEPSEEK_V3.maxtext.table, **_MAXTEXT_INDEXER}, DEEPSEEK_V3.maxtext.groups),
)
