"""Parameter counts and memory of a model, computed from its config and the headers of its files."""

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nnxmoe.apps.cli.tensor_headers import read_headers
from nnxmoe.apps.planning.planned_step import cache_per_token
from nnxmoe.axes import AnyMesh, keeps_dtype
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.printable import bytes_text
from nnxmoe.convert.arrays.array_layout import Parameter, parameters
from nnxmoe.convert.arrays.lazy_array import LazyArrays
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.files.safetensors import dtype_code
from nnxmoe.convert.hf.quantized_loading import keep_codes
from nnxmoe.convert.hf.tensor_layout import refuse_oversized_config, report_tensors, tensor_layout
from nnxmoe.layers.embed import is_embedding_table
from nnxmoe.layers.linear.kernel import as_weight
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels, quantized_kernels
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import CHECKPOINT_NOTES, HUB_IDS, model_class, preset
from nnxmoe.sharding_rules import RULES, check_mesh, partition_spec


@dataclasses.dataclass(frozen=True)
class Summary:
    """Parameter counts and byte sizes of a model, and how its files differ from it.

    Attributes:
        model: Abstract model. Includes multi-token prediction layers, which the sizes exclude.
        parts: Number of parameters per part of the model.
        active: Number of parameters that one token uses.
        weights: Bytes in memory per dtype or quantized format.
        active_bytes: Bytes of the weights that one token reads.
        buffer_token: Estimated bytes of activations per prompt token.
        stored: Bytes in the files per dtype or quantized format. Empty without files.
        cache: Maps the capacity of a layer's cache in tokens (`None` without a limit) to the bytes per
            token and row of all layers with that capacity.
        missing, unexpected: Names of tensors. Empty without files.
        misshapen: Messages about wrong shapes. Empty without files.
        skipped: Maps a rule to the names of the tensors that loading skips by that rule.
        published: Hub id of a preset, and how its files differ from the loaded model.
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
        """Number of parameters."""
        return sum(self.parts.values())

    @property
    def cache_token(self) -> int:
        """Cache bytes per token and row, while the cache of no layer is full."""
        return sum(self.cache.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum(self.weights.values())

    def cache_bytes(self, batch: int, context: int) -> int:
        """Compute the cache size in bytes for ``batch`` rows of ``context`` tokens."""
        return batch * sum(min(context, slots or context) * size for slots, size in self.cache.items())

    def needed(self, batch: int, context: int) -> int:
        """Compute the bytes of weights and cache. Activations are not included."""
        return self.weight_bytes + self.cache_bytes(batch, context)


def summarize(
    name: str | os.PathLike[str],
    dtype: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    quantize: Method | Mixed | None = None,
    keep_quantized: bool = False,
) -> Summary:
    """Compute the sizes of a model without reading or allocating its weights.

    Checks the tensors of the files as loading does.

    Args:
        name: A folder (weights optional), a hub id or a preset.
        dtype: Dtype of the weights. Defaults to the dtype that loading would use.
        revision: Branch, tag or commit on the hub.
        local_files_only: Use cached files only.
        quantize, keep_quantized: As in `from_pretrained`.
    """
    check_quantize_options(quantize, keep_quantized)
    config, arrays = read_headers(name, revision, local_files_only)
    if arrays:
        refuse_oversized_config(config, arrays, f"{name}/config.json")
    model_type, dtype = model_class(config), dtype or _common_dtype(arrays, config)
    model = model_type(config, rngs=None, dtype=dtype)
    report = LoadReport(str(name))
    if arrays:
        report = report_tensors(model, tensor_layout(model, arrays), arrays, report)
    parts, active_parameters = Counter[str](), 0.0
    for parameter in parameters(model):
        size = math.prod(parameter.shape)
        parts[_part(parameter.key)] += size
        active_parameters += size * _active_fraction(parameter, config)
    buffer_bytes = _buffer_elements(model, config) * jnp.dtype(dtype).itemsize
    if keep_quantized:
        keep_codes(model, arrays)
    quantize_structure(model, quantize, dtype)
    weights, active_bytes = _weight_bytes(model, config, jnp.dtype(dtype))
    with contextlib.suppress(ConfigError):  # raised if the model has no prediction layers
        model.mtp = model_type(config, rngs=None, dtype=dtype, mtp=True).mtp
    published = filter(None, (HUB_IDS.get(str(name)), CHECKPOINT_NOTES.get(str(name))))
    return Summary(
        source=str(name),
        config=config,
        model=model,
        parts=dict(parts),
        active=round(active_parameters),
        weight_dtype=dtype,
        weights=weights,
        active_bytes=active_bytes,
        buffer_token=buffer_bytes,
        stored=_stored_bytes(arrays),
        cache=cache_per_token(model),
        missing=report.missing,
        unexpected=report.unexpected,
        misshapen=report.wrong,
        skipped=report.skipped,
        published=": ".join(published) if preset(name) else "",
    )


def _weight_bytes(model: CausalLM, config: DecoderConfig, dtype: np.dtype) -> tuple[dict[str, int], int]:
    """Return the bytes of the weights per dtype or code dtype, and the bytes that one token reads."""
    code_dtypes = {kernel.path: kernel.weight.format.code_dtype for kernel in quantized_kernels(model)}
    sizes, active_bytes = Counter[str](), 0.0
    for parameter in parameters(model, codes=True):
        is_code = isinstance(parameter.variable, QuantizedArray)
        size = math.prod(parameter.shape) * jnp.dtype(parameter.variable.dtype if is_code else dtype).itemsize
        sizes[code_dtypes.get(parameter.path[:-1], str(dtype))] += size
        active_bytes += size * _active_fraction(parameter, config)
    return dict(sizes.most_common()), round(active_bytes)


def _active_fraction(parameter: Parameter, config: DecoderConfig) -> float:
    """Return the fraction of a parameter that one token uses. 0 for tables in layers, because a token reads few rows.

    By convention, all rows of the token embedding are active parameters.
    """
    if parameter.layer is not None and is_embedding_table(parameter.variable):
        return 0.0
    return config.experts_per_token / parameter.experts if parameter.experts else 1.0


def _buffer_elements(model: CausalLM, config: DecoderConfig) -> int:
    """Count the elements per token in the inputs and outputs of the largest layer's linear maps."""
    attention, feed_forward = Counter[Any](), Counter[Any]()
    for kernel_path in quantizable_kernels(model):
        if kernel_path.head:  # the head is computed for the last token only
            continue
        kernel, layer = as_weight(kernel_path.weight), kernel_path.path[:4]
        is_attention = ".attention." in kernel_path.key
        size = math.prod(kernel.outs)
        if kernel_path.experts:  # each expert copies its tokens
            size = config.experts_per_token * (size + math.prod(kernel.ins))
        elif not is_attention:
            size += math.prod(kernel.ins)
        (attention if is_attention else feed_forward)[layer] += size
    return max((*attention.values(), *feed_forward.values())) + 2 * config.hidden_size


def _part(key: str) -> str:
    names = key.split(".")
    if "streams" in key or "residual" in key or key.startswith(("norm.weights.", "norm.down.", "norm.up.")):
        return "residual streams"
    if names[0] != "layer":
        return {"embed": "embedding", "head": "head", "norm": "norms"}[names[0]]
    if "norm" in key or key.startswith("layer.output_scale."):
        return "norms"
    if names[1] == "moe":
        parts = {"router": "router", "experts": "routed experts", "shared": "shared experts"}
        return parts.get(names[2], "projections around experts")
    parts = {"attention": "attention", "mlp": "dense mlp", "dense": "dense mlp", "own": "inputs of layers"}
    parts["ngram"] = "n-grams"
    return parts[names[1]]


def _common_dtype(arrays: LazyArrays, config: DecoderConfig) -> str:
    """Return the dtype that loading would use for most weights.

    This is the stored dtype (bfloat16 for FP8), or the dtype of the config if there are no files.
    """
    sizes = Counter[np.dtype]()
    for array in arrays.values():
        sizes[array.load_dtype if array.codes else array.dtype] += math.prod(array.shape)
    return str(sizes.most_common(1)[0][0]) if sizes else config.dtype or "float32"


def _stored_bytes(arrays: LazyArrays) -> dict[str, int]:
    sizes = Counter[str]()
    for array in arrays.values():
        parts = [array] if array.codes is None else array.parts.values()
        dtype = dtype_code(array.dtype) if array.codes is None else array.kind
        dtype, size = array.stored or (dtype, sum(part.nbytes for part in parts))
        sizes[dtype] += size
    return dict(sizes.most_common())


def shard_lines(config: DecoderConfig, dtype: str, mesh: AnyMesh, method: Method | Mixed | None) -> list[str]:
    """Describe the shards of the parameters, one line per name and shape.

    Each line has the number of parameters, the shape, the bytes on one device and the mesh axes per
    dimension. The last line has the total bytes on one device.

    Raises:
        ValueError: If the rules cannot shard a parameter.
    """
    model = model_class(config)(config, Strategy(), rngs=None)
    check_mesh(model, mesh, RULES)
    quantize_structure(model, method, dtype, mesh)
    groups: dict[tuple[str, tuple[int, ...]], list[Parameter]] = {}
    for parameter in parameters(model, codes=True):
        groups.setdefault((parameter.key, parameter.shape), []).append(parameter)
    axes, total_bytes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1), 0
    lines = [f"mesh        {axes or 'one device'}"]
    for (key, shape), group in groups.items():
        spec = partition_spec(group[0].axes, shape, mesh, RULES)
        variables = [parameter.variable for parameter in group]
        dtypes = [variable.dtype if keeps_dtype(variable) else dtype for variable in variables]
        size = math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * sum(
            jnp.dtype(name).itemsize for name in dtypes
        )
        count = f"{len(group):>4} x {list(shape)}"
        lines.append(f"  {key:32} {count:28} {bytes_text(size):>10}  {', '.join(map(_axes_text, spec)) or 'whole'}")
        total_bytes += size
    return [*lines, f"per device  {bytes_text(total_bytes)} of weights, on each of {mesh.size} devices"]


def _axes_text(axes: str | Sequence[str] | None) -> str:
    """Format an entry of a partition spec."""
    if axes is None:
        return "-"
    return axes if isinstance(axes, str) else " x ".join(axes)
