"""Adding adapters to a model, and removing them."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.printable import short
from nnxmoe.config.validate import is_between, is_positive
from nnxmoe.convert.core.dtypes import float_dtype
from nnxmoe.layers.kernel import KernelParam
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.lora.peft import put_array
from nnxmoe.train.lora.slots import Slot, chosen, refuse_adapted, unmerged


def add(
    model: CausalLM,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    rngs: nnx.Rngs | None,
    dtype: Any = jnp.float32,
) -> None:
    """Add adapters to a model, in place: ``a`` is random and ``b`` zero, so that its outputs do not change.

    ``alpha`` defaults to the rank, a scale of 1. ``targets`` are projections or groups of them, such as
    ``["attention", "experts.down"]``, by default all but router, embedding and head. The same ``rngs`` give the same
    values whether layers are scanned or not and on any mesh; None makes shapes. Raises ValueError for unusable
    arguments, and if the model has adapters already.
    """
    if not is_positive(rank):
        raise ValueError(f"rank {short(rank)} is not a positive integer")
    alpha = rank if alpha is None else alpha
    if not is_between(alpha, 0, 2**63):
        raise ValueError(f"alpha {short(alpha)} is not a positive number")
    kind, found = float_dtype(dtype) or np.dtype(np.float32), chosen(model, targets)
    refuse_adapted(model)
    made = [(slot, slot.shapes(rank, float(alpha), kind)) for slot in found]
    if rngs is not None:
        seed = np.asarray(jax.random.key_data(rngs.params())).tolist()
        for slot, adapter in made:
            a, b = adapter.a, adapter.b
            for variable, host in ((a, _drawn(seed, slot, a)), (b, np.zeros(b.shape, b.dtype))):
                variable.set_value(put_array(host, model.strategy.sharding_of(variable)))
    for slot, adapter in made:
        slot.put(adapter)


def _drawn(seed: list[int], slot: Slot, a: KernelParam) -> np.ndarray:
    """Initial values of ``a``: uniform within PEFT's bound, from one random stream per layer.

    NumPy draws them, since compiling JAX's generator for every shape takes longer than drawing.
    """
    bound = math.prod(() if slot.name == "embed" else a.ins) ** -0.5  # a token of the embedding is one of its inputs
    stream = zlib.crc32(slot.name.encode())
    rngs = (np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, stream, i]))) for i in slot.layers)
    one = a.shape[slot.depth is not None :]
    drawn = [((2 * rng.random(one, np.float32) - 1) * np.float32(bound)).astype(a.dtype) for rng in rngs]
    return drawn[0] if slot.depth is None else np.stack(drawn)


def remove(model: CausalLM) -> None:
    """Remove a model's adapters, in place. Raises ValueError if it has none, or merged ones."""
    for slot in unmerged(model, "remove"):
        slot.put(None)
