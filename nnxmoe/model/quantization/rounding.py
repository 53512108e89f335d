"""``nnxmoe.quantize``: round a model's kernels to codes, in memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.linear.kernel import ParamWeight
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.compiled import require_values
from nnxmoe.model.quantization.methods import (
    ErrorMeter,
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
    """The kernels to quantise, each with its method: the head only with `Mixed`, no kernel with None.

    Raises ValueError if the head is to be quantised and is the embedding.
    """
    mixed = method if isinstance(method, Mixed) else Mixed(method, method)
    if mixed.head is not None and model.head is None:
        raise ValueError("head: the output head is the embedding (tie_word_embeddings), which cannot be quantised")
    every = [
        (place, mixed.head if place.head else mixed.experts if place.experts else mixed.others)
        for place in quantizable_kernels(model)
    ]
    return [(place, one) for place, one in every if one is not None]


def quantize(model: CausalLM, method: Method | Mixed) -> CausalLM:
    """Return a model with the kernels of attention, feed-forwards and experts rounded to codes (`Int8`, `Int4`,
    `Float8`, or `Mixed`, which may include the output head). Lossy. The arrays of embedding, router, norms and biases
    are shared, in new variables: writing into one model leaves the other unchanged.

    Raises ValueError for kernels that do not fit the codes, or are quantised already, for NaN, and for the head of a
    model whose head is the embedding.
    """
    check_model(model)
    check_method(method)
    graph, state = nnx.split(model)
    require_values(jax.tree.leaves(state))
    made, error = nnx.merge(graph, state, copy=True), ErrorMeter()
    for place, one in kernels_to_quantize(made, method):
        round_to_codes(place, one, made, error)
    update_report(made, error.relative)
    return made


def quantize_structure(model: CausalLM, method: Method | Mixed | None, dtype: Any, mesh: AnyMesh | None = None) -> None:
    """Make kernels of an abstract model quantised by a method, in place and without values, as `quantize` would.

    ``dtype``: of the kernels; ``mesh``: see `replace_with_quantized`. Raises ValueError for kernels that
    do not fit the codes.
    """
    for place, one in kernels_to_quantize(model, method):
        replace_with_quantized(place, format_for_dtype(one, dtype), model.strategy, scale=jnp.dtype(dtype), mesh=mesh)


def round_to_codes(place: KernelRef, method: Method, model: CausalLM, error: ErrorMeter) -> None:
    """Quantise one kernel of a model in place."""
    kernel = place.weight
    if isinstance(kernel, QuantizedWeight):
        raise ValueError(f"{place.key} is quantised already: call nnxmoe.dequantize(model) first")
    if spans_hosts(kernel.get_value()):
        raise ValueError("the model spans processes: quantise it while loading, from_pretrained(…, quantize=…)")
    weight = replace_with_quantized(place, format_for_dtype(method, kernel.dtype), model.strategy, scale=kernel.dtype)
    form = ParamWeight(kernel)
    lead, ins, outs = form.split(kernel.shape)
    value = np.asarray(kernel.get_value())
    if form.ins_first:
        value = np.moveaxis(value.reshape(*lead, math.prod(ins), math.prod(outs)), -1, -2)
    rows = value.reshape(*lead, math.prod(outs), math.prod(ins))
    codes, scale = (np.empty(v.shape, v.dtype) for v in (weight.codes, weight.scale))
    for at in np.ndindex(*lead):
        try:
            scale[at] = compute_scales(method, rows[at], scale.dtype)
        except ValueError as problem:
            raise ValueError(f"{place.key}: {problem}") from None
        codes[at] = encode_weights(weight.format, rows[at], scale[at])
        error.add(rows[at], weight.format.decode(codes[at], scale[at], None, slice(0, len(rows[at]))))
    for variable, values in ((weight.codes, codes), (weight.scale, scale)):
        placed: Any = jax.device_put(values, model.strategy.sharding_of(variable))
        variable.set_value(placed)
