"""Prefill of an empty cache: ``fresh`` and ``last`` skip work without changing logits or cache."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Capacity, Chunked, Dense, ExpertParallel, ReferenceAttention, RingOfExperts, Sorted
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import OutputRequest
from nnxmoe.moe.selection import BalancedTopK
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.attention import DENSE, LENGTH, MODELS, SCANNED, masks
from tests.support.running import PART_TOLERANCE, feed, randomise
from tests.support.tiny import ORACLE, build_tiny, random_tokens, stacking_of

FAMILIES: dict[str, tuple[str, nnxmoe.Strategy, dict[str, Any]]] = MODELS | {
    "mixtral": ("mixtral", nnxmoe.Strategy(), {}),
    "mixtral-scanned": ("mixtral", nnxmoe.Strategy(stacking=nnxmoe.Scanned()), {"num_hidden_layers": 1}),
    "deepseek": ("deepseek_v3", nnxmoe.Strategy(), {"num_hidden_layers": 2}),
    "deepseek-absorbed": ("deepseek_v3", dataclasses.replace(ORACLE, mla=nnxmoe.AbsorbedMLA()), DENSE),
    "remat-fused": ("mistral", nnxmoe.Strategy(remat=nnxmoe.Remat(), attention_fn=nnxmoe.FusedAttention()), {}),
}


def build(name: str) -> nnxmoe.CausalLM:
    kind, strategy, changes = FAMILIES[name]
    return build_tiny(kind, strategy, **changes)


LAST = OutputRequest(last_token_only=True)


def prefill(model: nnxmoe.CausalLM, capacity: int = 24, **options: Any) -> Any:
    """Return a jitted function from tokens and mask to logits, cache and infos, starting from an empty cache."""

    def run(tokens: Any, mask: Any) -> Any:
        body = model.body(tokens, mask, cache=model.empty_cache(len(tokens), capacity), **options)
        return model.logits(body.x), body.cache, body.infos

    return jax.jit(run)


def caches_apart(one: Any, other: Any, mask: np.ndarray) -> float:
    """Largest difference between two caches over the slots of real tokens; padding slots are ignored."""
    assert one.length.tolist() == other.length.tolist() == mask.sum(axis=1).tolist()
    layers = jax.tree.leaves(one.layers, is_leaf=lambda layer: isinstance(layer, TokenCache))
    latent, errors = not isinstance(layers[0].buffers, tuple), []
    slots = jax.tree.leaves(layers[0])[0].shape[-2]
    valid = np.arange(slots) < np.asarray(one.length)[:, None]
    where = valid[..., None] if latent else valid[:, None, :, None]
    for a, b in zip(jax.tree.leaves(one.layers), jax.tree.leaves(other.layers), strict=True):
        errors.append(max_error(a, b, np.broadcast_to(where, a.shape)))
    return max(errors)


def _default(*names: str) -> list[Any]:
    """All families as pytest params; those not in ``names`` are marked slow."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("name", _default("ring-scanned", "moe-ring", "latent-by-length"))
def test_fresh_and_last_keep_logits_and_cache(name: str) -> None:
    """Compares the last token's logits and the whole cache for every padding; the prompt is longer than the window."""
    model, tokens = build(name), random_tokens(2, LENGTH)
    plain, fresh, last, both = (
        prefill(model, **options)
        for options in ({}, {"fresh": True}, {"request": LAST}, {"fresh": True, "request": LAST})
    )
    for padding, mask in masks(LENGTH).items():
        logits, cache, _ = plain(tokens, mask)
        for run, real in ((fresh, mask), (last, mask[:, -1:]), (both, mask[:, -1:])):
            ours, our_cache, _ = run(tokens, mask)
            assert ours.shape == (*real.shape, 53)
            assert max_error(ours, logits[:, -real.shape[1] :], real) < 2 * PART_TOLERANCE, padding
            assert caches_apart(our_cache, cache, mask) < 2 * PART_TOLERANCE, padding


@pytest.mark.slow
@pytest.mark.parametrize("name", _default("ring-scanned", "deepseek-absorbed"))
def test_greedy_decoding_matches_full_forward_passes(name: str) -> None:
    """Two prompts of unequal lengths, one padded on the left."""
    model, tokens, mask = build(name), random_tokens(2, 9), np.ones((2, 9), np.int32)
    mask[0, :4] = 0
    ids = nnxmoe.generate(model, tokens, mask, max_new_tokens=5, eos_token_id=None)[:, 9:]
    for row in range(2):
        prompt = tokens[row : row + 1, 4 * (1 - row) :]
        whole = np.concatenate([prompt, ids[row : row + 1]], axis=1)
        logits = np.asarray(model(whole).logits)[0, prompt.shape[1] - 1 : -1]
        assert logits.argmax(axis=-1).tolist() == ids[row].tolist()


# Skipping the keys of an empty cache


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """Reference attention that records the number of queries and keys and whether the mask was causal."""

    calls: list[tuple[int, int, bool]] = dataclasses.field(default_factory=list)

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> Any:
        self.calls.append((q.shape[2], k.shape[2], scores.mask.causal))
        return ReferenceAttention()(q, k, v, scores)


@pytest.mark.parametrize(("kind", "scan"), [("llama", True), ("mistral", False), ("deepseek_v3", True)])
def test_prefill_of_an_empty_cache_attends_to_the_prompt_only(kind: str, scan: bool) -> None:
    """Applies to a prompt in an empty cache, but not to a non-empty cache, a cache whose length is traced, or a
    single token."""
    asked = Asked()
    window: dict[str, Any] = {"sliding_window": 40} if kind == "mistral" else {}
    model = build_tiny(kind, dataclasses.replace(ORACLE, attention_fn=asked, stacking=stacking_of(scan)), **window)
    tokens, seen = random_tokens(1, 9), []

    def run(part: slice, cache: Any) -> Any:
        asked.calls.clear()
        out = model(tokens[:, part], cache=cache)
        seen.append(set(asked.calls))
        return out.cache

    run(slice(4, 9), run(slice(0, 4), model.empty_cache(1, 30)))
    run(slice(0, 1), model.empty_cache(1, 30))
    jax.jit(lambda cache: run(slice(0, 4), cache))(model.empty_cache(1, 30))
    ring = kind == "mistral"  # the ring's slots are followed by the new tokens
    padded, four = (30 + 64 * ring, 30 + 4 * ring)  # prompts are padded to 64 tokens, except in transformations
    assert seen == [{(64, 64, True)}, {(64, padded, False)}, {(1, 30, False)}, {(4, four, False)}]


def test_fresh_rejects_a_non_empty_cache() -> None:
    model, tokens = build_tiny("llama"), random_tokens(1, 6)
    _, cache = feed(model, tokens, [6], mask=None, capacity=20)
    with pytest.raises(ValueError, match=r"fresh=True: 6 tokens are in the cache"):
        model.body(tokens, cache=cache, fresh=True)


# Computing the last token only in the last layer


def operations(model: nnxmoe.CausalLM, capacity: int = 64, **options: Any) -> float:
    """FLOPs of a compiled prefill of two prompts, without the head."""

    def run(tokens: Any) -> Any:
        body = model.body(tokens, cache=model.empty_cache(2, capacity), **options)
        return body.x, body.cache

    return jax.jit(run).lower(random_tokens(2, LENGTH)).compile().cost_analysis()["flops"]


def products(*modules: nnx.Module) -> int:
    """FLOPs per token of the products with all kernels of ``modules``."""
    return 2 * sum(a.size for module in modules for a in jax.tree.leaves(nnx.state(module, nnx.Param)) if a.ndim > 1)


@pytest.mark.program
@pytest.mark.parametrize("kind", ["llama", "mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_fresh_and_last_reduce_flops(kind: str) -> None:
    """``last`` skips the last layer's queries, outputs and feed-forward for all tokens but the last. Without
    ``fresh``, a larger cache costs the scores against its empty slots."""
    model = build_tiny(kind)
    layer = model.stacks[-1].layers[-1]
    saved = 2 * (LENGTH - 1) * products(layer.attention.q, layer.attention.o, layer.feed_forward)
    whole, last, fresh = (operations(model, **options) for options in ({}, {"request": LAST}, {"fresh": True}))
    assert whole - last >= saved
    assert fresh < whole
    assert operations(model, 640, fresh=True) == pytest.approx(fresh, rel=0.01)
    assert operations(model, 640) > 1.5 * whole


@pytest.mark.program
def test_scanned_layers_compute_all_tokens() -> None:
    model = build_tiny("llama", SCANNED)
    assert operations(model, request=LAST) == pytest.approx(operations(model), rel=0.01)


def tokens_routed(model: nnxmoe.CausalLM, **options: Any) -> list[int]:
    """Number of tokens per prompt that each MoE layer routed."""
    infos = model.body(random_tokens(2, LENGTH), request=LAST, **options).infos
    return [infos[i].routing.experts.shape[1] for i in sorted(infos)]


class Silent:
    """A dispatch that does not declare whether tokens affect each other."""

    def __call__(self, *arguments: Any) -> Any:
        return Sorted()(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "alone"),
    [
        (Sorted(), True),
        (Dense(), True),
        (Capacity(0.5), False),
        (Chunked(Sorted(), 2), False),
        (ExpertParallel(Sorted(), RingOfExperts()), True),
        (ExpertParallel(Sorted(), RingOfExperts(2.0)), False),
        (Silent(), False),
    ],
)
def test_last_layer_routes_all_tokens_if_the_dispatch_mixes_them(dispatch: Any, alone: bool) -> None:
    """The last token is routed alone only if tokens do not affect each other. The number of drops stays the same."""
    model, tokens = build_tiny("mixtral", nnxmoe.Strategy(dispatch=dispatch)), random_tokens(2, LENGTH)
    (logits, _, infos), (ours, _, our_infos) = (
        prefill(model, request=request)(tokens, None) for request in (OutputRequest(), LAST)
    )
    assert max_error(ours, logits[:, -1:]) < 2 * PART_TOLERANCE
    assert tokens_routed(model) == [LENGTH, 1 if alone else LENGTH]
    drops = [int(sum(info.dispatch.dropped for info in each.values())) for each in (infos, our_infos)]
    assert drops[0] == drops[1] and (drops[0] > 0) == isinstance(dispatch, Capacity)


@pytest.mark.slow
def test_random_routing_gets_all_tokens() -> None:
    """A token's index determines its jitter noise, and its experts under random routing."""
    model = build_tiny("mixtral", nnxmoe.Strategy(), router_jitter_noise=0.1)
    assert tokens_routed(model) == [LENGTH, 1]
    assert tokens_routed(model, key=jax.random.key(0)) == [LENGTH, LENGTH]
    model.stacks[-1].layers[-1].moe.router.select = BalancedTopK(2)
    assert tokens_routed(model) == [LENGTH, LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_last_token_prefill_applies_adapters(kind: str) -> None:
    model, tokens = build_tiny(kind, nnxmoe.Strategy()), random_tokens(2, LENGTH)
    before = model.logits(model.body(tokens).x)
    lora.add(model, rank=2, rngs=nnx.Rngs(0))
    randomise(model)
    after = model.logits(model.body(tokens).x)
    assert max_error(before, after) > 1e-2
    assert max_error(model.logits(model.body(tokens, request=LAST).x), after[:, -1:]) < 2 * PART_TOLERANCE


@pytest.mark.slow
def test_last_keeps_one_token_in_final_routing_and_hidden_states() -> None:
    """``last_token_only`` also works without a cache."""
    model, tokens = build_tiny("mixtral", nnxmoe.Strategy()), random_tokens(2, LENGTH)
    whole, last = (
        model.body(tokens, request=OutputRequest(last, reduce_routing=lambda r: r.experts)) for last in (False, True)
    )
    assert [h.shape[1] for h in last.hidden] == [LENGTH, LENGTH, 1, 1] and last.x.shape[1] == 1
    for ours, theirs in zip(last.hidden, whole.hidden, strict=True):
        assert max_error(ours, theirs[:, -ours.shape[1] :]) < 2 * PART_TOLERANCE
    for i, info in whole.infos.items():
        ours = last.infos[i].routing
        assert np.array_equal(ours, info.routing[:, -ours.shape[1] :])
