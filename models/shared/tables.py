"""Tables of weight names in checkpoints, shared by several families.

Tables for Hugging Face map the key of a parameter to its tensor (`W`) or a tuple of alternatives. Saving writes the
first alternative. Tables for MaxText map the key to a Linen name and logical axes. For keys ``layer.…``, names are
relative to the layer.
"""

from typing import Any

from nnxmoe.model.weight_names import W

Hf = dict[str, W | tuple[W, ...]]
Linen = dict[str, tuple[Any, ...]]  # values are `nnxmoe.convert.maxtext.layout.MaxTextRow`


def hf_mlp(block: str, prefix: str = "layer.moe.shared") -> Hf:
    """Return the name-table rows for a shared or dense feed-forward in submodule ``block`` of a layer.

    ``prefix`` is the prefix of the parameters' keys.
    """
    return {
        f"{prefix}.{x}.{end}": W(f"{block}.{x}_proj.{name}")
        for x in ("gate", "up", "down")
        for end, name in (("kernel", "weight"), ("bias", "bias"))
    }


def hf_mamba2(block: str) -> Hf:
    """Return the name-table rows for the `Mamba2` in submodule ``block`` of a layer."""
    names = {
        "project.kernel": "in_proj.weight", "project.bias": "in_proj.bias", "conv.weight": "conv1d.weight",
        "conv.bias": "conv1d.bias", "a_log": "A_log", "dt_bias": "dt_bias", "d": "D", "norm.scale": "norm.weight",
        "out.kernel": "out_proj.weight", "out.bias": "out_proj.bias",
    }  # fmt: skip
    return {f"layer.attention.{key}": W(f"{block}.{name}") for key, name in names.items()}


def hf_fused_qkv(config: Any, block: str) -> dict[str, W]:
    """Return the name-table rows for queries, keys and values in one tensor of submodule ``block`` of a layer."""
    heads, groups = config.num_attention_heads, config.kv_heads
    total = heads + 2 * groups
    spans = {"q": (0, total, heads), "k": (heads, total, groups), "v": (heads + groups, total, groups)}
    return {
        f"layer.attention.{x}.{end}": W(f"{block}.{name}").rows(*span)
        for x, span in spans.items()
        for end, name in (("kernel", "weight"), ("bias", "bias"))
    }


# Rows for the parameters of most decoders. Rows without a parameter in the model are ignored.
HF_DECODER: Hf = {
    "embed.table": W("model.embed_tokens.weight"),
    "norm.scale": W("model.norm.weight"),
    "head.kernel": W("lm_head.weight"),
    "layer.attention_norm.scale": W("input_layernorm.weight"),
    **{
        f"layer.attention.{x}.{end}": W(f"self_attn.{x}_proj.{name}")
        for x in "qkvo"
        for end, name in (("kernel", "weight"), ("bias", "bias"))
    },
    **{f"layer.attention.qk_norm.{x}.scale": W(f"self_attn.{x}_norm.weight") for x in "qk"},
    "layer.mlp_norm.scale": W("post_attention_layernorm.weight"),
    **hf_mlp("mlp", "layer.mlp"),
}
HF_LATENT: Hf = {
    "layer.attention.q.kernel": W("self_attn.q_proj.weight"),
    "layer.attention.q.a.kernel": W("self_attn.q_a_proj.weight"),
    "layer.attention.q.a.bias": W("self_attn.q_a_proj.bias"),
    "layer.attention.q.norm.scale": W("self_attn.q_a_layernorm.weight"),
    "layer.attention.q.b.kernel": W("self_attn.q_b_proj.weight"),
    "layer.attention.kv_a.kernel": W("self_attn.kv_a_proj_with_mqa.weight"),
    "layer.attention.kv_a.bias": W("self_attn.kv_a_proj_with_mqa.bias"),
    "layer.attention.kv_norm.scale": W("self_attn.kv_a_layernorm.weight"),
    "layer.attention.kv_b.kernel": W("self_attn.kv_b_proj.weight"),
    "layer.attention.o.kernel": W("self_attn.o_proj.weight"),
    "layer.attention.o.bias": W("self_attn.o_proj.bias"),
}
_EXPERTS, _GATE_UP = W("mlp.experts"), W("mlp.experts.gate_up_proj")
# The second alternatives are the names of transformers 5 in memory. Some saved checkpoints also have these names.
HF_MOE: Hf = {
    "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": W("mlp.gate.weight"),
    "layer.moe.experts.gate": (_EXPERTS.each("gate_proj.weight"), _GATE_UP.rows(0, 2)),
    "layer.moe.experts.up": (_EXPERTS.each("up_proj.weight"), _GATE_UP.rows(1, 2)),
    "layer.moe.experts.down": (_EXPERTS.each("down_proj.weight"), W("mlp.experts.down_proj")),
}
# Prediction layers are numbered after the other layers. Their attention and feed-forward have the names of a layer.
HF_MTP: Hf = {
    "layer.mtp.token_norm.scale": W("enorm.weight"),
    "layer.mtp.hidden_norm.scale": W("hnorm.weight"),
    "layer.mtp.project.kernel": W("eh_proj.weight"),
    "layer.mtp.norm.scale": W("shared_head.norm.weight"),
    # Saving writes copies of the embedding and the head. Loading skips the copies.
    "layer.mtp.embed.table": W("embed_tokens.weight"),
    "layer.mtp.head.kernel": W("shared_head.head.weight"),
}

_NORM = ("norm",)
MAXTEXT_DECODER: Linen = {
    "embed.table": ("token_embedder/embedding", ("vocab", "embed_vocab")),
    "norm.scale": ("decoder/decoder_norm/scale", _NORM),
    "head.kernel": ("decoder/logits_dense/kernel", ("embed_vocab", "vocab")),
    "layer.attention_norm.scale": ("pre_self_attention_layer_norm/scale", _NORM),
    "layer.mlp_norm.scale": ("post_self_attention_layer_norm/scale", _NORM),
    "layer.moe_norm.scale": ("post_self_attention_layer_norm/scale", _NORM),
}


def maxtext_gqa(block: str) -> Linen:
    """Return the name-table rows for the attention that MaxText stores in submodule ``block`` of a layer."""
    query_axes, kv_axes = ("q_heads", "kv"), ("kv_heads", "kv_head_dim")
    rows = (
        ("q", "query", ("embed",), query_axes),
        ("k", "key", ("embed",), kv_axes),
        ("v", "value", ("embed",), kv_axes),
    )
    return {
        f"layer.attention.{x}.{end}": (f"{block}/{name}/{end}", (*ins, *outs) if end == "kernel" else outs)
        for x, name, ins, outs in (*rows, ("o", "out", ("heads", "kv"), ("embed",)))
        for end in ("kernel", "bias")
    }


MAXTEXT_GQA = maxtext_gqa("self_attention")
MAXTEXT_LATENT: Linen = {
    "layer.attention.q.kernel": ("self_attention/query/kernel", ("embed", "q_heads", "kv")),
    "layer.attention.q.a.kernel": ("self_attention/wq_a/kernel", ("embed", "q_lora_up_proj")),
    "layer.attention.q.a.bias": ("self_attention/wq_a/bias", ("q_lora_up_proj",)),
    "layer.attention.q.norm.scale": ("self_attention/q_norm/scale", _NORM),
    "layer.attention.q.b.kernel": ("self_attention/wq_b/kernel", ("q_lora", "q_heads", "kv")),
    "layer.attention.kv_a.kernel": ("self_attention/wkv_a/kernel", ("embed", "kv_lora_up_proj")),
    "layer.attention.kv_a.bias": ("self_attention/wkv_a/bias", ("kv_lora_up_proj",)),
    "layer.attention.kv_norm.scale": ("self_attention/kv_norm/scale", _NORM),
    "layer.attention.kv_b.kernel": ("self_attention/wkv_b/kernel", ("kv_lora", "kv_heads", "kv_head_dim")),
    "layer.attention.o.kernel": ("self_attention/out/kernel", ("heads", "kv", "embed")),
    "layer.attention.o.bias": ("self_attention/out/bias", ("embed",)),
}
MAXTEXT_QK_NORM: Linen = {
    "layer.attention.qk_norm.q.scale": ("self_attention/query_norm/scale", _NORM),
    "layer.attention.qk_norm.k.scale": ("self_attention/key_norm/scale", _NORM),
}


def maxtext_mlp(prefix: str = "layer.mlp", block: str = "mlp") -> Linen:
    """Return the name-table rows for the feed-forward that MaxText stores in submodule ``block`` of a layer."""
    rows = (("gate", "wi_0", ("embed", "mlp")), ("up", "wi_1", ("embed", "mlp")), ("down", "wo", ("mlp", "embed")))
    return {
        f"{prefix}.{x}.{end}": (f"{block}/{name}/{end}", axes if end == "kernel" else axes[1:])
        for x, name, axes in rows
        for end in ("kernel", "bias")
    }


MAXTEXT_MLP = maxtext_mlp()


def maxtext_experts(block: str) -> Linen:
    """Return the name-table rows for the experts that MaxText stores in submodule ``block`` of a layer."""
    axes = ("exp", "embed_moe", "mlp_moe")
    return {
        "layer.moe.experts.gate": (f"{block}/wi_0", axes),
        "layer.moe.experts.up": (f"{block}/wi_1", axes),
        "layer.moe.experts.down": (f"{block}/wo", ("exp", "mlp_moe", "embed_moe")),
    }
