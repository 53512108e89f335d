"""Optax optimizers for a model's parameters: Muon's matrices, shardings of moments, skipped updates."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from nnxmoe.axes import axes_of
from nnxmoe.layers.linear.kernel import ParamWeight, is_kernel
from nnxmoe.model.causal_lm import CausalLM

_OTHERS = "others"


def muon(
    learning_rate: optax.ScalarOrSchedule, model: CausalLM, *, consistent_rms: float | None = 0.2, **options: Any
) -> optax.GradientTransformation:
    """Create `optax.contrib.muon` for a model.

    Muon orthogonalizes the kernel of each layer and expert as one matrix ``[I, O]``. Heads are part of
    I or O. AdamW trains embedding, output head, norms, biases and all other parameters. The optimizer
    is for models with the same parameter names: call `train.lora.add` first. It raises ValueError for
    other parameters.

    Args:
        consistent_rms: Scales the updates of matrices to the size of AdamW's updates, so that both
            use one learning rate (Liu et al. 2025, arXiv 2502.16982). If None, Jordan's scale (2024).
        options: Further arguments of `optax.contrib.muon`.
    """
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    numbers = {name: _matrix(variable) for name, variable in variables.items()}
    stacked = {
        name: jax.vmap if axes_of(v)[0] == "stages" else _one_by_one  # a loop would make XLA gather all stages' layers
        for name, v in variables.items()
        if is_kernel(v) and len(ParamWeight(v).lead) > 1
    }

    def dimension_numbers(params: Any) -> Any:
        if odd := [name for name in params if name not in numbers]:
            raise ValueError(
                f"train.muon was given a model without {odd[0]}: pass the model that is trained, after lora.add"
            )
        return {name: numbers[name] for name in params}

    made = optax.contrib.muon(
        learning_rate, consistent_rms=consistent_rms, muon_weight_dimension_numbers=dimension_numbers, **options
    )
    return _per_layer(made, stacked)


_Over = Callable[[Callable[..., Any]], Callable[..., Any]]


def _one_by_one(run: Callable[..., Any]) -> Callable[..., Any]:
    """Map like `jax.vmap`, with temporary arrays for one layer at a time."""
    return lambda *given: jax.lax.map(lambda layer: run(*layer), given)


def _per_layer(inner: optax.GradientTransformation, stacked: Mapping[str, _Over]) -> optax.GradientTransformation:
    """Map ``inner`` over the first axis of each ``stacked`` parameter, with separate optimizer states.

    Optax 0.2.8 merges the axes of layers and experts, so XLA gathers the experts of all devices. See
    ``test_muon_gathers_no_experts``.
    """

    def parts(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        own = {name: {name: arrays[name]} for name in arrays if name in stacked}
        return own | {_OTHERS: {name: array for name, array in arrays.items() if name not in own}}

    def over(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        return stacked[name](run) if name in stacked else run

    def init(params: Any) -> Any:
        return {name: over(inner.init, name)(part) for name, part in parts(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        given = parts(params)
        done = {name: over(inner.update, name)(part, state[name], given[name]) for name, part in parts(updates).items()}
        found = {name: update for part, _ in done.values() for name, update in part.items()}
        return {name: found[name] for name in updates}, {name: later for name, (_, later) in done.items()}

    return optax.GradientTransformation(init, update)


def _matrix(variable: nnx.Variable) -> MuonDimensionNumbers | None:
    """Return the axes of inputs and outputs, counted from the end, or None if AdamW trains the parameter."""
    if not is_kernel(variable) or "vocab" in axes_of(variable):
        return None
    _, ins, outs = ParamWeight(variable).split(range(-variable.ndim, 0))
    return MuonDimensionNumbers(ins, outs)


# Name -> (function of learning rate and model that creates an optimizer without weight decay,
# default learning rate relative to Adam's).
OPTIMIZERS: dict[str, tuple[Callable[[Any, CausalLM], optax.GradientTransformation], float]] = {
    "adam": (lambda rate, model: optax.adam(rate), 1.0),
    "muon": (muon, 1.0),
    "adafactor": (lambda rate, model: optax.adafactor(rate, multiply_by_parameter_scale=False), 1.0),
    "lion": (lambda rate, model: optax.lion(rate, weight_decay=0.0), 0.2),  # Chen et al. 2023: 3 to 10 times smaller
}


def moment_shardings(
    moments: Any, params: Mapping[str, jax.ShapeDtypeStruct], places: Mapping[str, Any], everywhere: Any
) -> Any:
    """Return the sharding of each array of an optimizer's state.

    A moment gets its parameter's sharding, also if it lacks one of the dimensions (Adafactor's means of
    rows and columns). All other arrays get ``everywhere``. The shardings in ``places`` are None for
    models without values.
    """

    def place(path: Any, leaf: Any) -> Any:
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in places), None)
        if name is None:
            return everywhere
        whole, own = tuple(params[name].shape), places[name]
        if leaf.shape == whole:
            return own
        reduced = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == leaf.shape]
        if not reduced or not isinstance(own, NamedSharding):
            return everywhere
        spec = [*own.spec, *(None,) * (len(whole) - len(own.spec))]
        spec.pop(reduced[0])
        return NamedSharding(own.mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, moments)


def moment_paths(moments: Any) -> list[str]:
    """Return the path of each array of an optimizer's state, in the order of its leaves."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(moments)]


def skipped_steps(moments: Any) -> Array | None:
    """Return the number of steps skipped by `optax.apply_if_finite`, or None for other optimizers."""
    found = optax.tree.get_all_with_path(moments, "total_notfinite")
    return found[0][1] if found else None
