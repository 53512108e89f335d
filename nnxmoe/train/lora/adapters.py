"""Add LoRA adapters to a model, and remove them."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, as_number, whole_number
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.peft.adapter_folder import put_array
from nnxmoe.convert.peft.adapter_slots import (
    AdapterSlot,
    refuse_adapters,
    select_slots,
    unmerged_slots,
    values_per_slot,
)
from nnxmoe.layers.linear.kernel import ParamWeight
from nnxmoe.model.causal_lm import CausalLM, check_model


@reject_unknown_arguments
def add(
    model: CausalLM,
    rank: int | Mapping[str, int],
    alpha: float | Mapping[str, float] | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    rngs: nnx.Rngs | None,
    dtype: Any = jnp.float32,
) -> None:
    """Add LoRA adapters to a model in place. ``b`` is initialized to zero, so the outputs do not change.

    Args:
        rank: A single rank, or a rank per target, such as ``{"attention": 8, "experts": 2}``. If several
            targets match a projection, the longest name applies. See also `split_ranks`.
        alpha: A single value, or a value per target. Defaults to the rank of each adapter (scale 1).
        targets: Projections or groups of projections, such as ``["attention", "experts.down"]``. Defaults
            to the keys of ``rank``, else to all projections except router, embedding and head.
        rngs: Random streams for ``a``. The values are independent of the mesh and of layer stacking. If
            None, the adapters are abstract.

    Raises:
        ValueError: If an argument is invalid or the model already has adapters.
    """
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(
            f"rngs={short(rngs)}: pass nnx.Rngs(0), or None for abstract adapters (shapes and dtypes only)"
        )
    targets = list(rank) if targets is None and isinstance(rank, Mapping) else targets
    param_dtype, slots = float_dtype(dtype) or np.dtype(np.float32), select_slots(model, targets)
    ranks = [whole_number("rank", value, 1, 2**31) for value in values_per_slot(slots, rank, "rank")]
    alphas = ranks if alpha is None else values_per_slot(slots, alpha, "alpha")
    if invalid := [value for value in alphas if not 0 < (as_number(value) or 0) < 2**63]:
        raise ValueError(f"alpha {short(invalid[0])} is not a positive number")
    refuse_adapters(model)
    adapters = [(slot, slot.shapes(r, float(a), param_dtype)) for slot, r, a in zip(slots, ranks, alphas, strict=True)]
    if rngs is not None:
        key = jax.random.key_data(rngs.params())
        if isinstance(key, Tracer):
            raise ValueError(
                "rngs is traced, but adapters are initialized with NumPy: call lora.add outside of nnx.jit. For an "
                "abstract model, call nnx.eval_shape first, then lora.add with rngs=None"
            )
        seed = np.asarray(key).tolist()
        for slot, adapter in adapters:
            a, b = adapter.a, adapter.b
            for variable, initial in ((a, _drawn(seed, slot, a)), (b, np.zeros(b.shape, b.dtype))):
                variable.set_value(put_array(initial, model.strategy.sharding_of(variable)))
    for slot, adapter in adapters:
        slot.put(adapter)


def split_ranks(model: CausalLM, rank: int) -> dict[str, int]:
    """Return ranks for `add`: ``rank`` per projection, and ``rank / experts per token`` per expert.

    The experts of a token then have the same total rank as every other projection ("LoRA Without
    Regret", Schulman et al. 2025). Raises ValueError if the model has no experts, or if ``rank`` is not
    a multiple of the experts per token.
    """
    check_model(model)
    experts_per_token = model.config.experts_per_token
    if not experts_per_token:
        raise ValueError(f"a {model.config.model_type} model has no experts: pass the rank without split_ranks")
    total_rank = as_integer(rank, 1) or 0
    if not total_rank or total_rank % experts_per_token:
        raise ValueError(
            f"rank {short(rank)} cannot be split over the {experts_per_token} experts per token: use a multiple of "
            f"{experts_per_token}, such as {experts_per_token * max(1, round(total_rank / experts_per_token))}"
        )
    return {
        slot.name: total_rank // experts_per_token if slot.name.startswith("experts.") else total_rank
        for slot in select_slots(model, None)
    }


def _drawn(seed: list[int], slot: AdapterSlot, a: nnx.Param) -> np.ndarray:
    """Draw initial values of ``a`` uniformly within PEFT's bound, from one random stream per layer.

    Uses NumPy, since compiling JAX's generator for every shape takes longer than drawing the values.
    """
    ins = () if slot.name == "embed" else ParamWeight(a).ins  # an embedding lookup has a fan-in of 1
    bound = math.prod(ins) ** -0.5
    stream = zlib.crc32(slot.name.encode())
    rngs = (np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, stream, i]))) for i in slot.layers)
    layer_shape = a.shape[slot.depth is not None :]
    layers = [((2 * rng.random(layer_shape, np.float32) - 1) * np.float32(bound)).astype(a.dtype) for rng in rngs]
    return layers[0] if slot.depth is None else np.stack(layers)


def remove(model: CausalLM) -> None:
    """Remove a model's adapters in place. Raises ValueError if there are none, or if they are merged."""
    for slot in unmerged_slots(model, "remove"):
        slot.put(None)
