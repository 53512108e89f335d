"""Attention with ``jax.nn.dot_product_attention``, and ``shard_map`` for kernels that XLA cannot partition."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.sharding import batch_shard_axes, is_static, shard_map
from nnxmoe.sharding_rules import RULES, Rules, rule_axes, shard_count

MIN_QUERIES = 64  # masked passes of fewer queries read keys at the speed of memory with plain products, too
MAX_MASK = 2**28  # elements of a boolean mask, which cuDNN adds to the scores as 16-bit floats
SINK_WIDTH = 8  # extra components of queries and keys: head widths must be multiples of 8


@dataclasses.dataclass(frozen=True)
class ShardMapKernel:
    """Base class for kernels that XLA cannot partition. Each device computes its shard of the rows and heads.

    Attributes:
        mesh: Device mesh, set by ``Strategy``.
        rules: Sharding rules, set by ``Strategy``.
    """

    mesh: Mesh | None = dataclasses.field(default=None, repr=False, kw_only=True)
    rules: Rules = dataclasses.field(default=RULES, repr=False, kw_only=True)

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        """Return a copy bound to ``mesh`` and ``rules``."""
        return dataclasses.replace(self, mesh=mesh, rules=rules)


def shard_map_heads(
    run: Callable[..., HeadOutputs],
    mesh: Mesh | None,
    rules: Rules,
    q: Queries,
    k: Keys,
    v: Values,
    *row_arrays: Any,
) -> HeadOutputs:
    """Call ``run(q, k, v, *row_arrays)`` on every device with its shard of the rows and heads.

    ``row_arrays`` are arrays ``[#B, …]`` or None.
    """
    if mesh is None or mesh.size == 1:
        return run(q, k, v, *row_arrays)
    batch, heads = batch_and_head_axes(len(q), k.shape[1], "kv_heads", mesh, rules)
    spec = PartitionSpec(batch, heads)
    row_specs = (PartitionSpec(batch if a is not None and len(a) == len(q) else None) for a in row_arrays)
    return shard_map(run, mesh, (spec, spec, spec, *row_specs), spec)(q, k, v, *row_arrays)


def batch_and_head_axes(rows: int, heads: int, axis: str, mesh: Mesh, rules: Rules) -> tuple[Any, Any]:
    """Return the mesh axes that shard the rows, and the mesh axes that shard the heads.

    Args:
        rows: Number of rows.
        heads: Number of heads.
        axis: Logical axis of the heads.
        mesh: Device mesh.
        rules: Sharding rules.

    Returns:
        Two entries of a `PartitionSpec`. An entry is None if the number of shards does not divide the rows or heads.
    """
    head_axes = rule_axes(axis, mesh, rules)
    return batch_shard_axes(rows, mesh) or None, None if heads % shard_count(mesh, head_axes) else head_axes or None


@dataclasses.dataclass(frozen=True)
class FusedAttention(ShardMapKernel):
    """Attention with ``jax.nn.dot_product_attention``: cuDNN or XLA fusions on accelerators. Slow on CPUs.

    Causality and the window are passed as arguments. For caches, segments and sinks, a boolean mask ``[B, 1, T, S]`` is
    passed. Sinks are an extra key. cuDNN computes padded causal passes without a mask: the real tokens are moved to the
    front of each row. A soft cap, and values wider than keys are not supported. cuDNN supports only bfloat16 and
    float16, and only head widths that are multiples of 8 up to ``max_head_dim``.

    Args:
        implementation: Argument of ``jax.nn.dot_product_attention``.
        fallback: Attention function for unsupported operands, for masked passes of fewer than 64 queries such as
            decoding steps, and for masks with more than 2**28 elements. If ``None``, unsupported operands raise
            ValueError.
        max_head_dim: Maximum head width of cuDNN: 256 since Hopper, 128 on older GPUs.
    """

    implementation: Literal["xla", "cudnn"] | None = None
    fallback: AttentionFn | None = None
    max_head_dim: int = 256

    def __post_init__(self) -> None:
        set_positive(self, "max_head_dim")
        if self.fallback is not None:
            check_object("FusedAttention", "fallback", self.fallback, "BlockwiseAttention()")

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        width, mask, reason = v.shape[3], softmax.mask, self._unsupported(q, v, softmax)
        is_plain, moves_padding = mask.is_plain and softmax.sinks is None, self._moves_padding(softmax)
        if self.fallback is not None:
            is_slow = not is_plain and not _fits_mask(q, k, needs_mask=not moves_padding)
            if reason is not None or is_slow:
                return self.fallback(q, k, v, softmax)
        if reason is not None:
            raise ValueError(f"FusedAttention {reason}. Use ReferenceAttention(), or set FusedAttention(fallback=…).")
        valid = mask.keys.valid if moves_padding else None
        allowed = None if is_plain or moves_padding else mask.allowed()
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        if allowed is not None and softmax.sinks is not None:
            q, k, v, allowed = _add_sink_key(q, k, v, allowed, softmax.sinks.astype(jnp.float32) / softmax.scale)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))  # keys and values must have the same width
        window = None if mask.window is None else (mask.window - 1, 0)

        def run(q: Array, k: Array, v: Array, allowed: Array | None, valid: Array | None) -> Array:
            q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
            options: dict[str, Any] = {"is_causal": True, "local_window_size": window}
            if allowed is not None:
                options = {"mask": allowed[:, None], "is_causal": mask.causal and softmax.sinks is None}
            options |= {"scale": softmax.scale, "implementation": self.implementation}
            if valid is None:
                outputs = jax.nn.dot_product_attention(q, k, v, **options)
            else:
                order, place = _real_tokens_first(valid)
                q, k, v = (_permute(a, order) for a in (q, k, v))
                outputs = _permute(jax.nn.dot_product_attention(q, k, v, **options), place)
            return jnp.swapaxes(outputs, 1, 2)

        mesh = self.mesh if self.implementation == "cudnn" else None
        return shard_map_heads(run, mesh, self.rules, q, k, v, allowed, valid)[..., :width]

    def _moves_padding(self, softmax: MaskedSoftmax) -> bool:
        """Return whether the mask is causal and has padding, but neither segments nor sinks, and cuDNN is used."""
        mask = softmax.mask
        is_padded = mask.causal and mask.keys.valid is not None and mask.query_segment is None
        return is_padded and softmax.sinks is None and self.implementation == "cudnn"

    def _unsupported(self, q: Queries, v: Values, softmax: MaskedSoftmax) -> str | None:
        """Return why the kernel does not support these operands, or ``None`` if the operands are supported.

        The limits of cuDNN are defined in ``cudnn/fused_attention_stablehlo.py`` of JAX (0.10.2, 0.12.0).
        """
        width = q.shape[3] + (0 if softmax.sinks is None else SINK_WIDTH)
        if v.shape[3] > q.shape[3]:
            return f"does not support values wider than keys, got {v.shape[3]} > {q.shape[3]}"
        if softmax.softcap is not None:
            return "does not support a soft cap"
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"with cuDNN requires bfloat16 or float16, got {q.dtype}"
        if self.implementation == "cudnn" and (width % 8 or width > self.max_head_dim):
            return f"with cuDNN requires a head width that is a multiple of 8 up to {self.max_head_dim}, got {width}"
        return None


def _fits_mask(q: Queries, k: Keys, needs_mask: bool) -> bool:
    """Return whether a pass that is not plainly causal has enough queries for the kernel, and a mask of this size.

    cuDNN's backward pass requires even numbers of queries and keys if there is a mask.
    """
    shape = len(q), q.shape[2], k.shape[2]
    is_static_shape = is_static(*shape)
    if not is_static_shape or shape[1] < MIN_QUERIES:
        return False
    return not needs_mask or (shape[1] % 2 == shape[2] % 2 == 0 and math.prod(shape) <= MAX_MASK)


def _add_sink_key(
    q: Queries, k: Keys, v: Values, allowed: Array, products: Float[Array, "N"]
) -> tuple[Queries, Keys, Values, Array]:
    """Add a key without a value whose product with the queries of head n is ``products[n]``, and a masked key.

    Queries and keys get `SINK_WIDTH` more components. The product is the sum of two of them, so it is not rounded to
    16 bits. The masked key preserves an even number of keys.
    """
    products = products[:, None, None]
    high = products.astype(q.dtype)
    low = (products - high.astype(jnp.float32)).astype(q.dtype)
    terms = jnp.pad(jnp.concatenate([high, low], axis=-1), ((0, 0), (0, 0), (0, SINK_WIDTH - 2)))
    q = jnp.concatenate([q, jnp.broadcast_to(terms, (*q.shape[:3], SINK_WIDTH))], axis=-1)
    k = jnp.pad(k, ((0, 0), (0, 0), (0, 2), (0, SINK_WIDTH))).at[:, :, -2, -SINK_WIDTH : 2 - SINK_WIDTH].set(1)
    allowed = jnp.pad(jnp.pad(allowed, ((0, 0), (0, 0), (0, 1)), constant_values=True), ((0, 0), (0, 0), (0, 1)))
    return q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 2), (0, 0))), allowed


def _real_tokens_first(valid: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Return the permutation that moves the real tokens of each row to the front in order, and its inverse."""
    real, padding = (jnp.cumsum(a, axis=1, dtype=jnp.int32) for a in (valid, ~valid))
    place = jnp.where(valid, real, real[:, -1:] + padding) - 1
    tokens = jnp.broadcast_to(jnp.arange(valid.shape[1], dtype=jnp.int32), valid.shape)
    order = jax.vmap(lambda row, at: row.at[at].set(row, unique_indices=True))(tokens, place)
    return order, place


def _permute(x: Float[Array, "B T ..."], order: Int[Array, "B T"]) -> Float[Array, "B T ..."]:
    options: dict[str, Any] = {"unique_indices": True, "mode": "promise_in_bounds"}
    return jax.vmap(lambda row, at: row.at[at].get(**options))(x, order)
