"""Speeds of MoE layers and of causal attention with each kernel that is installed."""

import functools
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import nnxmoe
from nnxmoe.layers.attention.fused_attention import FusedAttention
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.kernel import as_kernel
from nnxmoe.layers.mask import Mask
from nnxmoe.moe import tokamax
from nnxmoe.moe.grouped_matmul import GroupedKernel, GroupedMatmul
from tests.benchmarks.clock import interleaved
from tests.benchmarks.moe import Layer, Shape
from tests.benchmarks.results import Record

PALLAS = "jax.experimental.pallas.ops.gpu"


Measurement = Callable[[], Record]


def measurement(case: str, what: str, run: Callable[[], tuple[dict[str, float], dict[str, float]]]) -> Measurement:
    """Return a function that records the values and limits that ``run`` returns, or the reason for its failure."""

    def record() -> Record:
        try:
            values, limits = run()
        except Exception as error:  # a kernel or a model that does not run must not end the other measurements
            text = str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:])
            reason = f"{type(error).__name__}: {' '.join(text[:200].split())}"
            return Record(f"{case} | {what}", case, "ours", error=reason)
        return Record(f"{case} | {what}", case, "ours", values, limits)

    return record


@dataclass(frozen=True)
class MosaicMatmul:
    """Grouped matmul with JAX's own Mosaic GPU kernels for Hopper. All rows must belong to a group.

    Attributes:
        block: Rows and columns of an output tile.
        steps: Number of pipeline stages.
        columns: Number of neighboring tiles that are computed together. ``columns * block`` must divide the outputs.
    """

    block: int = 128
    steps: int = 4
    columns: int = 8

    def __call__(self, rows: Array, kernel: GroupedKernel, sizes: Array) -> Array:
        forward, outer = (
            functools.partial(
                getattr(importlib.import_module(f"{PALLAS}.{name}_mgpu"), name),
                group_sizes=sizes,
                block_m=self.block,
                block_n=self.block,
                block_k=64,
                max_concurrent_steps=self.steps,
                grid_block_n=self.columns,
            )
            for name in ("ragged_dot", "transposed_ragged_dot")
        )

        @jax.custom_vjp
        def product(rows: Array, weights: Array) -> Array:
            return forward(rows, weights, transpose_rhs=True)

        def gradients(operands: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
            rows, weights = operands
            return forward(d_out, weights), outer(d_out, rows)

        product.defvjp(lambda *operands: (product(*operands), operands), gradients)
        return product(rows, as_kernel(kernel).transposed(rows.dtype))


def matmuls() -> dict[str, GroupedMatmul]:
    """Installed grouped matmuls by name. The default of this backend comes first."""
    found: list[GroupedMatmul] = [nnxmoe.Strategy.auto().matmul, nnxmoe.BlockedMatmul(), nnxmoe.RaggedDotMatmul()]
    if tokamax.is_installed():
        found.append(tokamax.TokamaxMatmul())
    return {str(matmul): matmul for matmul in found}


def layer_speeds(
    name: str, shape: Shape, tokens: Sequence[int], times: int, kernels: dict[str, GroupedMatmul]
) -> Iterator[Measurement]:
    """Measure TFLOP/s of a layer with each grouped matmul. The limit is a dense network with the same useful FLOPs."""

    def measure(layer: Callable[[], Layer], count: int, what: str, factor: int) -> Any:
        took = layer().time(count, times, at_most=10.0, only=what)[what]
        speeds = [factor * shape.flops(count) / 1e12 / median(took[side]) for side in ("nnxmoe", "ideal")]
        return tuple({f"moe {what} T={count}, TFLOP/s": speed} for speed in speeds)

    for label, matmul in kernels.items():
        layer = functools.cache(lambda matmul=matmul: Layer(shape, nnxmoe.Strategy(matmul=matmul)))
        for count in tokens:
            for what, factor in (("forward", 1), ("forward and backward", 3)):
                run = functools.partial(measure, layer, count, what, factor)
                yield measurement(f"{name}, {label} {shape.dtype}", f"{what} T={count}", run)


AttentionKernel = Callable[[Array, Array, Array, MaskedSoftmax], Array]


def _tokamax_attention(q: Array, k: Array, v: Array, softmax: MaskedSoftmax) -> Array:
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    options: dict[str, Any] = {"is_causal": True, "scale": softmax.scale, "implementation": "mosaic"}
    return jnp.swapaxes(tokamax._library().dot_product_attention(q, k, v, **options), 1, 2)


def _mosaic_attention(q: Array, k: Array, v: Array, softmax: MaskedSoftmax) -> Array:
    """Run JAX's Mosaic kernel in float16. JAX 0.10.2 casts the probabilities to float16 and rejects bfloat16 values."""
    module, dtype, width = importlib.import_module(f"{PALLAS}.attention_mgpu"), q.dtype, v.shape[3]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))
    q, k, v = (jnp.swapaxes(a, 1, 2).astype(jnp.float16) for a in (q * jnp.asarray(softmax.scale, q.dtype), k, v))
    block_kv = 128 if k.shape[3] <= 128 else 64  # limited by shared memory
    config = module.TuningConfig(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True)
    return jnp.swapaxes(module.attention(q, k, v, config), 1, 2)[..., :width].astype(dtype)


def attention_kernels() -> dict[str, AttentionKernel]:
    """Attention kernels by name. Some of them support only Hopper GPUs."""
    defaults = {
        f"default on {backend}": nnxmoe.Strategy.auto(backend).attention_fn
        for backend in (jax.default_backend(), "cpu")
    }
    kernels: dict[str, AttentionKernel] = dict(defaults)
    if not any(isinstance(fn, FusedAttention) and fn.implementation == "cudnn" for fn in defaults.values()):
        kernels["cuDNN"] = FusedAttention("cudnn")  # otherwise it is the default, and would be measured twice
    return kernels | {"tokamax mosaic": _tokamax_attention, "JAX mosaic": _mosaic_attention}


def attention_speeds(
    tokens: int, heads: int, kv_heads: int, widths: tuple[int, int], flops: float, times: int
) -> Iterator[Measurement]:
    """Measure TFLOP/s of causal attention, forward and with its backward pass. ``widths``: of keys, of values."""
    shapes = (heads, tokens, widths[0]), (kv_heads, tokens, widths[0]), (kv_heads, tokens, widths[1])
    q, k, v = (jax.random.normal(jax.random.key(i), (1, *shape), jnp.bfloat16) for i, shape in enumerate(shapes))
    index = jnp.arange(tokens, dtype=jnp.int32)
    softmax = MaskedSoftmax(Mask(index, None, SlotMetadata(index, None, None), None, causal=True), widths[0] ** -0.5)
    useful = tokens * tokens * heads * sum(widths) / 1e12  # half of all pairs
    case = f"attention T={tokens} N={heads} K={kv_heads} H={widths[0]}, {widths[1]} bfloat16"

    def measure(kernel: AttentionKernel, what: str, name: str) -> Any:
        run: Any = jax.jit(lambda q, k, v: kernel(q, k, v, softmax))
        factor = 1.0 if what == "forward" else 3.5  # the backward pass has 2.5 times the FLOPs
        if what != "forward":
            run = jax.jit(jax.grad(lambda *qkv, f=run: jnp.sum(f(*qkv).astype(jnp.float32)), (0, 1, 2)))
        took = median(interleaved({"": lambda _: run(q, k, v)}, times, at_most=5.0)[""])
        return {name: factor * useful / took}, {name: flops / 1e12}

    for label, kernel in attention_kernels().items():
        for what in ("forward", "forward and backward"):
            name = f"{what}, {label}, TFLOP/s"
            yield measurement(case, name, functools.partial(measure, kernel, what, name))
