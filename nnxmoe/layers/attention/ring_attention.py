"""Ring attention (Liu et al. 2023): keys and values go round the devices along ``context``, none of which has all."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT
from nnxmoe.config.validate import check_object
from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.context_parallel import ContextShards, is_context_sharded, ppermute_next, shard_map_context
from nnxmoe.layers.attention.flash_attention import LOWEST, FlashAttention, slope_of_sinks
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.sharding import bind_mesh
from nnxmoe.sharding_rules import Rules

Sinks = Float[Array, "N"] | None


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Passes keys and values from device to device along the mesh axis ``context``; each attends with its own queries
    to those that it has, and results are merged by their log-sum-exps. Memory per device is that of its own tokens.

    ``flash`` computes the scores; of blocks without an allowed pair none. With a window W only devices of the last W
    tokens are asked. Of latent attention the latents go round, and each device expands those that it has. ``fallback``
    computes passes with a cache, and rows that the axis does not divide, on every device. Gradients are those of
    `FlashAttention`: first derivatives in reverse mode only. ``mesh``: ``Strategy`` sets it.
    """

    flash: FlashAttention = FlashAttention(512, 1024)
    fallback: AttentionFn = BlockwiseAttention()
    mesh: Mesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_object("RingAttention", "fallback", self.fallback, "BlockwiseAttention()")
        if not isinstance(self.flash, FlashAttention):
            raise ValueError(f"RingAttention(flash={self.flash!r}): give FlashAttention(block_q, block_k)")

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        return dataclasses.replace(self, fallback=bind_mesh(self.fallback, mesh, rules), mesh=mesh)

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        if not is_context_sharded(scores.mask, q.shape[2], self.mesh):
            return self.fallback(q, k, v, scores)

        def run(q: Array, both: Array, scores: MaskedSoftmax) -> Array:
            return self._around(SplitKV(q.shape[3]), (q, 2), (both, 2), None, scores)

        both = jnp.concatenate([k, v.astype(k.dtype)], axis=3)
        return shard_map_context(run, self.mesh, (q, both), (scores,), 2)

    def latents(self, form: Any, x: Any, scores: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """Latent attention whose latents go round, if ``form`` has an `LatentExpansion`; else what it attends to
        does."""
        expansion = getattr(form, "expansion", lambda x: None)(x)
        if expansion is None or not is_context_sharded(scores.mask, x.q_nope.shape[1], self.mesh):
            return form(x, scores, self)

        def run(q: Array, seen: Array, scores: MaskedSoftmax, kv_b: Any) -> Array:
            return jnp.swapaxes(self._around(expansion, (jnp.swapaxes(q, 1, 2), 2), (seen, 1), kv_b, scores), 1, 2)

        q = jnp.concatenate([x.q_nope, x.q_rope], axis=3)
        return shard_map_context(run, self.mesh, (q, x.seen), (scores, x.kv_b), 1)

    def _around(
        self, keys: "KVExpansion", q: tuple[Array, int], stored: tuple[Array, int], kernel: Any, scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        """On one device: arrays come with the axis of their tokens."""
        count = jax.lax.axis_size(CONTEXT)
        pieces = ContextShards.of(q[0].shape[q[1]] * count, count, scores.mask.window)
        own, theirs = (pieces.exchanged(*array) for array in (q, stored))
        leaves, tree = jax.tree.flatten(dataclasses.replace(scores, sinks=None))
        arrays, tree_of_kernel = jax.tree.flatten(kernel)
        trained = tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays)
        floats, codes = (
            [a for a, is_float in zip(arrays, trained, strict=True) if is_float is kind] for kind in (True, False)
        )
        ring = Ring(self.flash, pieces, tree, keys, trained, tree_of_kernel)
        out: Array = _ring(ring, own, theirs, floats, scores.sinks, (leaves, codes))
        return pieces.exchanged(out, 2, back=True)


KVExpansion = Callable[[Array, Any], tuple[Array, Array]]  # ``(stored, kernel) -> k, v`` of what goes round; hashable


@dataclasses.dataclass(frozen=True)
class SplitKV:
    """Splits the last dimension into keys of this ``width`` and the values after them."""

    width: int

    def __call__(self, stored: Float[Array, "B K S H+Hv"], kernel: None) -> tuple[Array, Array]:
        return stored[..., : self.width], stored[..., self.width :]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The placement of tokens on the devices of a ring. ``keys`` expands what circulates into keys and values.
    ``tree``: the structure of `MaskedSoftmax` without sinks. ``floats``: which arrays of the kernel, of structure
    ``kernel``, have gradients."""

    flash: FlashAttention
    pieces: ContextShards
    tree: Any
    keys: KVExpansion
    floats: tuple[bool, ...]
    kernel: Any

    def turns(self, scores: MaskedSoftmax) -> int:
        """How many devices' keys a device needs, its own included. Padding does not count towards a window."""
        window, size = scores.mask.window, self.pieces.length // self.pieces.count
        if window is None or scores.mask.keys.valid is not None:
            return self.pieces.count
        return min(self.pieces.count, 1 - (1 - window) // size)

    def expanded(self, stored: Array, floats: list[Array], codes: list[Array]) -> tuple[Array, Array]:
        """Keys and values of the tokens in ``stored``, the part of the ring that this device holds in this turn."""
        one, other = iter(floats), iter(codes)
        return self.keys(stored, self.kernel.unflatten([next(one if is_float else other) for is_float in self.floats]))

    def scores(self, leaves: list[Array], turn: Any) -> MaskedSoftmax:
        """Scores of this device's queries and the keys that it holds in this turn."""
        scores, me = self.tree.unflatten(leaves), jax.lax.axis_index(CONTEXT)
        mine, theirs = (self.pieces.tokens(device) for device in (me, (me - turn) % self.pieces.count))
        return dataclasses.replace(scores, mask=scores.mask.part(mine, theirs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    ring: Ring, q: Array, stored: Array, floats: list[Array], sinks: Sinks, rest: tuple[list[Array], list[Array]]
) -> Float[Array, "B N T Hv"]:
    """``floats``: arrays of the kernel; ``rest``: those of `MaskedSoftmax`, and others of the kernel, without
    gradients."""
    return _around(ring, q, stored, floats, sinks, rest)[0]


def _around(
    ring: Ring, q: Array, stored: Array, floats: list[Array], sinks: Sinks, rest: tuple[list[Array], list[Array]]
) -> tuple[Array, Any]:
    leaves, codes = rest

    def attended(stored: Array, turn: Any, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        out, logs = ring.flash.partial(q, *ring.expanded(stored, floats, codes), ring.scores(leaves, turn))
        return _merged(so_far, (out, jnp.where(logs == jnp.inf, LOWEST, logs)))

    def step(turn: Int[Array, ""], carry: tuple[Array, Any]) -> tuple[Array, Any]:
        stored, so_far = carry
        return ppermute_next(stored), attended(stored, turn, so_far)  # independent: the next keys arrive meanwhile

    logs = jnp.full(q.shape[:3], LOWEST)
    logs = logs if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], logs.shape)
    width = jax.eval_shape(ring.expanded, stored, floats, codes)[1].shape[3]
    start = stored, (jnp.zeros((*q.shape[:3], width), jnp.float32), logs)
    last = ring.turns(ring.tree.unflatten(leaves)) - 1
    moved, so_far = jax.lax.fori_loop(0, last, step, start)
    out, logs = attended(moved, last, so_far)
    out, logs = out.astype(q.dtype), jnp.where(logs <= LOWEST / 2, jnp.inf, logs)
    return out, (q, stored, floats, sinks, rest, out, logs)


def _merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Output and log-sum-exp for the keys of both."""
    logs = jnp.logaddexp(one[1], other[1])
    parts = [out * jnp.exp(own - logs)[..., None] for out, own in (one, other)]
    return parts[0] + parts[1], logs


def _back_around(ring: Ring, saved: Any, d_out: Array) -> tuple[Array, Array, list[Array], Sinks, None]:
    """Gradients of what goes round go with it, in float32, and home at last."""
    q, stored, floats, sinks, (leaves, codes), out, logs = saved
    wide = q.astype(jnp.float32)

    def step(turn: Int[Array, ""], carry: tuple[Array, Any]) -> tuple[Array, Any]:
        stored, (d_q, d_stored, d_floats) = carry
        kv, back = jax.vjp(lambda stored, floats: ring.expanded(stored, floats, codes), stored, floats)
        k, v = (a.astype(jnp.float32) for a in kv)
        more, *d_kv = ring.flash.slopes(wide, k, v, ring.scores(leaves, turn), out, logs, d_out)
        own, of_kernel = back(tuple(d.astype(a.dtype) for d, a in zip(d_kv, kv, strict=True)))
        d_stored, *sums = jax.tree.map(jnp.add, [d_stored, d_q, *d_floats], [own, more, *of_kernel])
        return ppermute_next(stored), (sums[0], ppermute_next(d_stored), sums[1:])

    turns = ring.turns(ring.tree.unflatten(leaves))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (q, stored, floats))
    _, (d_q, d_stored, d_floats) = jax.lax.fori_loop(0, turns, step, (stored, zeros))
    if home := -turns % ring.pieces.count:
        d_stored = ppermute_next(d_stored, home)
    shared = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    d_sinks = None if sinks is None else slope_of_sinks(sinks, logs, shared)
    d_q, d_stored, d_floats = jax.tree.map(
        lambda d, a: d.astype(a.dtype), (d_q, d_stored, d_floats), (q, stored, floats)
    )
    return d_q, d_stored, d_floats, d_sinks, None


_ring.defvjp(_around, _back_around)
