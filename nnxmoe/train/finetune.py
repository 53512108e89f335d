"""Fine-tune a model on a file of texts or chats, and write the tuned model to a folder.

During the run the folder contains ``finetune.json`` (the task), ``checkpoints`` and
``metrics.jsonl``. A finished run adds the model in transformers' format or the adapter in PEFT's format.
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
_CLIP, _WARMUP, _FLOOR = 1.0, 100, 0.1  # maximum gradient norm, maximum default warmup, final rate / peak rate


@dataclasses.dataclass(frozen=True)
class Finetune(KnownFields):
    """Fine-tuning task: all settings that determine the result.

    Attributes:
        model: Folder or hub id of the model.
        data: JSONL file for `nnxmoe.train.batches`.
        lora: Rank of the adapters. If None, all parameters are trained.
        steps: Total number of steps. Defaults to 200 unless ``epochs`` is set.
        learning_rate: Peak learning rate, reached after ``warmup`` steps and followed by a cosine
            decay to a tenth of the peak. Defaults to 2e-4 for adapters and 2e-5 for all parameters.
            The default is divided by 5 for lion, and by 20 for ``preferences``.
        evaluation: JSONL file of held-out data. Its loss is measured at every checkpoint.
        accumulate: Number of microbatches per batch, for gradient accumulation.
        warmup: Number of warmup steps. Defaults to a tenth of the steps, at most 100.
        lora_alpha: The adapters are scaled by ``lora_alpha / rank``. Defaults to the rank.
        split_rank: Divide the rank of each expert's adapter by the experts per token, see
            `lora.split_ranks`.
        preferences: Train with DPO on pairs in the format of `nnxmoe.train.preferences`. The reference
            is the model without its adapters. Without adapters, the reference is the original model,
            which stays in memory.
        beta: DPO's beta. Defaults to 0.1.
        quantize, keep_quantized: Train adapters on quantized kernels (QLoRA, Dettmers et al. 2023).
            ``quantize`` is a method such as ``int4``, see `quantization.methods.parse_method`.
            Merging dequantizes the kernels.
        optimizer: Name in `OPTIMIZERS`. None of these optimizers uses weight decay.
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
        for name, minimum in _INTEGERS.items():
            if (value := getattr(self, name)) is None and name in optional:
                continue
            if (number := as_integer(value, minimum)) is None:
                raise ValueError(
                    f"{name}={short(value)}: it must be an integer of at least {minimum} and less than 2**32"
                )
            object.__setattr__(self, name, number)
        for name, maximum in {"learning_rate": 1, "lora_alpha": 1e9, "beta": 1e9}.items():
            if (value := getattr(self, name)) is None:
                continue
            if not 0 < (rate := as_number(value) or 0) < maximum:
                raise ValueError(f"{name}={short(value)}: it must be a number between 0 and {maximum:g}")
            object.__setattr__(self, name, rate)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={short(self.optimizer)}: pass one of {', '.join(OPTIMIZERS)}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}")
        adapter_options = ("adapter_only", "lora_alpha", "split_rank", "quantize", "keep_quantized")
        if self.lora is None and (requested := [name for name in adapter_options if getattr(self, name)]):
            raise ValueError(
                f"{requested[0]}={getattr(self, requested[0])} requires adapters: pass their rank, such as lora=16"
            )
        if self.beta is not None and not self.preferences:
            raise ValueError(f"beta={self.beta} requires preferences: pass preferences=True, or omit it")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: pass only one of them")
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
        """Build the optimizer, with gradients clipped to norm 1. Its state contains the learning rate."""
        create, relative_rate = OPTIMIZERS[self.optimizer]
        relative_rate = relative_rate / 20 if self.preferences else relative_rate
        peak = self.learning_rate or relative_rate * (2e-5 if self.lora is None else 2e-4)
        warmup = min(steps // 10, _WARMUP) if self.warmup is None else self.warmup
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if warmup else peak, peak, warmup, max(steps, 1), _FLOOR * peak
        )
        optimizer = optax.inject_hyperparams(lambda learning_rate: create(learning_rate, model))
        return optax.chain(optax.clip_by_global_norm(_CLIP), optimizer(schedule))

    @property
    def objective(self) -> TrainingObjective:
        """Training objective. For preferences without adapters, the batches must be from `with_reference`."""
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
    """Run a fine-tuning task in a new or empty folder, or resume an earlier run of the task in its folder.

    An unfinished run resumes bit for bit. More steps or epochs extend a run and stretch its learning
    rate schedule. A finished run is only evaluated, and only if ``evaluation`` is new. Otherwise returns
    None. ``profile`` steps are traced (see `Profile`). For ``max_bad_fraction`` see `batches`. Raises
    ValueError if the folder contains a different task, and the errors of `fit`.
    """
    folder = absolute_path(out, "out")
    traces = [] if profile is None else [Profile(folder / _PROFILE, profile)]
    checkpoints = Checkpoints(folder / _CHECKPOINTS, every=save_every)
    if broadcast_text(lambda: look(folder, dataclasses.asdict(task))) == "done":
        say("%s: this run has already finished. Pass more steps to extend it", folder)
        return None
    broadcast_text(lambda: refuse_unless_writable(folder) or "")
    check_rows(task.batch_size, mesh)
    if (base := lora.base_model_name(task.model)) is not None:
        merge = f"nnxmoe convert {base} FOLDER --to hf --adapter {task.model}"
        raise CheckpointError(f"{task.model} contains an adapter: merge it with {merge}, and train the merged FOLDER")
    hub: dict[str, Any] = {"revision": task.revision, "local_files_only": local_files_only}
    data, held_out = _encoded(task, Tokenizer.from_pretrained(task.model, **hub), max_bad_fraction)
    length = _row_length(task, hub)
    check_length(length, mesh)
    batches: Any = Batches(data, task.batch_size, length, seed=task.seed, epochs=task.epochs)
    steps = batches.count() if task.steps is None else task.steps
    task.check_warmup(steps)
    eval_batches: Any = held_out and Restartable(
        lambda: Batches(held_out, task.batch_size, length, shuffle=False, epochs=1)
    )
    options: dict[str, Any] = {"quantize": parse_method(task.quantize) if task.quantize else None} | hub
    say("writing the metrics of every step to %s", folder / _METRICS)
    model = from_pretrained(task.model, task.dtype, mesh, _strategy(), keep_quantized=task.keep_quantized, **options)
    say("%s", model.load_report.summary())
    _add_adapters(model, task)
    if task.preferences and task.lora is None:
        batches, eval_batches = (source and with_reference(source, model) for source in (batches, eval_batches))
    fitted = fit(
        model,
        batches,
        optimizer=task.transformation(steps, model),
        steps=steps,
        checkpoint=checkpoints,
        accumulate=task.accumulate,
        evaluate=eval_batches and Evaluation(eval_batches, save_every),
        objective=task.objective,
        callbacks=[_Begin(folder, task), JsonLog(folder / _METRICS), *traces],
        seed=task.seed,
    )
    _write(fitted.model, folder, task)
    broadcast_text(lambda: record(folder, dataclasses.asdict(task), steps))
    return fitted


def _encoded(task: Finetune, tokenizer: Tokenizer, max_bad_fraction: float) -> tuple[Documents, Documents | None]:
    """Encode the documents. Called before the model is loaded, so that errors appear early."""
    document_class = Pairs if task.preferences else Documents
    documents = document_class(task.data, tokenizer, max_bad_fraction)
    held_out = None if task.evaluation is None else document_class(task.evaluation, tokenizer, max_bad_fraction)
    for encoded in filter(None, (documents, held_out)):
        encoded.check()
    return documents, held_out


def _add_adapters(model: CausalLM, task: Finetune) -> None:
    if task.lora is not None:
        rank = lora.split_ranks(model, task.lora) if task.split_rank else task.lora
        lora.add(model, rank, task.lora_alpha, rngs=nnx.Rngs(task.seed))


def _row_length(task: Finetune, hub: Mapping[str, Any]) -> int:
    with Checkpoint.open(task.model, **hub) as checkpoint:
        config, _ = parse_config(checkpoint.config, checkpoint.config_file)
    if (length := min(task.seq_len, config.max_position_embeddings)) < task.seq_len:
        say("rows have %d tokens, the model's maximum context length", length)
    return length


def progress_of(out: str | os.PathLike[str]) -> str:
    """Describe the last checkpoint of an interrupted run, and whether the next run resumes or restarts."""
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
    on_cpu = jax.default_backend() == "cpu"
    return Strategy(stacking=Scanned(), remat=Remat(), compute_dtype=jnp.float32 if on_cpu else None)


def _write(model: CausalLM, folder: Path, task: Finetune) -> None:
    if task.adapter_only:
        lora.save(model, folder, overwrite=True)
        return
    if task.lora is not None:
        lora.merge(model, keep=False)
    save_pretrained(model, folder, overwrite=True)
