"""Merge adapters into the kernels that they adapt, and restore the kernels bit for bit."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from nnxmoe.config.printable import short
from nnxmoe.convert.peft.adapter_folder import load
from nnxmoe.convert.peft.adapter_slots import adapter_slots, unmerged_slots
from nnxmoe.layers.linear.lora import LoRA, UnmergeValue
from nnxmoe.layers.linear.quantized import QuantizedArray, QuantizedWeight
from nnxmoe.layers.linear.xla_cpu import as_bits, from_bits
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.program import require_values
from nnxmoe.model.quantization.methods import ErrorMeter, Method, Mixed, check_quantize_options
from nnxmoe.model.quantization.quantized_kernels import dequantize_kernel, quantized_kernels, update_report
from nnxmoe.model.quantization.rounding import kernels_to_quantize, round_to_codes


class Merged(nnx.Module):
    """Merged adapter and the original kernels."""

    def __init__(self, adapter: LoRA, base: Sequence[nnx.Param | QuantizedWeight]):
        self.a = _as(UnmergeValue, adapter.a)
        self.b = _as(UnmergeValue, adapter.b)
        self.alpha = adapter.alpha
        self.layers = nnx.static(adapter.layers)
        self.base = nnx.List(
            [
                _codes_as(UnmergeValue, kernel) if isinstance(kernel, QuantizedWeight) else _as(UnmergeValue, kernel)
                for kernel in base
            ]
        )


def _as(variable_type: type[nnx.Variable], variable: nnx.Variable) -> Any:
    """Copy a variable's value and axes to a new variable of a different type."""
    metadata = variable.get_metadata()
    axes = {"out_sharding": metadata["out_sharding"], "inputs": metadata.get("inputs")}
    return variable_type(variable.get_value(), **axes, eager_sharding=False)


def _codes_as(variable_type: type[nnx.Variable], kernel: QuantizedWeight) -> QuantizedWeight:
    return kernel.with_arrays({name: _as(variable_type, variable) for name, variable in kernel.arrays.items()})


def merge(model: CausalLM, *, keep: bool = True, quantize: Method | Mixed | None = None) -> None:
    """Merge the adapters into the kernels in place.

    The sum is computed in float32 and rounded once to the kernel's dtype. A merged model is saved like
    any other model. Quantized kernels are dequantized to the embedding's dtype.

    Args:
        keep: Store the adapters and the original kernels, so that `unmerge` can restore them bit for
            bit. This costs the memory of the kernels. If False, the merge cannot be undone.
        quantize: Quantize all floating-point kernels after the merge. This changes the outputs and
            requires ``keep=False``.
    """
    check_model(model)
    if not isinstance(keep, bool):
        raise ValueError(f"merge(keep={short(keep)}): pass True or False")
    check_quantize_options(quantize, keep_quantized=False)
    if keep and quantize is not None:
        raise ValueError(
            "merge(quantize=…) cannot be undone: pass keep=False, or merge first and then call nnxmoe.quantize"
        )
    require_values(jax.tree.leaves(nnx.state(model)))
    slots = unmerged_slots(model, "merge")
    if model.head is None and any(slot.owner is model.embed for slot in slots):
        raise ValueError(
            "cannot merge: the embedding and the output head share one table, so merging an adapter of either would "
            "change both. Use the model without merging, and save the adapter with lora.save"
        )
    merged = {slot.place: Merged(adapter, slot.base) for slot in slots if (adapter := slot.adapter) and keep}
    paths = {(*slot.path, name) for slot in slots for name in slot.kernels}
    for place in quantized_kernels(model):
        if place.path in paths:
            dequantize_kernel(place, model)
    for slot in slots:
        adapter = slot.adapter
        assert adapter is not None
        kernels = [kernel.get_value() for kernel in slot.base]
        (lead, _, outs), _ = slot.dimensions
        add = merger(len(lead), len(lead) + len(outs), adapter.scale, kernels[0].dtype, kernels[0].sharding)
        a, b = adapter.a.get_value(), adapter.b.get_value()
        a, b = (b.T, a.T) if slot.owner is model.embed else (a, b)  # the embedding table has its input axis first
        for kernel, value in zip(slot.base, add(kernels, a, b), strict=True):
            kernel.set_value(value)
        slot.put(None)
    error = ErrorMeter()
    if quantize is not None:
        for place, method in kernels_to_quantize(model, quantize):
            if not isinstance(place.weight, QuantizedWeight):
                round_to_codes(place, method, model, error)
    model.merged = nnx.data(nnx.Dict(merged)) if keep else None
    update_report(model, None if quantize is None else error.relative)


def merge_from(model: CausalLM, folder: str | os.PathLike[str], *, quantize: Method | Mixed | None = None) -> None:
    """Load an adapter from a folder and merge it permanently into the model, in place; see `merge`."""
    check_quantize_options(quantize, keep_quantized=False)
    load(model, folder)
    merge(model, keep=False, quantize=quantize)


def without(model: CausalLM) -> CausalLM:
    """Return a copy of a model without its (unmerged) adapters.

    The copy shares the arrays but not the variables, so assigning to a variable of the copy does not
    change the model. Use the copy as the reference model of preference losses such as DPO (Rafailov et
    al. 2023), inside or outside an objective:

        reference = lora.without(model)(tokens).logits
    """
    slots = unmerged_slots(model, "leave out")
    base = nnx.merge(*nnx.split(model), copy=True)
    places = {slot.place for slot in slots}
    for slot in adapter_slots(base):
        if slot.place in places:
            slot.put(None)
    return base


@functools.lru_cache(maxsize=64)
def merger(lead: int, inner: int, scale: float, dtype: jnp.dtype, place: Sharding) -> Any:
    """Compile the function ``(kernels, a, b) -> kernels`` that merges an adapter.

    The function processes one layer and one expert at a time. A float32 sum of all experts would use
    twice the memory of their bfloat16 kernels. On a mesh, each device merges its own shards.

    Args:
        lead: Number of leading layer and expert dimensions.
        inner: ``lead`` plus the number of output dimensions.
        scale: Scale of the adapter.
        dtype: Dtype of the kernels.
        place: Sharding of the kernels.
    """

    def merge_slice(arrays: tuple[list[Array], Array, Array]) -> list[Array]:
        bits, a, b = arrays
        kernels = [from_bits(k, dtype) for k in bits]
        low, high = a.reshape(a.shape[0], -1).astype(jnp.float32), b.reshape(len(kernels), -1, b.shape[-1])
        deltas = [jnp.matmul(h.astype(jnp.float32), low, precision=jax.lax.Precision.HIGHEST) * scale for h in high]
        return [
            as_bits((k.astype(jnp.float32) + delta.reshape(k.shape)).astype(dtype))
            for k, delta in zip(kernels, deltas, strict=True)
        ]

    def run(kernels: list[Array], a: Array, b: Array) -> list[Array]:
        body = merge_slice
        for _ in range(lead):
            body = functools.partial(jax.lax.map, body)
        merged = body(([as_bits(k) for k in kernels], a, b))
        return [from_bits(k, dtype) for k in merged]

    if not isinstance(place, NamedSharding):
        return jax.jit(run)

    def on_mesh(kernels: list[Array], a: Array, b: Array) -> list[Array]:
        axes = (*place.spec, *(None,) * (kernels[0].ndim - len(place.spec)))
        maps = (None,) * (b.ndim - inner - 1)
        a_spec = PartitionSpec(*axes[:lead], None, *axes[inner:])
        specs = place.spec, a_spec, PartitionSpec(*axes[:lead], *maps, *axes[lead:inner], None)
        local = jax.shard_map(run, mesh=place.mesh, in_specs=specs, out_specs=place.spec, check_vma=False)
        return local(kernels, a, b)

    return jax.jit(on_mesh)


def unmerge(model: CausalLM) -> None:
    """Undo `merge`: restore the original kernels and the adapters, bit for bit."""
    check_model(model)
    if model.merged is None:
        raise ValueError("cannot unmerge: no adapters were merged, or they were merged with keep=False")
    for slot in adapter_slots(model):
        if slot.place in model.merged:
            merged = model.merged[slot.place]
            for name, kernel, base in zip(slot.kernels, slot.base, merged.base, strict=True):
                if isinstance(base, QuantizedWeight):
                    setattr(slot.owner, name, nnx.data(_codes_as(QuantizedArray, base)))
                else:
                    kernel.set_value(base.get_value())
            slot.put(LoRA(_as(nnx.LoRAParam, merged.a), _as(nnx.LoRAParam, merged.b), merged.alpha, merged.layers))
    model.merged = nnx.static(None)
    update_report(model)
