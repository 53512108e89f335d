"""Bytes that a model takes on one device of a mesh, from shapes alone: parameters, state and cache."""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.axes import (
    BATCH_AXES,
    CONTEXT,
    TOKEN_AXES,
    AnyMesh,
    Rules,
    axes_of,
    axes_per_dimension,
    check_mesh,
    of_layers,
    shards,
)
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.core.layout import parameters
from nnxmoe.layers.kernel import KernelParam
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.stack import Scanned, UnrolledStack
from nnxmoe.model.strategy import Strategy, check_context
from nnxmoe.models import model_class
from nnxmoe.moe.expert_parallel import buffer_rows
from nnxmoe.quantization.kernels import quantized_weights
from nnxmoe.quantization.methods import Method, Mixed
from nnxmoe.quantization.rounding import quantize_shapes


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one step: ``batch`` rows of ``seq`` tokens to train on, or rows with ``seq`` tokens in the
    cache of which each gets one more (``train`` False). ``accumulate``: parts of a training batch;
    ``buffer_factor``: of `RaggedAllToAll`; ``chunks``: of `InChunks` around it; ``remat``: activations are computed
    again in the backward pass; ``pipeline``: how the mesh axis ``pipe`` splits layers, None: it does not.
    ``offload``: the host keeps the inputs of layers, as with ``Remat(offload=("layer_input",))``.
    What plans know of and no strategy does yet: ``interleaved``: groups of layers per stage; ``node_copies``: one copy
    of a token per node goes to its experts there.
    ``lora``: the rank of adapters of all kernels of layers, which alone are trained; 0: everything is.
    ``split_rank``: those of experts have the rank divided by the experts per token. ``compute``: how products are
    computed.

    ``state``: bytes per number of parameters while training, ``values`` bytes of activations and of weights decoded.
    """

    batch: int
    seq: int
    train: bool = True
    accumulate: int = 1
    buffer_factor: float | None = None
    chunks: int = 1
    state: int = 4
    values: int = 2
    remat: bool = True
    pipeline: Pipeline | None = None
    interleaved: int = 1
    offload: bool = False
    node_copies: bool = False
    lora: int = 0
    split_rank: bool = False
    compute: Literal["bf16", "fp8"] = "bf16"

    def turns(self, mesh: AnyMesh) -> int:
        """How often a step computes a layer, and gathers its kernels: once for each part of a batch, or each turn."""
        if self.pipeline is None:
            return self.accumulate
        stages = stages_of(mesh)
        return self.accumulate * (self.pipeline.microbatches + math.ceil((stages - 1) / self.interleaved))

    @property
    def tokens(self) -> int:
        """Tokens that pass through the model in one step."""
        return self.batch * (self.seq if self.train else 1)


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


def parts(
    config: DecoderConfig,
    mesh: AnyMesh,
    rules: Rules,
    pipeline: Pipeline | None = None,
    quantize: Method | Mixed | None = None,
) -> list[ParamSize]:
    """List the variables of a model. Raises ValueError if the rules cannot shard one of them, or ``quantize`` fits
    none."""
    stages = None if pipeline is None else stages_of(mesh)
    model, found = _scanned(config, stages), []
    check_context(model, mesh)
    check_mesh(model, mesh, rules)
    codes = {} if quantize is None else _bytes_of_codes(config, stages, quantize)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, _, stack = name_of(model, path)
        axes, shape = axes_of(variable), variable.shape
        over = axes_per_dimension(axes, mesh, rules)
        experts = shape[axes.index("expert")] if "expert" in axes else 0
        layers = shape[0] if of_layers(axes) else 0
        trained, kernel = isinstance(variable, nnx.Param), isinstance(variable, KernelParam)
        width = sum(map(math.prod, variable.split(shape)[1:])) if isinstance(variable, KernelParam) else 0
        itemsize = jnp.dtype(variable.dtype).itemsize
        sizes, staged = (math.prod(shape), over), axes[:1] == ("stages",)
        stored = codes.get(tuple(path), 2.0 * variable.size) / variable.size
        found.append(ParamSize(key, *sizes, trained, kernel, experts, itemsize, layers, staged, stack, width, stored))
    return found


def _bytes_of_codes(config: DecoderConfig, stages: int | None, method: Method | Mixed) -> dict[tuple[Any, ...], float]:
    """Path of a quantised kernel -> bytes of its codes and scales."""
    model, sizes = _build(config, stages), Counter[tuple[Any, ...]]()
    quantize_shapes(model, method, jnp.bfloat16)
    kernels = {place.path for place in quantized_weights(model)}
    for parameter in parameters(model, codes=True):
        if (path := parameter.path[:-1]) in kernels:
            sizes[tuple(path)] += math.prod(parameter.shape) * jnp.dtype(parameter.variable.dtype).itemsize
    return dict(sizes)


def adapters(config: DecoderConfig, found: list[ParamSize], work: Work, mesh: AnyMesh) -> int:
    """The numbers of adapters on one device: of all projections but routers. Those of gate and up of experts read their
    input by the same matrix."""
    if work.split_rank and not config.experts:
        raise ValueError("split_rank: this model has no experts")
    if work.split_rank and work.lora % (active := config.experts_per_token):
        raise ValueError(
            f"split_rank: rank {work.lora} cannot be split over the {active} experts per token of {config.model_type}: "
            f"use a multiple of {active}"
        )
    total = 0
    for part in found:
        if part.kernel and part.layers and "router" not in part.key:
            width = part.width - (config.hidden_size if part.key.endswith("experts.up") else 0)
            split = [axis for axis in part.axes if axis in ("expert", AXIS)]
            rank = work.lora // config.experts_per_token if part.experts and work.split_rank else work.lora
            total += rank * width * part.layers * (part.experts or 1) // shards(mesh, split)
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
        """Bytes in all."""
        return self.arguments + self.gradients + self.activations


def bytes_of(config: DecoderConfig, found: list[ParamSize], work: Work, mesh: AnyMesh) -> Bytes:
    """Bytes on one device, with the batch sharded over the batch axes."""
    rows = rows_per_device(work.batch, mesh)
    trained = sum(part.size // shards(mesh, part.axes) for part in found if part.trained)
    frozen = sum(part.size // shards(mesh, part.axes) * part.itemsize for part in found if not part.trained)
    held = int(sum(part.size // shards(mesh, part.axes) * part.stored for part in found if part.trained))
    if not work.train:
        cache = sum(min(work.seq, slots or work.seq) * size for slots, size in _cache_of(config).items())
        cache = rows * (cache + 4 + 4 * work.seq)  # and each row's length and segments
        return Bytes(held + frozen, 0, 0, cache, rows * 4, _decoding(config, rows, work))
    state = (adapters(config, found, work, mesh) if work.lora else trained) * work.state
    frozen += held if work.lora else 0
    tokens = rows * tokens_per_row(work, mesh) * 4
    activations = _training(config, found, rows // max(1, work.accumulate) or 1, work, mesh)
    # The step's number, the optimizer's and a random key of two words.
    return Bytes(state + frozen, 2 * state, state, 0, tokens + 16, activations)


def bytes_read(config: DecoderConfig, found: list[ParamSize], work: Work, mesh: AnyMesh) -> float:
    """Bytes that a device reads to decode one token per row: the cache and the weights; of the experts, the expected
    number that uniform routing selects."""
    total = float(bytes_of(config, found, dataclasses.replace(work, train=False), mesh).cache)
    for part in found:
        if part.key == "embed.table" and not config.tie_word_embeddings:
            continue  # a row per token
        used = 1 - (1 - config.experts_per_token / part.experts) ** work.batch if part.experts else 1.0
        size = part.stored if part.trained else part.itemsize
        total += part.size // shards(mesh, part.axes) * size * used
    return total


def rows_per_device(batch: int, mesh: AnyMesh) -> int:
    """Rows of a batch on each device. Raises ValueError if they do not divide."""
    over = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    count = shards(mesh, over)
    if batch % count:
        raise ValueError(f"a batch of {batch} rows does not divide over the {count} devices of {over}: use a multiple")
    return batch // count


def tokens_per_row(work: Work, mesh: AnyMesh) -> int:
    """Tokens of each row that pass through one device. Raises ValueError if ``context`` does not divide a row."""
    if not work.train:
        return 1
    if work.seq % mesh.shape[CONTEXT]:
        raise ValueError(f"{work.seq} tokens do not divide over {CONTEXT}={mesh.shape[CONTEXT]}: use a multiple")
    return work.seq // mesh.shape[CONTEXT]


def _training(config: Any, found: list[ParamSize], rows: int, work: Work, mesh: AnyMesh) -> int:
    """Estimate of temporary bytes besides the gradients.

    Each layer's input; of one layer its gathered kernels with their gradients, and inputs and outputs of its linear
    maps with theirs; the head, and a chunk of logits. The factors are those of compiled programs, so others may differ
    by 20 %. With exchanges between experts: for H100 (Mixtral-8x22B on 64: 35 GB with gradients where XLA takes 30;
    DeepSeek-V3 on 256 with ``buffer_factor`` 1.25: 49 and 49). Without: for v6e with ``offload`` (Llama-3.1-8B on 8: 16
    and 19; 70B on 256: 35 and 32; Mixtral-8x7B on 256: 24 and 23), where the head, the attention and the feed-forward
    of a layer take turns, and copies of the parameters in the dtype of activations live beside them.
    """
    tokens, tensor, vector = rows * tokens_per_row(work, mesh), mesh.shape["tensor"], config.hidden_size * work.values
    staged = max((part.layers for part in found if part.staged), default=0)
    runs, more = [(False, tokens, config.num_hidden_layers - staged)], 0
    if work.pipeline is not None:  # every turn keeps the inputs of a stage's layers; beside them slots and what is sent
        stages = stages_of(mesh)
        held = work.pipeline.microbatches // stages
        runs.append((True, tokens // held, staged // stages * work.pipeline.turns(stages)))
        more = tokens // held * vector * (held + 4)
    kept = sum(each * vector * (2 if work.offload else times) for _, each, times in runs)
    of_one = [_one_layer([part for part in found if part.staged == which]) for which, _, _ in runs]
    layers = [_layer(config, one, each, work, mesh) for one, (_, each, _) in zip(of_one, runs, strict=True)]
    everything = sum(size * times / 2 for size, (_, _, times) in zip(layers, runs, strict=True))
    exchanged = mesh.shape["expert"] > 1
    kernels = (4 if work.lora else 16 if exchanged else 6) * max(
        sum(gathered(part, mesh) for part in one) for one in of_one
    )
    head = config.vocab_size * config.hidden_size // tensor * (work.values + (0 if work.lora else work.state))
    logits = min(chunk_logits(), tokens * config.vocab_size // tensor) * 4 * 3
    # The sum over parts or turns, beside the gradients of one.
    summed = [part for part in found if part.trained and not work.lora and (work.accumulate > 1 or part.staged)]
    more += sum(part.size // shards(mesh, part.axes) for part in summed) * work.state
    layer = kernels + (max(layers) if work.remat else everything)
    if mesh.shape[CONTEXT] > 1:  # of one layer the gathered keys and values, and their gradients in float32
        layer += 3 * rows * work.seq * keys_per_token(config, found, mesh) // config.num_hidden_layers
    if exchanged:
        return int(kept + layer + head + logits + more)
    copies = sum(part.size // shards(mesh, part.axes) for part in found if part.trained) * work.values
    return int(kept + max(layer, head + logits) + copies + more)


def _layer(config: Any, one: list[ParamSize], tokens: int, work: Work, mesh: AnyMesh) -> float:
    """Inputs and outputs of a layer's linear maps, with their gradients."""
    routed = sum(part.width for part in one if part.experts)
    attention = sum(part.width for part in one if ".attention." in part.key)
    others = sum(part.width for part in one) - routed - attention
    rows = _received(config, one, tokens, work, mesh)
    if mesh.shape["expert"] > 1:
        numbers = 4 * tokens * (attention + others) + 2.5 * rows * routed
    else:
        numbers = max(3 * tokens * attention, 3 * tokens * others + 1.2 * rows * routed)
    return numbers * work.values / mesh.shape["tensor"]


def chunk_logits() -> int:
    """Logits per device that the default loss computes at once. Imported late: training imports Orbax."""
    from nnxmoe.train.loop.loss import ChunkedLoss

    return ChunkedLoss().logits


def _one_layer(found: list[ParamSize]) -> list[ParamSize]:
    """The kernels of the run with the most parameters, such as DeepSeek's layers with experts."""
    runs: dict[int | None, list[ParamSize]] = {}
    for part in found:
        if part.kernel and part.layers:
            runs.setdefault(part.stack, []).append(part)
    return max(runs.values(), key=lambda run: sum(part.size for part in run), default=[])


def _received(config: Any, found: list[ParamSize], tokens: int, work: Work, mesh: AnyMesh) -> int:
    """Rows in the buffer of one device's experts; without an expert axis one per assignment."""
    size, experts = mesh.shape["expert"], max((part.experts for part in found), default=0)
    if size == 1 or not experts:
        return tokens * config.experts_per_token
    return buffer_rows(work.buffer_factor, -(-tokens // work.chunks), config.experts_per_token, size, experts // size)


def _decoding(config: Any, rows: int, work: Work) -> int:
    """Estimate: logits in float32, and the scores of one layer."""
    return rows * (config.vocab_size + config.num_attention_heads * work.seq) * 4


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


@functools.lru_cache(maxsize=8)
def _scanned(config: DecoderConfig, stages: int | None) -> CausalLM:
    return _build(config, stages)


def _build(config: DecoderConfig, stages: int | None) -> CausalLM:
    """Make the model without arrays, its layers stacked as by `Scanned`, or as by a `Pipeline` of this many stages."""
    strategy = Strategy(stacking=Scanned(), pipeline=None if stages is None else Pipeline(stages, stages))
    return model_class(config)(config, strategy, rngs=None, dtype=jnp.bfloat16)


@functools.lru_cache(maxsize=8)
def _cache_of(config: DecoderConfig) -> dict[int | None, int]:
    return cache_per_token(abstract(config))


def keys_per_token(config: DecoderConfig, found: list[ParamSize], mesh: AnyMesh) -> int:
    """Bytes of a token's keys and values, or latents, in all layers, in bfloat16; of keys those of one device's heads.
    A recurrence has one state for all tokens."""
    heads = any(part.key.endswith("attention.k.kernel") for part in found)
    every = sum(size for slots, size in _cache_of(config).items() if slots != 1)
    return every // (mesh.shape["tensor"] if heads else 1)


@functools.lru_cache(maxsize=8)
def abstract(config: DecoderConfig) -> CausalLM:
    """Make the model without arrays, with unrolled layers."""
    return model_class(config)(config, Strategy(), rngs=None, dtype=jnp.bfloat16)


def gathered(part: ParamSize, mesh: AnyMesh) -> int:
    """Elements per layer of a variable on one device, once it is gathered over the axes of tokens."""
    own = ("expert",) if part.experts else ()
    kept = tuple(axis for axis in part.axes if axis not in TOKEN_AXES or axis in own)
    return part.size // max(1, part.layers) // shards(mesh, kept)
