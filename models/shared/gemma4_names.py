"""Names of Gemma 4's weights in Hugging Face and MaxText checkpoints."""

from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import (
    HF_DECODER,
    MAXTEXT_DECODER,
    MAXTEXT_GQA,
    MAXTEXT_MLP,
    MAXTEXT_QK_NORM,
    Hf,
    Linen,
    hf_mlp,
    maxtext_experts,
    maxtext_mlp,
)

_GATE_UP, _EXPERTS = W("experts.gate_up_proj"), W("experts")
_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    **dict.fromkeys(("mlp_norm", "moe_norm"), "pre_feedforward_layernorm"),
    **dict.fromkeys(("mlp_post_norm", "moe_post_norm"), "post_feedforward_layernorm"),
    "dense_post_norm": "post_feedforward_layernorm_1",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "moe.norm": "pre_feedforward_layernorm_2",
}
HF_GEMMA4: Hf = {
    **HF_DECODER,
    **{f"layer.{key}.scale": W(f"{name}.weight") for key, name in _NORMS.items()},
    **hf_mlp("mlp", "layer.dense"),
    "layer.output_scale.factor": W("layer_scalar"),
    "embed.per_layer.table": W("model.embed_tokens_per_layer.weight"),
    "embed.project.kernel": W("model.per_layer_model_projection.weight"),
    "embed.norm.scale": W("model.per_layer_projection_norm.weight"),
    "layer.own.gate.kernel": W("per_layer_input_gate.weight"),
    "layer.own.project.kernel": W("per_layer_projection.weight"),
    "layer.own.norm.scale": W("post_per_layer_input_norm.weight"),
    "layer.attention.q_norm.scale": W("self_attn.q_norm.weight"),
    "layer.moe.router.kernel": W("router.proj.weight"),
    "layer.moe.router.scale": W("router.scale"),
    "layer.moe.router.per_expert": W("router.per_expert_scale"),
    # The second alternatives are the names in quantized files.
    "layer.moe.experts.gate": (_GATE_UP.rows(0, 2), _EXPERTS.each("gate_proj.weight")),
    "layer.moe.experts.up": (_GATE_UP.rows(1, 2), _EXPERTS.each("up_proj.weight")),
    "layer.moe.experts.down": (W("experts.down_proj"), _EXPERTS.each("down_proj.weight")),
}  # fmt: skip
_BLOCK = "mlp/moe_block"
_MAXTEXT_NORMS = {
    "attention_norm": "pre_self_attention_norm",
    "attention_post_norm": "post_self_attention_norm",
    **dict.fromkeys(("mlp_norm", "moe_norm"), "pre_ffw_norm"),
    **dict.fromkeys(("mlp_post_norm", "moe_post_norm"), "post_ffw_norm"),
    "dense_post_norm": "mlp/post_feedforward_layernorm_1",
    "experts_post_norm": "mlp/post_feedforward_layernorm_2",
    "moe.norm": "mlp/pre_feedforward_layernorm_2",
}
MAXTEXT_GEMMA4: Linen = {
    **MAXTEXT_DECODER, **MAXTEXT_GQA, **MAXTEXT_QK_NORM, **MAXTEXT_MLP,
    **maxtext_mlp("layer.dense", f"{_BLOCK}/shared_experts"),
    **maxtext_experts(f"{_BLOCK}/MoeBlock_0"),
    **{f"layer.{key}.scale": (f"{name}/scale", ("norm",)) for key, name in _MAXTEXT_NORMS.items()},
    "layer.output_scale.factor": ("layer_scalar", (None,)),
    "layer.moe.router.kernel": (f"{_BLOCK}/MoeBlock_0/gate/kernel", ("embed_moe", None)),
    "layer.moe.router.scale": ("mlp/pre_forward_scale_2", ("embed",)),
    "layer.moe.router.per_expert": (f"{_BLOCK}/MoeBlock_0/per_expert_scale", ("exp",)),
}  # fmt: skip
