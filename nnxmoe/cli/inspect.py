"""What a model is and what it will cost, from its config and its files' headers alone."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnxmoe.axes import RULES, AnyMesh, Rules, partition_spec
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.account import head_for_embedding, refuse_unjustified
from nnxmoe.convert.place import FLOATS
from nnxmoe.convert.side_files import check_generation, parse_config
from nnxmoe.convert.table import Entry, entries
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import PRESETS, model_class, preset
from nnxmoe.moe.router import RouterBias
from nnxmoe.storage.checkpoint import Checkpoint, hub_headers
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.fp8 import fp8_block
from nnxmoe.storage.hub import local_folder
from nnxmoe.storage.safetensors import DTYPES
from nnxmoe.storage.source import find_config, has_weights

Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor -> dtype code, shape


@dataclasses.dataclass(frozen=True)
class Summary:
    """Sizes of a model. ``parts``: parameters by kind. ``stored``: bytes in the files by dtype, empty without files.

    ``cache_token``: cache bytes a token and row adds; ``cache_slots``: how many tokens the cache holds at most (None:
    all). ``missing`` and ``unexpected``: tensors by name, ``misshapen``: what is wrong, where there are files.
    """

    source: str
    config: DecoderConfig
    parts: dict[str, int]
    active: int
    weight_dtype: str
    weight_bytes: int
    stored: dict[str, int]
    cache_token: int
    cache_slots: int | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    def cache_bytes(self, batch: int, context: int) -> int:
        """Bytes of the cache of ``batch`` rows of ``context`` tokens."""
        slots = context if self.cache_slots is None else min(context, self.cache_slots)
        return batch * slots * self.cache_token

    def needed(self, batch: int, context: int) -> int:
        """Bytes of weights and cache together; activations come on top."""
        return self.weight_bytes + self.cache_bytes(batch, context)


def summarise(
    name: str | os.PathLike[str],
    dtype: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Summary:
    """Of a folder (weights optional), a hub id or a preset's name. No weights are read, nothing is built but shapes."""
    config, headers = _find(name, revision, local_files_only)
    if headers:
        refuse_unjustified(config, {tensor: shape for tensor, (_, shape) in headers.items()}, f"{name}/config.json")
    model = model_class(config)(config, rngs=None)  # pyright: ignore[reportCallIssue]
    plan = head_for_embedding(entries(model, model.hf_table, headers or None), headers)
    kept = dtype or _common_dtype(headers, config)
    sizes = {entry.path: math.prod(entry.shape) for entry in plan}
    parts = Counter[str]()
    active = 0.0
    for entry in plan:
        parts[_part(entry)] += sizes[entry.path]
        share = config.experts_per_token / _experts(entry) if "expert" in entry.axes else 1.0
        active += sizes[entry.path] * share
    needed = {piece.name for entry in plan for piece in entry.pieces}
    model.dtype = jnp.dtype(kept)
    token, slots = _cache(model, config)
    return Summary(
        str(name),
        config,
        dict(parts),
        round(active),
        kept,
        sum(sizes.values()) * jnp.dtype(kept).itemsize,
        _stored(headers),
        token,
        slots,
        tuple(sorted(needed - headers.keys())) if headers else (),
        tuple(sorted(n for n in headers.keys() - needed if not n.endswith("_scale_inv"))),
        tuple(_misshapen(plan, headers)),
    )


@dataclasses.dataclass(frozen=True)
class Spread:
    """Parameters of one name on a mesh: how many there are, the shape of each, and the bytes of all on one device."""

    name: str
    count: int
    shape: tuple[int, ...]
    spec: PartitionSpec
    device_bytes: int


def spread(config: DecoderConfig, dtype: str, mesh: AnyMesh, rules: Rules = RULES) -> list[Spread]:
    """How a model would lie on a mesh. Raises ValueError naming the parameter that cannot be split as the rules say."""
    model = model_class(config)(config, rngs=None)  # pyright: ignore[reportCallIssue]
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    found: dict[tuple[str, tuple[int, ...]], Spread] = {}
    for entry in entries(model, model.hf_table):
        variable = variables[entry.path]
        try:
            spec = partition_spec(entry.axes, entry.shape, mesh, rules)
        except ValueError as error:
            raise ValueError(f"{entry.key}: {error}") from None
        local = NamedSharding(mesh, spec).shard_shape(entry.shape)
        size = math.prod(local) * (4 if isinstance(variable, RouterBias) else jnp.dtype(dtype).itemsize)
        one = found.setdefault((entry.key, entry.shape), Spread(entry.key, 0, entry.shape, spec, 0))
        found[entry.key, entry.shape] = dataclasses.replace(
            one, count=one.count + 1, device_bytes=one.device_bytes + size
        )
    return list(found.values())


def _find(name: str | os.PathLike[str], revision: str | None, local_files_only: bool) -> tuple[DecoderConfig, Headers]:
    if found := preset(name):
        return found, {}
    where, folder = f"{name}/config.json", local_folder(name, CheckpointError)
    if folder is not None:
        if not has_weights(folder):
            return _checked(find_config(folder), where), {}
        with Checkpoint.open(folder) as checkpoint:
            config = _checked(checkpoint.config, where)
            check_generation(checkpoint.generation_config, config, str(checkpoint.folder / "generation_config.json"))
            return config, {n: (t.dtype, t.shape) for n, t in checkpoint.tensors.items()}
    try:
        fields, headers = hub_headers(str(name), revision=revision, local_files_only=local_files_only)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (presets, which need no files: {', '.join(PRESETS)})") from None
    return _checked(fields, where), headers


def _checked(fields: Mapping[str, Any], where: str) -> DecoderConfig:
    """The config, if its quantization is one that a load would take."""
    config = parse_config(fields, where)
    fp8_block(fields, where)
    return config


def _misshapen(plan: list[Entry], headers: Headers) -> Iterator[str]:
    for entry in plan:
        for piece in entry.pieces:
            dtype, shape = headers.get(piece.name, (FLOATS[0], entry.stored(piece)))
            if shape != entry.stored(piece):
                yield f"{piece.name} has shape {list(shape)}, config.json asks for {list(entry.stored(piece))}"
            if dtype not in FLOATS:
                yield f"{piece.name} is {dtype}: weights must be one of {', '.join(FLOATS)}"


def _part(entry: Entry) -> str:
    names = entry.key.split(".")
    if names[0] != "layer":
        return {"embed": "embedding", "head": "head", "norm": "norms"}[names[0]]
    if "norm" in entry.key:
        return "norms"
    if names[1] == "moe":
        return {"router": "router", "experts": "routed experts", "shared": "shared experts"}[names[2]]
    return {"attention": "attention", "mlp": "dense mlp"}[names[1]]


def _experts(entry: Entry) -> int:
    return entry.shape[entry.axes.index("expert")]


def _common_dtype(headers: Headers, config: DecoderConfig) -> str:
    """The dtype that a load would give most weights: the stored one, FP8 as bfloat16; the config's without files."""
    size = Counter[str]()
    for dtype, shape in headers.values():
        size["BF16" if dtype.startswith("F8") else dtype] += math.prod(shape)
    if size:
        return str(DTYPES[size.most_common(1)[0][0]])
    return config.dtype or "float32"


def _stored(headers: Headers) -> dict[str, int]:
    size = Counter[str]()
    for dtype, shape in headers.values():
        size[dtype] += math.prod(shape) * DTYPES[dtype].itemsize
    return dict(size.most_common())


def _cache(model: CausalLM, config: DecoderConfig) -> tuple[int, int | None]:
    """Bytes a token, and the number of tokens after which the cache grows no more."""

    def size(capacity: int) -> int:
        buffers = jax.eval_shape(lambda: jax.tree.leaves(model.empty_cache(1, capacity).layers))
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)

    return size(1), config.window
