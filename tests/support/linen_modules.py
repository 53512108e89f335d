"""Handwritten Linen decoders with MaxText's names and logical axes, the reference for ``nnxmoe.linen``.

Parameters, boxes, names and layer structure are plain Linen. Rotation, attention weights, routing and dispatch are the
package's functions, which other tests compare with their own oracles.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import nnxmoe
from nnxmoe import linen
from nnxmoe.config.rope_parameters import Llama3Rope
from nnxmoe.layers import mlp as ours
from nnxmoe.layers import norm as norms
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.attention.mla import LATENT_NORM_EPS, MLA, MLADims, MLAInputs
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.kernel import as_kernel
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.model.layer import Layer
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.grouped_matmul import batched_matmul
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SigmoidGroupTopK, SoftmaxTopK

Axes = tuple[str | None, ...]
ATTEND, DISPATCH, LATENT = nnxmoe.ReferenceAttention(), nnxmoe.Dense(), nnxmoe.Strategy().mla
STRATEGY = nnxmoe.Strategy(dispatch=DISPATCH, attention_fn=ATTEND, mla=LATENT)  # Dense: quick to compile
MATMUL, F32 = nnxmoe.Strategy().matmul, jnp.dtype(jnp.float32)


def context_of(config: Any, length: int, batch: int = 2) -> Context:
    """Context of every layer for rows without padding and with one segment."""
    index, valid = jnp.arange(length, dtype=jnp.int32), jnp.ones((batch, length), bool)
    segment = jnp.zeros((batch, length), jnp.int32)
    context = Context.from_lengths(config.rope, batch, length)
    return dataclasses.replace(context, index=index, valid=valid, segment=segment)


def mask_of(context: Context, window: int | None) -> Mask:
    """Mask that the package's attention derives from the context."""
    return context.append_to_cache(None, None, window)[2]


def drawn(std: float, axes: Axes) -> Any:
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", ones, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return unit.astype(x.dtype) * scale


class Dense(nn.Module):
    """``x[… *ins] -> [… *outs]``."""

    ins: int
    outs: tuple[int, ...]
    axes: Axes
    bias: bool = False
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        lead, ins = x.shape[: x.ndim - self.ins], x.shape[x.ndim - self.ins :]
        width = math.prod(ins)
        kernel = self.param("kernel", drawn(self.gain * width**-0.5, self.axes), (*ins, *self.outs), jnp.float32)
        y = jnp.matmul(x.reshape(-1, width), kernel.reshape(width, -1), preferred_element_type=jnp.float32)
        y = y.reshape(*lead, -1)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.ins :])
            y = y + self.param("bias", zeros, self.outs, jnp.float32).reshape(-1)
        return y.reshape(*lead, *self.outs)


class Attention(nn.Module):
    """Grouped-query attention; query kernels include 1 / sqrt(H)."""

    config: Any
    biased: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        c, width, biased = self.config, self.config.head_width, self.biased
        rotate = rotate_pairs if isinstance(c.rope, Llama3Rope) else rotate_halves
        keys = ("embed", "kv_heads", "kv_head_dim")
        into = Dense(1, (c.num_attention_heads, width), ("embed", "q_heads", "kv"), biased, width**-0.5, name="query")
        q = rotate(into(x), context.rotations[c.rope])
        k = rotate(Dense(1, (c.kv_heads, width), keys, biased, name="key")(x), context.rotations[c.rope])
        v = Dense(1, (c.kv_heads, width), keys, biased, name="value")(x)
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
        y = jnp.swapaxes(ATTEND(q, k, v, MaskedSoftmax(mask_of(context, c.window), 1.0)), 1, 2)
        return Dense(2, (x.shape[-1],), ("heads", "kv", "embed"), biased, name="out")(y)


class LatentAttention(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        c, rope = self.config, self.config.qk_rope_head_dim
        heads, biased = (c.num_attention_heads, c.qk_nope_head_dim + rope), c.attention_bias
        rotate = rotate_pairs if c.rope_interleave else rotate_halves
        q = Dense(1, (c.q_lora_rank,), ("embed", "q_lora_up_proj"), biased, name="wq_a")(x)
        q = RMSNorm(LATENT_NORM_EPS, name="q_norm")(q)
        q = Dense(1, heads, ("q_lora", "q_heads", "kv"), name="wq_b")(q)
        kv = Dense(1, (c.kv_lora_rank + rope,), ("embed", "kv_lora_up_proj"), biased, name="wkv_a")(x)
        q_nope, q_rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        latent, k_rope = jnp.split(kv, [c.kv_lora_rank], axis=-1)
        k_rope = rotate(k_rope[:, :, None, :], context.rotations[c.rope])[:, :, 0, :]
        seen = jnp.concatenate([RMSNorm(LATENT_NORM_EPS, name="kv_norm")(latent), k_rope], axis=-1)
        shape = (c.kv_lora_rank, c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim)
        wkv_b = Kernel(shape, ("kv_lora", "kv_heads", "kv_head_dim"), name="wkv_b")()
        kv_b = as_kernel(wkv_b.reshape(c.kv_lora_rank, -1))
        latents = MLAInputs(q_nope, rotate(q_rope, context.rotations[c.rope]), seen, kv_b)
        y = LATENT(latents, MaskedSoftmax(mask_of(context, None), c.softmax_scale), ATTEND)
        return Dense(2, (x.shape[-1],), ("heads", "kv", "embed"), biased, name="out")(y)


class Kernel(nn.Module):
    shape: tuple[int, ...]
    axes: Axes

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", drawn(self.shape[0] ** -0.5, self.axes), self.shape, jnp.float32)


class MLP(nn.Module):
    width: int
    biased: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = Dense(1, (self.width,), ("embed", "mlp"), self.biased, name="wi_0")(x)
        up = Dense(1, (self.width,), ("embed", "mlp"), self.biased, name="wi_1")(x)

        def project(_: nn.Module, gate: Any, up: Any) -> Any:
            return Dense(1, (x.shape[-1],), ("mlp", "embed"), self.biased, name="wo")(jax.nn.silu(gate) * up)

        return nn.remat(project)(self, gate, up)  # like nnxmoe's MLP, which saves only gate and up


@dataclasses.dataclass(frozen=True)
class Rows:
    """Experts with the interface that a dispatch calls."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    rules = nnxmoe.RULES

    @property
    def count(self) -> int:
        return self.gate.shape[0]

    def __call__(self, rows: jax.Array, sizes: jax.Array | None) -> jax.Array:
        def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
            return batched_matmul(rows, kernel) if sizes is None else MATMUL(rows, kernel, sizes)

        return product(jax.nn.silu(product(rows, self.gate)) * product(rows, self.up), self.down)


class Gate(nn.Module):
    count: int
    axes: Axes
    biased: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", drawn(x.shape[-1] ** -0.5, self.axes), (x.shape[-1], self.count), jnp.float32)
        rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        logits = (rows @ kernel).reshape(*x.shape[:-1], self.count)
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        return logits, self.param("bias", zeros, (self.count,), jnp.float32) if self.biased else None


class MoeBlock(nn.Module):
    width: int
    count: int
    select: Any
    gate_axes: Axes = ("embed", None)
    biased: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None) -> jax.Array:
        logits, bias = Gate(self.count, self.gate_axes, self.biased, name="gate")(x)
        routing = dataclasses.replace(self.select(logits, bias), valid=valid)
        dim, into, out = x.shape[-1], ("exp", "embed_moe", "mlp_moe"), ("exp", "mlp_moe", "embed_moe")
        gate, up = (
            self.param(name, drawn(dim**-0.5, into), (self.count, dim, self.width), jnp.float32)
            for name in ("wi_0", "wi_1")
        )
        down = self.param("wo", drawn(self.width**-0.5, out), (self.count, self.width, dim), jnp.float32)
        return DISPATCH(x, routing, Rows(gate, up, down))[0]


class DeepSeekMoeBlock(nn.Module):
    """Routed and shared experts."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None) -> jax.Array:
        c = self.config
        select = SigmoidGroupTopK(
            c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor
        )
        width = c.moe_intermediate_size
        routed = MoeBlock(width, c.n_routed_experts, select, ("embed_moe", None), True, name="MoeBlock_0")
        return routed(x, valid) + MLP(width * c.n_shared_experts, name="shared_experts")(x)


class DecoderLayer(nn.Module):
    """``x[B T D] -> x``, with a MoE block or an MLP."""

    config: Any
    moe: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        c = self.config
        deepseek = isinstance(c, nnxmoe.models.DeepSeekV3Config)
        biased = getattr(c, "attention_bias", False)
        normed = RMSNorm(c.rms_norm_eps, name="pre_self_attention_layer_norm")(x)
        attention = LatentAttention(c, name="self_attention") if deepseek else None
        x = x + (attention or Attention(c, biased, name="self_attention"))(normed, context)
        normed = RMSNorm(c.rms_norm_eps, name="post_self_attention_layer_norm")(x)
        if not self.moe:
            return x + MLP(c.intermediate_size, getattr(c, "mlp_bias", False), name="mlp")(normed)
        if deepseek:
            return x + DeepSeekMoeBlock(c, name="DeepSeekMoeBlock_0")(normed, context.valid)
        block = MoeBlock(
            c.intermediate_size, c.num_local_experts, SoftmaxTopK(c.num_experts_per_tok), name="MoeBlock_0"
        )
        return x + block(normed, context.valid)


class ScanLayer(DecoderLayer):
    """Decoder layer with the signature that ``nn.scan`` requires."""

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> Any:
        return super().__call__(x, context), None


def scanned(kind: Any, count: int, axis: str = "layers") -> Any:
    """``nn.scan`` of a Linen class over ``count`` layers, with parameters stacked on axis 1."""
    return nn.scan(
        kind,
        variable_axes={"params": 1},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast,),
        length=count,
        metadata_params={nn.PARTITION_NAME: axis},
    )


class Decoder(nn.Module):
    config: Any
    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        c, total = self.config, self.config.num_hidden_layers
        deepseek = isinstance(c, nnxmoe.models.DeepSeekV3Config)
        dense = min(c.first_k_dense_replace, total) if deepseek else 0
        sparse = isinstance(c, nnxmoe.models.DeepSeekV3Config | nnxmoe.models.MixtralConfig)
        runs = [("dense_layers", dense, False), ("moe_layers" if deepseek else "layers", total - dense, sparse)]
        for name, count, moe in runs:
            if self.scan and count:
                x, _ = scanned(ScanLayer, count, name)(c, moe, name=name)(x, context)
            else:
                for i in range(count):
                    x = DecoderLayer(c, moe, name=f"{name}_{i}")(x, context)
        x = RMSNorm(c.rms_norm_eps, name="decoder_norm")(x)
        return (
            x if c.tie_word_embeddings else Dense(1, (c.vocab_size,), ("embed_vocab", "vocab"), name="logits_dense")(x)
        )


class Embedding(nn.Module):
    vocab: int
    dim: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param(
            "embedding", drawn(self.dim**-0.5, ("vocab", "embed_vocab")), (self.vocab, self.dim), jnp.float32
        )


class Transformer(nn.Module):
    """``tokens[B T] -> logits[B T V]``."""

    config: Any
    scan: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        table = Embedding(c.vocab_size, c.hidden_size, name="token_embedder")()
        context = context_of(c, tokens.shape[1], tokens.shape[0])
        x = Decoder(c, self.scan, name="decoder")(jnp.take(table, tokens, axis=0), context)
        if not c.tie_word_embeddings:
            return x
        logits = jnp.matmul(x.reshape(-1, c.hidden_size), table.T, preferred_element_type=jnp.float32)
        return logits.reshape(*tokens.shape, c.vocab_size)


# The same layers wrapped from the package


def wrapped_attention(config: Any, **options: Any) -> linen.Wrapped:
    """The package's attention, wrapped, with queries as MaxText stores them."""
    c, kw = config, {"rotary": config.rope, "attention_fn": ATTEND, "dtype": F32, **options}
    if not isinstance(c, nnxmoe.models.DeepSeekV3Config):
        sizes, biased = (c.num_attention_heads, c.kv_heads, c.head_width), getattr(c, "attention_bias", False)
        rotate = rotate_pairs if isinstance(c.rope, Llama3Rope) else rotate_halves
        heads = AttentionDims(c.hidden_size, *sizes, bias=biased, scale=1.0)
        return linen.wrap(GQA, heads, window=c.window, rotate=rotate, **kw)
    return linen.wrap(
        MLA,
        MLADims(
            c.hidden_size,
            c.num_attention_heads,
            q_rank=c.q_lora_rank,
            kv_rank=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            rope=c.qk_rope_head_dim,
            v_dim=c.v_head_dim,
        ),
        scale=c.softmax_scale,
        bias=c.attention_bias,
        rotate=rotate_pairs if c.rope_interleave else rotate_halves,
        mla=LATENT,
        **kw,
    )


def wrapped_moe(config: Any, **options: Any) -> linen.Wrapped:
    """The package's MoE block, wrapped."""
    c, shared = config, None
    deepseek = isinstance(c, nnxmoe.models.DeepSeekV3Config)
    select, width = SoftmaxTopK(c.experts_per_token), c.intermediate_size
    if deepseek:
        width = c.moe_intermediate_size
        select = SigmoidGroupTopK(
            c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor
        )
        shared = linen.wrap(ours.MLP, c.hidden_size, width * c.n_shared_experts, bias=False, dtype=F32)
    router = linen.wrap(Router, c.hidden_size, c.experts, select, bias=deepseek, dtype=F32)
    experts = linen.wrap(Experts, c.hidden_size, width, c.experts, matmul=MATMUL, dtype=F32)
    return linen.wrap(MoE, router, experts, DISPATCH, shared, **options)


def wrapped_layer(config: Any, moe: bool, **options: Any) -> linen.Wrapped:
    """The package's decoder layer, wrapped."""
    c = config
    norm = linen.wrap(norms.RMSNorm, c.hidden_size, c.rms_norm_eps, dtype=F32)
    biased = getattr(c, "mlp_bias", False)
    if moe:
        return linen.wrap(Layer, norm, wrapped_attention(c), norm, wrapped_moe(c), **options)
    mlp = linen.wrap(ours.MLP, c.hidden_size, c.intermediate_size, bias=biased, dtype=F32)
    return linen.wrap(Layer, norm, wrapped_attention(c), norm, mlp, **options)


class Layers(nn.Module):
    """Layers in a list or scanned; ``make(name)`` makes any of the layers above."""

    make: Callable[[str], nn.Module]
    count: int
    scan: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        if self.scan:
            return scanned(OneLayer, self.count)(self.make, name="layers")(x, context)[0]
        for layer in [self.make(f"layers_{i}") for i in range(self.count)]:
            x = output(layer, x, context)
        return x


class OneLayer(nn.Module):
    """Layer with the signature that ``nn.scan`` requires."""

    make: Callable[[str], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, None]:
        return output(self.make("layer"), x, context), None


def output(layer: nn.Module, x: jax.Array, context: Context) -> jax.Array:
    """Output of a layer; wrapped layers also return their cache and dispatch info, which are dropped."""
    return layer(x, context) if isinstance(layer, DecoderLayer) else layer(x, context, None)[0]
