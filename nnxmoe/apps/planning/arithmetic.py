"""Bytes that a model takes on one device of a mesh, from shapes alone: parameters, state and cache."""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.apps.planning.work import Work
from nnxmoe.axes import BATCH_AXES, CONTEXT, TOKEN_AXES, AnyMesh, axes_of, is_stacked
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.layers.linear.kernel import ParamWeight, is_kernel
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.quantization.methods import Method, Mixed
from nnxmoe.model.quantization.quantized_kernels import quantized_kernels
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.model.stack import Scanned, UnrolledStack
from nnxmoe.model.strategy import Strategy, check_context
from nnxmoe.models import model_class
from nnxmoe.moe.expert_parallel import buffer_size, min_chunks
from nnxmoe.sharding_rules import axes_per_dimension, check_mesh, shard_count

# Bytes of a parameter while it is trained, and of an activation or a decoded weight.
STATE, VALUES = 4, 2


@dataclasses.dataclass(frozen=True)
class ParamSize:
    """One variable: its number of elements, over which mesh axes each dimension is sharded, and what it is."""

    key: str
    size: int
    over: tuple[tuple[str, ...], ...]
    trained: bool
    kernel: bool
    experts: int  # E of a variable with an expert dimension, else 0
    itemsize: int
    layers: int  # how many layers it holds; 0 outside of the stacks
    staged: bool  # whether a pipeline shards these layers over its stages
    stack: int | None  # the run of layers that it belongs to
    width: int  # numbers per row that a kernel takes and gives, per expert if there are any
    stored: float = 2.0  # bytes of each number where it is not trained

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that shard it."""
        return tuple(axis for axes in self.over for axis in axes)


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step of a model on a mesh, from which all estimates are computed: the work, and the model's variables."""

    config: Any
    mesh: AnyMesh
    work: Work
    parts: tuple[ParamSize, ...]

    @classmethod
    def of(cls, config: DecoderConfig, mesh: AnyMesh, work: Work) -> "PlannedStep":
        """List the variables of a model. Raises ValueError if the rules cannot shard one of them, or ``quantize`` fits
        none."""
        stages = None if work.pipeline is None else stages_of(mesh)
        model, found = _scanned(config, stages), []
        check_context(model, mesh)
        check_mesh(model, mesh, work.rules)
        codes = {} if work.quantize is None else _bytes_of_codes(config, stages, work.quantize)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            key, _, stack = name_of(model, path)
            axes, shape = axes_of(variable), variable.shape
            part = ParamSize(
                key,
                math.prod(shape),
                over=axes_per_dimension(axes, mesh, work.rules),
                trained=isinstance(variable, nnx.Param),
                kernel=is_kernel(variable),
                experts=shape[axes.index("expert")] if "expert" in axes else 0,
                itemsize=jnp.dtype(variable.dtype).itemsize,
                layers=shape[0] if is_stacked(axes) else 0,
                staged=axes[:1] == ("stages",),
                stack=stack,
                width=sum(map(math.prod, ParamWeight(variable).split(shape)[1:])) if is_kernel(variable) else 0,
                stored=codes.get(tuple(path), 2.0 * variable.size) / variable.size,
            )
            found.append(part)
        return cls(config, mesh, work, tuple(found))

    @property
    def chunks(self) -> int:
        """Slices of an exchange between experts; one token decoded per row is not sliced."""
        size, chosen = self.mesh.shape["expert"], self.work.chunks
        if not self.config.experts or size == 1:
            return 1
        if chosen is not None or not self.work.train:
            return chosen or 1
        own = max(1, self.config.experts // size)
        return min_chunks(self.work.buffer_factor, self.config.experts_per_token, size, own)

    @property
    def rows(self) -> int:
        """Rows of the batch on each device."""
        return rows_per_device(self.work.batch, self.mesh)

    @property
    def tokens_per_row(self) -> int:
        """Tokens of each row that pass through one device. Raises ValueError if ``context`` does not divide a row."""
        seq, parts = self.work.seq, self.mesh.shape[CONTEXT]
        if not self.work.train:
            return 1
        if seq % parts:
            raise ValueError(f"rows of {seq} tokens are not divisible by {CONTEXT}={parts}: use a multiple")
        return seq // parts

    @property
    def keys_per_token(self) -> int:
        """Bytes of a token's keys and values, or latents, in all layers, in bfloat16; of keys those of one device's
        heads. A recurrence has one state for all tokens."""
        heads = any(part.key.endswith("attention.k.kernel") for part in self.parts)
        every = sum(size for slots, size in _cache_of(self.config).items() if slots != 1)
        return every // (self.mesh.shape["tensor"] if heads else 1)

    def held(self, part: ParamSize) -> int:
        """Elements of a variable on one device."""
        return part.size // shard_count(self.mesh, part.axes)

    def gathered(self, part: ParamSize) -> int:
        """Elements per layer of a variable on one device, once it is gathered over the axes of tokens."""
        kept = [axis for axis in part.axes if axis not in TOKEN_AXES or (axis == "expert" and part.experts)]
        return part.size // max(1, part.layers) // shard_count(self.mesh, kept)

    def runs(self, part: ParamSize) -> int:
        """How often a step computes a variable's layers."""
        if part.staged:
            return part.layers // stages_of(self.mesh) * self.work.turns(self.mesh)
        return max(1, part.layers) * self.work.accumulate


def _bytes_of_codes(config: DecoderConfig, stages: int | None, method: Method | Mixed) -> dict[tuple[Any, ...], float]:
    """Path of a quantised kernel -> bytes of its codes and scales."""
    model, sizes = _build(config, stages), Counter[tuple[Any, ...]]()
    quantize_structure(model, method, jnp.bfloat16)
    kernels = {place.path for place in quantized_kernels(model)}
    for parameter in parameters(model, codes=True):
        if (path := parameter.path[:-1]) in kernels:
            sizes[tuple(path)] += math.prod(parameter.shape) * jnp.dtype(parameter.variable.dtype).itemsize
    return dict(sizes)


def adapters(step: PlannedStep) -> int:
    """The numbers of adapters on one device: of all projections but routers. Those of gate and up of experts read their
    input by the same matrix."""
    config, work, total = step.config, step.work, 0
    if work.split_rank and not config.experts:
        raise ValueError("split_rank: this model has no experts")
    if work.split_rank and work.lora % (active := config.experts_per_token):
        raise ValueError(
            f"split_rank: rank {work.lora} cannot be split over the {active} experts per token of {config.model_type}: "
            f"use a multiple of {active}"
        )
    for part in step.parts:
        if part.kernel and part.layers and "router" not in part.key:
            width = part.width - (config.hidden_size if part.key.endswith("experts.up") else 0)
            split = [axis for axis in part.axes if axis in ("expert", AXIS)]
            rank = work.lora // config.experts_per_token if part.experts and work.split_rank else work.lora
            total += rank * width * part.layers * (part.experts or 1) // shard_count(step.mesh, split)
    return total


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on one device. ``arguments``: what a step is given: parameters, moments, cache and tokens.

    ``parameters``, ``moments``, ``cache`` and ``inputs`` are exact; ``gradients`` are as large as parameters, and
    ``activations`` are an estimate.
    """

    parameters: int
    moments: int
    gradients: int
    cache: int
    inputs: int
    activations: int

    @property
    def arguments(self) -> int:
        """Bytes that a compiled step is given."""
        return self.parameters + self.moments + self.cache + self.inputs

    @property
    def total(self) -> int:
        return self.arguments + self.gradients + self.activations


def bytes_of(step: PlannedStep) -> Bytes:
    """Bytes on one device, with the batch sharded over the batch axes."""
    work, rows = step.work, step.rows
    trained = sum(step.held(part) for part in step.parts if part.trained)
    frozen = sum(step.held(part) * part.itemsize for part in step.parts if not part.trained)
    held = int(sum(step.held(part) * part.stored for part in step.parts if part.trained))
    if not work.train:  # an estimate: logits in float32, and the scores of one layer
        scores = rows * (step.config.vocab_size + step.config.num_attention_heads * work.seq) * 4
        return Bytes(held + frozen, 0, 0, _cache_bytes(step), rows * 4, scores)
    state = (adapters(step) if work.lora else trained) * STATE
    frozen += held if work.lora else 0
    tokens = rows * step.tokens_per_row * 4
    # The step's number, the optimizer's and a random key of two words.
    return Bytes(state + frozen, 2 * state, state, 0, tokens + 16, _training(step))


def bytes_read(step: PlannedStep) -> float:
    """Bytes that a device reads to decode one token per row: the cache and the weights (gathered weights in full).
    Counts the expected number of experts that uniform routing selects for the rows that reach the device."""
    config, total = step.config, float(_cache_bytes(step))
    for part in step.parts:
        if part.key == "embed.table" and not config.tie_word_embeddings:
            continue  # a row per token
        rows = step.rows * (step.mesh.shape["expert"] if "expert" in part.axes else 1)
        used = 1 - (1 - config.experts_per_token / part.experts) ** rows if part.experts else 1.0
        numbers = step.gathered(part) * max(1, part.layers)
        total += numbers * (part.stored if part.trained else part.itemsize) * used
    return total


def _cache_bytes(step: PlannedStep) -> int:
    """Bytes of the cache on one device, with each row's length and segments."""
    seq = step.work.seq
    tokens = sum(min(seq, slots or seq) * size for slots, size in _cache_of(step.config).items())
    return step.rows * (tokens + 4 + 4 * seq)


def rows_per_device(batch: int, mesh: AnyMesh) -> int:
    """Rows of a batch on each device. Raises ValueError if they do not divide."""
    over = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    count = shard_count(mesh, over)
    if batch % count:
        names = " x ".join(over)
        raise ValueError(f"a batch of {batch} rows is not divisible by the {count} devices of {names}: use a multiple")
    return batch // count


def _training(step: PlannedStep) -> int:
    """Estimate of temporary bytes besides the gradients.

    Each layer's input; of one layer its gathered kernels with their gradients, and inputs and outputs of its linear
    maps with theirs; the head, and a chunk of logits. The factors are those of compiled programs, so others may differ
    by 20 %. With exchanges between experts: for H100 (Mixtral-8x22B on 64: 35 GB with gradients where XLA takes 30;
    DeepSeek-V3 on 256 with ``buffer_factor`` 1.25: 49 and 49). Without: for v6e with ``offload`` (Llama-3.1-8B on 8: 16
    and 19; 70B on 256: 35 and 32; Mixtral-8x7B on 256: 24 and 23), where the head, the attention and the feed-forward
    of a layer take turns, and copies of the parameters in the dtype of activations live beside them.
    """
    from nnxmoe.train.loop.loss import ChunkedLoss  # late: training imports Orbax

    config, work, mesh = step.config, step.work, step.mesh
    rows = step.rows // work.accumulate or 1
    tokens, tensor, vector = rows * step.tokens_per_row, mesh.shape["tensor"], config.hidden_size * VALUES
    staged = max((part.layers for part in step.parts if part.staged), default=0)
    runs, more = [(False, tokens, config.num_hidden_layers - staged)], 0
    if work.pipeline is not None:  # every turn keeps the inputs of a stage's layers; beside them slots and what is sent
        stages = stages_of(mesh)
        held = work.pipeline.microbatches // stages
        runs.append((True, tokens // held, staged // stages * work.pipeline.turns(stages)))
        more = tokens // held * vector * (held + 4)
    kept = sum(each * vector * (2 if work.offload else times) for _, each, times in runs)
    of_one = [_one_layer([part for part in step.parts if part.staged == which]) for which, _, _ in runs]
    layers = [_layer(step, one, each) for one, (_, each, _) in zip(of_one, runs, strict=True)]
    everything = sum(size * times / 2 for size, (_, _, times) in zip(layers, runs, strict=True))
    exchanged = mesh.shape["expert"] > 1
    kernels = (4 if work.lora else 16 if exchanged else 6) * max(sum(map(step.gathered, one)) for one in of_one)
    head = config.vocab_size * config.hidden_size // tensor * (VALUES + (0 if work.lora else STATE))
    logits = min(ChunkedLoss().logits, tokens * config.vocab_size // tensor) * 4 * 3
    # The sum over parts or turns, beside the gradients of one.
    trained = [part for part in step.parts if part.trained]
    summed = [part for part in trained if not work.lora and (work.accumulate > 1 or part.staged)]
    more += sum(map(step.held, summed)) * STATE
    layer = kernels + (max(layers) if work.remat else everything)
    if mesh.shape[CONTEXT] > 1:  # of one layer the gathered keys and values, and their gradients in float32
        layer += 3 * rows * work.seq * step.keys_per_token // config.num_hidden_layers
    if exchanged:
        return int(kept + layer + head + logits + more)
    return int(kept + max(layer, head + logits) + sum(map(step.held, trained)) * VALUES + more)


def _layer(step: PlannedStep, one: list[ParamSize], tokens: int) -> float:
    """Inputs and outputs of a layer's linear maps, with their gradients."""
    routed = sum(part.width for part in one if part.experts)
    attention = sum(part.width for part in one if ".attention." in part.key)
    others = sum(part.width for part in one) - routed - attention
    chosen, size = step.config.experts_per_token, step.mesh.shape["expert"]
    experts, rows = max((part.experts for part in one), default=0), tokens * chosen
    if size > 1 and experts:  # the buffer of one device's experts
        rows = buffer_size(step.work.buffer_factor, -(-tokens // step.chunks), chosen, size, experts // size)
    if size > 1:
        numbers = 4 * tokens * (attention + others) + 2.5 * rows * routed
    else:
        numbers = max(3 * tokens * attention, 3 * tokens * others + 1.2 * rows * routed)
    return numbers * VALUES / step.mesh.shape["tensor"]


def _one_layer(found: list[ParamSize]) -> list[ParamSize]:
    """The kernels of the run with the most parameters, such as DeepSeek's layers with experts."""
    runs: dict[int | None, list[ParamSize]] = {}
    for part in found:
        if part.kernel and part.layers:
            runs.setdefault(part.stack, []).append(part)
    return max(runs.values(), key=lambda run: sum(part.size for part in run), default=[])


def cache_per_token(model: CausalLM) -> dict[int | None, int]:
    """The most tokens that a layer's cache holds (None: no limit) -> bytes per token and row of such layers."""

    def size(attention: Any, capacity: int) -> int:
        buffers = jax.eval_shape(lambda: jax.tree.leaves(attention.empty_cache(1, capacity, model.dtype)))
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)

    found, plenty = Counter[int | None](), 2**30
    for stack in model.stacks:
        assert isinstance(stack, UnrolledStack), "the default of models without a strategy"
        for layer in stack.layers:
            if token := size(layer.attention, 1):
                slots = size(layer.attention, plenty) // token
                found[None if slots == plenty else slots] += token
    return dict(found)


def _build(config: DecoderConfig, stages: int | None) -> CausalLM:
    """Make the model without arrays, its layers stacked as by `Scanned`, or as by a `Pipeline` of this many stages."""
    strategy = Strategy(stacking=Scanned(), pipeline=None if stages is None else Pipeline(stages, stages))
    return model_class(config)(config, strategy, rngs=None, dtype=jnp.bfloat16)


_scanned = functools.lru_cache(maxsize=8)(_build)


@functools.lru_cache(maxsize=8)
def _cache_of(config: DecoderConfig) -> dict[int | None, int]:
    return cache_per_token(abstract(config))


@functools.lru_cache(maxsize=8)
def abstract(config: DecoderConfig) -> CausalLM:
    """Make the model without arrays, with unrolled layers."""
    return model_class(config)(config, Strategy(), rngs=None, dtype=jnp.bfloat16)
