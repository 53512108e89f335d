"""Protocols of attention and feed-forward layers, and the inputs that all layers share."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree, Shaped

from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.cache import Cache, CacheMetadata, SlotMetadata, TokenCache
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import RotateFn, Rotation, Rotations, compute_rotation


@dataclasses.dataclass(frozen=True)
class OutputRequest:
    """Outputs that a caller requests from the layers.

    Attributes:
        last_token_only: Whether to return only the output of the last token.
        all_hidden: Whether to return the outputs of all layers instead of only the last layer.
        reduce_routing: Function applied to each layer's routing before it is returned, to save memory. If ``None``, the
            complete routing is returned.
    """

    last_token_only: bool = False
    all_hidden: bool = True
    reduce_routing: Callable[[Any], Any] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs of a forward pass that all layers share: positions, padding, segments and the state of the cache.

    Each attention layer derives the mask, the cache slots and the rotation from the context.

    Attributes:
        index: Index of each token among the real tokens of the row. Padding repeats the index of the previous token.
        valid: False for padding. ``None`` if there is no padding.
        segment: Segment ids of packed documents. ``None`` if each row is a single segment.
        past: Metadata of the cache. ``None`` for passes without a cache.
        key: Random key of the router jitter. ``None`` disables jitter.
        tokens: Token ids, for routers that depend on token ids.
        positions: Positions for the rotary embedding.
        rotations: Rotations, computed once for all layers.
        fresh: Whether the cache was empty before the pass. If so, tokens attend to each other without reading the
            cache.
        request: Outputs that each layer returns.
        experts: Given expert ids of a layer, or of all layers of a stack. The router selects the experts of tokens with
            negative ids. ``None`` if it selects the experts of all tokens.
    """

    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B T"] | None = None
    segment: Int[Array, "B S"] | None = None
    past: CacheMetadata | None = None
    key: Key[Array, ""] | None = None
    tokens: Int[Array, "B T"] | None = None
    positions: Int[Array, "B S"] | None = None
    rotations: Rotations = dataclasses.field(default_factory=Rotations)
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})
    request: OutputRequest = dataclasses.field(default=OutputRequest(), metadata={"static": True})
    experts: Integer[Array, "B L T X"] | Integer[Array, "B T X"] | None = None

    @classmethod
    def from_lengths(
        cls, rope: Rope, batch: int, length: int, lengths: Integer[Any, "B"] | Sequence[int] | None = None
    ) -> Self:
        """Create a context without a cache, to call a layer or an attention module directly.

            x = jnp.ones((2, 9, config.hidden_size))
            y, _ = model.stacks[0].layers[0].attention(x, Context.from_lengths(config.rope, 2, 9, lengths=[9, 4]))

        Args:
            rope: Rotary position embedding of the layer.
            batch: Number of rows.
            length: Number of tokens per row.
            lengths: Number of real tokens per row, followed by padding. Defaults to ``length``, without padding.

        Raises:
            ValueError: If ``lengths`` is not ``batch`` integers from 0 to ``length``. Traced values are not checked.
        """
        index = jnp.arange(length, dtype=jnp.int32)
        context = cls(index)._with_rotations((rope,), jnp.broadcast_to(index, (batch, length)))
        if lengths is None:
            return context
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(lengths))
        counts = jnp.asarray(lengths) if is_traced else np.asarray(lengths)  # NumPy avoids tracing the checks under jit
        is_valid = counts.shape == (batch,) and jnp.issubdtype(counts.dtype, jnp.integer)
        if not is_valid or not (is_traced or np.all((counts >= 0) & (counts <= length))):
            raise ValueError(f"lengths={lengths}: pass {batch} token counts from 0 to {length}")
        counts = jnp.asarray(counts, jnp.int32)  # signed, because empty rows need index -1
        valid = index < counts[:, None]
        return dataclasses.replace(context, index=jnp.minimum(index, counts[:, None] - 1), valid=valid)

    def for_layer(self, index: int | Int[Array, ""], *, last_token_only: bool) -> Self:
        """Return the context of one layer of a stack.

        Args:
            index: Index of the layer in the stack, folded into the random key.
            last_token_only: Value for ``request.last_token_only``.
        """
        experts = self.experts
        if experts is not None:
            experts = jax.lax.dynamic_index_in_dim(experts, index, 1, keepdims=False)
        request = dataclasses.replace(self.request, last_token_only=last_token_only)
        return dataclasses.replace(self.fold_key(index), request=request, experts=experts)

    def fold_key(self, index: int | Int[Array, ""]) -> Self:
        """Fold ``index`` into the random key."""
        return self if self.key is None else dataclasses.replace(self, key=jax.random.fold_in(self.key, index))

    def given_experts(self) -> Int[Array, "B T X"] | None:
        """Return the given expert ids of the layer, with -1 for padding."""
        if self.experts is None:
            return None
        experts = self.experts.astype(jnp.int32)
        return experts if self.valid is None else jnp.where(self.valid[..., None], experts, -1)

    def output_tokens(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T_out ..."]:
        """Select the tokens whose output is requested: all tokens, or only the last token."""
        return x[:, -1:] if self.request.last_token_only else x

    def output_queries(self, mask: Mask) -> Mask:
        """Select the mask queries whose output is requested."""
        return mask.select(slice(-1, None), slice(None)) if self.request.last_token_only else mask

    def for_output_tokens(self) -> Self:
        """Restrict the context to the tokens whose output is requested."""
        valid = None if self.valid is None else self.output_tokens(self.valid)
        tokens = None if self.tokens is None else self.output_tokens(self.tokens)
        experts = None if self.experts is None else self.output_tokens(self.experts)
        return dataclasses.replace(self, valid=valid, tokens=tokens, experts=experts)

    def rotate(
        self, x: Float[Array, "B T_out N H"], rope: Rope | None, rotate: RotateFn
    ) -> Float[Array, "B T_out N H"]:
        """Rotate queries or keys by position. If ``rope`` is None, return ``x`` unchanged."""
        if rope is None:
            return x
        if (rotation := self.rotations.get(rope)) is None:
            assert self.positions is not None
            rotation = compute_rotation(rope, self.positions, self.valid)
        return rotate(x, rotation)

    def rotation_at(self, rope: Rope, positions: Int[Array, "B P"]) -> Rotation:
        """Compute the rotation of P keys at ``positions`` of this pass or earlier, with the frequencies of this pass.

        The P keys follow the tokens of this pass in the rotation, because the length of the pass may select the
        frequencies. A `RotateFn` uses the last P tokens.
        """
        assert self.positions is not None
        own_positions = self.positions if self.valid is None else jnp.where(self.valid, self.positions, 0)
        own_positions = jnp.broadcast_to(own_positions, (len(positions), own_positions.shape[-1]))
        capacity = None if self.past is None else self.past.segment.shape[1]
        return compute_rotation(rope, jnp.concatenate([own_positions, positions], axis=1), capacity=capacity)

    def _with_rotations(
        self, ropes: tuple[Rope, ...], positions: Int[Array, "B S"], capacity: int | None = None
    ) -> Self:
        """Return a copy of the context with ``positions`` and the rotations of all layers."""
        rotations = Rotations({rope: compute_rotation(rope, positions, self.valid, capacity) for rope in ropes})
        return dataclasses.replace(self, positions=positions, rotations=rotations)

    @classmethod
    def from_inputs(
        cls,
        ropes: tuple[Rope, ...],
        tokens: Int[Array, "B T"],
        attention_mask: Shaped[Array | np.ndarray, "B T"] | None,
        positions: Int[Array | np.ndarray, "B T"] | None,
        segment_ids: Int[Array | np.ndarray, "B T"] | None,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        fresh: bool,
    ) -> tuple[Self, Cache | None]:
        """Create the context of a forward pass, and update the lengths of the cache.

        Args:
            ropes: Rotary position embeddings of all layers.
            cache: Cache without ``layers``; see `Cache.without_layers`.
            tokens, attention_mask, positions, segment_ids, key, fresh: See `CausalLM.body`.
        """
        past, advanced_cache, index, shape = None, None, jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape
        valid = None if attention_mask is None else jnp.asarray(attention_mask) != 0
        segment = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        if positions is None and cache is None:
            positions = jnp.broadcast_to(index, shape)
        if valid is not None:
            index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        if cache is not None:
            index = cache.length[:, None] + jnp.broadcast_to(index, shape)
            advanced_cache, past = cache.advance(shape[1], valid, segment)
            positions = jnp.maximum(index, 0) if positions is None else positions
        context = cls(index, valid, segment, past, key, tokens, fresh=fresh and cache is not None)
        capacity = None if cache is None else cache.capacity
        return context._with_rotations(ropes, jnp.asarray(positions), capacity), advanced_cache

    def append_to_cache(
        self, cache: TokenCache | None, new: PyTree, window: int | None
    ) -> tuple[TokenCache | None, PyTree, Mask]:
        """Append new tokens to a layer's cache.

        Args:
            cache: Cache of the layer, if any.
            new: Keys and values, or latents, of the new tokens.
            window: Size of the sliding window, if any.

        Returns:
            The updated cache, the keys and values (or latents) that the tokens attend to, and the mask.
        """
        slots = SlotMetadata(self.index, self.valid, self.segment)
        mask, attended_values = Mask(self.index, self.segment, slots, window, causal=True), new
        if cache is not None:
            assert self.past is not None
            cache, cached_values, slots = cache.append(new, self.past)
            if not self.fresh:
                segment = jnp.zeros(self.past.index.shape, jnp.int32) if self.segment is None else self.segment
                attended_values, mask = cached_values, Mask(self.index, segment, slots, window)
        return cache, attended_values, self.output_queries(mask)


class Attention(Protocol):
    """Protocol for attention modules, the first half of a layer: ``(x, context, cache) -> y, cache``.

    ``y`` contains all tokens, or only the last token if ``context.request.last_token_only``. Inputs may contain
    padding. Attention to padding must be masked; see ``context.valid``. Calls with a cache, such as generation, also
    require ``empty_cache``.
    """

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None = None
    ) -> tuple[Float[Array, "B T_out D"], PyTree | None]: ...

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create a cache for ``capacity`` tokens per row. The ``lookahead`` most recent tokens may be discarded."""
        ...


class FeedForwardOutput(NamedTuple):
    """Output and `MoEInfo` of a feed-forward layer with experts.

    This class is a named tuple, because `nnx.tabulate` fails on dataclasses in plain tuples.
    """

    y: Float[Array, "B T D"]
    info: PyTree


class FeedForward(Protocol):
    """Protocol for feed-forward modules, the second half of a layer, such as `MLP` and `MoE`.

    Returns ``y``, or a `FeedForwardOutput`. Two members are optional:

    - ``name: ClassVar[str]``, the attribute name in the layer and in parameter keys, ``mlp`` or ``moe``. Defaults to
      the name of the module that this module replaces, or to ``mlp``.
    - ``token_independent(key) -> bool``, whether a token's output is independent of all other tokens. ``key`` is
      `Context.key`. Without this method, the input is neither padded nor split.
    """

    def __call__(
        self, x: Float[Array, "B T D"], context: Context | None = None
    ) -> Float[Array, "B T D"] | FeedForwardOutput: ...


def token_independent(module: Any, key: Key[Array, ""] | None) -> bool:
    """Return ``module.token_independent(key)``, or False if the module does not define this method."""
    method = getattr(module, "token_independent", None)
    return method is not None and method(key)


def check_call(name: str, module: Any, *options: str) -> None:
    """Raise ValueError if a module cannot be called with ``x`` and these keyword arguments.

    Args:
        name: Name of the module, for the error message.
        module: Module of a layer.
        *options: Names of the keyword arguments.
    """
    parameters = inspect.signature(module).parameters.values() if callable(module) else ()
    has_var_keyword = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not callable(module) or not (has_var_keyword or {parameter.name for parameter in parameters} >= set(options)):
        call = ", ".join(("x", *(f"{option}=…" for option in options)))
        raise ValueError(f"{name} = {type(module).__name__}(…): it must be a module that accepts ({call})")
