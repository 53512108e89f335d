"""Hugging Face checkpoints: a folder or hub id becomes a model, and a model a folder that transformers loads.

The path is straight: config.json -> config -> abstract model (shapes only) -> for each parameter its row of the
table -> the bytes that this process's devices need -> one array on its devices. Nothing is left at a random value.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nnxmoe.axes import Rules
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short, some
from nnxmoe.convert.check import refuse
from nnxmoe.convert.dtypes import float_dtype
from nnxmoe.convert.fill import fill
from nnxmoe.convert.hf_layout import EMBED, HEAD, judge, layout, refuse_unjustified
from nnxmoe.convert.hf_source import stored
from nnxmoe.convert.layout import Leaf, arrays_of
from nnxmoe.convert.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.report import LoadReport
from nnxmoe.convert.side_files import check_generation, parse_config, write_side_files
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import model_class
from nnxmoe.runtime.progress import bytes_bar, logger
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.multihost import shared_folder
from nnxmoe.storage.safetensors import TensorInfo, dtype_code
from nnxmoe.storage.write import Tensors, write_shares


def from_pretrained(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    *,
    rules: Rules | None = None,
    expect: type[CausalLM] | None = None,
) -> CausalLM:
    """A model with the weights of a folder or hub id, and a ``load_report`` of every tensor.

    ``dtype`` None: as stored, FP8 blocks as bfloat16; DeepSeek's correction bias stays float32 whatever is asked.
    ``mesh`` and ``rules`` (None: the strategy's): parameters are split over the mesh by the rules, and each process
    reads only what its devices hold.
    Raises CheckpointError or ConfigError (ValueErrors) naming the file, tensor or field, and LoadError, which lists
    every missing tensor and wrong shape at once.
    """
    dtype = float_dtype(dtype)
    with Checkpoint.open(path_or_hub_id, revision=revision, local_files_only=local_files_only) as checkpoint:
        config, notes = _config(checkpoint)
        kind = model_class(config)
        if expect is not None and not issubclass(kind, expect):
            raise CheckpointError(
                f"{checkpoint.folder} holds a {config.model_type} model: use {kind.__name__}.from_pretrained "
                f"or nnxmoe.from_pretrained, not {expect.__name__}.from_pretrained"
            )
        where = str(checkpoint.folder / "config.json")
        found = stored(checkpoint.tensors, checkpoint.config, where, checkpoint)
        refuse_unjustified(config, found, where)
        strategy = strategy or Strategy.auto()
        mesh, rules = strategy.mesh if mesh is None else mesh, strategy.rules if rules is None else rules
        strategy = dataclasses.replace(strategy, mesh=mesh, rules=rules)
        model = kind(config, strategy, rngs=None)
        folder = str(checkpoint.folder)
        restore(model, layout(model, found), found, dtype, LoadReport(folder, notes=tuple(notes), files=folder))
        model.generation_config = FrozenDict(checkpoint.generation_config)
        return model


def restore(model: CausalLM, leaves: Mapping[str, Leaf], arrays: LazyArrays, dtype: Any, report: LoadReport) -> None:
    """Give an abstract model the values of a checkpoint, and a report of every tensor. Raises LoadError for misfits."""
    faults, report = judge(model.config, leaves, arrays, report)
    misfit = f"{report.source}: the tensors do not fit config.json ({model.config.model_type})"
    remedy = "\nCheck that config.json belongs to these files and that the download is complete."
    refuse(faults, leaves, report, misfit, remedy)
    if report.unexpected:
        logger.warning(
            "%s: %d tensors belong to no parameter of the model and were not read: %s",
            report.source,
            len(report.unexpected),
            "; ".join((some(list(report.unexpected), 5), *report.notes)),
        )
    fill(model, leaves, arrays, dtype, report)


def _config(checkpoint: Checkpoint) -> tuple[DecoderConfig, list[str]]:
    """The config, untied where the file holds a head of its own in spite of ``tie_word_embeddings``."""
    config = parse_config(checkpoint.config, str(checkpoint.folder / "config.json"))
    check_generation(checkpoint.generation_config, config, str(checkpoint.folder / "generation_config.json"))
    if untied(config, checkpoint.tensors, checkpoint.same):
        note = f"tie_word_embeddings is true but {HEAD} differs from {EMBED}: both are used, untied"
        logger.warning("%s: %s", checkpoint.folder, note)
        return dataclasses.replace(config, tie_word_embeddings=False), [note]
    return config, []


def untied(
    config: DecoderConfig, tensors: Mapping[str, TensorInfo], same: Callable[[str, str], bool] | None = None
) -> bool:
    """Whether a checkpoint of a tied model has a head of its own: of another shape, or with other bytes.

    ``same`` compares two tensors; None: from headers alone they count as equal.
    """
    if not config.tie_word_embeddings or not {HEAD, EMBED} <= tensors.keys():
        return False
    shapes = {tensors[HEAD].shape, tensors[EMBED].shape}
    return shapes != {(config.vocab_size, config.hidden_size)} or (same is not None and not same(HEAD, EMBED))


def save_pretrained(
    model: CausalLM,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = False,
) -> None:
    """Write config.json, generation_config.json and safetensors under Hugging Face's names, in the model's dtypes, and
    the tokenizer's files from where the model was loaded.

    One tensor at a time is held in memory; of several processes each writes what its devices hold. The folder must be
    new or empty, unless ``overwrite`` asks for its checkpoint to be replaced, which happens in one step once all is
    written; other files in it stay. Whatever goes wrong, also a kill, leaves what was there.
    Raises CheckpointError (a ValueError).
    """
    size, found = _size(max_shard_size), arrays(model)
    total = sum(array.nbytes for array in found.values())
    with shared_folder(folder, overwrite) as stage, bytes_bar(total, "writing") as bar:
        if jax.process_index() == 0:
            write_side_files(stage, model, folder, model.config.folded()[0])
        write_shares(stage, _shares(found, bar), size, process=jax.process_index())


def arrays(model: CausalLM) -> dict[str, LazyArray]:
    """Name -> tensor, made of a model's parameters when it is read."""
    return arrays_of(layout(model, times=model.config.folded()[1]))


def _shares(found: LazyArrays, bar: Any) -> list[tuple[int | None, Tensors]]:
    """Which process writes what: tensors that none holds first, the others by whoever has least to write."""
    shares: dict[int | None, list[Any]] = {None: []} | {process: [] for process in range(jax.process_count())}
    loads = [0] * jax.process_count()
    for name, array in found.items():
        who = [0] if array.holders is None else array.holders
        writer = min(who, key=lambda process: loads[process]) if who else None
        if writer is not None:
            loads[writer] += array.nbytes

        def make(array: LazyArray = array) -> np.ndarray:
            bar.update(array.nbytes)
            return np.ascontiguousarray(array)

        shares[writer].append((name, dtype_code(array.dtype), array.shape, make))
    return list(shares.items())


def _size(size: int | str) -> int:
    """Bytes of ``5GB``, ``500MB``, ``20KB`` or a plain number."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size {short(size)} is not a size such as '5GB' or '500MB'")
    return max(1, int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))
