"""Compiled programs for generation: forward passes with a cache, and copies of rows between caches.

Weights are arguments of the programs, so models with the same structure share programs.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from nnxmoe.config.printable import bytes_text
from nnxmoe.convert.storage.multihost import any_process
from nnxmoe.generation import rows
from nnxmoe.generation.request_routing import stack_layers
from nnxmoe.layers.cache import Cache
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.copies import unscan
from nnxmoe.model.layerwise import layerwise_program
from nnxmoe.model.output import Ids, OutputRequest, TokenMask, drop_routing, narrow_experts
from nnxmoe.model.pipeline import PipelinedStack
from nnxmoe.model.program import commit_arrays, require_values, split_once
from nnxmoe.model.stack import ScannedStack
from nnxmoe.moe.blocked import BlockedMatmul
from nnxmoe.moe.experts import Experts
from nnxmoe.runtime.memory import local_bytes, memory_bytes
from nnxmoe.runtime.programs import announced
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding import batch_axes, replicate, shard_constraint


class CacheSize(NamedTuple):
    """Size of a cache.

    Attributes:
        tokens: tokens per row.
        lookahead: maximum number of newest tokens that can be removed again (rejected drafts).
    """

    tokens: int
    lookahead: int


class PassResult(NamedTuple):
    """Result of a forward pass.

    Attributes:
        logits: logits of all ids of the pass, or of the last id.
        states: hidden states that multi-token prediction layers read.
        cache: cache after the pass.
        dropped: number of expert assignments dropped so far, including this pass.
        routing: experts of all ids of the pass in the L layers with experts, or None.
        memory: memory of the draft after these ids.
    """

    logits: Float[Array, "B T_out V"]
    states: Float[Array, "B _ S"]
    cache: Cache
    dropped: Int[Array, ""]
    routing: Integer[Array, "B T L X"] | None = None
    memory: Any = None


class LogitsMode(NamedTuple):
    """Outputs that a forward pass computes.

    Attributes:
        last_only: whether to compute logits of the last column only, and to skip the work for other
            columns.
        with_states: whether to compute the states of all columns even with ``last_only``.
        with_routing: whether to return the experts of all columns.
    """

    last_only: bool
    with_states: bool = False
    with_routing: bool = False


def _pass(
    model: CausalLM,
    ids: Ids,
    valid: TokenMask | None,
    cache: Cache | None,
    dropped: Any,
    cache_size: CacheSize,
    mode: LogitsMode,
) -> PassResult:
    """Run the model on ids. Starts with an empty cache if ``cache`` is None."""
    ids = shard_constraint(ids, model.mesh, batch_axes(model.mesh))
    last_token_only = mode.last_only and not (mode.with_states or mode.with_routing)
    reduce_routing = narrow_experts if mode.with_routing else drop_routing
    request = OutputRequest(last_token_only, all_hidden=False, reduce_routing=reduce_routing)
    fresh = cache is None
    cache = model.empty_cache(ids.shape[0], *cache_size) if cache is None else cache
    body = model.body(ids, valid, cache=cache, request=request, fresh=fresh)
    for info in body.infos.values():
        dropped = dropped + info.dispatch.dropped
    routing = None
    if mode.with_routing and body.infos:
        routing = replicate(stack_layers([info.routing for info in body.infos.values()]), model.mesh)
    logits = model.logits(body.x[:, -1:] if mode.last_only else body.x)
    return PassResult(logits, body.mtp_hidden, body.cache, replicate(dropped, model.mesh), routing)


def passes(model: CausalLM) -> Callable[..., PassResult]:
    """Return the compiled `_pass` of a model. The program donates the cache. Logs the compilation once per size.

    Raises:
        ValueError: if the model is abstract.
    """
    run = layerwise_program(model, _pass, static=(4, 5), donated=(2,), commit=True)
    compiled_sizes, logged = split_once(model)[0].program(_sizes)

    def announcing(
        ids: Any, valid: Any, cache: Any, dropped: Any, cache_size: CacheSize, mode: LogitsMode
    ) -> PassResult:
        arguments, size = (
            (ids, valid, cache, dropped, cache_size, mode),
            (ids.shape, valid is None, cache is None, cache_size, mode),
        )
        if size in compiled_sizes:
            return run(*arguments)
        compiled_sizes.add(size)
        text = "compiling a pass of {} x {} ids, up to {} tokens (once per size)".format(*ids.shape, cache_size.tokens)
        with contextlib.nullcontext(()) if text in logged else announced(text) as new_messages:
            result = run(*arguments)
        logged.update(new_messages)
        return result

    return announcing


@functools.lru_cache(maxsize=16)
def _sizes(graph: Any, tree: Any) -> tuple[set[Any], set[str]]:
    """Return the compiled pass sizes and the logged messages of models with this structure."""
    return set(), set()


@functools.partial(jax.jit, donate_argnums=(1,))
def draft_prefill(draft: rows.Draft, *arguments: Any) -> Any:
    """Run a compiled `Draft.read` on a chunk of the prompts. Donates the memory."""
    return draft.read(*arguments)


# Scanned model -> its structure and arrays when it was unrolled, and the unrolled copy.
_copies: "weakref.WeakKeyDictionary[CausalLM, tuple[Any, list[weakref.ref[Any]], CausalLM]]"
_copies = weakref.WeakKeyDictionary()


def unroll_for_decoding(model: CausalLM) -> CausalLM:
    """Unroll scanned layers into a copy of the model if memory permits.

    Unrolled layers decode faster, because a scan copies slices of the weights in every step. The copy is
    cached as long as the model and its arrays exist.

    Raises:
        ValueError: if a scanned model is abstract, or if a pipelined stack cannot decode.
    """
    for stack in model.stacks:
        if isinstance(stack, PipelinedStack):
            stack.refuse_decoding()
    scanned = [nnx.state(stack) for stack in model.stacks if isinstance(stack, ScannedStack)]
    if not scanned:
        return model
    graph, state = nnx.split(model)
    leaves, (cached_graph, arrays, copy) = jax.tree.leaves(state), _copies.pop(model, (None, [], model))
    require_values(leaves)
    if cached_graph == graph and all(reference() is leaf for reference, leaf in zip(arrays, leaves, strict=True)):
        _copies[model] = cached_graph, arrays, copy
        return copy
    del copy
    needed_bytes = local_bytes((a.shape, a.dtype, None) for a in jax.tree.leaves(scanned))
    if fits(model, needed_bytes):
        copy = unscan(nnx.merge(graph, commit_arrays(state)))  # commit_arrays avoids a second compilation
        _copies[model] = graph, [weakref.ref(leaf) for leaf in leaves], copy
        return _copies[model][-1]
    total_bytes, memory_name = memory_bytes()
    logger.warning(
        "scanned layers decode slowly, and %s (%s) does not have space for an unrolled copy of %s: load the "
        "model with Strategy(stacking=Unrolled())",
        memory_name,
        bytes_text(total_bytes),
        bytes_text(needed_bytes),
    )
    return model


def fits(model: CausalLM, need: int) -> bool:
    """Return whether every process has memory for ``need`` bytes.

    The result is the same in all processes of the model's mesh.
    """
    is_short = need > memory_bytes()[0]
    return not any_process(lambda: is_short, model.mesh)()


def deterministic_blocks(model: CausalLM, tokens: int) -> CausalLM:
    """Return a copy of the model with a fixed expert block size, for passes over ``tokens`` tokens.

    XLA:CPU sums the products of a row in an order that depends on the number of rows (jax 0.10.2,
    0.12.0). With variable block sizes, the last bits of a token's logits would depend on the drafts of other
    tokens.
    """
    deterministic = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_graph(deterministic):
        if isinstance(module, Experts) and module.matmul == BlockedMatmul():
            module.matmul = BlockedMatmul(min(8, tokens))
    return deterministic


def cache_bytes(model: CausalLM, count: int, cache_size: CacheSize) -> int:
    """Compute the bytes of a cache of ``count`` rows in this process."""
    (arrays,) = _cache_arrays(model, [count], cache_size)
    return local_bytes((array.shape, array.dtype, None) for array in arrays)


def cache_batch_axes(model: CausalLM, cache_size: CacheSize) -> tuple[int, ...]:
    """Find the batch axis of each cache array. In caches of scanned stacks, the layer axis comes first."""
    one_row, two_rows = _cache_arrays(model, [1, 2], cache_size)
    pairs = (zip(a.shape, b.shape, strict=True) for a, b in zip(one_row, two_rows, strict=True))
    return tuple(next(i for i, (m, n) in enumerate(pair) if m != n) for pair in pairs)


def _cache_arrays(model: CausalLM, counts: Sequence[int], cache_size: CacheSize) -> list[list[jax.ShapeDtypeStruct]]:
    """Return the abstract arrays of caches with these numbers of rows.

    They are cached per model structure, because an `Engine` needs several of them, and tracing the caches of 32 layers
    takes as long as the prefill of a short prompt on a GPU.
    """
    known = split_once(model)[0].program(_known_cache_arrays)
    for count in counts:
        if (count, cache_size) not in known:
            arrays = jax.eval_shape(lambda count=count: jax.tree.leaves(model.empty_cache(count, *cache_size).layers))
            known[count, cache_size] = arrays
    return [known[count, cache_size] for count in counts]


@functools.lru_cache(maxsize=16)
def _known_cache_arrays(graph: Any, tree: Any) -> dict[tuple[int, CacheSize], list[jax.ShapeDtypeStruct]]:
    return {}


def _by_row(cache: Cache, axes: tuple[int, ...], change: Callable[..., Array], *others: Cache) -> Cache:
    """Apply ``change(array, axis, *arrays)`` to each array of a cache and the matching arrays of other caches."""
    leaves = [jax.tree.leaves((c.layers, c.length, c.segment)) for c in (cache, *others)]
    new_leaves = [
        change(a, axis, *other_arrays)
        for a, axis, *other_arrays in zip(leaves[0], (*axes, 0, 0), *leaves[1:], strict=True)
    ]
    tree = jax.tree.structure((cache.layers, cache.length, cache.segment))
    layers, length, segment = jax.tree.unflatten(tree, new_leaves)
    return dataclasses.replace(cache, layers=layers, length=length, segment=segment)


@functools.partial(jax.jit, static_argnums=(3,), donate_argnums=(0,))
def scatter_rows(cache: Cache, group: Cache, at: Int[Array, "R"], axes: tuple[int, ...]) -> Cache:
    """Copy the rows of ``group`` to the rows ``at`` of ``cache``. Skips out-of-range rows."""

    def into(array: Array, axis: int, values: Array) -> Array:
        return array.at[(slice(None),) * axis + (at,)].set(values, mode="drop")

    return _by_row(cache, axes, into, group)


@functools.partial(jax.jit, static_argnums=(1, 2))
def broadcast_row(cache: Cache, count: int, axes: tuple[int, ...], row: Int[Array, ""] | int = 0) -> Cache:
    """Create a cache of ``count`` rows that are copies of row ``row`` of ``cache``."""
    return _by_row(cache, axes, lambda a, axis: jnp.take(a, jnp.full(count, row, jnp.int32), axis=axis))


@functools.partial(jax.jit, static_argnums=(1,))
def broadcast_memory(memory: Any, count: int) -> Any:
    """Create draft memory of ``count`` rows that are copies of the first row of ``memory``."""
    return jax.tree.map(lambda a: jnp.take(a, jnp.zeros(count, jnp.int32), axis=0), memory)


@functools.partial(jax.jit, static_argnums=(1, 2))
def empty_like(group: Cache, count: int, axes: tuple[int, ...]) -> Cache:
    """Create a cache of ``count`` empty rows with the shapes and dtypes of ``group``."""

    def empty(a: Array, axis: int) -> Array:
        return jnp.zeros((*a.shape[:axis], count, *a.shape[axis + 1 :]), a.dtype)

    return _by_row(group, axes, empty)
