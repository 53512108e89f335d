"""Named devices of a plan, tori that fit a mesh, and the links of mesh axes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from nnxmoe.config.printable import did_you_mean, short
from nnxmoe.runtime.hardware import GPU, TABLE, TPU, Hardware

_TOPOLOGIES = {"tpu-v4": "v4", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "tpu-7x": "tpu7x"}


def hardware(name: str | Hardware) -> Hardware:
    """Return the hardware for a name such as ``h100``, or ``tpu-v5p:4x8x8`` with a slice's torus."""
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise ValueError(f"hardware {short(name)}: give a name such as 'h100', or a Hardware")
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
    """Raise ValueError for a mesh that does not fit the torus of a named slice.

    A mesh axis must be a product of whole physical axes, as in ``jax.experimental.mesh_utils``.
    """
    if not kind.torus:
        return
    devices, chips = math.prod(mesh.values()), math.prod(kind.torus)
    per_chip = kind.dies
    if devices != chips * per_chip:
        raise ValueError(f"{kind.name} has {chips * per_chip} devices and the mesh {dict(mesh)} {devices}: change one")
    physical = [*kind.torus, *([per_chip] if per_chip > 1 else [])]
    wanted = [size for size in mesh.values() if size > 1]
    if _held(wanted, [size for size in physical if size > 1]) is None:
        sizes = sorted(
            {math.prod(some) for n in range(1, len(physical) + 1) for some in itertools.combinations(physical, n)}
        )
        raise ValueError(
            f"the mesh {dict(mesh)} does not lie on the torus {kind.name}: every mesh axis must be a product of whole "
            f"physical axes {'x'.join(map(str, physical))}, so use the sizes {', '.join(map(str, sizes))}"
        )


def _held(wanted: Sequence[int], physical: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the physical axes whose product is each requested size, or None if there is no assignment."""
    if not wanted:
        return [] if all(size == 1 for size in physical) else None
    for count in range(1, len(physical) + 1):
        for some in itertools.combinations(range(len(physical)), count):
            own = tuple(physical[i] for i in some)
            if math.prod(own) == wanted[0]:
                rest = _held(wanted[1:], [size for i, size in enumerate(physical) if i not in some])
                if rest is not None:
                    return [own, *rest]
    return None


@dataclasses.dataclass(frozen=True)
class Route:
    """Connection between the devices of a mesh axis.

    Attributes:
        name: Name of the slowest link.
        near: Number of devices in one node or slice.
        far: Number of nodes or slices.
        link: Bytes per second inside a node or slice.
        network: Bytes per second of each device between nodes or slices.
        ring: Devices of the longest physical ring of a torus, or 1 for a switch.
    """

    name: str
    near: int
    far: int
    link: float
    network: float
    ring: int = 1


def routes(kind: Hardware, mesh: Mapping[str, int], across: str | None = None) -> dict[str, Route]:
    """Return the routes of the mesh axes with several devices.

    The last mesh axis varies fastest in the order of devices. ``across`` varies slowest if it is set,
    and crosses nodes as far as possible. An axis of a torus has the links of all physical axes that it
    covers. Without a named slice, the torus is as cubic as the number of devices allows. A physical
    axis that is not a closed ring has half the rate.
    """
    order = [axis for axis in mesh if axis != across]
    order = order if across is None else [across, *order]
    near, stride = dict[str, int](), 1
    for axis in reversed(order):
        # `across` has one device per node, unless a slice holds all other axes and more.
        inside = 1 if axis == across and kind.platform == GPU else max(1, kind.node // stride)
        near[axis] = math.gcd(mesh[axis], inside) if inside < mesh[axis] else mesh[axis]
        stride *= mesh[axis]
    sizes = {axis: near[axis] for axis in mesh}
    physical = _physical_axes(kind, sizes) if kind.platform == TPU else {}
    found = dict[str, Route]()
    for axis, size in mesh.items():
        if size > 1:
            name = "network" if near[axis] < size else "node" if kind.platform == GPU else "ICI"
            own = physical.get(axis, ())
            link = sum(kind.link if closed else kind.link / 2 for _, closed in own) if own else kind.link
            ring = max((length for length, _ in own), default=1)
            found[axis] = Route(name, near[axis], size // near[axis], link, kind.network, ring)
    return found


def _physical_axes(kind: Hardware, sizes: Mapping[str, int]) -> dict[str, list[tuple[int, bool]]]:
    """Map mesh axes to the sizes of the physical axes they cover, with whether each is a closed ring."""
    chips = math.prod(sizes.values()) // kind.dies or 1
    torus = list(kind.torus) if math.prod(kind.torus) == chips else _balanced(chips, kind.dimensions)
    wanted = {axis: size for axis, size in sizes.items() if size > 1}
    closed = [size % 4 == 0 if kind.dimensions == 3 else size == 16 for size in torus]
    rings = {size: whole for size, whole in zip(torus, closed, strict=True)}
    physical = [size for size in (*torus, kind.dies) if size > 1]
    if (exact := _held(list(wanted.values()), physical)) is not None:
        # The two dies of a chip share its links.
        return {axis: [(size, rings.get(size, False)) for size in own] for axis, own in zip(wanted, exact, strict=True)}
    found = dict[str, list[tuple[int, bool]]]()
    for axis, size in wanted.items():
        found[axis] = []
        for i in sorted(range(len(physical)), key=lambda i: -physical[i]):
            if (part := math.gcd(size, physical[i])) > 1:
                found[axis].append((part, part == physical[i] and rings.get(part, False)))
                size, physical[i] = size // part, physical[i] // part
    return found


def _balanced(count: int, dimensions: int) -> list[int]:
    """Return the sizes of a torus of ``count`` chips, as equal as their prime factors allow."""
    sizes, factor = [1] * dimensions, 2
    factors = list[int]()
    while count > 1:
        while count % factor == 0:
            factors, count = [factor, *factors], count // factor
        factor += 1
    for one in factors:
        sizes[sizes.index(min(sizes))] *= one
    return sorted(sizes)


def seconds(kind: str, size: float, own: Sequence[Route], copies: int = 0) -> float:
    """Estimate the time of a collective in which each device receives ``size`` bytes over mesh axes.

    Gathered or reduced data enter each node once, over the network adapters of all its devices. Rows
    exchanged between all devices take the necessary route, on a torus through the chips in between.
    Sums in both directions overlap. ``copies`` is the number of rows of a token that go to different
    experts, of which one per node crosses the network.
    """
    near, far = math.prod(one.near for one in own), math.prod(one.far for one in own)
    network = min(one.network for one in own)
    link = sum(one.link for one in own) if max(one.ring for one in own) > 1 else min(one.link for one in own)
    if kind == "collective-permute":
        return size / (network if far > 1 else link)
    whole = size / (1 - 1 / (near * far))
    if kind == "all-to-all":
        once = far * (1 - (1 - 1 / far) ** copies) / copies if copies else 1.0
        way = max(1.0, max(one.ring for one in own) / 4)
        return max(whole * (near - 1) / (near * far) * way / link, whole * (1 - 1 / far) * once / network)
    return max(whole * (1 - 1 / near) / link, whole * (1 - 1 / far) / (near * network))
