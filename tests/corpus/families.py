"""Likely faults of every family of tests/support/families.py, made from its config and the names of its tensors."""

import json
from collections.abc import Callable, Iterator

import numpy as np

from tests.corpus.case import CONFIG, SINGLE, Case, Draft
from tests.support.families import FAMILIES, FOLDER
from tests.support.tiny import Fields

Change = Callable[[np.ndarray], np.ndarray]

# Fault -> the end of the tensor's name, and what becomes of it; None: it is missing.
TENSORS: dict[str, tuple[str, Change | None]] = {
    "a norm of the queries missing": ("self_attn.q_norm.weight", None),
    "a norm of the keys of twice the width": ("self_attn.k_norm.weight", lambda t: np.tile(t, 2)),
    "a bias of the queries missing": ("self_attn.q_proj.bias", None),
    "a bias of the values of one number less": ("self_attn.v_proj.bias", lambda t: t[1:]),
    "a latent norm missing": ("self_attn.kv_a_layernorm.weight", None),
    "a router missing": ("gate.weight", None),
    "a router of one expert less": ("gate.weight", lambda t: t[1:]),
    "a correction bias missing": ("e_score_correction_bias", None),
    "a correction bias of one expert less": ("e_score_correction_bias", lambda t: t[1:]),
    "the gate of the shared expert missing": ("mlp.shared_expert_gate.weight", None),
    "the gate of the shared expert transposed": ("mlp.shared_expert_gate.weight", lambda t: t.T),
    "a matrix of the shared expert missing": ("mlp.shared_expert.up_proj.weight", None),
    "a matrix of the shared experts missing": ("mlp.shared_experts.up_proj.weight", None),
    "a matrix of an expert missing": (".experts.5.up_proj.weight", None),
    "an expert's down projection transposed": (".experts.7.down_proj.weight", lambda t: t.T),
    "an expert's second matrix transposed": (".experts.7.w2.weight", lambda t: t.T),
    "fused queries, keys and values of one row less": ("self_attn.qkv_proj.weight", lambda t: t[1:]),
    "fused gate and up of one row less": ("mlp.gate_up_proj.weight", lambda t: t[1:]),
    "a dense down projection transposed": ("mlp.down_proj.weight", lambda t: t.T),
    "a dense second matrix transposed": ("feed_forward.w2.weight", lambda t: t.T),
    "a short convolution of one tap less": ("conv.conv.weight", lambda t: t[..., 1:]),
}


WIDER, GROUPED = "heads of four more", "as many key heads as query heads"
PER_TOKEN = "num_experts_per_token", "top_k_experts", "num_experts_per_tok"
MORE_EXPERTS = "as many experts again"  # other words where all are in one tensor
# Families whose files have all experts of a layer in one tensor.
JOINED = "granitemoe", "granitemoeshared", "granitemoehybrid", "hy_v4"
# Faults that are none in a family, or that another field or tensor shows.
ELSEWHERE = {
    "deepseek_v4": (WIDER, GROUPED, "groups that do not divide the experts", "more groups chosen than there are"),
    "deepseek_v41_text": (WIDER, GROUPED, "groups that do not divide the experts", "more groups chosen than there are"),
    "qwen3_next": (WIDER,),
    "qwen3_5_moe_text": (WIDER,),
    "glm_moe_dsa": (WIDER,),
    "sarvam_mla": (WIDER,),
    "sarvam_moe": (WIDER, GROUPED),
    "lfm2_moe": ("a layer with a window of null",),  # none of its layers has a window
    "qwen4_exp_text": ("a layer with a window of null",),  # its layers have no windows either
    "phi3": (GROUPED,),  # queries, keys and values are one tensor
    "kimi_linear": (WIDER,),
    "kimi_k3": (WIDER,),
    "glm5_next_text": ("a rotated width of two more", "a layer with a window of null"),  # it has neither
    "mimo_v2_flash": (WIDER,),  # the outputs have the width of the values
    "laguna": (GROUPED,),  # its layers have numbers of heads of their own
    "bailing_hybrid": (WIDER,),
    "minimax_m3_vl_text": (MORE_EXPERTS,),
    "step3p5": (GROUPED, "a kind of attention too many"),  # which is a prediction layer's
    # The last layer is whole whatever the list says, and has other heads.
    "gemma4_text": ("a layer with a window of null", MORE_EXPERTS, GROUPED),
    "mistral4": (
        "more groups chosen than there are",  # it has one
        "groups that do not divide the experts",
        "a rotated width of two more",
        MORE_EXPERTS,
    ),
    "exaone_moe": ("a layer with a window of null",),
    "granitemoehybrid": ("a layer with a window of null",),
    "hy_v4": (  # one kind of attention, which reads neither head_dim nor num_key_value_heads
        *(WIDER, "grouped heads in latent attention", "a layer with a window of null", "an unknown kind of attention"),
        "experts in a dense layer",
    ),
    "hy_v3": ("a dense down projection transposed", "one dense layer more"),  # which is square
}


def _changes(fields: Fields) -> Iterator[tuple[str, Fields, tuple[str, ...]]]:
    """Faults of a family's config: changed fields, and what the error must name."""
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    if "kv_lora_rank" in fields:
        yield "one position less in latent keys", {"kv_lora_rank": fields["kv_lora_rank"] - 1}, ("kv_a_layernorm",)
        wanted = f"[{fields['kv_lora_rank'] + 6}, 24]"
        yield "a rotated width of two more", {"qk_rope_head_dim": 6}, ("kv_a_proj_with_mqa", wanted)
        yield "grouped heads in latent attention", {"num_key_value_heads": 2}, (CONFIG, "num_key_value_heads 2")
    else:
        doubled = fields["model_type"] == "mimo_v2_flash"  # its window layers have twice the key heads
        named = (CONFIG, "sliding_attention") if doubled else ("k_proj.weight",)
        yield "as many key heads as query heads", {"num_key_value_heads": heads}, named
        yield "three key heads for four query heads", {"num_key_value_heads": 3}, (CONFIG, "num_key_value_heads 3")
    if "head_dim" in fields:
        yield "heads of four more", {"head_dim": fields["head_dim"] + 4}, ("q_proj.weight", "o_proj.weight")
    if "layer_types" in fields or fields["model_type"] in ("qwen2", "dots1"):
        kinds = ["full_attention"] * layers
        yield "a kind of attention too many", {"layer_types": [*kinds, kinds[0]]}, (CONFIG, "layer_types")
        unlike = {"layer_types": [*kinds[1:], "sliding_attention"], "sliding_window": None}
        yield "a layer with a window of null", unlike, (CONFIG, "layer_types", "sliding_window")
        yield "an unknown kind of attention", {"layer_types": [*kinds[1:], "linear"]}, (CONFIG, "'linear'")
    if "mlp_layer_types" in fields:
        yield "a kind of layer too few", {"mlp_layer_types": ["sparse"] * (layers - 1)}, (CONFIG, "mlp_layer_types")
        yield (
            "experts in a dense layer",
            {"mlp_layer_types": ["sparse"] * layers},
            ("mlp.experts.0.gate_proj", "missing"),
        )
    if "mlp_only_layers" in fields:
        yield "a dense layer beyond the last", {"mlp_only_layers": [layers]}, (CONFIG, "mlp_only_layers")
        yield "a dense layer where experts are", {"mlp_only_layers": list(range(layers))}, ("gate_proj", "missing")
    if first := fields.get("first_k_dense_replace"):
        yield "one dense layer more", {"first_k_dense_replace": first + 1}, (f"{first}.mlp.gate_proj", "missing")
    if "n_routed_experts" in fields:
        yield "groups that do not divide the experts", {"n_group": 3}, (CONFIG, "n_group 3", "n_routed_experts 8")
        yield "more groups chosen than there are", {"n_group": 2, "topk_group": 3}, (CONFIG, "topk_group 3")
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if count := fields.get(name):
            is_joined = fields["model_type"] in JOINED
            named = (f"requires [{2 * count}, ",) if is_joined else (f"experts.{count}.", "missing")
            yield MORE_EXPERTS, {name: 2 * count}, named
            per_token = next(name for name in PER_TOKEN if name in fields)
            yield "more experts per token than experts", {per_token: count + 1}, (CONFIG, f"{count + 1} is")


def cases() -> Iterator[Case]:
    """All of them; the last tensor of those with a name is the one that is spoiled."""
    for kind in FAMILIES:
        stored = json.loads((FOLDER / f"{kind}.json").read_text())
        for fault, (ending, change) in TENSORS.items():
            if fault in ELSEWHERE.get(kind, ()):
                continue
            if name := next((name for name in reversed(stored["shapes"]) if name.endswith(ending)), None):
                shown = name.replace("backbone.", "model.")  # errors have transformers' prefix
                names = (shown, "missing" if change is None else SINGLE)
                yield Case(kind, f"family, {fault}", "refuse", _tensor(name, change), names)
        for fault, fields, names in _changes(stored["config"]):
            if fault in ELSEWHERE.get(kind, ()):
                continue
            yield Case(kind, f"family, {fault}", "refuse", _config(fields), names)


def _tensor(name: str, change: Change | None) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        tensor = draft.weights.pop(name)
        if change is not None:
            draft.weights[name] = np.ascontiguousarray(change(tensor))
        draft.write()

    return make


def _config(fields: Fields) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.fields |= fields
        draft.write()

    return make
