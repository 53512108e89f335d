"""Deep models on CPUs: one compiled program per run of layers."""

from typing import Any

import jax
import numpy as np
import pytest

import nnxmoe
from nnxmoe.model import layerwise
from tests.support.arrays import max_error
from tests.support.running import compiled_in
from tests.support.tiny import build_tiny, random_tokens


@pytest.mark.program
def test_runs_of_layers_equal_one_program_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and MoE layers, a cache, padding, all outputs; a deeper model compiles nothing but the sum of drops."""
    monkeypatch.setattr(layerwise, "RUN_LENGTH", 1)
    layerwise._split_layers.cache_clear()

    def build(layers: int) -> nnxmoe.CausalLM:
        return build_tiny("deepseek_v3", nnxmoe.Strategy(), num_hidden_layers=layers)

    tokens, mask = random_tokens(2, 64), np.ones((2, 64), np.int32)
    mask[1, :5] = 0

    def results(model: nnxmoe.CausalLM) -> list[Any]:
        out = model(tokens, mask, return_hidden=True, return_routing=True)
        cached = model(tokens, mask, cache=model.empty_cache(2, 80))
        step = model(tokens[:, :1], cache=cached.cache)
        again = model(tokens[:, 1:2], cache=cached.cache)  # the cache of the first step was not donated
        return [out, cached, step, again, nnxmoe.generate(model, tokens, attention_mask=mask, max_new_tokens=4)]

    shallow, deep = build(3), build(5)
    assert layerwise.is_deep_on_cpu(shallow) and layerwise.is_deep_on_cpu(deep)
    results(shallow)
    assert compiled_in(lambda: results(deep)) <= 3
    by_run = results(deep)
    monkeypatch.setattr(layerwise, "is_deep_on_cpu", lambda _: False)
    whole = results(build(5))  # a new model, since a model keeps its programs
    assert jax.tree.structure(by_run) == jax.tree.structure(whole)
    for one, other in zip(jax.tree.leaves(by_run), jax.tree.leaves(whole), strict=True):
        assert max_error(one, other) < 1e-5
    layerwise._split_layers.cache_clear()


@pytest.mark.slow
@pytest.mark.program
def test_runs_of_several_layers_share_a_window_and_jitter_runs_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "RUN_LENGTH", 2)
    layerwise._split_layers.cache_clear()
    fields = {"num_hidden_layers": 5, "router_jitter_noise": 0.5, "sliding_window": 9}
    tokens, key, results = random_tokens(2, 64), jax.random.key(5), []
    for whole in (True, False):
        monkeypatch.setattr(layerwise, "is_deep_on_cpu", lambda _, whole=whole: not whole)
        model = build_tiny("mixtral", nnxmoe.Strategy(), **fields)
        jittered, logits = model(tokens, key=key).logits, model(tokens).logits
        results.append((jittered, logits, nnxmoe.generate(model, tokens, max_new_tokens=4, eos_token_id=None)))
        assert max_error(jittered, logits) > 1e-3, "there is jitter"
    for one, other in zip(*results, strict=True):
        assert max_error(one, other) < 1e-5
    layerwise._split_layers.cache_clear()
