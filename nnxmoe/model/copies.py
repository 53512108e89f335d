"""Copies of a model on a mesh or with unrolled layers."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.layers.embed import Embed
from nnxmoe.layers.recurrent.delta import GatedDeltaNet
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.pipeline import PipelinedStack
from nnxmoe.model.program import require_values
from nnxmoe.model.stack import ScannedStack, Unrolled
from nnxmoe.model.strategy import Strategy, attention_fn_for_mesh, check_context
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.sharding import MeshAware
from nnxmoe.sharding_rules import Rules, check_mesh


def on_mesh(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> CausalLM:
    """Copy a model with its arrays sharded over a mesh. ``rules`` defaults to the rules of the model's strategy.

    Raises:
        ValueError: The model is abstract, or its parameters, attention or pipeline stages do not fit the mesh.
    """
    for stack in model.stacks:
        if isinstance(stack, PipelinedStack):
            stack.refuse_stages(mesh)
    check_context(model, mesh)
    strategy = dataclasses.replace(model.strategy, mesh=mesh, rules=model.strategy.rules if rules is None else rules)
    check_mesh(model, mesh, strategy.rules)
    graph, state = nnx.split(model)
    require_values(jax.tree.leaves(state))
    leaves = [
        (path, variable.replace(jax.device_put(variable.get_value(), strategy.sharding_of(variable))))
        for path, variable in nnx.to_flat_state(state)
    ]
    return _bind(nnx.merge(graph, nnx.from_flat_state(leaves)), strategy)  # the copy has new variables


def with_rules(model: CausalLM, rules: Rules) -> CausalLM:
    """Return a copy of a model with different sharding rules. The copy shares the arrays, which are not resharded."""
    return _bind(nnx.merge(*nnx.split(model)), dataclasses.replace(model.strategy, rules=rules))


def _bind(model: CausalLM, strategy: Strategy) -> CausalLM:
    """Set the strategy of a model, and the mesh and rules of its modules, in place."""
    model.strategy = strategy
    for _, node in nnx.iter_graph(model):
        if isinstance(node, CausalLM | MoE | Embed | GatedDeltaNet | PipelinedStack):  # modules with a `mesh` attribute
            node.mesh = strategy.mesh
        if isinstance(node, Embed | Experts):
            node.rules = strategy.rules
        for name, part in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
            if name == "attention_fn" and part is not None:
                setattr(node, name, attention_fn_for_mesh(part, strategy.mesh, strategy.rules))
            elif isinstance(part, MeshAware):
                setattr(node, name, part.with_mesh(strategy.mesh, strategy.rules))
    return model


def unscan(model: CausalLM) -> CausalLM:
    """Return a copy of a scanned model with separate arrays per layer, for faster decoding.

    Copies the stacked arrays, so both models need memory until ``model`` is deleted. `nnxmoe.generate` caches such a
    copy of a scanned model. The models share the other arrays, but have separate variables: assigning a variable of one
    model does not change the other model. Returns ``model`` itself if it has no scanned layers.

        model = nnxmoe.unscan(nnxmoe.train.fit(model, …).model)
    """
    check_model(model)
    if not any(isinstance(stack, ScannedStack) for stack in model.stacks):
        return model
    graph, state = nnx.split(model)
    unrolled = nnx.merge(graph, state, copy=True)
    nnx.pop(unrolled, nnx.Intermediate)  # sown values have no layer axis
    unrolled.strategy = dataclasses.replace(model.strategy, stacking=Unrolled(), pipeline=None)
    unrolled.stacks = nnx.List(
        [
            stack.unrolled(model.strategy.sharding_of) if isinstance(stack, ScannedStack) else stack
            for stack in unrolled.stacks
        ]
    )
    return unrolled
