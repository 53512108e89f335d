"""Forward passes split into compiled programs of a few layers, for deep models on CPUs.

XLA:CPU compiles every layer of a program separately, even if all layers are equal. With one program per run of equal
layers, the first response of a model with 24 layers of width 256 took 11.5 s instead of 17.8 s on two cores (jax
0.10.2), at the same decoding speed. On other backends, a pass is a single program, because each program launch has
overhead.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.layers.cache import Cache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.xla_cpu import on_cpu
from nnxmoe.model.output import EVERYTHING, Body, ByLayer, OutputRequest
from nnxmoe.model.program import jit_function, model_program, split_for_program
from nnxmoe.model.stack import UnrolledStack, run_stacks

# Layers per program. On two cores, decoding took 5 to 18 % longer with one layer per program (8 layers in total), and
# 0 to 4 % longer with four layers per program (32 layers in total).
RUN_LENGTH = 4
# With up to this many tokens, computing all outputs of the last layer takes less time than compiling a second program.
FEW_TOKENS = 64


def layerwise_program(
    model: Any,
    function: Callable[..., Any],
    *,
    static: tuple[int, ...] = (),
    donated: tuple[int, ...] = (),
    commit: bool = False,
) -> Callable[..., Any]:
    """Return the result of `model_program`. For deep models on CPUs, return ``function`` bound to a `LayerwiseModel`.

    Args:
        function: A module-level function of a model that calls only the model's `body`, `logits` and `empty_cache`, and
            donates only caches.
        static, donated, commit: See `model_program`.

    Raises:
        ValueError: See `model_program`.
    """
    if not is_deep_on_cpu(model):
        return model_program(model, function, static=static, donated=donated, commit=commit)
    return functools.partial(function, LayerwiseModel(model, donate=bool(donated), commit=commit))


def is_deep_on_cpu(model: Any) -> bool:
    """Return whether the model runs on CPUs without a mesh and has more unrolled layers than two programs contain."""
    is_unrolled = all(isinstance(stack, UnrolledStack) for stack in model.stacks)
    depth = sum(stack.depth for stack in model.stacks)
    return on_cpu() and model.mesh is None and is_unrolled and depth > 2 * RUN_LENGTH


class LayerwiseModel:
    """Model whose embedding, groups of consecutive layers and output head are separate compiled programs.

    Groups of equal structure share a program.

    Args:
        model: A model for which `is_deep_on_cpu` is True.
        donate: Whether passes donate the cache.
        commit: See `model_program`.

    Raises:
        ValueError: See `model_program`.
    """

    mesh = None

    def __init__(self, model: Any, *, donate: bool, commit: bool = False):
        structure, leaves = split_for_program(model, commit)
        self._parts: _Parts = structure.program(_split_layers, donate, commit)
        self._leaves, self._outer = leaves, [leaves[i] for i in self._parts.outer_leaves]
        self.empty_cache = model.empty_cache

    def body(
        self,
        tokens: Any,
        attention_mask: Any = None,
        positions: Any = None,
        segment_ids: Any = None,
        cache: Cache | None = None,
        key: None = None,
        request: OutputRequest = EVERYTHING,
        *,
        fresh: bool = False,
        routing: ByLayer | None = None,
    ) -> Body:
        """Compute `CausalLM.body` without a random key."""
        parts = self._parts
        shared_cache = None if cache is None else cache.without_layers(fresh)
        inputs = tokens, attention_mask, positions, segment_ids, shared_cache, key, fresh
        embeddings, context, shared_cache = parts.embed(self._outer, *inputs)
        computes_all = request.last_token_only and np.size(tokens) <= FEW_TOKENS
        layer_request = dataclasses.replace(request, last_token_only=False) if computes_all else request
        context = dataclasses.replace(context, request=layer_request)
        depths = [run.depth for run in parts.runs]
        runs = [functools.partial(self._run_layers, run) for run in parts.runs]
        caches = [None] * len(runs) if cache is None else _regroup(cache.layers, depths)
        out = run_stacks(runs, depths, embeddings, context, caches, routing)
        outputs = embeddings, out.x, out.hidden, shared_cache, request
        head_input, hidden, mtp_hidden = parts.finish(self._outer, *outputs)
        if cache is not None:
            layers = _regroup(out.cache, [len(layers) for layers in cache.layers])
            cache = dataclasses.replace(shared_cache, layers=layers)
        return Body(head_input, cache, out.infos, hidden, mtp_hidden)

    def _run_layers(self, run: "_Run", x: Any, context: Context, cache: Any) -> Body:
        return run.program([self._leaves[i] for i in run.leaves], x, context, cache)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Compute `CausalLM.logits`."""
        return self._parts.logits(self._outer, x)


def _regroup(groups: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """Concatenate the groups and split the result into groups of ``sizes``."""
    items = itertools.chain.from_iterable(groups)
    return tuple(tuple(itertools.islice(items, size)) for size in sizes)


class _Run(NamedTuple):
    depth: int
    leaves: list[int]  # indices of each run's arrays in the list of the model's arrays
    program: Callable[..., Body]


class _Parts(NamedTuple):
    """Compiled programs shared by models of equal structure."""

    runs: list[_Run]
    outer_leaves: list[int]  # indices of the arrays outside of the layers
    embed: Callable[..., Any]
    finish: Callable[..., tuple[Array, tuple[Array, ...], Array]]
    logits: Callable[..., Any]


@functools.lru_cache(maxsize=32)
def _split_layers(graph: Any, tree: Any, donate: bool, outermost: bool) -> _Parts:
    model = nnx.merge(graph, tree.unflatten(range(tree.num_leaves)))
    runs = []
    for stack in model.stacks:
        # If the length divides the depth, the last run does not need a program of its own.
        length = next((n for n in range(RUN_LENGTH, RUN_LENGTH // 2, -1) if stack.depth % n == 0), RUN_LENGTH)
        for first in range(0, stack.depth, length):
            run = UnrolledStack(stack.layers[first : first + length], stack.remat)
            leaves, run_tree = jax.tree.flatten(nnx.state(run))
            donated = (2,) if donate else ()
            program = jit_function(nnx.graphdef(run), run_tree, UnrolledStack.__call__, (), donated, outermost)
            runs.append(_Run(run.depth, leaves, program))
    model.stacks = nnx.List([])
    outer_graph, state = nnx.split(model)
    outer_leaves, outer_tree = jax.tree.flatten(state)
    outer = functools.partial(jit_function, outer_graph, outer_tree)
    model_class = type(model)
    return _Parts(
        runs,
        outer_leaves,
        outer(model_class._embed_inputs, (6,), (), outermost),
        outer(model_class._finish, (4,), (), outermost),
        outer(model_class.logits, (), (), outermost),
    )
