"""Optax optimizers for a model: Muon for each kernel, shardings of moments, skipped updates."""

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

    Muon orthogonalizes the kernel of each layer and expert as one matrix ``[I, O]``. Attention heads
    are part of I or O. AdamW trains embedding, output head, norms, biases and all other parameters. The
    trained model must have the same parameter names as ``model``, so call `train.lora.add` first. The
    optimizer raises ValueError if a parameter is unknown.

    Args:
        consistent_rms: Scales matrix updates to the RMS of AdamW's updates, so that both use the same
            learning rate (Liu et al. 2025, arXiv 2502.16982). If None, uses Jordan's scale (2024).
        options: Other arguments of `optax.contrib.muon`.
    """
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    matrix_axes = {name: _matrix(variable) for name, variable in variables.items()}
    stacked = {
        name: jax.vmap
        if axes_of(variable)[0] == "stages"
        else _one_by_one  # in a loop, XLA would gather the layers of all pipeline stages
        for name, variable in variables.items()
        if is_kernel(variable) and len(ParamWeight(variable).lead) > 1
    }

    def dimension_numbers(params: Any) -> Any:
        if unknown := [name for name in params if name not in matrix_axes]:
            raise ValueError(f"train.muon got a model without {unknown[0]}: pass the trained model, after lora.add")
        return {name: matrix_axes[name] for name in params}

    optimizer = optax.contrib.muon(
        learning_rate, consistent_rms=consistent_rms, muon_weight_dimension_numbers=dimension_numbers, **options
    )
    return _per_layer(optimizer, stacked)


_Over = Callable[[Callable[..., Any]], Callable[..., Any]]


def _one_by_one(run: Callable[..., Any]) -> Callable[..., Any]:
    """Map like `jax.vmap`, but sequentially, so that only one layer needs temporary arrays at a time."""
    return lambda *arrays: jax.lax.map(lambda layer: run(*layer), arrays)


def _per_layer(inner: optax.GradientTransformation, stacked: Mapping[str, _Over]) -> optax.GradientTransformation:
    """Map ``inner`` over the first axis of each ``stacked`` parameter, with separate optimizer states.

    Workaround: optax 0.2.8 merges the layer and expert axes, so XLA gathers the experts of all devices
    (``test_muon_gathers_no_experts``).
    """

    def parts(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        stacked_parts = {name: {name: arrays[name]} for name in arrays if name in stacked}
        return stacked_parts | {_OTHERS: {name: array for name, array in arrays.items() if name not in stacked_parts}}

    def map_layers(transform: Callable[..., Any], name: str) -> Callable[..., Any]:
        return stacked[name](transform) if name in stacked else transform

    def init(params: Any) -> Any:
        return {name: map_layers(inner.init, name)(part) for name, part in parts(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        param_parts = parts(params)
        results = {
            name: map_layers(inner.update, name)(part, state[name], param_parts[name])
            for name, part in parts(updates).items()
        }
        new_updates = {name: update for part, _ in results.values() for name, update in part.items()}
        return {name: new_updates[name] for name in updates}, {
            name: new_state for name, (_, new_state) in results.items()
        }

    return optax.GradientTransformation(init, update)


def _matrix(variable: nnx.Variable) -> MuonDimensionNumbers | None:
    """Return the input and output axes of a kernel as negative indices, or None if AdamW trains the parameter."""
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
    moments: Any, params: Mapping[str, jax.ShapeDtypeStruct], places: Mapping[str, Any], replicated: Any
) -> Any:
    """Return the sharding of each array of an optimizer's state.

    A moment has its parameter's sharding, even if it lacks one dimension (Adafactor's means over rows
    and columns). All other arrays have the sharding ``replicated``. ``places`` maps a parameter's name
    to its sharding, which is None if the model is abstract.
    """

    def sharding_of(path: Any, leaf: Any) -> Any:
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in places), None)
        if name is None:
            return replicated
        shape, sharding = tuple(params[name].shape), places[name]
        if leaf.shape == shape:
            return sharding
        reduced = [i for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == leaf.shape]
        if not reduced or not isinstance(sharding, NamedSharding):
            return replicated
        spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
        spec.pop(reduced[0])
        return NamedSharding(sharding.mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding_of, moments)


def moment_paths(moments: Any) -> list[str]:
    """Return the path of each array of an optimizer's state, in the order of its leaves."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(moments)]


def skipped_steps(moments: Any) -> Array | None:
    """Return the number of steps skipped by `optax.apply_if_finite`, or None for other optimizers."""
    counters = optax.tree.get_all_with_path(moments, "total_notfinite")
    return counters[0][1] if counters else None
