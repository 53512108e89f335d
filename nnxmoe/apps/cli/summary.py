"""A model's sizes and memory, from its config and the headers of its files alone."""

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nnxmoe.apps.planning.arithmetic import cache_per_token
from nnxmoe.axes import AnyMesh, keeps_dtype
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.printable import bytes_text
from nnxmoe.convert.arrays.array_layout import Parameter, parameters
from nnxmoe.convert.arrays.lazy_array import LazyArrays
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.arrays.tensor_parts import split_tensors
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import local_folder
from nnxmoe.convert.files.safetensors import TensorInfo, dtype_code
from nnxmoe.convert.files.untrusted_files import is_gguf
from nnxmoe.convert.formats.scheme import QuantizationScheme
from nnxmoe.convert.hf.auxiliary_files import generation_fields
from nnxmoe.convert.hf.pretrained import untied
from nnxmoe.convert.hf.quantized_loading import keep_codes
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.hf.tensor_layout import refuse_oversized_config, report_tensors, tensor_layout
from nnxmoe.convert.storage.checkpoint import Checkpoint, hub_headers
from nnxmoe.convert.storage.find_checkpoint import has_weights, read_config_fields
from nnxmoe.layers.linear.kernel import as_weight
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels, quantized_kernels
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import CHECKPOINT_NOTES, HUB_IDS, family_of, model_class, near_presets, parse_config, preset
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding_rules import RULES, check_mesh, partition_spec


@dataclasses.dataclass(frozen=True)
class Summary:
    """Sizes of a model.

    Attributes:
        model: shapes in memory, with layers for multi-token prediction if there are any, which no size counts.
        parts: number of parameters by kind.
        weights: bytes in memory, by dtype or kind of code.
        active_bytes: bytes of the weights that one token reads.
        buffer_token: estimated bytes of activations per token of a prompt.
        stored: bytes in the files, by dtype or kind of code; empty without files.
        cache: capacity of a layer's cache in tokens (None: no limit) -> bytes per token and row of all such layers.
        missing, unexpected: names of tensors; empty without files.
        misshapen: messages about wrong shapes; empty without files.
        skipped: rule -> names of tensors that are left out on purpose.
        published: hub id of a preset, and how its files differ from what is loaded.
    """

    source: str
    config: DecoderConfig
    model: CausalLM
    parts: dict[str, int]
    active: int
    weight_dtype: str
    weights: dict[str, int]
    active_bytes: int
    buffer_token: int
    stored: dict[str, int]
    cache: Mapping[int | None, int]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    skipped: Mapping[str, tuple[str, ...]]
    published: str

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def cache_token(self) -> int:
        """Cache bytes per token and row, while no layer's cache is full."""
        return sum(self.cache.values())

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def cache_bytes(self, batch: int, context: int) -> int:
        """Cache size in bytes for ``batch`` rows of ``context`` tokens."""
        return batch * sum(min(context, slots or context) * size for slots, size in self.cache.items())

    def needed(self, batch: int, context: int) -> int:
        """Bytes of weights and cache, without activations."""
        return self.weight_bytes + self.cache_bytes(batch, context)


def summarise(
    name: str | os.PathLike[str],
    dtype: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    quantize: Method | Mixed | None = None,
    keep_quantized: bool = False,
) -> Summary:
    """Sizes of the model in a folder (weights optional), or of a hub id or preset. Weights are neither read nor built,
    and the tensors are judged as a load would judge them. The options after ``local_files_only``: see
    `from_pretrained`."""
    check_quantize_options(quantize, keep_quantized)
    config, arrays = find(name, revision, local_files_only)
    if arrays:
        refuse_oversized_config(config, arrays, f"{name}/config.json")
    kind, kept = model_class(config), dtype or _common_dtype(arrays, config)
    model = kind(config, rngs=None, dtype=kept)
    report = LoadReport(str(name))
    if arrays:
        report = report_tensors(model, tensor_layout(model, arrays), arrays, report)
    parts, active = Counter[str](), 0.0
    for parameter in parameters(model):
        size = math.prod(parameter.shape)
        parts[_part(parameter.key)] += size
        active += size * _share(parameter, config)
    buffer = _buffer(model, config) * jnp.dtype(kept).itemsize
    if keep_quantized:
        keep_codes(model, arrays)
    quantize_structure(model, quantize, kept)
    weights, active_bytes = _in_memory(model, config, jnp.dtype(kept))
    with contextlib.suppress(ConfigError):  # models without prediction layers; the counts above leave them out
        model.mtp = kind(config, rngs=None, dtype=kept, mtp=True).mtp
    published = filter(None, (HUB_IDS.get(str(name).lower()), CHECKPOINT_NOTES.get(str(name).lower())))
    return Summary(
        str(name),
        config,
        model,
        dict(parts),
        round(active),
        kept,
        weights,
        active_bytes,
        buffer,
        _stored(arrays),
        cache_per_token(model),
        report.missing,
        report.unexpected,
        report.wrong,
        report.skipped,
        ": ".join(published) if preset(name) else "",
    )


def _in_memory(model: CausalLM, config: DecoderConfig, dtype: np.dtype) -> tuple[dict[str, int], int]:
    """The bytes of a model's weights by dtype or kind of code, and the bytes that a token reads."""
    kinds = {place.path: place.weight.format.code_dtype for place in quantized_kernels(model)}
    size, active = Counter[str](), 0.0
    for parameter in parameters(model, codes=True):
        kind = parameter.variable.dtype if isinstance(parameter.variable, QuantizedArray) else dtype
        count = math.prod(parameter.shape) * jnp.dtype(kind).itemsize
        size[kinds.get(parameter.path[:-1], str(dtype))] += count
        active += count * _share(parameter, config)
    return dict(size.most_common()), round(active)


def _share(parameter: Parameter, config: DecoderConfig) -> float:
    """The share of a parameter that one token uses."""
    return config.experts_per_token / parameter.experts if parameter.experts else 1.0


def _buffer(model: CausalLM, config: DecoderConfig) -> int:
    """Numbers that are alive at once per token in the largest layer: inputs and outputs of its linear maps."""
    attention, feed_forward = Counter[Any](), Counter[Any]()
    for place in quantizable_kernels(model):
        if place.head:  # which computes the last token only
            continue
        kernel, layer = as_weight(place.weight), place.path[:4]
        count = math.prod(kernel.outs) + math.prod(kernel.ins) * (place.experts or ".attention." not in place.key)
        (attention if ".attention." in place.key else feed_forward)[layer] += count * (
            config.experts_per_token if place.experts else 1
        )
    return max((*attention.values(), *feed_forward.values())) + 2 * config.hidden_size


def find(
    name: str | os.PathLike[str], revision: str | None, local_files_only: bool
) -> tuple[DecoderConfig, LazyArrays]:
    """The config, and the tensors of the files, which cannot be read."""
    if found := preset(name):
        return found, {}
    where, folder = f"{name}/config.json", local_folder(name, CheckpointError)
    where = str(name) if folder is not None and is_gguf(folder) else where
    if folder is not None:
        if not has_weights(folder):
            fields = read_config_fields(folder)
            config = _config(fields, where)
            try:
                QuantizationScheme.of(fields, where)
            except CheckpointError as error:
                logger.warning("%s. The sizes are those of the model without quantization", error)
            return config, {}
        with Checkpoint.open(folder) as checkpoint:
            checked = _checked(checkpoint.config, checkpoint.tensors, where, checkpoint)
            _warn([*generation_fields(checkpoint.folder, checked[0])[1], *checkpoint.notes], where)
            return checked
    try:
        fields, headers = hub_headers(str(name), revision=revision, local_files_only=local_files_only)
    except CheckpointError as error:
        near = near_presets(name)
        with_names = f"{name} is not a preset{near} ({error})"
        raise CheckpointError(with_names if "did you mean" in near else f"{error}{near}") from None
    tensors = {n: TensorInfo(n, Path(), dtype, shape, 0, 0) for n, (dtype, shape) in headers.items()}
    return _checked(fields, tensors, where)


def _checked(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str, checkpoint: Checkpoint | None = None
) -> tuple[DecoderConfig, LazyArrays]:
    """Return the config as loading would use it, and the tensors. Raises CheckpointError for an unsupported
    quantisation."""
    config = _config(fields, where)
    tied = config.tie_word_embeddings and not untied(config, tensors)
    table = family_of(config).hf_names(config)
    arrays = split_tensors(table, tensor_arrays(dict(tensors), fields, where, checkpoint))
    return dataclasses.replace(config, tie_word_embeddings=tied), arrays


def _config(fields: Mapping[str, Any], where: str) -> DecoderConfig:
    config, notes = parse_config(fields, where)
    _warn(notes, where)
    return config


def _warn(notes: Iterable[str], where: str) -> None:
    for note in notes:
        logger.warning("%s: %s", where.removesuffix("/config.json"), note)


def _part(key: str) -> str:
    names = key.split(".")
    if "streams" in key or key.startswith("norm.weights."):
        return "residual streams"
    if names[0] != "layer":
        return {"embed": "embedding", "head": "head", "norm": "norms"}[names[0]]
    if "norm" in key or key.startswith("layer.output_scale."):
        return "norms"
    if names[1] == "moe":
        parts = {"router": "router", "experts": "routed experts", "shared": "shared experts"}
        return parts.get(names[2], "projections around experts")
    kinds = {"attention": "attention", "mlp": "dense mlp", "dense": "dense mlp", "own": "inputs of layers"}
    return kinds[names[1]]


def _common_dtype(arrays: LazyArrays, config: DecoderConfig) -> str:
    """Dtype that loading would give most weights: the stored one (bfloat16 for FP8), or the config's without files."""
    size = Counter[np.dtype]()
    for array in arrays.values():
        size[array.loaded if array.codes else array.dtype] += math.prod(array.shape)
    return str(size.most_common(1)[0][0]) if size else config.dtype or "float32"


def _stored(arrays: LazyArrays) -> dict[str, int]:
    size = Counter[str]()
    for array in arrays.values():
        parts = [array] if array.codes is None else array.parts.values()
        kind = dtype_code(array.dtype) if array.codes is None else array.kind
        kind, count = array.stored or (kind, sum(part.nbytes for part in parts))
        size[kind] += count
    return dict(size.most_common())


def spread_lines(config: DecoderConfig, dtype: str, mesh: AnyMesh, method: Method | Mixed | None) -> list[str]:
    """One line per name of parameters: how many there are, of what shape, bytes of them on one device, and what splits
    them. Raises ValueError for a parameter that the rules cannot split."""
    model = model_class(config)(config, Strategy(), rngs=None)
    check_mesh(model, mesh, RULES)
    quantize_structure(model, method, dtype, mesh)
    alike: dict[tuple[str, tuple[int, ...]], list[Parameter]] = {}
    for parameter in parameters(model, codes=True):
        alike.setdefault((parameter.key, parameter.shape), []).append(parameter)
    axes, total = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1), 0
    lines = [f"mesh        {axes or 'one device'}"]
    for (key, shape), group in alike.items():
        spec = partition_spec(group[0].axes, shape, mesh, RULES)
        dtypes = (one.variable.dtype if keeps_dtype(one.variable) else dtype for one in group)
        size = math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * sum(jnp.dtype(one).itemsize for one in dtypes)
        split = ("-" if axis is None else axis if isinstance(axis, str) else " x ".join(axis) for axis in spec)
        count = f"{len(group):>4} x {list(shape)}"
        lines.append(f"  {key:32} {count:28} {bytes_text(size):>10}  {', '.join(split) or 'whole'}")
        total += size
    return [*lines, f"per device  {bytes_text(total)} of weights, on each of {mesh.size} devices"]
