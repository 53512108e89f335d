"""Hugging Face checkpoints: a folder or hub id becomes a model, and a model a folder that transformers loads.

The path is straight: config.json -> config -> abstract model (shapes only) -> for each parameter its row of the
table -> the bytes that this process's devices need -> one array on its devices. Nothing is left at a random value.
"""

import dataclasses
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import RULES, Rules, sharding_of
from nnxmoe.config import DecoderConfig, FrozenDict
from nnxmoe.convert.checkpoint import Checkpoint
from nnxmoe.convert.place import Reader
from nnxmoe.convert.report import LoadError, LoadReport
from nnxmoe.convert.safetensors import dtype_code
from nnxmoe.convert.source import CheckpointError
from nnxmoe.convert.table import Entry, Piece, entries
from nnxmoe.convert.write import write_safetensors
from nnxmoe.layers.causal_lm import CausalLM
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.moe.router import RouterBias
from nnxmoe.progress import bytes_bar, logger
from nnxmoe.strategy import Strategy

Dtype = Any
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def from_pretrained(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    *,
    rules: Rules = RULES,
    expect: type[CausalLM] | None = None,
) -> CausalLM:
    """A model with the weights of a folder or hub id, and a ``load_report`` of every tensor.

    ``dtype`` None: as stored, FP8 blocks as bfloat16; DeepSeek's correction bias stays float32 whatever is asked.
    ``mesh``: parameters are placed by ``rules``, and each process reads only what its devices hold.
    Raises CheckpointError or ConfigError (ValueErrors) naming the file, tensor or field, and LoadError, which lists
    every missing tensor and wrong shape at once.
    """
    dtype = None if dtype is None else _float_dtype(dtype)
    with Checkpoint.open(path_or_hub_id, revision=revision, local_files_only=local_files_only) as checkpoint:
        config, notes = _config(checkpoint)
        kind = model_class(config)
        if expect is not None and not issubclass(kind, expect):
            raise CheckpointError(
                f"{checkpoint.folder} holds a {config.model_type} model: use {kind.__name__}.from_pretrained "
                f"or nnxmoe.from_pretrained, not {expect.__name__}.from_pretrained"
            )
        model = kind(config, strategy, rngs=None)  # pyright: ignore[reportCallIssue]
        _fill(model, checkpoint, dtype, mesh, rules, notes)
        model.generation_config = FrozenDict(checkpoint.generation_config)
        return model


def _float_dtype(dtype: Dtype) -> np.dtype:
    try:
        named = jnp.dtype(dtype)
    except TypeError:
        named = dtype
    if named not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype {named} is not supported for weights; supported: float32, bfloat16, float16")
    return named


def _config(checkpoint: Checkpoint) -> tuple[DecoderConfig, list[str]]:
    """The config, untied where the file holds a head of its own in spite of ``tie_word_embeddings``."""
    try:
        config = config_from_hf(checkpoint.config)
    except ValueError as error:
        raise type(error)(f"{checkpoint.folder / 'config.json'}: {error}") from None
    if config.tie_word_embeddings and {HEAD, EMBED} <= checkpoint.tensors.keys() and not _same(checkpoint):
        note = f"tie_word_embeddings is true but {HEAD} differs from {EMBED}: both are used, untied"
        logger.warning("%s: %s", checkpoint.folder, note)
        return dataclasses.replace(config, tie_word_embeddings=False), [note]
    return config, []


def _same(checkpoint: Checkpoint) -> bool:
    one, other = checkpoint.info(HEAD), checkpoint.info(EMBED)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(checkpoint.iter_rows(HEAD), checkpoint.iter_rows(EMBED), strict=True)
    return all(a.tobytes() == b.tobytes() for (_, a), (_, b) in pairs)


def _rename(plan: list[Entry], checkpoint: Checkpoint) -> list[Entry]:
    """A tied model whose file holds only the head: the embedding takes it."""
    if EMBED in checkpoint.tensors or HEAD not in checkpoint.tensors:
        return plan
    tied = not any(entry.key == "head.kernel" for entry in plan)
    swap = (Piece((), HEAD),)
    return [dataclasses.replace(e, pieces=swap) if tied and e.key == "embed.table" else e for e in plan]


def _fill(
    model: CausalLM, checkpoint: Checkpoint, dtype: np.dtype | None, mesh: Mesh | None, rules: Rules, notes: list[str]
) -> None:
    """Read every parameter of an abstract model and set its values, dtype and report."""
    started = time.perf_counter()
    plan = _rename(entries(model, model.hf_table, checkpoint.tensors), checkpoint)
    reader = Reader(checkpoint, plan)
    report = _account(model, checkpoint, plan, reader, notes)
    state, casts, matrices = {}, {}, []
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    total = sum(checkpoint.tensors[name].nbytes for name in report.loaded)
    with bytes_bar(total, f"loading {checkpoint.folder.name}") as bar:
        for entry in plan:
            variable = variables[entry.path]
            target = np.dtype(np.float32) if isinstance(variable, RouterBias) else dtype or reader.natural(entry)
            for name in {piece.name for piece in entry.pieces}:
                stored = checkpoint.tensors[name].numpy_dtype
                if stored != target:
                    casts.setdefault(f"{stored} -> {target}", []).append(name)
            value = reader.place(entry, target, None if mesh is None else sharding_of(variable, mesh, rules), bar)
            state[entry.path] = variable.replace(value)
            if isinstance(variable, nnx.Param) and len(entry.inner) > 1 and "router" not in entry.axes:
                matrices.append(target)
    nnx.update(model, nnx.from_flat_state(state))
    model.dtype = jnp.dtype(model.strategy.compute_dtype or jnp.result_type(*matrices))
    model.load_report = dataclasses.replace(
        report,
        casts={cast: tuple(sorted(names)) for cast, names in sorted(casts.items())},
        bytes_read=checkpoint.bytes_read,
        seconds=time.perf_counter() - started,
    )


def _account(
    model: CausalLM, checkpoint: Checkpoint, plan: list[Entry], reader: Reader, notes: list[str]
) -> LoadReport:
    """Compare what the model needs with what is stored, before any of it is read. Raises LoadError for misfits."""
    needed = {piece.name for entry in plan for piece in entry.pieces}
    missing = sorted(needed - checkpoint.tensors.keys())
    scales = {name for name in (f"{n}_scale_inv" for n in needed) if name in checkpoint.tensors}
    left = checkpoint.tensors.keys() - needed - scales
    skipped: dict[str, tuple[str, ...]] = {}
    for rule, test in _skip_rules(model.config).items():
        names = tuple(sorted(name for name in left if test(name)))
        left -= set(names)
        if names:
            skipped[rule] = names
    report = LoadReport(
        str(checkpoint.folder),
        loaded=tuple(sorted((needed & checkpoint.tensors.keys()) | scales)),
        missing=tuple(missing),
        unexpected=tuple(sorted(left)),
        skipped=skipped,
        notes=tuple(notes),
    )
    faults = [f"{name} is missing" for name in missing] + reader.faults()
    if faults:
        shown = "\n  ".join(faults[:20] + ([f"… and {len(faults) - 20} more"] if len(faults) > 20 else []))
        raise LoadError(
            f"{checkpoint.folder}: the tensors do not fit config.json ({model.config.model_type}):\n  {shown}\n"
            "Check that config.json belongs to these files and that the download is complete.",
            report,
        )
    if report.unexpected:
        logger.warning(
            "%s: %d tensors belong to no parameter of the model and were not read: %s%s",
            checkpoint.folder,
            len(report.unexpected),
            ", ".join(report.unexpected[:5]),
            ", …" if len(report.unexpected) > 5 else "",
        )
    return report


def _skip_rules(config: DecoderConfig) -> dict[str, Any]:
    """Rules for tensors that are left out on purpose: name -> test of a tensor's name."""
    first = config.num_hidden_layers
    extra = range(first, first + getattr(config, "num_nextn_predict_layers", 0))

    def prediction(name: str) -> bool:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return match is not None and int(match[1]) in extra

    return {
        "multi-token prediction layers (not part of the model)": prediction,
        "rotary frequencies (computed)": lambda name: name.endswith("rotary_emb.inv_freq"),
        "head tied to the embedding": lambda name: name == HEAD and config.tie_word_embeddings,
    }


def save_pretrained(model: CausalLM, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
    """Write config.json, generation_config.json and safetensors under Hugging Face's names, in the model's dtypes.

    One tensor at a time is held in memory. The folder must be new or empty: ValueError otherwise.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: save to a new one")
    target.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hf()
    config["dtype"] = str(jnp.dtype(model.dtype))
    _write_json(target / "config.json", config)
    if model.generation_config:
        _write_json(target / "generation_config.json", dict(model.generation_config))
    write_safetensors(target, _tensors(model), _size(max_shard_size))


def _tensors(model: CausalLM):
    """(name, dtype, shape, function that makes the array) for every stored tensor, in the model's order."""
    values = dict(nnx.to_flat_state(nnx.state(model)))
    for entry in entries(model, model.hf_table):
        value = values[entry.path][...]
        for piece in entry.pieces:

            def make(entry: Entry = entry, piece: Piece = piece, value: Any = value) -> np.ndarray:
                one = np.asarray(value[piece.at])
                if entry.inputs is None:
                    return one
                outs, ins = entry.flat()
                return np.ascontiguousarray(one.reshape(ins, outs).T)

            yield piece.name, dtype_code(value.dtype), entry.flat(), make


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(fields, indent=2, sort_keys=True, default=list) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _size(size: int | str) -> int:
    """Bytes of ``5GB``, ``500MB``, ``20KB`` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size {size!r} is not a size such as '5GB' or '500MB'")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " "))
