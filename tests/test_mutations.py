"""Planted mistakes: each must change the logits far beyond the tolerance, so that test_cases would fail.

A mistake is planted in the package's code or in a loaded model. The reference is the logits of transformers if a
reference case shows the mistake, and otherwise (windows, biases, unusual eps) the NumPy decoder on a tiny checkpoint.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention import mla, softmax_attention
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.moe import selection
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import RouterBias
from nnxmoe.moe.selection import Routing
from tests.support.arrays import max_error
from tests.support.cases import load_case
from tests.support.numpy_decoder import reference_logits
from tests.support.running import MODEL_TOLERANCE, eager_logits, set_rope, variables
from tests.support.tiny import TINY, build, random_tokens, tiny_weights

NOTICED = 1e-3
Plant = Callable[[Any, pytest.MonkeyPatch], None]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 4}),
    "biases": ("llama", {}),
    "large-eps": ("llama", {"rms_norm_eps": 0.05}),
    "latent-eps": ("deepseek_v3", {"rms_norm_eps": 0.05}),
    "negative-bias": ("deepseek_v3", {}),
    "attention-factor": ("llama", {"rope_scaling": YARN}),
    "mscale": (
        "deepseek_v3",
        {"rope_scaling": YARN | {"attention_factor": None, "mscale": 0.5, "mscale_all_dim": 1.0}},
    ),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 24}),  # square kernels, as the published ones
}


# Mistakes


def layers(model: Any) -> Iterator[Any]:
    for stack in model.stacks:
        yield from stack.layers


def moes(model: Any) -> Iterator[Any]:
    return (layer.feed_forward for layer in layers(model) if isinstance(layer.feed_forward, MoE))


def swap_gate_and_up(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        part = layer.feed_forward.experts if isinstance(layer.feed_forward, MoE) else layer.feed_forward
        part.gate, part.up = part.up, part.gate


def rotate_other_pairs(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.rotate = rotate_halves if isinstance(layer.attention, mla.MLA) else rotate_pairs


def rotate_backwards(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        if isinstance(layer.attention, mla.MLA):
            layer.attention.rotate = lambda x, r: rotate_pairs(x, dataclasses.replace(r, sin=-r.sin))


def ignore_rope_scaling(model: Any, patch: pytest.MonkeyPatch) -> None:
    set_rope(model, Rope(model.config.rope.dim, model.config.rope.theta))


def ignore_attention_factor(model: Any, patch: pytest.MonkeyPatch) -> None:
    set_rope(model, dataclasses.replace(model.config.rope, attention_factor=1.0))


def keep_rope_width_of_keys_only(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Compute the softmax scale from the non-rotated query width only."""
    for layer in layers(model):
        layer.attention.scale *= (model.config.qk_rope_head_dim / model.config.qk_nope_head_dim + 1) ** 0.5


def forget_mscale(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.scale = (model.config.qk_nope_head_dim + model.config.qk_rope_head_dim) ** -0.5


def latent_norms_with_config_eps(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.kv_norm.eps = layer.attention.q.norm.eps = model.config.rms_norm_eps


def window_by(change: int) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for layer in layers(model):
            layer.attention.window += change

    return plant


def ignore_window(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.window = None


def see_the_future(model: Any, patch: pytest.MonkeyPatch) -> None:
    right = softmax_attention.Mask.allowed
    patch.setattr(
        softmax_attention.Mask,
        "allowed",
        lambda self: right(dataclasses.replace(self, query_index=self.query_index + 1)),
    )


class Tiled(nnxmoe.ReferenceAttention):
    """Query head n uses key head n % K."""

    def __call__(self, q: Any, k: Any, v: Any, scores: Any) -> Any:
        times = (1, q.shape[1] // k.shape[1], 1, 1)
        return super().__call__(q, jnp.tile(k, times), jnp.tile(v, times), scores)


def tile_kv_heads(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.attention_fn = Tiled()


def ignore_norm_weights(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RMSNorm, "__call__", lambda self, x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps))


def norms_with_eps(eps: float) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for layer in layers(model):
            layer.attention_norm.eps = eps
            layer.feed_forward_norm.eps = eps
        model.norm.eps = eps

    return plant


def drop_biases(of: str) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        hit = [v for path, v in variables(model) if path.endswith(".bias") and of in path]
        assert hit
        for variable in hit:
            variable[...] = jnp.zeros_like(variable[...])

    return plant


def shift_experts(model: Any, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        for kernel in (moe.experts.gate, moe.experts.up, moe.experts.down):
            kernel[...] = jnp.roll(kernel[...], 1, axis=0)


def drop_shared_expert(model: Any, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        moe.shared = None


def select_with(**changes: Any) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for moe in moes(model):
            moe.router.select = dataclasses.replace(moe.router.select, **changes)

    return plant


def ignore_groups(model: Any, patch: pytest.MonkeyPatch) -> None:
    select_with(top_groups=model.config.n_group)(model, patch)


class Shadow:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def mask_groups_with_zero(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selection, "jnp", Shadow(jnp, inf=0.0))


def group_score_by_max(model: Any, patch: pytest.MonkeyPatch) -> None:
    def top_k(x: Any, k: int) -> Any:
        values, indices = jax.lax.top_k(x, k)
        grouped = x.ndim == 4  # [B, T, groups, experts per group]
        return (values.at[..., 1:].set(0) if grouped else values), indices

    patch.setattr(selection, "jax", Shadow(jax, lax=Shadow(jax.lax, top_k=top_k)))


def softmax_for_sigmoid(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selection, "jax", Shadow(jax, nn=Shadow(jax.nn, sigmoid=jax.nn.softmax)))


def sigmoid_for_softmax(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selection, "jax", Shadow(jax, nn=Shadow(jax.nn, softmax=lambda x, axis: jax.nn.sigmoid(x))))


def reroute(change: Callable[[Routing, Any], Routing]) -> Plant:
    """Plant that changes the routing returned by the selection."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for moe in moes(model):
            right = moe.router.select
            moe.router.select = lambda logits, bias, right=right: change(right(logits, bias), bias)

    return plant


def _weigh_with_bias(routing: Routing, bias: Any) -> Routing:
    weights = jnp.take_along_axis(routing.scores + bias, routing.experts, axis=-1)
    return dataclasses.replace(routing, weights=2.5 * weights / jnp.sum(weights, axis=-1, keepdims=True))


def _raw_weights(routing: Routing, bias: Any) -> Routing:
    return dataclasses.replace(routing, weights=jnp.take_along_axis(routing.scores, routing.experts, axis=-1))


def _other_order(routing: Routing, bias: Any) -> Routing:
    return dataclasses.replace(routing, weights=routing.weights[..., ::-1])


def ignore_router_bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    for _, variable in variables(model):
        if isinstance(variable, RouterBias):
            variable[...] = jnp.zeros_like(variable[...])


def scale_sinks(model: Any, patch: pytest.MonkeyPatch) -> None:
    """As if the sinks were products of queries and keys."""
    for layer in layers(model):
        scores = layer.attention.sinks.scores
        scores[...] = scores[...] * layer.attention.scale


def ignore_sinks(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in layers(model):
        layer.attention.sinks = None


def windows_by(change: int) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for layer in layers(model):
            layer.attention.window = None if layer.attention.window is None else layer.attention.window + change

    return plant


def window_in_the_other_layers(model: Any, patch: pytest.MonkeyPatch) -> None:
    first, second = (layer.attention for layer in layers(model))
    first.window, second.window = second.window, first.window


def transpose_square_kernels(model: Any, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        moe.experts.down[...] = jnp.swapaxes(moe.experts.down[...], -1, -2)


def gate_and_up_in_halves(model: Any, patch: pytest.MonkeyPatch) -> None:
    """As if the first half of the outputs were the gate, and not every second."""
    for moe in moes(model):
        both = jnp.stack([moe.experts.gate[...], moe.experts.up[...]], axis=2)
        both = both.reshape(both.shape[0], -1, both.shape[3])
        moe.experts.gate[...], moe.experts.up[...] = jnp.split(both, 2, axis=1)


def activate_with(**changes: Any) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for moe in moes(model):
            moe.experts.activation = dataclasses.replace(moe.experts.activation, **changes)

    return plant


def activate_by(change: Callable[[Any, Any, Any], Any]) -> Plant:
    """Plant of another activation, made from the right one, gate and up."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for moe in moes(model):
            right = moe.experts.activation
            moe.experts.activation = lambda gate, up, right=right: change(right, gate, up)

    return plant


def _up_without_one(right: Any, gate: Any, up: Any) -> Any:
    return right(gate, up) - right(gate, jnp.zeros_like(up))


def _gate_clamped_below(right: Any, gate: Any, up: Any) -> Any:
    return right(jnp.maximum(gate, -right.limit), up)


def drop_expert_bias(name: str) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        for moe in moes(model):
            bias = getattr(moe.experts.biases, name)
            bias[...] = jnp.zeros_like(bias[...])

    return plant


def logit_bias_after_the_softmax(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The bias decides which experts are chosen, and their weights are those of logits without it."""
    for moe in moes(model):
        values = moe.router.logit_bias.values[...]

        def select(logits: Any, bias: Any, right: Any = moe.router.select, values: Any = values) -> Routing:
            routing = right(logits, bias)
            plain = jnp.take_along_axis(logits - values, routing.experts, axis=-1)
            return dataclasses.replace(routing, weights=jax.nn.softmax(plain, axis=-1))

        moe.router.select = select


def ignore_logit_bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        moe.router.logit_bias = None


def truncate_yarn(model: Any, patch: pytest.MonkeyPatch) -> None:
    set_rope(model, dataclasses.replace(model.config.rope, truncate=True))


MISTAKES: list[tuple[str, Plant]] = [
    ("llama_basic", swap_gate_and_up),
    ("mixtral_basic", swap_gate_and_up),
    ("deepseek_basic", swap_gate_and_up),
    ("llama_basic", rotate_other_pairs),
    ("deepseek_basic", rotate_other_pairs),
    ("deepseek_basic", rotate_backwards),
    ("llama3_rope", ignore_rope_scaling),
    ("deepseek_yarn", ignore_rope_scaling),
    ("attention-factor", ignore_attention_factor),
    ("mscale", ignore_attention_factor),
    ("deepseek_yarn", forget_mscale),
    ("mscale", forget_mscale),
    ("deepseek_basic", keep_rope_width_of_keys_only),
    ("latent-eps", latent_norms_with_config_eps),
    ("window", window_by(1)),
    ("window", window_by(-1)),
    ("mixtral-window", window_by(1)),
    ("mixtral-window", window_by(-1)),
    ("window", ignore_window),
    ("mistral_basic", see_the_future),
    ("llama_basic", tile_kv_heads),
    ("llama_basic", ignore_norm_weights),
    ("mixtral_basic", ignore_norm_weights),
    ("large-eps", norms_with_eps(1e-5)),
    ("latent-eps", norms_with_eps(1e-6)),
    ("biases", drop_biases("attention.q")),
    ("biases", drop_biases("attention.v")),
    ("biases", drop_biases("attention.o")),
    ("biases", drop_biases("mlp.down")),
    ("latent-eps", drop_biases("attention.q.a")),
    ("latent-eps", drop_biases("kv_a")),
    ("mixtral_basic", shift_experts),
    ("deepseek_basic", shift_experts),
    ("deepseek_basic", drop_shared_expert),
    ("deepseek_basic", select_with(scale=1.0)),
    ("deepseek_basic", select_with(normalize=False)),
    ("deepseek_yarn", select_with(normalize=False)),
    ("deepseek_basic", ignore_groups),
    ("negative-bias", mask_groups_with_zero),
    ("deepseek_basic", group_score_by_max),
    ("deepseek_basic", softmax_for_sigmoid),
    ("mixtral_basic", sigmoid_for_softmax),
    ("deepseek_basic", reroute(_weigh_with_bias)),
    ("mixtral_basic", reroute(_raw_weights)),
    ("mixtral_basic", reroute(_other_order)),
    ("deepseek_basic", ignore_router_bias),
    ("gpt-oss", scale_sinks),
    ("gpt-oss", ignore_sinks),
    ("gpt-oss", windows_by(1)),
    ("gpt-oss", windows_by(-1)),
    ("gpt-oss", window_in_the_other_layers),
    ("gpt-oss", swap_gate_and_up),
    ("gpt-oss", gate_and_up_in_halves),
    ("gpt-oss", transpose_square_kernels),
    ("gpt-oss", activate_with(limit=1e6)),
    ("gpt-oss", activate_with(alpha=1.0)),
    ("gpt-oss", activate_by(_up_without_one)),
    ("gpt-oss", activate_by(_gate_clamped_below)),
    *(("gpt-oss", drop_expert_bias(name)) for name in ("gate", "up", "down")),
    ("gpt-oss", ignore_logit_bias),
    ("gpt-oss", logit_bias_after_the_softmax),
    ("gpt-oss", truncate_yarn),
    ("gpt-oss", ignore_attention_factor),
]


def setting(name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """A new model, tokens, and the right logits."""
    if name not in VARIANTS:
        case = load_case(name)
        return build(case.fields, case.weights), case.arrays["input_ids"], case.arrays["logits"]
    kind, changes = VARIANTS[name]
    fields = TINY[kind] | changes
    weights = tiny_weights(fields, seed=3)
    for key in weights:
        if name == "negative-bias" and key.endswith("correction_bias"):
            weights[key] -= 2.0
        if name.endswith("eps") and key == "model.embed_tokens.weight":
            weights[key] *= 0.3  # a small residual stream makes eps matter
    tokens = random_tokens(2, 12, seed=4)
    return build(fields, weights), tokens, reference_logits(fields, weights, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in MISTAKES}))
def test_logits_are_right_without_a_mistake(name: str) -> None:
    model, tokens, logits = setting(name)
    assert max_error(eager_logits(model, tokens), logits) < MODEL_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant"), [pytest.param(n, p, id=f"{n}-{p.__qualname__.split('.')[0]}") for n, p in MISTAKES]
)
def test_planted_mistake_changes_the_logits(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, logits = setting(name)
    plant(model, monkeypatch)
    moved = max_error(eager_logits(model, tokens), logits)
    assert NOTICED < moved < np.inf


@pytest.mark.slow
def test_reference_cases_miss_some_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the correction biases of the cases, masking groups with zeros has no effect; tiny checkpoints cover it."""
    model, tokens, logits = setting("deepseek_basic")
    mask_groups_with_zero(model, monkeypatch)
    assert max_error(eager_logits(model, tokens), logits) < MODEL_TOLERANCE
