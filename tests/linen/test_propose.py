"""``linen.propose_mapping`` proposes unambiguous rows, and lists all candidates for the other parameters."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import linen
from nnxmoe.convert import native
from nnxmoe.convert.arrays.load_model import abstract_model
from nnxmoe.linen.mapping import general_name
from nnxmoe.linen.propose import Proposal
from tests.support import linen_trees
from tests.support.tiny import build_tiny

LAYER = "layers/{layer}/"
NORMS = (f"{LAYER}attention_norm/scale", f"{LAYER}mlp_norm/scale")
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "head_dim": 4,
    "intermediate_size": 28,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA = nnxmoe.config_from_hf(SIZES | HEADS | {"model_type": "llama"})


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def check_tree(seed: int) -> tuple[list[str], int, int]:
    """Wrong rows for a random tree, number of rows, and number of parameters with a counterpart."""
    config, tree, truth = linen_trees.draw(seed)
    proposed, wrong = linen.propose_mapping(config, tree), list[str]()
    for ours, source in proposed.items():
        right = truth.get(ours, truth.get(LAYER + "/".join(ours.split("/")[2:])))
        pair = (source, False) if isinstance(source, str) else (source[0], True)
        wrong += [f"tree {seed}: {ours} <- {source}, not {right}"] if pair != right else []
    return wrong, len(proposed), len(truth)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 540), marks=pytest.mark.slow)])
def test_no_row_of_random_trees_is_wrong(seeds: range) -> None:
    """Half of the names are ambiguous. More than half of all parameters still get a row."""
    wrong, rows, parameters = zip(*(check_tree(seed) for seed in seeds), strict=True)
    assert not list(itertools.chain(*wrong))
    assert sum(rows) > 0.5 * sum(parameters)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("names", ["ln1 ln2", "norm1 norm2", "norm_1 norm_2", "rms1 rms2", "norm_a norm_b",
                                   "before after", "ln_before ln_after", "pre_norm post_norm"])  # fmt: skip
def test_names_that_differ_in_a_digit_or_letter_are_ambiguous(names: str, stacked: bool) -> None:
    """Both candidates are listed. A norm outside the layers is not a candidate for one within a layer."""
    where = ["blocks"] if stacked else ["block0", "block1"]
    scale = f32(2, 16) if stacked else f32(16)
    tree = {block: {name: {"scale": scale} for name in names.split()} for block in where}
    proposed = linen.propose_mapping(LLAMA, tree)
    theirs = tuple(f"{'blocks' if stacked else 'block{layer}'}/{name}/scale" for name in names.split())
    assert not proposed and {name: proposed.candidates[name] for name in NORMS} == dict.fromkeys(NORMS, theirs)
    assert proposed.candidates["norm/scale"] == ()
    assert f"{NORMS[0]} [16] <- ? {theirs[0]} or {theirs[1]}" in str(proposed)
    with pytest.raises(ValueError, match="the mapping does not convert") as caught:
        linen.from_linen(jax.tree.map(lambda a: np.zeros(a.shape), tree), LLAMA, mapping=proposed | {"x": "y"})
    choice = " or ".join(theirs).replace("{layer}", "*")
    assert f"layers/*/attention_norm/scale [16] has no row in the mapping: choose {choice}" in str(caught.value)


@pytest.mark.parametrize("names", ["ln_1 ln_2", "RMSNorm_0 RMSNorm_1", "attention_norm ffn_norm", "pre_attn pre_mlp",
                                   "input_layernorm post_attention_layernorm", "ln_attn ln_ff"])  # fmt: skip
def test_known_names_of_norms_are_mapped(names: str) -> None:
    tree = {f"block{i}": {name: {"scale": f32(16)} for name in names.split()} for i in range(2)}
    theirs = [f"block{{layer}}/{name}/scale" for name in names.split()]
    assert linen.propose_mapping(LLAMA, tree) == dict(zip(NORMS, theirs, strict=True))


def test_square_kernels_with_numbered_names_are_ambiguous() -> None:
    tree = {f"block{i}": {f"Dense_{n}": {"kernel": f32(16, 16)} for n in range(4)} for i in range(2)}
    proposed = linen.propose_mapping(LLAMA, tree)
    dense = tuple(f"block{{layer}}/Dense_{n}/kernel" for n in range(4))
    assert not proposed and {proposed.candidates[f"{LAYER}attention/{x}/kernel"] for x in "qkvo"} == {dense}


@pytest.mark.parametrize("experts", [2, 3])
def test_layers_on_axis_1_are_not_mapped(experts: int) -> None:
    """As in MaxText. With two layers and two experts, axis 0 of an expert kernel looks like the layers."""
    fields = SIZES | {"model_type": "mixtral", **HEADS, "num_local_experts": experts}
    config = nnxmoe.config_from_hf(fields)
    tree = {"ln_1": {"scale": f32(16, 2)}, "o_proj": {"kernel": f32(4, 2, 4, 16)}}
    tree |= {"experts": {"down": f32(experts, 2, 28, 16)}, "gate": {"kernel": f32(16, 2, experts)}}
    assert not linen.propose_mapping(config, {"layers": tree})


def test_square_kernels_of_unknown_orientation_are_ambiguous() -> None:
    """The orientation of the head does not determine that of the layers, or vice versa."""
    layer = {"attn": {f"{x}_proj": {"weight": f32(16, 16)} for x in "qkvo"}}
    tree = {"embed": {"embedding": f32(24, 16)}, "lm_head": {"embedding": f32(24, 16)}}
    proposed = linen.propose_mapping(LLAMA, tree | {"layers_0": layer, "layers_1": layer})
    assert proposed == {"embed/table": "embed/embedding", "head/kernel": ("lm_head/embedding", jnp.transpose)}
    assert proposed.candidates[f"{LAYER}attention/q/kernel"] == ("layers_{layer}/attn/q_proj/weight",)


def test_norms_of_queries_are_not_norms_of_the_layer() -> None:
    fields = SIZES | {"model_type": "qwen3", **HEADS, "head_dim": 16}
    block = {"attn": {f"RMSNorm_{i}": {"scale": f32(16)} for i in range(2)}, "a_ln": {"scale": f32(16)}}
    proposed = linen.propose_mapping(nnxmoe.config_from_hf(fields), {"block0": block, "block1": block})
    assert not proposed and len(proposed.candidates[NORMS[0]]) == 3


def test_unknown_names_compete_with_ambiguous_names() -> None:
    """``w2`` may be any of the three kernels, and ``drop`` replaces no norm."""
    config = nnxmoe.config_from_hf(SIZES | {"model_type": "mixtral", **HEADS, "num_local_experts": 2})
    experts = {"w0": f32(2, 28, 16), "w1": f32(2, 16, 28), "w2": f32(2, 28, 16)}  # [out, in], as in torch
    block = {"experts": experts, "ln_attn": {"scale": f32(16)}, "drop": {"scale": f32(16)}}
    proposed = linen.propose_mapping(config, {"block0": block, "block1": block})
    assert dict(proposed) == {NORMS[0]: "block{layer}/ln_attn/scale"}


def test_biases_of_experts_and_sinks_are_mapped() -> None:
    fields = {"model_type": "gpt_oss", **HEADS, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = nnxmoe.config_from_hf(SIZES | fields | {"intermediate_size": 16, "sliding_window": 4})
    biases = {f"{x}_bias": f32(2, 16) for x in ("gate", "up", "down")}
    block = {"attn": {"sinks": f32(4)}, "mlp": {"experts": biases, "router": {"weight": f32(2, 16), "bias": f32(2)}}}
    proposed = linen.propose_mapping(config, {"block0": block, "block1": block})
    experts, router = f"{LAYER}moe/experts/biases/", f"{LAYER}moe/router/"
    assert dict(proposed) == {
        f"{LAYER}attention/sinks/scores": "block{layer}/attn/sinks",
        **{f"{experts}{x}": f"block{{layer}}/mlp/experts/{x}_bias" for x in ("down", "gate", "up")},
        f"{router}kernel": ("block{layer}/mlp/router/weight", jnp.transpose),
        f"{router}logit_bias/values": "block{layer}/mlp/router/bias",
    }


# One row per code base: the layers' prefix; embedding, final norm and head; norms; q, k, v, o; gate, up, down; norms of
# queries and keys.
CODE_BASES = {
    "transformers": "model/layers/{}/ embed_tokens/embedding norm/weight lm_head/kernel input_layernorm/weight"
    " post_attention_layernorm/weight self_attn/q_proj/kernel self_attn/k_proj/kernel self_attn/v_proj/kernel"
    " self_attn/o_proj/kernel mlp/gate_proj/kernel mlp/up_proj/kernel mlp/down_proj/kernel self_attn/q_norm/weight"
    " self_attn/k_norm/weight",
    "maxtext": "decoder/layers_{}/ token_embedder/embedding decoder/decoder_norm/scale decoder/logits_dense/kernel"
    " pre_self_attention_layer_norm/scale post_self_attention_layer_norm/scale self_attention/query/kernel"
    " self_attention/key/kernel self_attention/value/kernel self_attention/out/kernel mlp/wi_0/kernel mlp/wi_1/kernel"
    " mlp/wo/kernel self_attention/query_norm/scale self_attention/key_norm/scale",
    "t5x": "decoder/layers_{}/ token_embedder/embedding decoder/decoder_norm/scale decoder/logits_dense/kernel"
    " pre_self_attention_layer_norm/scale pre_mlp_layer_norm/scale self_attention/query/kernel"
    " self_attention/key/kernel"
    " self_attention/value/kernel self_attention/out/kernel mlp/wi_0/kernel mlp/wi_1/kernel mlp/wo/kernel"
    " self_attention/q_layernorm/scale self_attention/k_layernorm/scale",
    "EasyLM": "transformer/h/{}/ transformer/wte/embedding transformer/ln_f/kernel lm_head/kernel attention_norm/kernel"
    " ffn_norm/kernel attention/wq/kernel attention/wk/kernel attention/wv/kernel attention/wo/kernel"
    " feed_forward/w1/kernel feed_forward/w3/kernel feed_forward/w2/kernel attention/q_norm/kernel"
    " attention/k_norm/kernel",
    "tunix": "layers/{}/ embedder/input_embedding final_norm/w lm_head/w input_layernorm/w post_attention_layernorm/w"
    " attn/q_proj/w attn/k_proj/w attn/v_proj/w attn/o_proj/w mlp/gate_proj/kernel mlp/up_proj/kernel"
    " mlp/down_proj/kernel"
    " attn/q_norm/w attn/k_norm/w",
    "levanter": "transformer/layers/{}/ embeddings/token_embeddings/weight transformer/norm/weight lm_head/weight"
    " input_layernorm/weight post_attention_layernorm/weight self_attn/q_proj/weight self_attn/k_proj/weight"
    " self_attn/v_proj/weight self_attn/o_proj/weight mlp/gate_proj/weight mlp/up_proj/weight mlp/down_proj/weight"
    " self_attn/q_norm/weight self_attn/k_norm/weight",
    "automatic": "Block_{}/ Embed_0/embedding RMSNorm_0/scale Dense_0/kernel RMSNorm_0/scale RMSNorm_1/scale"
    " Attention_0/query/kernel Attention_0/key/kernel Attention_0/value/kernel Attention_0/out/kernel MLP_0/gate/kernel"
    " MLP_0/up/kernel MLP_0/down/kernel Attention_0/query_norm/scale Attention_0/key_norm/scale",
    "praxis": "lm/transformer/x_layers_{}/ lm/softmax/embedding/emb_var lm/final_ln/scale"
    " lm/softmax/logits_ffn/linear/w"
    " layer_norm/scale ff_layer/layer_norm/scale self_attention/query/w self_attention/key/w self_attention/value/w"
    " self_attention/post/w ff_layer/ffn_layer1_gate/linear/w ff_layer/ffn_layer1/linear/w ff_layer/ffn_layer2/linear/w"
    " self_attention/q_n/scale self_attention/k_n/scale",
}  # fmt: skip
OURS = """embed/table norm/scale head/kernel attention_norm/scale mlp_norm/scale attention/q/kernel attention/k/kernel
    attention/v/kernel attention/o/kernel mlp/gate/kernel mlp/up/kernel mlp/down/kernel attention/qk_norm/q/scale
    attention/qk_norm/k/scale""".split()


@pytest.mark.parametrize("code_base", CODE_BASES)
def test_names_of_public_code_bases_are_mapped(code_base: str) -> None:
    prefix, *theirs = CODE_BASES[code_base].replace("{}", "{layer}").split()
    names = {LAYER * (i > 2) + a: prefix * (i > 2) + b for i, (a, b) in enumerate(zip(OURS, theirs, strict=True))}
    for kind, heads in itertools.product(("llama", "qwen3"), (4, 8)):  # with 4 heads kernels of queries are square
        fields = SIZES | {"model_type": kind, "num_attention_heads": heads, "num_key_value_heads": heads}
        config, tree = nnxmoe.config_from_hf(fields), dict[str, Any]()
        leaves = native.layout(abstract_model(config, None, None), False)
        for name, leaf in leaves.items():
            general, layer = general_name(name)
            tree[names[general].replace("{layer}", str(layer))] = f32(*leaf.shape)
        assert linen.propose_mapping(config, tree) == {
            general_name(name)[0]: names[general_name(name)[0]] for name in leaves
        }


MIXTRAL = {
    "moe/router": "gate",
    "moe/experts/gate": "experts/w1",
    "moe/experts/up": "experts/w3",
    "moe/experts/down": "experts/w2",
}
DEEPSEEK = {
    "attention/q/a": "q_a_proj", "attention/q/b": "q_b_proj", "attention/q/norm": "q_a_layernorm",
    "attention/kv_a": "kv_a_proj_with_mqa", "attention/kv_b": "kv_b_proj", "attention/kv_norm": "kv_a_layernorm",
    "attention/o": "o_proj", "moe/router": "mlp/gate", "moe/shared": "mlp/shared_experts", "moe/experts": "mlp/experts",
    "moe_norm": "post_attention_layernorm", "mlp_norm": "post_attention_layernorm", "attention_norm": "input_layernorm",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "words"), [("mixtral", MIXTRAL), ("deepseek_v3", DEEPSEEK)])
def test_names_of_experts_and_latents_are_mapped(kind: str, words: dict[str, str]) -> None:
    """Norms of dense and of MoE layers may have one name in Linen."""
    model = build_tiny(kind, nnxmoe.Strategy())
    tree, right = dict[str, Any](), dict[str, str]()
    for name, array in native.arrays(model, False).items():
        ours, layer = general_name(name)
        theirs = ours.replace("layers/{layer}", "model/layers/{layer}")
        for word, other in words.items():
            theirs = (
                theirs.replace(f"/{word}/", f"/{other}/") if not ours.endswith(word) else theirs.replace(word, other)
            )
        tree[theirs.replace("{layer}", str(layer))], right[ours] = f32(*array.shape), theirs
    assert linen.propose_mapping(model, tree) == right


def test_fused_and_unrelated_arrays_are_not_candidates() -> None:
    """The fused kernel has the shape of a different parameter, the position table that of the embedding."""
    config = nnxmoe.config_from_hf(SIZES | {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 48})
    layer = {"attn": {"qkv": {"kernel": f32(16, 48)}}, "channel": {"linear_v": {"kernel": f32(16, 16)}}}
    tree = {"layers_0": layer, "layers_1": layer, "wpe": {"embedding": f32(24, 16)}, "a": {"kernel": f32(16, 24)}}
    proposed = linen.propose_mapping(config, tree)
    assert not proposed and proposed.candidates["embed/table"] == ()
    assert not any("qkv" in name for names in proposed.candidates.values() for name in names)


def test_layers_with_other_indices_are_not_candidates() -> None:
    """Layers counted from 1, and a stack with a different number of layers."""
    for tree in (
        {f"layers_{i}": {"attn_norm": {"scale": f32(16)}} for i in (1, 2)},
        {"layers": {"attn_norm": {"scale": f32(3, 16)}}},
    ):
        proposed = linen.propose_mapping(LLAMA, tree)
        assert not proposed and not any(proposed.candidates.values())


def test_layers_of_plain_modules_have_one_row_each() -> None:
    class Ours(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(3)])

    steps = {f"layers_{2 * i}": {"kernel": f32(4, 4)} for i in range(3)}  # between activations
    assert not linen.propose_mapping(Ours(), steps)
    equal = {f"layers_{i}": {"kernel": f32(4, 4)} for i in range(3)}
    assert linen.propose_mapping(Ours(), equal) == {f"layers/{i}/kernel": f"layers_{i}/kernel" for i in range(3)}


def test_bias_follows_its_kernel() -> None:
    class Ours(nnx.Module):
        def __init__(self) -> None:
            self.up, self.down = nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    tree = {"Dense_0": {"kernel": f32(4, 6), "bias": f32(6)}, "Dense_1": {"kernel": f32(6, 4), "bias": f32(4)}}
    pairs = {"up": "Dense_0", "down": "Dense_1"}
    assert linen.propose_mapping(Ours(), tree) == {
        f"{a}/{x}": f"{b}/{x}" for a, b in pairs.items() for x in ("kernel", "bias")
    }


def test_proposal_completed_by_hand() -> None:
    """``|`` preserves the candidates of parameters without a row."""
    tree = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 3)))
    proposed = linen.propose_mapping(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tree) | {"x": ("kernel", lambda a: a)}
    assert isinstance(proposed, Proposal) and "x [] <- kernel [3, 3] by a function" in str(proposed)
