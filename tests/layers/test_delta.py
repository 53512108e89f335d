"""GatedDeltaNet: chunks against single steps and a plain recurrence, and a hybrid model in every mode of a cache."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import RequestOptions
from nnxmoe.layers.attention.fused_attention import ShardMapKernel
from nnxmoe.layers.attention.gqa import GQA, QueryGate
from nnxmoe.layers.attention.mla import MLA
from nnxmoe.layers.cache import Cache, RecurrentState
from nnxmoe.layers.context import OutputRequest
from nnxmoe.layers.mlp import UngatedMLP
from nnxmoe.layers.norm import GatedNorm, OffsetNorm, RMSNorm
from nnxmoe.layers.recurrent import delta, kimi_delta
from nnxmoe.layers.recurrent.conv import SeparateConvs, ShortConv
from nnxmoe.layers.recurrent.delta import DeltaDims, FusedProjection, GatedDeltaNet, SeparateProjection
from nnxmoe.layers.recurrent.delta_rule import (
    DeltaInputs,
    chunk_channelwise_delta_rule,
    chunk_delta_rule,
    recurrent_delta_rule,
)
from nnxmoe.layers.recurrent.gated_conv import GatedShortConv
from nnxmoe.layers.recurrent.kimi_delta import BoundedDecays, KimiDelta, KimiProjection, unbounded_decays
from nnxmoe.layers.recurrent.mamba2 import GroupedGatedNorm, Mamba2
from nnxmoe.layers.recurrent.ngram import NGramBranch
from nnxmoe.layers.recurrent.tokamax_delta import TokamaxDeltaRule
from nnxmoe.model.copies import on_mesh
from nnxmoe.moe import tokamax
from nnxmoe.moe.experts import UngatedExperts
from tests.support.arrays import max_error
from tests.support.families import load
from tests.support.running import MODEL_TOLERANCE, PART_TOLERANCE, eager_logits, feed, randomise
from tests.support.tiny import build

HEADS = DeltaDims(dim=12, key_heads=2, value_heads=4, key_dim=6, value_dim=5)
TOKENS = 70  # more than a chunk
NOTICED = 1e-3


def layer_of(kind: Any) -> GatedDeltaNet:
    kw: dict[str, Any] = {"dtype": jnp.dtype("float32"), "rngs": nnx.Rngs(0)}
    return randomise(GatedDeltaNet(HEADS, kind(HEADS, **kw), taps=4, eps=1e-3, **kw))


@pytest.fixture(scope="module")
def layer() -> GatedDeltaNet:
    return layer_of(SeparateProjection)


def plain(layer: GatedDeltaNet, x: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Outputs ``[T D]`` for one row, in float64; ``first``: tokens that begin a segment."""
    c, (qkv, z, b, a) = HEADS, (np.asarray(part[0], np.float64) for part in layer.project(jnp.asarray(x)[None]))
    weight, rate, bias, scale = (
        np.asarray(p[...], np.float64) for p in (layer.conv.weight, layer.a_log, layer.dt_bias, layer.norm.scale)
    )
    state, start, found = np.zeros((c.value_heads, c.key_dim, c.value_dim)), 0, []
    for t in range(len(x)):
        if first[t]:
            state, start = np.zeros_like(state), t
        mixed = sum(qkv[t - back] * weight[:, 0, 3 - back] for back in range(4) if t - back >= start)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [c.key_heads * c.key_dim, 2 * c.key_heads * c.key_dim])
        q, k = (
            np.repeat(part.reshape(c.key_heads, c.key_dim), c.value_heads // c.key_heads, axis=0)
            / np.sqrt((part.reshape(c.key_heads, -1) ** 2).sum(-1) + 1e-6).repeat(c.value_heads // c.key_heads)[:, None]
            for part in (q, k)
        )
        v = v.reshape(c.value_heads, c.value_dim)
        state = state * np.exp(-np.exp(rate) * np.log1p(np.exp(a[t] + bias)))[:, None, None]
        error = v - np.einsum("nhw,nh->nw", state, k)
        state = state + k[:, :, None] * (error / (1 + np.exp(-b[t]))[:, None])[:, None]
        y = np.einsum("nhw,nh->nw", state, q) * c.key_dim**-0.5
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-3) * scale
        found.append(y * z[t] / (1 + np.exp(-z[t])))
    return np.asarray(layer.out(jnp.asarray(np.stack(found)[None], jnp.float32)))[0]


def random_inputs(length: int, seed: int, segments: bool, channels: bool = False) -> tuple[DeltaInputs, jax.Array]:
    """Slow and fast decays, and equal keys in the second half. ``channels``: a decay each, as many heads of keys."""
    rng, (batch, keys, values) = np.random.default_rng(seed), (2, 6 if channels else 2, 6)
    q, k = (rng.standard_normal((batch, length, keys, 8)) for _ in range(2))
    k[:, length // 2 :] = k[:, length // 2 : length // 2 + 1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, b = rng.standard_normal((batch, length, values, 5)), rng.standard_normal((batch, length, values))
    g = -np.exp(rng.standard_normal((batch, length, values, 8) if channels else (batch, length, values)) - 2)
    g[:, 5::40] *= 200  # exp(-g) is infinite
    run = jnp.asarray(np.cumsum(rng.random((batch, length)) < 0.1, axis=1), jnp.int32) if segments else None
    arrays = (jnp.asarray(a, jnp.float32) for a in (q / 4, k, v, g, 1 / (1 + np.exp(-b))))
    return DeltaInputs._make((*arrays, run)), jnp.asarray(rng.standard_normal((batch, values, 8, 5)), jnp.float32)


RULES = [chunk_delta_rule, functools.partial(chunk_delta_rule, has_correction=False), chunk_channelwise_delta_rule]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("segments", [False, True])
def test_chunks_are_steps(segments: bool, rule: Callable[..., Any]) -> None:
    """For lengths around a chunk's, and chunks that do not divide them; the state after them too."""
    for length, chunk in ((2, 64), (9, 4), (64, 64), (TOKENS, 64), (TOKENS, 16)):
        inputs, state = random_inputs(length, length, segments, rule is chunk_channelwise_delta_rule)
        out, states = recurrent_delta_rule(inputs, state, **getattr(rule, "keywords", {}))
        found, last = rule(inputs, state, chunk)
        most = PART_TOLERANCE * max(1.0, float(jnp.abs(out).max()))
        assert max(max_error(found, out), max_error(last, states[:, -1])) < most, length


@pytest.mark.slow
@pytest.mark.parametrize(("run", "length", "chunk"), [(chunk_delta_rule, 9, 4), (chunk_channelwise_delta_rule, 37, 32)])
def test_gradients_of_chunks_are_those_of_steps(run: Callable[..., Any], length: int, chunk: int) -> None:
    inputs, state = random_inputs(length, 1, True, channels=run is chunk_channelwise_delta_rule)

    def loss(run: Callable[..., Any], arrays: Any) -> Any:
        *given, state = arrays
        return jnp.sum(jnp.sin(run(DeltaInputs._make((*given, inputs.segment)), state)[0]))

    arrays = (*inputs[:5], state)
    ours = jax.jit(jax.grad(lambda arrays: loss(lambda i, s: run(i, s, chunk), arrays)))(arrays)  # as programs
    wanted = jax.grad(lambda arrays: loss(recurrent_delta_rule, arrays))(arrays)
    for one, other in zip(ours, wanted, strict=True):
        assert max_error(one, other) < 5 * PART_TOLERANCE and float(jnp.abs(other).max()) > 1e-3


def float64_steps(inputs: DeltaInputs, state: jax.Array, has_correction: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and last state of the recurrence in NumPy and float64, for inputs without segments."""
    q, k, v, g, beta = (np.moveaxis(np.asarray(a, np.float64), 1, 0) for a in inputs[:5])
    q, k = (np.repeat(a, v.shape[2] // k.shape[2], axis=2) for a in (q, k))
    outputs, last = np.zeros_like(v), np.asarray(state, np.float64)
    for t, decay in enumerate(np.exp(g.reshape(*v.shape[:3], -1))):
        last = last * decay[..., None]
        update = v[t] - has_correction * np.einsum("bnhw,bnh->bnw", last, k[t])
        last = last + np.einsum("bnh,bn,bnw->bnhw", k[t], beta[t], update)
        outputs[t] = np.einsum("bnhw,bnh->bnw", last, q[t])
    return np.moveaxis(outputs, 0, 1), last


@pytest.mark.every_set
@pytest.mark.parametrize("length", [37, TOKENS + 1])
@pytest.mark.parametrize("rule", RULES)
def test_strong_decays_do_not_lose_digits(rule: Callable[..., Any], length: int) -> None:
    """With log decays of -20 to -100 between small ones: outputs, states and gradients."""
    inputs, state = random_inputs(length, length, False, rule is chunk_channelwise_delta_rule)
    rng, options = np.random.default_rng(0), getattr(rule, "keywords", {})
    is_strong = jnp.asarray(rng.random(inputs.g.shape) < 0.5)
    inputs = inputs._replace(g=jnp.where(is_strong, -rng.uniform(20, 100, inputs.g.shape), inputs.g))

    def run(rule: Callable[..., Any], arrays: Any) -> Any:
        def loss(arrays: Any) -> Any:
            out, last = rule(DeltaInputs(*arrays[:5], None), arrays[5])
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last)), (out, last)

        (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
        return (*results, *gradients)

    def last_state(inputs: DeltaInputs, state: jax.Array) -> Any:
        outputs, states = recurrent_delta_rule(inputs, state, **options)
        return outputs, states[:, -1]

    arrays = (*inputs[:5], state)
    gradients = run(last_state, arrays)[2:]
    for found, exact in zip(run(rule, arrays), (*float64_steps(inputs, state, **options), *gradients), strict=True):
        assert max_error(found, exact) < 1e-6 * np.abs(exact).max()


def packed_output(layer: GatedDeltaNet) -> np.ndarray:
    return packed(layer)[0]


def packed(layer: GatedDeltaNet) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the layer and of the plain recurrence for a row of three segments, the first longer than a chunk."""
    x = np.random.default_rng(0).standard_normal((TOKENS, HEADS.dim)).astype(np.float32)
    segment = np.repeat([4, 1, 7], [65, 2, 3])
    context = nnxmoe.Context(jnp.arange(TOKENS), segment=jnp.asarray(segment[None], jnp.int32))
    wanted = plain(layer, x, np.diff(segment, prepend=4) != 0)
    return np.asarray(layer(jnp.asarray(x)[None], context)[0][0]), wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SeparateProjection, FusedProjection])
def test_layer_is_the_plain_recurrence(kind: Any) -> None:
    found, wanted = packed(layer_of(kind))
    assert max_error(found, wanted) < PART_TOLERANCE * max(1.0, np.abs(wanted).max())


@pytest.mark.slow
def test_memory_does_not_depend_on_the_length(layer: GatedDeltaNet) -> None:
    sizes = [
        sum(a.nbytes for a in jax.tree.leaves(layer.empty_cache(2, n, jnp.dtype("float32"), 1))) for n in (1, 4096)
    ]
    assert sizes == [2 * 2 * 4 * (4 * 6 * 5 + 3 * HEADS.channels)] * 2


Plant = Callable[[Any, pytest.MonkeyPatch], None]


def changed(change: Callable[[DeltaInputs], DeltaInputs]) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            delta, "chunk_delta_rule", lambda inputs, state, **kw: chunk_delta_rule(change(inputs), state, **kw)
        )

    return plant


def convolution(change: Callable[..., Any]) -> Plant:
    right = ShortConv.__call__

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ShortConv, "__call__", lambda self, *given: right(self, *change(*given)))

    return plant


def tiled(inputs: DeltaInputs, times: int = 2) -> DeltaInputs:
    """Value head n uses key head n % K."""
    return inputs._replace(q=jnp.tile(inputs.q, (1, 1, times, 1)), k=jnp.tile(inputs.k, (1, 1, times, 1)))


def gate_before_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatedNorm, "__call__", lambda self, x, gate: RMSNorm.__call__(self, x * jax.nn.silu(gate)))


def reversed_taps(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.conv.weight.set_value(model.conv.weight[..., ::-1])


def unnormalised_keys(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta, "_normalize", lambda x: x)


MISTAKES: dict[str, Plant] = {
    "decay sign": changed(lambda i: i._replace(g=jnp.minimum(-i.g, 0.1))),
    "no decay": changed(lambda i: i._replace(g=jnp.zeros_like(i.g))),
    "no strength": changed(lambda i: i._replace(beta=jnp.ones_like(i.beta))),
    "decay of the next token": changed(lambda i: i._replace(g=jnp.roll(i.g, -1, axis=1))),
    "key heads in turn": changed(tiled),
    "state kept at a segment": changed(lambda i: i._replace(segment=None)),
    "window kept at a segment": convolution(lambda x, window, run: (x, window, None)),
    "convolution a token late": convolution(lambda x, window, run: (jnp.roll(x, 1, axis=1), window, run)),
    "reversed taps": reversed_taps,
    "unnormalised keys": unnormalised_keys,
    "gate before the norm": gate_before_norm,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(SeparateProjection)
    _, wanted = packed(layer)
    MISTAKES[name](layer, monkeypatch)
    assert max_error(packed_output(layer), wanted) > NOTICED


# A model with both kinds of layers


def no_offset(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffsetNorm, "__call__", RMSNorm.__call__)


def gate_for_query(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The halves of the queries' kernel exchanged."""
    for stack in model.stacks:
        for layer in stack.layers:
            if hasattr(layer.attention, "q"):
                q = layer.attention.q.kernel
                q.set_value(jnp.roll(q[...], q.shape[1] // 2, axis=1))


def no_gate(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueryGate, "__call__", lambda self, x, gate_inputs, heads: heads)


def layers_in_another_order(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.stacks = nnx.List([*model.stacks[1:], model.stacks[0]])


@pytest.mark.slow
@pytest.mark.parametrize("plant", [no_offset, gate_for_query, no_gate, layers_in_another_order])
def test_mistakes_in_a_model_are_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    case = load("qwen3_next")
    model = build(case.fields, case.weights)
    plant(model, monkeypatch)
    assert max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"]) > NOTICED


def of_channels(change: Callable[[DeltaInputs], DeltaInputs]) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        right = kimi_delta.chunk_channelwise_delta_rule
        patch.setattr(kimi_delta, "chunk_channelwise_delta_rule", lambda inputs, state: right(change(inputs), state))

    return plant


def in_layers(kind: type[Any], change: Callable[[Any], None]) -> Plant:
    """Changes each part of a kind."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        parts = [part for _, part in nnx.iter_graph(model.stacks) if isinstance(part, kind)]
        assert parts
        for part in parts:
            change(part)

    return plant


def exchange(a: str, b: str) -> Callable[[Any], None]:
    def change(part: Any) -> None:
        one, other = getattr(part, a), getattr(part, b)
        setattr(part, a, other)
        setattr(part, b, one)

    return change


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda part: setattr(part, name, value)


def zero(name: str) -> Callable[[Any], None]:
    return lambda part: getattr(part, name).set_value(jnp.zeros_like(getattr(part, name)[...]))


def reorder(order: list[int]) -> Callable[[Any], None]:
    """The outputs of the projection in another order."""

    def change(part: Any) -> None:
        for each in (part.project.kernel, part.project.bias):
            each.set_value(jnp.concatenate([jnp.split(each[...], 3)[i] for i in order]))

    return change


def reverse_taps(part: Any) -> None:
    part.weight.set_value(part.weight[...][..., ::-1])


def in_mamba(name: str, value: Any) -> Plant:
    """Changes an attribute of the class."""
    return lambda model, patch: patch.setattr(Mamba2, name, value)


PLANTED: list[tuple[str, str, Plant]] = [
    ("kimi_linear", "one decay per head", of_channels(lambda i: i._replace(g=i.g.mean(-1, keepdims=True) + 0 * i.g))),
    ("kimi_linear", "decay of the next token", of_channels(lambda i: i._replace(g=jnp.roll(i.g, -1, axis=1)))),
    ("kimi_linear", "channels in another order", of_channels(lambda i: i._replace(g=i.g[..., ::-1]))),
    ("kimi_linear", "bounded decays", in_layers(KimiDelta, put("decays", BoundedDecays(-5.0)))),
    ("kimi_linear", "gate by silu", in_layers(GatedNorm, put("activation", jax.nn.silu))),
    ("kimi_linear", "decays for gates", in_layers(KimiProjection, exchange("f", "g"))),
    ("kimi_linear", "convolutions exchanged", in_layers(SeparateConvs, exchange("q", "v"))),
    ("kimi_linear", "rotated attention", in_layers(MLA, put("rotary", Rope(4, 1e4)))),
    ("bailing_hybrid", "decays without a bound", in_layers(KimiDelta, put("decays", unbounded_decays))),
    ("bailing_hybrid", "no gate of the heads", in_layers(MLA, put("gate", None))),
    ("bailing_hybrid", "attention without rotation", in_layers(MLA, put("rotary", None))),
    ("bailing_hybrid", "unnormalised keys", unnormalised_keys),
    ("nemotron_h", "corrected as by the delta rule", in_mamba("has_correction", True)),
    ("nemotron_h", "short steps", in_layers(Mamba2, put("min_step", 0.5))),
    ("nemotron_h", "no skipped input", in_layers(Mamba2, zero("d"))),
    ("nemotron_h", "no bias of the steps", in_layers(Mamba2, zero("dt_bias"))),
    ("nemotron_h", "no bias of the convolution", in_layers(ShortConv, zero("bias"))),
    ("nemotron_h", "a norm of all heads", in_layers(GroupedGatedNorm, put("groups", 1))),
    ("nemotron_h", "decay of the next token", changed(lambda i: i._replace(g=jnp.roll(i.g, -1, axis=1)))),
    ("nemotron_h", "into and out of the state exchanged", changed(lambda i: i._replace(q=i.k, k=i.q))),
    ("nemotron_h", "groups in turn", changed(lambda i: tiled(i, 3))),
    ("granitemoehybrid", "rotated attention", in_layers(GQA, put("rotary", Rope(6, 1e4)))),
    ("granitemoehybrid", "a norm of all heads", in_layers(GroupedGatedNorm, put("groups", 1))),
    ("granitemoehybrid", "short steps", in_layers(Mamba2, put("min_step", 0.5))),
    ("lfm2", "an activation after the convolution", in_layers(ShortConv, put("activation", jax.nn.silu))),
    ("lfm2", "gates exchanged", in_layers(GatedShortConv, reorder([1, 0, 2]))),
    ("lfm2", "gate and values exchanged", in_layers(GatedShortConv, reorder([0, 2, 1]))),
    ("lfm2", "no bias of the convolution", in_layers(ShortConv, zero("bias"))),
    ("lfm2", "taps in the opposite order", in_layers(ShortConv, reverse_taps)),
    ("nemotron_h", "rotated attention", in_layers(GQA, put("rotary", Rope(10, 1e4)))),
    ("nemotron_h", "relu", in_layers(UngatedExperts, put("activation", jax.nn.relu))),
    ("nemotron_h", "shared experts with relu", in_layers(UngatedMLP, put("activation", jax.nn.relu))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "plant"), PLANTED, ids=[f"{kind}-{name}" for kind, name, _ in PLANTED])
def test_mistakes_in_other_layers_are_noticed(
    kind: str, name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load(kind)
    model = build(case.fields, case.weights)
    plant(model, monkeypatch)
    assert NOTICED < max_error(eager_logits(model, case.arrays["tokens"]), case.arrays["logits"]) < np.inf


IDS = np.random.default_rng(0).integers(3, 56, (2, TOKENS))


@pytest.fixture(
    scope="module", params=["qwen3_5_text", "kimi_linear", "kimi_k3", "nemotron_h", "lfm2", "qwen4_exp_text"]
)
def model(request: pytest.FixtureRequest) -> nnxmoe.CausalLM:
    case = load(request.param)
    return build(case.fields, case.weights)


@pytest.mark.slow
def test_chunks_padding_and_segments(model: nnxmoe.CausalLM) -> None:
    """Cached passes of every size, rows with padding on either side, packed rows, the last token."""
    whole = np.asarray(model(IDS).logits)
    for chunks in ([67, 1, 2], [1, 2, 67]):
        assert max_error(feed(model, IDS, chunks, mask=None, capacity=80)[0], whole) < MODEL_TOLERANCE
    mask = np.ones_like(IDS)
    mask[0, 66:], mask[1, :5] = 0, 0
    padded = np.asarray(model(IDS, attention_mask=mask).logits)
    found, _ = feed(model, IDS, [67, 1, 2], mask=mask, capacity=80)
    for row in range(2):
        alone = model(IDS[row : row + 1, mask[row] > 0]).logits[0]
        for logits in (padded, found):
            assert max_error(logits[row, mask[row] > 0], alone) < MODEL_TOLERANCE
    segment = np.repeat([3, 0, 5], [60, 1, 9])[None].repeat(2, 0)
    places = np.concatenate([np.arange(60), [0], np.arange(9)])[None].repeat(2, 0)
    once = model(IDS, segment_ids=segment, positions=places).logits
    apart = np.concatenate([model(part).logits for part in np.split(IDS, [60, 61], axis=1)], axis=1)
    assert max_error(once, apart) < MODEL_TOLERANCE
    last = model.body(jnp.asarray(IDS), jnp.asarray(mask), request=OutputRequest(last_token_only=True)).x
    assert max_error(last[1:], model.body(jnp.asarray(IDS), jnp.asarray(mask)).x[1:, -1:]) < PART_TOLERANCE


@pytest.mark.slow
def test_segments_continue_in_the_cache(model: nnxmoe.CausalLM) -> None:
    """The next pass continues the last segment, or begins another."""
    for second in (3, 4):
        segment = np.repeat([3, second], [9, 4])[None].repeat(2, 0)
        ids = IDS[:, :13]
        wanted = model(ids, segment_ids=segment).logits
        first = model(ids[:, :9], segment_ids=segment[:, :9], cache=model.empty_cache(2, 16))
        rest = model(
            ids[:, 9:], segment_ids=segment[:, 9:], positions=np.arange(9, 13)[None].repeat(2, 0), cache=first.cache
        )
        assert max_error(rest.logits, wanted[:, 9:]) < MODEL_TOLERANCE, second


@pytest.mark.slow
def test_tokens_taken_back_leave_no_trace(model: nnxmoe.CausalLM) -> None:
    """After a prompt in one pass and three tokens, of which two are taken back, states are bit for bit those after two
    other tokens, and those after the one token alone."""
    mask = np.ones((2, 20), np.int32)
    mask[1, :18] = 0

    def states(cache: Cache) -> list[Any]:
        past = cache.advance(1, None, None)[1]
        layers = jax.tree.leaves(cache.layers, is_leaf=lambda one: isinstance(one, RecurrentState))
        kept = [one for one in layers if isinstance(one, RecurrentState)]
        return [leaf for one in kept for leaf in jax.tree.leaves(one.state_before(past))]

    begun = model(IDS[:, :20], attention_mask=mask, cache=model.empty_cache(2, 32, 3)).cache
    found = []
    for rest in ([20, 21, 22], [20, 31, 32], [20]):
        cache = model(IDS[:, rest], cache=begun).cache
        assert cache is not None
        found.append(states(dataclasses.replace(cache, length=cache.length - len(rest) + 1)))
    parts = [part for _, part in nnx.iter_graph(model.stacks)]
    arrays = {GatedDeltaNet: 2, GatedShortConv: 1, NGramBranch: 2}
    assert len(found[0]) == sum(n * isinstance(part, kind) for part in parts for kind, n in arrays.items()) > 0
    for one, other, alone in zip(*found, strict=True):
        assert np.array_equal(one, other)
        assert max_error(one, alone) < PART_TOLERANCE * max(1, np.abs(alone).max())


@pytest.mark.slow
def test_generation_with_drafts(model: nnxmoe.CausalLM) -> None:
    """In an engine, with and without drafts, beside other rows: the ids of whole passes."""
    prompts, new = [[3, 4, 5, 3, 4, 5, 3, 4], [7, 1, 30]], 8
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            ids.append(int(jnp.argmax(model(np.asarray([ids])).logits[0, -1])))
        wanted.append(ids[len(prompt) :])
    for draft in (None, nnxmoe.PromptLookup(3)):
        engine = Engine(model, slots=2, capacity=40, draft=draft)
        requests = [engine.submit(prompt, RequestOptions(new, stop_ids=None)) for prompt in prompts]
        engine.run()
        assert [request.ids for request in requests] == wanted, draft


# Other ways to compute passes


class InSteps:
    """A `Recurrence` that computes token by token, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: DeltaInputs, state: jax.Array, chunked: Any) -> tuple[jax.Array, jax.Array]:
        self.calls += 1
        out, states = recurrent_delta_rule(inputs, state)
        return out, states[:, -1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_a_recurrence_of_the_strategy_computes_passes(kind: str) -> None:
    case, other = load(kind), InSteps()
    model = build(case.fields, case.weights, nnxmoe.Strategy(recurrence=other))
    assert max_error(model(case.arrays["tokens"]).logits, case.arrays["logits"]) < MODEL_TOLERANCE and other.calls


def test_wrong_recurrences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"recurrence.*TokamaxDeltaRule\(\)"):
        nnxmoe.Strategy(recurrence=InSteps)
    monkeypatch.setitem(sys.modules, "tokamax.ops", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(ValueError, match=r"tokamax 0\.0\.17"):
        TokamaxDeltaRule()


needs_delta = pytest.mark.skipif(
    not tokamax.is_installed() or sys.version_info < (3, 12), reason="tokamax has the function from 0.0.17, Python 3.12"
)


@needs_delta
@pytest.mark.kernels
@pytest.mark.parametrize("length", [3, TOKENS])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_tokamax_computes_the_rule(length: int, segments: bool, channels: bool) -> None:
    """With its own reference; outputs, states and gradients. Packed rows are the layer's."""
    inputs, state = random_inputs(length, length, segments, channels)
    chunked = chunk_channelwise_delta_rule if channels else chunk_delta_rule

    def found(run: Any, inputs: DeltaInputs, state: jax.Array) -> Any:
        def total(arrays: Any, state: jax.Array) -> Any:
            out, after = run(DeltaInputs(*arrays, inputs.segment), state)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(after)), (out, after)

        (_, parts), slopes = jax.value_and_grad(total, (0, 1), has_aux=True)(inputs[:5], state)
        return jax.tree.leaves((parts, slopes))

    tokamaxed = lambda inputs, state: TokamaxDeltaRule("xla")(inputs, state, chunked)  # noqa: E731
    for one, other in zip(found(tokamaxed, inputs, state), found(chunked, inputs, state), strict=True):
        assert max_error(one, other) < 20 * PART_TOLERANCE


def on_a_mesh() -> float:
    case, mesh = load("qwen3_next"), nnxmoe.make_mesh(fsdp=2, tensor=2, data=2)
    strategy = nnxmoe.Strategy(recurrence=TokamaxDeltaRule("xla"), mesh=mesh)
    model = build(case.fields, case.weights, strategy)
    tokens = np.concatenate([case.arrays["tokens"]] * 2)
    return max_error(model(tokens).logits, np.concatenate([case.arrays["logits"]] * 2))


@dataclasses.dataclass(frozen=True)
class BoundRule(ShardMapKernel):
    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def test_recurrence_is_bound_to_the_mesh_of_a_moved_model() -> None:
    case, mesh = load("qwen3_next"), nnxmoe.make_mesh(devices=jax.devices()[:1])
    moved = on_mesh(build(case.fields, case.weights, nnxmoe.Strategy(recurrence=BoundRule())), mesh)
    layers = [part for _, part in nnx.iter_graph(moved) if isinstance(part, GatedDeltaNet)]
    assert layers and all(part.recurrence.mesh == part.mesh == mesh for part in layers)  # pyright: ignore
    assert moved.strategy.recurrence.mesh == mesh  # pyright: ignore


@needs_delta
@pytest.mark.kernels
def test_tokamax_computes_the_rule_on_a_mesh(eight: Any) -> None:
    assert eight(on_a_mesh) < MODEL_TOLERANCE
