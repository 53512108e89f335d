"""Gated delta rule (Yang et al. 2024): each token decays and updates a float32 state matrix S per head.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Values have N heads. Queries and keys have K heads, and N / K consecutive value heads share a query and key head.
Without the correction ``- S^T k``, the rule is the recurrence of Mamba-2 (Dao & Gu 2024). In Kimi Delta Attention (Kimi
team 2025), g is a vector over the key channels: ``S <- diag(exp(g)) S``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64  # tokens per chunk


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for T tokens, in float32.

    Tokens whose ``beta`` and ``g`` are 0, such as padding, do not change the state.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        g: Log decays, at most 0, per head or per key channel.
        beta: Update strengths.
        segment: Segment of each token: the number of segments that start at or before the token. Each segment starts
            with a zero state. ``None`` if all tokens continue the segment of the state.
    """

    q: Float[Array, "B T K H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T N W"]
    g: Float[Array, "B T N"] | Float[Array, "B T N H"]
    beta: Float[Array, "B T N"]
    segment: Int[Array, "B T"] | None


ChunkedRule = Callable[[DeltaInputs, Array], tuple[Array, Array]]
"""Function ``(inputs, state) -> outputs [B T N W], final state [B N H W]``."""


Recurrence = Callable[[DeltaInputs, Array, ChunkedRule], tuple[Array, Array]]
"""Function ``(inputs, state, chunked_rule) -> outputs, final state``; see ``Strategy.recurrence``."""


def einsum_highest(spec: str, *operands: Array) -> Array:
    """Compute an einsum with float32 precision on every platform."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def recurrent_delta_rule(
    inputs: DeltaInputs,
    state: Float[Array, "B N H W"],
    state_segment: Int[Array, "B"] | None = None,
    *,
    has_correction: bool = True,
) -> tuple[Float[Array, "B T N W"], Float[Array, "B T N H W"]]:
    """Compute the delta rule token by token, for decoding. This function is the reference for `chunk_delta_rule`.

    Args:
        inputs: Inputs of all tokens.
        state: State before the first token.
        state_segment: Segment of the state. Defaults to 0.
        has_correction: Whether the rule includes the correction ``- S^T k``.

    Returns:
        The outputs, and the state after each token.
    """
    q, k, v, g, beta, segment = inputs
    groups = v.shape[2] // k.shape[2]
    state_segment = jnp.zeros(len(q), jnp.int32) if state_segment is None else state_segment

    def step(carry: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (state, state_segment), (q, k, v, g, beta, segment) = carry, token
        q, k = (jnp.repeat(a, groups, axis=1)[..., None] for a in (q, k))
        decay = jnp.exp(g) * (segment == state_segment).reshape(-1, *(1,) * (g.ndim - 1))
        state = state * (decay[..., None] if g.ndim == 3 else decay[:, :, None, None])
        update = beta[..., None] * (v - jnp.sum(state * k, axis=2) if has_correction else v)
        state = state + k * update[:, :, None]
        return (state, segment), (jnp.sum(state * q, axis=2), state)

    segment = jnp.broadcast_to(state_segment[:, None], q.shape[:2]) if segment is None else segment
    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta, segment))
    if len(tokens[0]) == 1:
        _, (output, state) = step((state, state_segment), tuple(a[0] for a in tokens))
        return output[:, None], state[:, None]
    _, (outputs, states) = jax.lax.scan(step, (state, state_segment), tokens)
    return jnp.moveaxis(outputs, 0, 1), jnp.moveaxis(states, 0, 1)


def chunk_delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk: int = CHUNK, *, has_correction: bool = True
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Compute the delta rule in chunks with matrix products (the WY form), for ``g [B T N]``.

    The corrections within a chunk are the solution of a triangular system. A loop over chunks carries only the state.

    Args:
        inputs: Inputs of all tokens.
        state: State before the first token, in segment 0.
        chunk: Maximum number of tokens per chunk.
        has_correction: See `recurrent_delta_rule`.

    Returns:
        The outputs, and the state after the last token.
    """
    (batch, length, keys, _), (heads, width) = inputs.k.shape, inputs.v.shape[2:]
    size, count = _chunk_size_and_count(length, chunk)
    groups = heads // keys

    def split(a: Array, *shape: int) -> Array:
        """Split ``[B T …]`` into n chunks of C tokens, ``[n B … C]`` or ``[n B … C W]``."""
        a = jnp.pad(a, ((0, 0), (0, count * size - length), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(batch, count, size, *shape), (1, 2), (0, 2 + len(shape) - (a.ndim == 4)))

    q, k = (split(a, keys, a.shape[-1]) for a in (inputs.q, inputs.k))
    v, g, beta = split(inputs.v, keys, groups, width), split(inputs.g, keys, groups), split(inputs.beta, keys, groups)
    causal = jnp.tril(jnp.ones((size, size), bool))
    log_decay = _sums_between(g)
    from_start, to_end = jnp.exp(jnp.cumsum(g, axis=-1)), log_decay[..., -1, :]
    if inputs.segment is not None:  # tokens do not depend on other segments
        segment = jnp.pad(inputs.segment, ((0, 0), (0, count * size - length)), mode="edge")
        segment = jnp.moveaxis(segment.reshape(batch, count, size), 1, 0)
        previous_segment = jnp.concatenate([jnp.zeros((1, batch, 1), segment.dtype), segment[:-1, :, -1:]])
        causal = causal & (segment[..., :, None] == segment[..., None, :])[:, :, None, None]
        from_start = from_start * (segment == previous_segment)[:, :, None, None]
        to_end = jnp.where((segment == segment[..., -1:])[:, :, None, None], to_end, -jnp.inf)
    decay, to_end = jnp.exp(jnp.where(causal, log_decay, -jnp.inf)), jnp.exp(to_end)
    state_decay = from_start[..., -1]
    values, correction = beta[..., None] * v, None
    if has_correction:
        system = beta[..., None] * einsum_highest("nbkch,nbkdh->nbkcd", k, k)[:, :, :, None] * decay
        inverse = unit_lower_inverse(jnp.tril(system, -1))
        values = einsum_highest("nbkgcd,nbkgdw->nbkgcw", inverse, values)
        correction = einsum_highest("nbkgcd,nbkdh->nbkgch", inverse * (beta * from_start)[..., None, :], k)
    scores = einsum_highest("nbkch,nbkdh->nbkcd", q, k)[:, :, :, None] * decay

    def step(state: Array, chunk: Any) -> tuple[Array, Array]:
        q, k, values, correction, scores, from_start, to_end, state_decay = chunk
        new_values = values if correction is None else values - einsum_highest("bkgch,bkghw->bkgcw", correction, state)
        outputs = from_start[..., None] * einsum_highest("bkch,bkghw->bkgcw", q, state)
        outputs = outputs + einsum_highest("bkgcd,bkgdw->bkgcw", scores, new_values)
        update = einsum_highest("bkch,bkgcw->bkghw", k, to_end[..., None] * new_values)
        return state_decay[..., None, None] * state + update, outputs

    chunks = q, k, values, correction, scores, from_start, to_end, state_decay
    state, outputs = jax.lax.scan(step, state.reshape(batch, keys, groups, *state.shape[2:]), chunks)
    outputs = jnp.moveaxis(outputs, (0, 4), (1, 2)).reshape(batch, count * size, heads, width)
    return outputs[:, :length], state.reshape(batch, heads, *state.shape[3:])


def _sums_between(g: Float[Array, "*b C"]) -> Float[Array, "*b C C"]:
    """Compute ``sum(g[d + 1 : c + 1])`` for each pair of tokens c > d, else 0, as ``[*b c d]``.

    Differences of cumulative sums would lose digits if other elements of ``g`` are large.
    """
    ones = jnp.tril(jnp.ones((g.shape[-1], g.shape[-1]), g.dtype))
    return einsum_highest("...ct,td->...cd", ones * g[..., None, :], jnp.tril(ones, -1))


def _chunk_size_and_count(length: int, chunk: int) -> tuple[int, int]:
    """Return the chunk size, a power of 2 up to ``chunk``, and the number of chunks for ``length`` tokens."""
    size = min(chunk, 1 << max(length - 1, 1).bit_length())
    return size, -(-length // size)


def unit_lower_inverse(lower: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """Compute ``(I + lower)^-1`` for a strictly lower triangular matrix. C must be a power of 2.

    The inverse of a diagonal block is computed from the inverses of two half-size blocks:
    ``[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]``. If keys are nearly equal, powers of ``lower`` grow, but
    products of these blocks do not.
    """
    size = lower.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    inverse, block = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape), 1
    while block < size:
        is_corner = (row // block == column // block + 1) & (row // block % 2 == 1)
        corner = jnp.where(is_corner, lower, 0)
        if block > 1:
            corner = einsum_highest(
                "...ab,...bc->...ac", einsum_highest("...ab,...bc->...ac", inverse, corner), inverse
            )
        inverse, block = inverse - corner, 2 * block
    return inverse


def chunk_channelwise_delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk: int = CHUNK
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Compute `chunk_delta_rule` for decays per key channel, ``g [B T N H]``, with as many key heads as value heads."""
    (batch, length, heads, _), width = inputs.k.shape, inputs.v.shape[-1]
    size, count = _chunk_size_and_count(length, chunk)

    def split(a: Array) -> Array:
        """Split ``[B T N …]`` into n chunks of C tokens, ``[n B N C …]``."""
        a = jnp.pad(a, ((0, 0), (0, count * size - length), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(batch, count, size, *a.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = map(split, inputs[:5])
    system, from_start, to_end = _decayed_products(k, k, g)
    scores, _, _ = _decayed_products(q, k, g)
    if inputs.segment is not None:  # tokens do not depend on other segments
        segment = jnp.pad(inputs.segment, ((0, 0), (0, count * size - length)), mode="edge")
        segment = jnp.moveaxis(segment.reshape(batch, count, size), 1, 0)[:, :, None]
        previous_segment = jnp.concatenate([jnp.zeros((1, batch, 1, 1), segment.dtype), segment[:-1, ..., -1:]])
        is_same_segment = segment[..., :, None] == segment[..., None, :]
        system, scores = jnp.where(is_same_segment, system, 0), jnp.where(is_same_segment, scores, 0)
        from_start = from_start * (segment == previous_segment)[..., None]
        to_end = to_end * (segment == segment[..., -1:])[..., None]
    weights = unit_lower_inverse(jnp.tril(beta[..., None] * system, -1)) * beta[..., None, :]
    values = einsum_highest("nbkcd,nbkdw->nbkcw", weights, v)
    correction = einsum_highest("nbkcd,nbkdh->nbkch", weights, k * from_start)

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, values, correction, scores, decay = chunk
        new_values = values - einsum_highest("bkch,bkhw->bkcw", correction, state)
        outputs = einsum_highest("bkch,bkhw->bkcw", q, state) + einsum_highest("bkcd,bkdw->bkcw", scores, new_values)
        return decay[..., None] * state + einsum_highest("bkch,bkcw->bkhw", k, new_values), outputs

    chunks = q * from_start, k * to_end, values, correction, scores, from_start[..., -1, :]
    state, outputs = jax.lax.scan(step, state, chunks)
    outputs = jnp.moveaxis(outputs, (0, 3), (1, 2)).reshape(batch, count * size, heads, width)
    return outputs[:, :length], state


def _decayed_products(
    x: Float[Array, "*b C H"], k: Float[Array, "*b C H"], g: Float[Array, "*b C H"]
) -> tuple[Float[Array, "*b C C"], Float[Array, "*b C H"], Float[Array, "*b C H"]]:
    """Compute ``sum_h x[c, h] k[d, h] exp(sum(g[d + 1 : c + 1, h]))`` for d <= c, else 0, as ``[*b c d]``.

    C must be a power of 2. Pairs of diagonal blocks are merged until a single block remains. If c is in the later block
    of a pair and d is in the earlier block, the exponent is split at the end of the earlier block. Both parts of the
    exponent are at most 0, so the exponentials do not overflow. Each exponential scales one operand of a matrix
    product. Both parts are sums of ``g``, because differences of cumulative sums would lose digits.

    Do not write the small products as sums, and do not batch two ``x`` in one call. The gradients of both variants
    segfault on XLA:CPU with jax 0.10.2, because of out-of-bounds writes. jax 0.12.0 is not affected.

    Returns:
        The products, the decays from the start to each token and the decays from each token to the end.
    """
    lead, size = k.shape[:-2], k.shape[-2]
    products, block = jnp.sum(x * k, axis=-1)[..., None, None], 1
    from_start, to_end = g, jnp.zeros_like(g)  # sums of g within the blocks
    while block < size:

        def halves(a: Array, block: int = block) -> tuple[Array, Array]:
            blocks = a.reshape(*lead, size // (2 * block), 2, block, -1)
            return blocks[..., 0, :, :], blocks[..., 1, :, :]

        (early_start, late_start), (early_end, late_end) = halves(from_start), halves(to_end)
        rows, columns = halves(x)[1] * jnp.exp(late_start), halves(k)[0] * jnp.exp(early_end)
        corner = einsum_highest("...ch,...dh->...cd", rows, columns)
        early_products, late_products = halves(products)
        upper = jnp.concatenate([early_products, jnp.zeros_like(corner)], axis=-1)
        products = jnp.concatenate([upper, jnp.concatenate([corner, late_products], axis=-1)], axis=-2)
        from_start = jnp.concatenate([early_start, early_start[..., -1:, :] + late_start], axis=-2)
        to_end = jnp.concatenate([early_end + late_start[..., -1:, :], late_end], axis=-2)
        block *= 2
    from_start, to_end = (jnp.exp(a.reshape(g.shape)) for a in (from_start, to_end))
    return products.reshape(*lead, size, size), from_start, to_end
