"""Training step as one compiled program: gradients, optimizer update, and correction-bias update."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from nnxmoe.config.printable import short
from nnxmoe.config.validate import real_number, whole_number
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import replicated_place, require_values
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.programs import JitProgram, shapes_of, shared_program
from nnxmoe.sharding import batch_sharding
from nnxmoe.train.loop.batch import Batch, as_arrays, rows_of
from nnxmoe.train.loop.definition import Report, StepDefinition, TrainState, Variables, merged, variables_of
from nnxmoe.train.loop.objective import Objective, RouterLosses, TrainingObjective, of_function
from nnxmoe.train.loop.optimizers import moment_paths, moment_shardings


class Step:
    """Training step ``(state, batch) -> (state, report)`` for a model and an optimizer.

    The step donates the state. Parameters are stored in float32. Activations have the model's dtype.
    Multi-token prediction layers are trained if `Objective.mtp` is not 0. The optimizer receives
    ``value``, ``grad`` and ``value_fn`` if it accepts them.

    Args:
        trainable: NNX filter that selects the trained variables.
        accumulate: Number of microbatches per batch. They are processed sequentially. The accumulated
            gradients are equal to the gradients of the whole batch.
        bias_rate: Step size of the routers' correction-bias update (u in Wang et al. 2024). This update
            follows the optimizer's update.
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
        try:
            nnx.filterlib.to_predicate(trainable)
        except (TypeError, ValueError):
            raise ValueError(f"trainable={short(trainable)}: pass an NNX filter, such as nnx.Param") from None
        accumulate = whole_number("accumulate", accumulate, 1, 2**31)
        bias_rate = real_number("bias_rate", bias_rate, 0)
        if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
            raise ValueError(f"optimizer={optimizer!r}: pass an optax optimizer, such as optax.adam(1e-4)")
        self.optimizer, self.objective = optax.with_extra_args_support(optimizer), of_function(objective or Objective())
        if isinstance(self.objective, RouterLosses):
            self.objective = self.objective.of_model(model)
            # Freeze unused parameters: weight decay would shrink them, and their moments would use memory.
            unused = ("indexer",) if getattr(self.objective, "depths", 0) else ("indexer", "mtp")
            trainable = nnx.All(trainable, *(nnx.Not(nnx.PathContains(name)) for name in unused))
        if bias_rate and not isinstance(self.objective, RouterLosses):
            raise ValueError(
                "bias_rate needs the experts' loads, but a function objective does not report them: set bias_rate to 0"
            )
        self.accumulate, self.mesh, self.vocab = accumulate, model.strategy.mesh, model.config.vocab_size
        self.pipeline = model.strategy.pipeline
        self.definition = StepDefinition(model, self.optimizer, self.objective, trainable, accumulate, bias_rate)
        self._graph, *states = nnx.split(model, trainable, ...)
        self._params, self._frozen = map(variables_of, states)
        self.names = tuple(self._params)  # dotted paths, in the order of `Report.finite`
        self._start = [{n: v.get_value() for n, (_, v) in group.items()} for group in (self._params, self._frozen)]
        if not self._params:
            raise ValueError(
                f"the model has no variable that matches trainable={trainable!r}: pass an NNX filter, such as "
                "nnx.PathContains('router') or nnx.Param"
            )
        self.dtypes = {name: variable.dtype for name, (_, variable) in self._params.items()}
        self._places, self.replicated = _places(model, {**self._params, **self._frozen})
        self._moving = [n for n, (_, v) in self._frozen.items() if isinstance(v, RouterBias | nnx.RngState)]
        self._programs: dict[Any, Any] = {}  # keyed by batch shapes only: hashing a whole state per step is slow
        out_shardings = self.places, None
        self._run = self.shared(
            "step", self.definition.step, "the training step", donate_argnums=0, out_shardings=out_shardings
        )

    def shared(self, what: str, function: Callable[..., Any], name: str | None = None, **options: Any) -> JitProgram:
        """Return the program of a `StepDefinition` function. Equal steps share it, see `shared_program`."""
        key = self.definition.key
        return shared_program(key and (what, key), function, name, **options)

    def init(self, seed: int = 0) -> TrainState:
        """Create the initial state, with copies of the model's arrays.

        Raises ValueError if the model is abstract.
        """
        require_values(jax.tree.leaves(self._start))
        program = self.shared("init", self.definition.init, out_shardings=self.places)
        return program(*self._start, jax.random.key(seed))

    def shapes(self) -> TrainState:
        """Return the initial state as abstract arrays with shardings."""
        return jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), self._shapes, self.places
        )

    @functools.cached_property
    def _shapes(self) -> TrainState:
        # The key is abstract. A concrete key would be computed on the default device, which may not be attached.
        return jax.eval_shape(self.definition.init, *self._start, jax.eval_shape(jax.random.key, 0))

    @functools.cached_property
    def places(self) -> Any:
        """Sharding of each array of a state, see `moment_shardings`."""
        replicated, shapes = self.replicated, self._shapes
        params = {name: self._places[name] for name in self._params}
        moments = moment_shardings(shapes.moments, shapes.params, params, replicated)
        return TrainState(replicated, params, {name: self._places[name] for name in self._frozen}, moments, replicated)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Run one step. Raises ValueError if the batch is malformed."""
        batch = as_arrays(batch)
        self.objective.check(batch)
        return self.run(state, batch)

    def run(self, state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        """Run one step with a batch that has passed the objective's ``check``."""
        if any(isinstance(leaf, Tracer) for leaf in (state.step, *batch.values())):
            return self.definition.step(state, dict(batch))
        return self.program(state, batch)(state, dict(batch))

    def program(self, state: TrainState, batch: Batch) -> Any:
        """Return the step compiled for batches of these shapes.

        Equal steps share the program, see `StepDefinition.key`. Raises ValueError if ``accumulate`` does not divide
        the number of rows.
        """
        self._check_rows(batch)
        if (shapes := shapes_of(dict(batch))) not in self._programs:
            self._programs[shapes] = self._run.prepare(state, dict(batch))
        return self._programs[shapes]

    @property
    def jitted(self) -> Any:
        """The ``jax.jit`` function ``(state, batch) -> (state, report)``, for tracing and lowering."""
        return self._run.jitted

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Lower the step for batches of these shapes, to compile it ahead of time.

        The model may be abstract, and the devices of its mesh need not be attached. For example, pass the devices of
        `jax.experimental.topologies.get_topology_desc` to `make_mesh`, and use ``Strategy.auto("tpu")``. For TPU v4 and
        v5p slices of whole cubes of 4x4x4 chips, pass ``wrap=(True, True, True)``, because their rings are closed.

        Args:
            batch: Arrays or `jax.ShapeDtypeStruct` by field name such as ``tokens``, usually int32 ``[B, T]``.

        Returns:
            The lowered step. ``lower(batch).compile().memory_analysis()`` returns the bytes per device.

        Raises:
            ValueError: If the batch is malformed, or if ``accumulate`` or the mesh does not divide the number of rows.
        """
        arguments = self.shapes(), self.batch_shapes(batch)
        if self.mesh is None:
            return self.jitted.lower(*arguments)
        with jax.default_device(self.mesh.devices.flat[0]):  # kernels check the capabilities of the default device
            return self.jitted.lower(*arguments)

    def batch_shapes(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch as abstract arrays, with rows and tokens sharded over the mesh.

        Raises ValueError if the batch is malformed, or if ``accumulate`` does not divide the number of rows.
        """
        batch = as_arrays(batch)
        self.objective.check(batch)
        self._check_rows(batch)
        shapes = {name: jax.ShapeDtypeStruct(np.shape(array), array.dtype) for name, array in batch.items()}
        if self.mesh is None:
            return shapes
        return {name: shape.update(sharding=batch_sharding(shape.shape, self.mesh)) for name, shape in shapes.items()}

    def _check_rows(self, batch: Batch) -> None:
        rows = rows_of(batch)
        if rows % self.accumulate:
            raise ValueError(
                f"a batch of {rows} rows cannot be split into accumulate={self.accumulate} parts: use a "
                f"divisor of {rows}"
            )

    def compiles(self, batch: Batch) -> bool:
        """Check whether `program` may compile, because the batch has new shapes."""
        return shapes_of(dict(batch)) not in self._programs

    def base(self) -> dict[str, Array]:
        """Return the frozen arrays that steps do not change. Checkpoints do not contain these arrays."""
        return {name: value for name, value in self._start[1].items() if name not in self._moving}

    def saved(self, state: TrainState) -> dict[str, Any]:
        """Return the arrays for a checkpoint.

        Frozen variables that never change, such as adapted kernels, are omitted.
        """
        moments = dict(zip(moment_paths(state.moments), jax.tree.leaves(state.moments), strict=True))
        moving = {name: state.frozen[name] for name in self._moving}
        return {"step": state.step, "key": state.key, "params": state.params, "moving": moving, "moments": moments}

    def restored(self, arrays: Mapping[str, Any]) -> TrainState:
        """Build a state from the arrays of a checkpoint. Variables that were not saved come from the model.

        No array is copied twice, so resuming needs no more memory than starting.
        """
        leaves = [
            arrays["moments"][path] for path in moment_paths(self.places.moments)
        ]  # pytree dicts are sorted by path
        moments = jax.tree.unflatten(jax.tree.structure(self.places.moments), leaves)
        copy_arrays = shared_program("copies", _copies, out_shardings=self.places.frozen)
        frozen = copy_arrays(self._start[1]) | dict(arrays["moving"])
        return TrainState(arrays["step"], dict(arrays["params"]), frozen, moments, arrays["key"])

    def model(self, state: TrainState) -> CausalLM:
        """Build a model with the values of a state, in the dtypes of the original model."""
        stored = {name: value.astype(self.dtypes[name]) for name, value in state.params.items()}
        return merged(self._graph, (self._params, stored), (self._frozen, state.frozen))


def _copies(arrays: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(jnp.copy, arrays)


def _places(model: CausalLM, variables: Variables) -> tuple[dict[str, Any], Any]:
    """Return the sharding of each variable, and the sharding of replicated arrays.

    Without a mesh, committed arrays keep their shardings, and other arrays are replicated over the same devices. If no
    array is committed, all arrays keep their shardings. Raises ValueError if arrays are on different devices, or on a
    mesh with explicit axes.
    """
    if (mesh := model.strategy.mesh) is not None:
        places = {n: model.strategy.sharding_of(v) or v.get_value().sharding for n, (_, v) in variables.items()}
        return places, NamedSharding(mesh, PartitionSpec())
    values = {name: variable.get_value() for name, (_, variable) in variables.items()}
    places = {name: value.sharding for name, value in values.items()}
    replicated = replicated_place(values.values())
    if replicated is None:
        return places, next(iter(places.values()))
    axis_types = replicated.mesh.axis_types if isinstance(replicated, NamedSharding) else ()
    if replicated.num_devices > 1 and AxisType.Explicit in axis_types:
        raise ValueError(
            "the model's arrays are on a mesh with explicit axes: create it with "
            "axis_types=(jax.sharding.AxisType.Auto, …), or pass mesh=, such as mesh=nnxmoe.make_mesh(fsdp=-1)"
        )
    places = {name: place if getattr(values[name], "committed", True) else replicated for name, place in places.items()}
    if misplaced := [name for name, place in places.items() if place and place.device_set != replicated.device_set]:
        raise ValueError(
            f"{misplaced[0]} is on different devices than other arrays of the model: pass mesh=, such as "
            "mesh=nnxmoe.make_mesh(fsdp=-1), or put all arrays on the same devices"
        )
    return places, replicated
