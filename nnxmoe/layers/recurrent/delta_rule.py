"""The gated delta rule (Yang et al. 2024): a matrix per head that each token decays and corrects, in float32.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

Values have N heads, queries and keys K, each for N / K consecutive heads of the values. Without the correction
``- S^T k`` it is the recurrence of Mamba-2 (Dao & Gu 2024). Kimi Delta Attention (Kimi team 2025) has a vector g per
key: ``S <- diag(exp(g)) S``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64  # tokens


class DeltaInputs(NamedTuple):
    """Inputs of the rule for ``T`` tokens, all in float32. Tokens with ``beta`` and ``g`` 0, such as padding, leave the
    state as it is. ``run``: the number of segments that begin up to each token, each with an empty state; None: 0."""

    q: Float[Array, "B T K H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T N W"]
    g: Float[Array, "B T N"] | Float[Array, "B T N H"]  # logarithm of the decay, at most 0; H: a channel of the keys
    beta: Float[Array, "B T N"]
    run: Int[Array, "B T"] | None


Chunked = Callable[[DeltaInputs, Array], tuple[Array, Array]]
"""``(inputs, state) ->`` the outputs ``[B T N W]`` and the state ``[B N H W]`` after all tokens."""


Recurrence = Callable[[DeltaInputs, Array, Chunked], tuple[Array, Array]]
"""``Strategy.recurrence``: how the rule is computed for passes; last argument: the layer's own way, without one."""


def product(spec: str, *operands: Array) -> Array:
    """An einsum in float32, on every device."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def recurrent_delta_rule(
    inputs: DeltaInputs,
    state: Float[Array, "B N H W"],
    run: Int[Array, "B"] | None = None,
    *,
    has_correction: bool = True,
) -> tuple[Float[Array, "B T N W"], Float[Array, "B T N H W"]]:
    """Outputs and the state after each token, a token at a time. ``run``: of the state; None: 0. ``has_correction``:
    False leaves the correction out.

    The oracle of `chunk_delta_rule`, and the way to decode.
    """
    q, k, v, g, beta, of_token = inputs
    groups = v.shape[2] // k.shape[2]
    before = jnp.zeros(len(q), jnp.int32) if run is None else run

    def step(carry: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (state, before), (q, k, v, g, beta, run) = carry, token
        q, k = (jnp.repeat(a, groups, axis=1)[..., None] for a in (q, k))
        keep = jnp.exp(g) * (run == before).reshape(-1, *(1,) * (g.ndim - 1))
        state = state * (keep[..., None] if g.ndim == 3 else keep[:, :, None, None])
        more = beta[..., None] * (v - jnp.sum(state * k, axis=2) if has_correction else v)
        state = state + k * more[:, :, None]
        return (state, run), (jnp.sum(state * q, axis=2), state)

    of_token = jnp.broadcast_to(before[:, None], q.shape[:2]) if of_token is None else of_token
    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta, of_token))
    if len(tokens[0]) == 1:
        _, found = step((state, before), tuple(a[0] for a in tokens))
        return found[0][:, None], found[1][:, None]
    _, (out, states) = jax.lax.scan(step, (state, before), tokens)
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(states, 0, 1)


def chunk_delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk: int = CHUNK, *, has_correction: bool = True
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Outputs, and the state after all tokens, by products of matrices (the WY form): the corrections of a chunk solve
    a triangular system, and only the state goes from chunk to chunk. ``state``: of run 0. For ``g [B T N]``.
    ``has_correction``: as in `recurrent_delta_rule`."""
    (batch, length, keys, _), (heads, width) = inputs.k.shape, inputs.v.shape[2:]
    size = min(chunk, 1 << max(length - 1, 1).bit_length())
    count, groups = -(-length // size), heads // keys

    def cut(a: Array, *shape: int) -> Array:
        """``[B T …]`` as ``[n B … C]``, or ``[n B … C W]``, with n chunks of C tokens."""
        a = jnp.pad(a, ((0, 0), (0, count * size - length), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(batch, count, size, *shape), (1, 2), (0, 2 + len(shape) - (a.ndim == 4)))

    q, k = (cut(a, keys, a.shape[-1]) for a in (inputs.q, inputs.k))
    v, g, beta = cut(inputs.v, keys, groups, width), cut(inputs.g, keys, groups), cut(inputs.beta, keys, groups)
    total, causal = jnp.cumsum(g, axis=-1), jnp.tril(jnp.ones((size, size), bool))
    apart, first, last = total[..., :, None] - total[..., None, :], jnp.exp(total), total[..., -1:] - total
    if inputs.run is not None:  # what tokens of other runs have stored does not count
        run = jnp.pad(inputs.run, ((0, 0), (0, count * size - length)), mode="edge")
        run = jnp.moveaxis(run.reshape(batch, count, size), 1, 0)
        before = jnp.concatenate([jnp.zeros((1, batch, 1), run.dtype), run[:-1, :, -1:]])
        causal = causal & (run[..., :, None] == run[..., None, :])[:, :, None, None]
        first = first * (run == before)[:, :, None, None]
        last = jnp.where((run == run[..., -1:])[:, :, None, None], last, -jnp.inf)
    decay, last, whole = jnp.exp(jnp.where(causal, apart, -jnp.inf)), jnp.exp(last), first[..., -1]
    values, seen = beta[..., None] * v, None
    if has_correction:
        system = beta[..., None] * product("nbkch,nbkdh->nbkcd", k, k)[:, :, :, None] * decay
        inverse = unit_lower_inverse(jnp.tril(system, -1))
        values = product("nbkgcd,nbkgdw->nbkgcw", inverse, values)
        seen = product("nbkgcd,nbkdh->nbkgch", inverse * (beta * first)[..., None, :], k)
    scores = product("nbkch,nbkdh->nbkcd", q, k)[:, :, :, None] * decay

    def one(state: Array, given: Any) -> tuple[Array, Array]:
        q, k, values, seen, scores, first, last, whole = given
        new = values if seen is None else values - product("bkgch,bkghw->bkgcw", seen, state)
        out = first[..., None] * product("bkch,bkghw->bkgcw", q, state) + product("bkgcd,bkgdw->bkgcw", scores, new)
        more = product("bkch,bkgcw->bkghw", k, last[..., None] * new)
        return whole[..., None, None] * state + more, out

    state = state.reshape(batch, keys, groups, *state.shape[2:])
    state, out = jax.lax.scan(one, state, (q, k, values, seen, scores, first, last, whole))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, count * size, heads, width)
    return out[:, :length], state.reshape(batch, heads, *state.shape[3:])


def unit_lower_inverse(lower: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """``(I + lower)^-1`` for a strictly lower triangle, from the inverses of diagonal blocks, each of two half as
    large: ``[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]``. C is a power of 2. Unlike powers of ``lower``,
    products of these blocks do not grow where keys are nearly equal."""
    size = lower.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    found, block = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape), 1
    while block < size:
        corner = (row // block == column // block + 1) & (row // block % 2 == 1)
        between = jnp.where(corner, lower, 0)
        more = (
            between
            if block == 1
            else product("...ab,...bc->...ac", product("...ab,...bc->...ac", found, between), found)
        )
        found, block = found - more, 2 * block
    return found


def chunk_channelwise_delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk: int = CHUNK
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """As `chunk_delta_rule`, for a decay per channel of the keys, ``g [B T N H]``, and as many heads of keys as of
    values."""
    (batch, length, heads, _), width = inputs.k.shape, inputs.v.shape[-1]
    size = min(chunk, 1 << max(length - 1, 1).bit_length())
    count = -(-length // size)

    def cut(a: Array) -> Array:
        """``[B T N …]`` as ``[n B N C …]``, with n chunks of C tokens."""
        a = jnp.pad(a, ((0, 0), (0, count * size - length), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(batch, count, size, *a.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = map(cut, inputs[:5])
    total = jnp.cumsum(g, axis=-2)
    system, scores = _pairs(k, k, total), _pairs(q, k, total)
    first, last = jnp.exp(total), jnp.exp(total[..., -1:, :] - total)
    if inputs.run is not None:  # what tokens of other runs have stored does not count
        run = jnp.pad(inputs.run, ((0, 0), (0, count * size - length)), mode="edge")
        run = jnp.moveaxis(run.reshape(batch, count, size), 1, 0)[:, :, None]
        before = jnp.concatenate([jnp.zeros((1, batch, 1, 1), run.dtype), run[:-1, ..., -1:]])
        same = run[..., :, None] == run[..., None, :]
        system, scores = jnp.where(same, system, 0), jnp.where(same, scores, 0)
        first = first * (run == before)[..., None]
        last = last * (run == run[..., -1:])[..., None]
    weights = unit_lower_inverse(jnp.tril(beta[..., None] * system, -1)) * beta[..., None, :]
    values, seen = product("nbkcd,nbkdw->nbkcw", weights, v), product("nbkcd,nbkdh->nbkch", weights, k * first)

    def one(state: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, values, seen, scores, whole = given
        new = values - product("bkch,bkhw->bkcw", seen, state)
        out = product("bkch,bkhw->bkcw", q, state) + product("bkcd,bkdw->bkcw", scores, new)
        return whole[..., None] * state + product("bkch,bkcw->bkhw", k, new), out

    state, out = jax.lax.scan(one, state, (q * first, k * last, values, seen, scores, first[..., -1, :]))
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(batch, count * size, heads, width)
    return out[:, :length], state


def _pairs(x: Float[Array, "*b C H"], k: Float[Array, "*b C H"], total: Float[Array, "*b C H"]) -> Array:
    """Compute ``[*b C C]``: ``sum_h x[c, h] k[d, h] exp(total[c, h] - total[d, h])`` for d <= c, else 0.

    C is a power of 2. Blocks on the diagonal are joined in pairs until one is left. For c in the later block of a pair
    and d in the earlier one, the exponent is split at the first token of the later block: both parts are at most 0, so
    that neither overflows, and each is a factor of one operand of a matrix product.

    Do not write the small products as sums, nor batch two x in one call: gradients of both segfault on XLA:CPU with jax
    0.10.2, because the program writes out of bounds (not with jax 0.12.0).
    """
    lead, size = k.shape[:-2], k.shape[-2]
    found, block = jnp.sum(x * k, axis=-1)[..., None, None], 1
    while block < size:

        def halves(a: Array, block: int = block) -> tuple[Array, Array]:
            parts = a.reshape(*lead, size // (2 * block), 2, block, -1)
            return parts[..., 0, :, :], parts[..., 1, :, :]

        early, late = halves(total)
        first = late[..., :1, :]
        rows, columns = halves(x)[1] * jnp.exp(late - first), halves(k)[0] * jnp.exp(first - early)
        corner = product("...ch,...dh->...cd", rows, columns)
        one, other = halves(found)
        upper = jnp.concatenate([one, jnp.zeros_like(corner)], axis=-1)
        found = jnp.concatenate([upper, jnp.concatenate([corner, other], axis=-1)], axis=-2)
        block *= 2
    return found.reshape(*lead, size, size)
