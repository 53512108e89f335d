"""The parity kit: equal modules pass, and every kind of difference is found and named where it begins."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import nnxmoe
from nnxmoe import testing
from nnxmoe.layers.gqa import GQA
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.models import Llama, LlamaConfig
from tests.helpers import randomise

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD = 3, 12, 4, 2, 6
KW: dict[str, Any] = {"dtype": jnp.dtype("float32"), "rngs": None}


# A Llama in Linen, with MaxText's names; ``faults``: layer -> what is wrong in it


class Norm(nn.Module):
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.eps) * scale


class Dense(nn.Module):
    outs: tuple[int, ...]
    ins: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        boxed = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("any",) * (self.ins + len(self.outs)))
        kernel = self.param("kernel", boxed, (*x.shape[x.ndim - self.ins :], *self.outs))
        return jnp.tensordot(x, kernel, self.ins)


class Attention(nn.Module):
    rotate: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        q = Dense((HEADS, HEAD), name="query")(x)
        k = Dense((KV_HEADS, HEAD), name="key")(x)
        v = Dense((KV_HEADS, HEAD), name="value")(x)
        if self.rotate:
            q, k = rotated(q), rotated(k)
        k, v = (jnp.repeat(a, HEADS // KV_HEADS, axis=2) for a in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)  # the queries carry the scale
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return Dense((WIDTH,), ins=2, name="out")(y)


def rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1000.0 ** (-jnp.arange(half) / half)
    cos, sin, a, b = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None], x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Mlp(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gate, up = Dense((20,), name="wi_0")(x), Dense((20,), name="wi_1")(x)
        if self.fault == "swapped":
            gate, up = up, gate
        if self.fault == "gradient":
            up = jax.lax.stop_gradient(up)
        gate = gate if self.fault == "no activation" else jax.nn.silu(gate)
        y = Dense((WIDTH,), name="wo")(gate * up)
        return jnp.where(jnp.arange(WIDTH) == 7, jnp.nan, y) if self.fault == "NaN" else y


class Layer(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        eps = 1e-2 if self.fault == "eps" else 1e-5
        x = x + Attention(self.fault != "no rope", name="self_attention")(Norm(name="pre_self_attention_layer_norm")(x))
        return x + Mlp(self.fault, name="mlp")(Norm(eps, name="post_self_attention_layer_norm")(x)), None


class Decoder(nn.Module):
    faults: Any
    scan: bool
    remat: bool
    layers: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            spec: dict[str, Any] = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
            layer = nn.scan(layer, **spec, length=self.layers, metadata_params={nn.PARTITION_NAME: "layers"})
            x, _ = layer(name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = layer(self.faults.get(i, ""), name=f"layers_{i}")(x, None)
        x = Norm(name="decoder_norm")(x)
        return Dense((29,), name="logits_dense")(x * 1.5 if "head" in self.faults else x)


class LinenLlama(nn.Module):
    faults: Any = nn.FrozenDict()
    scan: bool = False
    remat: bool = False
    layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(29, WIDTH, name="token_embedder")(tokens)
        return Decoder(self.faults, self.scan, self.remat, self.layers, name="decoder")(x)


def llama(layers: int = LAYERS, **strategy: Any) -> Llama:
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        rope_theta=1000.0,
        rms_norm_eps=1e-5,
    )
    return randomise(Llama(config, nnxmoe.Strategy(**strategy), rngs=nnx.Rngs(0)))


TOKENS = np.random.default_rng(0).integers(0, 29, (2, 7)).astype(np.int32)


def compare(model: Llama, linen: nn.Module, **options: Any) -> testing.ParityReport:
    given: dict[str, Any] = {"nnx_call": lambda model, tokens: model(tokens).logits} | options
    return testing.assert_module_parity(model, linen, None, TOKENS, **given)


def difference(*arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        (compare if isinstance(arguments[0], Llama) else testing.assert_module_parity)(*arguments, **options)
    print(caught.value)
    return str(caught.value)


# Equal modules


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("scan", "linen_scan"), [(False, False), (True, True), (True, False), (False, True)])
def test_a_model(scan: bool, linen_scan: bool, remat: bool) -> None:
    model = llama(scan_layers=scan, remat=nnxmoe.Remat() if remat else None)
    report = compare(model, LinenLlama(scan=linen_scan, remat=remat))
    print(report)
