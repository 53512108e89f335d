"""Next-token cross-entropy from hidden states, all logits at once or in chunks."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from nnxmoe.layers.chunks import chunk_by_chunk, in_chunks, joined
from nnxmoe.layers.kernel import Kernel

Sums = tuple[Float[Array, ""], Float[Array, ""]]


class Head(Protocol):
    """``(x, kernel, targets, weights, z, shards) -> (loss, cross-entropy)``, weighted sums over all tokens.

    The loss adds ``z * logsumexp(logits) ** 2`` per token and is the sum to differentiate. ``kernel [D V]`` is the
    output head's, tied or not. Logits are float32, products take operands of ``x``'s dtype. Rows are split over
    ``shards`` devices.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kernel: Kernel,
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        z: float,
        shards: int = 1,
    ) -> Sums: ...


@dataclasses.dataclass(frozen=True)
class Whole:
    """All logits at once: the oracle."""

    def __call__(self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, shards: int = 1) -> Sums:
        each, entropy, _ = _losses(kernel.float32(x), targets, z)
        return jnp.sum(each * weights), jax.lax.stop_gradient(jnp.sum(entropy * weights))


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """At most ``logits`` logits per device at a time; the full logits are never materialised.

    The same pass computes the gradients, so no product runs twice. Exact: a token's softmax is never split. Each chunk
    takes the same number of tokens from every row, so that rows stay on their devices.
    """

    logits: int = 1 << 26

    def __post_init__(self) -> None:
        if self.logits < 1:
            raise ValueError(f"ChunkedLoss(logits={self.logits}): the number of logits per chunk must be at least 1")

    def __call__(self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, shards: int = 1) -> Sums:
        step = _tokens_per_chunk(self.logits, kernel, targets, shards)
        sums: Any = _chunked(x, kernel, targets, jax.lax.stop_gradient(weights), step, z)
        return sums[0], jax.lax.stop_gradient(sums[1])


def log_probabilities(
    x: Float[Array, "B T D"],
    kernel: Kernel,
    targets: Int[Array, "B T"],
    shards: int = 1,
    logits: int = ChunkedLoss.logits,
) -> Float[Array, "B T"]:
    """The log-probability of each target, differentiable; see `Head` and `ChunkedLoss`. The backward pass computes the
    logits of each chunk again."""
    chunks = -(-x.shape[1] // _tokens_per_chunk(logits, kernel, targets, shards))

    def one(x: Array, targets: Array) -> tuple[Array, None]:
        return -_losses(kernel.cast(x.dtype).float32(x), targets, 0.0)[1], None

    return chunk_by_chunk(one, chunks, x, targets)[0]


def _tokens_per_chunk(logits: int, kernel: Kernel, targets: Array, shards: int) -> int:
    """How many tokens of every row a chunk has, for at most ``logits`` logits per device."""
    batch, length = targets.shape
    return min(length, max(1, logits // (kernel.shape[1] * -(-batch // shards))))


def _losses(logits: Array, targets: Array, z: float) -> tuple[Array, Array, Array]:
    """Per token: loss, cross-entropy and logsumexp."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return norm - chosen + z * norm**2, norm - chosen, norm


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _chunked(x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float) -> Sums:
    cast = kernel.cast(x.dtype)

    def one(sums: Sums, chunk: Any) -> tuple[Sums, None]:
        x, targets, weights = chunk
        each, entropy, _ = _losses(cast.float32(x), targets, z)
        return (sums[0] + jnp.sum(each * weights), sums[1] + jnp.sum(entropy * weights)), None

    return jax.lax.scan(one, (jnp.zeros(()), jnp.zeros(())), in_chunks(step, x, targets, weights))[0]


def _with_slopes(x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float) -> Any:
    """Compute the sums, and the gradients of the first with respect to ``x`` and, if it is trained, ``kernel``."""
    cast = kernel.cast(x.dtype)

    def one(carry: Any, chunk: Any) -> Any:
        total, entropies, slope = carry
        x, targets, weights = chunk
        logits = cast.float32(x)
        each, entropy, norm = _losses(logits, targets, z)
        hit = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        shares = jnp.exp(logits - norm[..., None])
        by_logits = (shares * (1 + 2 * z * norm)[..., None] - hit) * weights[..., None]
        by_logits = cast.before(by_logits, logits).astype(x.dtype)
        if slope is not None:
            slope = jax.tree.map(jnp.add, slope, kernel.outer(x, by_logits))
        sums = total + jnp.sum(each * weights), entropies + jnp.sum(entropy * weights)
        return (*sums, slope), cast.back(by_logits)

    slope = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), kernel) if kernel.trained else None
    start = (jnp.zeros(()), jnp.zeros(()), slope)
    (total, entropy, slope), by_x = jax.lax.scan(one, start, in_chunks(step, x, targets, weights))
    by_x = joined(by_x, x.shape[1])
    slope = None if slope is None else jax.tree.map(lambda a, like: a.astype(like.dtype), slope, kernel)
    return (total, entropy), (by_x, slope)


def _chunked_jvp(step: int, z: float, given: Any, moved: Any) -> Any:
    x, kernel, targets, weights = given
    sums, slopes = _with_slopes(x, kernel, targets, weights, step, z)
    total = jnp.zeros(())
    # Leaf by leaf; a kernel that is not trained comes last and has no slope.
    for slope, along in zip(jax.tree.leaves(slopes), jax.tree.leaves(moved[:2]), strict=False):
        if not isinstance(along, SymbolicZero):
            # In float32, in reverse mode too: 1 / tokens in bfloat16 is off by up to 0.4 %, as all gradients would be.
            total += jnp.sum(slope.astype(jnp.float32) * along.astype(jnp.float32))
    return sums, (total, jnp.zeros(()))


_chunked.defjvp(_chunked_jvp, symbolic_zeros=True)
