"""The gated delta rule with a decay per channel of the keys (Kimi Delta Attention, Kimi team 2025), in chunks.

    S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

The rule of `delta_rule`, with a vector g per key instead of a number per head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.delta_rule import CHUNK, DeltaInputs, product, unit_lower_inverse


def in_chunks_by_channel(
    inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk: int = CHUNK
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """As `in_chunks`, for ``g [B T N H]`` and as many heads of keys as of values."""
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
