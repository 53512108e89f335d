"""Expert load balancing: auxiliary losses, DeepSeek's auxiliary-loss-free bias update, and load statistics.

The losses are pure functions of a `Routing`. They ignore padding. Callers apply the loss coefficients.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.moe.dispatch import mask_padding
from nnxmoe.moe.selection import Routing


def switch_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the load-balancing loss of Switch Transformer, ``E * sum_e f_e P_e`` (Fedus et al. 2021, eq. 4).

    f_e is the number of assignments to expert e divided by the number of tokens. P_e is the mean probability of
    expert e. As in transformers' Mixtral, f_e counts all X experts per token, so the loss is X at perfect balance. To
    compute one loss for all layers, as transformers does, stack the routings of the layers.
    """
    expert_mask, token_mask = _expert_mask(routing), _token_mask(routing)
    num_tokens = jnp.maximum(jnp.sum(token_mask), 1.0)
    token_axes = tuple(range(token_mask.ndim))
    share = jnp.sum(expert_mask, axis=token_axes) / num_tokens
    probability = jnp.sum(_zero_padding(routing, routing.scores), axis=token_axes) / num_tokens
    return share.size * jnp.sum(share * probability)


def sequence_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the sequence-wise balance loss of DeepSeek-V3 (2024, eq. 17 to 20), averaged over sequences.

    The loss of a sequence is ``sum_e f_e P_e``. f_e is ``E / X`` times the number of assignments to expert e per token.
    P_e is the mean normalized affinity of expert e. The last row dimension is the sequence, ``[..., T]``. The loss is 1
    at perfect balance.
    """
    score_sum = jnp.sum(routing.scores, axis=-1, keepdims=True)
    affinities = routing.scores / jnp.maximum(score_sum, jnp.finfo(jnp.float32).tiny)  # affinities may underflow to 0
    share, probability, weight = _sequence_means(routing, affinities)
    scale = share.shape[-1] / routing.experts.shape[-1]
    return jnp.sum(scale * jnp.sum(share * probability, axis=-1) * weight)


def maxtext_loss(routing: Routing, logits: Float[Array, "*rows E"] | None = None) -> Float[Array, ""]:
    """Compute MaxText's load-balancing loss: the mean over sequences and experts of ``density * density_prob * E**2``.

    ``density`` is the number of assignments per token. ``density_prob`` is the mean softmax of ``logits``.

    Args:
        routing: Routing of the tokens.
        logits: Input of the softmax. Defaults to the router's logits. For DeepSeek models, MaxText uses affinities plus
            bias.
    """
    logits = _zero_padding(routing, routing.logits if logits is None else logits)
    share, probability, weight = _sequence_means(routing, jax.nn.softmax(logits, axis=-1))
    return share.shape[-1] * jnp.sum(jnp.sum(share * probability, axis=-1) * weight)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the router z-loss, the mean of ``logsumexp(logits) ** 2`` (ST-MoE; Zoph et al. 2022)."""
    tokens = _token_mask(routing)
    squares = jax.nn.logsumexp(_zero_padding(routing, routing.logits), axis=-1) ** 2
    return jnp.sum(squares * tokens) / jnp.maximum(jnp.sum(tokens), 1.0)


def update_bias(bias: Float[Array, "*L E"], load: Int[Array, "*L E"], rate: float) -> Float[Array, "*L E"]:
    """Add ``rate`` to the bias of experts with less than the mean load, and subtract ``rate`` for experts with more.

    Implements auxiliary-loss-free load balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1). Call this function
    after the optimizer step.

    Args:
        bias: Correction bias of the router.
        load: Number of assignments per expert.
        rate: Step size.

    Returns:
        The updated bias.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Utilization:
    """Expert load statistics per layer. Fields are JAX arrays, NumPy arrays or shapes.

    Attributes:
        share: Fraction of all assignments per expert, ``[*L, E]``. The other statistics have shape ``[*L]``.
        entropy: Entropy of ``share`` divided by log(E): 1 for a uniform load, 0 if a single expert has all assignments.
        busiest: Largest load divided by the mean load.
        idle: Number of experts without tokens.
        dropped: Fraction of the assignments that were dropped.
    """

    share: Any
    entropy: Any
    busiest: Any
    idle: Any
    dropped: Any


def utilization(load: Int[Array, "*L E"], dropped: Int[Array, "*L"]) -> Utilization:
    """Compute load statistics from the fields ``load`` and ``dropped`` of a `DispatchInfo`."""
    num_experts, loads = load.shape[-1], load.astype(jnp.float32)
    num_assignments = jnp.maximum(jnp.sum(loads, axis=-1), 1.0)
    share = loads / num_assignments[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / jnp.log(max(num_experts, 2))
    idle = jnp.sum(load == 0, axis=-1, dtype=jnp.int32)
    return Utilization(share, entropy, jnp.max(share, axis=-1) * num_experts, idle, dropped / num_assignments)


def _token_mask(routing: Routing) -> Float[Array, "*rows"]:
    rows = routing.scores.shape[:-1]
    return jnp.ones(rows) if routing.valid is None else routing.valid.astype(jnp.float32)


def _zero_padding(routing: Routing, values: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Zero the values of padding tokens. Multiplication by a 0/1 mask would propagate NaN."""
    return values if routing.valid is None else jnp.where(routing.valid[..., None], values, 0)


def _expert_mask(routing: Routing) -> Float[Array, "*rows E"]:
    return jnp.sum(jax.nn.one_hot(mask_padding(routing).ids, routing.scores.shape[-1]), axis=-2)


def _sequence_means(
    routing: Routing, probabilities: Float[Array, "*B T E"]
) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"], Float[Array, "*B"]]:
    """Compute statistics per sequence: assignments per token, mean probabilities, and weight in the mean.

    Sequences that contain only padding have weight 0.
    """
    length = jnp.sum(_token_mask(routing), axis=-1)
    num_tokens = jnp.maximum(length, 1.0)[..., None]
    share = jnp.sum(_expert_mask(routing), axis=-2) / num_tokens
    probability = jnp.sum(_zero_padding(routing, probabilities), axis=-2) / num_tokens
    return share, probability, (length > 0) / jnp.maximum(jnp.sum(length > 0), 1)
