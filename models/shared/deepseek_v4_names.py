"""Names of DeepSeek-V4's weights in DeepSeek's files, in transformers and in MaxText."""

from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import MAXTEXT_DECODER, Hf, Linen, maxtext_experts, maxtext_mlp

# Key of a parameter -> name in DeepSeek's files, and name in transformers.
_LAYER = {
    "attention_norm.scale": ("attn_norm.weight", "input_layernorm.weight"),
    "moe_norm.scale": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "attention.sinks.scores": ("attn.attn_sink", "self_attn.sinks"),
    "attention.q_norm.scale": ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    # transformers saves the norm as ``attn.norm``, although DeepSeek's files name it ``attn.kv_norm``.
    "attention.kv_norm.scale": ("attn.norm.weight", "attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    "attention.indexer.q.kernel": ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    "attention.indexer.weights.kernel": (
        "attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
    "moe.router.kernel": ("ffn.gate.weight", "mlp.gate.weight"),
    "moe.router.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "moe.router.table": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
}  # fmt: skip
_LAYER |= {
    f"attention.{key}.kernel": (f"attn.{name}.weight", f"self_attn.{hf_name}.weight")
    for key, name, hf_name in (
        ("q_a", "wq_a", "q_a_proj"), ("q_b", "wq_b", "q_b_proj"), ("kv", "wkv", "kv_proj"), ("o_a", "wo_a", "o_a_proj"),
        ("o_b", "wo_b", "o_b_proj"),
    )
}  # fmt: skip
_LAYER |= {
    f"attention.{key}.{part}": (f"attn.{name}.{end}", f"self_attn.{hf_name}.{hf_end}")
    for key, name, hf_name in (
        ("compressor", "compressor", "compressor"), ("indexer.keys", "indexer.compressor", "compressor.indexer")
    )
    for part, end, hf_end in (
        ("kv.kernel", "wkv.weight", "kv_proj.weight"), ("gate.kernel", "wgate.weight", "gate_proj.weight"),
        ("norm.scale", "norm.weight", "kv_norm.weight"), ("place", "ape", "position_bias"),
    )
}  # fmt: skip
_LAYER |= {
    f"{key}_streams.weights.{part}": (f"hc_{name}_{end}", f"{name}_hc.{end}")
    for key, name in (("attention", "attn"), ("moe", "ffn"))
    for part, end in (("fn.kernel", "fn"), ("base", "base"), ("scale", "scale"))
}
_LAYER |= {
    f"moe.shared.{key}.kernel": (f"ffn.shared_experts.{name}.weight", f"mlp.shared_experts.{key}_proj.weight")
    for key, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_EXPERTS, _GATE_UP, _ONE = W("ffn.experts"), W("mlp.experts.gate_up_proj"), W("mlp.experts")
HF_DEEPSEEK_V4: Hf = {
    "embed.table": (W("model.embed_tokens.weight"), W("model.embed.weight").files_only),
    "norm.scale": W("model.norm.weight"),
    "head.kernel": (W("head.weight"), W("lm_head.weight")),
    "layer.moe.experts.gate": (_EXPERTS.each("w1.weight"), _GATE_UP.rows(0, 2), _ONE.each("gate_proj.weight")),
    "layer.moe.experts.up": (_EXPERTS.each("w3.weight"), _GATE_UP.rows(1, 2), _ONE.each("up_proj.weight")),
    "layer.moe.experts.down": (_EXPERTS.each("w2.weight"), W("mlp.experts.down_proj"), _ONE.each("down_proj.weight")),
}
HF_DEEPSEEK_V4 |= {
    f"norm.weights.{part}": (W(f"model.hc_head.hc_{end}"), W(f"model.hc_head_{end}"))
    for part, end in (("fn.kernel", "fn"), ("base", "base"), ("scale", "scale"))
}
HF_DEEPSEEK_V4 |= {f"layer.{key}": tuple(map(W, names)) for key, names in _LAYER.items()}
HF_DEEPSEEK_V4 |= {
    f"layer.mtp.{key}": W(name)
    for key, name in (
        ("token_norm.scale", "enorm.weight"), ("hidden_norm.scale", "hnorm.weight"), ("norm.scale", "norm.weight"),
        ("project.token.kernel", "e_proj.weight"), ("project.state.kernel", "h_proj.weight"),
        ("norm.weights.fn.kernel", "hc_head_fn"), ("norm.weights.base", "hc_head_base"),
        ("norm.weights.scale", "hc_head_scale"),
    )
}  # fmt: skip
_SELF, _EXPERTS_THERE = "self_attention", "mlp/MoeBlock_0"
_COMPRESSOR = f"{_SELF}/{{kind}}_compressor"
MAXTEXT_DEEPSEEK_V4: Linen = {
    **MAXTEXT_DECODER,
    **maxtext_experts(_EXPERTS_THERE),
    **maxtext_mlp("layer.moe.shared", "mlp/shared_experts"),
    "norm.weights.fn.kernel": ("decoder/hc_head/hc_fn", ("activation_embed", None)),
    "norm.weights.base": ("decoder/hc_head/hc_base", (None,)),
    "norm.weights.scale": ("decoder/hc_head/hc_scale", (None,)),
    "layer.moe.router.kernel": (f"{_EXPERTS_THERE}/gate/kernel", ("embed_moe", None)),
    "layer.moe.router.bias": (f"{_EXPERTS_THERE}/gate/bias", (None,)),
    "layer.moe.router.table": (f"{_EXPERTS_THERE}/tid2eid", (None, None)),
    "layer.attention.sinks.scores": (f"{_SELF}/sinks", (None,)),
    "layer.attention.q_norm.scale": (f"{_SELF}/q_norm/scale", ("norm",)),
    "layer.attention.kv_norm.scale": (f"{_SELF}/kv_norm/scale", ("norm",)),
    "layer.attention.q_a.kernel": (f"{_SELF}/wq_a/kernel", ("embed", "q_lora_up_proj")),
    "layer.attention.q_b.kernel": (f"{_SELF}/wq_b/kernel", ("q_lora", "q_heads", "kv")),
    "layer.attention.kv.kernel": (f"{_SELF}/wkv/kernel", ("embed", "kv_heads", "kv_head_dim")),
    "layer.attention.o_a.kernel": (f"{_SELF}/o_a_proj/kernel", ("o_groups", "q_heads", "o_lora_up_proj"), (1, 0, 2)),
    "layer.attention.o_b.kernel": (f"{_SELF}/o_b_proj/kernel", ("o_lora_up_proj", "embed")),
    "layer.attention.indexer.q.kernel": (f"{_COMPRESSOR}/indexer/q_proj/kernel", ("q_lora", "indexer_q")),
    "layer.attention.indexer.weights.kernel": (f"{_COMPRESSOR}/indexer/weights_proj/kernel", ("embed", None)),
    **{
        f"layer.attention.{key}.{part}": (f"{block}/{name}", axes)
        for key, block in (("compressor", _COMPRESSOR), ("indexer.keys", f"{_COMPRESSOR}/indexer"))
        for part, name, axes in (
            ("kv.kernel", "kv_proj/kernel", ("embed", "kv")), ("gate.kernel", "gate_proj/kernel", ("embed", "kv")),
            ("norm.scale", "kv_norm/scale", ("norm",)), ("place", "position_bias", (None, None)),
        )
    },
    **{
        f"layer.{key}_streams.weights.{part}": (f"mhc_{block}/{name}", axes)
        for key, block in (("attention", "attention"), ("moe", "mlp"))
        for part, name, axes in (
            ("fn.kernel", "alpha", ("activation_embed", None)), ("base", "beta", (None,)),
            ("scale", "alpha_scale", (None,)),
        )
    },
}  # fmt: skip
