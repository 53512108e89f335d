"""Load balance of experts: auxiliary losses, DeepSeek's auxiliary-loss-free bias update, and statistics.

The losses are pure functions of a `Routing`. They ignore padding and do not include their coefficients.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.moe.dispatch import mask_padding
from nnxmoe.moe.router import Routing


def switch_loss(routing: Routing) -> Float[Array, ""]:
    """Compute Switch Transformer's balance loss ``E * sum_e f_e P_e`` over all tokens (Fedus et al. 2021, eq. 4).

    f_e is the number of assignments to expert e per token, and P_e the mean probability of expert e. As in
    transformers' Mixtral, f_e sums over the X choices, so the loss is X (experts per token) at perfect balance. Stack
    the routings of all layers to compute one loss for all layers, as transformers does.
    """
    chosen, tokens = _expert_mask(routing), _token_mask(routing)
    total = jnp.maximum(jnp.sum(tokens), 1.0)
    token_axes = tuple(range(tokens.ndim))
    share = jnp.sum(chosen, axis=token_axes) / total
    probability = jnp.sum(_zero_padding(routing, routing.scores), axis=token_axes) / total
    return share.size * jnp.sum(share * probability)


def sequence_loss(routing: Routing) -> Float[Array, ""]:
    """Compute DeepSeek-V3's sequence-wise balance loss (2024, eq. 17 to 20), averaged over the sequences.

    The loss of a sequence is ``sum_e f_e P_e``. f_e is ``E / X`` times the assignments to expert e per token, and P_e
    the mean normalized affinity. Sequences are the last row dimension, ``[..., T]``. The loss is 1 at perfect balance.
    """
    total = jnp.sum(routing.scores, axis=-1, keepdims=True)
    affinities = routing.scores / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # all affinities may underflow to 0
    share, probability, weight = _sequence_means(routing, affinities)
    scale = share.shape[-1] / routing.experts.shape[-1]
    return jnp.sum(scale * jnp.sum(share * probability, axis=-1) * weight)


def maxtext_loss(routing: Routing, logits: Float[Array, "*rows E"] | None = None) -> Float[Array, ""]:
    """Compute MaxText's load balance loss: the mean over sequences and experts of ``density * density_prob * E**2``.

    ``density`` is the number of assignments per token, and ``density_prob`` the mean softmax of ``logits``.

    Args:
        routing: The routing.
        logits: Input of the softmax. If None, the router's logits. For DeepSeek, MaxText uses affinities plus bias.
    """
    logits = _zero_padding(routing, routing.logits if logits is None else logits)
    share, probability, weight = _sequence_means(routing, jax.nn.softmax(logits, axis=-1))
    return share.shape[-1] * jnp.sum(jnp.sum(share * probability, axis=-1) * weight)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Compute the router z-loss: the mean of ``logsumexp(logits) ** 2`` (ST-MoE, Zoph et al. 2022)."""
    tokens = _token_mask(routing)
    squares = jax.nn.logsumexp(_zero_padding(routing, routing.logits), axis=-1) ** 2
    return jnp.sum(squares * tokens) / jnp.maximum(jnp.sum(tokens), 1.0)


def updated_bias(bias: Float[Array, "*L E"], load: Int[Array, "*L E"], rate: float) -> Float[Array, "*L E"]:
    """Return the updated correction bias: ``+ rate`` for experts below the mean load, ``- rate`` for experts above.

    Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1). Call it after the optimizer step.

    Args:
        bias: The correction bias.
        load: Assignments per expert.
        rate: Step size of the update.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Utilization:
    """Load statistics per layer, as JAX arrays, NumPy arrays or shapes.

    Attributes:
        share: Fraction of the assignments per expert, ``[*L, E]``. All other statistics are ``[*L]``.
        entropy: Entropy of the shares divided by log(E). 1 if the load is uniform, 0 if one expert has all assignments.
        busiest: Largest load divided by the mean load.
        idle: Number of experts without tokens.
        dropped: Fraction of assignments dropped.
    """

    share: Any
    entropy: Any
    busiest: Any
    idle: Any
    dropped: Any


def utilization(load: Int[Array, "*L E"], dropped: Int[Array, "*L"]) -> Utilization:
    """Compute load statistics from the fields ``load`` and ``dropped`` of a `DispatchInfo`."""
    count, loads = load.shape[-1], load.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(loads, axis=-1), 1.0)
    share = loads / total[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / jnp.log(max(count, 2))
    idle = jnp.sum(load == 0, axis=-1, dtype=jnp.int32)
    return Utilization(share, entropy, jnp.max(share, axis=-1) * count, idle, dropped / total)


def _token_mask(routing: Routing) -> Float[Array, "*rows"]:
    rows = routing.scores.shape[:-1]
    return jnp.ones(rows) if routing.valid is None else routing.valid.astype(jnp.float32)


def _zero_padding(routing: Routing, values: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Set the values of padding to 0. A product with a 0/1 mask would propagate NaN."""
    return values if routing.valid is None else jnp.where(routing.valid[..., None], values, 0)


def _expert_mask(routing: Routing) -> Float[Array, "*rows E"]:
    return jnp.sum(jax.nn.one_hot(mask_padding(routing).ids, routing.scores.shape[-1]), axis=-2)


def _sequence_means(
    routing: Routing, probabilities: Float[Array, "*B T E"]
) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"], Float[Array, "*B"]]:
    """Return, per sequence, the assignments per token, mean probabilities and weight in the mean over sequences.

    Sequences without real tokens have weight 0.
    """
    length = jnp.sum(_token_mask(routing), axis=-1)
    total = jnp.maximum(length, 1.0)[..., None]
    share = jnp.sum(_expert_mask(routing), axis=-2) / total
    probability = jnp.sum(_zero_padding(routing, probabilities), axis=-2) / total
    return share, probability, (length > 0) / jnp.maximum(jnp.sum(length > 0), 1)
