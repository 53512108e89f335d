"""Attention whose queries are sharded over the mesh axis ``context``, by their place in the row.

The mask reads real positions, windows and segments from whole integer arrays, which every device has. Causal order
without a window is balanced as in Llama 3 (2024, section 3.3.2): of 2n pieces of a row, device i computes the queries
of pieces i and 2n - 1 - i, so that all devices compute equally many scores. Only attention sees that order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT
from nnxmoe.config.validate import check_object
from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.mask import Mask
from nnxmoe.sharding import bind_mesh, context_shard_axes, shard_map
from nnxmoe.sharding_rules import Rules


@runtime_checkable
class ContextParallelAttention(Protocol):
    """An `AttentionFn` that exchanges keys and values, or latents, over the mesh axis ``context``."""

    def latents(self, form: Any, x: Any, scores: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """The output of a `MLAFn` for `MLAInputs` that are sharded over the axis too."""
        ...


@dataclasses.dataclass(frozen=True)
class ContextShards:
    """Which tokens of rows of ``length`` each of ``count`` devices has: a run of them, or ``balanced`` two runs."""

    length: int
    count: int
    balanced: bool

    @classmethod
    def of(cls, length: int, count: int, window: int | None) -> Self:
        """Balanced if there is no window, under which all runs have equally many scores, and if pieces are equal."""
        return cls(length, count, window is None and length % (2 * count) == 0)

    def tokens(self, device: Int[Array, ""]) -> Int[Array, "T"]:
        """Places in the row of a device's tokens."""
        size = self.length // self.count
        if not self.balanced:
            return device * size + jnp.arange(size)
        half = jnp.arange(size // 2)
        return jnp.concatenate([device * size // 2 + half, (2 * self.count - 1 - device) * size // 2 + half])

    def exchanged(self, x: Float[Array, "..."], axis: int, back: bool = False) -> Float[Array, "..."]:
        """A device's run of tokens exchanged for those of `tokens`; ``back``: the inverse.

        Device d has pieces 2d and 2d + 1 of a row in order. Of the even pieces each device gets one, and one of the
        odd ones: the even one comes first on devices with an even number.
        """
        if not self.balanced:
            return x
        numbers, last = np.arange(self.count), 2 * self.count - 1
        to = [np.minimum(piece, last - piece) for piece in (2 * numbers, 2 * numbers + 1)]
        even, (first, second) = jax.lax.axis_index(CONTEXT) % 2 == 0, jnp.split(x, 2, axis)
        halves = _swapped(first, second, even) if back else (first, second)
        first, second = (
            jax.lax.ppermute(half, CONTEXT, [(b, a) if back else (a, b) for a, b in enumerate(where.tolist())])
            for half, where in zip(halves, to, strict=True)
        )
        return jnp.concatenate((first, second) if back else _swapped(first, second, even), axis)


def _swapped(first: Array, second: Array, keep: Array) -> tuple[Array, Array]:
    return jnp.where(keep, first, second), jnp.where(keep, second, first)


def shard_map_context(
    run: Callable[..., Any], mesh: Any, split: tuple[Any, ...], whole: tuple[Any, ...], axis: int
) -> Any:
    """``run(*split, *whole)`` on every device along ``context``, with the arrays of ``split``, and its output, sharded
    over it along ``axis``. Other mesh axes shard arrays as without it."""
    spec = PartitionSpec(*(None,) * axis, CONTEXT)
    specs = (*(spec,) * len(split), *(PartitionSpec(),) * len(whole))
    return shard_map(run, mesh, specs, spec, (CONTEXT,))(*split, *whole)


def is_context_sharded(mask: Any, length: int, mesh: Any) -> bool:
    """Whether ``context`` shards the queries of a pass without a cache, whose keys are the same tokens."""
    return type(mask) is Mask and mask.causal and bool(context_shard_axes(length, mesh))


def all_gather_context(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The shards of all devices along ``context`` in order, received from neighbour to neighbour: where other axes are
    not manual, XLA would gather those too for an ``all_gather`` (jax 0.10.2, 0.12.0)."""
    count, me, size = jax.lax.axis_size(CONTEXT), jax.lax.axis_index(CONTEXT), x.shape[axis]

    def put(every: Array, part: Array, turn: Any) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(every, part, (me - turn) % count * size, axis)

    def step(carry: tuple[Array, Array], turn: Array) -> tuple[tuple[Array, Array], None]:
        part = ppermute_next(carry[0])
        return (part, put(carry[1], part, turn)), None

    every = jnp.zeros((*x.shape[:axis], count * size, *x.shape[axis + 1 :]), x.dtype)
    return jax.lax.scan(step, (x, put(every, x, 0)), jnp.arange(1, count))[0][1]


def ppermute_next(x: Any, steps: int = 1) -> Any:
    """Arrays of the device ``steps`` before this one along ``context``."""
    count = jax.lax.axis_size(CONTEXT)
    return jax.lax.ppermute(x, CONTEXT, [(i, (i + steps) % count) for i in range(count)])


@dataclasses.dataclass(frozen=True)
class AllGatherAttention:
    """Gathers keys and values over the mesh axis ``context``, of latent attention the latents; each device attends
    with its own queries, by ``inner``. The default on meshes with that axis (Llama 3, 2024, section 3.3.2).

    A device has the keys and values of whole rows for one layer, and of all layers at once if they are not computed
    again in the backward pass (`Remat`). Passes with a cache, and rows that the axis does not divide, are computed by
    ``inner`` on every device. ``mesh``: ``Strategy`` sets it.
    """

    inner: AttentionFn = BlockwiseAttention()
    mesh: Mesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_object("AllGatherAttention", "inner", self.inner, "BlockwiseAttention()")

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        return dataclasses.replace(self, inner=bind_mesh(self.inner, mesh, rules), mesh=mesh)

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        if not is_context_sharded(scores.mask, q.shape[2], self.mesh):
            return self.inner(q, k, v, scores)

        def run(q: Array, both: Array, scores: MaskedSoftmax) -> Array:
            k, v = jnp.split(all_gather_context(both, 2), (q.shape[3],), axis=3)
            return self._own(lambda q, scores: self.inner(q, k, v, scores), q, scores, 2)

        both = jnp.concatenate([k, v.astype(k.dtype)], axis=3)
        return shard_map_context(run, self.mesh, (q, both), (scores,), 2)

    def latents(self, form: Any, x: Any, scores: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """Latent attention with gathered latents, from which every device expands the keys of all tokens."""
        if not is_context_sharded(scores.mask, x.q_nope.shape[1], self.mesh):
            return form(x, scores, self.inner)
        nope = x.q_nope.shape[3]

        def run(q: Array, seen: Array, scores: MaskedSoftmax, kv_b: Any) -> Array:
            seen = all_gather_context(seen, 1)

            def attended(q: Array, scores: MaskedSoftmax) -> Array:
                own = dataclasses.replace(x, q_nope=q[..., :nope], q_rope=q[..., nope:], seen=seen, kv_b=kv_b)
                return form(own, scores, self.inner)

            return self._own(attended, q, scores, 1)

        q = jnp.concatenate([x.q_nope, x.q_rope], axis=3)
        return shard_map_context(run, self.mesh, (q, x.seen), (scores, x.kv_b), 1)

    def _own(
        self, attended: Callable[[Array, MaskedSoftmax], Array], q: Array, scores: MaskedSoftmax, axis: int
    ) -> Array:
        """``attended(q, scores)`` for the queries that this device computes."""
        count = jax.lax.axis_size(CONTEXT)
        pieces = ContextShards.of(q.shape[axis] * count, count, scores.mask.window)
        mask = scores.mask.part(pieces.tokens(jax.lax.axis_index(CONTEXT)), slice(None))
        out = attended(pieces.exchanged(q, axis), dataclasses.replace(scores, mask=mask))
        return pieces.exchanged(out, axis, back=True)
