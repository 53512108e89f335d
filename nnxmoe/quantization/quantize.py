"""``nnxmoe.quantize``: round a model's kernels to codes, in memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.axes import AnyMesh
from nnxmoe.layers.kernel import KernelParam
from nnxmoe.layers.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, refuse_shapes
from nnxmoe.quantization.kernels import Place, exchange, places, update_report
from nnxmoe.quantization.methods import Error, Method, Mixed, codes_for, encode, scales
from nnxmoe.storage.multihost import spans_hosts


def method_for(method: Method | Mixed | None, place: Place) -> Method | None:
    """The method for a kernel; None: it stays as it is."""
    if not isinstance(method, Mixed):
        return method
    return method.experts if place.experts else method.others


def quantize(model: CausalLM, method: Method | Mixed) -> CausalLM:
    """A model with the kernels of attention, feed-forwards and experts rounded to codes (`Int8`, `Int4`, `Float8`, or
    `Mixed`); embedding, head, router, norms and biases are shared with ``model``. Lossy.

    Raises ValueError for kernels that do not fit the codes, or are quantised already, and for NaN.
    """
    graph, state = nnx.split(model)
    refuse_shapes(jax.tree.leaves(state))
    made, error = nnx.merge(graph, state), Error()
    for place in places(made):
        round_to_codes(place, method, made, error)
    made.label()
    update_report(made, error.relative)
    return made


def quantize_shapes(model: CausalLM, method: Method | Mixed | None, dtype: Any, mesh: AnyMesh | None = None) -> None:
    """Make kernels of an abstract model quantised by a method, in place and without values, as `quantize` would.

    ``dtype``: of the kernels; ``mesh``: see `exchange`. Raises ValueError for kernels that do not fit the codes.
    """
    for place in places(model):
        if (one := method_for(method, place)) is not None:
            exchange(place, codes_for(one, dtype), model.strategy, scale=jnp.dtype(dtype), mesh=mesh)
    model.label()


def round_to_codes(place: Place, method: Method | Mixed, model: CausalLM, error: Error) -> None:
    """Quantise one kernel of a model in place, by its method. Call ``model.label()`` after the last one."""
    one, kernel = method_for(method, place), place.weight
    if one is None:
        return
    if isinstance(kernel, QuantizedWeight):
        raise ValueError(f"{place.key} is quantised already: call nnxmoe.dequantize(model) first")
    if spans_hosts(kernel.get_value()):
        raise ValueError("the model spans processes: quantise it while loading, from_pretrained(…, quantize=…)")
    exchange(place, codes_for(one, kernel.dtype), model.strategy, scale=kernel.dtype)
    try:
        _set(place.weight, one, kernel, model, error)
    except ValueError as problem:
        raise ValueError(f"{place.key}: {problem}") from None


def _set(weight: QuantizedWeight, method: Method, kernel: KernelParam, model: CausalLM, error: Error) -> None:
    lead, ins, outs = kernel.split(kernel.shape)
    value = np.asarray(kernel.get_value())
    if kernel.ins_first:
        value = np.moveaxis(value.reshape(*lead, math.prod(ins), math.prod(outs)), -1, -2)
    rows = value.reshape(*lead, math.prod(outs), math.prod(ins))
    codes, scale = (np.empty(v.shape, v.dtype) for v in (weight.codes, weight.scale))
    for at in np.ndindex(*lead):
        scale[at] = scales(method, rows[at], scale.dtype)
        codes[at] = encode(weight.kind, rows[at], scale[at])
        error.add(rows[at], weight.kind.decode(codes[at], scale[at], None, slice(0, len(rows[at]))))
    for variable, values in ((weight.codes, codes), (weight.scale, scale)):
        placed: Any = jax.device_put(values, model.strategy.sharding_of(variable))
        variable.set_value(placed)
