"""Collectives of one MoE layer in compiled programs, for tiny shapes and those of large models.

Programs are compiled for abstract arrays, so no large array is allocated.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import Capacity, Chunked, ChunkedExchange, Dense, ExpertParallel, RaggedAllToAll, RingOfExperts, Sorted
from nnxmoe.apps.planning.hlo import collectives as collectives_of
from nnxmoe.axes import BATCH_AXES
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.moe import capacity
from nnxmoe.moe.block import MoE
from nnxmoe.moe.blocked import BlockedMatmul
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SigmoidGroupTopK, SoftmaxTopK
from nnxmoe.sharding import batch_axes
from nnxmoe.sharding_rules import sharding_of
from nnxmoe.train.loop.loss import ChunkedLoss
from tests.benchmarks.modes import DEEPSEEK
from tests.support.cases import HF_CASES

pytestmark = pytest.mark.program

B, T = 8, 32
WAYS = {
    "dense": Dense(),
    "sorted": Sorted(),
    "capacity": Capacity(2.0),
    "ragged": ExpertParallel(Sorted(), RaggedAllToAll()),
    "ring": ExpertParallel(Sorted(), RingOfExperts()),
    "ragged in chunks": ExpertParallel(Sorted(), ChunkedExchange(RaggedAllToAll(), 8)),
    "chunked ragged": Chunked(ExpertParallel(Sorted(), RaggedAllToAll()), 8),
}
# Model width, expert width, number of experts, routing.
SHAPES: dict[str, tuple[int, int, int, Any]] = {
    "tiny": (16, 24, 8, SoftmaxTopK(2)),
    "mixtral-8x7b": (4096, 14336, 8, SoftmaxTopK(2)),
    "mixtral-8x22b": (6144, 16384, 8, SoftmaxTopK(2)),
    "deepseek-v3": (7168, 2048, 256, SigmoidGroupTopK(8, 8, 4, True, 2.5)),
}
KINDS = "all-gather|reduce-scatter|all-reduce|ragged-all-to-all|all-to-all|collective-permute"
Found = dict[str, list[int]]


def program(way: str, shape: str, backward: bool, **axes: int) -> Any:
    """The compiled program of one layer's forward pass, or of its gradients."""
    dim, width, experts, select = SHAPES[shape]
    mesh, kw = nnxmoe.make_mesh(**axes), {"dtype": jnp.dtype(jnp.bfloat16), "rngs": None}
    router = Router(dim, experts, select, bias=shape == "deepseek-v3", **kw)
    moe = MoE(router, Experts(dim, width, experts, matmul=BlockedMatmul(), **kw), WAYS[way], None, mesh)
    graph, params, rest = nnx.split(moe, nnx.Param, ...)

    def placed(state: Any) -> Any:
        flat = [(p, v, v.get_value()) for p, v in nnx.to_flat_state(state)]
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_of(v, mesh)) for _, v, a in flat]
        return nnx.from_flat_state([(p, v.replace(a)) for (p, v, _), a in zip(flat, arrays, strict=True)])

    def loss(params: Any, x: Any, rest: Any) -> Any:
        return jnp.sum(jnp.sin(nnx.merge(graph, params, rest)(x)[0].astype(jnp.float32)))

    def forward(params: Any, x: Any, rest: Any) -> Any:
        return nnx.merge(graph, params, rest)(x)[0]

    x = jax.ShapeDtypeStruct((B, T, dim), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    run = jax.jit(jax.grad(loss, argnums=(0, 1)) if backward else forward)
    return run.lower(placed(params), x, placed(rest)).compile()


def compiled(way: str, shape: str, backward: bool, **axes: int) -> Found:
    """Kind -> elements of each collective in the program of one layer's forward pass, or of its gradients."""
    found: Found = collections.defaultdict(list)
    for line in program(way, shape, backward, **axes).as_text().splitlines():
        if match := re.search(rf" = (.*?) ({KINDS})(?:-start)?\(", line):
            shapes = re.findall(r"\[([\d,]*)\]", match[1])
            found[match[2]].append(sum(math.prod(int(d) for d in shape.split(",") if d) for shape in shapes))
    return dict(found)


def count(found: Found) -> tuple[int, int, int]:
    """Number of all-to-alls, all-gathers and reduce-scatters."""
    exchanged, gathered, scattered = (
        len(found.get(kind, [])) for kind in ("all-to-all", "all-gather", "reduce-scatter")
    )
    return exchanged, gathered, scattered


def head_on_shards(**axes: int) -> tuple[list[tuple[str, tuple[str, ...], int, int]], float]:
    """Collectives of the loss with its gradients over a mesh, in eight chunks per row, and its largest difference from
    one device."""
    rng, mesh, dim, vocab = np.random.default_rng(3), nnxmoe.make_mesh(**axes), 16, 48
    x, kernel = rng.normal(size=(8, 9, dim)).astype(np.float32), rng.normal(size=(vocab, dim)).astype(np.float32)
    rest = rng.integers(0, vocab, (8, 9)), rng.random((8, 9), np.float32)

    def run(x: Any, kernel: Any, mesh: Any = None) -> Any:
        return jax.value_and_grad(lambda x, k: ChunkedLoss(vocab)(x, DenseKernel(k), *rest, 1e-2, mesh)[0], (0, 1))(
            x, kernel
        )

    over = NamedSharding(mesh, PartitionSpec(batch_axes(mesh))), NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    options = {"in_shardings": over, "out_shardings": (None, over), "static_argnums": 2}
    program = jax.jit(run, **options).lower(*map(jax.device_put, (x, kernel), over), mesh).compile()
    pairs = zip(jax.tree.leaves(program(x, kernel)), jax.tree.leaves(run(x, kernel)), strict=True)
    found = [(one.kind, one.axes, one.bytes, one.times) for one in collectives_of(program.as_text(), dict(mesh.shape))]
    return found, max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_the_head_travels_once_for_all_chunks_of_the_loss(eight: Callable[..., Any]) -> None:
    """Its kernel is gathered, and its gradients are added up, outside of the loop over chunks."""
    for axes in ({"fsdp": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "fsdp": 4}):
        found, apart = eight(functools.partial(head_on_shards, **axes))
        outside = [one for one in found if one[1] != ("tensor",)]
        assert apart < 1e-6 and {times for *_, times in outside} == {1}, found
        moved = {"all-gather", "all-reduce" if "tensor" in axes else "reduce-scatter"}
        assert {kind for kind, _, size, _ in outside if size > 768} == moved, found


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == "tiny" else pytest.mark.slow) for shape in SHAPES]
)
def test_collectives_of_expert_parallel_modes(eight: Callable[..., Any], shape: str) -> None:
    """On eight expert shards, for the forward pass and for forward with backward."""
    experts = SHAPES[shape][2]
    # Tokens go to the experts and back, and likewise their gradients.
    assert only_tokens_travel(on_experts(eight, "capacity", shape, False), shape, times=2)
    assert only_tokens_travel(on_experts(eight, "capacity", shape, True), shape, times=4)
    # Two exchanges, and an all-gather of the row counts.
    assert count(on_experts(eight, "ragged", shape, False)) == (2, 1, 0)
    found = on_experts(eight, "ragged", shape, True)
    assert count(found) == (4, 1, 0) and found["all-gather"] == [8 * experts]
    # Tokens and routing are all-gathered and partial outputs reduce-scattered; the backward pass is the transpose.
    assert count(on_experts(eight, "ring", shape, False)) == (0, 2, 1)
    assert count(on_experts(eight, "ring", shape, True)) == (0, 3, 3)


def sorts(way: str) -> int:
    return len(re.findall(r" sort\(", program(way, "tiny", True, expert=8).as_text()))


def test_received_rows_are_not_sorted(eight: Callable[..., Any]) -> None:
    """Rows arrive in the order of local experts. Only the sender sorts rows."""
    assert eight(sorts, "ragged") == eight(sorts, "ring") == 1


def only_tokens_travel(found: Found, shape: str, times: int) -> bool:
    """Whether the only collectives are ``times`` all-to-alls of a device's capacity slots."""
    dim, _, experts, select = SHAPES[shape]
    slots = Capacity(2.0).slots(T, select.k, experts) * B * experts * dim // 8
    return count(found) == (times, 0, 0) and found["all-to-all"] == [slots] * times


def on_experts(eight: Callable[..., Any], way: str, shape: str, backward: bool) -> Found:
    return eight(spread, way, shape, backward)


def spread(way: str, shape: str, backward: bool) -> Found:
    return compiled(way, shape, backward, expert=8)


def chunks(way: str) -> tuple[int, int]:
    """Bytes gathered over fsdp, with the loops' trip counts, and temporary bytes, forward and backward."""
    axes = {"fsdp": 2, "expert": 4}
    made = program(way, "tiny", True, **axes)
    gathered = [c for c in collectives_of(made.as_text(), axes) if c.kind == "all-gather" and c.axes == ("fsdp",)]
    return sum(c.total for c in gathered), made.memory_analysis().temp_size_in_bytes


def test_an_exchange_in_chunks_takes_less_memory_and_gathers_kernels_once(eight: Callable[..., Any]) -> None:
    whole, inside, outside = (eight(chunks, way) for way in ("ragged", "ragged in chunks", "chunked ragged"))
    assert inside[0] == whole[0] < outside[0]
    assert inside[1] < 0.6 * whole[1]


def test_fsdp_gathers_kernels_and_reduce_scatters_gradients(eight: Callable[..., Any]) -> None:
    """There are three expert kernels and the router kernel."""
    assert count(eight(sharded, False)) == (0, 4, 0)
    assert count(eight(sharded, True)) == (0, 4, 3)


def sharded(backward: bool) -> Found:
    return compiled("sorted", "tiny", backward, fsdp=8)


def batch_keeps_the_expert_axis(shape: str, backward: bool) -> Found:
    """Capacity mode, patched so that the batch of dispatched tokens stays sharded over the expert axis."""
    with mock.patch.object(capacity, "expert_row_axes", lambda mesh: (None, ("expert",))):
        return compiled("capacity", shape, backward, expert=8)


@pytest.mark.parametrize("shape", SHAPES)
def test_count_detects_a_batch_that_keeps_the_expert_axis(eight: Callable[..., Any], shape: str) -> None:
    """In that case kernels are gathered or exchanged."""
    assert not only_tokens_travel(eight(batch_keeps_the_expert_axis, shape, False), shape, times=2)
    assert not only_tokens_travel(eight(batch_keeps_the_expert_axis, shape, True), shape, times=4)


def gathered_kinds() -> collections.Counter[str]:
    """Dtype and name of the collectives of a traced layer with float32 parameters and bfloat16 tokens."""
    dim, width, experts, select = SHAPES["tiny"]
    mesh, kw = nnxmoe.make_mesh(fsdp=8), {"dtype": jnp.dtype(jnp.float32), "rngs": nnx.Rngs(0)}
    router = Router(dim, experts, select, bias=False, **kw)
    graph, params = nnx.split(
        MoE(router, Experts(dim, width, experts, matmul=BlockedMatmul(), **kw), Sorted(), None, mesh)
    )

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(nnx.merge(graph, params)(x)[0].astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((B, T, dim), jnp.bfloat16)))
    return collections.Counter(re.findall(r":(\w+)\[[\d,]+\] = (all_gather|reduce_scatter)\[", text))


def test_expert_kernels_are_cast_before_they_are_gathered(eight: Callable[..., Any]) -> None:
    """Outside a model, gradients are reduced in float32."""
    found = eight(gathered_kinds)
    assert {kind for kind, name in found if name == "all_gather"} == {"bf16"}
    assert found["f32", "reduce_scatter"] == 3 and ("bf16", "reduce_scatter") not in found


def reduction_kinds(compute: str, reduce: str | None) -> tuple[collections.Counter[str], str]:
    """Count the reduce-scatters and matmuls of a traced training step by dtype. Also returns the text of the step."""
    strategy = nnxmoe.Strategy(
        dispatch=WAYS["ragged"],
        stacking=nnxmoe.Scanned(),
        mesh=nnxmoe.make_mesh(fsdp=4, expert=2),
        compute_dtype=compute,
        reduce_dtype=reduce,
    )
    model = nnxmoe.models.DeepSeekV3(DEEPSEEK, strategy, rngs=None, dtype=jnp.float32)
    step = nnxmoe.train.Step(model, optax.sgd(1.0))
    text = str(jax.make_jaxpr(step.jitted)(step.shapes(), {"tokens": jax.ShapeDtypeStruct((B, T), jnp.int32)}))
    dots = re.findall(r":(\w+)\[[\d,]+\] = dot_general\[", text)
    scatters = re.findall(r":(\w+)\[[\d,]+\] = reduce_scatter\[", text)
    counts = collections.Counter([*(f"{kind} dot" for kind in dots), *(f"{kind} scatter" for kind in scatters)])
    return counts, re.sub("0x[0-9a-f]+", "", text)


def test_kernel_gradients_are_reduced_in_the_strategys_dtype(eight: Callable[..., Any]) -> None:
    """Gradients of three expert kernels and the head are reduce-scattered. Dense kernels change only the matmul dtype.

    The head also has a float32 branch for XLA:CPU.
    """
    narrow, wide = (eight(reduction_kinds, "bfloat16", reduce)[0] for reduce in (None, "float32"))
    assert (narrow["bf16 scatter"], narrow["f32 scatter"]) == (4, 1)
    assert (wide["bf16 scatter"], wide["f32 scatter"]) == (0, 4)
    dense_kernels = 2 * 5 + 2 * 3  # two stacks, each with five kernels of MLA and three of a dense or shared MLP
    assert narrow["bf16 dot"] - wide["bf16 dot"] == dense_kernels
    same = {eight(reduction_kinds, "float32", reduce)[1] for reduce in (None, "float32")}
    assert len(same) == 1, "float32 activations: nothing changes"


VOCAB = 512  # large enough that the head is the largest kernel


def gathers_of_step(rules: Any) -> tuple[list[str], list[Any], int]:
    """Return a compiled step's all-gathers in the update, all of its all-gathers, and state elements per device."""
    mesh = nnxmoe.make_mesh(fsdp=2, expert=4)
    strategy = nnxmoe.Strategy(
        dispatch=WAYS["ragged"], stacking=nnxmoe.Scanned(), mesh=mesh, rules=rules, compute_dtype="bfloat16"
    )
    config = dataclasses.replace(DEEPSEEK, vocab_size=VOCAB)
    model = nnxmoe.models.DeepSeekV3(config, strategy, rngs=None, dtype=jnp.float32)
    step = nnxmoe.train.Step(model, optax.adamw(1e-3))
    text = step.lower({"tokens": jax.ShapeDtypeStruct((B, T), jnp.int32)}).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" = .*\ball-gather(-start)?\(", line)]
    gathers = [one for one in collectives_of(text, dict(mesh.shape)) if one.kind == "all-gather"]
    state = step.shapes()
    arrays = jax.tree.leaves((state.params, state.moments))
    elements = sum(math.prod(array.sharding.shard_shape(array.shape)) for array in arrays)
    # In the forward and the backward pass, gathers have the name of a derivative or, since jax 0.11, of a parameter.
    updates = [line for line in lines if not re.search(r'op_name="[^"]*(jvp\(|state\.params)', line)]
    return updates, gathers, elements


def test_training_rules_gather_nothing_in_the_update(eight: Callable[..., Any]) -> None:
    """With dense kernels over fsdp alone, XLA shards the head's update further and gathers parameters and moments."""
    updates, gathers, elements = eight(gathers_of_step, dict(nnxmoe.TRAINING_RULES))
    narrow_updates, _, narrow_elements = eight(gathers_of_step, dict(nnxmoe.RULES))
    assert len(updates) == 0 and len(narrow_updates) == 3
    assert elements < 0.6 * narrow_elements
    # Kernels are gathered over one axis after the other. Gradients are not gathered: the head's is already scattered.
    head_gathers = [one for one in gathers if one.bytes >= 2 * VOCAB * DEEPSEEK.hidden_size // 2]
    assert sorted((one.axes, one.times) for one in head_gathers) == [(("expert",), 1), (("fsdp",), 1)]
    assert ("fsdp", "expert") not in {one.axes for one in gathers if one.bytes > 4 * B * T}


WIDE = {**nnxmoe.RULES, "embed": ("fsdp", "expert")}


def lookup(rules: Any, **axes: Any) -> tuple[list[float], set[str], int]:
    """Of embeddings on a mesh: errors of values and gradients against one device, and the collectives that move more
    than tokens, with the most elements of one."""
    mesh, kw = nnxmoe.make_mesh(**axes), {"dtype": jnp.dtype(jnp.float32), "rngs": nnx.Rngs(0)}
    one, other = Embed(96, 32, **kw), Embed(96, 32, **kw | {"mesh": mesh, "rules": rules, "rngs": nnx.Rngs(0)})
    tokens = jax.random.randint(jax.random.key(0), (B, T), -3, 97)  # 96 is out of range: NaN on both

    def gradient(embed: Embed) -> Any:
        graph, state = nnx.split(embed)

        def loss(state: Any) -> Any:
            y = nnx.merge(graph, state)(tokens, jnp.bfloat16)
            return jnp.nansum(jnp.sin(y.astype(jnp.float32)) * jnp.arange(y.size).reshape(y.shape) / y.size), y

        return jax.jit(jax.grad(loss, has_aux=True)), state

    (plain, start), (spread, state) = gradient(one), gradient(other)
    state = jax.device_put(state, sharding_of(other.table, mesh, rules))
    ours, wanted = (jax.tree.leaves(run(of)) for run, of in ((spread, state), (plain, start)))
    text = spread.lower(state).compile().as_text()
    moved = [(one.kind, one.bytes // 4) for one in collectives_of(text, mesh.shape) if one.bytes > 8 * B * T]
    pairs = [(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(ours, wanted, strict=True)]
    assert all(np.array_equal(np.isnan(a), np.isnan(b)) for a, b in pairs) and np.isnan(pairs[1][0]).any()
    errors = [float(np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max()) for a, b in pairs]
    return errors, {kind for kind, _ in moved}, max(size for _, size in moved)


@pytest.mark.parametrize("rules", [nnxmoe.RULES, WIDE])
@pytest.mark.parametrize("tensor", [1, 2])
def test_embeddings_are_exchanged_and_not_replicated(eight: Callable[..., Any], tensor: int, rules: Any) -> None:
    """XLA alone would gather the embeddings of all devices' tokens."""
    errors, kinds, most = eight(lookups, dict(rules), tensor)
    assert errors[0] < 1e-5 and errors[1] == 0.0  # of gradients, of values
    assert kinds <= {"all-to-all", "all-reduce"} and most < B * T * 32


def lookups(rules: Any, tensor: int) -> Any:
    return lookup(rules, fsdp=2, expert=4 // tensor, tensor=tensor)


# Sharding constraints


def constraints(way: str, **axes: int) -> int:
    """Number of sharding constraints in the lowered program of a model."""
    sizes = math.prod(axes.values())
    mesh = nnxmoe.make_mesh(**axes, devices=jax.devices()[:sizes])
    strategy = nnxmoe.Strategy(dispatch=WAYS[way])
    model = nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model", mesh=mesh, strategy=strategy)
    graph, state = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    text = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).logits).lower(state, tokens).as_text()
    return len(re.findall(r"sharding_constraint|custom_call @Sharding", text))


def constraints_on(way: str, axis: str, size: int) -> int:
    return constraints(way, **{axis: size})


@pytest.mark.parametrize("way", ["dense", "sorted", "capacity"])
def test_replicated_specs_emit_no_sharding_constraint(eight: Callable[..., Any], way: str) -> None:
    """On one device and on a mesh whose axes do not shard the batch; a mesh that shards it has constraints."""
    assert eight(constraints_on, way, "fsdp", 1) == 0
    assert eight(constraints_on, way, "tensor", 2) == 0
    assert eight(constraints_on, way, "fsdp", 2) > 0
