"""The gated delta rule with a decay per channel of the keys (Kimi Delta Attention, Kimi team 2025), in chunks.

S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnxmoe.layers.delta_rule import CHUNK, DeltaInputs, product, unit_lower_inverse

BLOCK = 16  # tokens whose decays between each other are computed for every pair and channel


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
    total, causal = jnp.cumsum(g, axis=-2), jnp.tril(jnp.ones((size, size), bool))
    first, last = jnp.exp(total), jnp.exp(total[..., -1:, :] - total)
    if inputs.run is not None:  # what tokens of other runs have stored does not count
        run = jnp.pad(inputs.run, ((0, 0), (0, count * size - length)), mode="edge")
        run = jnp.moveaxis(run.reshape(batch, count, size), 1, 0)[:, :, None]
        before = jnp.concatenate([jnp.zeros((1, batch, 1, 1), run.dtype), run[:-1, ..., -1:]])
        causal = causal & (run[..., :, None] == run[..., None, :])
        first = first * (run == before)[..., None]
        last = last * (run == run[..., -1:])[..., None]
    system = beta[..., None] * _pairs(k, k, total, causal)
    weights = unit_lower_inverse(jnp.tril(system, -1)) * beta[..., None, :]
    values, seen = product("nbkcd,nbkdw->nbkcw", weights, v), product("nbkcd,nbkdh->nbkch", weights, k * first)
    scores = _pairs(q, k, total, causal)

    def one(state: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, values, seen, scores, whole = given
        new = values - product("bkch,bkhw->bkcw", seen, state)
        out = product("bkch,bkhw->bkcw", q, state) + product("bkcd,bkdw->bkcw", scores, new)
        return whole[..., None] * state + product("bkch,bkcw->bkhw", k, new), out

    state, out = jax.lax.scan(one, state, (q * first, k * last, values, seen, scores, first[..., -1, :]))
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(batch, count * size, heads, width)
    return out[:, :length], state


def _pairs(
    x: Float[Array, "*b C H"], k: Float[Array, "*b C H"], total: Float[Array, "*b C H"], causal: Bool[Array, "..."]
) -> Float[Array, "*b C C"]:
    """``sum_h x[c, h] k[d, h] exp(total[c, h] - total[d, h])`` for the pairs that are causal, 0 for others.

    The exponent of tokens in different blocks is taken in two parts that are both at most 0: from d to the first token
    of c's block, and from there to c. So nothing overflows, and only pairs within a block need a value per channel.
    """
    size = x.shape[-2]
    block = min(BLOCK, size)
    lead, blocks = x.shape[:-2], size // block

    def parts(a: Array) -> Array:
        return a.reshape(*lead, blocks, block, a.shape[-1])

    sums = parts(total)
    start = sums[..., :1, :]
    earlier = (jnp.arange(size) < block * jnp.arange(blocks)[:, None])[..., None]
    far = k[..., None, :, :] * jnp.exp(jnp.where(earlier, start - total[..., None, :, :], -jnp.inf))
    between = product("...ch,...dh->...cd", parts(x) * jnp.exp(sums - start), far)
    apart = sums[..., :, None, :] - sums[..., None, :, :]
    near = jnp.exp(jnp.where(jnp.tril(jnp.ones((block, block), bool))[..., None], apart, -jnp.inf))
    within = jnp.sum(parts(x)[..., :, None, :] * parts(k)[..., None, :, :] * near, axis=-1)
    placed = within[..., None, :] * jnp.eye(blocks, dtype=x.dtype)[:, None, :, None]
    return jnp.where(causal, (between + placed.reshape(between.shape)).reshape(*lead, size, size), 0)
