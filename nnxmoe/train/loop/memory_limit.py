"""Lower bounds on training memory, to reject models and batches that cannot fit before compilation."""

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
    state, (available, _) = step.shapes(), memory_bytes()
    arrays = [*jax.tree.leaves((state.params, state.frozen, state.moments))]
    state_bytes, gradient_bytes = (
        local_bytes(
            (a.shape, np.float32 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a.dtype, a.sharding)
            for a in group
        )
        for group in (arrays, state.params.values())
    )
    refuse_beyond_memory(
        state_bytes + gradient_bytes,
        "training takes, without activations,",
        "train adapters (train.lora.add) or fewer parameters (trainable=…), or use more devices (mesh=…)",
    )
    return available - state_bytes


@dataclasses.dataclass
class BatchLimit:
    """Limit on the batch size: activations must fit in ``room``, the bytes that the state leaves available.

    The estimate is a lower bound. It counts only the inputs of layers that gradients pass through, as
    if they were sharded over all devices. The backward pass needs these inputs with and without
    `Remat`. Logits and activations inside layers are not counted.
    """

    room: float
    bytes_per_token: float  # sum over the devices of this process, for accumulate=1
    accumulate: int

    @classmethod
    def of(cls, step: Step, model: CausalLM, room: float) -> "BatchLimit":
        """Create the limit for a step. Custom objectives have no limit, since they may skip tokens."""
        uses_all_tokens = isinstance(step.objective, RouterLosses)
        layers = _layers_with_gradients(model, step.names) if uses_all_tokens else 0
        dtype = model.strategy.compute_dtype or model.dtype
        share = 1.0 if step.mesh is None else len(step.mesh.local_devices) / step.mesh.size
        return cls(room, share * layers * model.config.hidden_size * jnp.dtype(dtype).itemsize, step.accumulate)

    def refuse(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a global batch of this shape cannot fit."""
        needed = math.prod(shape) // self.accumulate * self.bytes_per_token
        if needed > self.room:
            raise ValueError(
                f"a batch of {shape[0]} rows, {list(shape)}, takes at least {bytes_text(needed)} for activations, but "
                f"only {bytes_text(max(self.room, 0))} of memory is free: use fewer rows (batch_size), "
                f"more microbatches (accumulate) or more devices (mesh=…), or set {VARIABLE}=off to try anyway"
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
    """Return (rows, tokens per row) if the data declare both, as `train.batches` does, else None."""
    rows, length = getattr(data, "batch_size", None), getattr(data, "seq_len", None)
    return (rows, length) if isinstance(rows, int) and isinstance(length, int) else None
