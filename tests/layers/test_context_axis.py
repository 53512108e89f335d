"""Rows whose tokens are sharded over the mesh axis ``context`` train as on one device."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import (
    AbsorbedMLA,
    AllGatherAttention,
    Capacity,
    Dense,
    ExpertParallel,
    FlashAttention,
    RaggedAllToAll,
    ReferenceAttention,
    RingAttention,
    RingOfExperts,
    Scanned,
    Sorted,
    Strategy,
    train,
)
from nnxmoe.axes import CONTEXT
from nnxmoe.layers.attention.context_parallel import ContextShards
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.recurrent.delta import context_parallel_delta_rule
from nnxmoe.layers.recurrent.delta_rule import DeltaInputs, chunk_delta_rule
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.moe.balance import sequence_loss
from nnxmoe.sharding_rules import RULES
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.loss import ChunkedLoss
from nnxmoe.train.loop.step import Step
from tests.support.families import FAMILIES
from tests.support.tiny import TINY

B, T = 4, 32
SMALL = {"hidden_size": 16, "vocab_size": 64, "intermediate_size": 24}
RING = RingAttention(FlashAttention(8, 8))
WAYS: dict[str, Any] = {"ring": RING, "gather": AllGatherAttention(ReferenceAttention())}


# Attention alone


def scores_of(kind: str, length: int) -> MaskedSoftmax:
    """Of two rows: causal, with a window, with packed segments, with padding in front, or with sinks and a cap."""
    rng, index = np.random.default_rng(1), jnp.arange(length, dtype=jnp.int32)
    segment = valid = None
    if kind == "packed":
        segment = jnp.asarray(np.sort(rng.integers(0, 4, (2, length)), axis=1), jnp.int32)
    if kind == "padded":
        valid = jnp.arange(length) >= jnp.array([[3], [length // 2]])
        index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    sinks = jnp.asarray(rng.normal(0, 1, 4), jnp.float32) if kind == "sinks" else None
    window = {"window": 5, "padded": 6, "one": 1}.get(kind)
    mask = Mask(index, segment, SlotMetadata(index, valid, segment), window, causal=True)
    return MaskedSoftmax(mask, 0.3, softcap=5.0 if kind == "sinks" else None, sinks=sinks)


def attended(way: str, kind: str, length: int) -> float:
    """The largest error of outputs and gradients against `ReferenceAttention`, of rows over fsdp and heads over
    tensor."""
    mesh, rng = nnxmoe.make_mesh(context=4, tensor=2), np.random.default_rng(0)
    scores, shapes = scores_of(kind, length), ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6))
    given = [jnp.asarray(rng.normal(0, 1, shape), jnp.float32) for shape in shapes]
    real = jnp.ones((2, length)) if scores.mask.keys.valid is None else scores.mask.keys.valid

    def run(attention_fn: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = attention_fn(q, k, v, dataclasses.replace(scores, sinks=sinks)) * real[:, None, :, None]
        return jnp.sum(jnp.sin(out)), out

    found = [
        jax.jit(jax.value_and_grad(functools.partial(run, attention_fn), (0, 1, 2, 3), has_aux=True))(
            *given, scores.sinks
        )
        for attention_fn in (ReferenceAttention(), WAYS[way].with_mesh(mesh, RULES))
    ]
    one, other = (jax.tree.leaves((out, slopes)) for (_, out), slopes in found)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["sinks", "packed", "window", "padded", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_attention_is_that_of_the_reference(eight: Callable[..., Any], way: str, kind: str) -> None:
    """In balanced order, and of rows of an odd number of tokens per device, which have no balanced order."""
    assert eight(attended, way, kind, 24 if kind == "sinks" else 20) < 1e-5


def passed(segments: bool) -> float:
    """The largest error of outputs and gradients of a recurrence whose state goes from device to device."""
    mesh, rng = nnxmoe.make_mesh(context=4, fsdp=2), np.random.default_rng(0)
    run = jnp.asarray(np.cumsum(rng.random((2, 24)) < 0.15, axis=1), jnp.int32) if segments else None
    run = None if run is None else run - run[:, :1]
    q, k, v, g, beta = (rng.normal(0, 1, (2, 24, *more)) for more in ((2, 6), (2, 6), (4, 5), (4,), (4,)))
    unit = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    given = [jnp.asarray(a, jnp.float32) for a in (*unit, v, -0.1 * np.abs(g), 1 / (1 + np.exp(-beta)))]
    state, chunked = (
        jnp.asarray(rng.normal(0, 1, (2, 4, 6, 5)), jnp.float32),
        functools.partial(chunk_delta_rule, chunk=4),
    )

    def total(way: Any, given: Any, state: Any) -> Any:
        out, last = way(DeltaInputs(*given, run), state)
        return jnp.mean(jnp.sin(out)) + jnp.mean(jnp.cos(last)), (out, last)

    found = [
        jax.tree.leaves(jax.jit(jax.value_and_grad(functools.partial(total, way), (0, 1), has_aux=True))(given, state))
        for way in (chunked, lambda inputs, state: context_parallel_delta_rule(chunked, inputs, state, mesh))
    ]
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("segments", [True, False])
def test_recurrences_pass_on_their_state(eight: Callable[..., Any], segments: bool) -> None:
    assert eight(passed, segments) < 2e-6


@pytest.mark.parametrize("count", [2, 3, 8])
def test_devices_compute_equally_many_scores(count: int) -> None:
    """In balanced order; together they compute those of all tokens."""
    tokens = [
        np.asarray(ContextShards.for_window(96, count, None).tokens(jnp.int32(device))) for device in range(count)
    ]
    assert len({int((places + 1).sum()) for places in tokens}) == 1
    assert sorted(np.concatenate(tokens)) == list(range(96))


# Training


def batch(packed: bool = True) -> dict[str, np.ndarray]:
    """Packed documents, with padding at the end of the rows, or whole rows."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 4, (B, T)), axis=1)[:, ::-1]
    return {"tokens": rng.integers(0, 64, (B, T)), **({"segment_ids": segments} if packed else {})}


def config(kind: str, **changes: Any) -> Any:
    more: dict[str, Any] = {
        "deepseek_v3": {"n_routed_experts": 12, "num_hidden_layers": 2, "q_lora_rank": 16},
        "gemma4_text": {"vocab_size_per_layer_input": 64},
        "mixtral": {"num_local_experts": 4},
    }
    fields = TINY[kind] if kind in TINY else FAMILIES[kind].frozen
    return config_from_hf({**fields, **SMALL, **more.get(kind, {}), **changes})


def trained(kind: str, strategy: Strategy, lora: bool, packed: bool) -> Any:
    """Losses of two steps, the trained parameters, and the last loads. The loss takes 8 tokens per device at a time."""
    made = config(kind)
    model = model_class(made)(made, strategy, rngs=nnx.Rngs(0))
    if lora:
        train.lora.add(model, rank=2, rngs=nnx.Rngs(1))
    options: dict[str, Any] = {"balance": 0.02, "balance_loss": sequence_loss} if made.experts else {}
    objective = train.Objective(head=ChunkedLoss(8 * 64), **options)
    step = Step(model, optax.sgd(0.3), objective, trainable=nnx.LoRAParam if lora else nnx.Param)
    state, found = step.init(), []
    for _ in range(2):
        state, report = step.run(state, put_batch(batch(packed), step))
        found.append([report.losses.total, report.losses.cross_entropy])
    arrays = {name: np.asarray(a) for name, a in state.params.items()}
    return np.array(found), arrays, np.asarray(report.losses.load)


def compared(kind: str, axes: dict[str, int], chosen: dict[str, Any], lora: bool, packed: bool) -> dict[str, Any]:
    """The errors against one device."""
    dispatch = chosen.get("dispatch", Sorted())
    alone = {**chosen, "dispatch": getattr(dispatch, "inner", dispatch), "attention_fn": ReferenceAttention()}
    wanted, plain, counted = trained(kind, Strategy(**alone), lora, packed)
    losses, arrays, load = trained(kind, Strategy(mesh=nnxmoe.make_mesh(**axes), **chosen), lora, packed)
    return {
        "losses": float((np.abs(losses - wanted) / np.maximum(1, np.abs(wanted))).max()),
        "parameters": max(float(np.abs(arrays[name] - a).max()) for name, a in plain.items()),
        "load": bool((load == counted).all()),
    }


RAGGED, REMAT = ExpertParallel(Sorted(), RaggedAllToAll()), {"stacking": Scanned(), "remat": nnxmoe.Remat()}
MESHES: dict[str, tuple[str, dict[str, int], dict[str, Any], bool, bool]] = {
    "mistral, context 4 fsdp 2, ring": ("mistral", {"context": 4, "fsdp": 2}, {"attention_fn": RING}, False, True),
    "llama, context 8, gather": ("llama", {"context": 8}, REMAT, False, False),
    "llama, context 8, ring": ("llama", {"context": 8}, {"attention_fn": RING, **REMAT}, False, False),
    "mixtral, context 4 expert 2, ragged": (
        "mixtral", {"context": 4, "expert": 2}, {"attention_fn": RING, "dispatch": RAGGED, **REMAT}, False, True,
    ),
    "mixtral, context 2 fsdp 2 expert 2, ring of experts": (
        "mixtral", {"context": 2, "fsdp": 2, "expert": 2}, {"dispatch": ExpertParallel(Sorted(), RingOfExperts())},
        False, True,
    ),
    "mixtral, context 4 data 2, capacity": (
        "mixtral", {"context": 4, "data": 2}, {"dispatch": Capacity(1.0)}, False, True,
    ),
    "mixtral, context 4 fsdp 2, dense": ("mixtral", {"context": 4, "fsdp": 2}, {"dispatch": Dense()}, False, True),
    "gpt_oss, context 4 fsdp 2, sorted": ("gpt_oss", {"context": 4, "fsdp": 2}, {"attention_fn": RING}, False, True),
    "deepseek_v3, context 4 tensor 2, latents": ("deepseek_v3", {"context": 4, "tensor": 2}, REMAT, False, True),
    "deepseek_v3, context 4 fsdp 2, ring of latents": (
        "deepseek_v3", {"context": 4, "fsdp": 2}, {"attention_fn": RING, **REMAT}, False, True,
    ),
    "deepseek_v3, context 4 data 2, ring of absorbed latents": (
        "deepseek_v3", {"context": 4, "data": 2}, {"attention_fn": RING, "mla": AbsorbedMLA()}, False, True,
    ),
    "deepseek_v3, context 2 expert 4, adapters": (
        "deepseek_v3", {"context": 2, "expert": 4}, {"attention_fn": RING, "dispatch": RAGGED}, True, True,
    ),
    "llama, context 2 tensor 2 fsdp 2, adapters": (
        "llama", {"context": 2, "tensor": 2, "fsdp": 2}, {"attention_fn": RING, **REMAT}, True, True,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_one_device(eight: Callable[..., Any], mesh: str) -> None:
    """Losses over the borders of devices, balance over whole rows, gradients, and the experts' loads."""
    found = eight(compared, *MESHES[mesh])
    assert found["losses"] < 1e-6 and found["parameters"] < 1e-6 and found["load"], found


def resumed(folder: str) -> list[Any]:
    """What attends in a model that is moved to the mesh, whether its run is read bit for bit on other meshes and on one
    device, and the step after it there."""
    data, options = [batch()], {"optimizer": optax.adam(1e-2), "checkpoint": train.Checkpoints(folder, every=1)}

    def fit(steps: int, **axes: int) -> Any:
        made, mesh = config("llama"), nnxmoe.make_mesh(**axes) if axes else None
        return train.fit(model_class(made)(made, rngs=nnx.Rngs(0)), data, steps=steps, mesh=mesh, **options)

    def values(fitted: Any) -> dict[str, np.ndarray]:
        flat = nnx.to_flat_state(nnx.state(fitted.model))
        return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in flat}

    fitted = fit(2, context=4, fsdp=2)
    attends, first = type(fitted.model.stacks[0].layers[0].attention.attention_fn).__name__, values(fitted)
    found = [values(fit(2, **axes)) for axes in ({"context": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {})]
    same = all((first[name] == other[name]).all() for other in found for name in first)
    return [attends, same, fit(3).history[-1]["step"]]


@pytest.mark.slow
def test_runs_resume_on_other_meshes(eight: Callable[..., Any], tmp_path: Path) -> None:
    assert eight(resumed, str(tmp_path / "run")) == ["AllGatherAttention", True, 3]


# Outputs


def outputs(kind: str, way: str) -> float:
    """The largest error of logits, hidden states and routing weights of packed rows, relative to each array's largest
    number. (On a mesh that shards rows only, it is as large.)"""
    made, given = config(kind), batch()
    strategies = Strategy(), Strategy(mesh=nnxmoe.make_mesh(context=2, data=4), attention_fn=WAYS[way])
    found = []
    for strategy in strategies:
        out = model_class(made)(made, strategy, rngs=nnx.Rngs(0))(**given, return_routing=True, return_hidden=True)
        weights = [routing.weights for routing in (out.routing or {}).values()]
        found.append(jax.device_get((out.logits, out.hidden, weights)))
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(*map(jax.tree.leaves, found), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2_moe", "gemma4_text", "glm4_moe"])
def test_outputs_come_in_ordinary_order(eight: Callable[..., Any], kind: str) -> None:
    """Also of recurrent layers, which pass on their state, and of layers that reuse keys."""
    assert eight(outputs, kind, "ring") < 1e-4


def decoded() -> tuple[bool, float]:
    """Whether tokens are generated as on one device; and the error of rows that the axis does not divide."""
    made, tokens = config("mistral"), batch()["tokens"]
    one, several = (
        model_class(made)(made, strategy, rngs=nnx.Rngs(0))
        for strategy in (Strategy(), Strategy(mesh=nnxmoe.make_mesh(context=4, fsdp=2), attention_fn=RING))
    )
    new = [np.asarray(nnxmoe.generate(model, tokens[:2, :8], max_new_tokens=3)) for model in (one, several)]
    logits = [np.asarray(model(tokens[:2, :9]).logits) for model in (one, several)]
    return bool((new[0] == new[1]).all()), float(np.abs(logits[0] - logits[1]).max())


@pytest.mark.slow
def test_passes_with_a_cache_are_computed_on_every_device(eight: Callable[..., Any]) -> None:
    same, error = eight(decoded)
    assert same and error < 2e-5


# Memory


def temporary(way: str, sizes: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """Temporary bytes per device of a training step, and of attention with its gradients."""
    made, found = config("llama", num_hidden_layers=4, hidden_size=64), []
    for size in sizes:
        mesh = nnxmoe.make_mesh(context=size, devices=jax.devices()[:size])
        attention_fn = {
            "gather": AllGatherAttention(FlashAttention(64, 64)),
            "ring": RingAttention(FlashAttention(64, 64)),
        }[way]
        model = model_class(made)(made, Strategy(mesh=mesh, attention_fn=attention_fn, **REMAT), rngs=None)
        step, place = Step(model, optax.sgd(0.1)), NamedSharding(mesh, PartitionSpec(None, CONTEXT))
        given = step.shapes(), {"tokens": jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=place)}
        heads = NamedSharding(mesh, PartitionSpec(None, None, CONTEXT))
        qkv = [jax.ShapeDtypeStruct((1, 4, length, 16), jnp.float32, sharding=heads)] * 3
        index = jnp.arange(length)
        scores = MaskedSoftmax(Mask(index, None, SlotMetadata(index, None, None), None, causal=True), 0.3)

        def run(attention_fn: Any, q: Any, k: Any, v: Any, scores: MaskedSoftmax = scores) -> Any:
            return jnp.sum(attention_fn(q, k, v, scores) ** 2)

        alone = functools.partial(run, attention_fn.with_mesh(mesh, RULES))
        programs = step.jitted.lower(*given), jax.jit(jax.grad(alone, (0, 1, 2))).lower(*qkv)
        sizes_of = [program.compile().memory_analysis().temp_size_in_bytes for program in programs]
        found.append((sizes_of[0], sizes_of[1]))
    return found


@pytest.mark.program
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_divided_by_the_devices(eight: Callable[..., Any], way: str) -> None:
    """Of a step for both, but for what does not depend on the tokens; of attention for the ring alone."""
    (two, of_two), (eight_, of_eight) = eight(temporary, way, (2, 8), 8192)
    assert eight_ < 0.4 * two
    assert (of_eight < 0.3 * of_two) == (way == "ring"), (of_two, of_eight)


# Refusals


def refusals() -> dict[str, str]:
    """Messages of the ValueErrors raised for what the axis cannot do."""
    mesh = nnxmoe.make_mesh(context=4, fsdp=2)
    on_mesh = functools.partial(Strategy, mesh=mesh)
    long = {"tokens": np.zeros((4, 30), np.int32)}
    tries: dict[str, Callable[[], Any]] = {
        "sparse": lambda: model_class(config("deepseek_v32"))(config("deepseek_v32"), on_mesh(), rngs=None),
        "blocks": lambda: model_class(config("minimax_m3_vl_text"))(config("minimax_m3_vl_text"), on_mesh(), rngs=None),
        "pipeline": lambda: on_mesh(pipeline=nnxmoe.Pipeline(4)),
        "tokens": lambda: put_batch(
            long, Step(model_class(config("llama"))(config("llama"), on_mesh(), rngs=None), optax.sgd(1))
        ),
        "ring": lambda: RingAttention(flash=ReferenceAttention()),  # type: ignore[arg-type]
        "gather": lambda: AllGatherAttention(inner=ReferenceAttention),  # type: ignore[arg-type]
        "plan": lambda: nnxmoe.plan("llama-3.1-8b", {"context": 8}, batch=1, seq=100),
        "planned": lambda: nnxmoe.plan("deepseek-v3.2-exp", {"context": 8}, batch=1, seq=128),
    }
    found = {
        "default": type(on_mesh().attention_fn).__name__,
        "kept": type(on_mesh(attention_fn=RING).attention_fn).__name__,
    }
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.wrong_types
def test_refusals(eight: Callable[..., Any]) -> None:
    found = eight(refusals)
    for name, message in {
        "sparse": "SparseMLA needs all tokens of a row on each device, but the mesh axis 'context' of size 4",
        "blocks": "IndexedGQA needs all tokens of a row on each device",
        "pipeline": "stages do not shard tokens over the mesh axis 'context' of size 4. Use make_mesh(context=1)",
        "tokens": "rows of 30 tokens are not divisible by the 4 devices of context: use a multiple of 4 tokens",
        "ring": "RingAttention(flash=ReferenceAttention()): pass FlashAttention(block_q, block_k)",
        "gather": "AllGatherAttention",
        "plan": "rows of 100 tokens are not divisible by context=8: use a multiple",
        "planned": "SparseMLA needs all tokens of a row on each device",
        "default": "AllGatherAttention",
        "kept": "RingAttention",
    }.items():
        assert message in found.get(name, "not refused"), name
