"""Fused attention kernels: which one a backend has, and JAX's splash attention for TPUs."""

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.validate import check_object
from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.flash_attention import FlashAttention
from nnxmoe.layers.attention.fused_attention import FusedAttention, ShardMapKernel, shard_map_heads
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax

LANES = 128  # the kernel's blocks are multiples of a TPU register's lanes
LARGEST_BLOCK = 512
ELSEWHERE: tuple[int, int] = (8, 0)  # compute capability that is assumed of GPUs of another machine


def default_attention_fn(platform: str | None = None) -> AttentionFn:
    """The fused attention of a platform, by default JAX's; `BlockwiseAttention` computes the rest, or all if there is
    none.

    GPUs of another machine are assumed to be of the Ampere generation or later. cuDNN gets heads of up to 128 there,
    because JAX asks this machine's GPU whether wider ones are supported.
    """
    here, fallback = jax.default_backend(), BlockwiseAttention(long_context=FlashAttention(512, 1024))
    backend = platform or here
    if backend == "tpu":
        return SplashAttention(fallback)
    if backend == "gpu":
        capability = _cuda_capability(jax.local_devices()[0]) if here == "gpu" else ELSEWHERE
        if capability[0] < 8:
            return fallback
        return FusedAttention("cudnn", fallback, max_head_dim=256 if capability >= (9, 0) else 128)
    return BlockwiseAttention()


def _cuda_capability(device: Any) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU, such as (9, 0); (0, 0) for other devices."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclasses.dataclass(frozen=True)
class SplashAttention(ShardMapKernel):
    """``jax.experimental.pallas.ops.tpu.splash_attention``, FlashAttention for TPUs that skips masked blocks.

    It computes causal passes of multiples of 128 tokens, with window, segments, padding and soft cap; ``fallback``
    computes the rest: steps and chunks with a cache, sinks, and a window with padding. ``interpret``: run in Pallas's
    interpreter, on any backend. Raises ValueError if ``fallback`` is not an object.
    """

    fallback: AttentionFn = BlockwiseAttention()
    interpret: bool = False

    def __post_init__(self) -> None:
        check_object("SplashAttention", "fallback", self.fallback, "BlockwiseAttention()")

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        mask = scores.mask
        padded_window = mask.window is not None and mask.keys.valid is not None
        if not mask.causal or q.shape[2] % LANES or scores.sinks is not None or padded_window:
            return self.fallback(q, k, v, scores)
        q = (q.astype(jnp.float32) * scores.scale).astype(q.dtype)  # the kernel does not scale
        given = q, k.astype(q.dtype), v.astype(q.dtype), _segments(scores, q.shape[0])

        def run(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
            return _splash(q.shape[1:], scores, self.interpret)(q, k, v, segments)

        return shard_map_heads(run, self.mesh, self.rules, *given)


def _segments(scores: MaskedSoftmax, batch: int) -> Int[Array, "B T"] | None:
    """Segments in which padding has one of its own, so that each query attends to itself at least."""
    segment, valid = scores.mask.query_segment, scores.mask.keys.valid
    if valid is None:
        return segment
    segment = jnp.zeros((batch, valid.shape[1]), jnp.int32) if segment is None else segment
    return jnp.where(valid, segment, -1)


def _splash(shape: tuple[int, ...], scores: MaskedSoftmax, interpret: bool) -> Any:
    """The kernel for queries ``[N, T, H]``, over a batch ``[B, N, T, H]`` and its segments."""
    library = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    heads, length, window = shape[0], shape[1], scores.mask.window
    square = (length, length)
    one = library.CausalMask(square) if window is None else library.LocalMask(square, (window - 1, 0), 0)
    size = next(size for size in (LARGEST_BLOCK, 256, LANES) if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = library.make_splash_mha(
        library.MultiHeadMask([one] * heads),
        block_sizes=library.BlockSizes(**{f"block_{name}": size for name in names}),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scores.softcap,
        interpret=interpret,
    )

    def of_row(q: Array, k: Array, v: Array, segment: Array | None) -> Array:
        return kernel(q, k, v, None if segment is None else library.SegmentIds(segment, segment))

    return jax.vmap(of_row)
