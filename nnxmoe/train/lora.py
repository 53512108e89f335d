"""LoRA (Hu et al. 2021) on attention, feed-forward networks and every routed expert.

    lora.add(model, rank=16, rngs=nnx.Rngs(0))     # the same logits: b is 0
    graph, adapters, rest = nnx.split(model, lora.LoRAParam, ...)
    lora.save(model, "adapter")                    # for peft, or lora.load(model, "adapter")
    lora.merge(model); nnxmoe.save_pretrained(model, "merged")

Gate and up of the experts share ``a``, as PEFT has it where transformers keeps the two as one matrix.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import axes_of
from nnxmoe.config.validate import is_positive
from nnxmoe.convert.leaves import float_dtype
from nnxmoe.layers.kernel import LEAD
from nnxmoe.layers.lora import Kept, LoRA
from nnxmoe.layers.lora import LoRAParam as LoRAParam
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.peft import load as load
from nnxmoe.train.peft import placed
from nnxmoe.train.peft import save as save
from nnxmoe.train.slots import Slot, adapted, chosen, refuse_second, refuse_shapes, slots


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
    for slot in _unmerged(model, "remove"):
        slot.put(None)


def _unmerged(model: CausalLM, what: str) -> list[Slot]:
    if model.merged is not None:
        raise ValueError(f"cannot {what}: the model's adapters are merged; lora.unmerge(model) first")
    if not (found := adapted(model)):
        raise ValueError(f"cannot {what}: the model has no adapters; lora.add or lora.load gives it some")
    return found


class Merged(nnx.Module):
    """A merged adapter, and the kernels as they were."""

    def __init__(self, adapter: LoRA, base: Sequence[nnx.Variable]):
        self.a = _kept(adapter.a)
        self.b = _kept(adapter.b)
        self.alpha = adapter.alpha
        self.base = nnx.List([_kept(kernel) for kernel in base])


def _kept(variable: nnx.Variable) -> Kept:
    return Kept(variable.get_value(), **_labels(variable))


def _labels(variable: nnx.Variable) -> dict[str, Any]:
    meta = variable.get_metadata()
    return {"axes": meta["axes"], "inputs": meta["inputs"], "eager_sharding": False}


def merge(model: CausalLM, *, keep: bool = True) -> None:
    """Add the adapters to the kernels, in place: computed in float32 and rounded once to a kernel's dtype.

    ``keep``: hold on to adapters and kernels, so that `unmerge` gives back every bit, also of bfloat16, for as much
    memory as the kernels take; False: for good. A model that was merged is saved as any other.
    """
    refuse_shapes(model)
    found = _unmerged(model, "merge")
    kept = {slot.place: Merged(adapter, slot.base) for slot in found if (adapter := slot.adapter) and keep}
    for slot in found:
        assert slot.adapter is not None
        graph, state = nnx.split(slot.adapter)
        kernels = [kernel.get_value() for kernel in slot.base]
        places = [kernel.sharding for kernel in kernels]
        new = _sum(graph, slot.depth is not None, tuple(places))(kernels, state)
        for kernel, value in zip(slot.base, new, strict=True):
            kernel.set_value(value)
        slot.put(None)
    model.merged = nnx.data(nnx.Dict(kept)) if keep else None


@functools.lru_cache(maxsize=64)
def _sum(graph: Any, stacked: bool, places: tuple[Any, ...]) -> Any:
    """The program that adds an adapter to its kernels, of stacked layers one at a time."""

    def one(pair: Any) -> list[Float[Array, "..."]]:
        kernels, state = pair
        delta = nnx.merge(graph, state).delta()
        parts = jnp.split(delta, len(kernels), axis=-1)
        return [
            (k.astype(jnp.float32) + d.reshape(k.shape)).astype(k.dtype) for k, d in zip(kernels, parts, strict=True)
        ]

    def run(kernels: list[Array], state: Any) -> list[Array]:
        return jax.lax.map(one, (kernels, state)) if stacked else one((kernels, state))

    return jax.jit(run, out_shardings=list(places))


def unmerge(model: CausalLM) -> None:
    """Give a model back the kernels and adapters that it had before `merge`, bit for bit."""
    if model.merged is None:
        raise ValueError("cannot unmerge: nothing was merged, or merged with keep=False")
    for slot in slots(model):
        if slot.place in model.merged:
            kept = model.merged[slot.place]
            for kernel, base in zip(slot.base, kept.base, strict=True):
                kernel.set_value(base.get_value())
            a, b = (LoRAParam(v.get_value(), **_labels(v)) for v in (kept.a, kept.b))
            slot.put(LoRA(a, b, kept.alpha))
    model.merged = nnx.static(None)
