"""The text model of Qwen3.8-Flash-Next (Qwen team, 2026), a preview of Qwen4.

The implementation follows transformers. The layers are Qwen3.5-MoE's with three additions:

- In attention layers, an indexer selects the pools of keys that a query attends to.
- The model has several gated residual streams.
- Some recurrent layers add the embeddings of token n-grams to the streams.

The multi-token prediction layer is loaded only with ``mtp=True``. It follows ``Qwen4ExpMultiTokenPredictor`` in vLLM,
because transformers does not implement it.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Unpack

import jax
from jaxtyping import Array

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_multiple, count, flag, one_of, per_layer
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.block_indexer import IndexedGQA, KeyBlocks
from nnxmoe.layers.attention.pooled_indexer import MeanPoolIndexer
from nnxmoe.layers.context import Attention
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.hyper import GatedConnection, JointNorm, StreamMixer
from nnxmoe.layers.recurrent.ngram import NGramBranch, NGramHash
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.model.weight_names import LAYERS, Table, W
from nnxmoe.models.qwen3_5 import QWEN3_5_MOE_TEXT, Qwen3_5MoeText, Qwen3_5MoeTextConfig
from nnxmoe.models.shared.streamed import NGramStreamed, Streamed, StreamedLM, StreamedMTP
from nnxmoe.models.shared.tables import Hf

_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen4ExpTextConfig(Qwen3_5MoeTextConfig):
    """Text config of Qwen3.8-Flash-Next. `Qwen3_5MoeTextConfig` describes the other fields.

    Attributes:
        output_gate_type: Activation of the gates in recurrent layers. Defaults to SiLU.
        hc_count: Number of residual streams.
        hc_lowrank: Rank of the projections that compute the weights of the streams.
        indexer_n_heads: Number of queries per token in an indexer.
        indexer_head_dim: Width of queries and keys in an indexer.
        indexer_budget: Number of selected keys per query, a multiple of ``indexer_compress_ratio``.
        indexer_compress_ratio: Number of keys per pool.
        ple_layer_ids: Layers with n-gram embeddings, numbered from 1. These layers must be recurrent.
        ple_embed_dim: Total width of a token's n-gram embeddings. Defaults to ``hidden_size``.
        ple_conv_kernel_size: Number of taps of the convolution over n-gram embeddings.
        ngram_size: Number of tokens of the longest n-gram.
        heads_per_ngram: Number of hash functions per n-gram length.
        ngram_vocab_size_base: Lower bound of the number of rows per hash function.
        make_ngram_vocab_size_divisible_by: The rows of an n-gram table are padded to a multiple of this number.
        seed: Seed of the hash functions.
        split_ngram_parts: Maximum number of tensors per n-gram table in saved checkpoints.
    """

    model_type = "qwen4_exp_text"
    architecture = "Qwen4ExpForCausalLM"
    default_rotary_factor = 1.0
    ignored = "mtp"  # Describes the prediction layer. This layer always has an indexer.
    fixed = {"indexer_kv_heads": (1, None)}

    num_experts: int = count(512, most=4096)
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = flag(True)
    layer_types: Sequence[str] | None = per_layer("linear_attention", "indexed_attention", "full_attention")
    output_gate_type: str | None = one_of(None, "silu", "sigmoid")
    hc_count: int = count(4, least=2, most=64)
    hc_lowrank: int = count(320, most=2**20)
    indexer_n_heads: int | None = count(None, most=2**14)
    indexer_head_dim: int | None = count(None, most=2**16)
    indexer_budget: int | None = count(None)
    indexer_compress_ratio: int | None = count(None, most=2**16)
    ple_layer_ids: Sequence[int] | None = None
    ple_embed_dim: int | None = count(None, most=2**20)
    ple_conv_kernel_size: int = count(4, least=2, most=256)
    ngram_size: int = count(3, least=2, most=4)
    heads_per_ngram: int = count(8, most=16)  # with these bounds, a table has fewer than 2**31 rows
    ngram_vocab_size_base: int = count(20_000_000, most=2**25)
    make_ngram_vocab_size_divisible_by: int = count(128, most=2**20)
    seed: int = count(1234, least=0)
    split_ngram_parts: int = count(512, most=2**20)

    def _check(self) -> None:
        super()._check()
        required = () if all(self.recurrent_layers) else _INDEXER
        required = (*required, "eos_token_id") if self.ple_layer_ids else required
        if missing := [name for name in required if getattr(self, name) is None]:
            raise ConfigError(f"{missing[0]} is required for indexers or n-gram embeddings, but is null or missing")
        if self.indexer_budget is not None:
            check_multiple(self, "indexer_budget", "indexer_compress_ratio")
        if self.indexer_head_dim is not None and self.indexer_head_dim < self.rope_dim:
            raise ConfigError(f"indexer_head_dim {self.indexer_head_dim} is less than the rotary width {self.rope_dim}")
        linear = {i + 1 for i, is_recurrent in enumerate(self.recurrent_layers) if is_recurrent}
        if wrong := [i for i in self.ple_layer_ids or () if i not in linear]:
            raise ConfigError(f"ple_layer_ids: {short(wrong[0])} must be a linear_attention layer, counted from 1")
        if self.ple_layer_ids and self.ngram_width % (functions := (self.ngram_size - 1) * self.heads_per_ngram):
            raise ConfigError(
                f"ple_embed_dim {self.ngram_width} is not a multiple of the {functions} hash functions, "
                "(ngram_size - 1) * heads_per_ngram"
            )

    @property
    def ngram_width(self) -> int:
        """Total width of a token's n-gram embeddings."""
        return self.ple_embed_dim or self.hidden_size

    @property
    def ngram_hashes(self) -> Mapping[int, NGramHash]:
        """Hash functions of the layers with n-gram embeddings, by layer index."""
        eos = self.eos_token_id[0] if isinstance(self.eos_token_id, Sequence) else self.eos_token_id
        options: dict[str, Any] = {"length": self.ngram_size, "heads": self.heads_per_ngram, "vocab": self.vocab_size}
        options |= {"min_rows": self.ngram_vocab_size_base, "eos": eos}
        return {
            layer_id - 1: NGramHash.from_seed(self.seed, layer=i, **options)
            for i, layer_id in enumerate(sorted(set(self.ple_layer_ids or ())))
        }


class Qwen4ExpMTP(StreamedMTP):
    """The prediction layer of Qwen3.8-Flash-Next. It normalizes all streams of a state together."""

    def __init__(self, model: Any, layer: Layer, **kw: Unpack[ParamOptions]):
        super().__init__(model, layer, **kw)
        self.hidden_norm = JointNorm(super().width, model.config.rms_norm_eps, **kw)

    @property
    def width(self) -> int:
        return self.hidden_norm.scale.shape[-1]


class Qwen4ExpText(StreamedLM, Qwen3_5MoeText):
    """The text model of Qwen3.8-Flash-Next."""

    configs = (Qwen4ExpTextConfig,)

    def layer_type(self, index: int) -> Hashable:
        return self.config.recurrent_layers[index], self.config.ngram_hashes.get(index)

    def layer_norm(self, **kw: Unpack[ParamOptions]) -> Callable[[Array], Array]:
        """Return the identity, because the connections normalize the streams."""
        return jax.nn.identity

    def final_norm(self, **kw: Unpack[ParamOptions]) -> StreamMixer:
        c = self.config
        return StreamMixer(c.hidden_size, c.hc_count, c.hc_lowrank, c.rms_norm_eps, **kw)

    def connection(self, **kw: Unpack[ParamOptions]) -> GatedConnection:
        c = self.config
        return GatedConnection(c.hidden_size, c.hc_count, c.hc_lowrank, c.rms_norm_eps, **kw)

    @property
    def gate_activation(self) -> Callable[[Array], Array]:
        return jax.nn.sigmoid if self.config.output_gate_type == "sigmoid" else jax.nn.silu

    def full_attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        blocks = KeyBlocks(c.indexer_compress_ratio, c.indexer_budget // c.indexer_compress_ratio, local=0)
        indexer = MeanPoolIndexer(
            c.hidden_size, c.indexer_n_heads, c.indexer_head_dim, blocks=blocks, eps=c.rms_norm_eps, rotary=c.rope,
            rotate=PartialRotary(c.rope_dim), **kw,
        )  # fmt: skip
        return super().full_attention(index, form=IndexedGQA, indexer=indexer, **kw)

    def layer(self, index: int, form: type[Layer] = Streamed, **kw: Any) -> Layer:
        if index in self.config.ngram_hashes:
            form, kw["ngram"] = NGramStreamed, self._ngram_branch(index, dtype=kw["dtype"], rngs=kw["rngs"])
        return super().layer(index, form, **kw)

    def _ngram_branch(self, index: int, **kw: Unpack[ParamOptions]) -> NGramBranch:
        c, s, ngrams = self.config, self.strategy, self.config.ngram_hashes[index]
        divisor, width = c.make_ngram_vocab_size_divisible_by, c.ngram_width // len(ngrams.primes)
        embed = Embed(-(-sum(ngrams.primes) // divisor) * divisor, width, mesh=s.mesh, rules=s.rules, **kw)
        taps, eps = c.ple_conv_kernel_size, c.rms_norm_eps
        return NGramBranch(c.hidden_size, c.hc_count, ngrams, embed, taps=taps, eps=eps, **kw)

    def _prediction_layers(self) -> Callable[..., list[Any]]:
        return functools.partial(super()._prediction_layers(), form=Qwen4ExpMTP)


def _mixer(key: str, name: str) -> dict[str, W]:
    """Return the name-table rows of a `StreamMixer` or `GatedConnection`."""
    parts = ("scale", "hc_norm"), ("down.kernel", "input_mix_weight_down"), ("up.kernel", "input_mix_weight_up")
    return {f"{key}.{x}": W(f"{name}.{end}.weight") for x, end in (*parts, ("inject.kernel", "block_inject_weight"))}


_HF: Hf = {
    **QWEN3_5_MOE_TEXT.hf,
    **_mixer("norm", "model.hyper_connection_mixer"),
    **_mixer("layer.mtp.norm", "hyper_connection_mixer"),
    **_mixer("layer.attention_streams", "attn_hyper_connection"),
    **_mixer("layer.moe_streams", "mlp_hyper_connection"),
    "layer.mtp.project.token.kernel": W("fc_embedding.weight"),
    "layer.mtp.project.state.kernel": W("fc_hidden.weight"),
    "layer.ngram.key.kernel": W("ple.key_proj.weight"),
    "layer.ngram.value.kernel": W("ple.value_proj.weight"),
    "layer.ngram.conv.weight": W("ple.conv1d.weight"),
    **{f"layer.ngram.{x}_norm.scale": W(f"ple.norm_{x}.weight") for x in ("key", "query", "conv")},
    **{f"layer.attention.indexer.{x}_norm.scale": W(f"self_attn.indexer.{x}_layernorm.weight") for x in "qk"},
}


def _rows_of_config(config: Qwen4ExpTextConfig) -> Table:
    """Return the rows that depend on the number of indexer heads and the number of tensors per n-gram table."""
    heads, projection = config.indexer_n_heads or 1, W("self_attn.indexer.index_qk_proj.weight")
    return {
        "layer.attention.indexer.q.kernel": projection.rows(0, heads + 1, heads),
        "layer.attention.indexer.k.kernel": projection.rows(heads, heads + 1),
        "layer.ngram.embed.table": W("ple.ple_embedding.ngram_embedding.weight").sharded(config.split_ngram_parts),
    }


def _hash_constants(config: Qwen4ExpTextConfig) -> Mapping[str, Sequence[int]]:
    """Return the stored numbers of the hash functions, by tensor name."""
    names = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"
    return {
        f"{LAYERS}.{layer}.ple.ple_embedding.{name}": values
        for layer, ngrams in config.ngram_hashes.items()
        for name, values in zip(names, (ngrams.multipliers, ngrams.primes, ngrams.offsets), strict=True)
    }


FAMILY = Family(
    model=Qwen4ExpText,
    hf=_HF,
    hf_of_config=_rows_of_config,
    constants=_hash_constants,
    mtp_prefixes=QWEN3_5_MOE_TEXT.mtp_prefixes,
    # transformers stores these projections as parts of one linear layer.
    peft_excluded=("attention.indexer.q", "attention.indexer.k"),
)
