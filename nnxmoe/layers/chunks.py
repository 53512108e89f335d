"""Loops over chunks of a sequence. Only the activations of one chunk are in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def split_chunks(size: int, *arrays: Array) -> tuple[Array, ...]:
    """Split arrays ``[B, T, …]`` into chunks ``[n, B, size, …]``. The last chunk is padded with zeros.

    Each chunk contains tokens of every row, so rows remain on the same devices.
    """

    def split(array: Array) -> Array:
        rows, length, *rest = array.shape
        count = -(-length // size)
        array = jnp.pad(array, [(0, 0), (0, count * size - length), *[(0, 0)] * len(rest)])
        return jnp.moveaxis(array.reshape(rows, count, size, *rest), 1, 0)

    return tuple(map(split, arrays))


def join_chunks(chunks: Array, length: int) -> Array:
    """Invert `split_chunks`: ``[n, B, size, …] -> [B, length, …]``."""
    count, batch, size, *rest = chunks.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, count * size, *rest)[:, :length]


def map_chunks(run: Callable[..., tuple[Array, Any]], chunks: int, *arrays: Array) -> tuple[Array, Any]:
    """Apply a function to one chunk of tokens at a time. The backward pass rematerializes each chunk.

    Args:
        run: Function ``(*arrays) -> y [B, t, …], info``.
        chunks: Maximum number of chunks. There are at most as many chunks as tokens.
        *arrays: Arrays ``[B, T, …]``.

    Returns:
        The outputs ``y`` of all tokens, and the stacked ``info`` of all chunks.
    """
    length = arrays[0].shape[1]
    size = -(-length // min(chunks, length))
    y, info = jax.lax.map(jax.checkpoint(lambda chunk: run(*chunk)), split_chunks(size, *arrays))
    return join_chunks(y, length), info
