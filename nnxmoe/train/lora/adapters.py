"""Adding adapters to a model, and taking them away."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of
from nnxmoe.config.validate import is_positive
from nnxmoe.convert.dtypes import float_dtype
from nnxmoe.layers.kernel import LEAD
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.lora.peft import placed
from nnxmoe.train.lora.slots import Slot, chosen, refuse_second, unmerged


def add(
    model: CausalLM,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    rngs: nnx.Rngs | None,
    dtype: Any = jnp.float32,
) -> None:
    """Give a model adapters, in place: ``a`` random, ``b`` 0, so that it computes what it did.

    ``alpha`` None: the rank, a scale of 1. ``targets``: names or beginnings of names, such as ``["attention",
    "experts.down"]``; None: everything but the router. The same ``rngs`` give the same values, layers scanned or not,
    on whatever mesh; None makes shapes. Raises ValueError for what cannot be, and where there are adapters already.
    """
    if not is_positive(rank):
        raise ValueError(f"rank {rank!r} is not a positive integer")
    alpha = rank if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha {alpha!r} is not a positive number")
    kind, found = float_dtype(dtype) or np.dtype(np.float32), chosen(model, targets)
    refuse_second(model)
    made = [(slot, slot.shapes(rank, float(alpha), kind)) for slot in found]
    if rngs is not None:
        seed = np.asarray(jax.random.key_data(rngs.params())).tolist()
        for slot, adapter in made:
            a, b = adapter.a, adapter.b
            for variable, host in ((a, _drawn(seed, slot, a)), (b, np.zeros(b.shape, b.dtype))):
                variable.set_value(placed(host, model.strategy.sharding_of(variable)))
    for slot, adapter in made:
        slot.put(adapter)


def _drawn(seed: list[int], slot: Slot, a: nnx.Variable) -> np.ndarray:
    """Values of an ``a``: uniform up to a bound, as PEFT has it, from a stream of random numbers for each layer.

    NumPy's: to compile JAX's for every shape takes longer than to draw.
    """
    bound = math.prod(n for n, axis in zip(a.shape[:-1], axes_of(a), strict=False) if axis not in LEAD) ** -0.5
    stream, layers = zlib.crc32(slot.name.encode()), range(slot.first, slot.first + (slot.depth or 1))
    rngs = (np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, stream, i]))) for i in layers)
    one = a.shape[slot.depth is not None :]
    drawn = [((2 * rng.random(one, np.float32) - 1) * np.float32(bound)).astype(a.dtype) for rng in rngs]
    return drawn[0] if slot.depth is None else np.stack(drawn)


def remove(model: CausalLM) -> None:
    """Take a model's adapters away, in place. ValueError where it has none that are not merged."""
    for slot in unmerged(model, "remove"):
        slot.put(None)
