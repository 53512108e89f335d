"""Next-token cross-entropy from hidden states, with all logits at once or in chunks."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT, AnyMesh
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.chunks import join_chunks, map_chunks, split_chunks
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_map
from nnxmoe.sharding_rules import shard_count

Sums = tuple[Float[Array, ""], Float[Array, ""]]


class Head(Protocol):
    """``(x, kernel, targets, weights, z, mesh) -> (loss, cross-entropy)``, weighted sums over all tokens.

    The loss adds ``z * logsumexp(logits) ** 2`` per token. The loss is the sum to differentiate.
    ``kernel [D V]`` is the kernel of the output head, tied or not. Logits are float32. Products use
    operands in the dtype of ``x``. Rows are sharded over the batch axes of ``mesh`` and tokens over
    ``context``, if these axes divide their numbers.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kernel: Kernel,
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        z: float,
        mesh: AnyMesh | None = None,
    ) -> Sums: ...


@dataclasses.dataclass(frozen=True)
class Whole:
    """Loss with all logits at once: the reference for tests."""

    def __call__(
        self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, mesh: AnyMesh | None = None
    ) -> Sums:
        each, entropy, _ = _losses(kernel.matmul_f32(x), targets, z)
        return jnp.sum(each * weights), jax.lax.stop_gradient(jnp.sum(entropy * weights))


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """Loss with at most ``logits`` logits per device at a time; the full logits are never materialized.

    The same pass computes the gradients, so no product runs twice. The loss is exact: a token's softmax
    is never split. Each device gathers the kernel once, in the dtype of ``x``, processes its own tokens
    in chunks, and sums the kernel's gradients at the end.
    """

    logits: int = 1 << 26

    def __post_init__(self) -> None:
        set_positive(self, "logits")

    def __call__(
        self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, mesh: AnyMesh | None = None
    ) -> Sums:
        step = _tokens_per_chunk(self.logits, kernel, targets, mesh)
        sums: Any = _chunked(x, kernel, targets, jax.lax.stop_gradient(weights), step, z, mesh)
        return sums[0], jax.lax.stop_gradient(sums[1])


def log_probabilities(
    x: Float[Array, "B T D"],
    kernel: Kernel,
    targets: Int[Array, "B T"],
    mesh: AnyMesh | None = None,
    logits: int = ChunkedLoss.logits,
) -> Float[Array, "B T"]:
    """Compute the log-probability of each target; see `Head` and `ChunkedLoss`.

    The result is differentiable. The backward pass computes the logits of each chunk again.
    """
    length = x.shape[1] // shard_count(mesh, context_shard_axes(x.shape[1], mesh))
    chunks = -(-length // _tokens_per_chunk(logits, kernel, targets, mesh))

    def local(x: Array, cast: Kernel, targets: Array) -> Array:
        def one(x: Array, targets: Array) -> tuple[Array, None]:
            return -_losses(cast.matmul_f32(x), targets, 0.0)[1], None

        return map_chunks(one, chunks, x, targets)[0]

    (axes, rows), cast = _split(targets, mesh), kernel.cast(x.dtype)
    if mesh is None or not axes:
        return local(x, cast, targets)
    return shard_map(local, mesh, (rows, PartitionSpec(), rows), rows, axes)(x, cast, targets)


def _split(targets: Int[Array, "B T"], mesh: AnyMesh | None) -> tuple[tuple[str, ...], PartitionSpec]:
    """Return the mesh axes that shard rows and tokens, as a tuple and as a PartitionSpec."""
    rows, tokens = batch_shard_axes(len(targets), mesh), context_shard_axes(targets.shape[1], mesh)
    return (*rows, *tokens), PartitionSpec(rows or None, tokens or None)


def _tokens_per_chunk(logits: int, kernel: Kernel, targets: Array, mesh: AnyMesh | None) -> int:
    """Return the tokens per row of a chunk, for at most ``logits`` logits per device."""
    batch, length = targets.shape
    length //= shard_count(mesh, context_shard_axes(length, mesh))
    return min(
        length, max(1, logits // (kernel.shape[1] * (batch // shard_count(mesh, batch_shard_axes(batch, mesh)))))
    )


def _losses(logits: Array, targets: Array, z: float) -> tuple[Array, Array, Array]:
    """Compute loss, cross-entropy and logsumexp per token."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return norm - chosen + z * norm**2, norm - chosen, norm


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def _chunked(
    x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float, mesh: AnyMesh | None
) -> Sums:
    def local(x: Array, cast: Kernel, targets: Array, weights: Array) -> Sums:
        def one(sums: Sums, chunk: Any) -> tuple[Sums, None]:
            x, targets, weights = chunk
            each, entropy, _ = _losses(cast.matmul_f32(x), targets, z)
            return (sums[0] + jnp.sum(each * weights), sums[1] + jnp.sum(entropy * weights)), None

        return jax.lax.scan(one, (jnp.zeros(()), jnp.zeros(())), split_chunks(step, x, targets, weights))[0]

    (axes, rows), cast, whole = _split(targets, mesh), kernel.cast(x.dtype), PartitionSpec()
    if mesh is None or not axes:
        return local(x, cast, targets, weights)

    def summed(*given: Any) -> Sums:
        return jax.lax.psum(local(*given), axes)

    return shard_map(summed, mesh, (rows, whole, rows, rows), whole, axes)(x, cast, targets, weights)


def _with_slopes(
    x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float, mesh: AnyMesh | None
) -> Any:
    """Compute the sums and the gradients of the first sum.

    The gradients are with respect to ``x`` and, if it is trained, ``kernel``.
    """
    (axes, rows), cast = _split(targets, mesh), kernel.cast(x.dtype)
    local = functools.partial(_slopes_of_rows, step=step, z=z)
    if mesh is None or not axes:
        sums, (by_x, slope) = local(x, cast, targets, weights)
    else:
        whole, count = PartitionSpec(), shard_count(mesh, axes)
        axes = tuple(sorted(axes, key=lambda axis: axis not in ("fsdp", CONTEXT)))  # parameters' axes first
        alone = count == mesh.size  # with further axes, XLA would gather their shards before it scatters
        parted = jax.tree.map(lambda a: alone and bool(a.ndim) and a.shape[-1] % count == 0, cast)
        of_slope = jax.tree.map(
            lambda a, part: PartitionSpec(*[None] * (a.ndim - 1), axes) if part else whole, cast, parted
        )

        def summed(*given: Any) -> Any:
            sums, (by_x, slope) = local(*given)
            if slope is not None:
                slope = jax.tree.map(lambda a, part: _added(a, axes, part), slope, parted)
            return jax.lax.psum(sums, axes), (by_x, slope)

        out = (whole, whole), (rows, of_slope if kernel.trainable else None)
        sums, (by_x, slope) = shard_map(summed, mesh, (rows, whole, rows, rows), out, axes)(x, cast, targets, weights)
    return sums, (by_x, None if slope is None else jax.tree.map(lambda a, like: a.astype(like.dtype), slope, kernel))


def _added(a: Array, axes: tuple[str, ...], scatter: bool) -> Array:
    """Sum over mesh axes. With ``scatter``, each device gets its part of the last dimension."""
    return jax.lax.psum_scatter(a, axes, scatter_dimension=a.ndim - 1, tiled=True) if scatter else jax.lax.psum(a, axes)


def _slopes_of_rows(x: Array, cast: Kernel, targets: Array, weights: Array, step: int, z: float) -> Any:
    """Run `_with_slopes` on one device. The kernel's gradients are float32."""

    def one(carry: Any, chunk: Any) -> Any:
        total, entropies, slope = carry
        x, targets, weights = chunk
        logits = cast.matmul_f32(x)
        each, entropy, norm = _losses(logits, targets, z)
        hit = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        shares = jnp.exp(logits - norm[..., None])
        by_logits = (shares * (1 + 2 * z * norm)[..., None] - hit) * weights[..., None]
        by_logits = cast.output_grad(by_logits, logits).astype(x.dtype)
        if slope is not None:
            slope = jax.tree.map(jnp.add, slope, cast.vjp_kernel(x, by_logits))
        sums = total + jnp.sum(each * weights), entropies + jnp.sum(entropy * weights)
        return (*sums, slope), cast.vjp_input(by_logits)

    slope = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), cast) if cast.trainable else None
    start = (jnp.zeros(()), jnp.zeros(()), slope)
    (total, entropy, slope), by_x = jax.lax.scan(one, start, split_chunks(step, x, targets, weights))
    return (total, entropy), (join_chunks(by_x, x.shape[1]), slope)


def _chunked_jvp(step: int, z: float, mesh: AnyMesh | None, given: Any, moved: Any) -> Any:
    x, kernel, targets, weights = given
    sums, slopes = _with_slopes(x, kernel, targets, weights, step, z, mesh)
    total = jnp.zeros(())
    # An untrained kernel comes last and has no slope, so the lists may differ in length.
    for slope, along in zip(jax.tree.leaves(slopes), jax.tree.leaves(moved[:2]), strict=False):
        if not isinstance(along, SymbolicZero):
            # Float32, also in reverse mode: 1 / tokens in bfloat16 is off by up to 0.4 %, and scales all gradients.
            total += jnp.sum(slope.astype(jnp.float32) * along.astype(jnp.float32))
    return sums, (total, jnp.zeros(()))


_chunked.defjvp(_chunked_jvp, symbolic_zeros=True)
