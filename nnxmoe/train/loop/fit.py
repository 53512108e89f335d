"""Training as one call: steps, checkpoints from which a killed run resumes, evaluation, metrics and callbacks."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
from nnxmoe.model.on_mesh import on_mesh
from nnxmoe.runtime.interrupts import Interrupted, stopping
from nnxmoe.runtime.memory import local_bytes, refuse_beyond_memory
from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.evaluator import Evaluator
from nnxmoe.train.loop.feed import BatchSource
from nnxmoe.train.loop.objective import TrainingObjective
from nnxmoe.train.loop.run import Callback, Fitted, Run
from nnxmoe.train.loop.speed import token_flops
from nnxmoe.train.loop.step import Step
from nnxmoe.train.runs.checkpoints import Checkpoints


def fit(
    model: CausalLM,
    data: Iterable[Batch],
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    keep: int = 3,
    mesh: Mesh | None = None,
    objective: TrainingObjective | Callable[[CausalLM, Batch], Any] | None = None,
    accumulate: int = 1,
    bias_rate: float = 0.0,
    trainable: Any = None,
    evaluate: Iterable[Batch] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Fitted:
    """Train a copy of a model for ``steps`` steps in total.

    ``data`` yields batches, dicts with ``tokens [B, T]`` and optionally `train.loop.batch.FIELDS`; re-iterable data
    restarts when exhausted. ``objective`` defaults to next-token cross-entropy, `train.Objective`; a function ``(model,
    batch) -> scalar`` will do, and then batches are any dicts of arrays ``[B, …]``. ``checkpoint`` is a folder, saved
    to every ``save_every`` steps with the last ``keep`` kept; a run found there is resumed bit for bit, with ``data``
    set to its old position by ``set_state`` (grain's iterators, `train.batches`) or, without that method, by iterating
    up to it. ``trainable`` is an nnx filter; it defaults to the adapters if the model has any, else to `nnx.Param`.
    ``evaluate`` are batches whose cross-entropy is measured every ``evaluate_every`` steps and at the end.
    ``accumulate`` and ``bias_rate`` are those of `Step`.

    The step is compiled once per process for equal models, optimizers and shapes. Ctrl-C stops the training after its
    step, saves a checkpoint and raises Interrupted, which holds what `fit` would have returned. Raises NotFinite if a
    gradient is NaN or infinite, and ValueError for unusable arguments or data.
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
    if trainable is None:
        adapted = bool(jax.tree.leaves(nnx.state(model, LoRAParam)))
        if not adapted and jax.tree.leaves(nnx.state(model, QuantizedArray)):
            raise ValueError(
                "the model's kernels are quantised and cannot be trained: add adapters (train.lora.add), name what to "
                "train (trainable=…), or make them floats (nnxmoe.dequantize)"
            )
        trainable = LoRAParam if adapted else nnx.Param
    step = Step(model, optimizer, objective, trainable=trainable, accumulate=accumulate, bias_rate=bias_rate)
    _refuse_beyond_memory(step)
    kept = contextlib.nullcontext() if checkpoint is None else Checkpoints(checkpoint, keep, save_every)
    with stopping() as stop:
        with kept as checkpoints:
            run = Run(step, BatchSource(data), checkpoints, steps, seed, token_flops(model, step.names))
            evaluator = None if evaluate is None else Evaluator(step, evaluate, evaluate_every)
            fitted = run.go(evaluator, callbacks, stop)
        if stop.asked:
            saved = "" if checkpoint is None else f"; saved in {os.fspath(checkpoint)}"
            raise Interrupted(f"interrupted after the last step{saved}", fitted)
        return fitted


def _refuse_beyond_memory(step: Step) -> None:
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
