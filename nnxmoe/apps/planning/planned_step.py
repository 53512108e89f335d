"""Parameters, shards and tokens per device of one step of a model on a mesh, computed from shapes."""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.apps.planning.work import Work
from nnxmoe.axes import BATCH_AXES, CONTEXT, TOKEN_AXES, AnyMesh, axes_of, is_stacked
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.layers.embed import is_embedding_table
from nnxmoe.layers.linear.kernel import ParamWeight, is_kernel
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.model.pipeline import Pipeline, stages_of
from nnxmoe.model.quantization.methods import Method, Mixed
from nnxmoe.model.quantization.quantized_kernels import quantized_kernels
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.model.stack import Scanned, UnrolledStack
from nnxmoe.model.strategy import Strategy, check_context
from nnxmoe.models import model_class
from nnxmoe.moe.expert_parallel import min_chunks
from nnxmoe.sharding_rules import axes_per_dimension, check_mesh, shard_count

# Bytes per element of a trained parameter or its gradient (float32), and of an activation (bfloat16).
STATE, VALUES = 4, 2


# Label of a parameter's traffic in the printed plan. "embedding" includes the final norm.
Role = Literal["experts", "layers", "head", "embedding"]


@dataclasses.dataclass(frozen=True)
class ParamSize:
    """Size, shards and role of one variable.

    Attributes:
        key: Path without layer numbers.
        size: Number of elements.
        over: Mesh axes that shard each dimension.
        trained: Whether the variable is an `nnx.Param`.
        kernel: Whether the variable is the kernel of a linear map.
        is_table: Whether the variable is an embedding table.
        role: Part of the model that the variable belongs to. A tied embedding belongs to ``"head"``.
        experts: Number of experts (E), or 0 without an expert dimension.
        itemsize: Bytes per element of a variable that is not trained.
        layers: Number of stacked layers, or 0 outside the layer stacks.
        staged: Whether the variable belongs to layers that are sharded over pipeline stages.
        stack: Index of the layer stack, or `None` outside the layer stacks.
        width: Input features plus output features of a kernel, or of one expert's kernel.
        stored: Bytes per element if the parameter is frozen.
    """

    key: str
    size: int
    over: tuple[tuple[str, ...], ...]
    trained: bool
    kernel: bool
    is_table: bool
    role: Role
    experts: int
    itemsize: int
    layers: int
    staged: bool
    stack: int | None
    width: int
    stored: float = 2.0

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that shard the variable."""
        return tuple(axis for axes in self.over for axis in axes)


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """Step to plan: config, mesh, options, and the variables of the model."""

    config: Any
    mesh: AnyMesh
    work: Work
    parts: tuple[ParamSize, ...]

    @classmethod
    def of(cls, config: DecoderConfig, mesh: AnyMesh, work: Work) -> "PlannedStep":
        """Create the step and list the variables of its model.

        Raises ValueError if the rules cannot shard a variable, or if ``quantize`` applies to no variable.
        """
        stages = None if work.pipeline is None else stages_of(mesh)
        model, params = _scanned(config, stages), list[ParamSize]()
        check_context(model, mesh)
        check_mesh(model, mesh, work.rules)
        codes = {} if work.quantize is None else _bytes_of_codes(config, stages, work.quantize)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            key, _, stack = name_of(model, path)
            axes, shape = axes_of(variable), variable.shape
            experts, layers = (
                shape[axes.index("expert")] if "expert" in axes else 0,
                shape[0] if is_stacked(axes) else 0,
            )
            param = ParamSize(
                key,
                math.prod(shape),
                over=axes_per_dimension(axes, mesh, work.rules),
                trained=isinstance(variable, nnx.Param),
                kernel=is_kernel(variable),
                is_table=is_embedding_table(variable),
                role=_role(key, experts, layers, config.tie_word_embeddings),
                experts=experts,
                itemsize=jnp.dtype(variable.dtype).itemsize,
                layers=layers,
                staged=axes[:1] == ("stages",),
                stack=stack,
                width=sum(map(math.prod, ParamWeight(variable).split(shape)[1:])) if is_kernel(variable) else 0,
                stored=codes.get(tuple(path), 2.0 * variable.size) / variable.size,
            )
            params.append(param)
        return cls(config, mesh, work, tuple(params))

    @property
    def chunks(self) -> int:
        """Number of chunks of the expert exchange. Decoding defaults to one chunk."""
        size = self.mesh.shape["expert"]
        if not self.config.experts or size == 1:
            return 1
        if self.work.chunks is not None:
            return self.work.chunks
        if not self.work.train:
            return 1
        experts_per_device = max(1, self.config.experts // size)
        return min_chunks(self.work.buffer_factor, self.config.experts_per_token, size, experts_per_device)

    @property
    def rows(self) -> int:
        """Rows of the batch on each device."""
        return rows_per_device(self.work.batch, self.mesh)

    @property
    def tokens_per_row(self) -> int:
        """Tokens per row on one device. Raises ValueError if ``context`` does not divide the row."""
        seq, context_size = self.work.seq, self.mesh.shape[CONTEXT]
        if not self.work.train:
            return 1
        if seq % context_size:
            raise ValueError(f"rows of {seq} tokens are not divisible by {CONTEXT}={context_size}: use a multiple")
        return seq // context_size

    @property
    def keys_per_token(self) -> int:
        """Bytes per token of the bfloat16 keys and values, or MLA latents, of all layers.

        The tensor axis shards keys, but not latents. Recurrent states are not counted, since their size
        does not depend on the number of tokens.
        """
        has_keys = any(param.key.endswith("attention.k.kernel") for param in self.parts)
        size = sum(size for slots, size in cache_sizes(self.config).items() if slots != 1)
        return size // (self.mesh.shape["tensor"] if has_keys else 1)

    def held(self, part: ParamSize) -> int:
        """Count the elements of a variable on one device."""
        return part.size // shard_count(self.mesh, part.axes)

    def gathered(self, part: ParamSize) -> int:
        """Count the elements per layer of a variable on one device after the all-gather over the token axes."""
        axes = [axis for axis in part.axes if axis not in TOKEN_AXES or (axis == "expert" and part.experts)]
        return part.size // max(1, part.layers) // shard_count(self.mesh, axes)

    def runs(self, part: ParamSize) -> int:
        """Count the layer computations per step and device that use a variable."""
        if part.staged:
            return part.layers // stages_of(self.mesh) * self.work.num_turns(self.mesh)
        return max(1, part.layers) * self.work.accumulate


def _role(key: str, experts: int, layers: int, tied: bool) -> Role:
    if experts:
        return "experts"
    if layers:
        return "layers"
    return "head" if key == ("embed.table" if tied else "head.kernel") else "embedding"


def _bytes_of_codes(config: DecoderConfig, stages: int | None, method: Method | Mixed) -> dict[tuple[Any, ...], float]:
    """Map the path of each quantized kernel to the bytes of its codes and scales."""
    model, sizes = _build(config, stages), Counter[tuple[Any, ...]]()
    quantize_structure(model, method, jnp.bfloat16)
    kernels = {kernel.path for kernel in quantized_kernels(model)}
    for parameter in parameters(model, codes=True):
        if (path := parameter.path[:-1]) in kernels:
            sizes[tuple(path)] += math.prod(parameter.shape) * jnp.dtype(parameter.variable.dtype).itemsize
    return dict(sizes)


def rows_per_device(batch: int, mesh: AnyMesh) -> int:
    """Return the number of rows per device. Raises ValueError if the batch is not divisible."""
    batch_axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    num_shards = shard_count(mesh, batch_axes)
    if batch % num_shards:
        names = " x ".join(batch_axes)
        raise ValueError(
            f"a batch of {batch} rows is not divisible by the {num_shards} devices of {names}: use a multiple"
        )
    return batch // num_shards


def cache_per_token(model: CausalLM) -> dict[int | None, int]:
    """Map each cache capacity to the cache bytes per token and row of all layers with this capacity.

    Capacities are in tokens. `None` is an unlimited capacity. Recurrent states have capacity 1.
    """

    def size(layer: Any, capacity: int) -> int:
        buffers = jax.eval_shape(lambda: jax.tree.leaves(layer.empty_cache(1, capacity, model.dtype)))
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)

    sizes, max_capacity = Counter[int | None](), 2**30
    for stack in model.stacks:
        assert isinstance(stack, UnrolledStack), "the default of models without a strategy"
        for layer in stack.layers:
            if token := size(layer, 1):
                slots = size(layer, max_capacity) // token
                sizes[None if slots == max_capacity else slots] += token
    return dict(sizes)


def _build(config: DecoderConfig, stages: int | None) -> CausalLM:
    """Build the abstract model, with layers stacked by `Scanned`, or by a `Pipeline` if ``stages`` is set."""
    strategy = Strategy(stacking=Scanned(), pipeline=None if stages is None else Pipeline(stages, stages))
    return model_class(config)(config, strategy, rngs=None, dtype=jnp.bfloat16)


_scanned = functools.lru_cache(maxsize=8)(_build)


@functools.lru_cache(maxsize=8)
def cache_sizes(config: DecoderConfig) -> dict[int | None, int]:
    """Return `cache_per_token` of the abstract model."""
    return cache_per_token(abstract(config))


@functools.lru_cache(maxsize=8)
def abstract(config: DecoderConfig) -> CausalLM:
    """Build the abstract model with unrolled layers."""
    return model_class(config)(config, Strategy(), rngs=None, dtype=jnp.bfloat16)
