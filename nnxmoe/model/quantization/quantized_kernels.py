"""The kernels of a model that can be quantised, and their exchange for quantised ones and back."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
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
    """A kernel's place in a model: an attribute of a module. ``path``: of the kernel in the model; ``key``: such as
    ``layer.attention.q.kernel``; ``layer``: number of its (first) layer, None outside of layers."""

    owner: Any
    attribute: str
    path: tuple[Any, ...]
    key: str
    layer: int | None = None

    @property
    def weight(self) -> Any:
        """The parameter or `QuantizedWeight` stored here."""
        return getattr(self.owner, self.attribute)

    @property
    def experts(self) -> bool:
        """Whether it holds one linear map per routed expert."""
        return ".experts." in self.key

    @property
    def head(self) -> bool:
        """Whether it is the output head."""
        return self.key == "head.kernel"

    def put(self, weight: Any) -> None:
        """Put another weight here."""
        setattr(self.owner, self.attribute, nnx.data(weight))


def quantizable_kernels(model: CausalLM) -> list[KernelRef]:
    """The kernels of attention, dense feed-forwards and experts, and of an output head that is not the embedding.
    Embedding, router and norms stay floats."""
    found = []
    for path, module in layer_modules(model):
        for attribute, value in list(vars(module).items()) if isinstance(module, nnx.Module) else ():
            if not (isinstance(value, QuantizedWeight) or is_kernel(value)) or isinstance(value, nnx.LoRAParam):
                continue
            key, layer, _ = name_of(model, (*path, attribute))
            if ".router." not in key:
                found.append(KernelRef(module, attribute, (*path, attribute), key, layer))
    if model.head is not None:
        found.append(KernelRef(model.head, "kernel", ("head", "kernel"), "head.kernel"))
    return found


def quantized_kernels(model: CausalLM) -> list[KernelRef]:
    """The places of quantised kernels."""
    return [place for place in quantizable_kernels(model) if isinstance(place.weight, QuantizedWeight)]


def replace_with_quantized(
    place: KernelRef,
    codes: CodeFormat,
    strategy: Strategy,
    *,
    scale: Any,
    zero: bool = False,
    order: bool = False,
    mesh: AnyMesh | None = None,
) -> QuantizedWeight:
    """Put a quantised weight without values in the place of a kernel. ``scale``: dtype of the scales; ``zero``,
    ``order``: whether there are zero points, and an order of the inputs; ``mesh``: another one than the strategy's.

    Raises ValueError if the kernel does not fit the codes, or if the strategy's mesh splits it within a tile.
    """
    kernel = ParamWeight(place.weight)
    (lead, ins, outs), axes = kernel.split(kernel.variable.shape), kernel.logical_axes
    sizes, both = (math.prod(outs), math.prod(ins)), (axes[2][0], axes[1][0])
    try:
        codes.check_inputs(sizes[1])
        _check_split(codes, sizes, (*axes[0], *both), mesh or strategy.mesh, strategy.rules, order)
    except ValueError as error:
        raise ValueError(f"{place.key}: {error}") from None
    grid = codes.scales_shape(*sizes)
    # A scale for all inputs (or outputs) belongs to each shard of them.
    of_grid = tuple(axis if count > 1 else None for axis, count in zip(both, grid, strict=True))

    def variable(shape: Sequence[int], dtype: Any, names: Sequence[Any]) -> QuantizedArray:
        value = jax.ShapeDtypeStruct((*lead, *shape), dtype)
        return QuantizedArray(value, out_sharding=(*axes[0], *names), eager_sharding=False)

    made = QuantizedWeight(
        variable(codes.codes_shape(*sizes), STORAGE_DTYPES[codes.code_dtype], both),
        variable(grid, scale, of_grid),
        variable(grid, scale if codes.offset else STORAGE_DTYPES[codes.code_dtype], of_grid) if zero else None,
        variable(sizes[1:], np.int32, (None,)) if order else None,
        ins=ins,
        outs=outs,
        format=codes,
        product=strategy.quantized,
        in_axes=axes[1],
        out_axes=axes[2],
    )
    place.put(made)
    return made


def _check_split(
    codes: CodeFormat, sizes: tuple[int, int], axes: tuple[Any, ...], mesh: AnyMesh | None, rules: Rules, order: bool
) -> None:
    """Raise ValueError if a mesh splits outputs or inputs within a tile, or inputs that have an order."""
    split = ((), ()) if mesh is None else axes_per_dimension(axes, mesh, rules)[-2:]
    for dim, (what, over) in enumerate(zip(("outputs", "inputs"), split, strict=True)):
        count, named = shard_count(mesh, over), ", ".join(map(repr, over))
        if count > 1 and not codes.can_shard(dim, sizes[dim], count):
            raise ValueError(
                f"{count} devices of the mesh axis {named} would split its {sizes[dim]} {what} within a tile of "
                f"{codes.tile[dim]} that share a scale: make that axis smaller"
            )
        if count > 1 and order and dim == 1:
            raise ValueError(f"its inputs have an order (act order) and cannot be split over {named}")


def bytes_by_dtype(model: nnx.Module) -> dict[str, int]:
    """Bytes of a model's parameters by dtype, most first; those of quantised kernels by their kind of code."""
    size = Counter[str]()
    inside = set[int]()
    for _, node in nnx.iter_graph(model):
        if isinstance(node, QuantizedWeight):
            parts = node.arrays.values()
            inside |= {id(part) for part in parts}
            size[node.format.code_dtype] += sum(part.size * np.dtype(part.dtype).itemsize for part in parts)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and id(node) not in inside:
            size[str(node.dtype)] += node.size * np.dtype(node.dtype).itemsize
    return dict(size.most_common())


def update_report(model: CausalLM, error: float | None = None) -> None:
    """Set what the model's ``load_report``, if it has one, says of its weights. ``error``: of quantising them."""
    if model.load_report is not None:
        report = dataclasses.replace(model.load_report, weights=bytes_by_dtype(model), quantization_error=error)
        model.load_report = report


def dequantize(model: CausalLM, dtype: Any = None) -> CausalLM:
    """Convert the kernels of a quantised model to floats and return a new model. The other arrays are shared, in new
    variables: writing into one model leaves the other unchanged.

    ``dtype`` defaults to the embedding's. Values are computed in float32 and rounded once.
    """
    check_model(model)
    if dtype is not None:
        dtype = floating_dtype("dequantize", "dtype", dtype)
    graph, state = nnx.split(model)
    made = nnx.merge(graph, state, copy=True)
    for place in quantized_kernels(made):
        dequantize_kernel(place, made, dtype)
    update_report(made)
    return made


def dequantize_kernel(place: KernelRef, model: CausalLM, dtype: Any = None) -> None:
    """Put a float kernel in the place of a quantised one, with its values; ``dtype``: see `dequantize`."""
    weight: QuantizedWeight = place.weight
    dtype = jnp.dtype(model.embed.table.dtype if dtype is None else dtype)
    lead, ins, outs = weight.logical_axes
    shape, names = (*weight.lead, *weight.outs, *weight.ins), (*lead, *outs, *ins)
    value, inputs = jax.ShapeDtypeStruct(shape, dtype), len(weight.ins)
    made: nnx.Param[Any] = nnx.Param(value, out_sharding=names, inputs=inputs, eager_sharding=False)
    place.put(made)
    made.set_value(_floats(dtype, shape, model.strategy.sharding_of(made))(weight.read()))


@functools.lru_cache(maxsize=64)
def _floats(dtype: np.dtype, shape: tuple[int, ...], place: Any) -> Callable[[Kernel], Array]:
    """Return the compiled function from a quantized kernel to a float array, shared by kernels of equal structure."""
    return jax.jit(lambda kernel: kernel.transposed(dtype).reshape(shape), out_shardings=place)


def _format_fields(code_format: CodeFormat) -> dict[str, Any]:
    """Return the fields of a format under their names in the record."""
    return {
        "kind": code_format.code_dtype,
        "tile": code_format.tile,
        "rounded": code_format.round_dtype,
        "offset": code_format.offset,
    }


def quantization_record(model: CausalLM) -> list[dict[str, Any]]:
    """The quantised kernels for a JSON file: one entry per form, with the kernels that have it."""
    found: dict[str, dict[str, Any]] = {}
    for place in quantized_kernels(model):
        weight: QuantizedWeight = place.weight
        form = {**_format_fields(weight.format), "scale": str(weight.scale.dtype)}
        form |= {name: getattr(weight, name) is not None for name in ("zero", "order")}
        entry = found.setdefault(json.dumps(form), {**form, "kernels": {}})
        entry["kernels"].setdefault(place.key, []).extend(_layers(place))
    return list(found.values())


def apply_quantization_record(model: CausalLM, description: Any) -> None:
    """Replace kernels of an abstract model by quantised ones, as recorded by `describe`. Raises ValueError if the
    record is malformed."""
    forms = {}
    try:
        for entry in description:
            if entry["kind"] not in STORAGE_DTYPES:
                raise ValueError(f"{entry['kind']!r} is an unknown kind of code")
            tile = entry["tile"][0], entry["tile"][1]
            codes = CodeFormat(entry["kind"], tile, entry["rounded"], bool(entry.get("offset")))
            form = codes, jnp.dtype(entry["scale"]), bool(entry["zero"]), bool(entry["order"])
            forms |= {(key, layer): form for key, layers in entry["kernels"].items() for layer in layers}
        positive = all(min(form[0].tile) > 0 for form in forms.values())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"it is not a list of quantised kernels: {error}") from None
    if not positive:
        raise ValueError("it has a tile that is not positive")
    for place in quantizable_kernels(model):
        of_layers = {forms.pop((place.key, layer), None) for layer in _layers(place)}
        if len(of_layers) > 1:
            raise ValueError(f"{place.key}: its layers are quantised in different ways: load with Unrolled()")
        if (form := of_layers.pop()) is not None:
            codes, scale, zero, order = form
            replace_with_quantized(place, codes, model.strategy, scale=scale, zero=zero, order=order)
    if forms:
        raise ValueError(f"{next(iter(forms))[0]} is not a kernel that can be quantised")


def _layers(place: KernelRef) -> Sequence[int | None]:
    """Indices of the layers that a weight belongs to; None for weights outside of the layers, such as the head."""
    first, weight = place.layer, as_weight(place.weight)
    if first is None:
        return [None]
    return range(first, first + (weight.lead[0] if is_stacked(weight.logical_axes[0]) else 1))
