"""Attention by ``jax.nn.dot_product_attention``, and kernels that XLA cannot partition on each device's heads."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.sharding import batch_shard_axes, shard_map
from nnxmoe.sharding_rules import RULES, Rules, rule_axes, shard_count


def shard_map_heads(
    run: Callable[..., Float[Array, "B N T Hv"]],
    mesh: Mesh | None,
    rules: Rules,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    *of_rows: Any,
) -> Float[Array, "B N T Hv"]:
    """``run(q, k, v, *of_rows)`` on each device's rows and heads, for kernels that XLA cannot partition everywhere.

    ``of_rows``: arrays ``[#B, …]`` or None.
    """
    if mesh is None or mesh.size == 1:
        return run(q, k, v, *of_rows)
    batch, heads = batch_and_head_axes(len(q), k.shape[1], "kv_heads", mesh, rules)
    spec = PartitionSpec(batch, heads)
    specs = spec, spec, spec, *(PartitionSpec(batch if a is not None and len(a) == len(q) else None) for a in of_rows)
    return shard_map(run, mesh, specs, spec)(q, k, v, *of_rows)


def batch_and_head_axes(rows: int, heads: int, axis: str, mesh: Mesh, rules: Rules) -> tuple[Any, Any]:
    """The mesh axes that split ``rows`` rows, and those that split ``heads`` heads of the logical axis ``axis``; None
    if the number is not a multiple of their size."""
    over = rule_axes(axis, mesh, rules)
    return batch_shard_axes(rows, mesh) or None, None if heads % shard_count(mesh, over) else over or None


@dataclasses.dataclass(frozen=True)
class ShardMapKernel:
    """A kernel that XLA cannot partition: each device of ``mesh`` computes its rows and heads. Set by ``Strategy``."""

    mesh: Mesh | None = dataclasses.field(default=None, repr=False, kw_only=True)
    rules: Rules = dataclasses.field(default=RULES, repr=False, kw_only=True)

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Self:
        """The same for a model on this mesh."""
        return dataclasses.replace(self, mesh=mesh, rules=rules)


@dataclasses.dataclass(frozen=True)
class FusedAttention(ShardMapKernel):
    """``jax.nn.dot_product_attention``: cuDNN or XLA's own fusion on accelerators; slower than `ReferenceAttention` on
    CPU.

    Causal order and a window are passed as such; caches, padding and segments as a boolean mask ``[B, 1, T, S]``.
    ``fallback`` computes what the kernel cannot: sinks, a soft cap, values wider than keys, and for cuDNN dtypes other
    than bfloat16 and float16 and heads wider than ``max_head_dim`` (128; 256 from Hopper on) or of no multiple of 8;
    also all masks that would be an array. Without it, all of these but the masks are a ValueError.
    """

    implementation: Literal["xla", "cudnn"] | None = None
    fallback: AttentionFn | None = None
    max_head_dim: int = 256

    def __post_init__(self) -> None:
        set_positive(self, "max_head_dim")
        if self.fallback is not None:
            check_object("FusedAttention", "fallback", self.fallback, "BlockwiseAttention()")

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        width, mask, refusal = v.shape[3], scores.mask, self._refusal(q, v, scores)
        if self.fallback is not None and (refusal is not None or not mask.plain):
            return self.fallback(q, k, v, scores)
        if refusal is not None:
            raise ValueError(f"Fused attention {refusal}: use ReferenceAttention(), or FusedAttention(fallback=…)")
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))  # the library wants one head width
        near = None if mask.window is None else (mask.window - 1, 0)
        allowed = None if mask.plain else mask.allowed()

        def run(q: Array, k: Array, v: Array, allowed: Array | None) -> Array:
            q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
            seen: dict[str, Any] = {"is_causal": True, "local_window_size": near}
            if allowed is not None:
                seen = {"mask": allowed[:, None]}
            out = jax.nn.dot_product_attention(q, k, v, scale=scores.scale, implementation=self.implementation, **seen)
            return jnp.swapaxes(out, 1, 2)

        mesh = self.mesh if self.implementation == "cudnn" else None
        return shard_map_heads(run, mesh, self.rules, q, k.astype(q.dtype), v.astype(q.dtype), allowed)[..., :width]

    def _refusal(self, q: Float[Array, "B N T H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax) -> str | None:
        """The reason why the kernel does not support these operands, None if it does; the limits of cuDNN are those of
        JAX's ``cudnn/fused_attention_stablehlo.py`` (0.10.2, 0.12.0)."""
        width = q.shape[3]
        if v.shape[3] > width:
            return f"needs values no wider than keys, got {v.shape[3]} > {width}"
        if not scores.plain:
            return "has neither sinks nor a soft cap"
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            return f"of cuDNN needs bfloat16 or float16, got {q.dtype}"
        if self.implementation == "cudnn" and (width % 8 or width > self.max_head_dim):
            return f"of cuDNN needs a head width of a multiple of 8 up to {self.max_head_dim}, got {width}"
        return None
