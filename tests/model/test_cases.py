"""Reference cases under several strategies against transformers, and further configs against a NumPy decoder."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import nnxmoe
from nnxmoe import (
    AbsorbedMLA,
    AdaptiveMLA,
    BlockedMatmul,
    Capacity,
    Dense,
    FusedAttention,
    MaskedMatmul,
    NaiveMLA,
    RaggedDotMatmul,
    Scanned,
    Sorted,
    Strategy,
)
from tests.support.arrays import max_error
from tests.support.cases import DEEPSEEK_NAMES, LLAMA_NAMES, NAMES, Case
from tests.support.numpy_decoder import as_weights, reference_logits
from tests.support.running import MODEL_TOLERANCE, eager_logits, forward, variables
from tests.support.tiny import ORACLE, TINY, build, random_tokens, tiny_weights

PLAIN = {
    "unrolled": Strategy(),
    "scanned-fused": Strategy(attention_fn=FusedAttention(), stacking=Scanned()),
}
MOE = {
    "unrolled-sorted-blocked": Strategy(dispatch=Sorted(), matmul=BlockedMatmul()),
    "scanned-dense-masked": Strategy(dispatch=Dense(), matmul=MaskedMatmul(), stacking=Scanned()),
    "unrolled-capacity-ragged": Strategy(dispatch=Capacity(8.0), matmul=RaggedDotMatmul()),
    "scanned-sorted-blocked": Strategy(dispatch=Sorted(), matmul=BlockedMatmul(4), stacking=Scanned()),
}
LATENT = {
    "unrolled-sorted-naive": Strategy(dispatch=Sorted(), matmul=BlockedMatmul(), mla=NaiveMLA()),
    "scanned-dense-absorbed": Strategy(dispatch=Dense(), matmul=MaskedMatmul(), mla=AbsorbedMLA(), stacking=Scanned()),
    "unrolled-capacity-by-length": Strategy(dispatch=Capacity(8.0), matmul=RaggedDotMatmul(), mla=AdaptiveMLA()),
    "scanned-sorted-by-length": Strategy(
        dispatch=Sorted(), matmul=BlockedMatmul(4), mla=AdaptiveMLA(99), stacking=Scanned()
    ),
    "unrolled-sorted-absorbed-fused": Strategy(attention_fn=FusedAttention(), mla=AbsorbedMLA()),
}
FORWARDS = [
    pytest.param(name, strategy, id=f"{name}-{label}")
    for names, strategies in ((LLAMA_NAMES, PLAIN), (("mixtral_basic",), MOE), (DEEPSEEK_NAMES, LATENT))
    for name in names
    for label, strategy in strategies.items()
    if not (name == "deepseek_yarn" and "scanned-sorted" in label)
]


def check_routing(out: nnxmoe.Output, case: Case) -> None:
    """Assert that the same layers route to the same experts with the same weights."""
    assert out.routing is not None
    layers = {int(key.split(".")[1]) for key in case.arrays if key.startswith("router.")}
    assert set(out.routing) == layers
    for i, routing in out.routing.items():
        count = routing.scores.shape[-1]
        wanted = as_weights(case.arrays[f"router.{i}.indices"], case.arrays[f"router.{i}.weights"], count)
        ours = as_weights(routing.experts, routing.weights, count).reshape(wanted.shape)
        assert np.array_equal(ours != 0, wanted != 0)
        assert max_error(ours, wanted) < 1e-5
        assert max_error(np.asarray(routing.logits).reshape(wanted.shape), case.arrays[f"router.{i}.logits"]) < 1e-4


@pytest.mark.parametrize(("name", "strategy"), FORWARDS)
def test_forward_matches_transformers(name: str, strategy: Strategy, case: Any, case_model: Any) -> None:
    known, model = case(name), case_model(name, strategy)
    arrays, ids = known.arrays, known.arrays["input_ids"]
    out = forward(model, ids, attention_mask=np.ones_like(ids))
    assert out.logits.dtype == np.float32
    assert max_error(out.logits, arrays["logits"]) < MODEL_TOLERANCE
    assert out.hidden is not None
    depth = known.fields["num_hidden_layers"]
    assert len(out.hidden) == depth + 2
    wanted = ["hidden.embed", *(f"hidden.layer.{i}" for i in range(depth)), "hidden.norm"]
    for ours, key in zip(out.hidden, wanted, strict=True):
        assert max_error(ours, arrays[key]) < MODEL_TOLERANCE, key
    check_routing(out, known)
    mask = arrays["padded.attention_mask"]
    padded = forward(model, arrays["padded.input_ids"], attention_mask=mask)
    assert max_error(padded.logits, arrays["padded.logits"], mask) < MODEL_TOLERANCE
    assert np.isfinite(np.asarray(padded.logits)).all()


@pytest.mark.parametrize("name", ["llama_basic", "mixtral_basic"])
def test_call_without_a_mask(name: str, case: Any, case_model: Any) -> None:
    """No mask takes another code path than a mask of ones; outputs that were not requested are None."""
    known = case(name)
    out = case_model(name)(known.arrays["input_ids"])
    assert max_error(out.logits, known.arrays["logits"]) < MODEL_TOLERANCE
    assert out.cache is None and out.routing is None and out.hidden is None


GREEDY = [
    *(
        pytest.param(name, Strategy(), marks=pytest.mark.slow if name in ("llama_basic", "llama3_rope") else [])
        for name in NAMES
    ),
    pytest.param("llama3_rope", Strategy(stacking=Scanned()), marks=pytest.mark.slow),
    pytest.param("mixtral_basic", Strategy(dispatch=Capacity(8.0), stacking=Scanned()), marks=pytest.mark.slow),
    ("deepseek_yarn", Strategy(mla=AbsorbedMLA(), stacking=Scanned())),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), GREEDY)
def test_greedy_decoding_matches_transformers(name: str, strategy: Strategy, case: Any, case_model: Any) -> None:
    """Twelve tokens by cached decoding, with and without left padding."""
    arrays, model = case(name).arrays, case_model(name, strategy)
    prompt = arrays["generate.prompt"]
    ids = nnxmoe.generate(model, prompt, max_new_tokens=12, eos_token_id=None)
    assert np.array_equal(ids[:, :10], prompt)
    assert np.array_equal(ids[:, 10:], arrays["generate.ids"])
    prompt, mask = arrays["generate.padded.prompt"], arrays["generate.padded.mask"]
    assert mask.min() == 0
    ids = nnxmoe.generate(model, prompt, mask, max_new_tokens=12, eos_token_id=None)
    assert np.array_equal(ids[:, 10:], arrays["generate.padded.ids"])


# Configurations beyond the six cases


@pytest.mark.parametrize("name", NAMES)
def test_numpy_decoder_agrees_with_transformers(name: str, case: Any) -> None:
    known = case(name)
    logits = reference_logits(known.fields, known.weights, known.arrays["input_ids"])
    assert max_error(logits, known.arrays["logits"]) < 5e-5
    mask = known.arrays["padded.attention_mask"]
    logits = reference_logits(known.fields, known.weights, known.arrays["padded.input_ids"], mask)
    assert max_error(logits, known.arrays["padded.logits"], mask) < 5e-5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {}),
    "llama-tied-mqa": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 10}),
    "llama-no-head-dim-no-groups": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama-dynamic-long": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}),
    "llama-dynamic-short": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama-llama3-nested-theta": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn-default-temperature": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-attention-factor": ("llama", {"rope_scaling": YARN | {"attention_factor": 0.7, "truncate": False}}),
    "llama-yarn-top-level-original": (
        "llama",
        {"rope_scaling": YARN | {"beta_fast": 4, "beta_slow": 0.5}, "original_max_position_embeddings": 24},
    ),
    "mistral-window": ("mistral", {}),
    "mistral-window-one": ("mistral", {"sliding_window": 1}),
    "mistral-window-longer": ("mistral", {"sliding_window": 100}),
    "mixtral-window": ("mixtral", {"sliding_window": 3}),
    "mixtral-top-1": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 6, "tie_word_embeddings": True}),
    "deepseek-biases": ("deepseek_v3", {}),
    "deepseek-plain-queries-halves": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek-all-sparse-no-shared": ("deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": None}),
    "deepseek-all-dense": ("deepseek_v3", {"first_k_dense_replace": 7}),
    "deepseek-one-group-unnormalised": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-yarn-unequal": ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "deepseek-large-eps-tied": ("deepseek_v3", {"rms_norm_eps": 0.05, "tie_word_embeddings": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", MORE)
def test_more_configurations_match_the_numpy_decoder(label: str) -> None:
    """One row is left-padded, the other right-padded; DeepSeek gets negative correction biases."""
    kind, changes = MORE[label]
    fields = TINY[kind] | changes
    weights = {
        name: value - 1.5 if name.endswith("correction_bias") else value
        for name, value in tiny_weights(fields, seed=1).items()
    }
    tokens = random_tokens(2, 11, seed=2)
    mask = np.ones_like(tokens)
    mask[0, :3], mask[1, -2:] = 0, 0
    model = build(fields, weights)
    logits = eager_logits(model, tokens, mask)
    assert max_error(logits, reference_logits(fields, weights, tokens, mask), mask) < MODEL_TOLERANCE


def test_strategies_keep_config_and_parameter_count() -> None:
    """Only the stacking of the parameters differs."""
    fields = TINY["deepseek_v3"]
    weights = tiny_weights(fields)
    models = [build(fields, weights, s) for s in (ORACLE, Strategy(), dataclasses.replace(ORACLE, stacking=Scanned()))]
    assert len({model.config for model in models}) == 1
    counts = {sum(int(np.prod(value.shape)) for _, value in variables(model)) for model in models}
    assert counts == {sum(value.size for value in weights.values())}
