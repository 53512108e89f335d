"""Decoder layers and stacks of them.

``Unrolled`` keeps a module a layer: fastest to decode, and each layer's weights are arrays of their own. ``Scanned``
keeps one module whose parameters have a leading layer axis: one layer to trace and compile, whatever the depth.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from nnxmoe.axes import axes_of, label
from nnxmoe.layers.gqa import Attention, Context
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.moe.block import MoE, MoEInfo


class Layer(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any, None]:
        mixed, cache = self.attention(self.attention_norm(x), context, cache)
        x = context.asking(x)[0] + mixed
        return x + self.mlp(self.mlp_norm(x)), cache, None

    def by_token(self, context: Context) -> bool:
        """Whether a token that has attended is for itself."""
        return True


class MoELayer(nnx.Module):
    """``x + attention(norm(x))``, then ``x + moe(norm(x))``; also returns what the experts did."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, moe_norm: RMSNorm, moe: MoE):
        self.attention_norm = attention_norm
        self.attention = attention
        self.moe_norm = moe_norm
        self.moe = moe

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any, MoEInfo]:
        mixed, cache = self.attention(self.attention_norm(x), context, cache)
        x, context = context.asking(x)
        x = x + mixed
        y, routing, info = self.moe(self.moe_norm(x), context.valid, context.key)
        kept = routing if context.of_routing is None else context.of_routing(routing)
        return x + y, cache, MoEInfo(kept, info)

    def by_token(self, context: Context) -> bool:
        """Whether a token that has attended is for itself: none takes another's room, or the place of its noise."""
        return self.moe.by_token and (context.key is None or not self.moe.router.jitter)


MakeLayer = Callable[[nnx.Rngs | None], Layer | MoELayer]


def layer_keys(rngs: nnx.Rngs, count: int) -> Key[Array, "L"]:
    """One key per layer, the same for every kind of stack: layer i's is folded from the stack's key and i."""
    return jax.vmap(jax.random.fold_in, (None, 0))(rngs.params(), jnp.arange(count))


@dataclasses.dataclass(frozen=True)
class Remat:
    """Compute a layer's activations again in the backward pass instead of keeping them, but for what ``policy`` (of
    ``jax.checkpoint_policies``; None: nothing) lets it keep."""

    policy: Callable[..., bool] | None = None

    def __call__(self, run: Callable[..., Any], *, scanned: bool) -> Callable[..., Any]:
        return jax.checkpoint(run, policy=self.policy, prevent_cse=not scanned)


@dataclasses.dataclass(frozen=True)
class StackOutput:
    """``infos`` and ``hidden`` hold one entry a layer (None where the layer has no experts), of what it computed."""

    x: Float[Array, "B asked D"]
    cache: Any
    infos: list[MoEInfo | None]
    hidden: list[Float[Array, "B _ D"]]


class Unrolled(nnx.Module):
    """L layers one after the other; cache: a tuple of the layers' caches.

    Where the last token alone is wanted, the last layer computes nothing else but keys and values of the others, if it
    treats each token for itself.
    """

    def __init__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None):
        keys = [None] * count if rngs is None else layer_keys(rngs, count)
        self.layers = nnx.List([make(None if key is None else nnx.Rngs(key)) for key in keys])
        self.remat = remat

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def label(self, stack: int, first: int) -> None:
        """Stamp the parameters with their keys, layers and stack (see `axes.label`)."""
        for i, layer in enumerate(self.layers):
            label(layer, "layer", first + i, stack)

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any) -> StackOutput:
        caches, infos, hidden = [], [], []
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache or [None] * self.depth, strict=True)):
            run = layer if self.remat is None else self.remat(layer, scanned=False)
            last = context.last and i + 1 == self.depth and layer.by_token(context)
            x, layer_cache, info = run(x, dataclasses.replace(context.of_layer(i), last=last), layer_cache)
            caches.append(layer_cache)
            infos.append(info)
            hidden.append(x)
        return StackOutput(x, None if cache is None else tuple(caches), infos, hidden)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """One empty cache a layer."""
        return tuple(layer.attention.empty_cache(batch, capacity, dtype) for layer in self.layers)


class Scanned(nnx.Module):
    """L layers as one, with a leading axis ``layers`` on every parameter; cache: one pytree with the same axis.

    Every layer computes the same, all tokens.
    """

    def __init__(self, count: int, make: MakeLayer, rngs: nnx.Rngs | None, remat: Remat | None = None):
        self.depth = count
        self.remat = remat
        self.layer = make(None)
        state = nnx.state(self.layer)
        if rngs is not None:
            state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(layer_keys(rngs, count))
        else:
            state = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), state)
        each = [variable for _, variable in nnx.iter_graph(self.layer) if isinstance(variable, nnx.Variable)]
        labels = [("layers", *axes_of(variable)) for variable in each]
        nnx.update(self.layer, state)
        for variable, axes in zip(each, labels, strict=True):
            variable.set_metadata(axes=axes)

    def label(self, stack: int, first: int) -> None:
        """Stamp the parameters with their keys, first layer and stack (see `axes.label`)."""
        label(self.layer, "layer", first, stack)

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any) -> StackOutput:
        graph, state = nnx.split(self.layer)
        context = dataclasses.replace(context, last=False)

        def run(layer_state: Any, x: Array, context: Context, cache: Any) -> Any:
            return nnx.merge(graph, layer_state)(x, context, cache)

        run = run if self.remat is None else self.remat(run, scanned=True)

        def step(carry: tuple[Array, Any], inputs: tuple[Any, Array]) -> tuple[tuple[Array, Any], Any]:
            x, caches = carry
            layer_state, i = inputs
            one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), caches)
            x, one, info = run(layer_state, x, context.of_layer(i), one)
            # The cache rides in the carry: as scanned inputs and outputs it would be copied whole.
            caches = jax.tree.map(lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0), caches, one)
            return (x, caches), (info, x)

        (x, cache), (infos, hidden) = jax.lax.scan(step, (x, cache), (state, jnp.arange(self.depth)))
        each = [jax.tree.map(lambda a, i=i: a[i], infos) for i in range(self.depth)]
        return StackOutput(x, cache, each, [hidden[i] for i in range(self.depth)])

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """The layers' empty caches, stacked."""
        graph, state = nnx.split(self.layer)
        first = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state))
        cache = first.attention.empty_cache(batch, capacity, dtype)
        return jax.tree.map(lambda a: jnp.zeros((self.depth, *a.shape), a.dtype), cache)


Stack = Unrolled | Scanned
