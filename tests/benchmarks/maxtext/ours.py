"""Worker for nnxmoe's training step."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe.apps.planning.child import tpu_slice
from nnxmoe.convert import maxtext
from nnxmoe.models import model_class
from nnxmoe.sharding import batch_axes
from nnxmoe.train import Step
from tests.benchmarks.maxtext import worker
from tests.benchmarks.maxtext.cases import TOPOLOGY, Case

FIELDS = ("tokens", "targets", "segment_ids", "positions")


def mesh_of(case: Case, devices: Any = None) -> Mesh:
    """Return the mesh of the case over ``devices``. Defaults to all devices."""
    sizes: dict[str, Any] = dict(case.mesh)
    return nnxmoe.make_mesh(**sizes, devices=devices)


def strategy(case: Case, mesh: Any, platform: str) -> nnxmoe.Strategy:
    """Return the platform's strategy with scanned layers, the case's dispatch and the rules of `train.fit`."""
    return dataclasses.replace(
        nnxmoe.Strategy.auto(platform),
        dispatch=case.dispatch,
        stacking=nnxmoe.Scanned(),
        remat=nnxmoe.Remat() if case.remat else None,
        mesh=mesh,
        rules=nnxmoe.TRAINING_RULES,
    )


def optimizer() -> optax.GradientTransformation:
    """Return MaxText's AdamW with gradient clipping, and the learning-rate warm-up of a run with 150 steps."""
    adam = optax.adamw(optax.linear_schedule(0.0, 3e-5, 15), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def abstract_step(case: Case, mesh: Any, platform: str) -> tuple[Step, dict[str, jax.ShapeDtypeStruct]]:
    """Return the step of an abstract model, and an abstract batch."""
    config = case.config
    model = model_class(config)(config, strategy(case, mesh, platform), rngs=None, dtype=jnp.dtype(case.dtype))
    rows = jax.ShapeDtypeStruct((case.rows, case.length), jnp.int32)
    return Step(model, optimizer()), dict.fromkeys(FIELDS, rows)


def prepare(case: Case) -> tuple[worker.Lower, Mesh]:
    """Prepare the step for the TPU slice. See `worker.main`."""
    mesh = mesh_of(case, tpu_slice(TOPOLOGY))
    step, batch = abstract_step(case, mesh, "tpu")
    step.shapes()  # traces the state before lowering is timed, as in ``theirs.py``
    return lambda: step.lower(batch), mesh


def start(case: Case, folder: Path) -> tuple[worker.Lower, worker.Advance]:
    """Start training on the CPU, with MaxText's initial weights if the folder contains them. See `worker.main`."""
    mesh = mesh_of(case) if case.mesh else None
    cpu_strategy = dataclasses.replace(strategy(case, mesh, "cpu"), compute_dtype=jnp.dtype(case.dtype))
    step = Step(_model(case, cpu_strategy, folder / worker.WEIGHTS), optimizer())
    rows = None if mesh is None else NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    batch = jax.device_put(dict(zip(FIELDS, worker.tokens(case), strict=True)), rows)
    state = step.init()

    def advance(compiled: Any) -> float:
        nonlocal state
        state, report = compiled(state, batch)
        jax.block_until_ready((state, report))
        return float(report.losses.total)

    return lambda: step.lower(batch), advance


def _model(case: Case, cpu_strategy: nnxmoe.Strategy, weights: Path) -> nnxmoe.CausalLM:
    if not weights.exists():
        return model_class(case.config)(case.config, cpu_strategy, rngs=nnx.Rngs(0))
    # MaxText's NNX models store the router bias as (layers, experts). MaxText's checkpoints store (experts, layers).
    tree = {f"params/{name}": a.T if name.endswith("gate/bias") else a for name, a in np.load(weights).items()}
    return maxtext.from_tree(tree, case.config, cpu_strategy)


if __name__ == "__main__":
    worker.main(prepare, start, ["jax", "flax", "optax", "libtpu", "tokamax"])
