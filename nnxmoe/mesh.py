"""Create device meshes with the mesh axes of nnxmoe."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from nnxmoe.axes import MESH_AXES, AnyMesh
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, check_positive


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    *,
    pipe: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
    across: str | None = None,
) -> Mesh:
    """Create a device mesh with the axes ``pipe, data, fsdp, context, expert, tensor``.

    ``pipe``, ``data``, ``fsdp`` and ``expert`` shard the rows of a batch. ``context`` shards the tokens of each row.
    On TPUs, `jax.experimental.mesh_utils` maps the mesh to the torus.

    Args:
        data, fsdp, expert, tensor, pipe, context: Size of each axis. One size may be -1 to use all remaining devices.
        devices: Devices of the mesh. Defaults to all devices.
        across: Axis that spans hosts or slices. It is the outermost axis in the order of the devices. Defaults to the
            first axis of size > 1.

    Raises:
        ValueError: If an argument is invalid, or the product of the sizes is not the number of devices.
    """
    sizes: dict[str, int] = dict(zip(MESH_AXES, (pipe, data, fsdp, context, expert, tensor), strict=True))
    device_array = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    if not device_array.size:
        raise ValueError("devices is empty: pass at least one device, such as jax.devices()[:1]")
    for device in device_array.flat:
        if not hasattr(device, "platform"):
            raise ValueError(f"devices contains {short(device)}: pass JAX devices, such as jax.devices()[:4]")
    counts = {name: as_integer(size, -1) for name, size in sizes.items()}
    open_axes = [name for name, size in counts.items() if size == -1]
    if len(open_axes) > 1 or not all(counts.values()):
        text = ", ".join(f"{name}={short(size)}" for name, size in sizes.items())
        raise ValueError(f"mesh sizes {text}: pass integers >= 1. One size may be -1 to use all remaining devices")
    sizes = {name: size for name, size in counts.items() if size is not None}
    fixed_size = math.prod(size for size in sizes.values() if size != -1)
    if device_array.size % fixed_size or (device_array.size != fixed_size and not open_axes):
        multiple = "a multiple of " if open_axes else ""
        raise ValueError(f"mesh sizes {sizes} need {multiple}{fixed_size} devices, but there are {device_array.size}")
    if open_axes:
        sizes[open_axes[0]] = device_array.size // fixed_size
    if across is not None and across not in MESH_AXES:
        raise ValueError(f"across={across!r} is not a mesh axis; the axes are {', '.join(MESH_AXES)}")
    is_torus = device_array.flat[0].platform == "tpu" and device_array.size > 1
    layout = _torus_layout(device_array, sizes, across) if is_torus else _flat_layout(device_array, sizes, across)
    return Mesh(layout, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _flat_layout(devices: np.ndarray, sizes: Mapping[str, int], across: str | None) -> np.ndarray:
    """Arrange the devices in order, with ``across`` as the outermost axis."""
    first = 0 if across is None else MESH_AXES.index(across)
    order = [MESH_AXES[first], *MESH_AXES[:first], *MESH_AXES[first + 1 :]]
    return np.moveaxis(devices.reshape([sizes[axis] for axis in order]), 0, first)


def _torus_layout(devices: np.ndarray, sizes: Mapping[str, int], across: str | None) -> np.ndarray:
    """Arrange TPUs so that neighbors along a mesh axis are neighbors in the torus. ``across`` spans the slices."""
    shape = [sizes[axis] for axis in MESH_AXES]
    slices = len({getattr(device, "slice_index", 0) for device in devices.flat})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, list(devices.flat), allow_split_physical_axes=True)
    axis = across or next((axis for axis in MESH_AXES if sizes[axis] > 1), MESH_AXES[0])
    if sizes[axis] % slices:
        raise ValueError(
            f"mesh sizes {dict(sizes)}: {axis!r} spans {slices} slices. Set its size to a multiple of {slices}, or "
            "pass a different axis as across=…"
        )
    slice_counts = [slices if name == axis else 1 for name in MESH_AXES]
    slice_shape = [size // count for size, count in zip(shape, slice_counts, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        slice_shape, slice_counts, list(devices.flat), allow_split_physical_axes=True
    )


def mesh_sizes(mesh: str | Mapping[str, int] | AnyMesh) -> dict[str, int]:
    """Convert a mesh, a mapping or text such as ``fsdp=4,expert=8`` to a dict of axis sizes.

    Raises:
        ValueError: If ``mesh`` has an unsupported type, is malformed, or has a size that is not a positive integer.
    """
    if isinstance(mesh, str):
        pairs = [tuple(map(str.strip, part.partition("=")[::2])) for part in mesh.split(",")]
        sizes = {name: int(size) for name, size in pairs if re.fullmatch("[1-9][0-9]{0,5}", size)}
        if len(sizes) < len(pairs):
            raise ValueError(f"mesh {short(mesh)}: pass axes and sizes such as 'fsdp=4,expert=8'")
    elif isinstance(mesh, Mapping | Mesh | AbstractMesh):
        sizes = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    else:
        raise ValueError(
            f"mesh {short(mesh)}: pass axes and sizes, such as 'fsdp=4,expert=8' or {{'fsdp': 4, 'expert': 8}}"
        )
    return {axis: check_positive("mesh", axis, size) for axis, size in sizes.items()}


def abstract_mesh(mesh: str | Mapping[str, int] | AnyMesh) -> AbstractMesh:
    """Create a mesh without devices, for planning. Omitted axes have size 1.

    Args:
        mesh: Axis sizes; see `mesh_sizes`.

    Raises:
        ValueError: If an axis is unknown or ``mesh`` is malformed.
    """
    sizes = mesh_sizes(mesh)
    for name in sizes:
        if name not in MESH_AXES:
            raise ValueError(f"{name!r} is not a mesh axis; the axes are {', '.join(MESH_AXES)}")
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
