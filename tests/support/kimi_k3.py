"""Kimi K3's text model for torch, which transformers lacks: composed of transformers' parts of Kimi Linear and GLM-5.3.

The parts that only K3 has (attention residuals, SiTU, latent experts, gates) are written from the technical report
(arXiv 2607.24653, equations 8 to 12) and from arXiv 2603.15031. Parameters have the names of the published files.
Importing this module registers the model in transformers' Auto classes, so the tests of all families run it.
"""

import copy
import functools
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear import modeling_kimi_linear as parts

LINEAR = "linear_attention"


@strict
class KimiK3Config(transformers.KimiLinearConfig):
    """Kimi Linear's config with the fields of Moonshot's class, and its defaults where they select a part."""

    model_type = "kimi_k3"

    hidden_size: int = 7168
    intermediate_size: int = 33792
    moe_intermediate_size: int = 3072
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    num_local_experts: int = 896
    num_experts_per_tok: int | None = 16
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = 1536
    linear_num_heads: int = 96
    hidden_act: str = "situ"
    activation_situ_beta: float | int | None = None
    activation_situ_linear_beta: float | int | None = None
    attn_res_block_size: int = 12
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    first_k_dense_replace: int = 1
    linear_lower_bound: float | int | None = None
    linear_full_rank_gate: bool = False

    def __post_init__(self, **given: Any) -> None:
        nested = given.get("linear_attn_config") or {}
        self.linear_lower_bound = nested.get("gate_lower_bound", self.linear_lower_bound)
        self.linear_full_rank_gate = nested.get("use_full_rank_gate", self.linear_full_rank_gate)
        super().__post_init__(**given, first_k_dense_replace=self.first_k_dense_replace)

    def to_dict(self) -> dict[str, Any]:
        """As Moonshot's files: the fields of recurrent layers in an object, which numbers the layers from 1."""
        fields, kinds = super().to_dict(), self.layer_types
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound"}
        names["use_full_rank_gate"] = "linear_full_rank_gate"
        nested = {name: fields.pop(field) for name, field in names.items()}
        for name, wanted in (("kda_layers", True), ("full_attn_layers", False)):
            nested[name] = [i + 1 for i, kind in enumerate(kinds) if (kind == LINEAR) == wanted]
        dropped = "layer_types", "mlp_layer_types", "head_dim", "qk_head_dim"
        return {k: v for k, v in fields.items() if k not in dropped} | {"linear_attn_config": nested}


def situ(gate: torch.Tensor, up: torch.Tensor, config: Any) -> torch.Tensor:
    """Equation 12."""
    beta, linear_beta = config.activation_situ_beta or 1.0, config.activation_situ_linear_beta
    up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


class GatedMLP(nn.Module):
    def __init__(self, config: Any, dim: int, width: int, names: tuple[str, str, str]):
        super().__init__()
        self.config, self.names = config, names
        for name, (ins, outs) in zip(names, ((dim, width), (dim, width), (width, dim)), strict=True):
            setattr(self, name, nn.Linear(ins, outs, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(situ(gate(x), up(x), self.config))


MLP = functools.partial(GatedMLP, names=("gate_proj", "up_proj", "down_proj"))
Expert = functools.partial(GatedMLP, names=("w1", "w3", "w2"))


class LatentExperts(nn.Module):
    """Equation 11."""

    def __init__(self, config: Any):
        super().__init__()
        c, dim, latent = config, config.hidden_size, config.routed_expert_hidden_size
        self.gate, self.latent = parts.KimiLinearTopkRouter(c), latent
        self.experts = nn.ModuleList(
            Expert(c, latent or dim, c.moe_intermediate_size) for _ in range(c.num_local_experts)
        )
        self.shared_experts = MLP(c, dim, c.moe_intermediate_size * c.n_shared_experts)
        if latent:
            self.routed_expert_down_proj = nn.Linear(dim, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, dim, bias=False)
        if latent and c.latent_moe_use_norm:
            self.routed_expert_norm = parts.KimiLinearRMSNorm(latent, c.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.gate(x)
        rows = x.flatten(0, 1)
        latents = self.routed_expert_down_proj(rows) if self.latent else rows
        every = torch.stack([expert(latents) for expert in self.experts], dim=1)
        y = (every.gather(1, chosen[..., None].expand(-1, -1, every.shape[-1])) * weights[..., None]).sum(1)
        y = self.routed_expert_norm(y) if hasattr(self, "routed_expert_norm") else y
        y = self.routed_expert_up_proj(y) if self.latent else y
        return y.view_as(x) + self.shared_experts(x)


class DeltaAttention(parts.KimiLinearDeltaAttention):
    """Kimi Linear's recurrence with GLM-5.3's bounded decays, a gate of full rank, and Moonshot's names."""

    def __init__(self, config: Any, index: int):
        super().__init__(config, index)
        gate = Glm5NextTextForgetGate(config)
        self.f_a_proj, self.f_b_proj, self.dt_bias, self.A_log = gate.f_a_proj, gate.f_b_proj, gate.dt_bias, gate.A_log
        self.safe_gate_lower_bound = config.linear_lower_bound
        width, taps = self.qkv_dim, self.conv_kernel_size
        for name in "qkv":
            setattr(self, f"{name}_conv1d", nn.Conv1d(width, width, taps, groups=width, bias=False))
        del self.conv1d, self.forget_gate
        if config.linear_full_rank_gate:
            self.g_proj = nn.Linear(self.hidden_size, width, bias=False)
            del self.g_a_proj, self.g_b_proj

    @property
    def conv1d(self) -> Any:
        weight = torch.cat([getattr(self, f"{name}_conv1d").weight for name in "qkv"])
        return type("Conv", (), {"weight": weight, "bias": None})

    forget_gate = Glm5NextTextForgetGate.forward

    def __getattr__(self, name: str) -> Any:
        if name == "g_a_proj" and "g_proj" in self._modules:
            return lambda x: x
        return super().__getattr__("g_proj" if name == "g_b_proj" and "g_proj" in self._modules else name)


class LatentAttention(parts.KimiLinearAttention):
    """Kimi Linear's attention with a gate on what the output projection reads."""

    def __init__(self, config: Any, index: int):
        super().__init__(config, index)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.o_proj.in_features, bias=False)

    def forward(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        if not hasattr(self, "g_proj"):
            return super().forward(hidden_states, *given, **more)
        gate = torch.sigmoid(self.g_proj(hidden_states))
        hook = self.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gate,))
        out = super().forward(hidden_states, *given, **more)
        hook.remove()
        return out


def attend_to_blocks(blocks: list[torch.Tensor], norm: nn.Module, query: nn.Linear) -> torch.Tensor:
    """Equations 8 to 10: each block is a value, its norm is a key."""
    values = torch.stack(blocks)
    return (query(norm(values)).softmax(0) * values).sum(0)


class Layer(nn.Module):
    def __init__(self, config: Any, index: int, finished: list[torch.Tensor]):
        super().__init__()
        c, attention = config, DeltaAttention if config.layer_types[index] == LINEAR else LatentAttention
        plain = copy.copy(c)
        plain.hidden_act = "silu"  # of the short convolutions
        self.index, self.size, self.finished, self.self_attn = (
            index,
            c.attn_res_block_size,
            finished,
            attention(plain, index),
        )
        sparse = c.mlp_layer_types[index] == "sparse"
        self.add_module(
            *(("block_sparse_moe", LatentExperts(c)) if sparse else ("mlp", MLP(c, c.hidden_size, c.intermediate_size)))
        )
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            setattr(self, name, parts.KimiLinearRMSNorm(c.hidden_size, c.rms_norm_eps))
        self.self_attention_res_proj, self.mlp_res_proj = (nn.Linear(c.hidden_size, 1, bias=False) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        block, finished = [hidden_states], self.finished
        if self.index == 0:
            finished.clear()
        x = attend_to_blocks([*finished, sum(block)], self.self_attention_res_norm, self.self_attention_res_proj)
        if self.index % self.size == 0:
            finished.append(sum(block))
            block = []
        y = self.self_attn(hidden_states=self.input_layernorm(x), **given)
        block.append(y[0] if isinstance(y, tuple) else y)
        x = attend_to_blocks([*finished, sum(block)], self.mlp_res_norm, self.mlp_res_proj)
        feed_forward = getattr(self, "block_sparse_moe", getattr(self, "mlp", None))
        return sum([*block, feed_forward(self.post_attention_layernorm(x))])


class KimiK3Model(parts.KimiLinearModel):
    def __init__(self, config: KimiK3Config):
        parts.KimiLinearPreTrainedModel.__init__(self, config)
        finished: list[torch.Tensor] = []
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, i, finished) for i in range(config.num_hidden_layers))
        self.norm, self.output_attn_res_norm = (
            parts.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm.register_forward_pre_hook(
            lambda _, x: attend_to_blocks([*finished, x[0]], self.output_attn_res_norm, self.output_attn_res_proj)
        )
        self.post_init()


class KimiLinearForCausalLM(parts.KimiLinearForCausalLM):
    config_class = KimiK3Config

    def __init__(self, config: KimiK3Config):
        parts.KimiLinearPreTrainedModel.__init__(self, config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


transformers.AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
transformers.AutoModelForCausalLM.register(KimiK3Config, KimiLinearForCausalLM, exist_ok=True)
