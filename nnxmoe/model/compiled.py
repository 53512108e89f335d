"""The compiled functions of a model: all of them are made here."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.xla_cpu import on_cpu
from nnxmoe.model.output import Body
from nnxmoe.model.stack import UnrolledStack, in_turn
from nnxmoe.model.stateful import is_captured, watch
from nnxmoe.model.structure import split_once

# Layers per call of a run. On two cores, decoding took 5 to 18 % longer with one layer per call (8 layers in all), and
# 0 to 4 % longer with four (32 layers).
MOST_LAYERS = 4


def require_values(leaves: Sequence[Any]) -> None:
    """Raise ValueError if a model's variables have no values."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model has shapes only: load weights first, or make it with rngs=nnx.Rngs(0)")


def split_arrays(module: nnx.Module) -> tuple[Any, Any, list[Array]]:
    """Graph, tree and arrays of a module, for ``nnx.merge(graph, jax.tree.unflatten(tree, arrays))`` in a program.
    Raises ValueError if it has shapes without values."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    require_values(leaves)
    return graph, tree, leaves


def model_program(
    model: Any,
    function: Callable[..., Any],
    *,
    static: tuple[int, ...] = (),
    donated: tuple[int, ...] = (),
    by_run: bool = False,
) -> Callable[..., Any]:
    """Compile ``function(model, *args)`` as a function of ``args``, with the model's current arrays.

    Models of equal structure share the program. ``function`` must be global, so that it is recognised. ``static``,
    ``donated``: indices of ``args`` that are hashable constants, or donated buffers. ``by_run``: the function uses only
    the model's `body`, `logits`, `empty_cache` and `mesh`, and donates only caches. If it compiles faster that way, it
    then runs uncompiled and calls compiled runs of layers (see `pays`). Raises ValueError for an abstract model, and
    under `nnx.capture`.
    """
    if is_captured(model):
        raise ValueError("nnx.capture collects values from calls model(tokens) only: call it outside of the capture")
    structure, leaves = split_once(model)
    require_values(leaves)
    if by_run and pays(model):
        return functools.partial(function, structure.program(_plan, bool(donated)).applied(model, leaves))
    return functools.partial(structure.program(_whole, function, static, donated), leaves)


@functools.lru_cache(maxsize=64)
def _whole(
    graph: Any, tree: Any, function: Callable[..., Any], static: tuple[int, ...], donated: tuple[int, ...]
) -> Any:
    def run(leaves: list[Array], *args: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return watch(function, module, module, *args)

    return jax.jit(run, static_argnums=[1 + i for i in static], donate_argnums=[1 + i for i in donated])


def pays(model: Any) -> bool:
    """Whether to call a few layers at a time: on CPUs, for more unrolled layers than two calls take, without a mesh.

    XLA:CPU compiles every layer of a program anew, so that equal layers are compiled once this way: a first answer of
    24 layers of width 256 took 11.5 s instead of 17.8 s on two cores, at the same speed of decoding (jax 0.10.2).
    Elsewhere a pass stays one program, because each call takes time.
    """
    unrolled = all(isinstance(stack, UnrolledStack) for stack in model.stacks)
    deep = sum(stack.depth for stack in model.stacks) > 2 * MOST_LAYERS
    return on_cpu() and model.mesh is None and unrolled and deep


class _Run(NamedTuple):
    """Some layers of a stack: their number, the places of their arrays among those of the model, and the call."""

    depth: int
    places: list[int]
    program: Any


class _Runs:
    """An `UnrolledStack` as calls of compiled runs of its layers."""

    def __init__(self, runs: list[_Run], leaves: list[Array]):
        self._runs = [(run.depth, run.program, [leaves[i] for i in run.places]) for run in runs]
        self.depth = sum(run.depth for run in runs)

    def __call__(self, x: Any, context: Context, cache: Any) -> Body:
        parts, first = [], 0
        for depth, program, leaves in self._runs:
            end = first + depth
            own = dataclasses.replace(context, last=context.last and end == self.depth)
            given = own, None if cache is None else cache[first:end], np.int32(first)
            parts.append((depth, lambda x, program=program, leaves=leaves, given=given: program(leaves, x, *given)))
            first = end
        out = in_turn(x, parts)
        return dataclasses.replace(out, cache=None if cache is None else sum(out.cache, ()))


class _Plan(NamedTuple):
    """Compiled functions shared by models of one structure: the runs of each stack, and the methods ``around`` the
    stacks, whose arrays are at ``places``."""

    stacks: list[list[_Run]]
    places: list[int]
    around: dict[str, Any]

    def applied(self, model: Any, leaves: list[Array]) -> Any:
        """A copy of the model whose stacks and methods call the compiled functions with these arrays."""
        made, outer = copy.copy(model), [leaves[i] for i in self.places]
        methods = {name: functools.partial(function, outer) for name, function in self.around.items()}
        stacks = [_Runs(runs, leaves) for runs in self.stacks]
        vars(made).update(methods, stacks=stacks, empty_cache=model.empty_cache)
        return made


@functools.lru_cache(maxsize=32)
def _plan(graph: Any, tree: Any, donate: bool) -> _Plan:
    """The runs of models with one structure. ``donate``: the layers' caches are used up."""
    model = nnx.merge(graph, tree.unflatten(range(tree.num_leaves)))

    def run_of(stack: UnrolledStack, first: int) -> _Run:
        run = UnrolledStack(stack.layers[first : first + MOST_LAYERS], stack.remat)
        graph, state = nnx.split(run)
        places, tree = jax.tree.flatten(state)
        return _Run(run.depth, places, _whole(graph, tree, UnrolledStack.__call__, (), (2,) if donate else ()))

    stacks = [[run_of(stack, first) for first in range(0, stack.depth, MOST_LAYERS)] for stack in model.stacks]
    model.stacks = nnx.List([])
    graph, state = nnx.split(model)
    places, tree = jax.tree.flatten(state)
    static = {"_begin": (6,), "_end": (2,), "logits": ()}
    around = {name: _whole(graph, tree, getattr(type(model), name), at, ()) for name, at in static.items()}
    return _Plan(stacks, places, around)
