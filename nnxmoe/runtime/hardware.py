"""Accelerators: peak speed, memory and links, from their makers' documents and XLA's target specifications."""

import dataclasses
import math
from collections.abc import Mapping

GPU, TPU, CPU = "gpu", "tpu", "cpu"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device. Rates are per device, in bytes and operations per second; any of them may be replaced.

    ``flops``: dense bfloat16 products. ``link``: one way, to devices of the same node (GPU) or along one mesh axis of
    the torus (TPU); ``network``: one way, to other nodes or slices. ``node``: devices that share fast links.
    ``kinds``: JAX's ``device_kind``, or a part of it for GPUs. ``torus``: physical sizes of a TPU slice, empty if it
    was not named. ``efficiency``: the share of peak that whole steps reach, an assumption. ``topology``: what the
    compiler calls the slice.
    """

    name: str
    platform: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int
    kinds: tuple[str, ...] = ()
    torus: tuple[int, ...] = ()
    efficiency: float = 0.4
    topology: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "bandwidth", "link", "network", "efficiency"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"hardware {self.name}: {name} must be a positive number, got {getattr(self, name)}")


_GB, _GIB, _T = 1e9, 2**30, 1e12
# A100: NVIDIA's data sheet of the 80 GB SXM module, a 200 Gb/s adapter. H100 to B200: XLA's target specs (cores x units
# x clock); NVLink each way; one 400 Gb/s adapter per GPU.
# TPUs: Cloud TPU documentation, whose ICI rates are of all links both ways; a ring along one axis has its share.
TABLE: Mapping[str, Hardware] = {
    kind.name: kind
    for kind in (
        Hardware("a100", GPU, 312 * _T, 85.2 * _GB, 2.04 * _T, 300 * _GB, 25 * _GB, 8, ("A100",)),
        Hardware("h100", GPU, 989 * _T, 84.9 * _GB, 3.35 * _T, 450 * _GB, 50 * _GB, 8, ("H100",)),
        Hardware("h200", GPU, 989 * _T, 151.4 * _GB, 4.8 * _T, 450 * _GB, 50 * _GB, 8, ("H200",)),
        Hardware("b200", GPU, 2225 * _T, 191.5 * _GB, 7.67 * _T, 900 * _GB, 50 * _GB, 8, ("B200",)),
        Hardware("tpu-v4", TPU, 275 * _T, 32 * _GIB, 1.2 * _T, 50 * _GB, 6 * _GB, 4096, ("TPU v4",)),
        Hardware("tpu-v5e", TPU, 197 * _T, 16 * _GIB, 0.8 * _T, 100 * _GB, 3 * _GB, 256, ("TPU v5 lite", "TPU v5e")),
        Hardware("tpu-v5p", TPU, 459 * _T, 95 * _GIB, 2.77 * _T, 200 * _GB, 6 * _GB, 8960, ("TPU v5", "TPU v5p")),
        Hardware("tpu-v6e", TPU, 918 * _T, 32 * _GIB, 1.64 * _T, 200 * _GB, 6 * _GB, 256, ("TPU v6 lite", "TPU v6e")),
        Hardware("tpu-7x", TPU, 1153 * _T, 96 * _GIB, 3.69 * _T, 100 * _GB, 6 * _GB, 9216, ("TPU7x",)),
    )
}


def of_device(kind: str) -> Hardware | None:
    """The row of the table for JAX's ``device_kind``; None for a device that is not in it."""
    for one in TABLE.values():
        if kind in one.kinds or (one.platform == GPU and any(part in kind for part in one.kinds)):
            return one
    return None
