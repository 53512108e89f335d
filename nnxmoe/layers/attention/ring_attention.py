"""Ring attention (Liu et al. 2023): shards of keys and values circulate along the mesh axis ``context``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.context_parallel import ContextShards, is_context_sharded, ppermute_next, shard_map_context
from nnxmoe.layers.attention.flash_attention import LOWEST, FlashAttention, sinks_gradient
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.sharding import bind_mesh
from nnxmoe.sharding_rules import Rules

Sinks = Float[Array, "N"] | None
KVExpansion = Callable[[Array, Any], tuple[Array, Array]]
"""``(shard, kernel) -> k, v``. Computes keys and values from a circulating shard. Must be hashable."""


@dataclasses.dataclass(frozen=True)
class RingAttention(CheckedFields):
    """Attention that sends keys and values, or MLA's latents, from device to device along the mesh axis ``context``.

    In each step, a device computes attention of its queries to one shard of the keys, and merges the result with the
    previous results by log-sum-exp. The memory per device is proportional to the number of tokens per device. Key
    blocks are skipped as in `FlashAttention`. With a window of W tokens and no padding, each device only visits the
    shards of the most recent W tokens. Latents are expanded one shard at a time.

    Args:
        flash: Computes the scores and the gradients. Only first-order reverse-mode derivatives are supported.
        fallback: Attention function for passes with a cache, and for row lengths that the size of ``context`` does not
            divide. Every device then computes the whole pass.
        mesh: Device mesh, set by ``Strategy``.
    """

    flash: FlashAttention = FlashAttention(512, 1024)
    fallback: AttentionFn = BlockwiseAttention()
    mesh: Mesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.flash, FlashAttention):
            raise ValueError(f"RingAttention(flash={self.flash!r}): pass FlashAttention(block_q, block_k)")

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        """Return a copy bound to ``mesh``."""
        return dataclasses.replace(self, fallback=bind_mesh(self.fallback, mesh, rules), mesh=mesh)

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        if not is_context_sharded(softmax.mask, q.shape[2], self.mesh):
            return self.fallback(q, k, v, softmax)

        def run(q: Array, kv: Array, softmax: MaskedSoftmax) -> Array:
            return self._attend_ring(SplitKV(q.shape[3]), q, kv, 2, None, softmax)

        kv = jnp.concatenate([k, v.astype(k.dtype)], axis=3)
        return shard_map_context(run, self.mesh, (q, kv), (softmax,), 2)

    def attend_latents(self, mla: Any, inputs: Any, softmax: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """Circulate the latents if ``mla`` expands latents. Otherwise, circulate the keys and values of ``mla``."""
        expansion = mla.expansion(inputs)
        if expansion is None or not is_context_sharded(softmax.mask, inputs.q_nope.shape[1], self.mesh):
            return mla(inputs, softmax, self)

        def run(q: Array, latents: Array, softmax: MaskedSoftmax, kv_b: Any) -> Array:
            outputs = self._attend_ring(expansion, jnp.swapaxes(q, 1, 2), latents, 1, kv_b, softmax)
            return jnp.swapaxes(outputs, 1, 2)

        q = jnp.concatenate([inputs.q_nope, inputs.q_rope], axis=3)
        return shard_map_context(run, self.mesh, (q, inputs.latents), (softmax, inputs.kv_b), 1)

    def _attend_ring(
        self,
        expand: KVExpansion,
        q: Queries,
        shard: Array,
        shard_axis: int,
        kernel: Any,
        softmax: MaskedSoftmax,
    ) -> HeadOutputs:
        """Run ring attention on one device. ``shard`` is the circulating array, with tokens along ``shard_axis``."""
        count = jax.lax.axis_size(CONTEXT)
        shards = ContextShards.for_window(q.shape[2] * count, count, softmax.mask.window)
        q, shard = shards.balance(q, 2), shards.balance(shard, shard_axis)
        softmax_leaves, softmax_tree = jax.tree.flatten(dataclasses.replace(softmax, sinks=None))
        kernel_leaves, kernel_tree = jax.tree.flatten(kernel)
        is_float = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in kernel_leaves)
        floats = [leaf for leaf, has_gradient in zip(kernel_leaves, is_float, strict=True) if has_gradient]
        codes = [leaf for leaf, has_gradient in zip(kernel_leaves, is_float, strict=True) if not has_gradient]
        ring = Ring(self.flash, shards, softmax_tree, expand, is_float, kernel_tree)
        outputs: Array = _ring_attention(ring, q, shard, floats, softmax.sinks, (softmax_leaves, codes))
        return shards.unbalance(outputs, 2)


@dataclasses.dataclass(frozen=True)
class SplitKV:
    """`KVExpansion` that splits the last dimension into keys (the first ``width`` components) and values."""

    width: int

    def __call__(self, shard: Float[Array, "B K S H+Hv"], kernel: None) -> tuple[Array, Array]:
        return shard[..., : self.width], shard[..., self.width :]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static arguments of the forward and backward passes of ring attention.

    Attributes:
        flash: Computes the scores and the gradients.
        shards: Assignment of tokens to devices.
        softmax_tree: Tree structure of `MaskedSoftmax` without sinks.
        expand: Computes keys and values from the circulating shard.
        is_float: Whether each leaf of the kernel has a gradient.
        kernel_tree: Tree structure of the kernel.
    """

    flash: FlashAttention
    shards: ContextShards
    softmax_tree: Any
    expand: KVExpansion
    is_float: tuple[bool, ...]
    kernel_tree: Any

    def step_count(self, softmax: MaskedSoftmax) -> int:
        """Return the number of shards that each device visits, including the device's own shard.

        With padding, every device visits all shards, because a window counts real tokens only.
        """
        window, size = softmax.mask.window, self.shards.length // self.shards.count
        if window is None or softmax.mask.keys.valid is not None:
            return self.shards.count
        return min(self.shards.count, 1 - (1 - window) // size)

    def keys_and_values(self, shard: Array, floats: list[Array], codes: list[Array]) -> tuple[Array, Array]:
        """Compute the keys and values of a shard."""
        floats, codes = list(floats), list(codes)
        leaves = [floats.pop(0) if is_float else codes.pop(0) for is_float in self.is_float]
        return self.expand(shard, self.kernel_tree.unflatten(leaves))

    def softmax(self, leaves: list[Array], step: Any) -> MaskedSoftmax:
        """Return the softmax for this device's queries and the keys of the given step."""
        softmax, device = self.softmax_tree.unflatten(leaves), jax.lax.axis_index(CONTEXT)
        queries, keys = (self.shards.tokens(i) for i in (device, (device - step) % self.shards.count))
        return dataclasses.replace(softmax, mask=softmax.mask.select(queries, keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(
    ring: Ring, q: Array, shard: Array, floats: list[Array], sinks: Sinks, constants: tuple[list[Array], list[Array]]
) -> HeadOutputs:
    """Attend to all shards of the ring.

    ``floats`` are the kernel leaves with gradients. ``constants`` are the leaves of `MaskedSoftmax`, and the kernel
    leaves without gradients.
    """
    return _ring_forward(ring, q, shard, floats, sinks, constants)[0]


def _ring_forward(
    ring: Ring, q: Array, shard: Array, floats: list[Array], sinks: Sinks, constants: tuple[list[Array], list[Array]]
) -> tuple[Array, Any]:
    softmax_leaves, codes = constants

    def attend(shard: Array, step: Any, partial: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = ring.keys_and_values(shard, floats, codes)
        outputs, logsumexp = ring.flash.partial_forward(q, k, v, ring.softmax(softmax_leaves, step))
        return _merge_partial(partial, (outputs, jnp.where(logsumexp == jnp.inf, LOWEST, logsumexp)))

    def attend_and_pass_on(step: Int[Array, ""], carry: tuple[Array, Any]) -> tuple[Array, Any]:
        shard, partial = carry
        # The two calls are independent, so the transfer of the next shard overlaps with the computation.
        return ppermute_next(shard), attend(shard, step, partial)

    logsumexp = jnp.full(q.shape[:3], LOWEST)
    if sinks is not None:
        logsumexp = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], logsumexp.shape)
    width = jax.eval_shape(ring.keys_and_values, shard, floats, codes)[1].shape[3]
    init_carry = shard, (jnp.zeros((*q.shape[:3], width), jnp.float32), logsumexp)
    last_step = ring.step_count(ring.softmax_tree.unflatten(softmax_leaves)) - 1
    last_shard, partial = jax.lax.fori_loop(0, last_step, attend_and_pass_on, init_carry)
    outputs, logsumexp = attend(last_shard, last_step, partial)
    outputs, logsumexp = outputs.astype(q.dtype), jnp.where(logsumexp <= LOWEST / 2, jnp.inf, logsumexp)
    return outputs, (q, shard, floats, sinks, constants, outputs, logsumexp)


def _merge_partial(partial: tuple[Array, Array], other_partial: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge the outputs and log-sum-exps for two sets of keys."""
    logsumexp = jnp.logaddexp(partial[1], other_partial[1])
    terms = [outputs * jnp.exp(part - logsumexp)[..., None] for outputs, part in (partial, other_partial)]
    return terms[0] + terms[1], logsumexp


def _ring_backward(ring: Ring, residuals: Any, d_outputs: Array) -> tuple[Array, Array, list[Array], Sinks, None]:
    """Compute the gradients. The float32 gradient of a shard circulates with the shard, back to the source device."""
    q, shard, floats, sinks, (softmax_leaves, codes), outputs, logsumexp = residuals
    q_f32 = q.astype(jnp.float32)

    def backward_step(step: Int[Array, ""], carry: tuple[Array, Any]) -> tuple[Array, Any]:
        shard, (d_q, d_shard, d_floats) = carry
        kv, expansion_vjp = jax.vjp(lambda shard, floats: ring.keys_and_values(shard, floats, codes), shard, floats)
        k, v = (a.astype(jnp.float32) for a in kv)
        softmax = ring.softmax(softmax_leaves, step)
        step_d_q, *d_kv = ring.flash.partial_backward(q_f32, k, v, softmax, outputs, logsumexp, d_outputs)
        step_d_shard, step_d_floats = expansion_vjp(tuple(d.astype(a.dtype) for d, a in zip(d_kv, kv, strict=True)))
        totals, gradients = (d_shard, d_q, d_floats), (step_d_shard, step_d_q, step_d_floats)
        d_shard, d_q, d_floats = jax.tree.map(jnp.add, totals, gradients)
        return ppermute_next(shard), (d_q, ppermute_next(d_shard), d_floats)

    steps = ring.step_count(ring.softmax_tree.unflatten(softmax_leaves))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (q, shard, floats))
    _, (d_q, d_shard, d_floats) = jax.lax.fori_loop(0, steps, backward_step, (shard, zeros))
    remaining_steps = -steps % ring.shards.count
    if remaining_steps:
        d_shard = ppermute_next(d_shard, remaining_steps)
    products = jnp.sum(d_outputs.astype(jnp.float32) * outputs.astype(jnp.float32), axis=-1)
    d_sinks = None if sinks is None else sinks_gradient(sinks, logsumexp, products)
    d_q, d_shard, d_floats = jax.tree.map(lambda d, a: d.astype(a.dtype), (d_q, d_shard, d_floats), (q, shard, floats))
    return d_q, d_shard, d_floats, d_sinks, None


_ring_attention.defvjp(_ring_forward, _ring_backward)
