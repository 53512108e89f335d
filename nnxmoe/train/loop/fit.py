"""Train a model with one call: steps, resumable checkpoints, evaluation, metrics and callbacks."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_type, iterator_of, whole_number
from nnxmoe.convert.storage.multihost import any_process
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.copies import on_mesh, with_rules
from nnxmoe.runtime.interrupts import Interrupted, stopping
from nnxmoe.sharding import batch_axes
from nnxmoe.sharding_rules import shard_count, training_rules
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.feed import BatchSource
from nnxmoe.train.loop.interface import Callback, Fitted
from nnxmoe.train.loop.measured import Evaluation, token_flops
from nnxmoe.train.loop.memory_limit import BatchLimit, refuse_state, size_of_batches
from nnxmoe.train.loop.objective import SampledObjective, TrainingObjective
from nnxmoe.train.loop.run import Run
from nnxmoe.train.loop.step import Step


class StepArguments(TypedDict, total=False):
    """Arguments that `fit` passes to `Step`."""

    objective: TrainingObjective | Callable[[CausalLM, Batch], Any] | None
    trainable: Any
    accumulate: int
    bias_rate: float


@reject_unknown_arguments
def fit(
    model: CausalLM,
    data: Iterable[Batch] | Iterable[Sequence[Mapping[str, Any]]],
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    evaluate: Iterable[Batch] | Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
    seed: int = 0,
    **options: Unpack[StepArguments],
) -> Fitted:
    """Train a copy of a model.

    A later call with an equal model, optimizer, objective and shapes does not compile again. The last
    64 programs are cached and compared by value, see `runtime.static_key`. Without ``mesh``, arrays
    stay on their current devices. Ctrl-C stops the training after the current step, saves a checkpoint
    and raises Interrupted with the result so far.

    Args:
        data: Batches as dicts with ``tokens [B, T]`` and optionally other `train.loop.batch.FIELDS`.
            Re-iterable data restarts when exhausted. For `GRPO`, lists of prompt records, see `train.prompts`.
        optimizer: An optax optimizer such as ``optax.adamw(1e-4)``, or `train.muon`.
        steps: Total number of steps, including the steps of an earlier run.
        checkpoint: A folder, or `Checkpoints`. In a folder, a checkpoint is saved every 100 steps (rounded up to a
            multiple of ``minibatches``) and the last 3 are retained. An earlier run in the folder resumes bit for bit.
            ``data`` resumes by ``set_state`` (grain's iterators, `train.batches`), or else by skipping batches. If the
            earlier run has finished, ``history`` has the metrics of its last step.
        evaluate: Held-out batches. ``eval_loss`` (cross-entropy) is measured at the end, even if an
            earlier run has finished. Pass an `Evaluation` to measure it more often. Not supported with `GRPO`.
        callbacks: Called after each step, see `Callback`.
        mesh: Mesh to train on. Defaults to the mesh of the model's strategy. If the strategy has the default `RULES`,
            `training_rules` replaces them. The new rules need less memory on meshes with several expert shards.
        options: ``objective``, ``trainable``, ``accumulate`` and ``bias_rate`` of `Step`.
            ``trainable`` defaults to the adapters if the model has any, else to `nnx.Param`.

    Raises:
        NotFinite: If a gradient is NaN or infinite, unless `optax.apply_if_finite` skips the step.
        ValueError: If arguments or data are invalid, or if the model or a batch cannot fit in
            memory. Memory is checked before compilation.
    """
    callbacks = _functions(callbacks)
    steps, seed = whole_number("steps", steps, 1, 2**31), whole_number("seed", seed, -(2**63))
    model = _on_training_mesh(model, mesh)
    step = _step(model, optimizer, options)
    data = _rollout_batches(data, step, seed, evaluate)
    limit = _limit(step, model, data)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        stride = getattr(data, "stride", 1)
        checkpoint = Checkpoints(checkpoint, every=-(-100 // stride) * stride)
    with stopping() as stop:
        with checkpoint or contextlib.nullcontext() as checkpoints:
            evaluation = evaluate if evaluate is None or isinstance(evaluate, Evaluation) else Evaluation(evaluate)
            run_arguments = limit, checkpoints, evaluation, callbacks, stop
            fitted = Run(step, BatchSource(data), steps, seed, token_flops(model, step.names), *run_arguments).go()
        if any_process(lambda: stop.asked, step.mesh)():
            saved = "" if checkpoints is None else f"; saved in {checkpoints.folder}"
            raise Interrupted(f"interrupted after the last step{saved}", fitted)
        return fitted


def _functions(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    functions = tuple(iterator_of("callbacks", callbacks, "a list of functions"))
    if not all(map(callable, functions)):
        raise ValueError(f"callbacks={short(callbacks)}: pass a list of functions")
    return functions


def _on_training_mesh(model: CausalLM, mesh: Mesh | None) -> CausalLM:
    """Return the model on the mesh, by default its own, with `training_rules`, unless it has adapters.

    If the model is already on this mesh, its arrays are not resharded. The state of the step has the new shardings.
    """
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    if mesh is None and (mesh := model.strategy.mesh) is None:
        return model
    check_type("mesh", mesh, Mesh, "a mesh, such as nnxmoe.make_mesh(fsdp=8)")
    has_adapters = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    rules = model.strategy.rules if has_adapters else training_rules(model, mesh, model.strategy.rules)
    if mesh != model.strategy.mesh:
        return on_mesh(model, mesh, rules)
    return model if rules == model.strategy.rules else with_rules(model, rules)


def _step(model: CausalLM, optimizer: optax.GradientTransformation, options: StepArguments) -> Step:
    """Create the step for a model. Raises ValueError if the model has merged adapters."""
    if model.merged is not None:
        raise ValueError(
            "the model has merged adapters: call lora.unmerge(model) to train them, or merge them permanently "
            "with lora.merge(model, keep=False)"
        )
    if options.get("trainable") is None:
        options["trainable"] = _trainable(model)
    return Step(model, optimizer, **options)


def _rollout_batches(data: Iterable[Any], step: Step, seed: int, evaluate: Any) -> Iterable[Batch]:
    """Return `Rollouts` of the prompts in ``data`` if the objective samples its batches, else ``data``."""
    if not isinstance(step.objective, SampledObjective):
        return data
    if evaluate is not None:
        raise ValueError(
            f"evaluate: {type(step.objective).__name__} has no loss of held-out batches. Compute the reward of "
            "held-out prompts in a callback, with nnxmoe.complete(progress.model(), …)"
        )
    microbatches = 1 if step.pipeline is None else step.pipeline.microbatches
    shards = shard_count(step.mesh, batch_axes(step.mesh))
    multiple = math.lcm(shards * step.accumulate * microbatches, jax.process_count())
    return step.objective.rollouts(data, seed, multiple)


def _trainable(model: CausalLM) -> Any:
    """Return the filter of the adapters if the model has any, else of its parameters.

    Raises ValueError if the model has quantized kernels and no adapters.
    """
    if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        return nnx.LoRAParam
    if jax.tree.leaves(nnx.state(model, QuantizedArray)):
        raise ValueError(
            "the model's kernels are quantized and cannot be trained: add adapters (train.lora.add), select other "
            "parameters (trainable=…), or dequantize the kernels (nnxmoe.dequantize)"
        )
    return nnx.Param


def _limit(step: Step, model: CausalLM, data: Any) -> BatchLimit:
    """Compute the limit on the batch size.

    Raises ValueError if there are several processes but no mesh, or if the state or batches of known size cannot
    fit in memory.
    """
    if step.mesh is None and (count := jax.process_count()) > 1:
        raise ValueError(
            f"mesh=None in a job of {count} processes: each process would train a separate model on its rows. "
            "Pass a mesh over all processes, such as mesh=nnxmoe.make_mesh(fsdp=-1)"
        )
    limit = BatchLimit.of(step, model, refuse_state(step))
    if (size := size_of_batches(data)) is not None:
        limit.refuse(size)
    return limit
