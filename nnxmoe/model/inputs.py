"""A model's call: arguments of any library, checks on them, padding to a few sizes, and the compiled function."""

import dataclasses
import functools
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Key

from nnxmoe.layers.cache import Cache
from nnxmoe.model.compiled import model_program, require_values
from nnxmoe.model.output import ByLayer, Ids, Output, TokenMask, drop_routing
from nnxmoe.model.stateful import is_stateful
from nnxmoe.sharding import is_static


def are_arrays(tree: Any) -> bool:
    """Whether all leaves of a pytree are arrays with values."""
    kinds = {type(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return all(isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, Tracer) for leaf in kinds)


def as_array(name: str, given: Any) -> Any:
    """Convert an argument to a JAX or NumPy array; None stays None. Raises ValueError for text and other objects."""
    if given is None or isinstance(given, jax.Array | np.ndarray):
        return given
    try:
        array = np.asarray(given)
    except (ValueError, TypeError):  # rows of different lengths
        raise ValueError(f"{name} must be integers [B, T], in rows of one length; got {given!r:.80}") from None
    if array.dtype.kind in "USO":
        remedy = ": encode text with the checkpoint's tokenizer, or call nnxmoe.complete(model, text)"
        raise ValueError(f"{name} must be integers [B, T], got {given!r:.80}{remedy if name == 'tokens' else ''}")
    return array


def check_tokens(tokens: Any, vocab: int, attention_mask: Any, positions: Any, segment_ids: Any) -> None:
    """Raise ValueError for ids outside the vocabulary, if they are known, and for other dtypes and shapes."""
    shape, dtype = np.shape(tokens), getattr(tokens, "dtype", type(tokens))
    if len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {dtype} {list(shape)}")
    given = {"attention_mask": attention_mask, "positions": positions, "segment_ids": segment_ids}
    for name, array in given.items():
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{name} must have the tokens' shape {list(shape)}, got {list(np.shape(array))}")
    if isinstance(tokens, Tracer):
        return
    # In NumPy, because reducing a JAX array inside a trace would be traced. Each process checks its own rows.
    apart = isinstance(tokens, jax.Array) and not tokens.is_fully_addressable
    parts = [np.asarray(p) for p in ([s.data for s in tokens.addressable_shards] if apart else [tokens])]
    low, high = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
    if low < 0 or high >= vocab:
        raise ValueError(f"token ids must lie in 0 … {vocab - 1}, got {low if low < 0 else high}")


def lengths_after(tokens: Any, attention_mask: Any, cache: Cache | None) -> np.ndarray | None:
    """How many real tokens each row has after this pass, with those in the cache; None if that is traced, or held by
    other processes. Raises ValueError if they do not fit in the cache."""
    shape = np.shape(tokens)
    if isinstance(attention_mask, Tracer) or not is_static(*shape):
        return None
    if (stored := np.zeros(shape[0], np.int32) if cache is None else cache.lengths) is None:
        return None
    if isinstance(attention_mask, jax.Array) and not attention_mask.is_fully_addressable:
        return None
    real = np.ones(shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    after = stored + real.sum(axis=1, dtype=np.int32)
    row = int(np.argmax(after))
    if cache is not None and after[row] > cache.capacity:
        raise ValueError(
            f"the cache holds {cache.capacity} tokens; {stored[row]} are in and {after[row] - stored[row]} more do not "
            "fit: make it larger with empty_cache(batch, capacity)"
        )
    return after


_warned = weakref.WeakSet[Any]()  # models whose rows were once longer than their positions


def warn_beyond_positions(model: Any, tokens: int) -> None:
    """Log a warning, once per model, about rows of more tokens than ``max_position_embeddings``."""
    limit = model.config.max_position_embeddings
    if tokens > limit and model not in _warned:
        _warned.add(model)
        text = "a row of up to %d tokens is longer than the %d positions that this model was made for "
        text += "(max_position_embeddings): its output may be poor from there on"
        logging.getLogger("nnxmoe").warning(text, tokens, limit)


def bucket(length: int, smallest: int) -> int:
    """``length`` rounded up to ``smallest`` times 1, 1.5, 2, 3, 4, 6, …: by half at most, or to ``smallest``."""
    size = smallest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def padded(
    size: int, tokens: Any, attention_mask: Any, positions: Any, segment_ids: Any
) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """Tokens, mask, positions and segments with padding at the end."""
    mask = np.ones(np.shape(tokens), bool) if attention_mask is None else np.asarray(attention_mask) != 0

    def wide(array: Any) -> Any:
        return None if array is None else np.pad(np.asarray(array), ((0, 0), (0, size - array.shape[1])))

    return wide(tokens), wide(mask), wide(positions), wide(segment_ids)


def cut(out: Output, length: int, all_real: bool) -> Output:
    """The output for the first ``length`` tokens; without a mask if all of them are real."""
    logits, routing, hidden = jax.tree.map(
        functools.partial(_first_tokens, length=length), (out.logits, out.routing, out.hidden)
    )
    if routing is not None and all_real:
        routing = ByLayer({i: dataclasses.replace(of_layer, valid=None) for i, of_layer in routing.items()})
    return dataclasses.replace(out, logits=logits, routing=routing, hidden=hidden)


def _first_tokens(array: Array, length: int) -> Array:
    """``array[:, :length]``; on CPUs with NumPy, because JAX compiles a slice for each length."""
    if isinstance(array, Tracer) or any(device.platform != "cpu" for device in array.devices()):
        return array[:, :length]
    return jax.device_put(np.asarray(array)[:, :length], array.sharding)


def call(
    model: Any,
    ids: Any,
    attention_mask: Any,
    positions: Any,
    segment_ids: Any,
    cache: Cache | None,
    *wanted: Any,  # return_routing, return_hidden, key
) -> Output:
    """The output of `CausalLM.__call__`. ``wanted``: the arguments after the cache."""
    check_tokens(ids, model.vocab_size, attention_mask, positions, segment_ids)
    arrays: tuple[Any, ...] = (attention_mask, positions, segment_ids, cache)
    lengths = lengths_after(ids, attention_mask, cache)
    if lengths is not None and positions is None and not isinstance(ids, Tracer):
        warn_beyond_positions(model, int(lengths.max()))
    fresh = cache is not None and cache.max_length == 0 and np.shape(ids)[1] > 1  # one token: as any step
    value = next(v.get_value() for _, v in nnx.iter_graph(model.embed) if isinstance(v, nnx.Param))
    eager = not are_arrays((value, ids, arrays, wanted[2]))
    if eager:
        require_values([value])
    plain = functools.partial(_traced, model, ids, *arrays, *wanted, fresh)
    if eager or is_stateful(model):
        return plain()
    length = np.shape(ids)[1]
    exact = model.mesh is not None or (cache is not None and length == 1) or not model.token_independent(wanted[2])
    if not exact:
        ids, *masks = padded(bucket(length, 64), ids, *arrays[:3])
        arrays = (*masks, cache)
    out = model_program(model, _forward, static=(5, 6, 8), by_run=True)(ids, *arrays, *wanted, fresh)
    if is_stateful(model):  # tracing may just have detected it
        return plain()
    if lengths is not None and out.cache is not None:
        out.cache.remember_lengths(lengths)
    return out if exact else cut(out, length, attention_mask is None)


def _traced(model: Any, tokens: Any, *given: Any) -> Output:
    """`_forward`, but raises ValueError for symbolic sizes (`jax.export`) that the model's parts need concrete."""
    if is_static(*np.shape(tokens)):
        return _forward(model, tokens, *given)
    try:
        return _forward(model, tokens, *given)
    except (TypeError, jax.errors.InconclusiveDimensionOperation) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be exported for tokens {list(np.shape(tokens))}: give numbers in place of "
            f"the symbols, one program per size ({str(error).splitlines()[0]})"
        ) from error


def _forward(
    model: Any,
    tokens: Ids,
    attention_mask: TokenMask | None,
    positions: Ids | None,
    segment_ids: Ids | None,
    cache: Cache | None,
    return_routing: bool,
    return_hidden: bool,
    key: Key[Array, ""] | None,
    fresh: bool,
) -> Output:
    """Logits and the requested extras; see `CausalLM.body` for ``fresh``."""
    given = tokens, attention_mask, positions, segment_ids, cache, key, None if return_routing else drop_routing
    body = model.body(*given, fresh=fresh, keep_hidden=return_hidden)
    routing, dispatch = (
        ByLayer({i: getattr(info, name) for i, info in body.infos.items()}) if return_routing else None
        for name in ("routing", "dispatch")
    )
    return Output(model.logits(body.x), body.cache, routing, body.hidden if return_hidden else None, dispatch)
