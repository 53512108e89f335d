"""Stacks of equal layers. A strategy's `Unrolled` or `Scanned` object builds them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key, PyTree

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.layers.context import Context
from nnxmoe.layers.stateful import is_stateful, watch
from nnxmoe.model.layer import Layer, MakeLayer
from nnxmoe.model.output import Body, ByLayer
from nnxmoe.model.remat import Remat


def layer_keys(rngs: nnx.Rngs, count: int) -> Key[Array, "L"]:
    """Return one random key per layer: the stack's key with the layer's index folded in.

    Unrolled and scanned stacks use the same keys, so their layers have equal values.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(rngs.params(), jnp.arange(count))


def by_layer(stacked: PyTree) -> ByLayer:
    """Split a pytree of arrays ``[L, …]`` into one pytree per layer. Returns an empty `ByLayer` for None."""
    leaves = jax.tree.leaves(stacked)
    count = leaves[0].shape[0] if leaves else 0
    return ByLayer({i: jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(count)})


def concatenate_layers(x: PyTree, outputs: Sequence[Body], depths: Sequence[int]) -> Body:
    """Join the outputs of consecutive stacks.

    Args:
        x: Output of the last stack.
        outputs: Output of each stack.
        depths: Number of layers per stack.
    """
    caches, infos, hidden, first_layer = [], ByLayer(), [], 0
    for out, depth in zip(outputs, depths, strict=True):
        caches.append(out.cache)
        infos |= {first_layer + i: info for i, info in out.infos.items()}
        hidden += out.hidden
        first_layer += depth
    return Body(x, tuple(caches), infos, tuple(hidden))


def run_stacks(
    stacks: Sequence[Callable[..., Body]],
    depths: Sequence[int],
    x: Any,
    context: Context,
    caches: Sequence[Any],
    routing: ByLayer | None = None,
) -> Body:
    """Run consecutive stacks. Only the last stack skips tokens whose output is not requested.

    Args:
        stacks: Stacks, or functions ``(x, context=…, cache=…) -> Body``.
        depths: Number of layers per stack.
        x: Input of the first layer.
        context: Context of all layers.
        caches: The cache of each stack, or None.
        routing: Given expert ids ``[B, T, X]`` by layer, or None.
    """
    outputs, first_layer = [], 0
    for i, (stack, depth, cache) in enumerate(zip(stacks, depths, caches, strict=True)):
        last_token_only = context.request.last_token_only and i + 1 == len(stacks)
        request = dataclasses.replace(context.request, last_token_only=last_token_only)
        experts = None if routing is None else _stack_experts(routing, range(first_layer, first_layer + depth))
        stack_context = dataclasses.replace(context.fold_key(i), request=request, experts=experts)
        outputs.append(stack(x, context=stack_context, cache=cache))
        x, first_layer = outputs[-1].x, first_layer + depth
    return concatenate_layers(x, outputs, depths)


def _stack_experts(routing: ByLayer, layers: Sequence[int]) -> Int[Array, "B L T X"] | None:
    """Stack the given expert ids of the layers. Layers without given ids get -1. Returns None if no layer has ids."""
    ids = {i: routing[i].astype(jnp.int32) for i in layers if i in routing}
    if not ids:
        return None
    no_ids = jnp.full_like(next(iter(ids.values())), -1)
    return jnp.stack([ids.get(i, no_ids) for i in layers], axis=1)


class UnrolledStack(nnx.Module):
    """Stack with one module per layer. The cache is a tuple of the layers' caches.

    If only the last token's output is requested and the last layer's feed-forward is token-independent, the last layer
    computes only keys and values for the other tokens.
    """

    def __init__(self, layers: Sequence[Layer], remat: Remat | None = None):
        self.layers = nnx.List(layers)
        self.remat = remat

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the feed-forwards of all layers are token-independent."""
        return all(layer.token_independent(key) for layer in self.layers)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None) -> Body:
        """Compute the layers in order."""
        caches, infos, hidden = [], ByLayer(), []
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache or [None] * self.depth, strict=True)):
            run = layer if self.remat is None else self.remat(layer, scanned=False)
            is_last = i + 1 == self.depth
            last_only = context.request.last_token_only and is_last and layer.token_independent(context.key)
            layer_context = context.for_layer(i, last_token_only=last_only)
            x, layer_cache, info = run(x, context=layer_context, cache=layer_cache)
            caches.append(layer_cache)
            infos |= {} if info is None else {i: info}
            hidden += [x] if context.request.all_hidden else []
        return Body(x, None if cache is None else tuple(caches), infos, tuple(hidden))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create one empty cache per layer."""
        return tuple(layer.empty_cache(batch, capacity, dtype, lookahead) for layer in self.layers)


def scan_layers(
    layer: Layer, state: Any, remat: Remat | None, x: PyTree, context: Context, cache: PyTree | None, first: Any
) -> tuple[Any, Any, Any, Any]:
    """Scan over layers with the structure of ``layer`` and the stacked parameters ``state``.

    Args:
        cache: The layers' caches with a leading layer axis, or None.
        first: Index of the first layer.

    Returns:
        The last layer's output, the caches, the `MoEInfo`s and the outputs of all layers. The last three have a leading
        layer axis. Outputs of all layers are None unless ``context.request.all_hidden`` is True.
    """
    graph = nnx.graphdef(layer)
    count = jax.tree.leaves(state)[0].shape[0]

    def step(carry: tuple[Any, Any], inputs: tuple[Any, Array]) -> tuple[tuple[Any, Any], Any]:
        x, caches = carry
        layer_state, i = inputs
        cache = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), caches)
        layer = nnx.merge(graph, layer_state)
        run = layer if remat is None else remat(layer, scanned=count > 1)
        x, cache, info = watch(run, layer, x, context=context.for_layer(first + i, last_token_only=False), cache=cache)
        # The caches are in the carry because XLA copies the complete array of a scanned input or output.
        caches = jax.tree.map(lambda a, update: jax.lax.dynamic_update_index_in_dim(a, update, i, 0), caches, cache)
        return (x, caches), (info, x if context.request.all_hidden else None)

    if count == 1:  # unlike a loop body, a single layer may return a pytree with a different structure
        (x, cache), layer_outputs = step((x, cache), (jax.tree.map(lambda a: a[0], state), jnp.int32(0)))
        infos, hidden = jax.tree.map(lambda a: a[None], layer_outputs)
        return x, cache, infos, hidden
    (x, cache), (infos, hidden) = jax.lax.scan(step, (x, cache), (state, jnp.arange(count)))
    return x, cache, infos, hidden


class ScannedStack(nnx.Module):
    """Stack that stores L layers as one module, whose parameters have a leading layer axis.

    The cache is one pytree whose arrays have the same leading axis. Every layer computes all tokens, even if only the
    last token's output is requested.

    Args:
        count: Number of layers (L).
        make: Function that builds one layer.
        keys: One random key per layer. If None, the layers are abstract (shapes and dtypes only).
        remat: Which activations the backward pass recomputes.
        axis: Logical name of the layer axis, for sharding.
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
        variables = [variable for _, variable in nnx.iter_graph(self.layer) if isinstance(variable, nnx.Variable)]
        layer_axes = [(axis, *axes_of(variable)) for variable in variables]
        nnx.update(self.layer, state)
        for variable, axes in zip(variables, layer_axes, strict=True):
            variable.set_metadata(out_sharding=axes)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.count

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the feed-forwards of the layers are token-independent."""
        return self.layer.token_independent(key)

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None, first: int | Int[Array, ""] = 0) -> Body:
        """Scan over the layers. ``first`` is the index of the first layer if the layers are part of a larger stack."""
        if not is_stateful(self.layer):
            state = nnx.state(self.layer)
            out, new_cache, infos, hidden = scan_layers(self.layer, state, self.remat, x, context, cache, first)
            if not is_stateful(self.layer):  # checked again, because tracing the scan detects stateful layers
                outputs = () if hidden is None else tuple(by_layer(hidden).values())
                return Body(out, new_cache, by_layer(infos), outputs)
        return self._call_layers_in_order(x, context, cache, first)

    def _call_layers_in_order(
        self, x: PyTree, context: Context, cache: PyTree | None, first: int | Int[Array, ""]
    ) -> Body:
        """Compute stateful layers in a Python loop.

        Calls the module once per layer, with the layer's parameters, so that the module sows one value per layer.
        """
        variables = [v for _, v in nnx.iter_graph(self.layer) if isinstance(v, nnx.Variable)]
        # Sown variables have no layer axis.
        variables = [v for v in variables if is_stacked(v.get_metadata().get("out_sharding") or ())]
        stacked = [variable.get_value() for variable in variables]
        caches, infos, hidden = [], ByLayer(), []
        try:
            for i in range(self.count):
                for variable, values in zip(variables, stacked, strict=True):
                    variable.set_value(values[i])
                layer_cache = jax.tree.map(lambda a, i=i: a[i], cache)
                x, layer_cache, info = self.layer(
                    x, context=context.for_layer(first + i, last_token_only=False), cache=layer_cache
                )
                caches.append(layer_cache)
                infos |= {} if info is None else {i: info}
                hidden += [x] if context.request.all_hidden else []
        finally:
            for variable, values in zip(variables, stacked, strict=True):
                variable.set_value(values)
        cache = None if cache is None else jax.tree.map(lambda *arrays: jnp.stack(arrays), *caches)
        return Body(x, cache, infos, tuple(hidden))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create the layers' empty caches, stacked along a leading axis."""
        graph, state = nnx.split(self.layer)
        layer = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state))
        cache = layer.empty_cache(batch, capacity, dtype, lookahead)
        return jax.tree.map(lambda a: jnp.zeros((self.count, *a.shape), a.dtype), cache)

    def unrolled(self, place: Callable[[nnx.Variable], Any]) -> UnrolledStack:
        """Copy the layers to an `UnrolledStack` with separate arrays per layer.

        Args:
            place: Function that returns the sharding (or None) for a variable of a layer.
        """
        graph, state = nnx.split(self.layer)
        layers: list[list[Any]] = [[] for _ in range(self.count)]
        for path, variable in nnx.to_flat_state(state):
            array = variable.get_value()
            layer_variable = variable.replace(jax.ShapeDtypeStruct(array.shape[1:], array.dtype))
            layer_variable.set_metadata(out_sharding=axes_of(variable)[1:])
            for layer, value in zip(layers, _unstacked(array, self.count, place(layer_variable)), strict=True):
                layer.append((path, layer_variable if value is None else layer_variable.replace(value)))
        return UnrolledStack([nnx.merge(graph, nnx.from_flat_state(layer)) for layer in layers], self.remat)


def _unstacked(array: Any, count: int, place: Any) -> Sequence[Any]:
    """Slice the array along axis 0. Each is ``None`` if the array is abstract."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return [None] * count
    return _unstack(count, place)(array)


@functools.lru_cache(maxsize=64)
def _unstack(count: int, place: Any) -> Callable[[Array], list[Array]]:
    return jax.jit(lambda a: [a[i] for i in range(count)], out_shardings=place)


Stack = UnrolledStack | ScannedStack


# A function ``(count, make, rngs, remat)`` that builds a stack of ``count`` equal layers with ``make``. If ``rngs`` is
# None, the layers are abstract.
Stacking = Callable[[int, MakeLayer, nnx.Rngs | None, Remat | None], Stack]


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Stacking of layers as separate modules with separate arrays, the fastest choice for decoding."""

    def __call__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None) -> UnrolledStack:
        keys = [None] * count if rngs is None else layer_keys(rngs, count)
        return UnrolledStack([make(None if key is None else nnx.Rngs(key)) for key in keys], remat)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Stacking of layers as one module with stacked arrays, suited to training.

    JAX traces and compiles a single layer, so compile time does not depend on the depth.
    """

    def __call__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None) -> ScannedStack:
        return ScannedStack(count, make, None if rngs is None else layer_keys(rngs, count), remat)


def stacks_of(model: Any, strategy: Any, *, dtype: Any, rngs: nnx.Rngs | None) -> list[Stack]:
    """Build the stacks of a model's layers.

    Each run of consecutive layers of equal ``layer_type`` forms a stack. With a pipeline, the longest run is split into
    stages.

    Raises:
        ValueError: The longest run has fewer layers than the pipeline has stages.
    """
    runs = [list(run) for _, run in itertools.groupby(range(model.config.num_hidden_layers), model.layer_type)]
    longest_run, stacks = max(runs, key=len), []
    for run in runs:

        def make(rngs: nnx.Rngs | None, index: int = run[0]) -> Layer:
            return model.layer(index, dtype=dtype, rngs=rngs)

        pipeline = strategy.pipeline if run is longest_run else None
        build_stack = strategy.stacking if pipeline is None else functools.partial(pipeline.stack, strategy.mesh)
        stacks.append(build_stack(len(run), make, rngs, strategy.remat))
    return stacks
