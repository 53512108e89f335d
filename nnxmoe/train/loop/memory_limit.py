"""Lower bounds on training memory, to reject batches and models that cannot fit before compiling."""

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
    """Check that a state and its gradients fit in memory, and return the bytes left for activations.

    Raises ValueError if they do not fit. Gradients are not subtracted from the result, since activations
    are freed before all gradients exist.
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
    """Rejects batches whose activations need more than ``room``, the bytes that the state leaves free.

    The need is a lower bound. It counts only the input of each layer that gradients pass through, as
    if it were sharded over all devices. The backward pass needs these inputs with and without `Remat`.
    Logits and activations inside layers come on top.
    """

    room: float
    bytes_per_token: float  # sum over the devices of this process, for accumulate=1
    accumulate: int

    @classmethod
    def of(cls, step: Step, model: CausalLM, room: float) -> "BatchLimit":
        """Create the limit for a step. Objectives that may skip tokens have no limit."""
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

    These are the layers after the first layer with a trained parameter, or all but one if the
    embedding is trained. The count is at least 1, since the output head's input is always needed.
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
    """Return rows and tokens per row of batches that declare them, such as `train.batches`, else None."""
    rows, length = getattr(data, "batch_size", None), getattr(data, "seq_len", None)
    return (rows, length) if isinstance(rows, int) and isinstance(length, int) else None
