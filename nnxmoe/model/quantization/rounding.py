"""Quantization of a model in memory (`nnxmoe.quantize`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.linear.kernel import ParamWeight, as_weight
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.program import require_values
from nnxmoe.model.quantization.methods import (
    ErrorMeter,
    Int4,
    Method,
    Mixed,
    check_method,
    compute_scales,
    encode_weights,
    format_for_dtype,
)
from nnxmoe.model.quantization.quantized_kernels import (
    KernelRef,
    quantizable_kernels,
    replace_with_quantized,
    update_report,
)
from nnxmoe.sharding import spans_hosts


def kernels_to_quantize(model: CausalLM, method: Method | Mixed | None) -> list[tuple[KernelRef, Method]]:
    """Return the kernels to quantize, each with its method.

    Args:
        method: A method for all kernels except the output head, a `Mixed`, or None for no kernel.

    Raises:
        ValueError: The method quantizes the head, but the head is tied to the embedding.
    """
    mixed = method if isinstance(method, Mixed) else Mixed(method, method)
    if mixed.head is not None and model.head is None:
        raise ValueError("head: the output head is the embedding (tie_word_embeddings) and cannot be quantized")
    selected = list[tuple[KernelRef, Method]]()
    for ref in quantizable_kernels(model):
        part_method = mixed.head if ref.head else mixed.experts if ref.experts else mixed.others
        if isinstance(part_method, Int4):
            part_method = part_method.for_inputs(math.prod(as_weight(ref.weight).ins))
        if part_method is not None:
            selected.append((ref, part_method))
    return selected


def quantize(model: CausalLM, method: Method | Mixed) -> CausalLM:
    """Return a model with quantized kernels in attention, feed-forwards and experts. Quantization is lossy.

    The models share the arrays of embedding, router, norms and biases, but have separate variables: assigning a
    variable of one model does not change the other model.

    Args:
        model: A model that is not abstract.
        method: `Int8`, `Int4`, `Float8`, or `Mixed`. Only `Mixed` can include the output head.

    Raises:
        ValueError: A weight is NaN or infinite, a kernel does not fit the format or is quantized already, the model
            spans processes, or the method quantizes a head that is tied to the embedding.
    """
    check_model(model)
    check_method(method)
    graph, state = nnx.split(model)
    require_values(jax.tree.leaves(state))
    copy, error = nnx.merge(graph, state, copy=True), ErrorMeter()
    for ref, part_method in kernels_to_quantize(copy, method):
        round_to_codes(ref, part_method, copy, error)
    update_report(copy, error.relative)
    return copy


def quantize_structure(model: CausalLM, method: Method | Mixed | None, dtype: Any, mesh: AnyMesh | None = None) -> None:
    """Replace the kernels that `quantize` would quantize with abstract quantized kernels, in place.

    Args:
        dtype: Dtype of the kernels.
        mesh: See `replace_with_quantized`.

    Raises:
        ValueError: A kernel does not fit the format or the mesh.
    """
    for ref, part_method in kernels_to_quantize(model, method):
        format = format_for_dtype(part_method, dtype)
        replace_with_quantized(ref, format, model.strategy, scale=jnp.dtype(dtype), mesh=mesh)


def round_to_codes(ref: KernelRef, method: Method, model: CausalLM, error: ErrorMeter) -> None:
    """Quantize one kernel of a model in place and add its error to ``error``."""
    kernel = ref.weight
    if isinstance(kernel, QuantizedWeight):
        raise ValueError(f"{ref.key} is quantized already: call nnxmoe.dequantize(model) first")
    if spans_hosts(kernel.get_value()):
        raise ValueError("the model spans processes: quantize it while loading, with from_pretrained(…, quantize=…)")
    weight = replace_with_quantized(ref, format_for_dtype(method, kernel.dtype), model.strategy, scale=kernel.dtype)
    lead, outs_by_ins = _host_weights(kernel)
    codes = np.empty(weight.codes.shape, weight.codes.dtype)
    scale = np.empty(weight.scale.shape, weight.scale.dtype)
    for index in np.ndindex(*lead):
        weights = outs_by_ins[index]
        try:
            scale[index] = compute_scales(method, weights, scale.dtype)
        except ValueError as problem:
            raise ValueError(f"{ref.key}: {problem}") from None
        codes[index] = encode_weights(weight.format, weights, scale[index])
        error.add(weights, weight.format.decode(codes[index], scale[index], None, slice(0, len(weights))))
    for variable, values in ((weight.codes, codes), (weight.scale, scale)):
        array: Any = jax.device_put(values, model.strategy.sharding_of(variable))
        variable.set_value(array)


def _host_weights(kernel: nnx.Variable) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the sizes ``lead`` of the leading axes (layers, experts) and weights ``[*lead, O, I]`` in host memory."""
    param = ParamWeight(kernel)
    lead, ins, outs = param.split(kernel.shape)
    value = np.asarray(kernel.get_value())
    if param.ins_first:
        value = np.moveaxis(value.reshape(*lead, math.prod(ins), math.prod(outs)), -1, -2)
    return lead, value.reshape(*lead, math.prod(outs), math.prod(ins))
