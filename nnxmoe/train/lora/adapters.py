"""Add adapters to a model, and remove them."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.arguments import refuses_unknown
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


@refuses_unknown
def add(
    model: CausalLM,
    rank: int | Mapping[str, int],
    alpha: float | Mapping[str, float] | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    rngs: nnx.Rngs | None,
    dtype: Any = jnp.float32,
) -> None:
    """Add adapters to a model, in place. The outputs do not change, since ``a`` is random and ``b`` zero.

    Args:
        rank: One rank, or ranks by target, as in ``{"attention": 8, "experts": 2}``. The longest name
            that matches a projection decides. See also `split_ranks`.
        alpha: One value, or values by target. Defaults to the rank of each adapter, a scale of 1.
        targets: Projections or groups of them, such as ``["attention", "experts.down"]``. Defaults to
            the names in ``rank``, else to all projections but router, embedding and head.
        rngs: The same ``rngs`` give the same values on any mesh, with scanned layers or not. If None,
            the adapters have shapes only.

    Raises:
        ValueError: If an argument is unusable or the model has adapters already.
    """
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs={short(rngs)}: give nnx.Rngs(0), or None for adapters of shapes without values")
    targets = list(rank) if targets is None and isinstance(rank, Mapping) else targets
    kind, found = float_dtype(dtype) or np.dtype(np.float32), select_slots(model, targets)
    ranks = [whole_number("rank", value, 1, 2**31) for value in values_per_slot(found, rank, "rank")]
    alphas = ranks if alpha is None else values_per_slot(found, alpha, "alpha")
    if odd := [value for value in alphas if not 0 < (as_number(value) or 0) < 2**63]:
        raise ValueError(f"alpha {short(odd[0])} is not a positive number")
    refuse_adapters(model)
    made = [(slot, slot.shapes(r, float(a), kind)) for slot, r, a in zip(found, ranks, alphas, strict=True)]
    if rngs is not None:
        seed = np.asarray(jax.random.key_data(rngs.params())).tolist()
        for slot, adapter in made:
            a, b = adapter.a, adapter.b
            for variable, host in ((a, _drawn(seed, slot, a)), (b, np.zeros(b.shape, b.dtype))):
                variable.set_value(put_array(host, model.strategy.sharding_of(variable)))
    for slot, adapter in made:
        slot.put(adapter)


def split_ranks(model: CausalLM, rank: int) -> dict[str, int]:
    """Return ranks for `add`: ``rank`` per projection, and ``rank / experts per token`` per expert.

    The experts of one token then have the same total rank as each other projection ("LoRA Without
    Regret", Schulman et al. 2025). Raises ValueError for a model without experts, and for a rank that
    is not a multiple of the experts per token.
    """
    check_model(model)
    active = model.config.experts_per_token
    if not active:
        raise ValueError(f"a {model.config.model_type} model has no experts: pass the rank itself, without split_ranks")
    total = as_integer(rank, 1) or 0
    if not total or total % active:
        raise ValueError(
            f"rank {short(rank)} cannot be split over the {active} experts per token: use a multiple of {active}, such "
            f"as {active * max(1, round(total / active))}"
        )
    return {s.name: total // active if s.name.startswith("experts.") else total for s in select_slots(model, None)}


def _drawn(seed: list[int], slot: AdapterSlot, a: nnx.Param) -> np.ndarray:
    """Draw initial values of ``a``: uniform within PEFT's bound, from one random stream per layer.

    NumPy draws them, since compiling JAX's generator for every shape takes longer than drawing.
    """
    ins = () if slot.name == "embed" else ParamWeight(a).ins  # an embedding lookup has a fan-in of 1
    bound = math.prod(ins) ** -0.5
    stream = zlib.crc32(slot.name.encode())
    rngs = (np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, stream, i]))) for i in slot.layers)
    one = a.shape[slot.depth is not None :]
    drawn = [((2 * rng.random(one, np.float32) - 1) * np.float32(bound)).astype(a.dtype) for rng in rngs]
    return drawn[0] if slot.depth is None else np.stack(drawn)


def remove(model: CausalLM) -> None:
    """Remove a model's adapters, in place. Raises ValueError if it has no adapters or merged adapters."""
    for slot in unmerged_slots(model, "remove"):
        slot.put(None)
