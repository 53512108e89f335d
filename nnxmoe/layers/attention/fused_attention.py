"""Attention by ``jax.nn.dot_product_attention``, and kernels that XLA cannot partition, on each device's heads."""

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
    """A kernel that XLA cannot partition: each device of ``mesh`` computes its rows and heads. Set by ``Strategy``."""

    mesh: Mesh | None = dataclasses.field(default=None, repr=False, kw_only=True)
    rules: Rules = dataclasses.field(default=RULES, repr=False, kw_only=True)

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        """Return the kernel for a model on this mesh."""
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
    """Call ``run(q, k, v, *row_arrays)`` per device, on its rows and heads; ``row_arrays``: ``[#B, …]`` or None."""
    if mesh is None or mesh.size == 1:
        return run(q, k, v, *row_arrays)
    batch, heads = batch_and_head_axes(len(q), k.shape[1], "kv_heads", mesh, rules)
    spec = PartitionSpec(batch, heads)
    row_specs = (PartitionSpec(batch if a is not None and len(a) == len(q) else None) for a in row_arrays)
    return shard_map(run, mesh, (spec, spec, spec, *row_specs), spec)(q, k, v, *row_arrays)


def batch_and_head_axes(rows: int, heads: int, axis: str, mesh: Mesh, rules: Rules) -> tuple[Any, Any]:
    """Return the mesh axes that shard ``rows`` rows, and those that shard ``heads`` heads of the logical axis ``axis``.

    None for a number that is not a multiple of the size of its axes.
    """
    head_axes = rule_axes(axis, mesh, rules)
    return batch_shard_axes(rows, mesh) or None, None if heads % shard_count(mesh, head_axes) else head_axes or None


@dataclasses.dataclass(frozen=True)
class FusedAttention(ShardMapKernel):
    """``jax.nn.dot_product_attention``: cuDNN or XLA's own fusion on accelerators; slow on CPU.

    Causal order and a window are passed as options. Caches, padding and segments are passed as a boolean mask
    ``[B, 1, T, S]``. Unsupported operands are sinks, a soft cap, values wider than keys, and for cuDNN dtypes other
    than bfloat16 and float16 and heads wider than ``max_head_dim`` or not a multiple of 8.

    Args:
        implementation: argument of ``jax.nn.dot_product_attention``.
        fallback: computes unsupported operands, and masks that would be passed as an array. Without it, unsupported
            operands raise ValueError.
        max_head_dim: 128; 256 from Hopper on.
    """

    implementation: Literal["xla", "cudnn"] | None = None
    fallback: AttentionFn | None = None
    max_head_dim: int = 256

    def __post_init__(self) -> None:
        set_positive(self, "max_head_dim")
        if self.fallback is not None:
            check_object("FusedAttention", "fallback", self.fallback, "BlockwiseAttention()")

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        width, mask, unsupported = v.shape[3], softmax.mask, self._unsupported(q, v, softmax)
        if self.fallback is not None and (unsupported is not None or not mask.is_plain):
            return self.fallback(q, k, v, softmax)
        if unsupported is not None:
            raise ValueError(f"FusedAttention {unsupported}: use ReferenceAttention(), or FusedAttention(fallback=…)")
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))  # the library wants one head width
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
        """Return why the kernel does not support these operands, or None.

        The limits of cuDNN are those of JAX's ``cudnn/fused_attention_stablehlo.py`` (0.10.2, 0.12.0).
        """
        width = q.shape[3]
        if v.shape[3] > width:
            return f"needs values no wider than keys, got {v.shape[3]} > {width}"
        if not softmax.is_plain:
            return "supports neither sinks nor a soft cap"
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"by cuDNN needs bfloat16 or float16, got {q.dtype}"
        if self.implementation == "cudnn" and (width % 8 or width > self.max_head_dim):
            return f"by cuDNN needs a head width of a multiple of 8 up to {self.max_head_dim}, got {width}"
        return None
