"""Moves a model to a mesh, or to another one."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import check_mesh
from nnxmoe.layers.embed import Embed
from nnxmoe.model.causal_lm import CausalLM, refuse_shapes
from nnxmoe.model.decoder import Decoder
from nnxmoe.model.pipeline import PipelinedStack
from nnxmoe.model.strategy import OnMesh
from nnxmoe.moe.block import MoE


def on_mesh(model: CausalLM, mesh: Mesh) -> CausalLM:
    """A copy of the model with its arrays sharded over a mesh. Raises ValueError for a model without values."""
    check_mesh(model, mesh, model.strategy.rules)
    graph, state = nnx.split(model)
    refuse_shapes(jax.tree.leaves(state))
    model = nnx.merge(graph, state)
    model.strategy = dataclasses.replace(model.strategy, mesh=mesh)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Decoder | MoE | Embed):  # the modules that hold a mesh
            node.mesh = mesh
        if isinstance(attend := getattr(node, "attend", None), OnMesh):
            setattr(node, "attend", attend.on_mesh(mesh, model.strategy.rules))  # noqa: B010
        if isinstance(node, PipelinedStack):
            node.on_mesh(mesh)
    flat = [
        (p, v.replace(jax.device_put(v.get_value(), model.strategy.sharding_of(v))))
        for p, v in nnx.to_flat_state(state)
    ]
    nnx.update(model, nnx.from_flat_state(flat))
    return model
