"""Lower bounds of the memory for training, to refuse what cannot fit before compiling it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.printable import bytes_text
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.runtime.memory import VARIABLE, local_bytes, memory_bytes, refuse_beyond_memory
from nnxmoe.train.loop.objective import RouterLosses
from nnxmoe.train.loop.step import Step


def refuse_state(step: Step) -> float:
    """Raise ValueError if the state and its gradients do not fit in memory. Return the bytes left for activations.

    Gradients are not subtracted, since activations are freed before all gradients exist.
    """
    state, (have, _) = step.shapes(), memory_bytes()
    arrays = [*jax.tree.leaves((state.params, state.frozen, state.moments))]
    held, gradients = (
        local_bytes(
            (a.shape, np.float32 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a.dtype, a.sharding) for a in each
        )
        for each in (arrays, state.params.values())
    )
    refuse_beyond_memory(
        held + gradients,
        "training takes, without activations,",
        "train adapters (train.lora.add), fewer parameters (trainable=…) or on more devices (mesh=…)",
    )
    return have - held


@dataclasses.dataclass
class BatchLimit:
    """Refuses batches whose activations need more than ``room``, the bytes that the state leaves free.

    A lower bound: it counts only the input of each layer that gradients pass through, which the backward pass needs
    with and without `Remat`, as if it were sharded over all devices. Logits and activations inside layers are extra.
    """

    room: float
    bytes_per_token: float  # on all devices of this process together, for accumulate=1
    accumulate: int

    @classmethod
    def of(cls, step: Step, model: CausalLM, room: float) -> "BatchLimit":
        """Create the limit for a step. Objectives that may leave out tokens have no limit."""
        known = isinstance(step.objective, RouterLosses)
        layers = _layers_with_gradients(model, step.names) if known else 0
        dtype = model.strategy.compute_dtype or model.dtype
        share = 1.0 if step.mesh is None else len(step.mesh.local_devices) / step.mesh.size
        return cls(room, share * layers * model.config.hidden_size * jnp.dtype(dtype).itemsize, step.accumulate)

    def refuse(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a global batch of this shape cannot fit."""
        need = math.prod(shape) // self.accumulate * self.bytes_per_token
        if need > self.room:
            raise ValueError(
                f"a batch of {shape[0]} rows, {list(shape)}, takes at least {bytes_text(need)} of activations, and "
                f"{bytes_text(max(self.room, 0))} of memory are left beside the model: use fewer rows (batch_size), "
                f"more parts (accumulate) or more devices (mesh=…), or set {VARIABLE}=off to try anyway"
            )


def _layers_with_gradients(model: CausalLM, trained: tuple[str, ...]) -> int:
    """Count the layers whose inputs the backward pass reads from memory.

    These are the layers after the first one with a trained parameter, or all but one if the embedding is trained. At
    least one, since the output head's input is always needed.
    """
    remat = model.strategy.remat
    if remat is not None and (remat.offload or remat.policy is not None):
        return 1
    depth, first = sum(stack.depth for stack in model.stacks), math.inf
    for path, _ in nnx.to_flat_state(nnx.state(model)):
        if ".".join(map(str, path)) in trained:
            name = name_of(model, path)
            embedding = name.layer is None and name.key.startswith("embed")
            first = min(first, 0 if embedding else depth if name.layer is None else name.layer)
    return int(max(1, depth - 1 - first))


def size_of_batches(data: Any) -> tuple[int, int] | None:
    """Return rows and tokens per row of batches that declare their size, such as `train.batches`; None for others."""
    rows, length = getattr(data, "batch_size", None), getattr(data, "seq_len", None)
    return (rows, length) if isinstance(rows, int) and isinstance(length, int) else None
