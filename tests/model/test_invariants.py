"""Invariants that trainers of other libraries require of a model.

The six are those of MaxText's training engine for its NNX models (`maxtext/m3/README.md` of 0.2.5). Each function
returns what violates an invariant. Each test also plants a violation.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import nnxmoe
from nnxmoe.layers.linear.staged_gather import gather_in_stages
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.sharding_rules import RULES, training_rules
from nnxmoe.train import Losses, Objective
from tests.support.families import FAMILIES
from tests.support.tiny import ORACLE, TINY, random_tokens, stacking_of

KINDS = ("mixtral", "deepseek_v3", "llama", "qwen3_5_moe_text")
BATCH = {"tokens": random_tokens(8, 16)}
of_model = pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
of_kind = pytest.mark.parametrize("kind", KINDS)


def config_of(kind: str) -> Any:
    """Tiny config whose sizes a mesh of eight devices divides."""
    changes = {"n_routed_experts": 6, "num_nextn_predict_layers": 1} if kind == "deepseek_v3" else {}
    return config_from_hf((TINY.get(kind) or FAMILIES[kind].frozen) | changes)


def build(kind: str, scanned: bool, **options: Any) -> nnxmoe.CausalLM:
    config = config_of(kind)
    strategy = dataclasses.replace(ORACLE, stacking=stacking_of(scanned), **options)
    return model_class(config)(config, strategy, rngs=nnx.Rngs(0), mtp=kind == "deepseek_v3")


def layers_of(model: nnxmoe.CausalLM) -> list[Any]:
    return [layer for stack in model.stacks for layer in getattr(stack, "layers", None) or [stack.layer]]


def loss_of(model: nnxmoe.CausalLM) -> jax.Array:
    return Objective(balance=0.1, router_z_loss=0.1)(model, BATCH)[0]


# Variables and paths


def trained_variables_of_other_types(model: nnxmoe.CausalLM) -> list[str]:
    """Paths of variables that receive a gradient but are not `nnx.Param`."""
    graph, floats, rest = nnx.split(model, lambda _, variable: jnp.issubdtype(variable.dtype, jnp.floating), ...)
    gradients = jax.jit(jax.grad(lambda floats: loss_of(nnx.merge(graph, floats, rest))))(floats)
    flat = nnx.to_flat_state(gradients)
    return [str(path) for path, v in flat if not isinstance(v, nnx.Param) and np.any(v.get_value())]


@of_model
@of_kind
def test_only_params_are_trained(kind: str, scanned: bool) -> None:
    model = build(kind, scanned)
    assert trained_variables_of_other_types(model) == []
    scale = layers_of(model)[0].attention_norm.scale
    layers_of(model)[0].attention_norm.scale = nnx.Variable(scale[...], **scale.get_metadata())
    assert [path for path in trained_variables_of_other_types(model) if "attention_norm" in path]


def variables_changed_by_a_pass(model: nnxmoe.CausalLM) -> set[Any]:
    """Variables, with type and shape, that a forward pass adds to or removes from the model's state."""
    graph, state = nnx.split(model)
    after = set[Any]()

    def variables(model: nnxmoe.CausalLM) -> set[Any]:
        return {(path, type(v), str(v.get_value())) for path, v in nnx.to_flat_state(nnx.state(model))}

    def run(state: Any) -> None:
        model = nnx.merge(graph, state)
        before = variables(model)
        loss_of(model)
        after.update(variables(model) ^ before)

    jax.eval_shape(run, state)
    return after


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@of_model
@of_kind
def test_a_pass_sows_nothing(kind: str, scanned: bool) -> None:
    model = build(kind, scanned)
    assert variables_changed_by_a_pass(model) == set()
    norm = layers_of(model)[-1].attention_norm

    def sow(self: Any, x: Any) -> Any:
        self.sow(nnx.Intermediate, "inputs", x)
        return super(type(self), self).__call__(x)

    norm.__class__ = type("SowingNorm", (type(norm),), {"__call__": sow})
    assert {path[-1] for path, _, _ in variables_changed_by_a_pass(model)} == {"inputs"}


def paths_in_layers(model: nnxmoe.CausalLM) -> set[tuple[Any, ...]]:
    """Paths of all variables. ``stacks.N.layers.M`` and ``stacks.N.layer`` are shortened to ``stacks.N``."""
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    return {path if path[0] != "stacks" else (*path[:2], *path[4 if path[2] == "layers" else 3 :]) for path in paths}


@of_model
@of_kind
def test_remat_and_scan_keep_paths(kind: str, scanned: bool) -> None:
    wanted = paths_in_layers(build(kind, False))
    model = build(kind, scanned, remat=nnxmoe.Remat())
    assert paths_in_layers(model) == wanted

    class Wrapped(nnx.Module):
        def __init__(self, part: Any) -> None:
            self.part = part

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self.part(*args, **options)

    layer = layers_of(model)[0]
    layer.attention = Wrapped(layer.attention)
    assert {path[3] for path in paths_in_layers(model) - wanted} == {"part"}


# Losses


class ReportedOnly(Objective):
    """Objective that reports the auxiliary losses without adding them to the loss."""

    def __call__(self, *args: Any, **options: Any) -> tuple[Any, Losses]:
        _, losses = super().__call__(*args, **options)
        return losses.cross_entropy, losses


def losses_without_gradient(model: nnxmoe.CausalLM, form: type[Objective]) -> list[str]:
    """Names of the auxiliary losses whose weight does not change the gradient of the loss."""
    names = ["z_loss"]
    if layers_of(model)[-1].feed_forward_name == "moe":
        names += ["balance", "router_z_loss"]
    if model.mtp:
        names += ["mtp"]
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def gradients(params: Any) -> list[Any]:
        def gradient(**weights: float) -> Any:
            return jax.grad(lambda params: form(**weights)(nnx.merge(graph, params, rest), BATCH)[0])(params)

        return [gradient(), *(gradient(**{name: 0.5}) for name in names)]

    plain, *others = map(jax.tree.leaves, jax.jit(gradients)(params))
    return [name for name, other in zip(names, others, strict=True) if all(map(np.array_equal, plain, other))]


@pytest.mark.slow
@of_model
@of_kind
def test_auxiliary_losses_are_in_the_loss(kind: str, scanned: bool) -> None:
    model = build(kind, scanned)
    assert losses_without_gradient(model, Objective) == []
    assert "z_loss" in losses_without_gradient(model, ReportedOnly)


# Meshes, in a process with eight devices


def jaxprs_in(parameter: Any) -> Iterator[Any]:
    for value in parameter if isinstance(parameter, tuple | list) else [parameter]:
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


COPIES = {"convert_element_type", "transpose", "reshape", "squeeze", "slice", "dynamic_slice", "copy"}


def meshes_and_constraints(jaxpr: Any, is_param: list[bool]) -> tuple[set[Any], list[str], list[bool]]:
    """Inspect a program.

    Args:
        is_param: Whether each input is a parameter.

    Returns:
        The meshes of constraints and of `jax.shard_map`, the sharding constraints on parameters or on copies of them,
        and whether each output is a parameter.
    """
    params = {variable for variable, given in zip(jaxpr.invars, is_param, strict=True) if given}
    meshes, constraints = set[Any](), list[str]()
    for eqn in jaxpr.eqns:
        inputs = [not hasattr(variable, "val") and variable in params for variable in eqn.invars]
        name = eqn.primitive.name
        outputs = [name in COPIES and inputs[0]] * len(eqn.outvars)
        if name == "sharding_constraint":
            meshes.add(eqn.params["sharding"].mesh)
            constraints += [str(eqn)] if inputs[0] else []
        if name == "shard_map":
            meshes.add(eqn.params["mesh"])
        for inner in [inner for parameter in eqn.params.values() for inner in jaxprs_in(parameter)]:
            aligned = [False] * (len(inner.invars) - len(inputs)) + inputs[len(inputs) - len(inner.invars) :]
            of_inner = meshes_and_constraints(inner, aligned[: len(inner.invars)])
            meshes |= of_inner[0]
            constraints += of_inner[1]
            outputs = of_inner[2] if len(of_inner[2]) == len(outputs) else outputs
        params |= {variable for variable, given in zip(eqn.outvars, outputs, strict=True) if given}
    return meshes, constraints, [not hasattr(variable, "val") and variable in params for variable in jaxpr.outvars]


def mesh_violations(model: nnxmoe.CausalLM) -> tuple[list[str], list[str]]:
    """Parts on meshes other than the driver's mesh, and constraints on parameters in a training step."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    step = jax.make_jaxpr(jax.value_and_grad(lambda params: loss_of(nnx.merge(graph, params, rest))))(params)
    meshes, constraints, _ = meshes_and_constraints(step.jaxpr, [True] * len(step.jaxpr.invars))
    arrays = {path: getattr(v.get_value().sharding, "mesh", None) for path, v in nnx.to_flat_state(nnx.state(model))}
    parts = {path: part.mesh for path, part in nnx.iter_graph(model) if getattr(part, "mesh", None) is not None}
    foreign = [f"{path}: {mesh}" for path, mesh in (arrays | parts).items() if mesh is not model.strategy.mesh]
    return foreign + [f"program: {mesh}" for mesh in meshes if mesh != model.strategy.mesh], constraints


def violations_with_planted_mistakes(kind: str, scanned: bool) -> dict[str, tuple[list[str], list[str]]]:
    mesh = nnxmoe.make_mesh(fsdp=4, expert=2)
    rules = training_rules(model_class(config_of(kind))(config_of(kind), rngs=None), mesh, RULES)
    dispatch = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
    model = build(kind, scanned, mesh=mesh, rules=rules, remat=nnxmoe.Remat(), dispatch=dispatch)
    found = {"nothing": mesh_violations(model)}
    with gather_in_stages(mesh, model.strategy.rules):
        found["constraint"] = mesh_violations(model)
    model.norm.scale.set_value(jax.device_put(model.norm.scale[...], jax.devices()[1]))
    model.embed.mesh = Mesh(mesh.devices[..., ::-1, :], mesh.axis_names, axis_types=mesh.axis_types)
    found["mesh"] = mesh_violations(model)
    return found


@pytest.mark.slow
@of_model
@of_kind
def test_one_mesh_and_no_constraints_on_parameters(eight: Callable[..., Any], kind: str, scanned: bool) -> None:
    """Only `nnxmoe.train.fit` adds constraints on parameters, with `gather_in_stages`."""
    found = eight(violations_with_planted_mistakes, kind, scanned)
    assert found["nothing"] == ([], [])
    assert found["constraint"][0] == [] and found["constraint"][1]
    foreign = "\n".join(found["mesh"][0])
    assert "('norm', 'scale'): None" in foreign and "('embed',): Mesh" in foreign and "program: Mesh" in foreign
