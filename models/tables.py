"""Names of parameters in checkpoints, in tables that several families share.

Rows for Hugging Face: our parameter -> names of the stored tensors, of which the first is written. Rows for MaxText:
our parameter -> its Linen name and logical axes; ``{layer}`` is for example layers_3, or layers if stacked on axis 1.
"""

LinenTable = dict[str, tuple[str, tuple[str | None, ...]]]

_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."

HF_DECODER = {
    "embed.table": ("model.embed_tokens.weight",),
    "norm.scale": ("model.norm.weight",),
    "head.kernel": ("lm_head.weight",),
    "layer.attention_norm.scale": (_LAYER + "input_layernorm.weight",),
}
HF_GQA = {
    f"layer.attention.{x}.{ours}": (f"{_LAYER}self_attn.{x}_proj.{theirs}",)
    for x in "qkvo"
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
}
HF_LATENT = {
    f"layer.attention.{ours}": (f"{_LAYER}self_attn.{theirs}",)
    for ours, theirs in (
        ("q.kernel", "q_proj.weight"),
        ("q.a.kernel", "q_a_proj.weight"),
        ("q.a.bias", "q_a_proj.bias"),
        ("q.norm.scale", "q_a_layernorm.weight"),
        ("q.b.kernel", "q_b_proj.weight"),
        ("kv_a.kernel", "kv_a_proj_with_mqa.weight"),
        ("kv_a.bias", "kv_a_proj_with_mqa.bias"),
        ("kv_norm.scale", "kv_a_layernorm.weight"),
        ("kv_b.kernel", "kv_b_proj.weight"),
        ("o.kernel", "o_proj.weight"),
        ("o.bias", "o_proj.bias"),
    )
}
HF_MLP = {"layer.mlp_norm.scale": (_LAYER + "post_attention_layernorm.weight",)} | {
    f"layer.mlp.{x}.{ours}": (f"{_MLP}{x}_proj.{theirs}",)
    for x in ("gate", "up", "down")
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
}
HF_QK_NORM = {f"layer.attention.qk_norm.{x}.scale": (f"{_LAYER}self_attn.{x}_norm.weight",) for x in ("q", "k")}
# The second names are those of transformers 5 in memory, also found in some saved checkpoints.
HF_MOE = {
    "layer.moe_norm.scale": (_LAYER + "post_attention_layernorm.weight",),
    "layer.moe.router.kernel": (_MLP + "gate.weight",),
    "layer.moe.experts.gate": (_MLP + "experts.{expert}.gate_proj.weight", _MLP + "experts.gate_up_proj[0/2]"),
    "layer.moe.experts.up": (_MLP + "experts.{expert}.up_proj.weight", _MLP + "experts.gate_up_proj[1/2]"),
    "layer.moe.experts.down": (_MLP + "experts.{expert}.down_proj.weight", _MLP + "experts.down_proj"),
}
# Layers for multi-token prediction have numbers after those of the others, and the names of a layer besides these.
HF_MTP = {
    f"layer.mtp.{ours}": (f"{_LAYER}{theirs}.weight",)
    for ours, theirs in (
        ("token_norm.scale", "enorm"),
        ("hidden_norm.scale", "hnorm"),
        ("project.kernel", "eh_proj"),
        ("norm.scale", "shared_head.norm"),
    )
}
HF_MTP_COPIES = {  # tensors of these layers that repeat the model's, written for readers that expect them, never read
    f"{_LAYER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{_LAYER}shared_head.head.weight": "lm_head.weight",
}

_SELF = "decoder/{layer}/self_attention/"
_NORM = ("norm",)
MAXTEXT_DECODER: LinenTable = {
    "embed.table": ("token_embedder/embedding", ("vocab", "embed_vocab")),
    "norm.scale": ("decoder/decoder_norm/scale", _NORM),
    "head.kernel": ("decoder/logits_dense/kernel", ("embed_vocab", "vocab")),
    "layer.attention_norm.scale": ("decoder/{layer}/pre_self_attention_layer_norm/scale", _NORM),
    "layer.mlp_norm.scale": ("decoder/{layer}/post_self_attention_layer_norm/scale", _NORM),
    "layer.moe_norm.scale": ("decoder/{layer}/post_self_attention_layer_norm/scale", _NORM),
}


def maxtext_gqa(block: str) -> LinenTable:
    """The rows of grouped-query attention, which MaxText names ``decoder/{layer}/<block>/query``."""
    inside, heads = f"decoder/{{layer}}/{block}/", ("kv_heads", "kv_head_dim")
    return {
        "layer.attention.q.kernel": (inside + "query/kernel", ("embed", "q_heads", "kv")),
        "layer.attention.q.bias": (inside + "query/bias", ("q_heads", "kv")),
        "layer.attention.k.kernel": (inside + "key/kernel", ("embed", *heads)),
        "layer.attention.k.bias": (inside + "key/bias", heads),
        "layer.attention.v.kernel": (inside + "value/kernel", ("embed", *heads)),
        "layer.attention.v.bias": (inside + "value/bias", heads),
        "layer.attention.o.kernel": (inside + "out/kernel", ("heads", "kv", "embed")),
        "layer.attention.o.bias": (inside + "out/bias", ("embed",)),
    }


MAXTEXT_GQA = maxtext_gqa("self_attention")
MAXTEXT_LATENT: LinenTable = {
    "layer.attention.q.kernel": (_SELF + "query/kernel", ("embed", "q_heads", "kv")),
    "layer.attention.q.a.kernel": (_SELF + "wq_a/kernel", ("embed", "q_lora_up_proj")),
    "layer.attention.q.a.bias": (_SELF + "wq_a/bias", ("q_lora_up_proj",)),
    "layer.attention.q.norm.scale": (_SELF + "q_norm/scale", _NORM),
    "layer.attention.q.b.kernel": (_SELF + "wq_b/kernel", ("q_lora", "q_heads", "kv")),
    "layer.attention.kv_a.kernel": (_SELF + "wkv_a/kernel", ("embed", "kv_lora_up_proj")),
    "layer.attention.kv_a.bias": (_SELF + "wkv_a/bias", ("kv_lora_up_proj",)),
    "layer.attention.kv_norm.scale": (_SELF + "kv_norm/scale", _NORM),
    "layer.attention.kv_b.kernel": (_SELF + "wkv_b/kernel", ("kv_lora", "kv_heads", "kv_head_dim")),
    "layer.attention.o.kernel": (_SELF + "out/kernel", ("heads", "kv", "embed")),
    "layer.attention.o.bias": (_SELF + "out/bias", ("embed",)),
}
MAXTEXT_MLP: LinenTable = {
    "layer.mlp.gate.kernel": ("decoder/{layer}/mlp/wi_0/kernel", ("embed", "mlp")),
    "layer.mlp.gate.bias": ("decoder/{layer}/mlp/wi_0/bias", ("mlp",)),
    "layer.mlp.up.kernel": ("decoder/{layer}/mlp/wi_1/kernel", ("embed", "mlp")),
    "layer.mlp.up.bias": ("decoder/{layer}/mlp/wi_1/bias", ("mlp",)),
    "layer.mlp.down.kernel": ("decoder/{layer}/mlp/wo/kernel", ("mlp", "embed")),
    "layer.mlp.down.bias": ("decoder/{layer}/mlp/wo/bias", ("embed",)),
}
MAXTEXT_QK_NORM: LinenTable = {
    "layer.attention.qk_norm.q.scale": (_SELF + "query_norm/scale", _NORM),
    "layer.attention.qk_norm.k.scale": (_SELF + "key_norm/scale", _NORM),
}


def maxtext_experts(block: str) -> LinenTable:
    """The rows of a MoE layer's experts, which MaxText names ``decoder/{layer}/<block>/wi_0``."""
    inside, wide = f"decoder/{{layer}}/{block}/", ("exp", "embed_moe", "mlp_moe")
    return {
        "layer.moe.experts.gate": (inside + "wi_0", wide),
        "layer.moe.experts.up": (inside + "wi_1", wide),
        "layer.moe.experts.down": (inside + "wo", ("exp", "mlp_moe", "embed_moe")),
    }
