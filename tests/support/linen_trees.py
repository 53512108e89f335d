"""Random Linen parameter trees with names from public code bases, and the correct mapping of each."""

import random
import re
from typing import Any

import jax
import jax.numpy as jnp

import nnxmoe
from nnxmoe.convert import native
from nnxmoe.convert.arrays.load_model import abstract_model
from nnxmoe.linen.mapping import general_name

Tree = dict[str, Any]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "afmoe": {
        "model_type": "afmoe", "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "layer_types": ["sliding_attention", "full_attention"], "global_attn_every_n_layers": 2, "sliding_window": 4,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
# NNX names of related modules -> alternative Linen names from code bases. "-" omits a level. Names after "?" do not
# identify the modules.
SCHEMES = {
    "q k v o": """
        q k v o; wq wk wv wo; query key value out; q_proj k_proj v_proj o_proj; to_q to_k to_v to_out;
        query key value proj;
        q_proj k_proj v_proj out_proj; q_einsum k_einsum v_einsum attn_vec_einsum;
        ?Dense_0 Dense_1 Dense_2 Dense_3; ?a b c d;
        ?linear1 linear2 linear3 linear4""",
    "gate up down": """
        gate up down; gate_proj up_proj down_proj; wi_0 wi_1 wo; w1 w3 w2; w1 w2 w3; w2 w1 c_proj; fc_1 fc_2 proj;
        linear linear_v linear_1; fc1_g fc1_x fc2; wg wu wd; ?fc1 fc2 fc3; ?Dense_0 Dense_1 Dense_2; ?a b c""",
    "attention_norm mlp_norm": """
        ln_1 ln_2; RMSNorm_0 RMSNorm_1; LayerNorm_0 LayerNorm_1; attention_norm ffn_norm; attn_norm mlp_norm;
        ln_attn ln_ff; pre_attn pre_mlp; input_layernorm post_attention_layernorm; pre_attention_norm pre_ffw_norm;
        pre_self_attention_layer_norm post_self_attention_layer_norm; ?ln1 ln2; ?norm1 norm2; ?norm_1 norm_2;
        ?rms1 rms2;
        ?norm_a norm_b; ?before after; ?ln_before ln_after; ?first second; ?pre_norm post_norm; ?x y""",
    "attention_norm attention_post_norm mlp_norm mlp_post_norm": """
        input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm;
        pre_attention_norm post_attention_norm pre_ffw_norm post_ffw_norm; pre_attn post_attn pre_mlp post_mlp;
        attn_norm attn_post_norm mlp_norm mlp_post_norm; ?ln_1 ln_2 ln_3 ln_4; ?RMSNorm_0 RMSNorm_1 RMSNorm_2 RMSNorm_3;
        ?norm1 norm2 norm3 norm4""",
    "q_norm k_norm": "q_norm k_norm; query_norm key_norm; norm_q norm_k; ?RMSNorm_0 RMSNorm_1; ?qn kn",
    "attention mlp moe": """
        attention mlp moe; attn ffn block_sparse_moe; self_attention mlp MoeBlock_0; Attention_0 MLP_0 MoE_0;
        self_attn feed_forward feed_forward; MultiHeadAttention_0 ff ff; mixer channel channel; - - -""",
    "experts shared router": """
        experts shared router; experts shared_experts gate; - shared_expert gate; - shared_mlp router; e s g""",
    "embed norm head": """
        wte ln_f lm_head; embed norm head; tok_embeddings norm output; embed_tokens final_norm lm_head;
        embedder ln unembed;
        token_embedder decoder_norm logits_dense; Embed_0 RMSNorm_0 Dense_0;
        shared final_layer_norm classifier; ?a b c""",
}
CONTAINERS = """layers_{layer} block_{layer} block{layer} blocks_{layer} h_{layer} h/{layer} layers/{layer} stage{layer}
    TransformerBlock_{layer} decoder/layers_{layer} transformer/h_{layer} model/layers/layer_{layer}
    layer.{layer}""".split()
STACKS = "blocks layers decoder/layers h stack/block ScanDecoderLayer_0".split()
NORMS = {"attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"}


def draw(seed: int) -> tuple[Any, Tree, dict[str, tuple[str, bool]]]:
    """Draw a config, a Linen tree of shapes, and a mapping: NNX name -> (Linen name, whether it is transposed)."""
    rng = random.Random(seed)
    config = _config(rng)
    leaves = native.layout(abstract_model(config, None, None), False)
    width, stacked = config.hidden_size, rng.random() < 0.3 and config.model_type not in ("deepseek_v3", "afmoe")
    container, first = rng.choice(STACKS if stacked else CONTAINERS), 0 if stacked else int(rng.random() < 0.05)
    flat, torch, kernel = rng.random() < 0.5, rng.random() < 0.15, rng.choice(("kernel", "kernel", "weight", ""))
    kernel = kernel if kernel == "" or not torch else "weight"  # Linen's "kernel" is never [out, in]
    fused = rng.choice(([], [], ["q", "k", "v"], ["gate", "up"]))
    endings = {"kernel": kernel, "scale": rng.choice(("scale", "weight", "gamma")), "table": "embedding"}
    words = _words(rng, {general_name(name)[0] for name in leaves})
    tree, truth = Tree(), dict[str, tuple[str, bool]]()
    for name, parameter in leaves.items():
        general, layer = general_name(name)
        shape = tuple(parameter.shape)
        parts = re.sub("qk_norm/([qk])", r"\1_norm", general).split("/")[2 * (layer is not None) :]
        module, in_layer = parts[-2], [container.format(layer="{layer}")] if layer is not None else []
        if len(shape) == 3 and flat and parts[-1] == "kernel" and module in "qkvo":
            shape = (shape[0] * shape[1], shape[2]) if module == "o" else (shape[0], shape[1] * shape[2])
        transposed = torch and len(shape) == 2 and parts[-1] == "kernel"
        shape = shape[::-1] if transposed else shape
        if module in fused and len(shape) > 1 and "experts" not in parts:
            linen_parts = [*in_layer, words.get(parts[0], parts[0]), "qkv" if "q" in fused else "wi"]
            shape, transposed = (width, 3 * width), None
        else:
            linen_parts = [*in_layer, *(words.get(part, part) for part in parts[:-1])]
        ending = endings.get(parts[-1], words.get(parts[-1], parts[-1]) if "experts" in parts else parts[-1])
        path = "/".join(part for part in (*linen_parts, ending) if part not in ("", "-"))
        if transposed is not None and not (first and in_layer):
            truth[general] = path, transposed
        number = {} if layer is None else {"layer": layer + first}
        lead = (config.num_hidden_layers,) if stacked and in_layer else ()
        tree[path.format(**number)] = jax.ShapeDtypeStruct((*lead, *shape), jnp.float32)
    if rng.random() < 0.1:
        tree["wpe/embedding"] = jax.ShapeDtypeStruct((rng.choice((24, 32)), width), jnp.float32)
    clash = len(set(truth.values())) < len(truth) or any(
        other.startswith(f"{name}/") for name in tree for other in tree
    )
    return draw(seed + 100_000) if clash else (config, tree, truth)


def _config(rng: random.Random) -> Any:
    width, heads = rng.choice((8, 16)), rng.choice((2, 4))
    fields = {
        "vocab_size": 24,
        "num_hidden_layers": 2,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((heads, 2, 1)),
        "head_dim": rng.choice((width // heads, 4)),
        "intermediate_size": rng.choice((width, 2 * width, 12)),
        **rng.choice(list(FAMILIES.values())),
    }
    if "n_routed_experts" in fields or "num_experts" in fields:
        fields["moe_intermediate_size"] = fields["intermediate_size"]
    if fields["model_type"] == "deepseek_v3":
        fields["num_key_value_heads"] = heads
        del fields["head_dim"]
    return nnxmoe.config_from_hf(fields)


def _words(rng: random.Random, names: set[str]) -> dict[str, str]:
    """Draw Linen names of the modules. Names that do not identify a module are in random order."""
    modules = {part.replace("moe_", "mlp_") for name in names for part in name.split("/")}
    words = dict[str, str]()
    for nnx_names, schemes in SCHEMES.items():
        is_norm = nnx_names.endswith("norm") and not nnx_names.startswith("q")
        if is_norm and set(nnx_names.split()) != modules & NORMS:
            continue
        scheme = rng.choice([scheme.strip() for scheme in schemes.split(";")])
        linen_names = scheme.removeprefix("?").split()
        if scheme.startswith("?") and rng.random() < 0.5:
            rng.shuffle(linen_names)
        words |= dict(zip(nnx_names.split(), linen_names, strict=True))
    return words | {f"moe_{name[4:]}": linen for name, linen in words.items() if name.startswith("mlp_")}
