"""PyTorch reference of DeepSeek-V4.1's text model, which transformers does not implement, built from its DeepSeek-V4.

The parts that only V4.1 has (entries and selections that layers share, candidate blocks, streams that are read with the
previous weights) are written from mlx-lm 0.32.2 and vLLM 0.33, without the rounding of keys to FP8 and FP4. Importing
this module registers the model in transformers' Auto classes, so the tests of all families run it. It has no cache:
generation recomputes all tokens.
"""

import dataclasses
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as parts


@strict
class DeepseekV41Config(transformers.DeepseekV4Config):
    """DeepSeek-V4's config with the fields of V4.1."""

    model_type = "deepseek_v41_text"

    hidden_size: int = 5120
    num_hidden_layers: int = 40
    q_lora_rank: int = 1280
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    index_n_heads: int = 32
    num_nextn_predict_layers: int = 3
    compress_ratios: list[int] = dataclasses.field(default_factory=lambda: [0] * 2 + [2] * 18 + [1] * 20)
    kv_source_layer_ids: list[int] = dataclasses.field(default_factory=lambda: [2, 8, 14, 20])
    index_source_layer_ids: list[int] = dataclasses.field(default_factory=lambda: [2, 8, 14, 20, 24, 28, 32, 36])
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    gate_temp: float = 1.0
    rms_norm_eps: float = 1e-20

    def __post_init__(self, **kwargs: Any) -> None:
        self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        self.mlp_layer_types = ["moe"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        self.use_cache = False

    def to_dict(self) -> dict[str, Any]:
        derived = "layer_types", "mlp_layer_types", "compress_rates"
        return {name: value for name, value in super().to_dict().items() if name not in derived}


class Indexer(nn.Module):
    def __init__(self, config: DeepseekV41Config, index: int):
        super().__init__()
        c, width = config, config.index_head_dim
        self.config, self.is_candidate_source = c, index == c.candidate_source_layer_id
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.index_n_heads * width, bias=False)
        self.scorer = parts.DeepseekV4IndexerScorer(c)
        if index in c.kv_source_layer_ids:
            self.k_proj = nn.Linear(c.head_dim, width, bias=False)
            self.k_norm = parts.DeepseekV4RMSNorm(width, c.rms_norm_eps)

    def forward(self, x: Any, q_latent: Any, rotation: Any, visible: torch.Tensor, shared: dict[str, Any]) -> None:
        c = self.config
        q = self.q_b_proj(q_latent).unflatten(-1, (c.index_n_heads, -1)).transpose(1, 2)
        scores = self.scorer(parts.apply_rotary_pos_emb(q, *rotation).transpose(1, 2), shared["index_keys"], x)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.is_candidate_source:
            shared["candidates"] = self.candidates(scores, visible)
        elif "candidates" in shared:
            scores = scores.masked_fill(~shared["candidates"], -torch.inf)
        chosen = scores.topk(min(c.index_topk, scores.shape[-1]), dim=-1).indices
        shared["selected"] = torch.zeros_like(visible).scatter(-1, chosen, True) & visible

    def candidates(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        size = self.config.candidate_block_size
        blocks = F.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = (visible.sum(-1, keepdim=True) - 1).clamp(min=0) // size
        blocks = blocks.scatter(-1, newest, torch.inf)
        chosen = blocks.topk(min(self.config.candidate_topk_blocks, blocks.shape[-1]), dim=-1).indices
        kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, chosen, True)
        return kept.repeat_interleave(size, dim=-1)[..., : scores.shape[-1]]


class SharedCompressor(nn.Module):
    """Compressor of a `DeepseekV4Attention`. Returns the entries and the mask over them."""

    def __init__(self, config: DeepseekV41Config, index: int, shared: dict[str, Any]):
        super().__init__()
        c, self.rate, self.shared = config, config.compress_ratios[index], shared
        self.rotary_emb = parts.DeepseekV4RotaryEmbedding(c)
        self.is_source = index in c.kv_source_layer_ids
        if self.is_source:
            self.kv_proj = nn.Linear(c.hidden_size, c.head_dim, bias=False)
            self.kv_norm = parts.DeepseekV4RMSNorm(c.head_dim, c.rms_norm_eps)
        if self.is_source and self.rate > 1:
            self.gate_proj = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.indexer = Indexer(c, index) if index in c.index_source_layer_ids else None

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None] * self.rate
        rotation = self.rotary_emb(x, position_ids=positions, layer_type="compress")
        return parts.apply_rotary_pos_emb(x[:, None], *rotation)[:, 0]

    def forward(self, x: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor, *_: Any) -> Any:
        if self.is_source:
            whole = x[:, : x.shape[1] // self.rate * self.rate].unflatten(1, (-1, self.rate))
            values = self.kv_proj(whole)
            gates = self.gate_proj(whole).softmax(2) if self.rate > 1 else torch.ones(())
            latents = self.kv_norm((values * gates).sum(2))
            self.shared["entries"] = self.rotate(latents)
            self.shared["index_keys"] = self.rotate(self.indexer.k_norm(self.indexer.k_proj(latents)))
        entries = self.shared["entries"]
        visible = torch.arange(entries.shape[1]) < (positions[..., None] + 1) // self.rate
        visible = visible.expand(len(x), -1, -1)
        if self.indexer is not None:
            rotation = self.rotary_emb(x, position_ids=positions, layer_type="compress")
            self.indexer(x, q_latent, rotation, visible, self.shared)
        bias = torch.zeros(visible.shape).masked_fill(~self.shared["selected"], -torch.inf)
        return entries[:, None], bias[:, None]


class Connection(parts.DeepseekV4HyperConnection):
    """Returns the weights of the sum, ``post`` and ``mix``, without the sum."""

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        post, mix, _ = super().forward(streams)
        logits = F.linear(self.input_norm(streams.flatten(2)), self.fn[: self.hc_mult])
        return torch.sigmoid(logits * self.scale[0] + self.base[: self.hc_mult]) + self.hc_eps, post, mix


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[..., None] * streams).sum(2)


class Scores(nn.Module):
    """The scores of logits that are divided by a temperature."""

    def __init__(self, score: nn.Module, temperature: float):
        super().__init__()
        self.score, self.temperature = score, temperature

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return self.score(logits / self.temperature)


class Layer(parts.DeepseekV4DecoderLayer):
    def __init__(self, config: DeepseekV41Config, index: int, shared: dict[str, Any]):
        super().__init__(config, index)
        self.shared, self.attn_hc, self.ffn_hc = shared, Connection(config), Connection(config)
        self.self_attn.q_b_norm = nn.Identity()
        if config.compress_ratios[index]:
            self.self_attn.rope_layer_type = "compress"
            self.self_attn.compressor = SharedCompressor(config, index, shared)
        self.mlp.gate.score_fn = Scores(self.mlp.gate.score_fn, config.gate_temp)

    def forward(self, hidden_states: torch.Tensor, input_ids: Any = None, **kwargs: Any) -> torch.Tensor:
        streams, shared = hidden_states, self.shared
        if self.layer_idx == 0:
            shared.clear()
            shared["weights"] = torch.eye(streams.shape[2])[0].expand(streams.shape[:3])
        weights, post, mix = self.attn_hc(streams)
        y, _ = self.self_attn(self.input_layernorm(collapse(streams, shared["weights"])), **kwargs)
        streams = post[..., None] * y[:, :, None] + mix.transpose(-1, -2) @ streams
        shared["weights"], post, mix = self.ffn_hc(streams)
        # The feed-forward reads the streams with the weights of the attention.
        y = self.mlp(self.post_attention_layernorm(collapse(streams, weights)))
        return post[..., None] * y[:, :, None] + mix.transpose(-1, -2) @ streams


class Head(nn.Module):
    def __init__(self, shared: dict[str, Any]):
        super().__init__()
        self.shared = shared

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return collapse(streams, self.shared["weights"])


class DeepseekV41ForCausalLM(parts.DeepseekV4ForCausalLM):
    config_class = DeepseekV41Config

    def __init__(self, config: DeepseekV41Config):
        super().__init__(config)
        shared: dict[str, Any] = {}
        self.model.layers = nn.ModuleList(Layer(config, i, shared) for i in range(config.num_hidden_layers))
        self.model.hc_head = Head(shared)


_NAMES = [
    WeightRenaming(rf"\.indexer\.{name}\.", f".compressor.indexer.{theirs}.")
    for name, theirs in (("wk", "k_proj"), ("k_norm", "k_norm"))
]
register_checkpoint_conversion_mapping(
    "deepseek_v41_text", [*(get_checkpoint_conversion_mapping("deepseek_v4") or []), *_NAMES], overwrite=True
)
transformers.AutoConfig.register("deepseek_v41_text", DeepseekV41Config, exist_ok=True)
transformers.AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
