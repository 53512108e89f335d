"""Grouped matmuls with tokamax's Pallas Mosaic kernels, for TPUs and for NVIDIA GPUs since Hopper."""

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.layers.linear.code_format import CODEBOOKS, INT4_ZERO
from nnxmoe.layers.linear.kernel import as_kernel
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.layers.linear.quantized import QuantizedKernel
from nnxmoe.moe.grouped_matmul import GroupedKernel, zero_unused_rows
from nnxmoe.moe.permute import compute_gradients_together
from nnxmoe.runtime.extras import install_command


def is_installed() -> bool:
    """Return whether tokamax (the ``kernels`` extra) is installed, without importing it."""
    return importlib.util.find_spec("tokamax") is not None


def _library() -> Any:
    """Import tokamax. Before version 0.0.17, tokamax parses sys.argv unless absl's flags are marked as parsed."""
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return importlib.import_module("tokamax")


@dataclasses.dataclass(frozen=True)
class TokamaxMatmul(CheckedFields):
    """Grouped matmul with ``tokamax.ragged_dot``, for float and quantized kernels.

    Rows beyond ``sum(sizes)`` must be finite. On NVIDIA GPUs, tokamax 0.0.17 rejects widths that are not multiples of
    64.

    Attributes:
        implementation: "mosaic" or "xla". If ``None``, tokamax selects the implementation (on CPUs, a masked dense
            product).

    Raises:
        ValueError: If tokamax is not installed.
    """

    implementation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_installed():
            raise ValueError(
                f"TokamaxMatmul requires tokamax. Run {install_command('kernels')}, or use BlockedMatmul()."
            )

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel = as_kernel(kernel)
        if not isinstance(kernel, QuantizedKernel):
            return self._product(rows, kernel.dense(rows.dtype), sizes)
        leaves, tree = jax.tree.flatten(kernel)

        def run(rows: Array, sizes: Array, *leaves: Array) -> Array:
            kernel: QuantizedKernel = tree.unflatten(leaves)
            if kernel.order is not None:  # act order: each expert has its own permutation of the inputs
                expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
                rows = jnp.take_along_axis(rows, kernel.order[expert], axis=1)
            return self._product(rows, _qarray(dataclasses.replace(kernel, order=None), rows.dtype), sizes)

        def d_rows(sizes: Array, *leaves_and_output_grad: Array) -> Array:
            *leaves, d_out = leaves_and_output_grad
            return self._product(d_out, tree.unflatten(leaves).transposed(d_out.dtype), sizes)

        return multilinear(run, {0: d_rows})(rows, sizes, *leaves)

    def _product(self, rows: Float[Array, "R _"], weights: Any, sizes: Int[Array, "E"]) -> Float[Array, "R _"]:
        # tokamax's Mosaic kernels reject float32 gradients, and 16-bit products with precision "highest".
        options: dict[str, Any] = {"preferred_element_type": rows.dtype, "implementation": self.implementation}
        if rows.dtype.itemsize == 2:
            options["precision"] = jax.lax.Precision.DEFAULT
        library = _library()
        if self.implementation in (None, "mosaic") and (kernel := _tpu_kernel()) is not None:
            options["implementation"] = (kernel, "xla") if self.implementation is None else (kernel,)
        rows = _zero_unused_gradients(rows, sizes)
        if isinstance(weights, jax.Array):
            rows, weights = compute_gradients_together(rows, weights)
        out = library.ragged_dot(rows, weights, group_sizes=sizes, **options)
        return _zero_unused_outputs(out, sizes)


def _zero_unused_outputs(out: Float[Array, "R _"], sizes: Int[Array, "E"]) -> Float[Array, "R _"]:
    """Zero the rows beyond ``sum(sizes)``. Their gradient is not zeroed, because tokamax's kernels ignore it."""
    return multilinear(zero_unused_rows, {0: lambda sizes, d_out: d_out})(out, sizes)


def _zero_unused_gradients(rows: Float[Array, "R _"], sizes: Int[Array, "E"]) -> Float[Array, "R _"]:
    """Return the rows unchanged. The backward pass zeros the gradients of the rows beyond ``sum(sizes)``."""
    transposes = {0: lambda sizes, d_rows: zero_unused_rows(d_rows, sizes)}
    return multilinear(lambda rows, sizes: rows, transposes)(rows, sizes)


# TPU generation -> maximum tile sizes (m, k, n) of a product [m, k] x [E, k, n] of 16-bit rows. With the tiles of 128
# of tokamax 0.0.17, the kernel reads the operands from HBM about five times as often.
# 5: MaxText's default tiles (base.yml, ``wi_tile_fwd_*``), which fit 16 MiB of scoped VMEM.
# 6: a config of tokamax's cache for TPU v6e, with 32 MiB of scoped VMEM.
_MAX_TILES = {5: (512, 1024, 1024), 6: (512, 1024, 2048)}


def tile_sizes(generation: int, m: int, k: int, n: int, groups: int, itemsize: int) -> dict[str, int]:
    """Choose the tile sizes of a grouped product or its gradients. Return no sizes for generations without an entry.

    ``tile_m`` is the largest power of two that divides m and is at most the maximum and the mean number of rows per
    group, but at least 128. If 128 does not divide m, tokamax's kernel raises NotImplementedError. Of the sizes between
    half the maximum and the maximum, ``tile_k`` and ``tile_n`` have the least padding.
    """
    if generation not in _MAX_TILES:
        return {}
    max_m, *limits = _MAX_TILES[generation]

    def tile(size: int, limit: int) -> int:
        candidates = range(limit // 2, limit + 1, 128)
        return size if size <= limit else min(candidates, key=lambda tile: (-size % tile, -tile))

    mean_rows = 1 << max(1, m // groups).bit_length() - 1  # rounded down to a power of two
    tile_k, tile_n = (tile(size, limit * 2 // max(itemsize, 2)) for size, limit in zip((k, n), limits, strict=True))
    return {"tile_m": max(128, math.gcd(m, min(max_m, mean_rows))), "tile_k": tile_k, "tile_n": tile_n}


@functools.cache
def _tpu_modules() -> tuple[Any, Any] | None:
    """Import tokamax's private modules of the TPU kernel, or return ``None`` if this version has none."""
    try:
        base = importlib.import_module("tokamax._src.ops.ragged_dot.base")
        return base, importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu")
    except ImportError:
        return None


def _tpu_kernel() -> Callable[..., Array] | None:
    """Return tokamax's TPU kernel with tile sizes by shape, also in gradients, or ``None`` if it is not available."""
    modules = _tpu_modules()
    device = jax.extend.backend.get_default_device()
    if modules is None or device.platform != "tpu":
        return None
    generation = importlib.import_module("jax.experimental.pallas.tpu").get_tpu_info().generation
    return _kernel_with_tiles(*modules, device.device_kind, generation)


@functools.cache  # JAX traces products with equal shapes once only if the function is the same object
def _kernel_with_tiles(base: Any, tpu: Any, device_kind: str, generation: int) -> Callable[..., Array]:
    """Return tokamax's TPU kernel with tile sizes by shape.

    Tile sizes come from tokamax's autotuning cache on disk, else from `tile_sizes`. For quantized kernels and other
    generations, they come from tokamax's heuristics. The cache is read directly, because tokamax's lookup logs a
    warning for every shape that the cache does not contain. Autotuning results that are set as a context are ignored.
    """

    def run(rows: Array, weights: Any, **options: Any) -> Array:
        kernel = tpu.PallasMosaicTpuRaggedDot(vjp=vjp)
        call = kernel.bind(rows, weights, **{name: options[name] for name in options if name != "manual_axis_type"})
        if tuned := kernel.get_autotuning_cache(device_kind).get(call.autotuning_cache_key):
            config = tuned.fastest_config
        else:
            config = call.heuristics_config
            if isinstance(weights, jax.Array):
                # In the gradient of the weights, the second operand is the output's gradient [m, n].
                k, n = weights.shape[1:] if weights.ndim == 3 else (rows.shape[1], weights.shape[1])
                groups = len(call.arguments["group_sizes"].value)
                tiles = tile_sizes(generation, len(rows), k, n, groups, rows.dtype.itemsize)
                config = dataclasses.replace(config, **tiles)
        return kernel.replace(config=config)(rows, weights, **options)

    vjp = functools.partial(base.vjp, dlhs_ragged_dot=run, drhs_ragged_dot=run)
    return run


def _qarray(kernel: QuantizedKernel, dtype: Any) -> Any:
    """Convert a kernel ``[E, I, O]`` to a qwix array. On GPUs, tokamax multiplies by the codes without dequantizing.

    Returns a float array if the tiles do not divide the inputs, the codes index a codebook, or the kernel has offsets.
    """
    codes, (rows, columns), (_, ins, outs) = kernel.format, kernel.format.tile, kernel.shape
    if (kernel.scale.shape[-1] > 1 and ins % columns) or codes.code_dtype in CODEBOOKS or codes.offset:
        return kernel.dense(dtype)
    values = codes.unpack(kernel.codes)
    if codes.code_dtype == "fp8":
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    if codes.code_dtype == "int4":
        values = (values.astype(jnp.int8) - INT4_ZERO).astype(jnp.int4)

    def expand_rows(grid: Array) -> Array:
        if rows > 1:
            grid = jnp.repeat(grid, min(rows, outs), axis=-2)[:, :outs]
        return jnp.swapaxes(grid, -1, -2)

    scale = expand_rows(kernel.scale.astype(dtype))
    zero = kernel.zero
    if zero is not None:
        zero = expand_rows(zero.astype(jnp.int8) - INT4_ZERO if codes.code_dtype == "int4" else zero).astype(
            values.dtype
        )
    qwix = importlib.import_module("qwix")  # tokamax's array type
    return qwix.QArray(jnp.swapaxes(values, -1, -2), scale, zero)
