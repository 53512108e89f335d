"""Fine-tune a model with one command, from a file of texts or chats to a folder with the tuned model.

During the run the folder contains ``finetune.json`` (the task), ``checkpoints`` and
``metrics.jsonl``. A finished run adds the model in transformers' format, or the adapter in PEFT's.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, as_number
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import absolute_path
from nnxmoe.convert.hf.pretrained import from_pretrained, save_pretrained
from nnxmoe.convert.storage.atomic_dir import refuse_unless_writable
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.convert.storage.multihost import broadcast_text
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import check_quantize_options, parse_method
from nnxmoe.model.remat import Remat
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import parse_config
from nnxmoe.runtime.progress import say
from nnxmoe.tokenizer.tokenizer import Tokenizer
from nnxmoe.train import lora
from nnxmoe.train.checkpoints import Checkpoints, newest
from nnxmoe.train.data.bad_records import MAX_BAD_FRACTION
from nnxmoe.train.data.batches import LEAST, Batches
from nnxmoe.train.data.documents import Documents, Pairs
from nnxmoe.train.loop.batch import Restartable
from nnxmoe.train.loop.callbacks import JsonLog, Profile
from nnxmoe.train.loop.feed import check_length, check_rows
from nnxmoe.train.loop.fit import fit
from nnxmoe.train.loop.interface import Fitted, Progress
from nnxmoe.train.loop.measured import Evaluation
from nnxmoe.train.loop.objective import Objective, TrainingObjective
from nnxmoe.train.loop.optimizers import OPTIMIZERS
from nnxmoe.train.loop.preference import DPO, with_reference
from nnxmoe.train.task_record import look, record

_METRICS, _CHECKPOINTS, _PROFILE = "metrics.jsonl", "checkpoints", "profile"
_STEPS = 200
_INTEGERS = {**LEAST, "accumulate": 1, "lora": 1, "steps": 1, "warmup": 0}
_CLIP, _WARMUP, _FLOOR = 1.0, 100, 0.1  # maximum gradient norm; maximum of default warmup steps; final / peak rate


@dataclasses.dataclass(frozen=True)
class Finetune(KnownFields):
    """A fine-tuning task: everything that determines the result.

    Attributes:
        model: Folder or hub id.
        data: JSONL file for `nnxmoe.train.batches`.
        lora: Rank of the adapters. If None, all parameters are trained.
        steps: Total number of steps. Defaults to 200 unless ``epochs`` is set.
        learning_rate: Peak learning rate, reached after ``warmup`` steps and followed by a cosine
            decay to a tenth. Defaults to 2e-4 for adapters and 2e-5 for all parameters. The default
            is a fifth of that for lion, and a twentieth for ``preferences``.
        evaluation: JSONL file whose cross-entropy is measured with every checkpoint.
        accumulate: Number of parts that each batch is split into to save memory.
        warmup: Number of warmup steps. Defaults to a tenth of the steps, at most 100.
        lora_alpha: Scales the adapters by ``alpha / rank``. Defaults to the rank.
        split_rank: Divides the rank of each expert's adapter by the experts per token, see
            `lora.split_ranks`.
        preferences: The data are pairs for `nnxmoe.train.preferences`, trained on by DPO. The
            reference is the model without its adapters. Without adapters it is the original model,
            which stays in memory.
        beta: DPO's beta. Defaults to 0.1.
        quantize, keep_quantized: Train adapters on quantized kernels (QLoRA, Dettmers et al. 2023).
            ``quantize`` is a method such as ``int4``, see `quantization.methods.parse_method`.
            Merging converts the kernels to floats.
        optimizer: One of `OPTIMIZERS`, without weight decay.
    """

    model: str
    data: str
    lora: int | None = None
    steps: int | None = None
    batch_size: int = 8
    seq_len: int = 512
    learning_rate: float | None = None
    epochs: int | None = None
    evaluation: str | None = None
    accumulate: int = 1
    warmup: int | None = None
    lora_alpha: float | None = None
    split_rank: bool = False
    preferences: bool = False
    beta: float | None = None
    seed: int = 0
    adapter_only: bool = False
    dtype: str | None = None
    revision: str | None = None
    quantize: str | None = None
    keep_quantized: bool = False
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        for name, least in _INTEGERS.items():
            if (value := getattr(self, name)) is None and name in optional:
                continue
            if (number := as_integer(value, least)) is None:
                raise ValueError(f"{name}={short(value)}: it must be an integer of at least {least}, below 2**32")
            object.__setattr__(self, name, number)
        for name, most in {"learning_rate": 1, "lora_alpha": 1e9, "beta": 1e9}.items():
            if (value := getattr(self, name)) is None:
                continue
            if not 0 < (rate := as_number(value) or 0) < most:
                raise ValueError(f"{name}={short(value)}: it must be a number between 0 and {most:g}")
            object.__setattr__(self, name, rate)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={short(self.optimizer)}: pass one of {', '.join(OPTIMIZERS)}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}")
        needs = ("adapter_only", "lora_alpha", "split_rank", "quantize", "keep_quantized")
        if self.lora is None and (named := [name for name in needs if getattr(self, name)]):
            raise ValueError(f"{named[0]}={getattr(self, named[0])} is for adapters: give their rank, such as lora=16")
        if self.beta is not None and not self.preferences:
            raise ValueError(f"beta={self.beta} is for preferences: pass preferences=True, or leave it out")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: pass one of them")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", _STEPS)
        self.check_warmup(self.steps)
        float_dtype(self.dtype)
        check_quantize_options(parse_method(self.quantize) if self.quantize else None, self.keep_quantized)

    def check_warmup(self, steps: int | None) -> None:
        """Raise ValueError if the run would end before its warmup."""
        if self.warmup and steps and self.warmup >= steps:
            raise ValueError(f"warmup={self.warmup}: it must be less than the {steps} steps")

    def transformation(self, steps: int, model: CausalLM) -> optax.GradientTransformation:
        """Build the optimizer, with gradients clipped to norm 1. Its state has the learning rate."""
        make, share = OPTIMIZERS[self.optimizer]
        share = share / 20 if self.preferences else share
        peak = self.learning_rate or share * (2e-5 if self.lora is None else 2e-4)
        warmup = min(steps // 10, _WARMUP) if self.warmup is None else self.warmup
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if warmup else peak, peak, warmup, max(steps, 1), _FLOOR * peak
        )
        scheduled = optax.inject_hyperparams(lambda learning_rate: make(learning_rate, model))
        return optax.chain(optax.clip_by_global_norm(_CLIP), scheduled(schedule))

    @property
    def objective(self) -> TrainingObjective:
        """The objective. For preferences without adapters it needs batches from `with_reference`."""
        reference = None if self.lora is None else lora.without
        return DPO(reference, 0.1 if self.beta is None else self.beta) if self.preferences else Objective()


def finetune(
    task: Finetune,
    out: str | os.PathLike[str],
    *,
    save_every: int = 100,
    mesh: Mesh | None = None,
    local_files_only: bool = False,
    profile: int | None = None,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> Fitted | None:
    """Run a task in the folder ``out``. It must be new, empty or from a run of the same task.

    An unfinished run resumes bit for bit. More steps or epochs extend a run, with the learning rate
    of the longer schedule. A finished run is evaluated if ``evaluation`` is new. Otherwise the result
    is None. ``profile`` is the number of steps to trace into the folder, see `Profile`. Up to
    ``max_bad_fraction`` of a file's records are skipped if they are unusable, see `batches`. Raises
    ValueError if the folder has a different task, and the errors of `fit`.
    """
    folder = absolute_path(out, "out")
    traces = [] if profile is None else [Profile(folder / _PROFILE, profile)]
    saved = Checkpoints(folder / _CHECKPOINTS, every=save_every)
    if broadcast_text(lambda: look(folder, dataclasses.asdict(task))) == "done":
        say("%s: this run is already finished; more steps extend it", folder)
        return None
    broadcast_text(lambda: refuse_unless_writable(folder) or "")
    check_rows(task.batch_size, mesh)
    if (base := lora.base_model_name(task.model)) is not None:
        merge = f"nnxmoe convert {base} FOLDER --to hf --adapter {task.model}"
        raise CheckpointError(f"{task.model} holds an adapter: merge it with {merge}, and train that FOLDER")
    hub: dict[str, Any] = {"revision": task.revision, "local_files_only": local_files_only}
    data, held = _encoded(task, Tokenizer.from_pretrained(task.model, **hub), max_bad_fraction)
    length = _row_length(task, hub)
    check_length(length, mesh)
    batches: Any = Batches(data, task.batch_size, length, seed=task.seed, epochs=task.epochs)
    steps = batches.count() if task.steps is None else task.steps
    task.check_warmup(steps)
    evaluated: Any = held and Restartable(lambda: Batches(held, task.batch_size, length, shuffle=False, epochs=1))
    how: dict[str, Any] = {"quantize": parse_method(task.quantize) if task.quantize else None} | hub
    say("metrics of every step are written to %s", folder / _METRICS)
    model = from_pretrained(task.model, task.dtype, mesh, _strategy(), keep_quantized=task.keep_quantized, **how)
    say("%s", model.load_report.summary())
    _add_adapters(model, task)
    if task.preferences and task.lora is None:
        batches, evaluated = (given and with_reference(given, model) for given in (batches, evaluated))
    done = fit(
        model,
        batches,
        optimizer=task.transformation(steps, model),
        steps=steps,
        checkpoint=saved,
        accumulate=task.accumulate,
        evaluate=evaluated and Evaluation(evaluated, save_every),
        objective=task.objective,
        callbacks=[_Begin(folder, task), JsonLog(folder / _METRICS), *traces],
        seed=task.seed,
    )
    _write(done.model, folder, task)
    broadcast_text(lambda: record(folder, dataclasses.asdict(task), steps))
    return done


def _encoded(task: Finetune, tokenizer: Tokenizer, max_bad_fraction: float) -> tuple[Documents, Documents | None]:
    """Encode the documents. The call precedes loading the model, so that errors appear early."""
    kind = Pairs if task.preferences else Documents
    documents = kind(task.data, tokenizer, max_bad_fraction)
    held = None if task.evaluation is None else kind(task.evaluation, tokenizer, max_bad_fraction)
    for each in filter(None, (documents, held)):
        each.check()
    return documents, held


def _add_adapters(model: CausalLM, task: Finetune) -> None:
    if task.lora is not None:
        rank = lora.split_ranks(model, task.lora) if task.split_rank else task.lora
        lora.add(model, rank, task.lora_alpha, rngs=nnx.Rngs(task.seed))


def _row_length(task: Finetune, hub: Mapping[str, Any]) -> int:
    with Checkpoint.open(task.model, **hub) as checkpoint:
        config, _ = parse_config(checkpoint.config, checkpoint.config_file)
    if (length := min(task.seq_len, config.max_position_embeddings)) < task.seq_len:
        say("rows have %d tokens, the longest context of the model", length)
    return length


def progress_of(out: str | os.PathLike[str]) -> str:
    """Describe what an interrupted run has saved, with the verb for running its command again."""
    step = newest(absolute_path(out, "out") / _CHECKPOINTS)
    return f"after step {step} (saved); resume" if step else "before a step was saved; start again"


@dataclasses.dataclass
class _Begin:
    """Callback that records the task after the first successful step."""

    folder: Path
    task: Finetune
    done: bool = False

    late: ClassVar[bool] = True

    def __call__(self, progress: Progress) -> None:
        if not self.done:
            broadcast_text(lambda: record(self.folder, dataclasses.asdict(self.task), None))
            self.done = True


def _strategy() -> Strategy:
    """Scan and rematerialize the layers. On CPUs, where bfloat16 is slow, compute in float32."""
    narrow = jax.default_backend() == "cpu"
    return Strategy(stacking=Scanned(), remat=Remat(), compute_dtype=jnp.float32 if narrow else None)


def _write(model: CausalLM, folder: Path, task: Finetune) -> None:
    if task.adapter_only:
        lora.save(model, folder, overwrite=True)
        return
    if task.lora is not None:
        lora.merge(model, keep=False)
    save_pretrained(model, folder, overwrite=True)
