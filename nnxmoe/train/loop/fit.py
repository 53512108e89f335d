"""Training as one call: steps, checkpoints from which a killed run resumes, evaluation, metrics and callbacks."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.config.printable import short
from nnxmoe.config.validate import is_positive
from nnxmoe.generation.request import whole_number
from nnxmoe.layers.lora import LoRAParam
from nnxmoe.layers.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.copies import on_mesh
from nnxmoe.runtime.interrupts import Interrupted, stopping
from nnxmoe.runtime.memory import local_bytes, refuse_beyond_memory
from nnxmoe.storage.multihost import in_any_process
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.feed import BatchSource
from nnxmoe.train.loop.measured import Evaluation, token_flops
from nnxmoe.train.loop.objective import TrainingObjective
from nnxmoe.train.loop.run import Callback, Fitted, Run
from nnxmoe.train.loop.step import Step

_SAVE_EVERY = 100  # steps between the checkpoints in a folder


class StepOptions(TypedDict, total=False):
    """Arguments of `Step` that `fit` passes on."""

    objective: TrainingObjective | Callable[[CausalLM, Batch], Any] | None
    trainable: Any
    accumulate: int
    bias_rate: float


def fit(
    model: CausalLM,
    data: Iterable[Batch],
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    evaluate: Iterable[Batch] | Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
    seed: int = 0,
    **options: Unpack[StepOptions],
) -> Fitted:
    """Train a copy of a model.

    The step is compiled once per process for equal models, optimizers and shapes. Ctrl-C stops the training after its
    step, saves a checkpoint and raises Interrupted, which holds what `fit` would have returned.

    Args:
        data: Batches, dicts with ``tokens [B, T]`` and optionally `train.loop.batch.FIELDS`; re-iterable data restarts
            when exhausted.
        optimizer: One of optax, such as ``optax.adamw(1e-4)``, or `train.muon`.
        steps: Number of steps in total, those of an earlier run included.
        checkpoint: A folder, saved to every 100 steps with the last 3 kept, or `Checkpoints` with other numbers. A run
            found there is resumed bit for bit, with ``data`` set to its old position by ``set_state`` (grain's
            iterators, `train.batches`) or, without that method, by iterating up to it.
        evaluate: Batches whose cross-entropy is measured at the end, or `Evaluation`, which measures more often.
        callbacks: Called after each step; see `Callback`.
        options: ``objective``, ``trainable``, ``accumulate`` and ``bias_rate`` of `Step`. ``trainable`` defaults to the
            adapters if the model has any, else to `nnx.Param`.

    Raises:
        NotFinite: If a gradient is NaN or infinite, unless `optax.apply_if_finite` skips the step.
        ValueError: For unusable arguments or data.
    """
    if not is_positive(steps):
        raise ValueError(f"steps={short(steps)}: the number of steps in total must be an int of at least 1")
    seed = whole_number("seed", seed, -(2**63))
    if model.merged is not None:
        raise ValueError(
            "the model has merged adapters: call lora.unmerge(model) to train them, or merge them for good with "
            "lora.merge(model, keep=False)"
        )
    model = model if mesh is None else on_mesh(model, mesh)
    if options.get("trainable") is None:
        options["trainable"] = _trainable(model)
    step = Step(model, optimizer, **options)
    _refuse_unfit(step)
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoints(checkpoint, every=_SAVE_EVERY)
    with stopping() as stop:
        with checkpoint or contextlib.nullcontext() as checkpoints:
            held = evaluate if evaluate is None or isinstance(evaluate, Evaluation) else Evaluation(evaluate)
            given = checkpoints, held, callbacks, stop
            fitted = Run(step, BatchSource(data), steps, seed, token_flops(model, step.names), *given).go()
        if in_any_process(lambda: stop.asked, step.mesh)():
            saved = "" if checkpoints is None else f"; saved in {checkpoints.folder}"
            raise Interrupted(f"interrupted after the last step{saved}", fitted)
        return fitted


def _trainable(model: CausalLM) -> Any:
    """The adapters if the model has any, else its parameters, which must be floats."""
    if jax.tree.leaves(nnx.state(model, LoRAParam)):
        return LoRAParam
    if jax.tree.leaves(nnx.state(model, QuantizedArray)):
        raise ValueError(
            "the model's kernels are quantised and cannot be trained: add adapters (train.lora.add), name what to "
            "train (trainable=…), or make them floats (nnxmoe.dequantize)"
        )
    return nnx.Param


def _refuse_unfit(step: Step) -> None:
    """Raise ValueError for several processes without a mesh, and for a state that does not fit in memory."""
    if step.mesh is None and (count := jax.process_count()) > 1:
        raise ValueError(
            f"mesh=None in a job of {count} processes: each would train a model of its own on its share of the rows; "
            "pass a mesh over all processes, such as mesh=nnxmoe.make_mesh(fsdp=-1)"
        )
    state = step.shapes()
    arrays = [*jax.tree.leaves((state.params, state.frozen, state.moments)), *state.params.values()]  # again: gradients
    need = local_bytes(
        (a.shape, np.float32 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a.dtype, a.sharding) for a in arrays
    )
    refuse_beyond_memory(
        need,
        "training takes, without activations,",
        "train adapters (train.lora.add), fewer parameters (trainable=…) or on more devices (mesh=…)",
    )
