"""What a training step computes, and what a device could: model FLOPs utilisation (PaLM; Chowdhery et al. 2022)."""

import math
from collections.abc import Container

import jax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import axes_of
from nnxmoe.model.causal_lm import CausalLM

# Dense bfloat16 products a second, from the makers' data sheets; part of `device_kind` -> FLOP/s.
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5": 197e12,
    "TPU v4": 275e12,
}


def peak_flops(mesh: Mesh | None) -> float | None:
    """What the mesh's devices can compute in a second together; None where it is not known."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    kind = devices[0].device_kind
    found = next((peak for name, peak in _PEAKS.items() if name in kind), None)
    return None if found is None else found * len(devices)


def token_flops(model: CausalLM, trained: Container[str]) -> float:
    """Operations of a training step a token: two forward and two backward for each parameter that a token meets, and
    two for its gradient where it is among the ``trained``, given by their dotted paths.

    Without attention's scores, and without what is computed again: it counts what is useful.
    """
    total = 0.0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        share = 1.0
        if "expert" in axes_of(variable):
            share = model.config.experts_per_token / model.config.experts
        elif path[0] == "embed" and model.head is not None:
            share = 0.0  # it is looked up
        total += (6 if ".".join(map(str, path)) in trained else 4) * share * math.prod(variable.shape)
    return total
