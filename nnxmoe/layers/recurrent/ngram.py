"""Embeddings of token n-grams in hash tables (Engram, DeepSeek 2026; Qwen3.8-Flash-Next, 2026)."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.cache import RecurrentState
from nnxmoe.layers.context import Context
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.hyper import StreamNorm
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.recurrent.conv import ShortConv, recent_tokens
from nnxmoe.layers.recurrent.recurrence import OrderedTokens

MASK64, GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15  # Modulus - 1 and increment of the states of SplitMix64.
MIN_SCORE = 1e-6  # Lower bound of the magnitude of scores. The gradient of the square root is infinite at 0.
NO_TOKEN = 0  # Marks positions before the start of a row in the cache. The cache stores token ids plus 1.


@dataclasses.dataclass(frozen=True)
class NGramHash:
    """Hash functions that map the n-grams ending at each token to rows of a table.

    Each n-gram length from 2 to ``len(multipliers)`` has the same number of functions. A function maps the tokens
    ``t_0, t_1, …``, latest first, to the row ``(t_0 m_0 xor t_1 m_1 xor …) mod prime``. In the table, the rows of a
    function follow the rows of the previous function.

    Attributes:
        multipliers: One integer per token of the longest n-gram. Products with token ids are below ``2**63``.
        primes: Number of rows of each function, below ``2**31``.
        eos: Id of the end-of-sequence token. In an n-gram, it also replaces the tokens before an earlier
            end-of-sequence token, and the tokens before the start of the row or segment.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    eos: int

    @classmethod
    def from_seed(cls, seed: int, *, layer: int, length: int, heads: int, min_rows: int, vocab: int, eos: int) -> Self:
        """Derive the hash functions of Qwen3.8-Flash-Next (``Qwen4ExpTextNGramEmbedding`` in transformers 5.24).

        Args:
            seed: Seed of the multipliers.
            layer: Index of the layer among the layers with n-gram embeddings.
            length: Number of tokens of the longest n-gram.
            heads: Number of functions per n-gram length.
            min_rows: Lower bound of the primes. All functions of all layers have different primes.
            vocab: Number of token ids.
            eos: Id of the end-of-sequence token.
        """
        bound, count = max(1, (2**63 - 1) // vocab // 2), (length - 1) * heads
        states = (seed + 10007 * layer + GAMMA * (i + 1) for i in range(length))
        multipliers = tuple(2 * (_splitmix64(state & MASK64) % bound) + 1 for state in states)
        return cls(multipliers, tuple(itertools.islice(_primes(min_rows), layer * count, (layer + 1) * count)), eos)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each function."""
        return tuple(itertools.accumulate(self.primes[:-1], initial=0))

    def rows(self, tokens: Sequence[Int[Array, "B T"]]) -> Int[Array, "B T functions"]:
        """Return the row of each function per token. ``tokens[i]`` has the token ``i`` positions before each token."""
        high, low = _multiply(tokens[0], self.multipliers[0])
        remainders, heads = [], len(self.primes) // (len(tokens) - 1)
        for i, (token, multiplier) in enumerate(zip(tokens[1:], self.multipliers[1:], strict=True)):
            product_high, product_low = _multiply(token, multiplier)
            high, low = high ^ product_high, low ^ product_low
            remainders.append(_remainder(high, low, self.primes[i * heads : (i + 1) * heads]))
        return jnp.concatenate(remainders, axis=-1).astype(jnp.int32) + np.array(self.offsets, np.int32)


def _splitmix64(state: int) -> int:
    """Return the output of the random number generator SplitMix64 (Steele et al. 2014) for a state."""
    value = (state + GAMMA) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def _primes(start: int) -> Iterator[int]:
    """Yield the primes from ``start`` in ascending order."""
    for n in itertools.count(max(start, 2)):
        if n == 2 or (n % 2 and all(n % divisor for divisor in range(3, math.isqrt(n) + 1, 2))):
            yield n


Words = UInt32[Array, "B T"]


def _multiply(token: Int[Array, "B T"], factor: int) -> tuple[Words, Words]:
    """Return the upper and lower 32 bits of ``token * factor``. JAX has no 64-bit integers by default."""
    high, low = map(np.uint32, divmod(factor, 2**32))
    token = token.astype(jnp.uint32)
    (token_high, token_low), (low_high, low_low) = ((a >> 16, a & 0xFFFF) for a in (token, low))
    cross_terms = token_high * low_low, token_low * low_high
    carry = (token_low * low_low >> 16) + sum(term & 0xFFFF for term in cross_terms)
    upper = token_high * low_high + sum(term >> 16 for term in cross_terms) + (carry >> 16)
    return upper + token * high, token * low


def _remainder(high: Words, low: Words, divisors: tuple[int, ...]) -> UInt32[Array, "B T N"]:
    """Return ``(2**32 * high + low) % divisor`` for each divisor, by long division without overflow of 32 bits."""
    divisor, bits, start = np.array(divisors, np.uint32), 32 - max(divisors).bit_length(), 32
    remainder = high[..., None] % divisor
    while start:
        step = min(bits, start)
        start -= step
        digit = (low[..., None] >> start) & (2**step - 1)
        remainder = (remainder << step | digit) % divisor
    return remainder


class NGramBranch(nnx.Module):
    """Compute what each residual stream adds for the n-grams ending at each token.

    The embeddings e of all hash functions are concatenated. The update of a stream s is ``g v + conv(conv_norm(g v))``,
    with the value ``v = value(e)``, the gate ``g = sigmoid(sqrt(|a|) sign(a))`` and the score
    ``a = key_norm(key(e)) · query_norm(s) / sqrt(D)``. The dilation of the convolution is the length of the longest
    n-gram. The state of a row consists of the most recent token ids and inputs of the convolution. Source:
    ``Qwen4ExpTextPLELayer`` in transformers 5.24.

    Args:
        dim: Width of a stream, D.
        streams: Number of streams.
        ngrams: Hash functions.
        embed: Table with the rows of all hash functions.
        taps: Filter width of the convolution.
        eps: Epsilon for the norms.
        **kw: Parameter dtype and rngs.
    """

    def __init__(
        self,
        dim: int,
        streams: int,
        ngrams: NGramHash,
        embed: Embed,
        *,
        taps: int,
        eps: float,
        **kw: Unpack[ParamOptions],
    ):
        self.ngrams, self.embed = ngrams, embed
        width = len(ngrams.primes) * embed.table.shape[1]
        self.key = Linear((width,), (streams, dim), ("embed", None, None), **kw)
        self.value = Linear((width,), (dim,), ("embed", "norm"), **kw)
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(dim, streams, eps, **kw) for _ in range(3))
        self.conv = ShortConv(streams * dim, taps, dilation=len(ngrams.multipliers), **kw)

    def __call__(
        self, x: Float[Array, "B T streams D"], context: Context, cache: RecurrentState | None = None
    ) -> tuple[Float[Array, "B T streams D"], RecurrentState | None]:
        """Return the values to add to the streams, and the updated cache.

        Raises:
            ValueError: If the context has no token ids.
        """
        if context.tokens is None:
            raise ValueError("n-gram embeddings need token ids: call the model, or pass Context(tokens=…)")
        batch, length = x.shape[:2]
        tokens = OrderedTokens.from_context(context, batch, length, cached=cache is not None)
        zero = self._empty_state(batch, x.dtype)
        window, conv_window = zero if cache is None or context.past is None else cache.state_before(context.past)
        ids = jnp.concatenate([window, tokens.sort(context.tokens) + 1], axis=1)
        rows = self.ngrams.rows(self._previous_tokens(ids, tokens))
        embeddings = self.embed(rows.reshape(batch, -1), x.dtype).reshape(batch, length, -1)
        values = self._gated_values(tokens.sort(x), embeddings)
        conv, conv_inputs = self.conv(self.conv_norm(values).reshape(batch, length, -1), conv_window, tokens.segment)
        if cache is not None:
            indices = tokens.count[:, None] - 1 + jnp.arange(-cache.lookahead, 1)
            ids_after = recent_tokens(ids, indices, tokens.segment, window.shape[1])
            state = ids_after, self.conv.windows(conv_inputs, indices, tokens.segment)
            cache = cache.write(state, tokens.token_indices(indices))
        return tokens.unsort(values + conv.reshape(x.shape)), cache

    def _previous_tokens(self, ids: Int[Array, "B _"], tokens: OrderedTokens) -> list[Int[Array, "B T"]]:
        """Return the token 0, 1, … positions before each token, or ``eos`` if the token is out of reach.

        ``ids`` are the ids of the window and the tokens, plus 1.
        """
        eos, count = self.ngrams.eos, len(self.ngrams.multipliers) - 1
        segment = None if tokens.segment is None else jnp.pad(tokens.segment, ((0, 0), (count, 0)))
        previous, in_reach = [ids[:, count:] - 1], jnp.bool_(True)
        for start in reversed(range(count)):
            indices = slice(start, ids.shape[1] - count + start)
            in_reach &= (ids[:, indices] != NO_TOKEN) & (ids[:, indices] != eos + 1)
            if segment is not None:
                in_reach &= segment[:, indices] == tokens.segment
            previous.append(jnp.where(in_reach, ids[:, indices] - 1, eos))
        return previous

    def _gated_values(
        self, x: Float[Array, "B T streams D"], embeddings: Float[Array, "B T E"]
    ) -> Float[Array, "B T streams D"]:
        products = self.key_norm(self.key(embeddings)) * self.query_norm(x)
        scores = jnp.sum(products, axis=-1, keepdims=True) * x.shape[-1] ** -0.5
        gates = jax.nn.sigmoid(jnp.sqrt(jnp.maximum(jnp.abs(scores), MIN_SCORE)) * jnp.sign(scores))
        return gates * self.value(embeddings)[:, :, None]

    def _empty_state(self, batch: int, dtype: jnp.dtype) -> tuple[Int[Array, "B _"], Float[Array, "B _ channels"]]:
        window = jnp.full((batch, len(self.ngrams.multipliers) - 1), NO_TOKEN, jnp.int32)
        return window, jnp.zeros((batch, self.conv.window_size, self.conv.weight.shape[0]), dtype)

    def empty_cache(self, batch: int, dtype: jnp.dtype, lookahead: int = 0) -> RecurrentState:
        """Create ``1 + lookahead`` states."""
        return RecurrentState.empty(self._empty_state(batch, dtype), lookahead)
