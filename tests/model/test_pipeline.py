"""Layers in pipeline stages compute what one device computes with gradient accumulation over the same microbatches."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import (
    Capacity,
    Dense,
    ExpertParallel,
    Pipeline,
    RaggedAllToAll,
    RingOfExperts,
    Scanned,
    Sorted,
    Strategy,
    train,
)
from nnxmoe.apps.planning.hlo import collectives
from nnxmoe.convert import maxtext
from nnxmoe.models import DeepSeekV3, Mixtral, config_from_hf
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.step import Step
from tests.support.tiny import TINY

B, T = 16, 8
STEPS, RATE = 2, 0.3
WAYS: dict[str, Any] = {
    "ragged": ExpertParallel(Sorted(), RaggedAllToAll()),
    "ring": ExpertParallel(Sorted(), RingOfExperts()),
    "sorted": Sorted(),
    "capacity": Capacity(1.0),
    "dense": Dense(),
}
SMALL = {"hidden_size": 16, "vocab_size": 64, "intermediate_size": 24}
DEEPSEEK = {"q_lora_rank": 16, "n_routed_experts": 12, "num_hidden_layers": 4, "first_k_dense_replace": 1}


def config(kind: str, layers: int = 4) -> Any:
    """Mixtral with four experts, or DeepSeek-V3 with a dense layer before ``layers - 1`` with experts."""
    own = DEEPSEEK if kind == "deepseek_v3" else {"num_local_experts": 4}
    return config_from_hf({**TINY[kind], **SMALL, **own, "num_hidden_layers": layers})


def model_of(kind: str, strategy: Strategy, layers: int = 4) -> Any:
    return (DeepSeekV3 if kind == "deepseek_v3" else Mixtral)(config(kind, layers), strategy, rngs=nnx.Rngs(0))


def batch() -> dict[str, np.ndarray]:
    """Packed documents, with padding at the end of the rows."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (B, T)), axis=1)[:, ::-1]
    return {"tokens": rng.integers(0, 64, (B, T)), "segment_ids": segments}


def rows_of_parts(axes: dict[str, int], parts: int) -> np.ndarray:
    """Rows in an order in which ``accumulate=parts`` cuts them into the microbatches of the mesh: part m has the rows
    m, m + parts, …"""
    stages = axes["pipe"]
    over = math.prod(size for axis, size in axes.items() if axis not in ("pipe", "tensor"))
    cut = np.arange(B).reshape(stages, over, parts // stages, -1).transpose(0, 2, 1, 3)
    return cut.reshape(parts, -1).T.reshape(-1)


def trained(kind: str, strategy: Strategy, parts: int, rows: np.ndarray, layers: int) -> Any:
    """Losses of each step, the trained parameters, and the last loads with the program; ``parts``: accumulated.

    With six layers some are left over, whose auxiliary losses are those of the whole batch: then there are none.
    """
    weights = {} if layers == 6 else {"balance": "balance", "router_z_loss": "router_z"}
    objective = train.Objective(**dict.fromkeys(weights, 0.02))
    options = {"accumulate": parts, "bias_rate": 0.01 if kind == "deepseek_v3" else 0.0}
    step = Step(model_of(kind, strategy, layers), optax.sgd(RATE), objective, **options)
    state, found = step.init(), []
    for _ in range(STEPS):
        state, report = step.run(state, put_batch({name: a[rows] for name, a in batch().items()}, step))
        losses = report.losses
        found.append([losses.total, losses.cross_entropy, *(getattr(losses, name) for name in weights.values())])
    text = step.program(state, put_batch(batch(), step)).as_text()
    saved = step.saved(state)
    arrays = {name: np.asarray(a) for name, a in {**saved["params"], **saved["moving"]}.items()}
    return np.array(found), arrays, (np.asarray(losses.load), text)


@functools.lru_cache(maxsize=8)
def on_one_device(kind: str, way: str, parts: int, rows: tuple[int, ...], layers: int) -> Any:
    inner = getattr(WAYS[way], "inner", WAYS[way])
    return trained(kind, Strategy(stacking=Scanned(), dispatch=inner), parts, np.array(rows), layers)


def compared(kind: str, way: str, parts: int, layers: int, axes: dict[str, int]) -> dict[str, Any]:
    """The pipeline's errors against one device, and the collectives of its program."""
    mesh, remat = nnxmoe.make_mesh(**axes), None if way == "ring" else nnxmoe.Remat()
    strategy = Strategy(pipeline=Pipeline(parts), mesh=mesh, dispatch=WAYS[way], remat=remat)
    losses, arrays, (load, text) = trained(kind, strategy, 1, np.arange(B), layers)
    rows = tuple(rows_of_parts(axes, parts).tolist())
    wanted, plain, (counted, _) = on_one_device(kind, way, parts, rows, layers)
    moved = collectives(text, dict(mesh.shape))
    head = SMALL["vocab_size"] * SMALL["hidden_size"] * 4 // axes.get("fsdp", 1)  # gradients added up over all axes
    gathered = [one.bytes for one in moved if "pipe" in one.axes and one.kind.startswith("all-gather")]
    gathered = [size for size in gathered if size != head]
    return {
        "losses": float((np.abs(losses - wanted) / np.maximum(1, np.abs(wanted))).max()),
        "parameters": max(float(np.abs(whole(arrays, name) - a).max()) for name, a in plain.items()),
        "load": bool((load == counted).all()) and int(load.sum()),
        "permutes": len(re.findall(r" collective-permute(?:-start)?\(.*/ppermute\"", text)),
        "turns": sum(one.times for one in moved if one.axes == ("pipe",) and one.kind == "collective-permute"),
        "gathered": max(gathered, default=0),
    }


def whole(arrays: dict[str, Any], name: str) -> np.ndarray:
    """A stacked parameter, with those of the layers left over at the end."""
    rest = arrays.get(name.replace(".layer.", ".rest.layer.", 1)) if ".layer." in name else None
    return arrays[name] if rest is None else np.concatenate([arrays[name], rest])


MESHES: dict[str, tuple[str, str, int, int, dict[str, int]]] = {
    "pipe2 fsdp2 expert2, ragged": ("mixtral", "ragged", 4, 4, {"pipe": 2, "fsdp": 2, "expert": 2}),
    "pipe4 tensor2": ("mixtral", "sorted", 4, 4, {"pipe": 4, "tensor": 2}),
    "pipe4 fsdp2, two layers left over": ("mixtral", "sorted", 8, 6, {"pipe": 4, "fsdp": 2}),
    "pipe2 expert4, ring": ("mixtral", "ring", 2, 4, {"pipe": 2, "expert": 4}),
    "pipe2 data2 expert2, capacity": ("mixtral", "capacity", 4, 4, {"pipe": 2, "data": 2, "expert": 2}),
    "pipe2 fsdp4, dense": ("mixtral", "dense", 4, 4, {"pipe": 2, "fsdp": 4}),
    "pipe4 expert2, after a dense layer": ("deepseek_v3", "ragged", 4, 6, {"pipe": 4, "expert": 2}),
    "pipe2 fsdp2 expert2, four layers after a dense one": (
        "deepseek_v3", "ring", 4, 5, {"pipe": 2, "fsdp": 2, "expert": 2},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow if i else ()) for i, mesh in enumerate(MESHES)]
)
def test_training_equals_accumulation_on_one_device(eight: Callable[..., Any], mesh: str) -> None:
    """Two steps; the program has one permute per turn, forward and backward, and one more each after the last turn.
    Over the stages integers are gathered, masks and loads, but no activations, not even those of a microbatch."""
    found, (_, _, parts, _, axes) = eight(compared, *MESHES[mesh]), MESHES[mesh]
    assert found["losses"] < 1e-6 and found["parameters"] < 1e-6 and found["load"], found
    assert found["permutes"] == 4 and found["turns"] == 2 * Pipeline(parts).num_turns(axes["pipe"]) + 2
    over = math.prod(size for axis, size in axes.items() if axis not in ("pipe", "tensor"))
    assert found["gathered"] < B // parts // over * T * SMALL["hidden_size"] * 4


def outputs(axes: dict[str, int], staged: bool) -> tuple[float, bool]:
    """Of a model of five layers: the largest error of logits, hidden states and routing, and whether the chosen experts
    and their loads are those of one device."""
    mesh, way = nnxmoe.make_mesh(**axes), WAYS["ragged"]
    other = Strategy(pipeline=Pipeline(4) if staged else None, stacking=Scanned(), mesh=mesh, dispatch=way)
    made = [
        model_of("mixtral", strategy, 5)(**batch(), return_routing=True, return_hidden=True)
        for strategy in (Strategy(stacking=Scanned()), other)
    ]
    one, several = (jax.device_get((out.logits, out.hidden, dict(out.routing or {}))) for out in made)
    loads = [[info.load.tolist() for info in dict(out.dispatch or {}).values()] for out in made]
    errors = [np.abs(a.astype(float) - b).max() for a, b in zip(*map(jax.tree.leaves, (one, several)), strict=True)]
    same = loads[0] == loads[1] and all((one[2][i].experts == several[2][i].experts).all() for i in range(5))
    return float(max(errors)), same


@pytest.mark.parametrize("staged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_outputs_equal_those_of_one_device(eight: Callable[..., Any], staged: bool) -> None:
    """Row by row and layer by layer, one layer left over; without a pipeline the axis splits the batch only."""
    error, same = eight(outputs, {"pipe": 2, "fsdp": 2, "expert": 2}, staged)
    assert error < 2e-5 and same


def values(model: Any) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.slow
def test_parameters_do_not_depend_on_the_stages(tmp_path: Path) -> None:
    """Without a mesh a model with stages computes whole batches; its layers have the values of any other model."""
    staged = model_of("mixtral", Strategy(pipeline=Pipeline(8, stages=4)), 6)
    scanned, unrolled = (model_of("mixtral", Strategy(stacking=way), 6) for way in (Scanned(), nnxmoe.Unrolled()))
    assert [stack.depth for stack in staged.stacks] == [6] and staged.stacks[0].rest.depth == 2
    mine, theirs = values(staged), values(scanned)
    assert all((whole(mine, name) == array).all() for name, array in theirs.items())
    apart, wanted = values(nnxmoe.unscan(staged)), values(unrolled)
    assert apart.keys() == wanted.keys() and all((apart[name] == array).all() for name, array in wanted.items())
    tokens = batch()["tokens"][:, :5]
    np.testing.assert_array_equal(staged(tokens).logits, scanned(tokens).logits)
    nnxmoe.save_pretrained(staged, tmp_path)
    again = values(nnxmoe.from_pretrained(tmp_path, strategy=Strategy(pipeline=Pipeline(6, stages=3))))
    assert all((whole(again, name) == array).all() for name, array in theirs.items())
    trees = [maxtext.to_tree(model) for model in (staged, scanned)]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.slow
def test_models_in_stages_generate_on_one_device() -> None:
    """With a cache for each of their two stacks, or after `unscan`."""
    staged = model_of("mixtral", Strategy(pipeline=Pipeline(8, stages=2)), 3)
    prompt = batch()["tokens"][:2, :5]
    out = staged(prompt, cache=staged.empty_cache(2, 8))
    np.testing.assert_allclose(out.logits, staged(prompt).logits, atol=2e-5)
    plain = nnxmoe.generate(model_of("mixtral", Strategy(), 3), prompt, max_new_tokens=3)
    np.testing.assert_array_equal(nnxmoe.generate(staged, prompt, max_new_tokens=3), plain)


# Checkpoints and adapters


def resumed(folder: str) -> list[Any]:
    """Whether a run on four stages is read bit for bit on other meshes and on one device, and goes on there; and the
    message about one that has other arrays, because its number of stages was not given."""
    data, options = [batch()] * 4, {"optimizer": optax.adam(1e-2)}

    def fit(steps: int, axes: dict[str, int] | None, where: str = folder, stages: int | None = 4) -> Any:
        mesh = None if axes is None else nnxmoe.make_mesh(**axes)
        at_first = mesh if stages is None else None  # whose stages then count
        strategy = Strategy(pipeline=Pipeline(4, stages=stages), mesh=at_first)
        model = model_of("mixtral", strategy, 6)
        return train.fit(model, data, steps=steps, mesh=mesh, checkpoint=train.Checkpoints(where, every=1), **options)

    first = values(fit(2, {"pipe": 4, "fsdp": 2}).model)
    found = [values(fit(2, axes).model) for axes in ({"pipe": 2, "fsdp": 4}, {"fsdp": 8}, None)]
    assert fit(3, None).history[-1]["step"] == 3
    fit(1, {"pipe": 4, "fsdp": 2}, f"{folder}-by-mesh", None)
    with pytest.raises(ValueError) as raised:
        fit(2, {"pipe": 2, "fsdp": 4}, f"{folder}-by-mesh", None)
    same = [first.keys() == other.keys() and all((first[n] == other[n]).all() for n in first) for other in found]
    return [*same, str(raised.value)]


@pytest.mark.slow
def test_runs_resume_on_meshes_with_other_stages(eight: Callable[..., Any], tmp_path: Path) -> None:
    *same, message = eight(resumed, str(tmp_path / "run"))
    assert same == [True, True, True]
    assert "step_1 does not match" in message and "number of stages, Pipeline(4, stages=…)" in message


def adapted() -> tuple[float, set[str]]:
    """The largest error of adapters trained in stages against one device, and the axes of their parameters."""
    found, axes = [], {"pipe": 2, "expert": 4}
    rows = rows_of_parts(axes, 2)
    for strategy, parts, order in (
        (Strategy(pipeline=Pipeline(2), mesh=nnxmoe.make_mesh(**axes), dispatch=WAYS["ring"]), 1, np.arange(B)),
        (Strategy(stacking=Scanned()), 2, rows),
    ):
        model = model_of("mixtral", strategy)
        train.lora.add(model, rank=2, rngs=nnx.Rngs(1))
        data = [{name: a[order] for name, a in batch().items()}]
        fitted = train.fit(model, data, optimizer=optax.sgd(RATE), steps=3, accumulate=parts)
        found.append((values(fitted.model), fitted.model))
    error = max(float(np.abs(found[0][0][name] - array).max()) for name, array in found[1][0].items())
    first = {v.get_metadata()["out_sharding"][0] for _, v in nnx.to_flat_state(nnx.state(found[0][1].stacks))}
    return error, first


@pytest.mark.slow
def test_adapters_are_trained_in_stages(eight: Callable[..., Any]) -> None:
    error, axes = eight(adapted)
    assert error < 1e-6 and axes == {"stages"}


def parts_together() -> list[tuple[float, ...]]:
    """Losses after two steps, in stages and on one device, of a model with a prediction layer, a dispatch in chunks,
    and a batch that is accumulated in two parts of two microbatches each."""
    found, mesh = [], nnxmoe.make_mesh(pipe=2, fsdp=2, expert=2)
    chunked = nnxmoe.Chunked(WAYS["ragged"], 2)
    fields = {**TINY["deepseek_v3"], **SMALL, **DEEPSEEK, "num_hidden_layers": 5, "num_nextn_predict_layers": 1}
    for strategy, parts in (
        (Strategy(pipeline=Pipeline(2), mesh=mesh, dispatch=chunked), 2),
        (Strategy(stacking=Scanned()), 1),
    ):
        model = DeepSeekV3(config_from_hf(fields), strategy, rngs=nnx.Rngs(0), mtp=True)
        options: dict[str, Any] = {"objective": train.Objective(mtp=0.3), "accumulate": parts, "steps": 2}
        last = train.fit(model, [batch()], optimizer=optax.sgd(RATE), **options).history[-1]
        found.append((last["loss"], last["cross_entropy"], last["mtp"]))
    return found


@pytest.mark.slow
def test_stages_work_with_prediction_layers_chunks_and_accumulation(eight: Callable[..., Any]) -> None:
    staged, plain = eight(parts_together)
    assert staged == pytest.approx(plain, rel=1e-6)


# Refusals


def refusals() -> dict[str, str]:
    """Messages of the ValueErrors raised for what a pipeline cannot do."""
    mesh, tokens = nnxmoe.make_mesh(pipe=4, fsdp=2), batch()["tokens"]
    plain = jax.sharding.Mesh(np.asarray(jax.devices()), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    staged = functools.cache(lambda: model_of("mixtral", Strategy(pipeline=Pipeline(4), mesh=mesh)))
    data = [batch()]
    tries: dict[str, Callable[[], Any]] = {
        "generate": lambda: nnxmoe.generate(staged(), tokens[:, :3], max_new_tokens=2),
        "cache": lambda: staged().empty_cache(8, 16),
        "rows": lambda: staged()(tokens[:8].repeat(3, 0)[:20]),
        "layers": lambda: model_of("mixtral", Strategy(pipeline=Pipeline(4), mesh=mesh), 3),
        "kinds": lambda: model_of("deepseek_v3", Strategy(pipeline=Pipeline(4), mesh=mesh), 4),
        "unrolled": lambda: Strategy(pipeline=Pipeline(4), mesh=mesh, stacking=nnxmoe.Unrolled()),
        "parts": lambda: Strategy(pipeline=Pipeline(6), mesh=mesh),
        "stages": lambda: Strategy(pipeline=Pipeline(4, stages=2), mesh=mesh),
        "mesh": lambda: Strategy(pipeline=Pipeline(4), mesh=plain),
        "rules": lambda: Strategy(pipeline=Pipeline(4), mesh=mesh, rules={**nnxmoe.RULES, "embed": ("fsdp", "pipe")}),
        "moved": lambda: train.fit(
            model_of("mixtral", Strategy(pipeline=Pipeline(4)), 6), data, optimizer=optax.sgd(1), steps=1, mesh=mesh
        ),
    }
    found = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_refusals(eight: Callable[..., Any]) -> None:
    found = eight(refusals)
    for name, message in {
        "generate": "4 pipeline stages cannot decode, because all stages but one would wait: load it on a mesh with",
        "cache": "4 pipeline stages cannot decode",
        "rows": "a batch of 20 rows is not divisible by 4 microbatches of 2 shards each: use a multiple of 8 rows",
        "layers": "the model's longest run of equal layers has 3, fewer than 4 stages. Use a smaller mesh axis 'pipe'",
        "kinds": "longest run of equal layers has 3, fewer than 4 stages",
        "unrolled": "pipeline stages require stacked layers. Use stacking=Scanned()",
        "parts": "Pipeline(microbatches=6, stages=None): the microbatches must be a multiple of 4",
        "stages": "Pipeline(microbatches=4, stages=2): the stages must be a multiple of 4",
        "mesh": "the mesh {'fsdp': 8} has no axis 'pipe'. Use nnxmoe.make_mesh(pipe=…)",
        "rules": "'embed' -> ('fsdp', 'pipe'): with a pipeline, only 'stages' can be sharded over 'pipe'",
        "moved": "6 layers are not divisible by 4 pipeline stages: create the model with Pipeline(4, stages=4)",
    }.items():
        assert message in found.get(name, "taken"), (name, found.get(name))


@pytest.mark.wrong_types
def test_invalid_pipelines() -> None:
    for make, message in (
        (lambda: Pipeline(0), "microbatches=0"),
        (lambda: Pipeline(4, stages=0), "stages=0"),
        (lambda: Strategy(pipeline=4), "use nnxmoe.Pipeline"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_the_bubble_is_what_the_turns_say() -> None:
    pipeline = Pipeline(16)
    assert pipeline.num_turns(4) == 19 and pipeline.bubble(4) == 3 / 19 and pipeline.bubble(1) == 0
    strategy = Strategy(pipeline=pipeline)
    assert strategy.stacking == Scanned() and "Pipeline(microbatches=16" in strategy.explain()
    assert "4 stages; of 19 turns, each stage waits in 3 (16%)" in pipeline.explain(4)
