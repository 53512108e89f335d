"""Lookup, replacement and dequantization of a model's quantizable kernels."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from nnxmoe.axes import AnyMesh, is_stacked
from nnxmoe.config.validate import floating_dtype
from nnxmoe.layers.linear.code_format import STORAGE_DTYPES, CodeFormat
from nnxmoe.layers.linear.kernel import Kernel, ParamWeight, as_weight, is_kernel
from nnxmoe.layers.linear.quantized import QuantizedArray, QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.paths import layer_modules, name_of
from nnxmoe.model.strategy import Strategy
from nnxmoe.sharding_rules import Rules, axes_per_dimension, shard_count


@dataclasses.dataclass(frozen=True)
class KernelRef:
    """Reference to a kernel of a model.

    Attributes:
        owner: Module that has the kernel as an attribute.
        attribute: Name of the attribute.
        path: Path of the kernel in the model.
        key: Key in tables of tensor names, such as ``layer.attention.q.kernel``.
        layer: Index of the layer, or of the first layer if the kernel is stacked. None outside of layers.
    """

    owner: Any
    attribute: str
    path: tuple[Any, ...]
    key: str
    layer: int | None = None

    @property
    def weight(self) -> Any:
        """The parameter or `QuantizedWeight`."""
        return getattr(self.owner, self.attribute)

    @property
    def experts(self) -> bool:
        """Whether the kernel has one matrix per routed expert."""
        return ".experts." in self.key

    @property
    def head(self) -> bool:
        """Whether the kernel is the output head."""
        return self.key == "head.kernel"

    def set_weight(self, weight: Any) -> None:
        """Replace the kernel in its module."""
        setattr(self.owner, self.attribute, nnx.data(weight))


def quantizable_kernels(model: CausalLM) -> list[KernelRef]:
    """Return the kernels of attention, feed-forwards and experts, and of the output head unless the embedding is tied.

    Embedding, router and norms are not quantized.
    """
    refs = list[KernelRef]()
    for path, module in layer_modules(model):
        attributes = list(vars(module).items()) if isinstance(module, nnx.Module) else []
        for attribute, value in attributes:
            if not (isinstance(value, QuantizedWeight) or is_kernel(value)) or isinstance(value, nnx.LoRAParam):
                continue
            key, layer, _ = name_of(model, (*path, attribute))
            if ".router." not in key:
                refs.append(KernelRef(module, attribute, (*path, attribute), key, layer))
    if model.head is not None:
        refs.append(KernelRef(model.head, "kernel", ("head", "kernel"), "head.kernel"))
    return refs


def quantized_kernels(model: CausalLM) -> list[KernelRef]:
    """Return the model's quantized kernels."""
    return [ref for ref in quantizable_kernels(model) if isinstance(ref.weight, QuantizedWeight)]


def replace_with_quantized(
    ref: KernelRef,
    format: CodeFormat,
    strategy: Strategy,
    *,
    scale: Any,
    zero: bool = False,
    order: bool = False,
    mesh: AnyMesh | None = None,
) -> QuantizedWeight:
    """Replace a kernel with an abstract quantized weight (shapes and dtypes only).

    Args:
        scale: Dtype of the scales.
        zero: Whether the format has zero points.
        order: Whether the inputs are permuted (act order).
        mesh: Mesh to check. Defaults to the strategy's mesh.

    Raises:
        ValueError: The kernel does not fit the format, or the mesh splits the kernel within a tile.
    """
    kernel = ParamWeight(ref.weight)
    lead, ins, outs = kernel.split(kernel.variable.shape)
    lead_axes, in_axes, out_axes = kernel.logical_axes
    sizes, kernel_axes = (math.prod(outs), math.prod(ins)), (out_axes[0], in_axes[0])
    try:
        format.check_inputs(sizes[1])
        axes = (*lead_axes, *kernel_axes)
        _check_sharding(format, (*lead, *sizes), axes, mesh or strategy.mesh, strategy.rules, order)
    except ValueError as error:
        raise ValueError(f"{ref.key}: {error}") from None
    grid = format.scales_shape(*sizes)
    # A scale shared by all inputs (or all outputs) is replicated over their shards.
    grid_axes = tuple(axis if count > 1 else None for axis, count in zip(kernel_axes, grid, strict=True))

    def variable(shape: Sequence[int], dtype: Any, axes: Sequence[Any]) -> QuantizedArray:
        value = jax.ShapeDtypeStruct((*lead, *shape), dtype)
        return QuantizedArray(value, out_sharding=(*lead_axes, *axes), eager_sharding=False)

    code_dtype = STORAGE_DTYPES[format.code_dtype]
    weight = QuantizedWeight(
        variable(format.codes_shape(*sizes), code_dtype, kernel_axes),
        variable(grid, scale, grid_axes),
        variable(grid, scale if format.offset else code_dtype, grid_axes) if zero else None,
        variable(sizes[1:], np.int32, (None,)) if order else None,
        ins=ins,
        outs=outs,
        format=format,
        product=strategy.quantized,
        in_axes=in_axes,
        out_axes=out_axes,
    )
    ref.set_weight(weight)
    return weight


def _check_sharding(
    format: CodeFormat, shape: tuple[int, ...], axes: tuple[Any, ...], mesh: AnyMesh | None, rules: Rules, order: bool
) -> None:
    """Raise ValueError if a mesh splits outputs or inputs within a tile, or splits permuted inputs.

    ``shape`` and ``axes`` are the sizes and logical axes of the kernel: leading dimensions, outputs and inputs.
    """
    if mesh is None:
        return
    mesh_axes = axes_per_dimension(axes, mesh, rules)
    for dim, dim_name in enumerate(("outputs", "inputs")):
        size, dim_axes = shape[dim - 2], mesh_axes[dim - 2]
        count, names = shard_count(mesh, dim_axes), ", ".join(map(repr, dim_axes))
        if count > 1 and not format.can_shard(dim, size, count):
            remedy = "use a smaller mesh axis"
            if "expert" in axes:
                experts = axes.index("expert")
                expert_shards = count * shard_count(mesh, mesh_axes[experts])
                if shape[experts] % expert_shards == 0:
                    remedy += f", or shard whole experts instead (expert={expert_shards})"
            raise ValueError(
                f"{count} devices of the mesh axis {names} would split its {size} {dim_name} within a tile of "
                f"{format.tile[dim]} that share a scale: {remedy}"
            )
        if count > 1 and order and dim == 1:
            raise ValueError(f"its inputs are permuted (act order) and cannot be sharded over {names}")


def bytes_by_dtype(model: nnx.Module) -> dict[str, int]:
    """Return the bytes of a model's parameters by dtype, largest first.

    All arrays of a quantized kernel are counted under the dtype of the codes.
    """
    sizes, code_dtypes = Counter[str](), dict[int, str]()
    for _, node in nnx.iter_graph(model):
        if isinstance(node, QuantizedWeight):
            code_dtypes |= {id(variable): node.format.code_dtype for variable in node.arrays.values()}
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            sizes[code_dtypes.get(id(node), str(node.dtype))] += node.size * np.dtype(node.dtype).itemsize
    return dict(sizes.most_common())


def update_report(model: CausalLM, error: float | None = None) -> None:
    """Update the weight sizes and the quantization error in the model's ``load_report``, if it has a report."""
    if model.load_report is not None:
        report = dataclasses.replace(model.load_report, weights=bytes_by_dtype(model), quantization_error=error)
        model.load_report = report


def dequantize(model: CausalLM, dtype: Any = None) -> CausalLM:
    """Return a new model with float kernels in place of the quantized kernels.

    The models share the other arrays, but have separate variables: assigning a variable of one model does not change
    the other model. Values are computed in float32 and rounded once.

    Args:
        dtype: Dtype of the kernels. Defaults to the dtype of the embedding.
    """
    check_model(model)
    if dtype is not None:
        dtype = floating_dtype("dequantize", "dtype", dtype)
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, state, copy=True)
    for ref in quantized_kernels(copy):
        dequantize_kernel(ref, copy, dtype)
    update_report(copy)
    return copy


def dequantize_kernel(ref: KernelRef, model: CausalLM, dtype: Any = None) -> None:
    """Replace a quantized kernel with a float kernel of ``dtype`` (see `dequantize`) in place."""
    weight: QuantizedWeight = ref.weight
    dtype = jnp.dtype(model.embed.table.dtype if dtype is None else dtype)
    lead_axes, in_axes, out_axes = weight.logical_axes
    shape, axes = (*weight.lead, *weight.outs, *weight.ins), (*lead_axes, *out_axes, *in_axes)
    value, inputs = jax.ShapeDtypeStruct(shape, dtype), len(weight.ins)
    param: nnx.Param[Any] = nnx.Param(value, out_sharding=axes, inputs=inputs, eager_sharding=False)
    ref.set_weight(param)
    param.set_value(_to_floats(dtype, shape, model.strategy.sharding_of(param))(weight.read()))


@functools.lru_cache(maxsize=64)
def _to_floats(dtype: np.dtype, shape: tuple[int, ...], sharding: Any) -> Callable[[Kernel], Array]:
    """Return a compiled function that dequantizes a kernel. Kernels of equal structure share the function."""
    return jax.jit(lambda kernel: kernel.transposed(dtype).reshape(shape), out_shardings=sharding)


def quantization_record(model: CausalLM) -> list[dict[str, Any]]:
    """Describe the quantized kernels for a JSON file: one entry per format, with the layers of each kernel."""
    entries: dict[str, dict[str, Any]] = {}
    for ref in quantized_kernels(model):
        fields = _record_fields(ref.weight)
        entry = entries.setdefault(json.dumps(fields), {**fields, "kernels": {}})
        entry["kernels"].setdefault(ref.key, []).extend(_layers(ref))
    return list(entries.values())


def _record_fields(weight: QuantizedWeight) -> dict[str, Any]:
    return {
        "kind": weight.format.code_dtype,
        "tile": weight.format.tile,
        "rounded": weight.format.round_dtype,
        "offset": weight.format.offset,
        "scale": str(weight.scale.dtype),
        "zero": weight.zero is not None,
        "order": weight.order is not None,
    }


def apply_quantization_record(model: CausalLM, record: Any) -> None:
    """Replace kernels of an abstract model with quantized kernels, as recorded by `quantization_record`.

    Raises ValueError if the record is malformed or does not fit the model.
    """
    options_by_kernel = _parse_record(record)
    for ref in quantizable_kernels(model):
        per_layer = [options_by_kernel.pop((ref.key, layer), None) for layer in _layers(ref)]
        if any(options != per_layer[0] for options in per_layer):
            raise ValueError(f"{ref.key}: its layers have different quantization formats. Load with Unrolled()")
        if per_layer[0] is not None:
            replace_with_quantized(ref, strategy=model.strategy, **per_layer[0])
    if options_by_kernel:
        key, _ = next(iter(options_by_kernel))
        raise ValueError(f"{key} is not a quantizable kernel of this model")


def _parse_record(record: Any) -> dict[tuple[str, int | None], Mapping[str, Any]]:
    """Return the arguments of `replace_with_quantized` for each (key, layer)."""
    options_by_kernel: dict[tuple[str, int | None], Mapping[str, Any]] = {}
    try:
        for entry in record:
            if entry["kind"] not in STORAGE_DTYPES:
                raise ValueError(f"{entry['kind']!r} is not a supported code dtype")
            tile = entry["tile"][0], entry["tile"][1]
            options = {
                "format": CodeFormat(entry["kind"], tile, entry["rounded"], bool(entry.get("offset"))),
                "scale": jnp.dtype(entry["scale"]),
                "zero": bool(entry["zero"]),
                "order": bool(entry["order"]),
            }
            for key, layers in entry["kernels"].items():
                options_by_kernel |= {(key, layer): options for layer in layers}
        is_positive = all(min(options["format"].tile) > 0 for options in options_by_kernel.values())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"it is not a list of quantized kernels: {error}") from None
    if not is_positive:
        raise ValueError("its tile sizes must be positive")
    return options_by_kernel


def _layers(ref: KernelRef) -> Sequence[int | None]:
    """Return the layer indices of a weight, or [None] for weights outside of layers, such as the head."""
    if ref.layer is None:
        return [None]
    weight = as_weight(ref.weight)
    count = weight.lead[0] if is_stacked(weight.logical_axes[0]) else 1
    return range(ref.layer, ref.layer + count)
