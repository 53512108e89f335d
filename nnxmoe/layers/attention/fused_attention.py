"""Attention with ``jax.nn.dot_product_attention``, and ``shard_map`` for kernels that XLA cannot partition."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.sharding import batch_shard_axes, shard_map
from nnxmoe.sharding_rules import RULES, Rules, rule_axes, shard_count


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

    Causality and the window are passed as arguments. For caches, padding and segments, a boolean mask ``[B, 1, T, S]``
    is passed. Sinks, a soft cap, and values wider than keys are not supported. cuDNN supports only bfloat16 and
    float16, and only head widths that are multiples of 8 up to ``max_head_dim``.

    Args:
        implementation: Argument of ``jax.nn.dot_product_attention``.
        fallback: Attention function for unsupported operands and for passes that need a boolean mask. If ``None``,
            unsupported operands raise ValueError.
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
        if self.fallback is not None and (reason is not None or not mask.is_plain):
            return self.fallback(q, k, v, softmax)
        if reason is not None:
            raise ValueError(f"FusedAttention {reason}. Use ReferenceAttention(), or set FusedAttention(fallback=…).")
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))  # keys and values must have the same width
        window = None if mask.window is None else (mask.window - 1, 0)
        allowed = None if mask.is_plain else mask.allowed()

        def run(q: Array, k: Array, v: Array, allowed: Array | None) -> Array:
            q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
            options: dict[str, Any] = {"is_causal": True, "local_window_size": window}
            if allowed is not None:
                options = {"mask": allowed[:, None]}
            options |= {"scale": softmax.scale, "implementation": self.implementation}
            return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, **options), 1, 2)

        mesh = self.mesh if self.implementation == "cudnn" else None
        return shard_map_heads(run, mesh, self.rules, q, k.astype(q.dtype), v.astype(q.dtype), allowed)[..., :width]

    def _unsupported(self, q: Queries, v: Values, softmax: MaskedSoftmax) -> str | None:
        """Return why the kernel does not support these operands, or ``None`` if the operands are supported.

        The limits of cuDNN are defined in ``cudnn/fused_attention_stablehlo.py`` of JAX (0.10.2, 0.12.0).
        """
        width = q.shape[3]
        if v.shape[3] > width:
            return f"does not support values wider than keys, got {v.shape[3]} > {width}"
        if not softmax.is_plain:
            return "supports neither sinks nor a soft cap"
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"with cuDNN requires bfloat16 or float16, got {q.dtype}"
        if self.implementation == "cudnn" and (width % 8 or width > self.max_head_dim):
            return f"with cuDNN requires a head width that is a multiple of 8 up to {self.max_head_dim}, got {width}"
        return None
