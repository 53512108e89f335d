"""Every execution mode of a MoE layer, on one device and on meshes of eight, matches the dense reference."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import (
    BlockwiseAttention,
    Capacity,
    Chunked,
    ChunkedExchange,
    Dense,
    ExpertParallel,
    RaggedAllToAll,
    RingOfExperts,
    Sorted,
)
from nnxmoe.axes import BATCH_AXES
from nnxmoe.layers.activations import ClampedSwiGLU
from nnxmoe.models import Mixtral, MixtralConfig
from nnxmoe.moe import expert_parallel
from nnxmoe.moe.block import MoE
from nnxmoe.moe.blocked import BlockedMatmul
from nnxmoe.moe.expert_biases import ExpertBiases
from nnxmoe.moe.expert_parallel import buffer_size, min_chunks
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.ragged import ExchangePlan, ragged_all_to_all
from nnxmoe.moe.router import LogitBias, Router, RouterBias
from nnxmoe.moe.selection import BalancedTopK, SigmoidGroupTopK, SoftmaxTopK
from nnxmoe.sharding_rules import sharding_of
from tests.support.arrays import max_error
from tests.support.cases import HF_CASES, load_case
from tests.support.running import of_valid
from tests.support.tiny import build_tiny, random_tokens, stacking_of

B, T, D, F, E = 8, 5, 16, 24, 8
RAGGED, RING = ExpertParallel(Sorted(), RaggedAllToAll()), ExpertParallel(Sorted(), RingOfExperts())
WAYS = {"dense": Dense(), "sorted": Sorted(), "capacity": Capacity(8.0), "ragged": RAGGED, "ring": RING}
WAYS |= {f"chunked {name}": Chunked(way, 2 + i % 4) for i, (name, way) in enumerate(WAYS.items())}
WAYS |= {
    "ragged in chunks": ExpertParallel(Sorted(), ChunkedExchange(RaggedAllToAll(), 3)),
    "ring in chunks": ExpertParallel(Sorted(), ChunkedExchange(RingOfExperts(), 2)),
}
MESHES: dict[str, dict[str, int] | None] = {
    "one device": None,
    "fsdp8": {"fsdp": 8},
    "expert8": {"expert": 8},
    "expert4 fsdp2": {"expert": 4, "fsdp": 2},
    "data2 fsdp2 expert2": {"data": 2, "fsdp": 2, "expert": 2},
    "expert4 tensor2": {"expert": 4, "tensor": 2},
}
SELECTS = {
    "softmax": SoftmaxTopK(2),
    "sigmoid groups": SigmoidGroupTopK(3, 4, 2, True, 2.5),
    "biases": SoftmaxTopK(3),  # of logits and experts, with a clamped activation
}


def make(way: Any, select: str, mesh: Any, dtype: str = "float32") -> MoE:
    """A MoE layer; tests steer its routing through the first feature of each token."""
    kw: dict[str, Any] = {"dtype": jnp.dtype(dtype), "rngs": nnx.Rngs(0)}
    parts: dict[str, Any] = {}
    logit_bias = LogitBias(E, **kw) if select == "biases" else None
    if select == "biases":
        parts = {"activation": ClampedSwiGLU(1.7, 0.5), "biases": ExpertBiases(D, F, E, **kw)}
    router = Router(D, E, SELECTS[select], bias=select == "sigmoid groups", logit_bias=logit_bias, **kw)
    moe = MoE(router, Experts(D, F, E, matmul=BlockedMatmul(), **parts, **kw), way, None, mesh)
    for path, variable in nnx.iter_graph(moe):
        if isinstance(variable, nnx.Variable) and "bias" in ".".join(map(str, path)):
            noise = jax.random.normal(jax.random.key(variable.size), variable.shape) * 0.1
            variable.set_value(noise.astype(variable.dtype))
    return moe


def scenarios(dtype: str = "float32") -> dict[str, tuple[Any, Any, Any]]:
    """Name -> tokens, mask of real tokens, and an offset added to the router kernel."""
    x = jax.random.normal(jax.random.key(1), (B, T, D)).at[..., 0].set(1.0).astype(dtype)
    everything = jnp.ones((B, T), bool)
    nothing = jnp.zeros((E, D))
    padding = jax.random.bernoulli(jax.random.key(2), 0.6, (B, T)).at[3].set(False)  # row 3 is all padding
    return {
        "random": (x, everything, nothing),
        "all on one expert": (x, everything, nothing.at[5, 0].set(30.0)),
        "empty experts": (x, everything, nothing.at[::2, 0].set(-30.0)),
        "padding": (x, padding, nothing),
    }


@functools.cache
def program(way: str, select: str, mesh_name: str, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """Jitted loss and gradients of a layer, its sharded parameters, and its mesh.

    ``dtype`` "exact" means values rounded to bfloat16 but computed in float32.
    """
    sizes = MESHES[mesh_name]
    mesh = None if sizes is None else nnxmoe.make_mesh(**sizes)
    stored = "bfloat16" if dtype == "exact" else dtype
    graph, params, rest = nnx.split(make(WAYS[way], select, mesh, stored), nnx.Param, ...)
    params = jax.tree.map(lambda a: a.astype(jnp.float32), params) if dtype == "exact" else params
    if mesh is not None:
        flat = nnx.to_flat_state(params)
        flat = [(p, v.replace(jax.device_put(v.get_value(), sharding_of(v, mesh)))) for p, v in flat]
        params = nnx.from_flat_state(flat)

    def loss(params: Any, x: Any, valid: Any) -> Any:
        y, info = nnx.merge(graph, params, rest)(x, of_valid(valid))
        weights = jnp.arange(1.0, 1 + y.size).reshape(y.shape) / y.size
        return jnp.sum(jnp.sin(y.astype(jnp.float32)) * weights), (y, info)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)), params, mesh


def outcome(way: str, select: str, mesh_name: str, scenario: str, dtype: str = "float32") -> tuple[list[Any], int, int]:
    """Output and every gradient as NumPy arrays, the number of drops, and the total load."""
    run, params, mesh = program(way, select, mesh_name, dtype)
    x, valid, more = scenarios("bfloat16" if dtype == "exact" else dtype)[scenario]
    x = x.astype(jnp.float32) if dtype == "exact" else x
    flat = [
        (p, v.replace(v.get_value() + more.astype(v.get_value().dtype)) if p == ("router", "kernel") else v)
        for p, v in nnx.to_flat_state(params)
    ]
    if mesh is not None:
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    (_, (y, info)), grads = run(nnx.from_flat_state(flat), x, valid)
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves((y, grads))]
    return leaves, int(info.dispatch.dropped), int(info.dispatch.load.sum())


def compare(way: str, select: str, mesh_name: str, dtype: str = "float32") -> dict[str, tuple[float, int, int]]:
    """Scenario -> largest relative error against `Dense` on one device, drops, and difference in load."""
    found = {}
    for scenario in scenarios():
        ours, dropped, load = outcome(way, select, mesh_name, scenario, dtype)
        wanted, _, wanted_load = outcome("dense", select, "one device", scenario, dtype)
        scale = [max(1.0, float(np.abs(b).max())) for b in wanted]
        errors = [max_error(a, b) / s for a, b, s in zip(ours, wanted, scale, strict=True)]
        found[scenario] = (max(errors), dropped, load - wanted_load)
    return found


def roundings(way: str, select: str, mesh_name: str) -> dict[str, list[tuple[float, float]]]:
    """Scenario -> per output and gradient, the relative bfloat16 errors against float32 of this mode and of `Dense` on
    one device."""
    found = {}
    for scenario in scenarios():
        ours, _, _ = outcome(way, select, mesh_name, scenario, "bfloat16")
        oracles, _, _ = outcome("dense", select, "one device", scenario, "bfloat16")
        exact, _, _ = outcome("dense", select, "one device", scenario, "exact")
        scale = [max(1.0, float(np.abs(c).max())) for c in exact]
        both = zip(ours, oracles, exact, scale, strict=True)
        found[scenario] = [(max_error(a, c) / s, max_error(b, c) / s) for a, b, c, s in both]
    return found


def _cells(default: Iterable[tuple[str, ...]], *axes: Iterable[str]) -> list[Any]:
    """Product of the axes as params; combinations not in ``default`` are marked slow."""
    chosen, cells = set(default), list(itertools.product(*axes))
    assert chosen <= set(cells), chosen - set(cells)
    return [cell if cell in chosen else pytest.param(*cell, marks=pytest.mark.slow) for cell in cells]


# Both exchanges run on at least two meshes by default.
MODES = [
    ("dense", "sigmoid groups", "fsdp8"),
    ("sorted", "sigmoid groups", "expert4 tensor2"),
    ("capacity", "softmax", "expert8"),
    ("ragged", "softmax", "data2 fsdp2 expert2"),
    ("ragged", "sigmoid groups", "expert8"),
    ("ring", "sigmoid groups", "expert4 tensor2"),
    ("chunked sorted", "softmax", "one device"),
    ("ragged", "biases", "expert4 tensor2"),
    ("ragged in chunks", "biases", "data2 fsdp2 expert2"),
]


def _modes() -> list[Any]:
    """Every dispatch on every mesh, with the selections in turn; cells that are not in ``MODES`` are slow."""
    cells = [
        (way, list(SELECTS)[(i + j) % len(SELECTS)], mesh)
        for i, way in enumerate(WAYS)
        for j, mesh in enumerate(MESHES)
    ]
    cells += [(way, "biases", mesh) for way in WAYS for mesh in MESHES if (way, "biases", mesh) not in cells]
    return [*MODES, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in cells if cell not in MODES)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "select", "mesh"), _modes())
def test_every_mode_matches_dense_on_one_device(eight: Callable[..., Any], way: str, select: str, mesh: str) -> None:
    """Compares outputs and the gradients of tokens, router and experts."""
    for scenario, (error, dropped, more) in eight(compare, way, select, mesh).items():
        assert error < 1e-5 and dropped == 0 and more == 0, (scenario, error, dropped, more)


NARROW = [("sorted", "fsdp8"), ("ragged", "expert4 tensor2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mesh"),
    _cells(
        NARROW,
        ["dense", "sorted", "capacity", "ragged", "ring"],
        ["fsdp8", "expert8", "expert4 tensor2", "expert4 fsdp2"],
    ),
)
def test_bfloat16_error_is_within_rounding(eight: Callable[..., Any], way: str, mesh: str) -> None:
    """The error against float32 is at most four times that of `Dense`, or four roundings."""
    select = "sigmoid groups" if mesh == "expert4 fsdp2" else "softmax"
    for scenario, pairs in eight(roundings, way, select, mesh).items():
        for ours, oracles in pairs:
            assert ours < 4 * max(oracles, 2**-8), (scenario, ours, oracles)


# Buffer overflow


def overflow(exchange: Any) -> tuple[np.ndarray, np.ndarray, int, list[int]]:
    """Outputs with a small and a large buffer, the experts, and drops, for tokens that nearly all go to one shard."""
    mesh = nnxmoe.make_mesh(expert=8)
    x, valid, more = scenarios()["all on one expert"]
    outs = []
    for way in (exchange, type(exchange)()):
        moe = make(ExpertParallel(Sorted(), way), "softmax", mesh)
        moe.router.kernel.set_value(moe.router.kernel.get_value() + more)
        y, info = jax.jit(lambda m, x, v: m(x, of_valid(v)))(moe, x, valid)
        found = np.asarray(y), np.asarray(info.routing.experts)
        outs.append((*found, int(info.dispatch.dropped), np.asarray(info.dispatch.dropped_by_shard)))
    (small, experts, dropped, by_shard), (large, _, none, _) = outs
    assert none == 0 and by_shard.sum() == dropped
    return np.stack([small, large]), experts, dropped, by_shard.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [RaggedAllToAll(2.0), RingOfExperts(2.0)])
def test_buffer_overflow_drops_are_counted_and_isolated(eight: Callable[..., Any], exchange: Any) -> None:
    """All B * T tokens are routed to shard 5, whose buffer has 2 * (B / 8) * T * X rows."""
    (small, large), experts, dropped, by_shard = eight(overflow, exchange)
    room, wanted = 2 * (B // 8) * T * 2, int((experts == 5).sum())
    others = [int((experts == e).sum()) for e in range(E)]
    expected = [max(0, n - room) for n in others]
    assert wanted == B * T and by_shard == expected and dropped == sum(expected) > 0
    changed = np.abs(small - large).max(axis=-1) > 1e-6
    assert changed.sum() == dropped, "each drop changes one token, and no other token notices"


def test_buffer_sizes() -> None:
    assert buffer_size(None, tokens=10, experts_per_token=3, shards=4, local_experts=2) == 4 * 10 * 2
    assert buffer_size(None, tokens=10, experts_per_token=3, shards=4, local_experts=8) == 4 * 10 * 3
    assert buffer_size(1.5, tokens=10, experts_per_token=3, shards=4, local_experts=8) == 45
    assert buffer_size(99.0, tokens=10, experts_per_token=3, shards=4, local_experts=2) == 80


def test_chunks_bound_the_room_on_large_meshes() -> None:
    """Mixtral on 8 devices, DeepSeek-V3 on 8, 16 and 64, and one expert per device."""
    for size, mine, chosen, chunks in ((8, 1, 2, 1), (8, 32, 8, 1), (16, 16, 8, 2), (64, 4, 8, 4), (256, 1, 8, 4)):
        assert min_chunks(None, chosen, size, mine) == chunks
        room = buffer_size(None, 4096 // chunks, chosen, size, mine)
        assert room <= expert_parallel.MAX_BUFFER_FACTOR * 4096 * chosen
        assert min_chunks(1.25, chosen, size, mine) == 1


def chosen_chunks() -> list[bool]:
    """Whether the program of chunks that are not given is that of no chunks, and with a lower bound that of four."""
    mesh = nnxmoe.make_mesh(expert=4, fsdp=2)

    def text(exchange: Any) -> str:
        graph, state = nnx.split(make(ExpertParallel(Sorted(), exchange), "softmax", mesh))
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])
        return run.lower(state, scenarios()["random"][0]).as_text()

    whole = text(RaggedAllToAll())
    found = [text(ChunkedExchange(RaggedAllToAll())) == whole]
    with mock.patch.object(expert_parallel, "MAX_BUFFER_FACTOR", 1):
        return [*found, text(ChunkedExchange(RaggedAllToAll())) == text(ChunkedExchange(RaggedAllToAll(), 4)) != whole]


@pytest.mark.slow
def test_chunks_are_chosen_by_the_size_of_the_axis(eight: Callable[..., Any]) -> None:
    assert eight(chosen_chunks) == [True, True]


# Stages


def exchanged(seed: int, room: int) -> tuple[Any, ...]:
    """Results of an exchange of random sizes, forward and backward, and those of a loop in NumPy."""
    rng, shards, each = np.random.default_rng(seed), 4, 3
    counts = rng.integers(0, 4, (shards, shards, each)).astype(np.int32)
    counts[rng.integers(shards)] = 0
    have = int(counts.sum(axis=(1, 2)).max()) + 1
    rows = rng.standard_normal((shards, have, 2)).astype(np.float32)
    weight = rng.standard_normal((shards, room, 2)).astype(np.float32)
    mesh = nnxmoe.make_mesh(expert=shards, devices=jax.devices()[:shards])

    def local(rows: Any, weight: Any) -> Any:
        plan = ExchangePlan.from_counts(jnp.asarray(counts), jax.lax.axis_index("expert"), room)

        def move(rows: Any) -> Any:
            return ragged_all_to_all(rows, room, plan.send, plan.receive, axis="expert", max_rows=min(have, room))

        out, pull = jax.vjp(move, rows[0])
        return out[None], pull(weight[0])[0][None], plan.sizes[None], plan.dropped[None]

    spec = PartitionSpec("expert")
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec,) * 4, check_vma=False)
    got = [np.asarray(value) for value in jax.jit(run)(rows, weight)]
    out, back = np.zeros((shards, room, 2), np.float32), np.zeros_like(rows)
    sizes, dropped = np.zeros((shards, each), int), np.zeros(shards, int)
    for receiver in range(shards):
        accepted: list[tuple[int, int, int]] = []  # expert, sender and row, in the order of arrival
        for sender in range(shards):
            row = counts[sender, :receiver].sum()
            for expert in range(each):
                for _ in range(counts[sender, receiver, expert]):
                    accepted.append((expert, sender, row))
                    row += 1
        accepted, dropped[receiver] = accepted[:room], len(accepted[room:])
        for position, (expert, sender, row) in enumerate(sorted(accepted)):
            out[receiver, position] = rows[sender, row]
            back[sender, row] = weight[receiver, position]
            sizes[receiver, expert] += 1
    return got, [out, back, sizes, dropped]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "room"), [(0, 1), (1, 7), (2, 15), (0, 40), *(pytest.param(s, 7, marks=pytest.mark.slow) for s in (0, 2))]
)
def test_ragged_all_to_all_equals_a_numpy_loop(eight: Callable[..., Any], seed: int, room: int) -> None:
    got, wanted = eight(exchanged, seed, room)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Models


def model_error(case: str, way: str, devices: int, scan: bool) -> float:
    """Error of the logits of a reference case on an expert-parallel mesh."""
    mesh = nnxmoe.make_mesh(expert=devices, devices=jax.devices()[:devices])
    strategy = nnxmoe.Strategy(dispatch=WAYS[way], stacking=stacking_of(scan))
    model = nnxmoe.from_pretrained(HF_CASES / case / "model", mesh=mesh, strategy=strategy)
    arrays = load_case(case).arrays
    error = max_error(model(arrays["input_ids"]).logits, arrays["logits"])
    one = nnxmoe.generate(model, arrays["generate.prompt"][:1], max_new_tokens=2, eos_token_id=None)
    assert np.array_equal(one[:, -2:], arrays["generate.ids"][:1, :2]), "a batch of one is filled up with copies"
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "way", "scan"),
    [
        pytest.param("mixtral_basic", "sorted", True, marks=pytest.mark.slow),
        ("mixtral_basic", "ragged", False),
        pytest.param("mixtral_basic", "ring", True, marks=pytest.mark.slow),
        pytest.param("deepseek_yarn", "sorted", False, marks=pytest.mark.slow),
        pytest.param("deepseek_yarn", "ragged", True, marks=pytest.mark.slow),
        pytest.param("deepseek_yarn", "ring", False, marks=pytest.mark.slow),
        ("deepseek_yarn", "capacity", True),
    ],
)
def test_reference_cases_on_a_mesh(eight: Callable[..., Any], case: str, way: str, scan: bool) -> None:
    assert eight(model_error, case, way, 2, scan) < 2e-4


def generated(dispatch: Any) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """New ids of four prompts, one at a time, on four expert shards and on one device; and the warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("nnxmoe").addHandler(handler)
    mesh = nnxmoe.make_mesh(expert=4, devices=jax.devices()[:4])
    found = []
    for strategy in (nnxmoe.Strategy(dispatch=dispatch, mesh=mesh), nnxmoe.Strategy()):
        config = MixtralConfig(
            vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        )  # fmt: skip
        model = Mixtral(config, strategy, rngs=nnx.Rngs(0))
        tokens = np.random.default_rng(1).integers(0, 97, (4, 6))
        found.append([nnxmoe.generate(model, tokens[i : i + 1], max_new_tokens=8)[0].tolist() for i in range(4)])
    logging.getLogger("nnxmoe").removeHandler(handler)
    return *found, [line for line in said if "were dropped" in line]


@pytest.mark.slow
def test_batch_padding_rows_use_no_buffer_space(eight: Callable[..., Any]) -> None:
    """One prompt on four shards is padded with three rows; a buffer for the balanced load suffices."""
    ours, wanted, said = eight(generated, ExpertParallel(Sorted(), RingOfExperts(4.0)))
    assert ours == wanted and not said
    _, _, said = eight(generated, ExpertParallel(Sorted(), RingOfExperts(0.25)))
    assert said and "RingOfExperts(buffer_factor=0.25)" in said[0], "what is dropped is said"


def random_choice() -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Experts chosen by `BalancedTopK` on one device and on a mesh, and the load on the mesh."""
    kw: dict[str, Any] = {"dtype": jnp.dtype("float32"), "rngs": nnx.Rngs(0)}
    router = Router(D, E, BalancedTopK(2, seed=3), bias=False, **kw)
    x = scenarios()["random"][0]
    one, other = (np.asarray(router(x, None, mesh).experts) for mesh in (None, nnxmoe.make_mesh(expert=8)))
    return one, other, np.bincount(other.reshape(-1), minlength=E).tolist()


@pytest.mark.slow
def test_random_top_k_is_balanced_and_independent_of_the_mesh(eight: Callable[..., Any]) -> None:
    one, other, load = eight(random_choice)
    np.testing.assert_array_equal(one, other)
    assert load == [B * T * 2 // E] * E


# Invalid arguments


def refusal(kind: str) -> str:
    """Message of the ValueError raised for an invalid mesh or batch."""
    try:
        if kind == "experts":
            mesh = nnxmoe.make_mesh(expert=3, devices=jax.devices()[:3])
            make(RAGGED, "softmax", mesh)(scenarios()["random"][0][:6])
        if kind == "batch":
            make(RING, "softmax", nnxmoe.make_mesh(expert=8))(scenarios()["random"][0][:6])
        if kind == "missing":
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("devices",))
            make(RAGGED, "softmax", mesh)(scenarios()["random"][0])
        if kind == "missing data":
            way = ExpertParallel(Sorted(), RaggedAllToAll(), data_axes=("data", "rows"))
            make(way, "softmax", nnxmoe.make_mesh(expert=8))(scenarios()["random"][0])
        if kind == "capacity":
            make(Capacity(2.0), "softmax", nnxmoe.make_mesh(expert=8))(scenarios()["random"][0][:6])
        if kind == "other axis":
            way = ExpertParallel(Sorted(), RingOfExperts(), axis="tensor")
            make(way, "softmax", nnxmoe.make_mesh(tensor=8))(scenarios()["random"][0])
        if kind == "explicit":
            kinds = (jax.sharding.AxisType.Explicit,)
            nnxmoe.Strategy(mesh=jax.make_mesh((8,), ("fsdp",), axis_types=kinds))
        if kind == "parameter":
            mesh = nnxmoe.make_mesh(tensor=8)
            nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model", mesh=mesh)
    except ValueError as error:
        return str(error)
    return "taken"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("experts", "8 experts are not divisible by the 3 devices of expert"),
        ("batch", "ExpertParallel: a batch of 6 rows is not divisible by the 8 devices of "),
        ("missing", "has no axis 'expert'"),
        ("missing data", "has no axis 'rows'"),
        ("capacity", "Capacity: a batch of 6 rows is not divisible by the 8 devices of "),
        ("other axis", "the rules shard experts over 'expert', not over 'tensor'"),
        ("parameter", "k.kernel: mesh axis tensor of size 8 does not divide the 2 KV heads; try tensor=2"),
        ("explicit", "must be of type Auto. Create the mesh with nnxmoe.make_mesh"),
    ],
)
def test_invalid_meshes_and_batch_sizes(eight: Callable[..., Any], kind: str, message: str) -> None:
    assert message in eight(refusal, kind)


@pytest.mark.wrong_types
def test_invalid_strategy_arguments() -> None:
    for make_one, message in (
        (lambda: ExpertParallel(Sorted(), RaggedAllToAll(), data_axes=("data", "expert")), "also in data_axes"),
        (lambda: ExpertParallel(Sorted(), RaggedAllToAll(), data_axes=("data", "data")), "repeated in data_axes"),
        (lambda: ExpertParallel(Dense, RaggedAllToAll()), r"ExpertParallel\(inner=.*such as Sorted\(\)"),
        (lambda: ExpertParallel(Sorted(), RaggedAllToAll), "an object"),
        (lambda: RaggedAllToAll(0.0), "buffer_factor=0.0"),
        (lambda: RingOfExperts(float("nan")), "buffer_factor=nan"),
        (lambda: Chunked(Sorted(), 0), "chunks=0"),
        (lambda: ChunkedExchange(RaggedAllToAll(), 0), "chunks=0"),
        (lambda: ChunkedExchange(RaggedAllToAll, 2), r"ChunkedExchange\(exchange=.*an object"),
        (lambda: Capacity(float("inf")), "factor=inf"),
        (lambda: Capacity("2"), "factor='2'"),
        (lambda: RaggedAllToAll(True), "buffer_factor=True"),
        (lambda: ExpertParallel(Sorted(), RaggedAllToAll(), data_axes="fsdp"), "a tuple"),
        (lambda: nnxmoe.BlockedMatmul(0), "block=0"),
        (lambda: nnxmoe.Strategy(remat=nnxmoe.Remat), r"Strategy\(remat=.*such as Remat\(\)"),
        (lambda: nnxmoe.Strategy(stacking="yes"), "stacking='yes'"),
        (lambda: nnxmoe.Strategy(compute_dtype="int8"), "floating-point"),
        (lambda: nnxmoe.Strategy(reduce_dtype="int8"), "reduce_dtype.*floating-point"),
        (lambda: nnxmoe.Strategy(mesh="expert=8"), "nnxmoe.make_mesh"),
        (lambda: nnxmoe.Strategy(rules={**nnxmoe.RULES, "bogus": "fsdp"}), "'bogus'"),
        (lambda: nnxmoe.Strategy(rules={"embed": None}), "'[a-z_]+' is missing .* all logical axes"),
        (lambda: nnxmoe.Strategy(rules={**nnxmoe.RULES, "embed": 3}), "'embed' -> 3"),
        (lambda: nnxmoe.Strategy(rules={**nnxmoe.RULES, "embed": ("fsdp", 3)}), "a tuple of names"),
        (lambda: nnxmoe.make_mesh(fsdp="2"), "fsdp=.2.*pass integers >= 1"),
        (lambda: nnxmoe.make_mesh(fsdp=99, expert=-1), "need a multiple of 99 devices, but there are"),
        (lambda: Chunked(Sorted, 2), r"Chunked\(inner=.*pass an object such as Sorted\(\)"),
        (
            lambda: BlockwiseAttention(nnxmoe.ReferenceAttention),
            r"BlockwiseAttention\(inner=.*pass an object such as ReferenceAttention\(\)",
        ),
        (lambda: nnxmoe.Strategy(dispatch=Sorted), r"Strategy\(dispatch=.*pass an object such as Sorted\(\)"),
        (lambda: BlockwiseAttention(blocks=True), r"BlockwiseAttention\(blocks=True\): pass a positive integer"),
        (
            lambda: nnxmoe.AlignedMatmul(nnxmoe.BlockedMatmul(), 1.5),
            r"AlignedMatmul\(block=1\.5\): pass a positive integer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_one()


def test_equal_strategies_compare_equal() -> None:
    same = [nnxmoe.Strategy(compute_dtype=kind) for kind in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))]
    assert len(set(same)) == 1 and same[0] != nnxmoe.Strategy()


@pytest.mark.slow
def test_model_reports_drops() -> None:
    tokens = random_tokens(2, 12)
    for factor, lossless in ((0.5, False), (8.0, True)):
        model = build_tiny("mixtral", nnxmoe.Strategy(dispatch=Capacity(factor)))
        out = model(tokens, return_routing=True)
        assert out.dispatch.keys() == out.routing.keys()
        assert (sum(int(info.dropped) for info in out.dispatch.values()) == 0) == lossless
        assert all(int(info.load.sum()) == tokens.size * 2 for info in out.dispatch.values())
    assert model(tokens).dispatch is None


@pytest.mark.slow
def test_expert_parallel_without_a_mesh_equals_its_inner_dispatch() -> None:
    x, valid, _ = scenarios()["padding"]
    for inner in (Sorted(), Dense(), Capacity(0.5)):
        ours, theirs = (
            make(way, "softmax", None)(x, of_valid(valid)) for way in (ExpertParallel(inner, RingOfExperts()), inner)
        )
        assert np.array_equal(ours[0], theirs[0]) and ours[1].dispatch.dropped == theirs[1].dispatch.dropped
    assert not np.asarray(make(RAGGED, "softmax", None)(x, of_valid(valid))[0])[~np.asarray(valid)].any(), (
        "padding reaches no expert"
    )
    assert make(RAGGED, "sigmoid groups", None).router.bias.__class__ is RouterBias
