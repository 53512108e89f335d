"""Definition of a training step without arrays, so that equal steps share compiled programs."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.layers.linear.staged_gather import gather_in_stages
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.moe.balance import Utilization, update_bias, utilization
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.static_key import hashable, static_key
from nnxmoe.sharding import reduce_gradients_in
from nnxmoe.train.loop.objective import Losses, TrainingObjective
from nnxmoe.train.loop.optimizers import skipped_steps

Variables = dict[str, tuple[Any, nnx.Variable]]  # dotted path -> (path, variable)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State that a training step updates, as arrays, shapes or shardings keyed by dotted path."""

    step: Any  # number of completed steps
    params: dict[str, Any]  # the trained variables, in float32
    frozen: dict[str, Any]  # the model's other variables, such as the routers' correction bias
    moments: Any  # the optimizer's state
    key: Any  # random key of the next step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """Results of one step. If a gradient is not finite, parameters and optimizer state do not change."""

    losses: Losses
    gradient_norm: Any  # scalar, or its shape: global norm before the optimizer's update
    finite: Any  # bool [P], or its shape: True per parameter if its gradient is finite or was skipped
    used: Utilization | None = None  # expert utilization, for MoE models
    learning_rate: Any = None  # scalar, if in the optimizer's state (`optax.inject_hyperparams`)
    skipped: Any = None  # number of skipped steps, if the optimizer counts them (`optax.apply_if_finite`)


class StepDefinition:
    """Training step as pure functions of arrays; see `Step` for the arguments.

    Attributes:
        key: Cache key, equal for definitions that compute the same function. None if this cannot be
            determined, see `static_key`.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: optax.GradientTransformationExtraArgs,
        objective: TrainingObjective,
        trainable: Any,
        accumulate: int,
        bias_rate: float,
    ):
        self.optimizer, self.objective = optimizer, objective
        self.accumulate, self.bias_rate = accumulate, bias_rate
        stripped = copy.copy(model)
        vars(stripped)["load_report"] = None  # excluded, because its timings would make equal models differ
        self._graph, params, frozen = nnx.split(stripped, trainable, ...)
        self._params, self._frozen = (_without_values(variables_of(state)) for state in (params, frozen))
        self._biases = _biases(model, getattr(objective, "depths", 0))
        settings = static_key(objective, optimizer, accumulate, bias_rate)
        self.key = settings and hashable((self._graph, *map(jax.tree.structure, (params, frozen)), settings))

    def init(self, params: dict[str, Array], frozen: dict[str, Array], key: Array) -> TrainState:
        """Create the initial state. Copies all arrays, and casts floating-point parameters to float32."""
        float32_params = {
            name: jnp.array(value, jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else value.dtype, copy=True)
            for name, value in params.items()
        }
        frozen_copies = {name: jnp.copy(value) for name, value in frozen.items()}
        return TrainState(jnp.int32(0), float32_params, frozen_copies, self.optimizer.init(float32_params), key)

    def merge(self, params: Mapping[str, Array], frozen: Mapping[str, Array]) -> CausalLM:
        """Build the model with these variable values."""
        return merged(self._graph, (self._params, params), (self._frozen, frozen))

    def losses(self, state: TrainState, batch: Mapping[str, Array]) -> Losses:
        """Compute the losses of a batch without an update."""
        return self.objective(self.merge(state.params, state.frozen), batch, None, None, 1.0)[1]

    def step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Report]:
        """Compute gradients, apply the optimizer's update, and update the routers' correction biases."""
        key, next_key = jax.random.split(state.key)
        grads, losses = self.gradients(state, batch, key)
        finite = jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads.values()])
        all_finite = jnp.all(finite)

        def loss_of(params: Any) -> Float[Array, ""]:  # line searches evaluate the loss at other parameters
            return self._accumulated(functools.partial(self._loss, state.frozen, params), batch, key)[0]

        update = functools.partial(self._update, state, grads, losses, loss_of)
        if skipped_steps(state.moments) is not None:  # `optax.apply_if_finite` limits consecutive rejections
            params, moments, updates = update()
            # `optax.apply_if_finite` replaces rejected updates with zeros.
            finite |= jnp.all(jnp.stack([jnp.all(update == 0) for update in jax.tree.leaves(updates)]))
        else:  # with `jnp.where`, XLA:CPU copies parameters and moments, and an update takes 4 times as long
            params, moments = jax.lax.cond(all_finite, lambda: update()[:2], lambda: (state.params, state.moments))
        frozen = dict(state.frozen)
        for name, rows in self._biases.items() if self.bias_rate else ():
            updated_biases = update_bias(frozen[name], losses.load[rows], self.bias_rate)
            frozen[name] = jnp.where(all_finite, updated_biases, frozen[name])
        rates = [rate for _, rate in optax.tree.get_all_with_path(moments, "learning_rate") if isinstance(rate, Array)]
        expert_utilization = utilization(losses.load, losses.dropped) if len(losses.load) else None
        report = Report(
            losses,
            optax.tree.norm(grads),
            finite,
            expert_utilization,
            rates[0] if rates else None,
            skipped_steps(moments),
        )
        return TrainState(state.step + 1, params, frozen, moments, next_key), report

    def _update(
        self, state: TrainState, grads: dict[str, Array], losses: Losses, loss_of: Callable[[Any], Array]
    ) -> tuple[Any, Any, Any]:
        """Compute the new parameters, the optimizer's new state and the updates."""
        options = {"value": losses.total, "grad": grads, "value_fn": loss_of}
        updates, moments = self.optimizer.update(grads, state.moments, state.params, **options)
        return optax.apply_updates(state.params, updates), moments, updates

    def gradients(self, state: TrainState, batch: dict[str, Array], key: Array) -> tuple[dict[str, Array], Losses]:
        """Compute the gradient of each parameter for a batch, and the batch's losses."""
        gradient_fn = jax.grad(functools.partial(self._loss, state.frozen), has_aux=True)
        return self._accumulated(functools.partial(gradient_fn, state.params), batch, key)

    def _loss(
        self, frozen: dict[str, Array], params: dict[str, Array], part: Any, key: Array, count: Any
    ) -> tuple[Float[Array, ""], Losses]:
        model = self.merge(params, frozen)
        reduce_gradients = reduce_gradients_in(model.reduce_dtype or model.dtype, model.mesh)
        with reduce_gradients, gather_in_stages(model.mesh, model.strategy.rules):
            return self.objective(model, part, key, count, 1 / self.accumulate)

    def _accumulated(self, run: Callable[..., Any], batch: dict[str, Array], key: Array) -> Any:
        """Sum ``run(part, key, count)`` over the microbatches of a batch."""
        if self.accumulate == 1:
            return run(batch, key, None)
        count = self.objective.count(batch)

        def add(sums: Any, inputs: Any) -> tuple[Any, None]:
            part, key = inputs
            return jax.tree.map(jnp.add, sums, run(part, key, count)), None

        # [B, T] -> [accumulate, B / accumulate, T]. Every microbatch has rows from every device.
        parts = {
            name: jnp.moveaxis(jnp.reshape(array, (-1, self.accumulate, *array.shape[1:])), 1, 0)
            for name, array in batch.items()
        }
        keys = jax.random.split(key, self.accumulate)
        result_shapes = jax.eval_shape(run, jax.tree.map(lambda a: a[0], parts), key, count)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), result_shapes)
        return jax.lax.scan(add, zeros, (parts, keys))[0]


def variables_of(state: Any) -> Variables:
    """Map dotted paths to a state's variables."""
    return {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}


def merged(graph: Any, *groups: tuple[Variables, Mapping[str, Any]]) -> CausalLM:
    """Build a model with these variable values."""
    flat = [
        (path, variable.replace(values[name])) for group, values in groups for name, (path, variable) in group.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _without_values(variables: Variables) -> Variables:
    """Replace arrays with abstract arrays, so that the model's arrays are not retained in memory."""
    return {
        name: (path, variable.replace(jax.eval_shape(lambda value: value, variable.get_value())))
        for name, (path, variable) in variables.items()
    }


def _biases(model: CausalLM, depths: int) -> dict[str, np.ndarray]:
    """Map the path of each correction bias to its rows in `Losses.load`.

    A bias has one row, or one row per layer of a scanned stack. Prediction layers have rows only if
    ``depths`` > 0.
    """
    layers = dict[str, np.ndarray]()
    bias_filter = RouterBias if depths else nnx.All(RouterBias, nnx.Not(nnx.PathContains("mtp")))
    for name, (path, variable) in variables_of(nnx.state(model, bias_filter)).items():
        stacked = is_stacked(axes_of(variable))
        layer = name_of(model, path).layer
        assert layer is not None
        layers[name] = layer + (np.arange(variable.shape[0]) if stacked else np.asarray(0))
    moe_layers = np.unique(np.concatenate([np.ravel(n) for n in layers.values()])) if layers else np.zeros(0, int)
    return {name: np.asarray(np.searchsorted(moe_layers, bias_layers)) for name, bias_layers in layers.items()}
