"""Batches of tokens: fields, validation, targets and loss weights."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.printable import short

FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions", "attention_mask")
MASKS = ("loss_mask", "attention_mask")
Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Restartable:
    """Re-iterable batches. Each iteration calls ``make`` for a new iterator."""

    make: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.make()


def as_arrays(batch: Any) -> dict[str, Any]:
    """Convert the lists and torch tensors of a batch to NumPy arrays.

    Raises ValueError if the batch is not a dict of arrays.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch must be a dict of arrays, got {type(batch).__name__}: pass an iterable of dicts")
    return {name: _as_array(name, value) for name, value in batch.items()}


def _as_array(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        is_list = isinstance(value, list | tuple)
        reason = "its rows have different lengths: pad them" if is_list else f"{short(str(error))}"
        raise ValueError(f"{name} in a batch is not an array: {reason}") from None
    if array.dtype == object:
        raise ValueError(f"{name} in a batch is {short(value)}: pass an array of numbers")
    return array


def check_batch(batch: Batch) -> None:
    """Validate a batch of tokens.

    Raises ValueError if a field is unknown, if shapes differ or are empty, if ids are not integers, or
    if `check_masks` rejects a mask.
    """
    if unknown := [name for name in batch if name not in FIELDS]:
        raise ValueError(
            f"unknown field {unknown[0]!r} in a batch: the fields are {', '.join(FIELDS)}. Rename input_ids to "
            "tokens, and omit labels, because the targets are the next tokens where loss_mask is 1"
        )
    if "tokens" not in batch:
        raise ValueError(f"a batch needs tokens [B, T], got {', '.join(batch) or 'no fields'}")
    shape = list(jnp.shape(batch["tokens"]))
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"tokens has the shape {shape}: it must be [B, T], with at least one row and one token")
    for name, array in batch.items():
        if (array_shape := list(jnp.shape(array))) != shape:
            raise ValueError(f"{name} has the shape {array_shape}, but tokens has {shape}: every array must be [B, T]")
        if name not in MASKS and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} has the dtype {array.dtype}: use an integer dtype, such as int32")
    check_masks(batch)


def values_of(array: Any) -> np.ndarray:
    """Return the values of an array. Empty for tracers, abstract arrays and arrays sharded over several processes."""
    is_hidden = isinstance(array, Tracer | jax.ShapeDtypeStruct) or not getattr(array, "is_fully_addressable", True)
    return np.empty(0, np.int32) if is_hidden else np.asarray(array)


def check_masks(batch: Batch) -> None:
    """Raise ValueError if a mask has values other than 0 and 1. Skips arrays without values, see `values_of`."""
    for name in MASKS:
        values = values_of(batch.get(name, 0))
        if (invalid := values[(values != 0) & (values != 1)]).size:
            raise ValueError(
                f"{name} contains {invalid[0]}: use 1, or 0 to exclude a token. Pass the numbers of packed documents "
                "as segment_ids. Per-token weights require a custom objective"
            )


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return np.shape(next(iter(batch.values())))[0]


def check_ids(batch: Batch, names: Iterable[str], vocab: int) -> None:
    """Raise ValueError if an id in the named fields is outside the vocabulary. The arrays must be concrete."""
    for name in names:
        ids = np.asarray(batch.get(name, 0))
        for value in (int(np.min(ids, initial=0)), int(np.max(ids, initial=0))):
            if not 0 <= value < vocab:
                raise ValueError(
                    f"{name} contains the id {value}, outside the model's vocabulary 0 to {vocab - 1}: use the model's "
                    "tokenizer. For tokens without a target, set the id and loss_mask to 0"
                )


def real_tokens(batch: Batch) -> Array:
    """Return a mask ``[B, T]`` that is False for padding (attention mask or segment id 0)."""
    real = jnp.ones(jnp.shape(batch["tokens"]), bool)
    if "attention_mask" in batch:
        real &= jnp.asarray(batch["attention_mask"]) != 0
    if "segment_ids" in batch:
        real &= jnp.asarray(batch["segment_ids"]) != 0
    return real


def targets_of(batch: Batch) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Return the target of each token and its weight in the loss, 1 or 0.

    Without ``targets`` in the batch, the target is the next token of the row. Its weight is 1 if the
    next token is not padding, is in the same segment and has ``loss_mask`` 1.
    """
    real = real_tokens(batch)
    counted = real & (jnp.asarray(batch["loss_mask"]) != 0) if "loss_mask" in batch else real
    if "targets" in batch:
        return jnp.asarray(batch["targets"]), counted.astype(jnp.float32)
    next_counted = jnp.roll(counted, -1, axis=1) & _followed(batch, real)
    return jnp.roll(jnp.asarray(batch["tokens"]), -1, axis=1), next_counted.astype(jnp.float32)


def _followed(batch: Batch, real: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return a mask of the real tokens that are followed by a token of the same segment."""
    followed = real & (jnp.arange(real.shape[1]) < real.shape[1] - 1)[None, :]
    if "segment_ids" in batch:
        segments = jnp.asarray(batch["segment_ids"])
        followed &= jnp.roll(segments, -1, axis=1) == segments
    return followed


class Ahead(NamedTuple):
    """Tokens a fixed number of positions ahead of each position, with their targets and loss weights.

    Attributes:
        there: True if the token is in the same document as the position.
    """

    tokens: Int[Array, "B T"]
    there: Bool[Array, "B T"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]


def targets_ahead(batch: Batch, steps: int) -> list[Ahead]:
    """Return the tokens and targets 1, 2, …, ``steps`` positions ahead.

    ``there`` is False and the weight is 0 if padding or a segment boundary comes before the token.
    """
    real, steps_ahead = real_tokens(batch), list[Ahead]()
    followed = _followed(batch, real)
    current = Ahead(jnp.asarray(batch["tokens"]), real, *targets_of(batch))
    for _ in range(steps):
        tokens, same_document, targets, weights = (jnp.roll(array, -1, axis=1) for array in current)
        same_document &= followed
        current = Ahead(tokens, same_document, targets, weights * same_document)
        steps_ahead.append(current)
    return steps_ahead
