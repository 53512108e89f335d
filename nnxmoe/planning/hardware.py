"""Accelerators: peak speed, memory and links, from their makers' documents and XLA's target specifications."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

GPU, TPU, CPU = "gpu", "tpu", "cpu"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device. Rates are per device, in bytes and operations per second; any of them may be replaced.

    ``flops``: dense bfloat16 products. ``link``: one way, to devices of the same node (GPU) or along one mesh axis of
    the torus (TPU); ``network``: one way, to other nodes or slices. ``node``: devices that share fast links.
    ``torus``: physical sizes of a TPU slice, empty if it was not named. ``efficiency``: the share of peak that whole
    steps reach, an assumption. ``topology``: what the compiler calls the slice.
    """

    name: str
    platform: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int
    torus: tuple[int, ...] = ()
    efficiency: float = 0.4
    topology: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "bandwidth", "link", "network", "efficiency"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"hardware {self.name}: {name} must be a positive number, got {getattr(self, name)}")


_GB, _GIB, _T = 1e9, 2**30, 1e12
# H100 to B200: XLA's target specs (cores x units x clock); NVLink each way; one 400 Gb/s adapter per GPU.
# TPUs: Cloud TPU documentation, whose ICI rates are of all links both ways; a ring along one axis has its share.
TABLE: Mapping[str, Hardware] = {
    kind.name: kind
    for kind in (
        Hardware("h100", GPU, 989 * _T, 84.9 * _GB, 3.35 * _T, 450 * _GB, 50 * _GB, 8),
        Hardware("h200", GPU, 989 * _T, 151.4 * _GB, 4.8 * _T, 450 * _GB, 50 * _GB, 8),
        Hardware("b200", GPU, 2225 * _T, 191.5 * _GB, 7.67 * _T, 900 * _GB, 50 * _GB, 8),
        Hardware("tpu-v5e", TPU, 197 * _T, 16 * _GIB, 0.8 * _T, 100 * _GB, 3 * _GB, 256),
        Hardware("tpu-v5p", TPU, 459 * _T, 95 * _GIB, 2.77 * _T, 200 * _GB, 6 * _GB, 8960),
        Hardware("tpu-v6e", TPU, 918 * _T, 32 * _GIB, 1.64 * _T, 200 * _GB, 6 * _GB, 256),
        Hardware("tpu-7x", TPU, 1153 * _T, 96 * _GIB, 3.69 * _T, 100 * _GB, 6 * _GB, 9216),
    )
}
_TOPOLOGIES = {"tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "tpu-7x": "tpu7x"}


def hardware(name: str | Hardware) -> Hardware:
    """The row of the table for a name such as ``h100`` or ``tpu-v5p:4x8x8``, which also names a slice's torus."""
    if isinstance(name, Hardware):
        return name
    kind, _, shape = name.lower().partition(":")
    if kind not in TABLE or (shape and (TABLE[kind].platform != TPU or not re.fullmatch(r"\d+(x\d+){1,2}", shape))):
        raise ValueError(f"hardware {name!r} is not known: use one of {', '.join(TABLE)}, TPUs as in tpu-v5p:4x8x8")
    found = TABLE[kind]
    if not shape:
        return found
    torus = tuple(int(size) for size in shape.split("x"))
    return dataclasses.replace(found, name=f"{kind}:{shape}", torus=torus, topology=f"{_TOPOLOGIES[kind]}:{shape}")


def refuse_unheld(kind: Hardware, mesh: Mapping[str, int]) -> None:
    """Raises ValueError for a mesh that the torus of a named slice cannot hold: a mesh axis must be a product of whole
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
    """Whether the physical axes can be dealt out so that each wanted size is the product of its own."""
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
