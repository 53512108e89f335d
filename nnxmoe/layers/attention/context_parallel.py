"""Context-parallel attention: the mesh axis ``context`` shards the tokens of each row.

The mask's integer arrays (indices and segments) are replicated. Causal attention without a window is balanced over n
devices as in Llama 3 (2024, section 3.3.2). A row is split into 2n chunks, and device i computes the queries of chunks
i and 2n - 1 - i. All devices then compute the same number of scores. Outside of attention, the tokens of a row are in
order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.layers.mask import Mask
from nnxmoe.sharding import bind_mesh, context_shard_axes, shard_map
from nnxmoe.sharding_rules import Rules


@runtime_checkable
class ContextParallelAttention(Protocol):
    """Protocol for attention functions that exchange keys and values, or latents, over the mesh axis ``context``."""

    def attend_latents(self, mla: Any, inputs: Any, softmax: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """Call the `MLAFn` ``mla`` with `MLAInputs` whose tokens are sharded over ``context``."""
        ...


@dataclasses.dataclass(frozen=True)
class ContextShards:
    """Assignment of a row's tokens to the devices along ``context``.

    Attributes:
        length: Number of tokens in the row.
        count: Number of devices.
        balanced: Whether each device computes one early and one late chunk of the row, for equal work, instead of
            consecutive tokens.
    """

    length: int
    count: int
    balanced: bool

    @classmethod
    def for_window(cls, length: int, count: int, window: int | None) -> Self:
        """Balance rows if there is no window and all chunks have equal size. A window balances the work by itself."""
        return cls(length, count, window is None and length % (2 * count) == 0)

    def tokens(self, device: Int[Array, ""]) -> Int[Array, "T"]:
        """Return the indices of a device's tokens in the row."""
        size = self.length // self.count
        if not self.balanced:
            return device * size + jnp.arange(size)
        offset = jnp.arange(size // 2)
        return jnp.concatenate([device * size // 2 + offset, (2 * self.count - 1 - device) * size // 2 + offset])

    def balance(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Exchange chunks between devices, from shards of consecutive tokens to the assignment in `tokens`.

        Device d sends chunks 2d and 2d + 1 of a row and receives one even and one odd chunk. On devices with an even
        index, the even chunk comes first.
        """
        if not self.balanced:
            return x
        even, odd = self._exchange(*jnp.split(x, 2, axis))
        return jnp.concatenate(_swap_on_odd_devices(even, odd), axis)

    def unbalance(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Invert `balance`."""
        if not self.balanced:
            return x
        even, odd = _swap_on_odd_devices(*jnp.split(x, 2, axis))
        return jnp.concatenate(self._exchange(even, odd, inverse=True), axis)

    def _exchange(self, even: Array, odd: Array, *, inverse: bool = False) -> list[Array]:
        """Send each device's even and odd chunks to the devices that compute them, or invert this exchange."""
        outputs = []
        for chunk, numbers in ((even, range(0, 2 * self.count, 2)), (odd, range(1, 2 * self.count, 2))):
            pairs = [(source, min(i, 2 * self.count - 1 - i)) for source, i in enumerate(numbers)]
            if inverse:
                pairs = [(target, source) for source, target in pairs]
            outputs.append(jax.lax.ppermute(chunk, CONTEXT, pairs))
        return outputs


def _swap_on_odd_devices(first: Array, second: Array) -> tuple[Array, Array]:
    is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)


def shard_map_context(
    run: Callable[..., Any], mesh: Any, sharded: tuple[Any, ...], replicated: tuple[Any, ...], axis: int
) -> Any:
    """Call ``run(*sharded, *replicated)`` on every device along ``context``.

    ``context`` shards ``axis`` of the arrays in ``sharded`` and of the output. The sharding over all other mesh axes is
    unchanged.
    """
    spec = PartitionSpec(*(None,) * axis, CONTEXT)
    in_specs = (*(spec,) * len(sharded), *(PartitionSpec(),) * len(replicated))
    return shard_map(run, mesh, in_specs, spec, (CONTEXT,))(*sharded, *replicated)


def is_context_sharded(mask: Any, length: int, mesh: Any) -> bool:
    """Return whether ``context`` shards the tokens of this pass. Tokens of passes with a cache are not sharded."""
    return type(mask) is Mask and mask.causal and bool(context_shard_axes(length, mesh))


def all_gather_context(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Gather the shards of all devices along ``context`` in order, by sending shards from neighbor to neighbor.

    With ``all_gather``, XLA would also gather over mesh axes that are not manual (jax 0.10.2, 0.12.0).
    """
    count, device, size = jax.lax.axis_size(CONTEXT), jax.lax.axis_index(CONTEXT), x.shape[axis]

    def insert(output: Array, shard: Array, step: Any) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(output, shard, (device - step) % count * size, axis)

    def receive(carry: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], None]:
        shard = ppermute_next(carry[0])
        return (shard, insert(carry[1], shard, step)), None

    output = jnp.zeros((*x.shape[:axis], count * size, *x.shape[axis + 1 :]), x.dtype)
    return jax.lax.scan(receive, (x, insert(output, x, 0)), jnp.arange(1, count))[0][1]


def ppermute_next(x: Any, steps: int = 1) -> Any:
    """Send arrays to the device ``steps`` further along ``context``, cyclically."""
    count = jax.lax.axis_size(CONTEXT)
    return jax.lax.ppermute(x, CONTEXT, [(i, (i + steps) % count) for i in range(count)])


@dataclasses.dataclass(frozen=True)
class AllGatherAttention(CheckedFields):
    """Attention that all-gathers keys and values, or MLA's latents, over the mesh axis ``context``.

    This is the default on meshes with axis ``context``. Each device computes attention for its own queries (Llama 3,
    2024, section 3.3.2). Each device stores the keys and values of whole rows: for one layer if the backward pass
    rematerializes them (`Remat`), otherwise for all layers.

    Args:
        inner: Attention function for a device's queries. If a pass has a cache, or if the size of ``context`` does not
            divide the row length, every device computes the whole pass with ``inner``.
        mesh: Device mesh, set by ``Strategy``.
    """

    inner: AttentionFn = BlockwiseAttention()
    mesh: Mesh | None = dataclasses.field(default=None, repr=False)

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        """Return a copy bound to ``mesh``."""
        return dataclasses.replace(self, inner=bind_mesh(self.inner, mesh, rules), mesh=mesh)

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        if not is_context_sharded(softmax.mask, q.shape[2], self.mesh):
            return self.inner(q, k, v, softmax)

        def run(q: Array, kv: Array, softmax: MaskedSoftmax) -> Array:
            k, v = jnp.split(all_gather_context(kv, 2), (q.shape[3],), axis=3)
            return self._attend_balanced(lambda q, softmax: self.inner(q, k, v, softmax), q, softmax, 2)

        kv = jnp.concatenate([k, v.astype(k.dtype)], axis=3)
        return shard_map_context(run, self.mesh, (q, kv), (softmax,), 2)

    def attend_latents(self, mla: Any, inputs: Any, softmax: MaskedSoftmax) -> Float[Array, "B T N v"]:
        """All-gather the latents. Every device then expands the keys and values of all tokens."""
        if not is_context_sharded(softmax.mask, inputs.q_nope.shape[1], self.mesh):
            return mla(inputs, softmax, self.inner)
        nope_width = inputs.q_nope.shape[3]

        def run(q: Array, latents: Array, softmax: MaskedSoftmax, kv_b: Any) -> Array:
            latents = all_gather_context(latents, 1)

            def attend(q: Array, softmax: MaskedSoftmax) -> Array:
                local_inputs = {
                    "q_nope": q[..., :nope_width],
                    "q_rope": q[..., nope_width:],
                    "latents": latents,
                    "kv_b": kv_b,
                }
                return mla(dataclasses.replace(inputs, **local_inputs), softmax, self.inner)

            return self._attend_balanced(attend, q, softmax, 1)

        q = jnp.concatenate([inputs.q_nope, inputs.q_rope], axis=3)
        return shard_map_context(run, self.mesh, (q, inputs.latents), (softmax, inputs.kv_b), 1)

    def _attend_balanced(
        self, attend: Callable[[Array, MaskedSoftmax], Array], q: Array, softmax: MaskedSoftmax, axis: int
    ) -> Array:
        """Balance the queries, call ``attend(q, softmax)`` on this device, and undo the balancing of the outputs."""
        count = jax.lax.axis_size(CONTEXT)
        shards = ContextShards.for_window(q.shape[axis] * count, count, softmax.mask.window)
        mask = softmax.mask.select(shards.tokens(jax.lax.axis_index(CONTEXT)), slice(None))
        outputs = attend(shards.balance(q, axis), dataclasses.replace(softmax, mask=mask))
        return shards.unbalance(outputs, axis)
