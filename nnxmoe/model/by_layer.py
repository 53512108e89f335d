"""The forward pass as one compiled call per layer, so that equal layers are compiled once, however many there are."""

import functools
from typing import Any, NamedTuple, cast

import jax
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.layers.cache import Cache
from nnxmoe.layers.context import Context, FeedForward
from nnxmoe.layers.xla_cpu import on_cpu
from nnxmoe.model.decoder import Decoder, Ids, Output, TokenMask
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.stack import Body, UnrolledStack


def pays(decoder: Decoder) -> bool:
    """Whether to call layer by layer: on CPUs, for unrolled layers of a model without a mesh.

    XLA:CPU compiles each layer of a program anew, and between calls loses nothing that can be measured. Elsewhere the
    compiler sees the whole model, and only one call per pass is dispatched.
    """
    return on_cpu() and decoder.mesh is None and all(isinstance(stack, UnrolledStack) for stack in decoder.stacks)


class LayerByLayer:
    """A decoder with unrolled layers whose methods are called with arrays and run compiled programs.

    ``graph, tree, leaves``: the decoder, split by ``nnx.split`` and ``jax.tree.flatten``. ``donate``: the layers'
    caches are passed on and must not be used again.
    """

    def __init__(self, decoder: Decoder, graph: Any, tree: Any, leaves: list[Array], *, donate: bool):
        self.mesh, self.empty_cache = decoder.mesh, decoder.empty_cache
        plan = _plan(graph, tree, donate)
        self.stacks = [_Layers([_CompiledLayer(of, leaves) for of in layers]) for layers in plan.stacks]
        self._ends, self._leaves = plan.ends, [leaves[i] for i in plan.places]

    def __call__(self, *given: Any, **options: Any) -> Output:
        """See `Decoder.__call__`."""
        return Decoder.__call__(cast(Any, self), *given, **options)

    def body(self, *given: Any, **options: Any) -> Body:
        """See `Decoder.body`."""
        return Decoder.body(cast(Any, self), *given, **options)

    def _start(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None,
        positions: Ids | None,
        segment_ids: Ids | None,
        cache: Cache | None,
        key: Any,
        fresh: bool,
    ) -> tuple[Float[Array, "B T D"], Context, Cache | None]:
        """See `Decoder._start`."""
        return self._ends.start(self._leaves, (tokens, attention_mask, positions, segment_ids, cache, key), fresh)

    def _finish(self, x: Float[Array, "B T D"], cache: Cache | None, last: bool) -> Float[Array, "B asked D"]:
        """See `Decoder._finish`."""
        return self._ends.finish(self._leaves, x, cache, last)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """See `Decoder.logits`."""
        return self._ends.logits(self._leaves, x)


class _Layers:
    """An `UnrolledStack` of compiled layers."""

    remat = None

    def __init__(self, layers: list["_CompiledLayer"]):
        self.layers, self.depth = layers, len(layers)

    def __call__(self, *given: Any, **options: Any) -> Body:
        return UnrolledStack.__call__(cast(Any, self), *given, **options)


class _CompiledLayer:
    """A layer's arrays, and the program that it shares with equal layers."""

    def __init__(self, plan: "_LayerPlan", leaves: list[Array]):
        self.feed_forward = plan.feed_forward
        self._run, self._leaves = plan.program, [leaves[i] for i in plan.places]

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any) -> LayerOutput:
        return self._run(self._leaves, x, context, cache)


class _LayerPlan(NamedTuple):
    """The places of a layer's arrays among those of the decoder, and the compiled call."""

    places: list[int]
    program: Any
    feed_forward: FeedForward


class _Ends(NamedTuple):
    """Compiled functions of the arrays outside of the layers."""

    start: Any
    finish: Any
    logits: Any


class _Plan(NamedTuple):
    """The plans of all layers; the places of the other arrays, and their functions."""

    stacks: list[list[_LayerPlan]]
    places: list[int]
    ends: _Ends


@functools.lru_cache(maxsize=32)
def _plan(graph: Any, tree: Any, donate: bool) -> _Plan:
    decoder = nnx.merge(graph, jax.tree.unflatten(tree, range(tree.num_leaves)))

    def of_layer(layer: Layer) -> _LayerPlan:
        layer.label(0, 0)  # so that it is equal to those of other numbers
        graph, state = nnx.split(layer)
        places, tree = jax.tree.flatten(state)
        return _LayerPlan(places, _layer_program(graph, tree, donate), layer.feed_forward)

    stacks = [[of_layer(layer) for layer in stack.layers] for stack in decoder.stacks]
    decoder.stacks = nnx.List([])
    graph, state = nnx.split(decoder)
    places, tree = jax.tree.flatten(state)
    return _Plan(stacks, places, _ends(graph, tree))


@functools.lru_cache(maxsize=64)
def _layer_program(graph: Any, tree: Any, donate: bool) -> Any:
    def run(leaves: list[Array], x: Array, context: Context, cache: Any) -> LayerOutput:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x, context=context, cache=cache)

    return jax.jit(run, donate_argnums=(3,) if donate else ())


@functools.lru_cache(maxsize=32)
def _ends(graph: Any, tree: Any) -> _Ends:
    def outer(leaves: list[Array]) -> Decoder:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    return _Ends(
        jax.jit(lambda leaves, given, fresh: outer(leaves)._start(*given, fresh=fresh), static_argnums=2),
        jax.jit(lambda leaves, x, cache, last: outer(leaves)._finish(x, cache, last), static_argnums=3),
        jax.jit(lambda leaves, x: outer(leaves).logits(x)),
    )
