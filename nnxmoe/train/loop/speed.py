"""Model FLOPs utilisation (MFU, PaLM; Chowdhery et al. 2022): FLOPs of a training step against the devices' peak."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import axes_of
from nnxmoe.layers.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.hardware import of_device


def peak_flops(mesh: Mesh | None) -> float | None:
    """Peak FLOP/s of dense bfloat16 products on the mesh's devices together; None for unknown devices."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    found = of_device(devices[0].device_kind)
    return None if found is None else found.flops * len(devices)


def token_flops(model: CausalLM, trained: Collection[str]) -> float:
    """FLOPs of a training step per token: 4 per parameter used (forward, and gradient of the input), 2 more for the
    gradient of a parameter in ``trained`` (dotted paths).

    Attention scores and rematerialisation are not counted. Prediction layers are used if any of them is trained, and
    each of them uses the output head once more.
    """
    total, depths = 0.0, len(model.mtp) if any(name.startswith("mtp.") for name in trained) else 0
    head = "embed.table" if model.head is None else "head.kernel"
    for path, variable, size in _weights(model):
        share, key = 1.0, ".".join(map(str, path)).removesuffix(".codes")
        if path[0] == "mtp" and not depths:
            share = 0.0
        elif "expert" in axes_of(variable):
            share = model.config.experts_per_token / model.config.experts
        elif key == head:
            share = 1.0 + depths
        elif key.endswith(".table"):
            share = 0.0  # a lookup, no product; Gemma 4 has a second table
        total += (6 if ".".join(map(str, path)) in trained else 4) * share * size
    return total


def _weights(model: CausalLM) -> Iterator[tuple[tuple[Any, ...], nnx.Variable, int]]:
    """Path, variable and number of weights of every parameter; the variable of a quantised kernel holds its codes."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield path, variable, variable.size
    for path, node in nnx.iter_graph(model):
        if isinstance(node, QuantizedWeight):
            yield path, node.codes, math.prod((*node.lead, *node.ins, *node.outs))
