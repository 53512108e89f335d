"""Look up hardware by name, map mesh axes to a TPU torus, and estimate the time of collectives."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from nnxmoe.config.printable import did_you_mean, short
from nnxmoe.runtime.hardware import GPU, TABLE, TPU, Hardware

_TOPOLOGIES = {"tpu-v4": "v4", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "tpu-7x": "tpu7x"}


def hardware(name: str | Hardware) -> Hardware:
    """Look up hardware by name, such as ``h100``, or ``tpu-v5p:4x8x8`` for a TPU slice with this torus."""
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise ValueError(f"hardware {short(name)}: use a name such as 'h100', or a Hardware")
    base, _, shape = name.lower().partition(":")
    if base not in TABLE or (shape and (TABLE[base].platform != TPU or not re.fullmatch(r"\d+(x\d+){1,2}", shape))):
        suggestion = did_you_mean(base, TABLE) if base not in TABLE else ""
        choices = f"use one of {', '.join(TABLE)}, or for a TPU slice a name such as tpu-v5p:4x8x8"
        raise ValueError(f"hardware {name!r} is not known: {choices}{suggestion}")
    device = TABLE[base]
    if not shape:
        return device
    torus = tuple(int(size) for size in shape.split("x"))
    return dataclasses.replace(device, name=f"{base}:{shape}", torus=torus, topology=f"{_TOPOLOGIES[base]}:{shape}")


def refuse_unheld(device: Hardware, mesh: Mapping[str, int]) -> None:
    """Raise ValueError if the mesh does not fit the torus of a named slice.

    Each mesh axis must be a product of whole physical axes, as in ``jax.experimental.mesh_utils``.
    """
    if not device.torus:
        return
    devices, chips = math.prod(mesh.values()), math.prod(device.torus)
    devices_per_chip = device.dies
    if devices != chips * devices_per_chip:
        raise ValueError(
            f"{device.name} has {chips * devices_per_chip} devices and the mesh {dict(mesh)} {devices}: "
            "change the mesh or the slice"
        )
    physical = [*device.torus, *([devices_per_chip] if devices_per_chip > 1 else [])]
    axis_sizes = [size for size in mesh.values() if size > 1]
    if _held(axis_sizes, [size for size in physical if size > 1]) is None:
        sizes = sorted(
            {math.prod(axes) for n in range(1, len(physical) + 1) for axes in itertools.combinations(physical, n)}
        )
        raise ValueError(
            f"the mesh {dict(mesh)} does not fit the torus {device.name}. Every mesh axis must be a product of whole "
            f"physical axes {'x'.join(map(str, physical))}: use the sizes {', '.join(map(str, sizes))}"
        )


def _held(axis_sizes: Sequence[int], physical: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Partition the physical axes into one group per mesh axis, whose product is the size of the mesh axis.

    Returns the sizes of the physical axes per mesh axis, or `None` if no assignment uses all physical axes.
    """
    if not axis_sizes:
        return [] if all(size == 1 for size in physical) else None
    for count in range(1, len(physical) + 1):
        for indices in itertools.combinations(range(len(physical)), count):
            group = tuple(physical[i] for i in indices)
            if math.prod(group) == axis_sizes[0]:
                groups = _held(axis_sizes[1:], [size for i, size in enumerate(physical) if i not in indices])
                if groups is not None:
                    return [group, *groups]
    return None


@dataclasses.dataclass(frozen=True)
class Route:
    """Connection between the devices of a mesh axis.

    Attributes:
        name: Name of the slowest link.
        near: Number of devices of the axis in one node or slice.
        far: Number of nodes or slices that the axis spans.
        link: Bytes per second and device inside a node or slice.
        network: Bytes per second and device between nodes or slices.
        ring: Length of the longest physical ring of the torus, or 1 for a switch.
    """

    name: str
    near: int
    far: int
    link: float
    network: float
    ring: int = 1


def routes(device: Hardware, mesh: Mapping[str, int], across: str | None = None) -> dict[str, Route]:
    """Return the route of each mesh axis with more than one device.

    The last mesh axis varies fastest in the order of devices. If ``across`` is set, it varies slowest and
    crosses as many nodes as possible. A mesh axis on a torus uses the links of all physical axes that it
    covers. Without a named slice, the torus is as close to a cube as the number of devices allows. A
    physical axis that is not a closed ring has half the rate.
    """
    order = [axis for axis in mesh if axis != across]
    order = order if across is None else [across, *order]
    near, stride = dict[str, int](), 1
    for axis in reversed(order):
        # On GPUs, the axis `across` has one device per node. On TPUs, it may have several devices per slice.
        limit = 1 if axis == across and device.platform == GPU else max(1, device.node // stride)
        near[axis] = math.gcd(mesh[axis], limit) if limit < mesh[axis] else mesh[axis]
        stride *= mesh[axis]
    sizes = {axis: near[axis] for axis in mesh}
    physical = _physical_axes(device, sizes) if device.platform == TPU else {}
    axis_routes = dict[str, Route]()
    for axis, size in mesh.items():
        if size > 1:
            name = "network" if near[axis] < size else "node" if device.platform == GPU else "ICI"
            links = physical.get(axis, ())
            link = sum(device.link if is_ring else device.link / 2 for _, is_ring in links) if links else device.link
            ring = max((length for length, _ in links), default=1)
            axis_routes[axis] = Route(name, near[axis], size // near[axis], link, device.network, ring)
    return axis_routes


def _physical_axes(device: Hardware, sizes: Mapping[str, int]) -> dict[str, list[tuple[int, bool]]]:
    """Map each mesh axis to the physical axes that it covers, as pairs (size, is_closed_ring)."""
    chips = math.prod(sizes.values()) // device.dies or 1
    torus = list(device.torus) if math.prod(device.torus) == chips else _balanced(chips, device.dimensions)
    axis_sizes = {axis: size for axis, size in sizes.items() if size > 1}
    rings = dict(zip(torus, closed_rings(torus), strict=True))
    physical = [size for size in (*torus, device.dies) if size > 1]
    if (groups := _held(list(axis_sizes.values()), physical)) is not None:
        # The two dies of a chip share its links.
        return {
            axis: [(size, rings.get(size, False)) for size in group]
            for axis, group in zip(axis_sizes, groups, strict=True)
        }
    axis_links = dict[str, list[tuple[int, bool]]]()
    for axis, size in axis_sizes.items():
        axis_links[axis] = []
        for i in sorted(range(len(physical)), key=lambda i: -physical[i]):
            if (part := math.gcd(size, physical[i])) > 1:
                axis_links[axis].append((part, part == physical[i] and rings.get(part, False)))
                size, physical[i] = size // part, physical[i] // part
    return axis_links


def closed_rings(torus: Sequence[int]) -> tuple[bool, ...]:
    """Return whether each axis of a TPU slice is a closed ring.

    A 3D slice consists of blocks of 4x4x4 chips. Optical links connect the faces of these blocks. Slices smaller than
    a block have no optical links. In a 2D slice, only an axis with the 16 chips of a full pod is closed.
    """
    if len(torus) == 3:
        return (all(size % 4 == 0 for size in torus),) * 3
    return tuple(size == 16 for size in torus)


def _balanced(count: int, dimensions: int) -> list[int]:
    """Return the sizes of a torus of ``count`` chips, as equal as the prime factors allow."""
    sizes, factor = [1] * dimensions, 2
    factors = list[int]()
    while count > 1:
        while count % factor == 0:
            factors, count = [factor, *factors], count // factor
        factor += 1
    for prime in factors:
        sizes[sizes.index(min(sizes))] *= prime
    return sorted(sizes)


def seconds(kind: str, size: float, axis_routes: Sequence[Route], copies: int = 0) -> float:
    """Estimate the time of a collective in seconds.

    Gathered or reduced data enters each node once, through the network adapters of all devices of the
    node. On a torus, rows of an all-to-all pass through the chips between sender and receiver. Transfers
    inside a node and between nodes overlap.

    Args:
        kind: Type of collective (see `Traffic`).
        size: Bytes that each device receives.
        axis_routes: Routes of the collective's mesh axes.
        copies: Number of experts per token if a token is sent once per node, or 0 if it is sent once per expert.
    """
    near, far = math.prod(route.near for route in axis_routes), math.prod(route.far for route in axis_routes)
    network = min(route.network for route in axis_routes)
    link = (
        sum(route.link for route in axis_routes)
        if max(route.ring for route in axis_routes) > 1
        else min(route.link for route in axis_routes)
    )
    if kind == "collective-permute":
        return size / (network if far > 1 else link)
    total = size / (1 - 1 / (near * far))
    if kind == "all-to-all":
        fraction = far * (1 - (1 - 1 / far) ** copies) / copies if copies else 1.0
        hops = max(1.0, max(route.ring for route in axis_routes) / 4)
        return max(total * (near - 1) / (near * far) * hops / link, total * (1 - 1 / far) * fraction / network)
    return max(total * (1 - 1 / near) / link, total * (1 - 1 / far) / (near * network))
