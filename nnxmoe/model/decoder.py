"""The decoder: embedding, stacks of layers, norm and output head."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.axes import AnyMesh, label, split_batch
from nnxmoe.config.rope import Rope
from nnxmoe.layers.cache import Cache, CacheFormat
from nnxmoe.layers.context import Context
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.kernel import Kernel
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import rotation_at
from nnxmoe.model.stack import Body, ByLayer, Stack, in_turn
from nnxmoe.moe.router import Routing

Ids = Int[Array, "B T"] | Int[np.ndarray, "B T"]
PARTS = ("embed", "stacks", "norm", "head", "rope", "dtype", "mesh", "cache_format")  # the arguments of `Decoder`
TokenMask = Ids | Bool[Array, "B T"] | Bool[np.ndarray, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a model; parts that were not requested are None.

    ``routing``: layer index -> `Routing`, MoE layers only. ``dispatch``: layer index -> `DispatchInfo`, the load of the
    experts and the number of dropped assignments. ``hidden``: the embedding, the output of every layer, and last the
    normalised input of the head.
    """

    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    routing: ByLayer | None = None
    hidden: tuple[Float[Array, "B T D"], ...] | None = None
    dispatch: ByLayer | None = None


def nothing(routing: Routing) -> None:
    """Keeps nothing of a layer's routing (see `Context.of_routing`)."""


class Decoder(nnx.Module):
    """A decoder-only transformer assembled from parts; it knows no config, files or strategy.

    ``rope``: rotary position embedding. ``dtype``: of activations. ``head`` None: the embedding is also the head.
    """

    def __init__(
        self,
        embed: Embed,
        stacks: Sequence[Stack],
        norm: RMSNorm,
        head: Linear | None,
        *,
        rope: Rope,
        dtype: jnp.dtype,
        mesh: AnyMesh | None,
        cache_format: CacheFormat | None = None,
    ):
        self.embed, self.stacks, self.norm, self.head = embed, stacks, norm, head
        self.rope, self.dtype, self.mesh, self.cache_format = rope, dtype, mesh, cache_format

    def __call__(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        return_routing: bool = False,
        return_hidden: bool = False,
        key: Key[Array, ""] | None = None,
        *,
        fresh: bool = False,
    ) -> Output:
        """Logits and the requested extras; see `CausalLM.__call__` for the arguments and `body` for ``fresh``."""
        keep = None if return_routing else nothing
        given = tokens, attention_mask, positions, segment_ids, cache, key, keep
        body = self.body(*given, fresh=fresh, keep_hidden=return_hidden)
        routing, dispatch = (
            ByLayer({i: getattr(info, name) for i, info in body.infos.items()}) if return_routing else None
            for name in ("routing", "dispatch")
        )
        return Output(self.logits(body.x), body.cache, routing, body.hidden if return_hidden else None, dispatch)

    def label(self) -> None:
        """Stamps every parameter with its key, layer and stack, by which checkpoints and training find it."""
        first = 0
        for i, stack in enumerate(self.stacks):
            stack.label(i, first)
            first += stack.depth
        for name in ("embed", "norm", "head"):
            if (part := getattr(self, name)) is not None:
                label(part, name)

    def body(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        key: Key[Array, ""] | None = None,
        of_routing: Callable[[Routing], Any] | None = None,
        *,
        fresh: bool = False,
        last: bool = False,
        keep_hidden: bool = True,
    ) -> Body:
        """Everything but the head, for callers that need the logits of some tokens only.

        ``of_routing``: maps each layer's routing to what ``infos`` keep of it, so that less stays in memory.
        ``fresh``: promises that the cache is empty, so that its slots are not read. Raises ValueError if it is known
        not to be. ``keep_hidden`` False: ``hidden`` is empty.
        ``last``: returns ``x [B, 1, D]`` of the last token only. If the last layer can skip the other tokens (but not
        their keys and values), its part of ``infos`` and ``hidden`` covers that token only.
        """
        stored = (None,) * len(self.stacks) if cache is None else cache.layers
        shared = shared_part(cache, fresh)
        x, context, moved = self._start(tokens, attention_mask, positions, segment_ids, shared, key, fresh)
        context = dataclasses.replace(context, of_routing=of_routing, keep_hidden=keep_hidden)
        parts = []
        for i, (stack, of_layers) in enumerate(zip(self.stacks, stored, strict=True)):
            of_stack = dataclasses.replace(context.of_layer(i), last=last and i + 1 == len(self.stacks))
            parts.append((stack.depth, functools.partial(stack, context=of_stack, cache=of_layers)))
        out = in_turn(x, parts)
        end = self._finish(out.x, moved, last)
        if moved is not None:
            moved = dataclasses.replace(moved, layers=out.cache)
        return Body(end, moved, out.infos, (x, *out.hidden, end) if keep_hidden else ())

    def _start(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None,
        positions: Ids | None,
        segment_ids: Ids | None,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        fresh: bool,
    ) -> tuple[Float[Array, "B T D"], Context, Cache | None]:
        """Inputs of the layers: the embedded tokens, the context of all layers, and the cache with the new
        tokens counted in. Of the cache only what all layers share is used."""
        tokens = jnp.asarray(tokens)
        valid = None if attention_mask is None else jnp.asarray(attention_mask) != 0
        segment = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        context, moved = self._context(tokens.shape, valid, positions, segment, cache, key, fresh)
        return split_batch(self.embed(tokens, self.dtype), self.mesh), context, moved

    def _finish(self, x: Float[Array, "B T D"], cache: Cache | None, last: bool) -> Float[Array, "B asked D"]:
        """The norm after the layers, of all tokens or the last one; NaN in rows that do not fit in the cache."""
        x = nan_if_full(x, cache)
        return self.norm(x[:, -1:] if last else x)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The output head: logits in float32."""
        return self.head_weight().float32(x)

    def head_weight(self) -> Kernel:
        """The kernel ``[D, V]`` of the output head; the embedding's table if the two are tied."""
        return self.embed.weight() if self.head is None else self.head.weight()

    def separates_tokens(self, key: Key[Array, ""] | None = None) -> bool:
        """Whether tokens influence each other by attention only, so that a pass may be split, or padded with tokens
        that are not real, without another result. Not so with `Capacity`, where they compete for slots."""
        return all(stack.separates_tokens(key) for stack in self.stacks)

    def empty_cache(self, batch: int, capacity: int, spare: int = 0) -> Cache:
        """A cache for ``capacity`` real tokens per row, in the activations' dtype or in the strategy's format.

        ``spare``: how many of the newest tokens of a row may be taken back, by a smaller ``length``.
        """
        layers = tuple(stack.empty_cache(batch, capacity, self.dtype, spare) for stack in self.stacks)
        return self.cache_of(layers, batch, capacity)

    def cache_of(self, layers: tuple[Any, ...], batch: int, capacity: int) -> Cache:
        """A cache around the layers' empty caches, in the strategy's format."""
        layers = layers if self.cache_format is None else jax.tree.map(self.cache_format, layers)
        return Cache.empty(layers, batch, capacity)

    def _context(
        self,
        shape: tuple[int, ...],
        valid: Array | None,
        positions: Ids | None,
        segment: Array | None,
        cache: Cache | None,
        key: Any,
        fresh: bool,
    ) -> tuple[Context, Cache | None]:
        past, moved, index = None, None, jnp.arange(shape[1], dtype=jnp.int32)
        if positions is None and cache is None:
            positions = jnp.broadcast_to(index, shape)
        if valid is not None:
            index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        if cache is not None:
            index = cache.length[:, None] + jnp.broadcast_to(index, shape)
            moved, past = cache.advance(shape[1], valid, segment)
            positions = jnp.maximum(index, 0) if positions is None else positions
        rotation = rotation_at(self.rope, jnp.asarray(positions), valid)
        return Context(rotation, index, valid, segment, past, key, fresh=fresh and cache is not None), moved


def decoder_of(model: Decoder) -> Decoder:
    """The model as a plain `Decoder`: the part that compiled programs depend on, without config and load report."""
    return Decoder(**{name: getattr(model, name) for name in PARTS})


def shared_part(cache: Cache | None, fresh: bool) -> Cache | None:
    """The part of a cache that all layers share. Raises ValueError if it is promised to be empty and is not."""
    if fresh and cache is not None and cache.known_length:
        raise ValueError(f"fresh=True: {cache.known_length} tokens are in the cache; pass an empty cache")
    return None if cache is None else dataclasses.replace(cache, layers=())


def nan_if_full(x: Float[Array, "B T D"], cache: Cache | None) -> Float[Array, "B T D"]:
    """``x`` with NaN in the rows whose tokens do not fit in the cache."""
    return x if cache is None else jnp.where((cache.length > cache.capacity)[:, None, None], jnp.nan, x)
