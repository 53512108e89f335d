"""Grouped matrix products with tokamax's Pallas kernels (Triton and Mosaic on NVIDIA GPUs, Mosaic on TPUs)."""

import dataclasses
import importlib
import importlib.util
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.kernel import as_kernel
from nnxmoe.moe.grouped_matmul import Weights, zeros_beyond


def installed() -> bool:
    """Whether tokamax (the extra 'kernels') is installed, without importing it."""
    return importlib.util.find_spec("tokamax") is not None


def _library() -> Any:
    """The tokamax module. Before 0.0.17 it parses sys.argv with absl unless the flags are marked as parsed."""
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return importlib.import_module("tokamax")


@dataclasses.dataclass(frozen=True)
class Tokamax:
    """``tokamax.ragged_dot``. ``implementation``: "mosaic", "triton", "xla", or None for tokamax's default, which on
    CPU is a masked dense product. Raises ValueError if tokamax is not installed."""

    implementation: str | None = None

    def __post_init__(self) -> None:
        if not installed():
            raise ValueError("Tokamax() needs tokamax: pip install 'nnxmoe[kernels]', or choose Blocked()")

    def __call__(self, rows: Float[Array, "R I"], kernel: Weights, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        rows = zeros_beyond(rows, sizes)
        out = _library().ragged_dot(
            rows,
            as_kernel(kernel).dense(rows.dtype),
            group_sizes=sizes,
            preferred_element_type=jnp.float32,
            implementation=self.implementation,
        )
        return zeros_beyond(out, sizes).astype(rows.dtype)
