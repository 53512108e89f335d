"""Count the floating-point operations of a step, by formula or in its traced program."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from nnxmoe.apps.planning.planned_step import PlannedStep, abstract
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.layers.attention.mla import MLA
from nnxmoe.model.stack import UnrolledStack

FORWARDS = 4  # cost of a training step with `Remat()` in forward passes (forward 1, recomputation 1, backward 2)


def operations(step: PlannedStep) -> float:
    """Compute the floating-point operations of one step on all devices. A multiply-add counts as two.

    Causal attention computes half of the scores. The head is not rematerialized, so it costs three forward
    passes. The experts of a chunked exchange cost one more forward pass.
    """
    config, work = step.config, step.work
    kernels = [param for param in step.parts if param.kernel and param.layers]
    dense = sum(2 * param.size for param in kernels if not param.experts)
    experts = sum(2 * param.size * (config.experts_per_token / param.experts) for param in kernels if param.experts)
    head = 2 * config.vocab_size * config.hidden_size
    queries = work.seq if work.train else 1
    scores = work.batch * sum(2 * width * keys_per_query * queries for width, keys_per_query in _scores(step))
    if not work.train:
        return work.tokens * (dense + experts + head) + scores
    backward = FORWARDS if work.remat else FORWARDS - 1
    passes = backward - bool(work.lora)  # frozen kernels have no gradients
    recomputed = experts if step.chunks > 1 else 0.0
    products = passes * (dense + experts) + recomputed + (2 if work.lora else 3) * head
    return work.tokens * products + backward * scores


def _scores(step: PlannedStep) -> Iterator[tuple[int, float]]:
    """Yield (multiplications per query-key pair, keys per query) for every attention layer and indexer.

    Attention multiplies queries by keys and probabilities by values. An indexer computes scores only.
    """
    seq, train = step.work.seq, step.work.train
    causal_keys = seq / 2 if train else seq
    for stack in abstract(step.config).stacks:
        assert isinstance(stack, UnrolledStack)
        for layer in stack.layers:
            attention = layer.attention
            if (score_ops := getattr(attention, "score_ops", None)) is not None:
                yield from score_ops(causal_keys)
                continue
            window = getattr(attention, "window", None) or getattr(attention, "topk", None) or seq
            if (scorer := getattr(attention, "indexer", None)) is not None:
                yield math.prod(scorer.q.outs), causal_keys
            yield _width(attention, train), min(window, causal_keys)


def _width(attention: GQA | MLA | Any, train: bool) -> int:
    if isinstance(attention, MLA):
        heads, values = attention.kv_b.outs
        rope = attention.kv_a.outs[0] - attention.kv_rank
        return heads * (values + rope) if train else 2 * heads * (attention.kv_rank + rope)
    return attention.q.outs[0] * (attention.k.outs[1] + attention.o.ins[1])


def counted(jaxpr: Any, devices: int = 1) -> float:
    """Count the operations of all matrix products in a jaxpr, on all devices.

    Operations in a loop count once per iteration. A conditional counts as its largest branch.

    Args:
        jaxpr: The traced program.
        devices: Number of devices that run the program.

    Returns:
        The number of operations. NaN if a product is in a loop of unknown length, as in `BlockedMatmul`,
        or in a Pallas or cuDNN kernel.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [counted(inner_jaxpr, devices * _sharded(equation)) for inner_jaxpr in jaxprs_in_params(params)]
        if name == "pallas_call" or name.startswith("dot_product_attention") or any(map(math.isnan, inner)):
            return math.nan
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            total += devices * _products(equation)
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "while" and any(inner):
            return math.nan
        elif name == "cond":
            total += max(inner, default=0.0)
        elif name == "linear":  # primitive of `layers.linear.multilinear`
            closed_jaxpr = jax.make_jaxpr(params["function"])(*[inner_jaxpr.aval for inner_jaxpr in equation.invars])
            total += counted(closed_jaxpr.jaxpr, devices)
        else:
            total += sum(inner)
    return total


def _sharded(equation: Any) -> int:
    """Return how many devices run the body of a `shard_map`, or 1 for other operations."""
    if equation.primitive.name != "shard_map":
        return 1
    return math.prod(equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"])


def _products(equation: Any) -> float:
    left, right = (variable.aval for variable in equation.invars[:2])
    dims = equation.params.get("dimension_numbers") or equation.params["ragged_dot_dimension_numbers"]
    dims = getattr(dims, "dot_dimension_numbers", dims)
    (contracted_axes, _), _ = dims
    is_ragged = equation.primitive.name != "dot_general"
    is_kernel_gradient = is_ragged and len(equation.outvars[0].aval.shape) == 3  # gradient of kernels [E, I, O]
    if is_kernel_gradient:  # every row is in exactly one group
        return 2.0 * math.prod(left.shape) * right.shape[-1]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[dim] for dim in contracted_axes)
