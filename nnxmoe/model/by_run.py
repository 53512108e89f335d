"""The forward pass of a deep model as compiled calls of a few layers each, so that equal layers are compiled once."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.layers.context import Context
from nnxmoe.layers.xla_cpu import on_cpu
from nnxmoe.model.decoder import Decoder, Output
from nnxmoe.model.stack import Body, UnrolledStack, in_turn

# Per call. On two cores, decoding took 5 to 18 % longer with one layer per call (8 layers in all), and 0 to 4 % longer
# with four (32 layers).
MOST_LAYERS = 4


def pays(decoder: Decoder) -> bool:
    """Whether to call a few layers at a time: on CPUs, for more unrolled layers than two calls take, without a mesh.

    XLA:CPU compiles every layer of a program anew. Elsewhere a pass stays one program, because each call takes time.
    """
    unrolled = all(isinstance(stack, UnrolledStack) for stack in decoder.stacks)
    deep = sum(stack.depth for stack in decoder.stacks) > 2 * MOST_LAYERS
    return on_cpu() and decoder.mesh is None and unrolled and deep


class RunByRun:
    """A decoder with unrolled layers whose methods are called with arrays and run compiled programs: ``plan``, of
    `run_plan`, with the arrays ``leaves``."""

    def __init__(self, decoder: Decoder, plan: "_Plan", leaves: list[Array]):
        self.mesh, self.empty_cache = decoder.mesh, decoder.empty_cache
        self.stacks = [_Runs(runs, leaves) for runs in plan.stacks]
        outer = [leaves[i] for i in plan.places]
        self._start, self._finish, self.logits = (functools.partial(function, outer) for function in plan.ends)

    def __call__(self, *given: Any, **options: Any) -> Output:
        """See `Decoder.__call__`."""
        return Decoder.__call__(cast(Any, self), *given, **options)

    def body(self, *given: Any, **options: Any) -> Body:
        """See `Decoder.body`."""
        return Decoder.body(cast(Any, self), *given, **options)


class _Run(NamedTuple):
    """Some layers of a stack: their number, the places of their arrays among those of the decoder, and the call."""

    depth: int
    places: list[int]
    program: Any


class _Runs:
    """An `UnrolledStack` as calls of compiled runs of its layers."""

    def __init__(self, runs: list[_Run], leaves: list[Array]):
        self._runs = [(run.depth, run.program, [leaves[i] for i in run.places]) for run in runs]
        self.depth = sum(run.depth for run in runs)

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any) -> Body:
        parts, first = [], 0
        for depth, program, leaves in self._runs:
            end = first + depth
            own = dataclasses.replace(context, last=context.last and end == self.depth)
            given = own, None if cache is None else cache[first:end], np.int32(first)
            parts.append((depth, lambda x, program=program, leaves=leaves, given=given: program(leaves, x, *given)))
            first = end
        out = in_turn(x, parts)
        return dataclasses.replace(out, cache=None if cache is None else sum(out.cache, ()))


class _Ends(NamedTuple):
    """Methods of `Decoder` as compiled functions of the arrays outside of the layers."""

    start: Any
    finish: Any
    logits: Any


class _Plan(NamedTuple):
    """The runs of all stacks; the places of the other arrays, and their functions."""

    stacks: list[list[_Run]]
    places: list[int]
    ends: _Ends


@functools.lru_cache(maxsize=32)
def run_plan(graph: Any, tree: Any, donate: bool) -> _Plan:
    """The runs of decoders with one structure. ``donate``: the layers' caches are passed on and must not be used
    again."""
    decoder = nnx.merge(graph, jax.tree.unflatten(tree, range(tree.num_leaves)))

    def run_of(stack: UnrolledStack, first: int) -> _Run:
        run = UnrolledStack(stack.layers[first : first + MOST_LAYERS], stack.remat)
        run.label(0, 0)  # so that it is equal to those of other numbers
        graph, state = nnx.split(run)
        places, tree = jax.tree.flatten(state)
        return _Run(run.depth, places, _run_program(graph, tree, donate))

    stacks = [[run_of(stack, first) for first in range(0, stack.depth, MOST_LAYERS)] for stack in decoder.stacks]
    decoder.stacks = nnx.List([])
    graph, state = nnx.split(decoder)
    places, tree = jax.tree.flatten(state)
    return _Plan(stacks, places, _ends(graph, tree))


@functools.lru_cache(maxsize=64)
def _run_program(graph: Any, tree: Any, donate: bool) -> Any:
    def run(leaves: list[Array], x: Array, context: Context, cache: Any, first: Array) -> Body:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x, context, cache, first)

    return jax.jit(run, donate_argnums=(3,) if donate else ())


@functools.lru_cache(maxsize=32)
def _ends(graph: Any, tree: Any) -> _Ends:
    def outer(leaves: list[Array]) -> Decoder:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    return _Ends(
        jax.jit(lambda leaves, *given: outer(leaves)._start(*given), static_argnums=7),  # fresh
        jax.jit(lambda leaves, *given: outer(leaves)._finish(*given), static_argnums=3),  # last
        jax.jit(lambda leaves, x: outer(leaves).logits(x)),
    )
