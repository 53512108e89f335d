"""Sequences in chunks, for loops that keep the activations of few tokens in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def in_chunks(step: int, *arrays: Array) -> tuple[Array, ...]:
    """``[B, T, …] -> [n, B, step, …]``, the last chunk padded with zeros. Every chunk has tokens of all rows, so that
    rows stay on their devices."""

    def cut(a: Array) -> Array:
        count = -(-a.shape[1] // step)
        a = jnp.pad(a, [(0, 0), (0, count * step - a.shape[1]), *[(0, 0)] * (a.ndim - 2)])
        return jnp.moveaxis(a.reshape(a.shape[0], count, step, *a.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))


def joined(chunks: Array, length: int) -> Array:
    """The inverse: ``[n, B, step, …] -> [B, length, …]``."""
    count, batch, step, *rest = chunks.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, count * step, *rest)[:, :length]


def chunk_by_chunk(run: Callable[..., tuple[Array, Any]], chunks: int, *arrays: Array) -> tuple[Array, Any]:
    """``run(*arrays) -> y [B, T, …], more`` on one of up to ``chunks`` slices of the arrays ``[B, T, …]`` at a time,
    recomputed in the backward pass. Returns y of all tokens, and ``more`` of every slice, stacked."""
    length = arrays[0].shape[1]
    step = -(-length // min(chunks, length))
    y, more = jax.lax.map(jax.checkpoint(lambda chunk: run(*chunk)), in_chunks(step, *arrays))
    return joined(y, length), more
