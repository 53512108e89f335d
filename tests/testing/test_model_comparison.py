"""`testing.compare`: a flipped expert due to rounding is told from a bug."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.linen import LinenCausalLM
from nnxmoe.testing import Comparison, Recorded, compare
from tests.support.families import load, positions_of
from tests.support.tiny import ORACLE, build_tiny, random_tokens, stacking_of, write_checkpoint

TOKENS = random_tokens(4, 48)
KINDS = ("mixtral", "deepseek_v3")


def build(kind: str, scanned: bool = False, **options: Any) -> nnxmoe.CausalLM:
    return build_tiny(kind, dataclasses.replace(ORACLE, stacking=stacking_of(scanned), **options))


def add_noise(variable: Any, scale: float) -> None:
    noise = np.random.default_rng(0).standard_normal(variable.shape)
    variable.set_value(variable[...] + jnp.asarray(scale * noise, variable.dtype))


def moe_of(model: nnxmoe.CausalLM, layer: int) -> Any:
    return [layer for stack in model.stacks for layer in stack.layers][layer].moe


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounding(kind: str) -> None:
    """In float32's tolerance, the same flips are no rounding."""
    model, reference = build(kind, compute_dtype="bfloat16"), build(kind)
    result = compare(model, reference, TOKENS)
    assert result.verdict == "rounding" and result.first_layer is not None, result
    assert result.tokens == TOKENS.size and 0 < sum(result.flipped.values()) < 0.2 * TOKENS.size
    assert result.margin is not None and result.router_difference is not None
    assert 0 < result.margin < 5e-2 and 0 < result.forced < result.difference and result.tolerance == 5e-2
    text = str(result)
    assert text.startswith("rounding: ") and f"layer {result.first_layer}: margin" in text
    assert compare(model, reference, TOKENS, tolerance=2e-4).verdict == "bug"


@pytest.mark.parametrize("kind", KINDS)
def test_stacking_and_remat_are_equal(kind: str) -> None:
    result = compare(build(kind), build(kind, True, remat=nnxmoe.Remat()), TOKENS)
    assert result.verdict == "equal" and result.first_layer is None and result.margin is None
    assert result.difference == result.forced < 1e-5 and "the same experts" in str(result)


@pytest.mark.parametrize("scanned", [False, True])
def test_changed_router(scanned: bool) -> None:
    """With the same experts the logits agree, so only the choice differs."""
    model, reference = build("mixtral"), build("mixtral", scanned)
    add_noise(moe_of(model, 1).router.kernel, 1e-3)
    result = compare(model, reference, TOKENS, tolerance=3e-3)
    assert result.verdict == "bug" and result.first_layer == 1 and result.flipped[0] == 0, result
    assert result.forced <= 3e-3 < result.difference and "only the choice of experts differs" in str(result)
    assert result.router_difference is not None and 3e-3 < result.router_difference < 1e-2


def test_changed_bias_is_a_bug() -> None:
    """The router logits agree. The margin shows that the choice is not nearly tied."""
    model, reference = build("deepseek_v3"), build("deepseek_v3", True)
    bias = moe_of(model, 2).router.bias
    bias.set_value(bias[...].at[0].add(0.3))
    result = compare(model, reference, TOKENS)
    assert result.verdict == "bug" and result.first_layer == 2, result
    assert result.router_difference is not None and result.router_difference < 1e-5 and result.forced < 1e-5
    assert result.margin is not None and result.margin > 0.1


def test_changed_expert() -> None:
    model, reference = build("mixtral"), build("mixtral")
    add_noise(moe_of(model, 0).experts.up, 1e-2)
    result = compare(model, reference, TOKENS)
    assert result.verdict == "bug" and result.forced > 10 * result.tolerance
    assert result.first_layer is None or "more than the routing differs" in str(result)


def test_padding_is_ignored() -> None:
    mask = np.arange(48) < np.array([[48], [30], [5], [1]])
    other = np.where(mask, TOKENS, (TOKENS + 1) % 53)
    model = build("mixtral")
    recorded = model(other, mask, return_routing=True)
    assert recorded.routing is not None
    experts = {layer: np.where(mask[..., None], routing.experts, 0) for layer, routing in recorded.routing.items()}
    reference = Recorded(np.where(mask[..., None], recorded.logits, np.nan), experts)
    result = compare(model, reference, TOKENS, attention_mask=mask)
    assert result.verdict == "equal" and result.tokens == mask.sum()


@pytest.mark.parametrize("scan", [False, True])
def test_linen(scan: bool) -> None:
    reference = build("deepseek_v3")
    module = LinenCausalLM(reference.config, ORACLE, scan)
    variables: Any = maxtext.to_tree(reference, scan_layers=scan)
    assert compare((module, variables), reference, TOKENS).verdict == "equal"
    bias = moe_of(reference, 1).router.bias
    bias.set_value(bias[...].at[0].add(0.3))
    for sides in (((module, variables), reference), (reference, (module, variables))):
        result = compare(*sides, TOKENS)
        assert result.verdict == "bug" and result.first_layer == 1 and result.forced < 1e-5, result
    half = LinenCausalLM(reference.config, dataclasses.replace(ORACLE, compute_dtype="bfloat16"), scan)
    result = compare((half, variables), (module, variables), TOKENS)
    assert result.verdict == "rounding" and result.tolerance == 5e-2, result


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v4", "glm4_moe", "gemma4_text"])
def test_recorded_outputs_of_transformers(kind: str, tmp_path: Path) -> None:
    case = load(kind)
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path, case.fields, case.weights), strategy=ORACLE)
    tokens, mask, positions = case.arrays["tokens"], case.arrays["mask"], positions_of(case.arrays["mask"])
    names = [name for name in case.arrays if name.startswith("padded.experts.")]
    experts = {int(name.rpartition(".")[2]): case.arrays[name] for name in names}
    recorded = Recorded(case.arrays["padded.logits"], experts)
    options: Any = {"attention_mask": mask, "positions": positions}
    assert compare(model, recorded, tokens, **options).verdict == "equal"
    last = max(experts)
    swapped = experts[last].copy()
    swapped[1, 2] = (swapped[1, 2] + 1) % swapped.max()
    result = compare(recorded, model, tokens, **options)
    assert result.verdict == "equal"
    result = compare(model, dataclasses.replace(recorded, experts=experts | {last: swapped}), tokens, **options)
    assert result.verdict == "bug" and result.first_layer == last and result.flipped[last] == 1, result


def test_recorded_router_logits() -> None:
    """transformers returns router logits ``[B * T, E]``. The experts are computed from them."""
    model = build("mixtral")
    out = model(TOKENS, return_routing=True)
    assert out.routing is not None
    logits = {layer: np.array(routing.logits).reshape(-1, 6) for layer, routing in out.routing.items()}
    assert compare(model, Recorded(out.logits, router_logits=logits), TOKENS).verdict == "equal"
    top = np.sort(logits[1], -1)
    token = int(np.argmin(top[:, -2] - top[:, -3]))
    logits[1][token] += np.where(logits[1][token] == top[token, -3], 2 * (top[token, -2] - top[token, -3]), 0)
    result = compare(model, Recorded(out.logits, router_logits=logits), TOKENS, tolerance=0.2)
    assert result.first_layer == 1 and result.flipped == {0: 0, 1: 1} and result.margin is not None


def test_groups_that_are_nearly_tied() -> None:
    """The scores of the experts are far apart, but the sums of their groups are tied up to rounding."""
    model = build("deepseek_v3")
    router = moe_of(model, 2).router
    router.kernel.set_value(0 * router.kernel[...] + router.kernel[0])  # the same logit for all experts
    router.bias.set_value(jnp.asarray([1.5, 0.5, 0.0, 1.0, 1.0, 0.0, 2.0, 0.1, 0.0]))
    out = model(TOKENS, return_routing=True)
    assert out.routing is not None
    experts = {layer: np.asarray(routing.experts) for layer, routing in out.routing.items()}
    logits = {layer: np.array(routing.logits) for layer, routing in out.routing.items()}
    logits[2][..., 4] += 1e-5
    experts[2] = np.asarray(router.select(jnp.asarray(logits[2]), router.bias[...]).experts)
    forced = model(TOKENS, routing=experts).logits
    result = compare(model, Recorded(forced, experts, logits), TOKENS)
    assert result.flipped[2] > 0.3 * TOKENS.size and result.verdict == "rounding", result
    unknown = compare(model, Recorded(forced, experts), TOKENS)
    assert unknown.verdict == "bug" and unknown.margin is not None and unknown.margin > 0.1


@pytest.mark.wrong_types
def test_sides_that_cannot_be_compared() -> None:
    model = build("mixtral")
    recorded = Recorded(np.zeros((4, 48, 53), np.float32), {0: np.zeros((4, 48, 2), int)})
    with pytest.raises(ValueError, match="both Recorded"):
        compare(recorded, recorded, TOKENS)
    with pytest.raises(ValueError, match=r"experts of layer 1: \[4, 48, 2\] in the model, missing in the reference"):
        compare(model, recorded, TOKENS)
    with pytest.raises(ValueError, match=r"logits: \[4, 48, 53\] in the model, \[4, 47, 53\]"):
        compare(model, Recorded(np.zeros((4, 47, 53), np.float32)), TOKENS)
    with pytest.raises(ValueError, match="cannot compare a Linear"):
        compare(model, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), TOKENS)
    assert isinstance(compare(build("llama"), build("llama"), TOKENS), Comparison)
