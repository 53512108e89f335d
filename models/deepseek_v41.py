"""The text model of DeepSeek-V4.1 (DeepSeek, 2026). Memory layers (Engram) are not supported.

The published checkpoint has memory layers, so it cannot be loaded.

Attention has one key/value head over a sliding window, as in DeepSeek-V4. Most layers also attend to selected
compressed entries. A few layers compute the entries and the selections, and the other layers share them. Attention and
feed-forward read the residual streams with the weights of the previous connection. Every layer has a shared expert and
routed experts.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count, number, one_of, per_layer
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.shared_entries import (
    CandidateBlocks,
    CandidateIndexer,
    IndexedCompressor,
    SharedEntriesKV,
)
from nnxmoe.layers.attention.shared_kv import SharedKVDims
from nnxmoe.layers.hyper import collapse_streams
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.model.output import Ids
from nnxmoe.model.weight_names import W
from nnxmoe.models.deepseek_v4 import FAMILY as DEEPSEEK_V4
from nnxmoe.models.deepseek_v4 import WINDOW, DeepSeekV4, DeepSeekV4Config
from nnxmoe.models.shared.streamed import SinglePassStreamed
from nnxmoe.moe.selection import SqrtSoftplusTopK

SHARED = "shared_compressed_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV41TextConfig(DeepSeekV4Config):
    """Text config of DeepSeek-V4.1. Published files nest it in ``text_config``.

    Attributes:
        layer_types: Not used. ``compress_ratios`` determines the attention types.
        compress_ratios: Tokens per compressed entry of each layer. 0 for layers that attend to the window only. May
            also list the prediction layers.
        kv_source_layer_ids: Layers that compute entries. Indices of prediction layers are ignored.
        index_source_layer_ids: Layers that select entries. Indices of prediction layers are ignored.
        candidate_source_layer_id: Layer that selects the candidates of later layers. -1 disables candidates.
        candidate_topk_blocks, candidate_block_size: Number of candidate blocks per query, and entries per block.
        gate_temp: Divisor of the router logits.
        engram_layer_ids: Layers with memory. Must be empty.
    """

    model_type = "deepseek_v41_text"
    architecture = "DeepseekV41ForCausalLM"
    ignored = """engram_num_embeddings engram_vocab_size engram_max_ngram_size engram_n_heads engram_head_dim
        engram_pad_id engram_compressed_vocab_size dspark_n_routed_experts dspark_num_experts_per_tok"""

    hidden_size: int = 5120
    num_hidden_layers: int = 40
    rms_norm_eps: float = number(1e-20, above=0.0, most=1.0)
    q_lora_rank: int = count(1280, most=2**20)
    layer_types: Sequence[str] | None = per_layer(WINDOW, SHARED)
    compress_ratios: Sequence[int] = (0,) * 2 + (2,) * 18 + (1,) * 20
    compress_rates: Mapping[str, int] | None = one_of(None)
    compress_rate_csa: int | None = one_of(None)
    compress_rate_hca: int | None = one_of(None)
    kv_source_layer_ids: Sequence[int] = (2, 8, 14, 20)
    index_source_layer_ids: Sequence[int] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source_layer_id: int = count(20, least=-1)
    candidate_topk_blocks: int = count(2048)
    candidate_block_size: int = count(8, most=256)
    mlp_layer_types: Sequence[str] | None = one_of(None)
    num_hash_layers: int = one_of(0)
    index_n_heads: int = count(32, most=2**14)
    moe_intermediate_size: int = count(2304, most=2**24)
    n_routed_experts: int = count(384, most=4096)
    gate_temp: float = number(1.0, above=0.0, most=1e6)
    engram_layer_ids: Sequence[int] | None = None
    num_nextn_predict_layers: int = count(3, least=0, most=1024)

    def _check(self) -> None:
        super()._check()
        if self.engram_layer_ids:
            raise ConfigError(
                f"engram_layer_ids {short([*self.engram_layer_ids])}: memory layers (Engram) are not supported. Only "
                "checkpoints without memory layers can be loaded"
            )
        uses_candidates = self.candidate_source_layer_id >= 0
        if uses_candidates and (self.candidate_topk_blocks - 1) * self.candidate_block_size < self.index_topk - 1:
            raise ConfigError(
                f"candidate_topk_blocks {self.candidate_topk_blocks} with candidate_block_size "
                f"{self.candidate_block_size} may hold fewer than index_topk {self.index_topk} entries: increase "
                "candidate_topk_blocks"
            )

    def _check_ratios(self) -> None:
        ratios, kv_sources, indexers = self.ratios, self.kv_sources, self.index_sources
        invalid = [ratio for ratio in ratios if not 0 <= ratio <= 2**16]
        if invalid:
            raise ConfigError(f"compress_ratios: expected integers from 0 to {2**16}, got {short(invalid[0])}")
        for name, layers in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", indexers)):
            if unusable := [i for i in layers if i < 0 or not ratios[i]]:
                raise ConfigError(f"{name}: {short(unusable[0])} is not a layer with compressed entries")
        candidate_source = self.candidate_source_layer_id
        last_indexers = [i for i in indexers if i >= max(kv_sources, default=0)]
        if 0 <= candidate_source < len(ratios) and candidate_source not in last_indexers:
            raise ConfigError(
                f"candidate_source_layer_id {candidate_source} must be in index_source_layer_ids, and not before the "
                "last layer in kv_source_layer_ids"
            )
        for i, ratio in enumerate(ratios):
            source = max((layer for layer in kv_sources if layer <= i), default=None)
            if ratio and (source is None or ratios[source] != ratio or source not in indexers):
                raise ConfigError(
                    f"layer {i} with compress ratio {ratio} requires that it or the last layer before it in "
                    "kv_source_layer_ids has this ratio and is in index_source_layer_ids"
                )

    @property
    def ratios(self) -> Sequence[int]:
        """Tokens per compressed entry of each layer, or 0."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def kv_sources(self) -> Sequence[int]:
        """Layers that compute entries."""
        return [i for i in self.kv_source_layer_ids if i < self.num_hidden_layers]

    @property
    def index_sources(self) -> Sequence[int]:
        """Layers that select entries."""
        return [i for i in self.index_source_layer_ids if i < self.num_hidden_layers]

    @property
    def rates(self) -> Mapping[str, int]:
        return {}

    @property
    def attention_types(self) -> Sequence[str]:
        return [SHARED if ratio else WINDOW for ratio in self.ratios]

    @property
    def unused_tensors(self) -> set[str]:
        """Correction biases for image tokens."""
        return {f"model.layers.{i}.ffn.gate.bias_vl" for i in range(self.num_hidden_layers)}


@dataclasses.dataclass(frozen=True)
class TemperedTopK(SqrtSoftplusTopK):
    """`SqrtSoftplusTopK` of the logits divided by ``temperature``."""

    temperature: float = 1.0

    def compute_scores(self, logits: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return super().compute_scores(logits / self.temperature)


class DeepSeekV41(DeepSeekV4):
    """The text model of DeepSeek-V4.1."""

    configs = (DeepSeekV41TextConfig,)
    supports_mtp = False

    def __init__(self, config: DeepSeekV41TextConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.streams = config.hc_mult

    def layer_type(self, index: int) -> Hashable:
        c = self.config
        # Sources have more parameters and may change the structure of the layer's output, so each is its own stack.
        is_source = index in (*c.kv_sources, *c.index_sources)
        return c.ratios[index], index if is_source else None

    def layer(self, index: int, form: type[Layer] = SinglePassStreamed, **kw: Any) -> Layer:
        return super().layer(index, form, **kw)

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> PyTree:
        """Return the streams, one-hot weights that read the first stream, and ``None`` for the entries."""
        streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))
        return streams, jnp.zeros(streams.shape[:3], jnp.float32).at[:, :, 0].set(1.0), None

    def from_layer_output(self, x: PyTree) -> Float[Array, "B T_out D"]:
        streams, weights, _ = x
        return collapse_streams(streams, weights)

    def mtp_hidden(
        self, hidden: Float[Array, "B T_out D"], normalized: Float[Array, "B T_out D"]
    ) -> Float[Array, "B T_out D"]:
        return normalized

    def final_norm(self, **kw: Unpack[ParamOptions]) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, **kw)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> SharedEntriesKV:
        c, rate, compressor, indexer = self.config, self.config.ratios[index], None, None
        rope = c.compressed_rope if rate else c.rope
        if index in c.kv_sources:
            sizes = c.hidden_size, c.head_width, c.index_head_dim
            compressor = IndexedCompressor(*sizes, rate=rate, eps=c.rms_norm_eps, rotary=rope, **kw)
        if index in c.index_sources:
            sizes = c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim
            blocks = CandidateBlocks(c.candidate_block_size, c.candidate_topk_blocks)
            indexer = CandidateIndexer(
                *sizes, k=c.index_topk, rotary=rope, blocks=blocks,
                selects_candidates=index == c.candidate_source_layer_id, **kw,
            )  # fmt: skip
        return SharedEntriesKV(
            c.hidden_size,
            SharedKVDims(c.num_attention_heads, c.head_width, c.q_lora_rank, c.o_lora_rank, c.o_groups),
            rate=rate,
            topk=c.index_topk,
            window=c.sliding_window,
            eps=c.rms_norm_eps,
            rotary=rope,
            attention_fn=self.strategy.attention_fn,
            compressor=compressor,
            indexer=indexer,
            **kw,
        )

    @property
    def expert_selection(self) -> SqrtSoftplusTopK:
        c = self.config
        return TemperedTopK(c.num_experts_per_tok, c.routed_scaling_factor, temperature=c.gate_temp)


_REMOVED = (
    "norm.weights.",
    "layer.mtp.",
    "layer.moe.router.table",
    "layer.attention.indexer.keys.",
    "layer.attention.compressor.place",
)
_ADDED = {
    "layer.attention.compressor.indexer.k.kernel": ("wk", "k_proj"),
    "layer.attention.compressor.indexer.norm.scale": ("k_norm", "k_norm"),
}
FAMILY = Family(
    model=DeepSeekV41,
    hf={
        **{key: row for key, row in DEEPSEEK_V4.hf.items() if not key.startswith(_REMOVED)},
        **{
            key: (W(f"attn.indexer.{name}.weight"), W(f"self_attn.compressor.indexer.{hf_name}.weight"))
            for key, (name, hf_name) in _ADDED.items()
        },
    },
    peft_excluded=DEEPSEEK_V4.peft_excluded,
)
