"""Softmax attention over keys and values that are already projected and rotated.

``Reference`` is the oracle of every other implementation; which one runs is the strategy's choice.
"""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.layers.cache import Slots
from nnxmoe.layers.linear import einsum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Who may see whom, as indices: a key is seen if it is real, not later, in the window and in the same segment.

    ``window`` W lets a query see W keys, its own included. Kernels may use the structure; ``allowed`` spells it out.
    """

    query_index: Int[Array, "T"]
    query_segment: Int[Array, "B T"]
    keys: Slots
    window: int | None = dataclasses.field(metadata={"static": True})

    def allowed(self) -> Bool[Array, "B T S"]:
        """True where query t of a row may attend to key s."""
        query, key = self.query_index[:, None], self.keys.index[None, :]
        near = (key >= 0) & (key <= query)
        if self.window is not None:
            near &= key > query - self.window
        same = self.query_segment[:, :, None] == self.keys.segment[:, None, :]
        return near[None] & same & self.keys.valid[:, None, :]


class Attend(Protocol):
    """``(q, k, v, mask, scale) -> o``; N is a multiple of K: query head n uses key head ``n // (N / K)``."""

    def __call__(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S Hv"],
        mask: Mask,
        scale: float,
    ) -> Float[Array, "B N T Hv"]: ...


@dataclasses.dataclass(frozen=True)
class Reference:
    """Scores, softmax in float32, weighted sum; keys and values are never repeated for their groups of queries.

    A query that may see nothing (padding) gets the mean of all values, which nobody should read, instead of NaN.
    """

    def __call__(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S Hv"],
        mask: Mask,
        scale: float,
    ) -> Float[Array, "B N T Hv"]:
        batch, heads, count, _ = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(batch, kv_heads, heads // kv_heads * count, q.shape[3])
        scores = einsum("BKQH,BKSH->BKQS", grouped, k) * scale
        scores = scores.reshape(batch, kv_heads, heads // kv_heads, count, k.shape[2])
        scores = jnp.where(mask.allowed()[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        weights = weights.reshape(batch, kv_heads, -1, k.shape[2])
        out = einsum("BKQS,BKSH->BKQH", weights, v).astype(q.dtype)
        return out.reshape(batch, heads, count, v.shape[3])


@dataclasses.dataclass(frozen=True)
class Fused:
    """``jax.nn.dot_product_attention``: cuDNN or XLA's own fusion on accelerators; slower than Reference on CPU."""

    implementation: Literal["xla", "cudnn"] | None = None

    def __call__(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S Hv"],
        mask: Mask,
        scale: float,
    ) -> Float[Array, "B N T Hv"]:
        width = v.shape[3]
        if width > k.shape[3]:
            raise ValueError(
                f"Fused attention needs values no wider than keys, got {width} > {k.shape[3]}: use Reference"
            )
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3] - width)))  # the library wants one head width
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k.astype(q.dtype), v.astype(q.dtype)))
        allowed = mask.allowed()[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=allowed, scale=scale, implementation=self.implementation)
        return jnp.swapaxes(out, 1, 2)[..., :width]
