"""Normalised queries and keys (query-key normalisation; Henry et al. 2020, Dehghani et al. 2023)."""

from typing import Self, Unpack

from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.norm import RMSNorm


class AllHeadsNorm(RMSNorm):
    """An `RMSNorm` over all heads of a token together; scale ``[N * H]``.

    Right also where the heads are split over a mesh axis: the mean is one over the global array, so the partitioner
    sums the squares of all shards. A norm of each shard alone would depend on the mesh.
    """

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class QKNorm(nnx.Module):
    """The norms of queries ``[B T N H]`` and of keys ``[B T K H]``, which are applied before the rotation."""

    def __init__(self, q: RMSNorm, k: RMSNorm):
        self.q, self.k = q, k

    @classmethod
    def per_head(cls, head_dim: int, eps: float, *, norm: type[RMSNorm] = RMSNorm, **kw: Unpack[ParamOptions]) -> Self:
        """Every head on its own, with one scale ``[H]`` for all of them (Qwen3 technical report, 2025)."""
        return cls(*(norm(head_dim, eps, **kw) for _ in "qk"))

    @classmethod
    def whole(cls, heads: int, kv_heads: int, head_dim: int, eps: float, **kw: Unpack[ParamOptions]) -> Self:
        """Norm over all heads of a token, with scales ``[N * H]`` and ``[K * H]`` (OLMoE; Muennighoff et al. 2024)."""
        return cls(*(AllHeadsNorm(count * head_dim, eps, **kw) for count in (heads, kv_heads)))

    def __call__(
        self, q: Float[Array, "B asked N H"], k: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B asked N H"], Float[Array, "B T K H"]]:
        return self.q(q), self.k(k)
