"""Child process of `nnxmoe.apps.planning.compilation` that compiles a step.

Usage: ``python -m nnxmoe.apps.planning.child JOB PROGRAM``.
"""

import dataclasses
import math
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxmoe.apps.planning.compilation import CompileJob, Program
from nnxmoe.apps.planning.hlo import collectives
from nnxmoe.apps.planning.operations import counted
from nnxmoe.apps.planning.torus import closed_rings
from nnxmoe.mesh import make_mesh
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.stack import ScannedStack
from nnxmoe.models import model_class
from nnxmoe.runtime.extras import install_command
from nnxmoe.runtime.hardware import CPU, TABLE, TPU
from nnxmoe.sharding import batch_axes
from nnxmoe.train.loop.step import Step

# NVIDIA GPU -> cores, major compute capability, GHz, bytes of L2.
_GPUS = {"h100": (132, 9, 1.98, 50 * 2**20), "h200": (132, 9, 1.98, 50 * 2**20), "b200": (148, 10, 1.965, 126 * 2**20)}


def devices(job: CompileJob) -> list[Any]:
    """Return the devices to compile for.

    Raises RuntimeError if the compiler is missing. The message names the extra to install.
    """
    if job.platform == CPU:
        return jax.devices("cpu")
    from jax.experimental import topologies

    try:
        if job.platform == TPU:
            slices = 1 if job.work.across is None else job.mesh[job.work.across]
            return tpu_slice(job.device, slices)
        count = math.prod(job.mesh.values())
        node = min(8, count)
        shape, target = f"{count // node}x1x{node}", _gpu_target(job.device)
        return topologies.get_topology_desc(platform="cuda", topology=shape, target_config=target).devices
    except (RuntimeError, ImportError, KeyError) as error:
        extra = "plan-tpu" if job.platform == TPU else "plan-gpu"
        raise RuntimeError(f"Error: no compiler for {job.device} ({install_command(extra)}): {error}") from error


def tpu_slice(topology: str, slices: int = 1) -> list[Any]:
    """Return compile-only devices of TPU slices. The slices need not be attached.

    The compiler assumes open axes unless ``wrap`` marks them as closed rings. Along open axes, it replaces some
    all-gathers with all-reduces, which transfer twice the bytes.

    Args:
        topology: TPU generation and slice shape, such as ``v5p:4x4x4``.
        slices: Number of slices.
    """
    from jax.experimental import topologies

    kind, _, shape = topology.partition(":")
    rings = closed_rings([int(size) for size in shape.split("x")])
    # On v4 and v5p, the two cores of a chip are one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind in ("v4", "v5p") else {}
    options |= {"topology_name": topology, "num_slices": slices, "wrap": (*rings, *[False] * (3 - len(rings)))}
    return topologies.get_topology_desc(platform="tpu", **options).devices


def _gpu_target(name: str) -> str:
    """Return XLA's target config of an NVIDIA GPU, to compile without the GPU.

    The fields are from openxla/xla, xla/backends/gpu/target_config/specs. The sizes are the sizes that CUDA
    reports. Raises KeyError for an unknown name.
    """
    cores, major, clock, l2 = _GPUS[name]
    sizes = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": 228 * 2**10,
        "shared_memory_per_block_optin": 227 * 2**10,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(TABLE[name].bandwidth),
        "l2_cache_size": l2,
        "clock_rate_ghz": clock,
        "device_memory_size": int(TABLE[name].memory),
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    fields = "\n".join(f"  {field}: {value}" for field, value in sizes.items())
    return (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 }}\ndevice_description_str: "NVIDIA {name.upper()}"\n'
    )


def traced(job: CompileJob, mesh: Mesh) -> Any:
    """Trace the step with abstract, sharded arguments."""
    run, arguments = step(job, mesh)
    with jax.default_device(mesh.devices.flat[0]):  # kernels check the capabilities of the default device
        return run.trace(*arguments)


def step(job: CompileJob, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted step and its abstract, sharded arguments."""
    strategy = dataclasses.replace(job.strategy, mesh=mesh)
    model = model_class(job.config)(job.config, strategy, rngs=None, dtype=jnp.bfloat16)
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh) or None))
    if not job.work.train:
        return _decoding(model, job, rows)
    training_step = Step(model, optax.adamw(1e-4), accumulate=job.work.accumulate)
    batch = {"tokens": jax.ShapeDtypeStruct((job.work.batch, job.work.seq), jnp.int32)}
    return training_step.jitted, (training_step.shapes(), training_step.batch_shapes(batch))


def placed(model: CausalLM) -> tuple[Any, Any]:
    """Split an abstract model into graph definition and state, and set the sharding of every parameter."""
    graph, state = nnx.split(model)
    flat = [
        (path, variable.replace(_at(model.strategy.sharding_of(variable))(variable.get_value())))
        for path, variable in nnx.to_flat_state(state)
    ]
    return graph, nnx.from_flat_state(flat)


def _decoding(model: CausalLM, job: CompileJob, rows: NamedSharding) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted decoding step and its abstract arguments.

    The step decodes one token per row with a full cache, and updates the cache in place.
    """
    graph, state = placed(model)
    cache = jax.eval_shape(lambda: model.empty_cache(job.work.batch, job.work.seq))
    stacked_rows = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
    layers = tuple(
        jax.tree.map(_at(stacked_rows if isinstance(stack, ScannedStack) else rows), cache_layers)
        for stack, cache_layers in zip(model.stacks, cache.layers, strict=True)
    )
    cache = dataclasses.replace(jax.tree.map(_at(rows), cache), layers=layers)
    tokens = jax.ShapeDtypeStruct((job.work.batch, 1), jnp.int32, sharding=rows)

    def decode(state: Any, tokens: Any, cache: Any) -> Any:
        out = nnx.merge(graph, state)(tokens, cache=cache)
        return jnp.argmax(out.logits, axis=-1), out.cache

    return jax.jit(decode, donate_argnums=2), (state, tokens, cache)


def _at(sharding: NamedSharding | None) -> Any:
    return lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def program(job: CompileJob) -> Program:
    """Compile the step of a job and read its memory and collectives from the compiled program."""
    mesh_devices = devices(job)
    sizes: dict[str, Any] = dict(job.mesh)
    mesh = make_mesh(**sizes, devices=mesh_devices, across=job.work.across)
    traced_step = traced(job, mesh)
    operations, start = counted(traced_step.jaxpr.jaxpr), time.perf_counter()
    with jax.default_device(mesh.devices.flat[0]):  # as in `traced`
        executable = traced_step.lower().compile()
    memory: Any = executable.memory_analysis()
    return Program(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        tuple(collectives(executable.as_text(), job.mesh, job.work.across)),
        operations,
        time.perf_counter() - start,
    )


if __name__ == "__main__":
    given, made = map(Path, sys.argv[1:])
    made.write_bytes(pickle.dumps(program(pickle.loads(given.read_bytes()))))
