"""Next-token cross-entropy from hidden states, with all logits at once or in chunks."""

import dataclasses
import functools
from collections.abc import Callable
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
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, reduction_dtype, shard_map
from nnxmoe.sharding_rules import shard_count

Sums = tuple[Float[Array, ""], Float[Array, ""]]


class Head(Protocol):
    """Function ``(x, kernel, targets, weights, z, mesh) -> (loss, cross-entropy)``.

    Both results are weighted sums over all tokens. The loss is the result to differentiate. It includes
    ``z * logsumexp(logits) ** 2`` per token. ``kernel [D V]`` is the kernel of the output head, tied or
    not. Matmul operands have the dtype of ``x``, and logits are float32. Rows are sharded over the
    batch axes of ``mesh`` and tokens over ``context``, if the axis sizes divide these dimensions.
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
    """Loss with fully materialized logits, as a reference for tests."""

    def __call__(
        self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, mesh: AnyMesh | None = None
    ) -> Sums:
        losses, entropy, _ = _losses(kernel.matmul_f32(x), targets, z)
        return jnp.sum(losses * weights), jax.lax.stop_gradient(jnp.sum(entropy * weights))


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """Loss computed in chunks of at most ``logits`` logits per device.

    The full logits are never materialized. The forward pass also computes the gradients, so no matmul
    runs twice. The loss is exact: a token's softmax is never split. Each device gathers the kernel
    once, in the dtype of ``x``, and processes its tokens in chunks. The kernel's gradients are summed
    over the devices at the end, in the strategy's ``reduce_dtype``.
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


def map_logits(
    function: Callable[[Array, Array], Array],
    x: Float[Array, "B T D"],
    kernel: Kernel,
    targets: Int[Array, "B T"],
    mesh: AnyMesh | None = None,
    logits: int = ChunkedLoss.logits,
) -> Float[Array, "B T ..."]:
    """Apply a function to the logits and targets of one chunk of tokens at a time; see `Head` and `ChunkedLoss`.

    The result is differentiable. The backward pass recomputes the logits of each chunk.

    Args:
        function: Function ``(logits [B, t, V], targets [B, t]) -> [B, t, …]`` that treats each token independently.
    """
    length = x.shape[1] // shard_count(mesh, context_shard_axes(x.shape[1], mesh))
    chunks = -(-length // _tokens_per_chunk(logits, kernel, targets, mesh))

    def local(x: Array, cast: Kernel, targets: Array) -> Array:
        def chunk_fn(x: Array, targets: Array) -> tuple[Array, None]:
            return function(cast.matmul_f32(x), targets), None

        return map_chunks(chunk_fn, chunks, x, targets)[0]

    (axes, rows), cast = _split(targets, mesh), kernel.cast(x.dtype)
    if mesh is None or not axes:
        return local(x, cast, targets)
    return shard_map(local, mesh, (rows, PartitionSpec(), rows), rows, axes)(x, cast, targets)


def log_probabilities(
    x: Float[Array, "B T D"],
    kernel: Kernel,
    targets: Int[Array, "B T"],
    mesh: AnyMesh | None = None,
    logits: int = ChunkedLoss.logits,
) -> Float[Array, "B T"]:
    """Compute the log-probability of each target; see `map_logits`."""
    return map_logits(lambda logits, targets: -_losses(logits, targets, 0.0)[1], x, kernel, targets, mesh, logits)


def _split(targets: Int[Array, "B T"], mesh: AnyMesh | None) -> tuple[tuple[str, ...], PartitionSpec]:
    """Return the mesh axes that shard rows and tokens, as a tuple and as a PartitionSpec."""
    rows, tokens = batch_shard_axes(len(targets), mesh), context_shard_axes(targets.shape[1], mesh)
    return (*rows, *tokens), PartitionSpec(rows or None, tokens or None)


def _tokens_per_chunk(logits: int, kernel: Kernel, targets: Array, mesh: AnyMesh | None) -> int:
    """Return the chunk length in tokens per row that gives at most ``logits`` logits per device."""
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
        def chunk_fn(sums: Sums, chunk: Any) -> tuple[Sums, None]:
            x, targets, weights = chunk
            losses, entropy, _ = _losses(cast.matmul_f32(x), targets, z)
            return (sums[0] + jnp.sum(losses * weights), sums[1] + jnp.sum(entropy * weights)), None

        return jax.lax.scan(chunk_fn, (jnp.zeros(()), jnp.zeros(())), split_chunks(step, x, targets, weights))[0]

    (axes, rows), cast, replicated = _split(targets, mesh), kernel.cast(x.dtype), PartitionSpec()
    if mesh is None or not axes:
        return local(x, cast, targets, weights)

    def global_sums(*arguments: Any) -> Sums:
        return jax.lax.psum(local(*arguments), axes)

    return shard_map(global_sums, mesh, (rows, replicated, rows, rows), replicated, axes)(x, cast, targets, weights)


def _with_slopes(
    x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float, mesh: AnyMesh | None
) -> Any:
    """Compute both sums, and the loss gradients with respect to ``x`` and, if trainable, ``kernel``."""
    (axes, rows), cast = _split(targets, mesh), kernel.cast(x.dtype)
    local = functools.partial(_slopes_of_rows, step=step, z=z)
    if mesh is None or not axes:
        sums, (x_grad, kernel_grad) = local(x, cast, targets, weights)
    else:
        replicated, count = PartitionSpec(), shard_count(mesh, axes)
        sum_dtype = reduction_dtype(jnp.float32, x.dtype)
        axes = tuple(sorted(axes, key=lambda axis: axis not in ("fsdp", CONTEXT)))  # parameter axes first
        axes_cover_mesh = count == mesh.size  # if the mesh has other axes, XLA would gather before the scatter
        scattered = jax.tree.map(lambda a: axes_cover_mesh and bool(a.ndim) and a.shape[-1] % count == 0, cast)
        grad_specs = jax.tree.map(
            lambda a, part: PartitionSpec(*[None] * (a.ndim - 1), axes) if part else replicated, cast, scattered
        )

        def global_sums(*arguments: Any) -> Any:
            sums, (x_grad, kernel_grad) = local(*arguments)
            if kernel_grad is not None:
                narrow_grad = jax.tree.map(lambda a: a.astype(sum_dtype), kernel_grad)
                kernel_grad = jax.tree.map(lambda a, part: _sum_over_axes(a, axes, part), narrow_grad, scattered)
            return jax.lax.psum(sums, axes), (x_grad, kernel_grad)

        out_specs = (replicated, replicated), (rows, grad_specs if kernel.trainable else None)
        sums, (x_grad, kernel_grad) = shard_map(global_sums, mesh, (rows, replicated, rows, rows), out_specs, axes)(
            x, cast, targets, weights
        )
    if kernel_grad is not None:
        kernel_grad = jax.tree.map(lambda a, like: a.astype(like.dtype), kernel_grad, kernel)
    # Without the barrier, XLA:TPU (libtpu 0.0.50) reduces the kernel's gradient after the backward pass of the layers,
    # and keeps each device's whole float32 gradient until then (3.7 GB for DeepSeek-V3).
    return sums, jax.lax.optimization_barrier((x_grad, kernel_grad))


def _sum_over_axes(a: Array, axes: tuple[str, ...], scatter: bool) -> Array:
    """Sum over mesh axes. If ``scatter``, each device gets its shard of the last dimension."""

    def add(a: Array, dtype: Any) -> Array:
        a = a.astype(dtype)
        if scatter:
            a = jax.lax.psum_scatter(a, axes, scatter_dimension=a.ndim - 1, tiled=True)
        else:
            a = jax.lax.psum(a, axes)
        return a.astype(jnp.float32)

    if a.dtype == jnp.float32:
        return add(a, jnp.float32)
    # XLA:CPU crashes on 16-bit sums in a `shard_map` over a subset of the mesh axes (jax 0.10.2 and 0.12.0), with
    # "Invalid binary instruction opcode copy". On CPUs, the rounded values are summed in float32.
    cpu, default = (functools.partial(add, dtype=dtype) for dtype in (jnp.float32, a.dtype))
    return jax.lax.platform_dependent(a, cpu=cpu, default=default)


def _slopes_of_rows(x: Array, cast: Kernel, targets: Array, weights: Array, step: int, z: float) -> Any:
    """Compute `_with_slopes` on one device. The kernel's gradients are float32."""

    def chunk_fn(carry: Any, chunk: Any) -> Any:
        total, entropies, kernel_grad = carry
        x, targets, weights = chunk
        logits = cast.matmul_f32(x)
        losses, entropy, norm = _losses(logits, targets, z)
        is_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        probabilities = jnp.exp(logits - norm[..., None])
        logits_grad = (probabilities * (1 + 2 * z * norm)[..., None] - is_target) * weights[..., None]
        logits_grad = cast.output_grad(logits_grad, logits).astype(x.dtype)
        if kernel_grad is not None:
            kernel_grad = jax.tree.map(jnp.add, kernel_grad, cast.vjp_kernel(x, logits_grad))
        sums = total + jnp.sum(losses * weights), entropies + jnp.sum(entropy * weights)
        return (*sums, kernel_grad), cast.vjp_input(logits_grad)

    kernel_grad = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), cast) if cast.trainable else None
    initial = (jnp.zeros(()), jnp.zeros(()), kernel_grad)
    (total, entropy, kernel_grad), x_grad = jax.lax.scan(chunk_fn, initial, split_chunks(step, x, targets, weights))
    return (total, entropy), (join_chunks(x_grad, x.shape[1]), kernel_grad)


def _chunked_jvp(step: int, z: float, mesh: AnyMesh | None, primals: Any, tangents: Any) -> Any:
    x, kernel, targets, weights = primals
    sums, grads = _with_slopes(x, kernel, targets, weights, step, z, mesh)
    total = jnp.zeros(())
    # A frozen kernel comes last and has no gradient, so the lists may differ in length.
    for grad, tangent in zip(jax.tree.leaves(grads), jax.tree.leaves(tangents[:2]), strict=False):
        if not isinstance(tangent, SymbolicZero):
            # Float32, also in reverse mode: 1 / tokens scales all gradients, and bfloat16 rounds it by up to 0.4 %.
            total += jnp.sum(grad.astype(jnp.float32) * tangent.astype(jnp.float32))
    return sums, (total, jnp.zeros(()))


_chunked.defjvp(_chunked_jvp, symbolic_zeros=True)
