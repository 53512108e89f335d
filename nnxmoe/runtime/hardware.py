"""Accelerators: peak speed, memory and links, from vendors' documents and XLA's target specifications."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.validate import real_number

GPU, TPU, CPU = "gpu", "tpu", "cpu"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Device type. Rates are per device, in bytes or operations per second.

    Attributes:
        flops: Peak rate of dense bfloat16 matmuls.
        memory: Bytes of device memory.
        bandwidth: Bandwidth of the device memory.
        link: One-way bandwidth to devices of the same node (GPU) or along one axis of the torus (TPU).
        network: One-way bandwidth to other nodes or slices.
        node: Number of devices that share fast links.
        kinds: Values of JAX's ``device_kind``, or substrings of it for GPUs.
        torus: Axis sizes of a TPU slice. Empty if no slice is specified.
        efficiency: Fraction of the peak that whole steps reach. If None, the fraction of published
            runs is used.
        topology: XLA's topology name of the slice.
        dimensions: Number of dimensions of the torus.
        dies: Devices per chip. They share the chip's links.
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
    efficiency: float | None = None
    topology: str = ""
    dimensions: int = 0
    dies: int = 1

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "bandwidth", "link", "network", "efficiency"):
            if getattr(self, name) is not None:
                number = real_number(f"hardware {self.name}: {name}", getattr(self, name), 0, positive=True)
                object.__setattr__(self, name, number)
        if self.efficiency is not None and self.efficiency > 1:
            raise ValueError(
                f"hardware {self.name}: efficiency must be a fraction of the peak, 0 to 1, got {self.efficiency}"
            )


_GB, _GIB, _T = 1e9, 2**30, 1e12


def _gpu(
    name: str, flops: float, memory: float, bandwidth: float, link: float, network: float, *node_and_kinds: Any
) -> Hardware:
    """Create a GPU's `Hardware` from TFLOP/s, GB of memory, TB/s of memory bandwidth, and GB/s of links."""
    rates = flops * _T, memory * _GB, bandwidth * _T, link * _GB, network * _GB
    return Hardware(name, GPU, *rates, *node_and_kinds)


def _tpu(
    name: str, flops: float, memory: float, bandwidth: float, link: float, network: float, node: int, *kinds: str
) -> Hardware:
    """Create a TPU's `Hardware` from TFLOP/s, GiB of memory, TB/s of memory bandwidth, and GB/s of links."""
    rates = flops * _T, memory * _GIB, bandwidth * _T, link * _GB, network * _GB
    dimensions = 2 if name in ("tpu-v5e", "tpu-v6e") else 3
    return Hardware(name, TPU, *rates, node, kinds, dimensions=dimensions, dies=2 if name == "tpu-7x" else 1)


# Sources:
# A100: NVIDIA's data sheet of the 80 GB SXM module, with a 200 Gb/s adapter.
# H100 to B200: XLA's target specs (cores x units x clock), NVLink one way, one 400 Gb/s adapter per GPU.
# B300, GB200, GB300, MI300X to MI355X, L40S, A10, L4, T4 (float16) and GeForce (float32 accumulation): vendors' data
# sheets, dense rates. GB200 and GB300 have 72 GPUs per NVLink domain, and the 300s have 800 Gb/s adapters. The links of
# MI300X to MI355X are Infinity Fabric to seven other GPUs. Without NVLink, the link is PCIe.
# TPUs: Cloud TPU documentation. Its ICI rates are sums over all links and both directions. The table has the rate of
# a ring along one axis.
# If a name is a substring of another name, the longer name comes first.
TABLE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100", 312, 85.2, 2.04, 300, 25, 8, ("A100",)),
        _gpu("h100", 989, 84.9, 3.35, 450, 50, 8, ("H100",)),
        _gpu("h200", 989, 151.4, 4.8, 450, 50, 8, ("H200",)),
        _gpu("gb200", 2450, 198.6, 8.0, 900, 50, 72, ("GB200",)),
        _gpu("b200", 2225, 191.5, 7.67, 900, 50, 8, ("B200",)),
        _gpu("gb300", 2500, 298.0, 8.0, 900, 100, 72, ("GB300",)),
        _gpu("b300", 2250, 288.0, 8.0, 900, 100, 8, ("B300",)),
        _gpu("mi300x", 1307, 206.1, 5.3, 448, 50, 8, ("MI300X",)),
        _gpu("mi325x", 1307, 274.8, 6.0, 448, 50, 8, ("MI325X",)),
        _gpu("mi355x", 2517, 309.2, 8.0, 537, 50, 8, ("MI355X",)),
        _gpu("rtx4090", 165, 25.7, 1.008, 32, 12.5, 8, ("RTX 4090",)),
        _gpu("rtx5090", 209, 34.2, 1.792, 64, 12.5, 8, ("RTX 5090",)),
        _gpu("l40s", 362, 48.3, 0.864, 32, 25, 8, ("L40S",)),
        _gpu("a10", 125, 24.1, 0.6, 32, 12.5, 8, ("A10",)),
        _gpu("l4", 121, 24.1, 0.3, 32, 12.5, 8, ("L4",)),
        _gpu("t4", 65, 16.1, 0.32, 16, 12.5, 8, ("T4",)),
        _tpu("tpu-v4", 275, 32, 1.2, 50, 6, 4096, "TPU v4"),
        _tpu("tpu-v5e", 197, 16, 0.8, 100, 3, 256, "TPU v5 lite", "TPU v5e"),
        _tpu("tpu-v5p", 459, 95, 2.77, 200, 6, 8960, "TPU v5", "TPU v5p"),
        _tpu("tpu-v6e", 918, 32, 1.64, 200, 6, 256, "TPU v6 lite", "TPU v6e"),
        _tpu("tpu-7x", 1153, 96, 3.69, 100, 6, 9216, "TPU7x"),
    )
}


def of_device(device_kind: str) -> Hardware | None:
    """Return the `Hardware` of a JAX ``device_kind``, or None if it is not in `TABLE`."""
    for hardware in TABLE.values():
        if device_kind in hardware.kinds or (
            hardware.platform == GPU and any(part in device_kind for part in hardware.kinds)
        ):
            return hardware
    return None
