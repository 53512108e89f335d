"""Devices that a plan names, the tori that hold a mesh, and the links that mesh axes use."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from nnxmoe.config.printable import did_you_mean
from nnxmoe.runtime.hardware import GPU, TABLE, TPU, Hardware

_TOPOLOGIES = {"tpu-v4": "v4", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "tpu-7x": "tpu7x"}


def hardware(name: str | Hardware) -> Hardware:
    """The row of the table for a name such as ``h100`` or ``tpu-v5p:4x8x8``, which also names a slice's torus."""
    if isinstance(name, Hardware):
        return name
    kind, _, shape = name.lower().partition(":")
    if kind not in TABLE or (shape and (TABLE[kind].platform != TPU or not re.fullmatch(r"\d+(x\d+){1,2}", shape))):
        near = did_you_mean(kind, TABLE) if kind not in TABLE else ""
        known = f"use one of {', '.join(TABLE)}, TPUs as in tpu-v5p:4x8x8"
        raise ValueError(f"hardware {name!r} is not known: {known}{near}")
    found = TABLE[kind]
    if not shape:
        return found
    torus = tuple(int(size) for size in shape.split("x"))
    return dataclasses.replace(found, name=f"{kind}:{shape}", torus=torus, topology=f"{_TOPOLOGIES[kind]}:{shape}")


def refuse_unheld(kind: Hardware, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for a mesh that the torus of a named slice cannot hold: a mesh axis must be a product of whole
    physical axes, as in ``jax.experimental.mesh_utils``."""
    if not kind.torus:
        return
    devices, chips = math.prod(mesh.values()), math.prod(kind.torus)
    per_chip = 2 if kind.name.startswith("tpu-7x") else 1
    if devices != chips * per_chip:
        raise ValueError(f"{kind.name} has {chips * per_chip} devices and the mesh {dict(mesh)} {devices}: change one")
    physical = [*kind.torus, *([per_chip] if per_chip > 1 else [])]
    wanted = [size for size in mesh.values() if size > 1]
    if not _held(wanted, [size for size in physical if size > 1]):
        sizes = sorted(
            {math.prod(some) for n in range(1, len(physical) + 1) for some in itertools.combinations(physical, n)}
        )
        raise ValueError(
            f"the mesh {dict(mesh)} does not lie on the torus {kind.name}: every mesh axis must be a product of whole "
            f"physical axes {'x'.join(map(str, physical))}, so use the sizes {', '.join(map(str, sizes))}"
        )


def _held(wanted: Sequence[int], physical: Sequence[int]) -> bool:
    """Whether the physical axes can be assigned so that each requested size is the product of its axes."""
    if not wanted:
        return not physical or all(size == 1 for size in physical)
    for count in range(1, len(physical) + 1):
        for some in itertools.combinations(range(len(physical)), count):
            if math.prod(physical[i] for i in some) == wanted[0]:
                rest = [size for i, size in enumerate(physical) if i not in some]
                if _held(wanted[1:], rest):
                    return True
    return False


def links(kind: Hardware, mesh: Mapping[str, int], across: str | None = None) -> dict[str, tuple[str, float]]:
    """Mesh axis -> the link it uses, by name and bytes per second, for axes with several devices.

    Devices are numbered with the last mesh axis fastest, and ``across`` slowest if it is given. An axis whose devices
    are not all in one node uses the network.
    """
    order = [axis for axis in mesh if axis != across]
    order = order if across is None else [across, *order]
    found, stride = dict[str, tuple[str, float]](), 1
    for axis in reversed(order):
        stride *= mesh[axis]
        if mesh[axis] > 1:
            near = stride <= kind.node and axis != across
            found[axis] = ("node" if kind.platform == GPU else "ICI", kind.link) if near else ("network", kind.network)
    return found
