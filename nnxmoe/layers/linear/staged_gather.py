"""Gather kernels that are sharded over several mesh axes, in two stages."""

from contextlib import AbstractContextManager

import jax
from flax import nnx
from jaxtyping import Array

from nnxmoe.axes import AnyMesh, axes_of
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import manual_axes, shard_constraint
from nnxmoe.sharding_rules import Rules, axes_per_dimension

_mesh_and_rules = jax.make_user_context(None)  # JAX includes user contexts in the keys of its trace caches


def gather_in_stages(mesh: AnyMesh | None, rules: Rules) -> AbstractContextManager[None]:
    """Return a context in which kernel dimensions that are sharded over several mesh axes are gathered in two stages.

    The first stage gathers over every axis except the first axis. The second stage gathers over the first axis.
    Together, both stages transfer as many bytes as a single all-gather. XLA:TPU (libtpu 0.0.50) replaces an all-gather
    over all devices of a slice with an all-reduce, which transfers twice as many bytes. With two stages, a device
    receives 61 GB instead of 74 GB in a training step of DeepSeek-V3 with five layers on 64 TPU v5p chips (fsdp 8,
    expert 8).
    """
    return _mesh_and_rules(None if mesh is None else (mesh, rules))


def gather_first_stage(variable: nnx.Variable) -> Array:
    """Return the value of a kernel after the first stage of `gather_in_stages`. Outside this context, it is unchanged.

    Gradients are also summed in two stages. The gradient of the output head is passed through, because the loss has
    already summed this gradient.
    """
    if _mesh_and_rules.value is None:
        return variable[...]
    mesh, rules = _mesh_and_rules.value
    axes = axes_of(variable)
    per_dimension = axes_per_dimension(axes, mesh, rules)
    is_manual = any(axis in manual_axes() for mesh_axes in per_dimension for axis in mesh_axes)
    if is_manual or all(len(mesh_axes) < 2 for mesh_axes in per_dimension):
        return variable[...]

    def gather(value: Array) -> Array:
        return shard_constraint(value, mesh, *(mesh_axes[:1] for mesh_axes in per_dimension))

    if "vocab" in axes:
        gather = multilinear(gather, {0: lambda gradient: gradient})
    return gather(variable[...])
