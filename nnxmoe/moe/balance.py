"""Load balance across experts: auxiliary losses, DeepSeek's auxiliary-loss-free bias update, and statistics.

Pure functions of a `Routing` that ignore padding. The losses are not multiplied by their coefficients.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.moe.dispatch import mask_padding
from nnxmoe.moe.router import Routing


def switch_loss(routing: Routing) -> Float[Array, ""]:
    """``E * sum_e f_e P_e`` over all tokens: f_e assignments per token to expert e, P_e its mean probability.

    Equals X (experts per token) at perfect balance. Switch Transformer (Fedus et al. 2021, eq. 4), summed over the X
    choices as transformers does for Mixtral. Stack the routings of all layers to pool them as transformers does.
    """
    chosen, real = _chosen(routing), _real(routing)
    total = jnp.maximum(jnp.sum(real), 1.0)
    rows = tuple(range(real.ndim))
    share = jnp.sum(chosen, axis=rows) / total
    probability = jnp.sum(_where_real(routing, routing.scores), axis=rows) / total
    return share.size * jnp.sum(share * probability)


def sequence_loss(routing: Routing) -> Float[Array, ""]:
    """DeepSeek-V3's sequence-wise balance loss (2024, eq. 17 to 20), averaged over the sequences.

    ``sum_e f_e P_e`` with ``f_e = E / X * assignments per token to e`` and P_e the mean normalised affinity, over the
    last row dimension of ``[..., T]``. Equals 1 at perfect balance.
    """
    total = jnp.sum(routing.scores, axis=-1, keepdims=True)
    affinities = routing.scores / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # all affinities may underflow to 0
    share, probability, weight = _by_sequence(routing, affinities)
    scale = share.shape[-1] / routing.experts.shape[-1]
    return jnp.sum(scale * jnp.sum(share * probability, axis=-1) * weight)


def maxtext_loss(routing: Routing, logits: Float[Array, "*rows E"] | None = None) -> Float[Array, ""]:
    """MaxText's load balance loss: ``mean over b, e of (density * density_prob) * E**2``, computed per sequence.

    ``density_prob`` is the softmax of ``logits`` (None: the router's; for DeepSeek, MaxText uses affinities plus bias).
    """
    logits = _where_real(routing, routing.logits if logits is None else logits)
    share, probability, weight = _by_sequence(routing, jax.nn.softmax(logits, axis=-1))
    return share.shape[-1] * jnp.sum(jnp.sum(share * probability, axis=-1) * weight)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Router z-loss: mean over tokens of ``logsumexp(logits) ** 2``. Keeps logits small (ST-MoE, Zoph et al. 2022)."""
    real = _real(routing)
    squares = jax.nn.logsumexp(_where_real(routing, routing.logits), axis=-1) ** 2
    return jnp.sum(squares * real) / jnp.maximum(jnp.sum(real), 1.0)


def updated_bias(bias: Float[Array, "*L E"], load: Int[Array, "*L E"], rate: float) -> Float[Array, "*L E"]:
    """The correction bias, raised by ``rate`` for experts below the mean load and lowered by ``rate`` above it.

    Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1). Apply after the optimizer step.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Utilization:
    """Load statistics per layer: each expert's share of the assignments; their entropy / log(E) (1: uniform, 0: one
    expert); the largest load / mean load; the number of unused experts; the fraction of assignments dropped. Arrays of
    JAX or NumPy, or their shapes."""

    share: Any  # float [*L, E]; the others [*L]
    entropy: Any
    busiest: Any
    idle: Any
    dropped: Any


def utilization(load: Int[Array, "*L E"], dropped: Int[Array, "*L"]) -> Utilization:
    """`Utilization` from the `DispatchInfo` fields of one layer, or of several layers stacked."""
    count, loads = load.shape[-1], load.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(loads, axis=-1), 1.0)
    share = loads / total[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / jnp.log(max(count, 2))
    idle = jnp.sum(load == 0, axis=-1, dtype=jnp.int32)
    return Utilization(share, entropy, jnp.max(share, axis=-1) * count, idle, dropped / total)


def _real(routing: Routing) -> Float[Array, "*rows"]:
    rows = routing.scores.shape[:-1]
    return jnp.ones(rows) if routing.valid is None else routing.valid.astype(jnp.float32)


def _where_real(routing: Routing, values: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """``values`` with padding set to 0. Multiplying by a 0/1 mask would keep NaN."""
    return values if routing.valid is None else jnp.where(routing.valid[..., None], values, 0)


def _chosen(routing: Routing) -> Float[Array, "*rows E"]:
    """Indicator of the experts chosen for each token."""
    return jnp.sum(jax.nn.one_hot(mask_padding(routing).ids, routing.scores.shape[-1]), axis=-2)


def _by_sequence(
    routing: Routing, probabilities: Float[Array, "*B T E"]
) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"], Float[Array, "*B"]]:
    """Per sequence: assignments per token, mean probability, and its weight in the mean over non-empty sequences."""
    real = _real(routing)
    length = jnp.sum(real, axis=-1)
    total = jnp.maximum(length, 1.0)[..., None]
    share = jnp.sum(_chosen(routing), axis=-2) / total
    probability = jnp.sum(_where_real(routing, probabilities), axis=-2) / total
    return share, probability, (length > 0) / jnp.maximum(jnp.sum(length > 0), 1)
