"""A training step as one compiled program: gradients, the optimizer's update, and the routers' correction bias."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from nnxmoe.axes import axes_of, of_layers
from nnxmoe.config.printable import short
from nnxmoe.config.validate import is_positive
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.compiled import refuse_shapes
from nnxmoe.model.paths import name_of
from nnxmoe.moe.balance import Utilisation, updated_bias, utilisation
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.programs import JitProgram, shapes_of
from nnxmoe.train.loop.batch import Batch, as_arrays, rows_of
from nnxmoe.train.loop.objective import Losses, Objective, RouterLosses, TrainingObjective, of_function
from nnxmoe.train.loop.optimizers import moment_paths, moment_shardings, skipped_steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step updates, as arrays, shapes or shardings. Variables are keyed by their dotted paths."""

    step: Any  # the number of steps made
    params: dict[str, Any]  # the trained variables, in float32
    frozen: dict[str, Any]  # the model's other variables, such as the routers' correction bias
    moments: Any  # the optimizer's state
    key: Any  # the random key of the next step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """The results of one step. If a gradient is not finite, parameters and optimizer state keep their values."""

    losses: Losses
    gradient_norm: Any  # a scalar, or its shape; before the optimizer
    finite: Any  # bool [P], or its shape: whether each gradient is finite, or was skipped; ordered as the parameters
    used: Utilisation | None = None  # of the experts, if there are any
    learning_rate: Any = None  # a scalar, if the optimizer's state has it (`optax.inject_hyperparams`)
    skipped: Any = None  # steps skipped up to now, if the optimizer counts them (`optax.apply_if_finite`)


class Step:
    """``(state, batch) -> (state, report)`` for one model and optimizer; the state is donated.

    ``trainable`` is an nnx filter for the variables that get gradients. ``accumulate`` splits a batch into that many
    parts, processed one after the other; the gradients are those of the whole batch. ``bias_rate`` is DeepSeek's u, by
    which the correction bias moves after the optimizer's update (Wang et al. 2024). Parameters are kept in float32,
    activations have the model's dtype. Layers for multi-token prediction are trained if `Objective.mtp` is not 0. The
    optimizer may take ``value``, ``grad`` and ``value_fn``.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: optax.GradientTransformation,
        objective: TrainingObjective | Callable[[CausalLM, Batch], Any] | None = None,
        *,
        trainable: Any = nnx.Param,
        accumulate: int = 1,
        bias_rate: float = 0.0,
    ):
        if not is_positive(accumulate):
            raise ValueError(f"accumulate={short(accumulate)}: give the number of parts of a batch, at least 1")
        if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
            raise ValueError(f"optimizer={optimizer!r}: pass one of optax, such as optax.adam(1e-4)")
        self.optimizer, self.objective = optax.with_extra_args_support(optimizer), of_function(objective or Objective())
        if isinstance(self.objective, RouterLosses):
            self.objective = self.objective.of_model(model)
            # Without a gradient, weight decay would shrink parameters, and their moments would take memory.
            idle = ("indexer",) if getattr(self.objective, "depths", 0) else ("indexer", "mtp")
            trainable = nnx.All(trainable, *(nnx.Not(nnx.PathContains(name)) for name in idle))
        self.accumulate, self.bias_rate = accumulate, bias_rate
        self.mesh, self.vocab = model.strategy.mesh, model.config.vocab_size
        self.pipeline = model.strategy.pipeline
        self.graph, params, frozen = nnx.split(model, trainable, ...)
        self._params, self._frozen = _variables(params), _variables(frozen)
        self.names = tuple(self._params)  # dotted paths, in the order of `Report.finite`
        self._start = [{n: v.get_value() for n, (_, v) in group.items()} for group in (self._params, self._frozen)]
        if not self._params:
            raise ValueError(
                f"the model has no variable that matches trainable={trainable!r}: give a filter of nnx, such as "
                "nnx.PathContains('router') or nnx.Param"
            )
        self.dtypes = {name: variable.dtype for name, (_, variable) in self._params.items()}
        self._places = {
            name: model.strategy.sharding_of(v) or v.get_value().sharding
            for name, (_, v) in {**self._params, **self._frozen}.items()
        }
        self._biases = _biases(model, getattr(self.objective, "depths", 0))
        if bias_rate and not isinstance(self.objective, RouterLosses):
            raise ValueError("bias_rate needs the experts' loads, which a function does not report: set it to 0")
        self._moving = [n for n, (_, v) in self._frozen.items() if isinstance(v, RouterBias | nnx.RngState)]
        self._programs: dict[Any, Any] = {}  # by the batch: looking at a whole state in every step would take a while
        self._run = JitProgram(self._step, "the training step", donate_argnums=0, out_shardings=(self.places, None))

    def init(self, seed: int = 0) -> TrainState:
        """The initial state. It shares no array with the model, and raises ValueError if that has shapes only."""
        refuse_shapes(jax.tree.leaves(self._start))
        return JitProgram(self._init, out_shardings=self.places)(*self._start, jax.random.key(seed))

    def shapes(self) -> TrainState:
        """The result of `init` as shapes with shardings."""
        made = jax.eval_shape(self._init, *self._start, jax.random.key(0))
        return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), made, self.places)

    def _init(self, params: dict[str, Array], frozen: dict[str, Array], key: Array) -> TrainState:
        wide = {
            name: jnp.array(value, jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else value.dtype, copy=True)
            for name, value in params.items()
        }
        copied = {name: jnp.copy(value) for name, value in frozen.items()}
        return TrainState(jnp.int32(0), wide, copied, self.optimizer.init(wide), key)

    @functools.cached_property
    def places(self) -> Any:
        """The sharding of each array of a state: see `moment_shardings`; what has no parameter is replicated."""
        everywhere = next(iter(self._places.values()))
        everywhere = everywhere if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.eval_shape(self._init, *self._start, jax.random.key(0))
        params = {name: self._places[name] for name in self._params}
        moments = moment_shardings(shapes.moments, shapes.params, params, everywhere)
        return TrainState(everywhere, params, {name: self._places[name] for name in self._frozen}, moments, everywhere)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Make one step. Raises ValueError if the batch is malformed."""
        batch = as_arrays(batch)
        self.objective.check(batch)
        return self.run(state, batch)

    def run(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Make one step with a batch that the objective's ``check`` has passed."""
        if any(isinstance(leaf, Tracer) for leaf in (state.step, *batch.values())):
            return self._step(state, dict(batch))
        return self.program(state, batch)(state, dict(batch))

    def program(self, state: TrainState, batch: Batch) -> Any:
        """The compiled step for batches of these shapes. An equal step of another object has the same program."""
        rows = rows_of(batch)
        if rows % self.accumulate:
            raise ValueError(
                f"a batch of {rows} rows cannot be cut into accumulate={self.accumulate} parts: use a divisor of {rows}"
            )
        if (shapes := shapes_of(dict(batch))) not in self._programs:
            self._programs[shapes] = self._run.prepare(state, dict(batch))
        return self._programs[shapes]

    @property
    def jitted(self) -> Any:
        """``(state, batch) -> (state, report)`` of ``jax.jit``, which traces and lowers for `shapes`."""
        return self._run.jitted

    def compiles(self, batch: Batch) -> bool:
        """Whether these shapes are new, so that `program` takes a while."""
        return shapes_of(dict(batch)) not in self._programs

    def losses(self, state: TrainState, batch: Batch) -> Losses:
        """The losses of a batch, without a step."""
        return self.objective(self.merge(state.params, state.frozen), batch, None, None, 1.0)[1]

    def base(self) -> dict[str, Array]:
        """The frozen arrays that no step changes and no checkpoint holds."""
        return {name: value for name, value in self._start[1].items() if name not in self._moving}

    def saved(self, state: TrainState) -> dict[str, Any]:
        """The arrays that a checkpoint needs: all but frozen variables that never change, such as adapted kernels."""
        moments = dict(zip(moment_paths(state.moments), jax.tree.leaves(state.moments), strict=True))
        moving = {name: state.frozen[name] for name in self._moving}
        return {"step": state.step, "key": state.key, "params": state.params, "moving": moving, "moments": moments}

    def restored(self, arrays: Mapping[str, Any]) -> TrainState:
        """The state from the arrays of a checkpoint; variables that were not saved come from the model. Nothing is
        copied twice, so resuming takes no more memory than starting."""
        leaves = [arrays["moments"][path] for path in moment_paths(self.places.moments)]  # dicts sort them by path
        moments = jax.tree.unflatten(jax.tree.structure(self.places.moments), leaves)
        copied = JitProgram(lambda kept: jax.tree.map(jnp.copy, kept), out_shardings=self.places.frozen)
        frozen = copied(self._start[1]) | dict(arrays["moving"])
        return TrainState(arrays["step"], dict(arrays["params"]), frozen, moments, arrays["key"])

    def merge(self, params: Mapping[str, Array], frozen: Mapping[str, Array]) -> CausalLM:
        """A model with these values."""
        found = [
            (path, variable.replace(values[name]))
            for group, values in ((self._params, params), (self._frozen, frozen))
            for name, (path, variable) in group.items()
        ]
        return nnx.merge(self.graph, nnx.from_flat_state(found))

    def model(self, state: TrainState) -> CausalLM:
        """A model with the values of a state, in the dtypes of the original model."""
        stored = {name: value.astype(self.dtypes[name]) for name, value in state.params.items()}
        return self.merge(stored, state.frozen)

    def _step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, Report]:
        key, later = jax.random.split(state.key)
        grads, losses = self._gradients(state, batch, key)
        finite = jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads.values()])
        good, skips = jnp.all(finite), skipped_steps(state.moments) is not None

        def total(params: Any) -> Float[Array, ""]:  # line searches need the loss of other parameters
            return self._accumulated(functools.partial(self._loss, state.frozen, params), batch, key)[0]

        def update() -> tuple[Any, Any, Any]:
            updates, moments = self.optimizer.update(
                grads,
                state.moments,
                state.params,
                value=losses.total,
                grad=grads,
                value_fn=total,
            )
            # All zero: updates that `optax.apply_if_finite` has rejected.
            rejected = skips and jnp.all(jnp.stack([jnp.all(update == 0) for update in jax.tree.leaves(updates)]))
            return optax.apply_updates(state.params, updates), moments, rejected

        if skips:  # the optimizer itself rejects updates that are not finite, until there are too many in a row
            params, moments, skipped = update()
            finite |= skipped
        else:  # Not a `where`, for which XLA:CPU copies the old parameters and moments (4 times the update's time).
            params, moments, _ = jax.lax.cond(good, update, lambda: (state.params, state.moments, False))
        frozen = dict(state.frozen)
        for name, rows in self._biases.items() if self.bias_rate else ():
            moved = updated_bias(frozen[name], losses.load[rows], self.bias_rate)
            frozen[name] = jnp.where(good, moved, frozen[name])
        rates = [rate for _, rate in optax.tree.get_all_with_path(moments, "learning_rate") if isinstance(rate, Array)]
        used = utilisation(losses.load, losses.dropped) if len(losses.load) else None
        report = Report(
            losses, optax.tree.norm(grads), finite, used, rates[0] if rates else None, skipped_steps(moments)
        )
        return TrainState(state.step + 1, params, frozen, moments, later), report

    def _gradients(self, state: TrainState, batch: dict[str, Array], key: Array) -> tuple[dict[str, Array], Losses]:
        slope = jax.grad(functools.partial(self._loss, state.frozen), has_aux=True)
        return self._accumulated(functools.partial(slope, state.params), batch, key)

    def _loss(
        self, frozen: dict[str, Array], params: dict[str, Array], part: Any, key: Array, count: Any
    ) -> tuple[Float[Array, ""], Losses]:
        return self.objective(self.merge(params, frozen), part, key, count, 1 / self.accumulate)

    def _accumulated(self, run: Callable[..., Any], batch: dict[str, Array], key: Array) -> Any:
        """The sum of ``run(part, key, count)`` over the parts of a batch."""
        if self.accumulate == 1:
            return run(batch, key, None)
        count = self.objective.count(batch)

        def add(sums: Any, inputs: Any) -> tuple[Any, None]:
            part, key = inputs
            return jax.tree.map(jnp.add, sums, run(part, key, count)), None

        # [B, T] -> [parts, B / parts, T]; every part has rows from every device.
        parts = {
            name: jnp.moveaxis(jnp.reshape(array, (-1, self.accumulate, *array.shape[1:])), 1, 0)
            for name, array in batch.items()
        }
        keys = jax.random.split(key, self.accumulate)
        like = jax.eval_shape(run, jax.tree.map(lambda a: a[0], parts), key, count)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        return jax.lax.scan(add, zeros, (parts, keys))[0]


def _variables(state: Any) -> dict[str, tuple[Any, nnx.Variable]]:
    return {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}


def _biases(model: CausalLM, depths: int) -> dict[str, np.ndarray]:
    """Path of each correction bias -> its rows of the MoE layers' loads: one, or one per layer of a scanned stack.
    Prediction layers have rows only if there are ``depths``."""
    numbers = dict[str, np.ndarray]()
    wanted = RouterBias if depths else nnx.All(RouterBias, nnx.Not(nnx.PathContains("mtp")))
    for name, (path, variable) in _variables(nnx.state(model, wanted)).items():
        stacked = of_layers(axes_of(variable))
        layer = name_of(model, path).layer
        assert layer is not None
        numbers[name] = layer + (np.arange(variable.shape[0]) if stacked else np.asarray(0))
    every = np.unique(np.concatenate([np.ravel(n) for n in numbers.values()])) if numbers else np.zeros(0, int)
    return {name: np.asarray(np.searchsorted(every, found)) for name, found in numbers.items()}
