"""The devices that a command runs on."""

import os
from typing import Any

import jax

import nnxmoe
from nnxmoe.runtime import processes


def mesh_of(mesh: Any, *, connect: bool = False) -> Any:
    """The first devices as a mesh of the sizes of ``--mesh``; None without one. ``connect``: over all processes of a
    job, which are connected without a mesh only if ``JAX_NUM_PROCESSES`` says that there are some."""
    if connect and (mesh is not None or "JAX_NUM_PROCESSES" in os.environ):
        processes.initialize()
    if mesh is None:
        return None
    found = jax.devices()
    if mesh.size > len(found):
        axes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f"--mesh {axes} needs {mesh.size} devices, and JAX finds {len(found)} x {found[0].device_kind}"
        )
    return nnxmoe.make_mesh(**mesh.shape, devices=found if connect else found[: mesh.size])


def text(mesh: Any) -> str:
    """Number and kind of the devices in use, such as ``8 x NVIDIA H100 80GB HBM3``."""
    kind, count = jax.local_devices()[0].device_kind, jax.local_device_count()
    if mesh is not None:
        return f"{mesh.size} x {kind}"
    return kind if count == 1 else f"{kind}, one of {count} (--mesh uses more)"
