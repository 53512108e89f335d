"""Attention with ``jax.nn.dot_product_attention``, and ``shard_map`` for kernels that XLA cannot partition."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.layers.mask import Mask
from nnxmoe.sharding import batch_shard_axes, is_static, shard_map
from nnxmoe.sharding_rules import RULES, Rules, rule_axes, shard_count

# With fewer queries, reading the keys and values limits a masked pass, and the fallback is as fast.
MIN_QUERIES = 64
MAX_MASK = 2**28  # maximum elements of a mask; JAX converts it to a 16-bit bias for cuDNN (512 MiB)
SINK_WIDTH = 8  # components added for sinks: two are used, but cuDNN requires multiples of 8


@dataclasses.dataclass(frozen=True)
class ShardMapKernel(CheckedFields):
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

    Causality and the window are passed as arguments of the kernel. Caches, segments and sinks need a boolean mask
    ``[B, 1, T, S]``. Sinks are represented by an extra key (`_add_sink_key`). With cuDNN, causal passes with padding
    need no mask: the real tokens of each row are moved to the front, where causality hides the padding. A soft cap and
    values wider than keys are not supported. cuDNN supports only bfloat16 and float16, and only head widths that are
    multiples of 8 up to ``max_head_dim``.

    Args:
        implementation: Argument of ``jax.nn.dot_product_attention``.
        fallback: Attention function for unsupported operands. Also used for passes with a mask or padding that have
            fewer than ``MIN_QUERIES`` queries (decoding) or symbolic sizes, and for masks with more than ``MAX_MASK``
            elements per device or an odd number of queries or keys. If ``None``, unsupported operands raise ValueError.
        max_head_dim: Maximum head width of cuDNN: 256 since Hopper, 128 on older GPUs.
    """

    implementation: Literal["xla", "cudnn"] | None = None
    fallback: AttentionFn | None = None
    max_head_dim: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "max_head_dim")
        if self.fallback is not None:
            check_object("FusedAttention", "fallback", self.fallback, "BlockwiseAttention()")

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        mask, has_sinks = softmax.mask, softmax.sinks is not None
        compacts_padding = self._compacts_padding(softmax)
        needs_mask = not compacts_padding and (has_sinks or not mask.is_plain)
        reason = self._unsupported(q, v, softmax)
        if self.fallback is not None:
            is_masked = needs_mask or compacts_padding
            uses_fallback = is_masked and not self._supports_shape(q, k, mask if needs_mask else None)
            if reason is not None or uses_fallback:
                return self.fallback(q, k, v, softmax)
        if reason is not None:
            raise ValueError(f"FusedAttention {reason}. Use ReferenceAttention(), or set FusedAttention(fallback=…).")

        v_width = v.shape[3]
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        valid = mask.keys.valid if compacts_padding else None
        allowed = mask.allowed() if needs_mask else None
        if allowed is not None and softmax.sinks is not None:
            q, k, v, allowed = _add_sink_key(q, k, v, allowed, softmax.sinks.astype(jnp.float32) / softmax.scale)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - v_width)))  # keys and values must have the same width
        window = None if mask.window is None else (mask.window - 1, 0)

        def run(q: Array, k: Array, v: Array, allowed: Array | None, valid: Array | None) -> Array:
            q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
            options: dict[str, Any] = {"is_causal": True, "local_window_size": window}
            if allowed is not None:
                # the sink key follows all other keys, so causality would hide it
                options = {"mask": allowed[:, None], "is_causal": mask.causal and not has_sinks}
            options |= {"scale": softmax.scale, "implementation": self.implementation}
            if valid is None:
                outputs = jax.nn.dot_product_attention(q, k, v, **options)
            else:
                order, place = _real_tokens_first(valid)
                q, k, v = (_permute(a, order) for a in (q, k, v))
                outputs = _permute(jax.nn.dot_product_attention(q, k, v, **options), place)
            return jnp.swapaxes(outputs, 1, 2)

        mesh = self.mesh if self.implementation == "cudnn" else None
        return shard_map_heads(run, mesh, self.rules, q, k, v, allowed, valid)[..., :v_width]

    def _compacts_padding(self, softmax: MaskedSoftmax) -> bool:
        """Return whether padding is moved to the end of each row instead of masked.

        True for causal passes with padding, without segments and sinks, on cuDNN.
        """
        mask = softmax.mask
        is_padded = mask.causal and mask.keys.valid is not None and mask.query_segment is None
        return is_padded and softmax.sinks is None and self.implementation == "cudnn"

    def _supports_shape(self, q: Queries, k: Keys, mask: Mask | None) -> bool:
        """Return whether the kernel should compute a pass with padding, a mask or sinks.

        The sizes are static, there are at least `MIN_QUERIES` queries, and a mask, if passed, is not too large. With a
        mask, JAX's cuDNN backward pass requires even numbers of queries and keys.
        """
        queries, keys = q.shape[2], k.shape[2]
        if not is_static(len(q), queries, keys) or queries < MIN_QUERIES:
            return False
        if mask is None:
            return True
        shards = shard_count(self.mesh, batch_shard_axes(len(q), self.mesh))
        rows = math.ceil(len(jax.eval_shape(mask.allowed)) / shards)  # one row if all rows share the mask
        return queries % 2 == keys % 2 == 0 and rows * queries * keys <= MAX_MASK

    def _unsupported(self, q: Queries, v: Values, softmax: MaskedSoftmax) -> str | None:
        """Return why the kernel does not support these operands, or ``None`` if the operands are supported.

        The limits of cuDNN are defined in ``cudnn/fused_attention_stablehlo.py`` of JAX (0.10.2, 0.12.0).
        """
        width, sinks = q.shape[3], 0 if softmax.sinks is None else SINK_WIDTH
        if v.shape[3] > q.shape[3]:
            return f"does not support values wider than keys, got {v.shape[3]} > {q.shape[3]}"
        if softmax.softcap is not None:
            return "does not support a soft cap"
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"with cuDNN requires bfloat16 or float16, got {q.dtype}"
        if self.implementation == "cudnn" and (width % 8 or width + sinks > self.max_head_dim):
            got = f"{width} plus {sinks} for sinks" if sinks else str(width)
            return f"with cuDNN requires a head width that is a multiple of 8 up to {self.max_head_dim}, got {got}"
        return None


def _add_sink_key(
    q: Queries, k: Keys, v: Values, allowed: Array, sink_products: Float[Array, "N"]
) -> tuple[Queries, Keys, Values, Array]:
    """Append the sink key and a masked key.

    The product of the sink key and each query of head n is ``sink_products[n]``, the sink divided by the scale. Its
    value is zero. Two of the `SINK_WIDTH` extra components store the product as a sum of two 16-bit numbers, which
    limits rounding. The masked key keeps the number of keys even, as cuDNN's backward pass requires.
    """
    sink_products = sink_products[:, None, None]
    info = jnp.finfo(q.dtype)
    # XLA may remove a pair of casts, but keeps `reduce_precision`. The gradient passes through the second component.
    high = jax.lax.stop_gradient(jax.lax.reduce_precision(sink_products, info.nexp, info.nmant))
    terms = jnp.pad(jnp.concatenate([high, sink_products - high], axis=-1), ((0, 0), (0, 0), (0, SINK_WIDTH - 2)))
    terms = jnp.broadcast_to(terms, (*q.shape[:3], SINK_WIDTH))  # in float32, so that its gradient is a float32 sum
    q = jnp.concatenate([q, terms.astype(q.dtype)], axis=-1)
    k = jnp.pad(k, ((0, 0), (0, 0), (0, 2), (0, SINK_WIDTH))).at[:, :, -2, -SINK_WIDTH : 2 - SINK_WIDTH].set(1)
    allowed = jnp.pad(jnp.pad(allowed, ((0, 0), (0, 0), (0, 1)), constant_values=True), ((0, 0), (0, 0), (0, 1)))
    return q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 2), (0, 0))), allowed


def _real_tokens_first(valid: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Compute the permutation that moves the real tokens of each row to the front in order.

    Returns:
        order: Token of each place.
        place: Place of each token.
    """
    real, padding = (jnp.cumsum(a, axis=1, dtype=jnp.int32) for a in (valid, ~valid))
    place = jnp.where(valid, real, real[:, -1:] + padding) - 1
    tokens = jnp.broadcast_to(jnp.arange(valid.shape[1], dtype=jnp.int32), valid.shape)
    order = jax.vmap(lambda row, at: row.at[at].set(row, unique_indices=True))(tokens, place)
    return order, place


def _permute(x: Float[Array, "B T ..."], order: Int[Array, "B T"]) -> Float[Array, "B T ..."]:
    """Reorder the tokens of each row: place i of the result is token ``order[b, i]``."""
    options: dict[str, Any] = {"unique_indices": True, "mode": "promise_in_bounds"}
    return jax.vmap(lambda row, at: row.at[at].get(**options))(x, order)
