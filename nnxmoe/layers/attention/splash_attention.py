"""Default attention function of each backend, and JAX's splash attention for TPUs."""

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention
from nnxmoe.layers.attention.flash_attention import FlashAttention
from nnxmoe.layers.attention.fused_attention import FusedAttention, ShardMapKernel, shard_map_heads
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values

LANES = 128  # number of lanes of a TPU register. Block sizes of the kernel are multiples of LANES.
BLOCK_SIZES = (512, 256, LANES)
REMOTE_CAPABILITY: tuple[int, int] = (8, 0)  # assumed compute capability of GPUs on other machines


def default_attention_fn(platform: str | None = None) -> AttentionFn:
    """Return the default attention function of a platform, with `BlockwiseAttention` as fallback.

    GPUs on other machines are assumed to be Ampere or later. On these GPUs, cuDNN is only used for head widths up to
    128, because JAX checks the local GPU for support of wider heads.

    Args:
        platform: "cpu", "gpu" or "tpu". Defaults to JAX's default backend.
    """
    local_backend, fallback = jax.default_backend(), BlockwiseAttention(long_context=FlashAttention(512, 1024))
    backend = platform or local_backend
    if backend == "tpu":
        return SplashAttention(fallback)
    if backend == "gpu":
        capability = REMOTE_CAPABILITY
        if local_backend == "gpu":
            capability = _cuda_capability(jax.local_devices()[0])
        if capability[0] < 8:
            return fallback
        return FusedAttention("cudnn", fallback, max_head_dim=256 if capability >= (9, 0) else 128)
    return BlockwiseAttention()


def _cuda_capability(device: Any) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, such as (9, 0). Return (0, 0) for all other devices."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclasses.dataclass(frozen=True)
class SplashAttention(ShardMapKernel):
    """Attention with ``jax.experimental.pallas.ops.tpu.splash_attention``, a FlashAttention that skips masked blocks.

    Supports causal passes whose number of tokens is a multiple of 128, with a window, segments, padding or a soft cap.

    Args:
        fallback: Attention function for unsupported passes: with a cache, with sinks, or with both window and padding.
        interpret: Whether to run in Pallas's interpreter, on any backend.

    Raises:
        ValueError: If ``fallback`` is not callable.
    """

    fallback: AttentionFn = BlockwiseAttention()
    interpret: bool = False

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        mask = softmax.mask
        has_padded_window = mask.window is not None and mask.keys.valid is not None
        if not mask.causal or q.shape[2] % LANES or softmax.sinks is not None or has_padded_window:
            return self.fallback(q, k, v, softmax)
        q = (q.astype(jnp.float32) * softmax.scale).astype(q.dtype)  # the kernel does not apply the scale
        segments = _segments(softmax, q.shape[0])

        def run(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
            return _splash_kernel(q.shape[1:], softmax, self.interpret)(q, k, v, segments)

        return shard_map_heads(run, self.mesh, self.rules, q, k.astype(q.dtype), v.astype(q.dtype), segments)


def _segments(softmax: MaskedSoftmax, batch: int) -> Int[Array, "B T"] | None:
    """Return the segments. Padding tokens are in a separate segment -1, so each query attends at least to itself."""
    segment, valid = softmax.mask.query_segment, softmax.mask.keys.valid
    if valid is None:
        return segment
    segment = jnp.zeros((batch, valid.shape[1]), jnp.int32) if segment is None else segment
    return jnp.where(valid, segment, -1)


def _splash_kernel(shape: tuple[int, ...], softmax: MaskedSoftmax, interpret: bool) -> Any:
    """Create the kernel for queries ``[N, T, H]``, and vectorize the kernel over the batch."""
    splash = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    heads, length, window = shape[0], shape[1], softmax.mask.window
    mask_shape = (length, length)
    head_mask = splash.CausalMask(mask_shape) if window is None else splash.LocalMask(mask_shape, (window - 1, 0), 0)
    block_size = next(size for size in BLOCK_SIZES if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([head_mask] * heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": block_size for name in names}),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softmax.softcap,
        interpret=interpret,
    )

    def attend_row(q: Array, k: Array, v: Array, segment: Array | None) -> Array:
        return kernel(q, k, v, None if segment is None else splash.SegmentIds(segment, segment))

    return jax.vmap(attend_row)
