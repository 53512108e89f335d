"""Hugging Face checkpoints: a folder or hub id becomes a model, and a model a folder that transformers loads.

The path is straight: config.json -> config -> abstract model (shapes only) -> for each parameter its row of the
table -> the bytes that this process's devices need -> one array on its devices. Nothing is left at a random value.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import Rules
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.convert.account import EMBED, HEAD, account, head_for_embedding, refuse_unjustified
from nnxmoe.convert.leaves import Later, float_dtype
from nnxmoe.convert.place import Reader
from nnxmoe.convert.restore import activations_dtype
from nnxmoe.convert.side_files import check_generation, parse_config, write_side_files
from nnxmoe.convert.table import Entry, Piece, entries, parameters
from nnxmoe.layers.gqa import query_divisor
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import model_class
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.progress import bytes_bar, logger
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.multihost import gather, hosts_holding, local_value, shared_folder
from nnxmoe.storage.safetensors import dtype_code
from nnxmoe.storage.write import Tensors, write_shares
from nnxmoe.strategy import Strategy


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
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        refuse_unjustified(config, shapes, str(checkpoint.folder / "config.json"))
        strategy = strategy or Strategy.auto()
        mesh, rules = strategy.mesh if mesh is None else mesh, strategy.rules if rules is None else rules
        strategy = dataclasses.replace(strategy, mesh=mesh, rules=rules)
        model = kind(config, strategy, rngs=None)  # pyright: ignore[reportCallIssue]
        _fill(model, checkpoint, dtype, notes)
        model.generation_config = FrozenDict(checkpoint.generation_config)
        return model


def _config(checkpoint: Checkpoint) -> tuple[DecoderConfig, list[str]]:
    """The config, untied where the file holds a head of its own in spite of ``tie_word_embeddings``."""
    config = parse_config(checkpoint.config, str(checkpoint.folder / "config.json"))
    check_generation(checkpoint.generation_config, config, str(checkpoint.folder / "generation_config.json"))
    if config.tie_word_embeddings and {HEAD, EMBED} <= checkpoint.tensors.keys():
        shapes = {checkpoint.info(HEAD).shape, checkpoint.info(EMBED).shape}
        if shapes != {(config.vocab_size, config.hidden_size)} or not checkpoint.same(HEAD, EMBED):
            note = f"tie_word_embeddings is true but {HEAD} differs from {EMBED}: both are used, untied"
            logger.warning("%s: %s", checkpoint.folder, note)
            return dataclasses.replace(config, tie_word_embeddings=False), [note]
    return config, []


def _fill(model: CausalLM, checkpoint: Checkpoint, dtype: np.dtype | None, notes: list[str]) -> None:
    """Read every parameter of an abstract model and set its values, dtype and report."""
    started = time.perf_counter()
    plan = head_for_embedding(entries(model, model.hf_table, checkpoint.tensors), checkpoint.tensors)
    reader = Reader(checkpoint, plan)
    report = account(model, checkpoint, plan, reader, notes)
    variables, wanted, casts = dict(nnx.to_flat_state(nnx.state(model))), [], {}
    for entry in plan:
        variable = variables[entry.path]
        target = np.dtype(np.float32) if isinstance(variable, RouterBias) else dtype or reader.natural(entry)
        for name in {piece.name for piece in entry.pieces}:
            stored = checkpoint.tensors[name].numpy_dtype
            if stored != target:
                casts.setdefault(f"{stored} -> {target}", []).append(name)
        try:
            wanted.append((entry, target, model.strategy.sharding_of(variable)))
        except ValueError as error:
            raise ValueError(f"{entry.key}: {error}") from None
    total = sum(checkpoint.tensors[name].nbytes for name in report.loaded)
    with bytes_bar(total, f"loading {checkpoint.folder.name}") as bar:
        values = reader.place(wanted, bar)
    state = {path: variables[path].replace(value) for path, value in values.items()}
    nnx.update(model, nnx.from_flat_state(state))
    model.dtype = activations_dtype(model.strategy, state.values())
    model.load_report = dataclasses.replace(
        report,
        casts={cast: tuple(sorted(names)) for cast, names in sorted(casts.items())},
        nonfinite=dict(sorted(reader.nonfinite.items())),
        bytes_read=checkpoint.bytes_read,
        seconds=time.perf_counter() - started,
        files=os.path.abspath(checkpoint.folder),
    )
    model.load_report.warn()


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
    total = sum(array.nbytes for array, _ in found.values())
    with shared_folder(folder, overwrite) as stage, bytes_bar(total, "writing") as bar:
        if jax.process_index() == 0:
            write_side_files(stage, model, folder)
        write_shares(stage, _shares(found, bar), size, process=jax.process_index())


def arrays(model: CausalLM) -> dict[str, tuple[Later, list[int]]]:
    """Name -> tensor, made of a model's parameters when it is asked for, and which processes hold all of it."""
    values, divided = dict(parameters(model)), np.float32(query_divisor(model))
    found: dict[str, tuple[Later, list[int]]] = {}
    for entry in entries(model, model.hf_table):
        factor = divided if entry.key.startswith("layer.attention.q.") else np.float32(1)
        value = values[entry.path].get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ValueError(f"the parameter {entry.key} has a shape but no values: this model cannot be saved")
        for piece in entry.pieces:
            who = hosts_holding(value, piece.at)
            make = functools.partial(_stored, entry, piece, value, factor, who)
            found[piece.name] = Later(entry.flat(), np.dtype(value.dtype), make), who
    return found


def _stored(entry: Entry, piece: Piece, value: Any, factor: np.float32, who: list[int], _: Any = None) -> np.ndarray:
    """One stored tensor of a parameter; of one that no process holds, all must ask."""
    one = local_value(value, piece.at) if who else gather(value, piece.at)
    one = one if factor == 1 else (one.astype(np.float32) * factor).astype(one.dtype)
    if entry.inputs is None:
        return one
    outs, ins = entry.flat()
    return np.ascontiguousarray(one.reshape(ins, outs).T)


def _shares(found: Mapping[str, tuple[Later, list[int]]], bar: Any) -> list[tuple[int | None, Tensors]]:
    """Which process writes what: tensors that none holds first, the others by whoever has least to write."""
    shares: dict[int | None, list[Any]] = {None: []} | {process: [] for process in range(jax.process_count())}
    loads = [0] * jax.process_count()
    for name, (array, who) in found.items():
        writer = min(who, key=lambda process: loads[process]) if who else None
        if writer is not None:
            loads[writer] += array.nbytes

        def make(array: Later = array) -> np.ndarray:
            bar.update(array.nbytes)
            return array.make(None)

        shares[writer].append((name, dtype_code(array.dtype), array.shape, make))
    return list(shares.items())


def _size(size: int | str) -> int:
    """Bytes of ``5GB``, ``500MB``, ``20KB`` or a plain number."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size {short(size)} is not a size such as '5GB' or '500MB'")
    return max(1, int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))
