"""Stacks of equal layers, and the two choices of a strategy that make them: `Unrolled` and `Scanned`."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.layers.context import Context
from nnxmoe.model.layer import Layer, MakeLayer
from nnxmoe.model.output import Body, ByLayer
from nnxmoe.model.remat import Remat
from nnxmoe.model.stateful import is_stateful, watch


def layer_keys(rngs: nnx.Rngs, count: int) -> Key[Array, "L"]:
    """One random key per layer, folded from the stack's key and the layer's index, whatever the kind of stack."""
    return jax.vmap(jax.random.fold_in, (None, 0))(rngs.params(), jnp.arange(count))


def by_layer(stacked: Any) -> ByLayer:
    """The slices of a pytree's arrays ``[L, …]``, one for each layer; none of None."""
    leaves = jax.tree.leaves(stacked)
    count = leaves[0].shape[0] if leaves else 0
    return ByLayer({i: jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(count)})


def concatenate_layers(x: Any, outputs: Sequence[Body], depths: Sequence[int]) -> Body:
    """Join the outputs of consecutive stacks with ``depths`` layers each. ``x``: the output of the last one."""
    caches, infos, hidden, first = [], ByLayer(), [], 0
    for out, depth in zip(outputs, depths, strict=True):
        caches.append(out.cache)
        infos |= {first + i: info for i, info in out.infos.items()}
        hidden += out.hidden
        first += depth
    return Body(x, tuple(caches), infos, tuple(hidden))


class UnrolledStack(nnx.Module):
    """L layers, each a module of its own; cache: a tuple of the layers' caches.

    If only the last token's output is needed, and the last layer's feed-forward separates tokens, that layer computes
    nothing but keys and values of the other tokens.
    """

    def __init__(self, layers: Sequence[Layer], remat: Remat | None = None):
        self.layers = nnx.List(layers)
        self.remat = remat

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Whether every layer's feed-forward does."""
        return all(layer.token_independent(key) for layer in self.layers)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __call__(self, x: Any, context: Context, cache: Any) -> Body:
        """The layers' output."""
        caches, infos, hidden = [], ByLayer(), []
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache or [None] * self.depth, strict=True)):
            run = layer if self.remat is None or is_stateful(layer) else self.remat(layer, scanned=False)
            is_last = i + 1 == self.depth
            last_only = context.request.last_token_only and is_last and layer.token_independent(context.key)
            own = context.for_layer(i, last_token_only=last_only)
            x, layer_cache, info = run(x, context=own, cache=layer_cache)
            caches.append(layer_cache)
            infos |= {} if info is None else {i: info}
            hidden += [x] if context.request.all_hidden else []
        return Body(x, None if cache is None else tuple(caches), infos, tuple(hidden))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> Any:
        """One empty cache per layer."""
        return tuple(layer.empty_cache(batch, capacity, dtype, lookahead) for layer in self.layers)


def scan_layers(
    layer: Layer, state: Any, remat: Remat | None, x: Any, context: Context, cache: Any, first: Any
) -> tuple[Any, Any, Any, Any]:
    """Scan over layers like ``layer`` with the stacked parameters ``state``.

    Args:
        first: Number of the first layer.

    Returns:
        The last output, and with a leading axis of layers: the cache, the `MoEInfo`s and, with
        ``context.request.all_hidden``, the outputs.
    """
    graph = nnx.graphdef(layer)
    count = jax.tree.leaves(state)[0].shape[0]

    def step(carry: tuple[Any, Any], inputs: tuple[Any, Array]) -> tuple[tuple[Any, Any], Any]:
        x, caches = carry
        layer_state, i = inputs
        one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), caches)
        layer = nnx.merge(graph, layer_state)
        run = layer if remat is None else remat(layer, scanned=count > 1)
        x, one, info = watch(run, layer, x, context=context.for_layer(first + i, last_token_only=False), cache=one)
        # The cache is in the carry: as scanned inputs and outputs XLA would copy all of it.
        caches = jax.tree.map(lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0), caches, one)
        return (x, caches), (info, x if context.request.all_hidden else None)

    if count == 1:  # a layer alone may return a pytree of another structure, which a loop may not
        (x, cache), found = step((x, cache), (jax.tree.map(lambda a: a[0], state), jnp.int32(0)))
        infos, hidden = jax.tree.map(lambda a: a[None], found)
        return x, cache, infos, hidden
    (x, cache), (infos, hidden) = jax.lax.scan(step, (x, cache), (state, jnp.arange(count)))
    return x, cache, infos, hidden


class ScannedStack(nnx.Module):
    """L layers as one module whose parameters have a leading axis, ``axis``; cache: one pytree with the same axis.

    ``keys``: a random key for each layer, or None: shapes without values. Every layer computes all tokens.
    """

    def __init__(
        self,
        count: int,
        make: MakeLayer,
        keys: Key[Array, "L"] | None,
        remat: Remat | None = None,
        axis: str = "layers",
    ):
        self.count = count
        self.remat = remat
        self.layer = make(None)
        state = nnx.state(self.layer)
        if keys is not None:
            state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)
        else:
            state = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), state)
        each = [variable for _, variable in nnx.iter_graph(self.layer) if isinstance(variable, nnx.Variable)]
        labels = [(axis, *axes_of(variable)) for variable in each]
        nnx.update(self.layer, state)
        for variable, axes in zip(each, labels, strict=True):
            variable.set_metadata(out_sharding=axes)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.count

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Whether the layers' feed-forward does."""
        return self.layer.token_independent(key)

    def __call__(self, x: Any, context: Context, cache: Any, first: int | Int[Array, ""] = 0) -> Body:
        """The layers' output; ``first``: number of the first layer, if these are some of a stack's layers."""
        if not is_stateful(self.layer):
            state = nnx.state(self.layer)
            out, stored, infos, hidden = scan_layers(self.layer, state, self.remat, x, context, cache, first)
        if is_stateful(self.layer):  # tracing may just have detected it
            return self._in_turn(x, context, cache, first)
        return Body(out, stored, by_layer(infos), () if hidden is None else tuple(by_layer(hidden).values()))

    def _in_turn(self, x: Any, context: Context, cache: Any, first: int | Int[Array, ""]) -> Body:
        """`__call__` for layers that change when called. Calls the module once per layer, with that layer's values, so
        that it sows a tuple with one value per layer."""
        variables = [v for _, v in nnx.iter_graph(self.layer) if isinstance(v, nnx.Variable)]
        variables = [v for v in variables if is_stacked(v.get_metadata().get("out_sharding") or ())]  # not sown
        stacked = [variable.get_value() for variable in variables]
        caches, infos, hidden = [], ByLayer(), []
        try:
            for i in range(self.count):
                for variable, values in zip(variables, stacked, strict=True):
                    variable.set_value(values[i])
                own = jax.tree.map(lambda a, i=i: a[i], cache)
                x, own, info = self.layer(x, context=context.for_layer(first + i, last_token_only=False), cache=own)
                caches.append(own)
                infos |= {} if info is None else {i: info}
                hidden += [x] if context.request.all_hidden else []
        finally:
            for variable, values in zip(variables, stacked, strict=True):
                variable.set_value(values)
        cache = None if cache is None else jax.tree.map(lambda *each: jnp.stack(each), *caches)
        return Body(x, cache, infos, tuple(hidden))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> Any:
        """The layers' empty caches, stacked."""
        graph, state = nnx.split(self.layer)
        first = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state))
        cache = first.empty_cache(batch, capacity, dtype, lookahead)
        return jax.tree.map(lambda a: jnp.zeros((self.count, *a.shape), a.dtype), cache)

    def unrolled(self, place: Callable[[nnx.Variable], Any]) -> UnrolledStack:
        """The same layers with arrays of their own, which are copies. ``place`` gives an array's sharding, or None."""
        graph, state = nnx.split(self.layer)
        layers: list[list[Any]] = [[] for _ in range(self.count)]
        for path, variable in nnx.to_flat_state(state):
            array = variable.get_value()
            one = variable.replace(jax.ShapeDtypeStruct(array.shape[1:], array.dtype))
            one.set_metadata(out_sharding=axes_of(variable)[1:])
            for layer, part in zip(layers, _unstacked(array, self.count, place(one)), strict=True):
                layer.append((path, one if part is None else one.replace(part)))
        return UnrolledStack([nnx.merge(graph, nnx.from_flat_state(layer)) for layer in layers], self.remat)


def _unstacked(array: Any, count: int, place: Any) -> Sequence[Any]:
    """Slice along axis 0; ``None``s if the array is a shape without values."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return [None] * count
    return _unstack(count, place)(array)


@functools.lru_cache(maxsize=64)
def _unstack(count: int, place: Any) -> Callable[[Array], list[Array]]:
    return jax.jit(lambda a: [a[i] for i in range(count)], out_shardings=place)


Stack = UnrolledStack | ScannedStack


# ``(count, make, rngs, remat)`` -> ``count`` equal layers, each made by ``make``; without ``rngs`` shapes only.
Stacking = Callable[[int, MakeLayer, nnx.Rngs | None, Remat | None], Stack]


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """A module per layer, with arrays of its own: the fastest decoding."""

    def __call__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None) -> UnrolledStack:
        keys = [None] * count if rngs is None else layer_keys(rngs, count)
        return UnrolledStack([make(None if key is None else nnx.Rngs(key)) for key in keys], remat)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """One module for all layers, its arrays stacked: one layer to trace and compile, whatever the depth (training)."""

    def __call__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None) -> ScannedStack:
        return ScannedStack(count, make, None if rngs is None else layer_keys(rngs, count), remat)


def stacks_of(model: Any, strategy: Any, *, dtype: Any, rngs: nnx.Rngs | None) -> list[Stack]:
    """The layers of a model: a stack per run of consecutive layers of one kind, of which a pipeline computes the
    longest. Raises ValueError if that has fewer layers than there are stages."""
    runs = [list(run) for _, run in itertools.groupby(range(model.config.num_hidden_layers), model.layer_type)]
    longest, stacks = max(runs, key=len), []
    for run in runs:

        def make(rngs: nnx.Rngs | None, index: int = run[0]) -> Layer:
            return model.layer(index, dtype=dtype, rngs=rngs)

        pipeline = strategy.pipeline if run is longest else None
        stack = strategy.stacking if pipeline is None else functools.partial(pipeline.stack, strategy.mesh)
        stacks.append(stack(len(run), make, rngs, strategy.remat))
    return stacks
