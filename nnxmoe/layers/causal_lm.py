"""The decoder-only language model: embedding, stacks of layers, norm, head."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.axes import label, split_batch
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.layers.attend import Mask
from nnxmoe.layers.cache import Cache, Slots
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.gqa import Context
from nnxmoe.layers.kernel import Kernel
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import rotation_at
from nnxmoe.layers.stack import MakeLayer
from nnxmoe.moe.block import MoEInfo
from nnxmoe.moe.dispatch import DispatchInfo
from nnxmoe.moe.router import Routing

if TYPE_CHECKING:
    from nnxmoe.strategy import Strategy

Ids = Int[Array, "B T"] | Int[np.ndarray, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a model returns; what was not asked for is None.

    ``routing`` by layer index, MoE layers only; with it ``dispatch``: the experts' load, and what found no room.
    ``hidden``: the embedding, every layer's output, and last the normed output that the head sees.
    """

    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    routing: dict[int, Routing] | None = None
    hidden: tuple[Float[Array, "B T D"], ...] | None = None
    dispatch: dict[int, DispatchInfo] | None = None


@dataclasses.dataclass(frozen=True)
class Body:
    """A forward pass without the head: the normed hidden states that were asked for and what was met on the way."""

    x: Float[Array, "B asked D"]
    cache: Cache | None
    infos: dict[int, MoEInfo]
    hidden: tuple[Float[Array, "B _ D"], ...]


class CausalLM(nnx.Module):
    """A decoder-only language model made of parts; the models only say which.

    ``layers``: runs of equal layers, (how many, how to make one). Parameters have ``dtype``; activations too, unless
    the strategy says otherwise. Without ``rngs`` the parameters are shapes; with a mesh they are made on it.
    """

    hf_table: ClassVar[Mapping[str, tuple[str, ...]]]
    maxtext_table: ClassVar[Mapping[str, tuple[str, tuple[str | None, ...]]]]  # name there, logical axes there
    maxtext_layers: ClassVar[tuple[str, str]] = ("layers", "layers")  # of dense layers, of layers with experts
    load_report: Any = None

    def __init__(
        self,
        config: DecoderConfig,
        strategy: "Strategy",
        layers: Sequence[tuple[int, MakeLayer]],
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        _check_arguments(type(self).__name__, strategy, rngs)
        self.config = config
        self.strategy = strategy
        self.generation_config = {}
        self.merged: Any = None  # adapters, by `nnxmoe.train.lora.merge`
        key = None if rngs is None else rngs.params()
        on_mesh = strategy.mesh is not None
        parts = _Parts(config, strategy, layers, dtype, None if on_mesh else key)
        self.embed, self.stacks, self.norm, self.head = parts.embed, parts.stacks, parts.norm, parts.head
        self._label()
        self.rope = config.rope
        self.window = config.window
        self.dtype = jnp.dtype(strategy.compute_dtype or dtype)
        if on_mesh and key is not None:
            self._initialise_on_mesh(lambda key: _Parts(config, strategy, layers, dtype, key), key)

    def _label(self) -> None:
        """Stamp every parameter with its key, layer and stack: checkpoints and training find it by those."""
        first = 0
        for i, stack in enumerate(self.stacks):
            stack.label(i, first)
            first += stack.depth
        for name in ("embed", "norm", "head"):
            if (part := getattr(self, name)) is not None:
                label(part, name)

    def _initialise_on_mesh(self, make: "Callable[[Array], _Parts]", key: Array) -> None:
        """Sets the values that one device would compute, each shard computed on the device that holds it."""
        shapes = nnx.to_flat_state(nnx.state(self))
        shardings = [self.strategy.sharding_of(variable) for _, variable in shapes]

        def values(key: Array) -> list[Array]:
            return [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(make(key)))]

        made = jax.jit(values, out_shardings=shardings)(key)
        nnx.update(self, nnx.from_flat_state([(p, v.replace(a)) for (p, v), a in zip(shapes, made, strict=True)]))

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's defaults for generation; assigning a dict stores a frozen copy."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"generation_config must be a mapping, got {fields!r}")
        self._generation_config = FrozenDict(fields)

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | os.PathLike[str], **options: Any) -> Self:
        """``nnxmoe.from_pretrained`` for this class only: ValueError where the checkpoint is of another."""
        from nnxmoe.convert.hf import from_pretrained  # the one door upwards: a convenience of the public API

        return cast(Self, from_pretrained(path_or_hub_id, expect=cls, **options))

    def __call__(
        self,
        tokens: Ids,
        attention_mask: Ids | Bool[Array, "B T"] | Bool[np.ndarray, "B T"] | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        return_routing: bool = False,
        return_hidden: bool = False,
        key: Key[Array, ""] | None = None,
    ) -> Output:
        """Logits ``[B, T, V]`` in float32 for token ids ``[B, T]``.

        ``attention_mask``: nonzero where a token is real, for these T tokens (a cache remembers the earlier ones).
        ``positions``: rotary positions; default 0 … T-1, and with a cache the count of real tokens before.
        ``segment_ids``: tokens see their own segment only (packed documents). ``cache``: from ``empty_cache``.
        ``key``: of the router's jitter, where the config has one; without it there is none.
        Called with arrays it compiles once for each shape, and once more for several tokens and an empty cache, which
        attend to each other alone; within a transformation it is traced like any function.
        Raises ValueError for ids outside the vocabulary, wrong shapes, a full cache, or a model without values. Within
        a transformation the cache's length is unknown: logits of tokens that do not fit are NaN there.
        """
        tokens = _array(tokens)
        attention_mask, positions, segment_ids = map(_array, (attention_mask, positions, segment_ids))
        arrays = (attention_mask, positions, segment_ids, cache, key)
        self._check(tokens, attention_mask, positions, segment_ids, cache)
        asked = (return_routing, return_hidden)
        fresh = cache is not None and cache.known_length == 0 and np.shape(tokens)[1] > 1  # one token: as any step
        graph, state = nnx.split(self)
        leaves, tree = jax.tree.flatten(state)
        given = jax.tree.leaves((leaves, tokens, arrays))
        if all(isinstance(a, jax.Array | np.ndarray) and not isinstance(a, Tracer) for a in given):
            return _compiled(graph, tree)(leaves, tokens, arrays, asked, fresh)
        refuse_shapes(leaves)
        return self._forward(tokens, arrays, asked, fresh)

    def _forward(self, tokens: Any, arrays: tuple[Any, ...], asked: tuple[bool, bool], fresh: bool = False) -> Output:
        body = self.body(tokens, *arrays, fresh=fresh)
        routing = {i: info.routing for i, info in body.infos.items()} if asked[0] else None
        dispatch = {i: info.dispatch for i, info in body.infos.items()} if asked[0] else None
        return Output(self.logits(body.x), body.cache, routing, body.hidden if asked[1] else None, dispatch)

    def body(
        self,
        tokens: Ids,
        attention_mask: Ids | Bool[Array, "B T"] | Bool[np.ndarray, "B T"] | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        key: Key[Array, ""] | None = None,
        of_routing: Callable[[Routing], Any] | None = None,
        *,
        fresh: bool = False,
        last: bool = False,
    ) -> Body:
        """Everything but the head, for callers that want the logits of some tokens only.

        ``of_routing``: what the infos are to hold of each layer's routing, computed in the layer: less to keep.
        ``fresh``: the caller knows that the cache is empty, so that its slots need not be looked at; ValueError where
        it is not, as far as one sees.
        ``last``: only the last token's ``x`` is wanted, ``[B, 1, D]``. Where the last layer can leave out the others
        (but for their keys and values), what ``infos`` and ``hidden`` hold of it is of that token alone.
        """
        if fresh and cache is not None and cache.known_length:
            raise ValueError(
                f"fresh=True: {cache.known_length} tokens are in the cache; give an empty one, or leave it"
            )
        tokens = jnp.asarray(tokens)
        valid = None if attention_mask is None else jnp.asarray(attention_mask) != 0
        segment = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        context, moved = self._context(tokens.shape, valid, positions, segment, cache, key, fresh)
        context = dataclasses.replace(context, of_routing=of_routing)
        x = split_batch(self.embed(tokens).astype(self.dtype), self.strategy.mesh)
        infos, hidden, caches, first = {}, [x], [], 0
        for i, stack in enumerate(self.stacks):
            of_stack = dataclasses.replace(context.of_layer(i), last=last and i + 1 == len(self.stacks))
            out = stack(x, of_stack, None if cache is None else cache.layers[i])
            x = out.x
            infos |= {first + j: info for j, info in enumerate(out.infos) if info is not None}
            hidden += out.hidden
            caches.append(out.cache)
            first += stack.depth
        if moved is not None:
            moved = dataclasses.replace(moved, layers=tuple(caches))
            x = jnp.where(moved.length > moved.capacity, jnp.nan, x)
        x = self.norm(x[:, -1:] if last else x)
        return Body(x, moved, infos, (*hidden, x))

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The output head: logits in float32."""
        return self.head_weight().float32(x)

    def head_weight(self) -> Kernel:
        """The kernel ``[D, V]`` of the output head; the embedding's table if the two are tied."""
        return self.embed.weight() if self.head is None else self.head.weight()

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache for ``capacity`` tokens a row, padding included, in the activations' dtype."""
        layers = tuple(stack.empty_cache(batch, capacity, self.dtype) for stack in self.stacks)
        ring = self.window is not None
        slots = capacity if self.window is None else min(self.window, capacity)
        return Cache.empty(layers, batch, slots, capacity, ring)

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
        index = jnp.arange(shape[1], dtype=jnp.int32)
        start, moved = jnp.int32(0), None
        mask = Mask(index, segment, Slots(index, valid, segment), self.window, causal=True)  # of these tokens alone
        if cache is None:
            if positions is None:
                positions = jnp.broadcast_to(index, shape)
        else:
            start = cache.length
            valid = jnp.ones(shape, bool) if valid is None else valid
            segment = jnp.zeros(shape, jnp.int32) if segment is None else segment
            moved, seen = cache.advance(valid, segment)
            if not fresh:
                mask = Mask(start + index, segment, seen, self.window)
            if positions is None:
                before = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
                positions = jnp.maximum(cache.next_position[:, None] + before, 0)
        rotation = rotation_at(self.rope, jnp.asarray(positions))
        return Context(rotation, mask, start, valid, key, fresh=fresh and cache is not None), moved

    def _check(self, tokens: Any, attention_mask: Any, positions: Any, segment_ids: Any, cache: Cache | None) -> None:
        shape = np.shape(tokens)
        if len(shape) != 2 or 0 in shape or not jnp.issubdtype(jnp.result_type(tokens), jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {jnp.result_type(tokens)} {list(shape)}")
        given = {"attention_mask": attention_mask, "positions": positions, "segment_ids": segment_ids}
        for name, array in given.items():
            if array is not None and np.shape(array) != shape:
                raise ValueError(f"{name} must have the tokens' shape {list(shape)}, got {list(np.shape(array))}")
        if not isinstance(tokens, Tracer) and np.size(tokens):
            vocab = self.embed.table.shape[0]
            # As NumPy: under a trace, reducing a JAX array would be traced too. Of other processes' rows they know.
            apart = isinstance(tokens, jax.Array) and not tokens.is_fully_addressable
            parts = [np.asarray(p) for p in ([s.data for s in tokens.addressable_shards] if apart else [tokens])]
            low, high = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
            if low < 0 or high >= vocab:
                raise ValueError(f"token ids must lie in 0 … {vocab - 1}, got {low if low < 0 else high}")
        if cache is not None and (cache.known_length or 0) + shape[1] > cache.capacity:
            raise ValueError(
                f"the cache holds {cache.capacity} tokens; {cache.known_length or 0} are in and {shape[1]} more do not "
                "fit: make it larger with empty_cache(batch, capacity)"
            )


def _array(given: Any) -> Any:
    return np.asarray(given) if isinstance(given, list | tuple) else given


def refuse_shapes(leaves: Sequence[Any]) -> None:
    """Raises ValueError if a model's variables have no values."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model has shapes only: load weights first, or make it with rngs=nnx.Rngs(0)")


def _check_arguments(name: str, strategy: Any, rngs: Any) -> None:
    remedy = f"give random keys as {name}(config, rngs=nnx.Rngs(0)), or rngs=None for shapes without values"
    if isinstance(strategy, nnx.Rngs):
        raise ValueError(f"strategy=Rngs(…) is no nnxmoe.Strategy: {remedy}")
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"{remedy}, got rngs={rngs!r}")


class _Parts(nnx.Module):
    """What a model is made of: a function of one key, or without one (None) of shapes."""

    def __init__(
        self,
        config: DecoderConfig,
        strategy: "Strategy",
        layers: Sequence[tuple[int, MakeLayer]],
        dtype: jnp.dtype,
        key: Array | None,
    ):
        kw: dict[str, Any] = {"dtype": dtype, "rngs": None if key is None else nnx.Rngs(key)}
        vocab, dim = config.vocab_size, config.hidden_size
        self.embed = Embed(vocab, dim, **kw)
        self.stacks = nnx.List([strategy.stack(count, make, kw["rngs"]) for count, make in layers if count])
        self.norm = RMSNorm(dim, config.rms_norm_eps, **kw)
        self.head = None if config.tie_word_embeddings else Linear((dim,), (vocab,), ("embed", "vocab"), **kw)


@functools.lru_cache(maxsize=32)
def _compiled(graph: Any, tree: Any) -> Any:
    """The forward pass of one model structure as a compiled function of its flat list of weights."""

    def run(
        leaves: list[Array], tokens: Array, arrays: tuple[Any, ...], asked: tuple[bool, bool], fresh: bool
    ) -> Output:
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return model._forward(tokens, arrays, asked, fresh)

    return jax.jit(run, static_argnums=(3, 4))
