"""DeepSeek-V4 Flash and Pro (DeepSeek, 2026).

Attention has one key/value head over a sliding window. Most layers also attend to compressed entries of all earlier
tokens. In compressed sparse layers, an indexer selects the entries. Prediction layers attend to the window only. There
are several residual streams (mHC). Every layer has a shared expert and routed experts. The first layers select experts
by token id.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count, number, per_layer
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import Rope, rope_from_fields, theta_in
from nnxmoe.config.validate import as_integer
from nnxmoe.layers.activations import LimitedSwiGLU
from nnxmoe.layers.attention.compressed import Compressor
from nnxmoe.layers.attention.shared_kv import EntryIndexer, SharedKV, SharedKVDims
from nnxmoe.layers.hyper import CollapsedNorm
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import TrailingPairs
from nnxmoe.model.family import Family, LayerBlocks, MaxTextNames
from nnxmoe.models.shared.deepseek_v4_names import HF_DEEPSEEK_V4, MAXTEXT_DEEPSEEK_V4
from nnxmoe.models.shared.streamed import StreamedLM
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.router_variants import HashRouter
from nnxmoe.moe.selection import SqrtSoftplusTopK

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
TYPE_OF_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV4Config(DecoderConfig):
    """Config of DeepSeek-V4.

    Layers without compressed entries use ``rope_theta`` for the rotation. Other layers use the rope object and
    ``compress_rope_theta``.

    Attributes:
        layer_types: Attention type of each layer. If null, ``compress_ratios`` determines the types. If both are null,
            two heavily compressed layers precede alternating heavily compressed and sparse layers.
        compress_ratios: 0, 4 or 128 per layer, as in DeepSeek's files. May also list the prediction layers.
        compress_rates: Tokens per compressed entry, by attention type.
        mlp_layer_types: Router type of each layer. If null, the first ``num_hash_layers`` route by token id.
        hc_mult: Number of residual streams.
        dspark_block_size: Tokens per block of the draft model DSpark. Null unless the files contain DSpark's layers
            instead of a prediction layer.
    """

    model_type = "deepseek_v4"
    architecture = "DeepseekV4ForCausalLM"
    experts_field = "n_routed_experts"
    scale_in_queries = False
    rope_field = "qk_rope_head_dim"
    aliases = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}
    fixed = {"scoring_func": ("sqrtsoftplus",), "attention_bias": (False,), "mlp_bias": (False,),
             "norm_topk_prob": (True,), "topk_method": ("noaux_tc",), "n_shared_experts": (1,)}  # fmt: skip
    ignored = """output_router_logits router_aux_loss_coef router_jitter_noise expert_dtype
        dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank"""

    vocab_size: int = 129280
    hidden_size: int = 4096
    intermediate_size: int = 2048  # not used: transformers treats it as an alias of moe_intermediate_size
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 1
    head_dim: int | None = 512
    max_position_embeddings: int = 1048576
    q_lora_rank: int = count(1024, most=2**20)
    qk_rope_head_dim: int | None = count(None, most=2**16)
    partial_rotary_factor: float | None = number(None, above=0.0, most=1.0)
    compress_rope_theta: float = number(160000.0, above=1.0, most=1e15)
    layer_types: Sequence[str] | None = per_layer(WINDOW, SPARSE, HEAVY)
    compress_ratios: Sequence[int] | None = None
    compress_rates: Mapping[str, int] | None = None
    compress_rate_csa: int | None = count(None, most=2**16)
    compress_rate_hca: int | None = count(None, most=2**16)
    mlp_layer_types: Sequence[str] | None = per_layer(HASHED, ROUTED)
    num_hash_layers: int = count(3, least=0)
    sliding_window: int = count(128)
    o_groups: int = count(8, most=2**14)
    o_lora_rank: int = count(1024, most=2**20)
    index_n_heads: int = count(64, most=2**14)
    index_head_dim: int = count(128, most=2**16)
    index_topk: int = count(512)
    hc_mult: int = count(4, most=64)
    hc_sinkhorn_iters: int = count(20, most=1000)
    hc_eps: float = number(1e-6, above=0.0, most=1.0)
    moe_intermediate_size: int = count(2048, most=2**24)
    n_routed_experts: int = count(256, most=4096)
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = number(10.0, above=0.0, most=1e6)
    num_nextn_predict_layers: int = count(1, least=0, most=1024)
    dspark_block_size: int | None = count(None)
    bos_token_id: int | None = 0
    eos_token_id: int | Sequence[int] | None = 1

    def __post_init__(self) -> None:
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(value := getattr(self, name), list | tuple):  # may also list the prediction layers
                object.__setattr__(self, name, tuple(value[: as_integer(self.num_hidden_layers, 0)]))
        if isinstance(self.compress_rates, Mapping):
            object.__setattr__(self, "compress_rates", FrozenDict(self.compress_rates))
        super().__post_init__()

    @classmethod
    def rope_overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        main, compress = (theta_in(scaling or parameters, name) for name in ("main", "compress"))
        flat = super().rope_overrides(scaling, parameters) if main is None else {"rope_theta": main}
        return flat | {"compress_rope_theta": compress}

    def _check(self) -> None:
        super()._check()
        ratios = self.compress_ratios
        if ratios is not None and len(ratios) < self.num_hidden_layers:
            raise ConfigError(
                f"compress_ratios lists {len(ratios)} layers, not {self.num_hidden_layers} as in num_hidden_layers"
            )
        self._check_ratios()
        if self.kv_heads != 1:
            raise ConfigError(f"num_key_value_heads {self.kv_heads} is not supported; supported: 1")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"o_groups {self.o_groups} does not divide num_attention_heads {self.num_attention_heads}"
            )
        if self.rope_dim > min(self.head_width, self.index_head_dim):
            raise ConfigError(f"{self.rope_field} {self.rope_dim} is more than head_dim or index_head_dim")
        _ = self.compressed_rope, self.rates

    def _check_ratios(self) -> None:
        if unsupported := [ratio for ratio in self.compress_ratios or () if ratio not in TYPE_OF_RATIO]:
            raise ConfigError(f"compress_ratios: {short(unsupported[0])} is not supported; supported: 0, 4 and 128")

    @classmethod
    def unknown_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        rope_names = {f"rope_parameters.{rope_name}" for rope_name in ("main", "compress")}
        return {name: value for name, value in super().unknown_fields(fields).items() if name not in rope_names}

    def to_hf(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_hf().items() if name != "intermediate_size"}

    @property
    def attention_types(self) -> Sequence[str]:
        """Attention type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        if self.compress_ratios is not None:
            return [TYPE_OF_RATIO[ratio] for ratio in self.compress_ratios[: self.num_hidden_layers]]
        return [SPARSE if i > 2 and i % 2 else HEAVY for i in range(self.num_hidden_layers)]

    @property
    def rates(self) -> Mapping[str, int]:
        """Tokens per compressed entry, by attention type."""
        rates = dict(self.compress_rates or {SPARSE: 4, HEAVY: 128})
        rates |= {
            attention_type: rate
            for attention_type, rate in ((SPARSE, self.compress_rate_csa), (HEAVY, self.compress_rate_hca))
            if rate
        }
        for attention_type in {SPARSE, HEAVY} & set(self.attention_types):
            rate = rates.get(attention_type)
            if type(rate) is not int or not 0 < rate <= 2**16:
                raise ConfigError(f"compress_rates: {attention_type} must be a positive integer, got {short(rate)}")
        return rates

    @property
    def hashed_layers(self) -> Sequence[bool]:
        """Whether each layer routes by token id."""
        if self.mlp_layer_types is not None:
            return [mlp_type == HASHED for mlp_type in self.mlp_layer_types]
        return [i < self.num_hash_layers for i in range(self.num_hidden_layers)]

    @property
    def windows(self) -> Sequence[int | None]:
        return [self.sliding_window if attention_type == WINDOW else None for attention_type in self.attention_types]

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim or int(self.head_width * (self.partial_rotary_factor or 0.125))

    def _rope(self, rope_name: str, flat: Mapping[str, Any]) -> Rope:
        rope_fields = self.rope_fields
        nested = [name for name in ("main", "compress") if isinstance(rope_fields.get(name), Mapping)]
        if len(nested) == 1:
            raise ConfigError(f"rope_parameters has {nested[0]!r}, but must have both main and compress")
        fields = dict(rope_fields[rope_name] if nested else flat)
        fields.pop("partial_rotary_factor", None)
        positions = self.max_position_embeddings, self.original_max_position_embeddings
        return rope_from_fields(fields, self.rope_dim, self.rope_theta, *positions, self.rope_field)

    @property
    def rope(self) -> Rope:
        """Rotary embedding of layers without compressed entries."""
        return self._rope("main", {})

    @property
    def compressed_rope(self) -> Rope:
        """Rotary embedding of layers with compressed entries. YaRN's attention factor defaults to 1."""
        flat = {k: v for k, v in self.rope_fields.items() if not isinstance(v, Mapping)}
        return self._rope("compress", {"attention_factor": 1.0} | flat | {"rope_theta": self.compress_rope_theta})


class DeepSeekV4(StreamedLM):
    """DeepSeek-V4 language model."""

    configs = (DeepSeekV4Config,)
    supports_mtp = True

    def layer_type(self, index: int) -> Hashable:
        return self.config.attention_types[index], self.config.hashed_layers[index]

    @property
    def mtp_layer_index(self) -> int:
        """Index after the last layer, for which `attention` builds the attention type of prediction layers."""
        c = self.config
        if c.dspark_block_size is not None:
            raise ConfigError(
                f"dspark_block_size {c.dspark_block_size}: the layers of the draft model DSpark are not supported. "
                "Load without prediction layers"
            )
        mtp_ratios = (c.compress_ratios or ())[c.num_hidden_layers :]
        if len(mtp_ratios) == c.num_nextn_predict_layers and any(mtp_ratios):
            raise ConfigError(
                f"compress_ratios: prediction layers with compressed entries ({short(mtp_ratios)}) are not supported. "
                "Load without prediction layers"
            )
        return c.num_hidden_layers

    def final_norm(self, **kw: Unpack[ParamOptions]) -> RMSNorm:
        c = self.config
        return CollapsedNorm(c.hidden_size, c.hc_mult, eps=c.hc_eps, norm_eps=c.rms_norm_eps, **kw)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> SharedKV:
        c = self.config
        attention_type = c.attention_types[index] if index < c.num_hidden_layers else WINDOW
        rope = c.rope if attention_type == WINDOW else c.compressed_rope

        def compressor(width: int) -> Compressor:
            return Compressor(
                c.hidden_size, width, rate=c.rates[attention_type], series=2 if attention_type == SPARSE else 1,
                eps=c.rms_norm_eps, rotary=rope, rotate=TrailingPairs(rope.dim), **kw,
            )  # fmt: skip

        indexer = None
        if attention_type == SPARSE:
            indexer = EntryIndexer(
                c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim,
                k=c.index_topk, rotary=rope, keys=compressor(c.index_head_dim), **kw,
            )  # fmt: skip
        return SharedKV(
            c.hidden_size,
            SharedKVDims(c.num_attention_heads, c.head_width, c.q_lora_rank, c.o_lora_rank, c.o_groups),
            window=c.sliding_window,
            eps=c.rms_norm_eps,
            rotary=rope,
            attention_fn=self.strategy.attention_fn,
            compressor=None if attention_type == WINDOW else compressor(c.head_width),
            indexer=indexer,
            **kw,
        )

    @property
    def expert_selection(self) -> SqrtSoftplusTopK:
        """Selection of the routed experts."""
        return SqrtSoftplusTopK(self.config.num_experts_per_tok, self.config.routed_scaling_factor)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MoE:
        c, dim = self.config, self.config.hidden_size
        if index < c.num_hidden_layers and c.hashed_layers[index]:
            router = HashRouter(dim, c.n_routed_experts, self.expert_selection, c.vocab_size, **kw)
        else:
            router = Router(dim, c.n_routed_experts, self.expert_selection, bias=True, **kw)
        activation = LimitedSwiGLU(c.swiglu_limit)
        shared = MLP(dim, c.moe_intermediate_size, bias=False, activation=activation, **kw)
        return self.moe(router, c.moe_intermediate_size, shared, activation=activation, **kw)


class DeepSeekV4MaxText(MaxTextNames):
    """Names of DeepSeek-V4 in MaxText."""

    def layers(self, config: Any) -> LayerBlocks:
        """Return blocks of two layers, after the layers that route by token id."""
        return LayerBlocks(("hca", "csa"), "scanned_blocks/layers_{}", first=sum(config.hashed_layers))

    def layer_types(self, config: Any) -> Sequence[str]:
        return [{SPARSE: "csa", HEAVY: "hca", WINDOW: "window"}[layer_type] for layer_type in config.attention_types]

    def streams(self, config: Any) -> int:
        return config.hc_mult


FAMILY = Family(
    model=DeepSeekV4,
    hf=HF_DEEPSEEK_V4,
    maxtext=DeepSeekV4MaxText(MAXTEXT_DEEPSEEK_V4),
    mtp_prefixes=("mtp.{}.", "mtp.{}."),
    # PEFT does not support adapters on a grouped projection (one matrix per group of heads).
    peft_excluded=("attention.o_a",),
)
