"""Token embedding, which is also the output head of models with tied embeddings."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.linear.kernel import Adapter, DenseKernel, Kernel, with_adapter
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_map
from nnxmoe.sharding_rules import RULES, Rules, axes_per_dimension


class Embed(nnx.Module):
    """Table ``[V, D]``: looks up the embeddings of tokens; ``weight`` returns the tied output head.

    ``mesh``, ``rules``: how the table is sharded. Where D is sharded over axes that also shard the tokens, each device
    looks up its part of all their tokens, zeros for those in other devices' part of V, and the parts are summed and
    exchanged: XLA would replicate the embeddings of the whole batch ("involuntary full rematerialization").
    ``lora``: an adapter of the lookup, ``a [rank, V]`` and ``b [D, rank]``. ``lora_head``: one of a tied output head.
    """

    ins_first = False  # whether products with the head are those of Flax, as in the Linen bridge

    def __init__(
        self, vocab: int, dim: int, *, mesh: AnyMesh | None = None, rules: Rules = RULES, **kw: Unpack[ParamOptions]
    ):
        self.mesh, self.rules = mesh, rules
        self.lora: Adapter | None = None
        self.lora_head: Adapter | None = None
        init = nnx.initializers.normal(dim**-0.5)
        self.table = parameter((vocab, dim), ("vocab", "embed"), init, **kw)

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any = None) -> Float[Array, "B T D"]:
        """The embeddings; ``dtype`` None: as in the table."""
        dtype = self.table.dtype if dtype is None else dtype
        found = self._look_up(tokens, dtype)
        return found if self.lora is None else found + self.lora.lookup(tokens).astype(dtype)

    def _look_up(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        table = self.table[...]
        rows, over = batch_shard_axes(tokens.shape[0], self.mesh), context_shard_axes(tokens.shape[1], self.mesh)
        vocab, width = ((), ()) if self.mesh is None else axes_per_dimension(("vocab", "embed"), self.mesh, self.rules)
        if not width or not set(width) <= {*rows, *over} or set(vocab) & {*rows, *over}:
            return jnp.take(table, tokens, axis=0).astype(dtype)
        size = table.shape[0]

        def local(table: Array, tokens: Array) -> Array:
            every = jax.lax.all_gather(tokens, width, axis=0, tiled=True)
            if not vocab:
                part = jnp.take(table, every, axis=0).astype(dtype)
            else:
                index = every + jnp.where(every < 0, size, 0) - jax.lax.axis_index(vocab) * table.shape[0]
                mine = (index >= 0) & (index < table.shape[0])
                found = jnp.take(table, jnp.where(mine, index, 0), axis=0).astype(dtype)
                elsewhere = jnp.where((every >= -size) & (every < size), 0, jnp.nan).astype(dtype)
                part = jax.lax.psum(jnp.where(mine[..., None], found, elsewhere[..., None]), vocab)
            return jax.lax.all_to_all(part, width, split_axis=0, concat_axis=2, tiled=True)

        specs = PartitionSpec(vocab or None, width), PartitionSpec(rows or None, over or None)
        assert self.mesh is not None
        return shard_map(local, self.mesh, specs, specs[1])(table, tokens)

    def weight(self) -> Kernel:
        """The table as the kernel ``[D, V]`` of a tied output head, with the head's adapter if there is one."""
        table = self.table[...]
        kernel = DenseKernel(table.T, ins_first=True) if self.ins_first else DenseKernel(table)
        return with_adapter(kernel, self.lora_head)


class MuPEmbed(Embed):
    """Embeddings multiplied by the root of their width (Gemma, Trinity); the tied head is not."""

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any = None) -> Float[Array, "B T D"]:
        return super().__call__(tokens, dtype) * self.table.shape[1] ** 0.5
