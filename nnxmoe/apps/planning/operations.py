"""Count the floating-point operations of a step: by formula, and in its traced program."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from nnxmoe.apps.planning.planned_step import PlannedStep, abstract
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.layers.attention.mla import MLA
from nnxmoe.model.stack import UnrolledStack

FORWARDS = 4  # training step with `Remat()`: forward, forward again, and a backward pass with 2 products per product


def operations(step: PlannedStep) -> float:
    """Compute the floating-point operations of one step on all devices. A multiply-add counts as two.

    A causal pass computes half of the scores. The head runs forward once and has two products in the
    backward pass. Chunks of an exchange are computed one more time.
    """
    config, work = step.config, step.work
    kernels = [part for part in step.parts if part.kernel and part.layers]
    dense = sum(2 * part.size for part in kernels if not part.experts)
    experts = sum(2 * part.size * (config.experts_per_token / part.experts) for part in kernels if part.experts)
    head = 2 * config.vocab_size * config.hidden_size
    queries = work.seq if work.train else 1
    scores = work.batch * sum(2 * width * seen * queries for width, seen in _scores(step))
    if not work.train:
        return work.tokens * (dense + experts + head) + scores
    backward = FORWARDS if work.remat else FORWARDS - 1
    passes = backward - bool(work.lora)  # frozen kernels have no gradients
    again = experts if step.chunks > 1 else 0.0
    products = passes * (dense + experts) + again + (2 if work.lora else 3) * head
    return work.tokens * products + backward * scores


def _scores(step: PlannedStep) -> Iterator[tuple[int, float]]:
    """Yield multiplications per query and key, and the number of keys per query, for each layer.

    The multiplications are of scores and values, or of an indexer's scores.
    """
    seq, train = step.work.seq, step.work.train
    every = seq / 2 if train else seq
    for stack in abstract(step.config).stacks:
        assert isinstance(stack, UnrolledStack)
        for layer in stack.layers:
            attention = layer.attention
            if (score_ops := getattr(attention, "score_ops", None)) is not None:
                yield from score_ops(every)
                continue
            window = getattr(attention, "window", None) or getattr(attention, "topk", None) or seq
            if (scorer := getattr(attention, "indexer", None)) is not None:
                yield math.prod(scorer.q.outs), every
            yield _width(attention, train), min(window, every)


def _width(attention: GQA | MLA | Any, train: bool) -> int:
    if isinstance(attention, MLA):
        heads, values = attention.kv_b.outs
        rope = attention.kv_a.outs[0] - attention.kv_rank
        return heads * (values + rope) if train else 2 * heads * (attention.kv_rank + rope)
    return attention.q.outs[0] * (attention.k.outs[1] + attention.o.ins[1])


def counted(jaxpr: Any, devices: int = 1) -> float:
    """Count the operations of all products in a traced program, on all devices.

    Multiplies the operations in loops by the loop lengths, and counts the largest branch. Returns NaN
    if a product is in a loop of unknown length, as in `BlockedMatmul`, or in a kernel of Pallas or
    cuDNN. ``devices`` is the number of devices that run this program.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [counted(one, devices * _sharded(equation)) for one in jaxprs_in_params(params)]
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
            made = jax.make_jaxpr(params["function"])(*[one.aval for one in equation.invars])
            total += counted(made.jaxpr, devices)
        else:
            total += sum(inner)
    return total


def _sharded(equation: Any) -> int:
    """Return the number of devices, or stages, that each run the inner program, or 1 if they share it."""
    if equation.primitive.name != "shard_map":
        return 1
    return math.prod(equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"])


def _products(equation: Any) -> float:
    left, right = (one.aval for one in equation.invars[:2])
    dims = equation.params.get("dimension_numbers") or equation.params["ragged_dot_dimension_numbers"]
    dims = getattr(dims, "dot_dimension_numbers", dims)
    (of_left, _), _ = dims
    ragged = equation.primitive.name != "dot_general"
    grouped = ragged and len(equation.outvars[0].aval.shape) == 3  # gradient of kernels [E, I, O]
    if grouped:  # every row is in exactly one group
        return 2.0 * math.prod(left.shape) * right.shape[-1]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[dim] for dim in of_left)
