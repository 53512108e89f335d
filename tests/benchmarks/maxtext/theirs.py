"""Worker for MaxText's training step, which uses the functions of MaxText's trainer and ``train_compile.py``."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding, train_utils

from tests.benchmarks.maxtext import worker
from tests.benchmarks.maxtext.cases import Case

BASE = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
RUN = (
    "run_name=x base_output_directory=x enable_checkpointing=false dataset_type=synthetic steps=150 jax_cache_dir= "
    "enable_tensorboard=false log_config=false skip_jax_distributed_system=true enable_goodput_recording=false "
    "monitor_goodput=false"
)
FIELDS = ("inputs", "targets", "inputs_segmentation", "inputs_position", "targets_segmentation", "targets_position")


def prepare(case: Case) -> tuple[worker.Lower, Any]:
    """Prepare the step for the TPU slice, as ``train_compile.py`` does. See `worker.main`."""
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_spmd_rng_bit_generator_unsafe=true"
    config = _config(case)
    mesh = train_compile.get_topology_mesh(config)
    arguments, named, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    state_shardings = sharding.build_zero1_input_state_mesh_shardings(config, state, params)
    data_sharding = sharding.get_input_data_sharding(config, mesh)
    step, inputs, outputs, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data_sharding, state_shardings, model, config, params
    )
    run = jax.jit(step, in_shardings=inputs, out_shardings=outputs, static_argnums=static, donate_argnums=donated)

    def lower() -> Any:
        with _context(mesh, config):
            return run.lower(*arguments, **named)

    return lower, mesh


def start(case: Case, folder: Path) -> tuple[worker.Lower, worker.Advance]:
    """Start training on the CPU, and write the initial weights to the folder. See `worker.main`."""
    config = _config(case)
    _, _, shardings, _, mesh, *_, training = train_utils.setup_train_loop(config, None)
    parts = nnx.to_flat_state(nnx.state(training.model))
    weights = {
        "/".join(map(str, path)): np.asarray(variable.get_value(), np.float32)
        for path, variable in parts
        if isinstance(variable, nnx.Param) or type(variable).__name__ == "MoEBiasVar"
    }
    np.savez(folder / worker.WEIGHTS, **weights)
    graph, state = nnx.split(training)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, train.eval_step, None, params
    )
    values = worker.tokens(case)
    batch = dict(zip(FIELDS, (*values, *values[2:]), strict=True))
    batch = jax.device_put(batch, sharding.get_input_data_sharding(config, mesh))

    def lower() -> Any:
        with _context(mesh, config):
            return step.lower(state, batch)

    def advance(compiled: Any) -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        return float(metrics["scalar"]["learning/loss"])

    return lower, advance


def _config(case: Case) -> Any:
    return pyconfig.initialize(["", BASE, *RUN.split(), *case.maxtext_flags])


@contextlib.contextmanager
def _context(mesh: Any, config: Any) -> Iterator[None]:
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        yield


if __name__ == "__main__":
    worker.main(prepare, start, ["jax", "flax", "optax", "libtpu", "maxtext"])
