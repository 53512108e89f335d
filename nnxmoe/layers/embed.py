"""Token embedding, and the output head of models with tied embeddings."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, ParamOptions, axes_of, parameter
from nnxmoe.layers.linear.kernel import Adapter, DenseKernel, Kernel, is_kernel, with_adapter
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_map
from nnxmoe.sharding_rules import RULES, Rules, axes_per_dimension


class Embed(nnx.Module):
    """Token embedding table ``[V, D]``. ``weight`` returns the table as a tied output head.

    Attributes:
        mesh: Device mesh that shards the table, if any.
        rules: Sharding rules of the table.
        lora: Adapter of the lookup, ``a [rank, V]`` and ``b [D, rank]``.
        lora_head: Adapter of a tied output head.
    """

    ins_first = False  # True if the output head has Flax's dimension order, [D, V], as in the Linen bridge

    def __init__(
        self, vocab: int, dim: int, *, mesh: AnyMesh | None = None, rules: Rules = RULES, **kw: Unpack[ParamOptions]
    ):
        self.mesh, self.rules = mesh, rules
        self.lora: Adapter | None = None
        self.lora_head: Adapter | None = None
        init = nnx.initializers.normal(dim**-0.5)
        self.table = parameter((vocab, dim), ("vocab", "embed"), init, **kw)

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any = None) -> Float[Array, "B T D"]:
        """Look up token embeddings. ``dtype`` defaults to the dtype of the table."""
        dtype = self.table.dtype if dtype is None else dtype
        embeddings = self._look_up(tokens, dtype)
        return embeddings if self.lora is None else embeddings + self.lora.lookup(tokens).astype(dtype)

    def _look_up(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        table = self.table[...]
        if self.mesh is None:
            return jnp.take(table, tokens, axis=0).astype(dtype)
        row_axes = batch_shard_axes(tokens.shape[0], self.mesh)
        token_axes = context_shard_axes(tokens.shape[1], self.mesh)
        vocab_axes, width_axes = axes_per_dimension(("vocab", "embed"), self.mesh, self.rules)
        sharded_axes = {*row_axes, *token_axes}
        if not width_axes or not set(width_axes) <= sharded_axes or set(vocab_axes) & sharded_axes:
            return jnp.take(table, tokens, axis=0).astype(dtype)
        # D is sharded over mesh axes that also shard the tokens. For a plain lookup, XLA would replicate the embeddings
        # of the whole batch, with the warning "involuntary full rematerialization".
        look_up = functools.partial(
            _look_up_shard, vocab=table.shape[0], dtype=dtype, vocab_axes=vocab_axes, width_axes=width_axes
        )
        table_spec = PartitionSpec(vocab_axes or None, width_axes)
        token_spec = PartitionSpec(row_axes or None, token_axes or None)
        return shard_map(look_up, self.mesh, (table_spec, token_spec), token_spec)(table, tokens)

    def weight(self) -> Kernel:
        """Return the table as the kernel ``[D, V]`` of a tied output head, with the head's adapter, if any."""
        table = self.table[...]
        kernel = DenseKernel(table.T, ins_first=True) if self.ins_first else DenseKernel(table)
        return with_adapter(kernel, self.lora_head)


def _look_up_shard(
    table: Float[Array, "v d"],
    tokens: Int[Array, "b T"],
    *,
    vocab: int,
    dtype: Any,
    vocab_axes: tuple[str, ...],
    width_axes: tuple[str, ...],
) -> Float[Array, "b T D"]:
    """Look up the embeddings of this device's tokens in a table sharded over ``width_axes`` and ``vocab_axes``.

    The tokens are all-gathered over ``width_axes``. Each device looks up its slice of the width for all gathered
    tokens, with zeros for tokens outside its vocabulary shard. The results are summed over ``vocab_axes``. An
    all-to-all over ``width_axes`` then exchanges the slices, so each device has the full embeddings of its tokens.
    """
    all_tokens = jax.lax.all_gather(tokens, width_axes, axis=0, tiled=True)
    if not vocab_axes:
        embeddings = jnp.take(table, all_tokens, axis=0).astype(dtype)
    else:
        index = all_tokens + jnp.where(all_tokens < 0, vocab, 0) - jax.lax.axis_index(vocab_axes) * table.shape[0]
        is_local = (index >= 0) & (index < table.shape[0])
        local_rows = jnp.take(table, jnp.where(is_local, index, 0), axis=0).astype(dtype)
        # As in `jnp.take`, the embeddings of tokens outside the vocabulary are NaN.
        remote_rows = jnp.where((all_tokens >= -vocab) & (all_tokens < vocab), 0, jnp.nan).astype(dtype)
        embeddings = jax.lax.psum(jnp.where(is_local[..., None], local_rows, remote_rows[..., None]), vocab_axes)
    return jax.lax.all_to_all(embeddings, width_axes, split_axis=0, concat_axis=2, tiled=True)


def is_embedding_table(variable: nnx.Variable) -> bool:
    """Return whether a variable is the table of an `Embed`. A lookup reads one row per token."""
    is_table = isinstance(variable, nnx.Param) and axes_of(variable)[-2:] == ("vocab", "embed")
    return is_table and not is_kernel(variable)


class ScaledEmbed(Embed):
    """`Embed` with embeddings multiplied by ``factor`` (Granite). A tied output head is not scaled.

    ``factor`` defaults to ``sqrt(D)`` (Gemma, Trinity).
    """

    def __init__(self, vocab: int, dim: int, *, factor: float | None = None, **options: Any):
        super().__init__(vocab, dim, **options)
        self.factor = dim**0.5 if factor is None else factor

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any = None) -> Float[Array, "B T D"]:
        return super().__call__(tokens, dtype) * self.factor
