"""Estimate the bytes of a step on one device: parameters, optimizer state, activations and cache."""

import dataclasses
from typing import NamedTuple

from nnxmoe.apps.planning.planned_step import STATE, VALUES, ParamSize, PlannedStep, cache_sizes
from nnxmoe.axes import CONTEXT
from nnxmoe.model.pipeline import AXIS, stages_of
from nnxmoe.moe.expert_parallel import buffer_size
from nnxmoe.runtime.hardware import TPU
from nnxmoe.sharding_rules import shard_count


def adapters(step: PlannedStep) -> int:
    """Count the elements of the LoRA adapters on one device.

    Every projection in a layer has an adapter, except the router. The gate and up projections of an expert
    share one LoRA A matrix.
    """
    config, work, total = step.config, step.work, 0
    if work.split_rank and not config.experts:
        raise ValueError("split_rank: this model has no experts")
    if work.split_rank and work.lora % (active := config.experts_per_token):
        raise ValueError(
            f"split_rank: rank {work.lora} cannot be split over the {active} experts per token of {config.model_type}: "
            f"use a multiple of {active}"
        )
    for param in step.parts:
        if param.kernel and param.layers and "router" not in param.key:
            width = param.width - (config.hidden_size if param.key.endswith("experts.up") else 0)
            axes = [axis for axis in param.axes if axis in ("expert", AXIS)]
            rank = work.lora // config.experts_per_token if param.experts and work.split_rank else work.lora
            total += rank * width * param.layers * (param.experts or 1) // shard_count(step.mesh, axes)
    return total


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes that a step uses on one device.

    ``parameters``, ``moments``, ``cache`` and ``inputs`` are exact. ``gradients`` have the size of the
    trained parameters. ``activations`` are an estimate.
    """

    parameters: int
    moments: int
    gradients: int
    cache: int
    inputs: int
    activations: int

    @property
    def arguments(self) -> int:
        """Bytes of the compiled step's arguments."""
        return self.parameters + self.moments + self.cache + self.inputs

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.arguments + self.gradients + self.activations


def bytes_of(step: PlannedStep, platform: str) -> Bytes:
    """Compute the bytes of a step on one device. ``platform`` is the device's platform, such as "tpu"."""
    work, rows = step.work, step.rows
    num_trained = sum(step.held(param) for param in step.parts if param.trained)
    frozen_bytes = sum(step.held(param) * param.itemsize for param in step.parts if not param.trained)
    stored_bytes = int(sum(step.held(param) * param.stored for param in step.parts if param.trained))
    if not work.train:  # estimate: float32 logits and one layer's attention scores
        scores = rows * (step.config.vocab_size + step.config.num_attention_heads * work.seq) * 4
        return Bytes(stored_bytes + frozen_bytes, 0, 0, _cache_bytes(step), rows * 4, scores)
    state = (adapters(step) if work.lora else num_trained) * STATE
    frozen_bytes += stored_bytes if work.lora else 0
    tokens = rows * step.tokens_per_row * 4
    # 16 bytes: the step number, the optimizer's step number and a random key of two words.
    return Bytes(state + frozen_bytes, 2 * state, state, 0, tokens + 16, _temporary(step, platform == TPU))


def bytes_read(step: PlannedStep) -> float:
    """Compute the bytes that one device reads to decode one token per row.

    The device reads the cache and the weights. All-gathered weights count with their full size. Weights of
    experts are scaled by the expected fraction of experts that uniform routing selects for the device's rows.
    """
    config, total = step.config, float(_cache_bytes(step))
    for param in step.parts:
        if param.is_table and param.role != "head":
            continue  # a lookup reads only one row of the table per token
        rows = step.rows * (step.mesh.shape["expert"] if "expert" in param.axes else 1)
        read_fraction = 1 - (1 - config.experts_per_token / param.experts) ** rows if param.experts else 1.0
        numbers = step.gathered(param) * max(1, param.layers)
        total += numbers * (param.stored if param.trained else param.itemsize) * read_fraction
    return total


def _cache_bytes(step: PlannedStep) -> int:
    """Compute the bytes of the cache on one device, including the length and the segment ids of each row."""
    seq = step.work.seq
    tokens = sum(min(seq, slots or seq) * size for slots, size in cache_sizes(step.config).items())
    return step.rows * (tokens + 4 + 4 * seq)


# These constants are fitted to the temporary memory of compiled training steps. For other models, the estimate may be
# off by 20 %. Estimated memory, with XLA's figure in parentheses:
# - H100, expert exchange, including gradients: 32 GB (35 GB) for Mixtral-8x22B on 64 devices, 51 GB (50 GB) for
#   DeepSeek-V3 in two chunks on 256 devices.
# - v5p, expert exchange, including gradients: 22 GB (23 GB) for Mixtral-8x22B on 64 devices. On 256 devices, 45 GB
#   (40 GB) for DeepSeek-V3, and 31 GB (33 GB) with a buffer factor of 1.25.
# - v6e, offload, no exchange: 16 GB (19 GB) for Llama-3.1-8B on 8 devices, 35 GB (32 GB) for Llama-3.1-70B on 256
#   devices, 24 GB (23 GB) for Mixtral-8x7B on 256 devices.
_KERNEL_BYTES_EXCHANGE, _KERNEL_BYTES_EXCHANGE_TPU = 16, 2.5  # per kernel element of one layer, including gradients
_KERNEL_BYTES = 6
_KERNEL_BYTES_FROZEN = 4  # LoRA: kernels have no gradients
_LIVE_EXCHANGE = 4  # live arrays per input or output feature, except for experts
_LIVE_ROUTED_EXCHANGE, _LIVE_ROUTED_CHUNKS, _LIVE_ROUTED_EXCHANGE_TPU = 2.5, 0.8, 1.1  # live arrays of experts
_LIVE, _LIVE_ROUTED = 3, 1.2
_SLOTS = 4  # additional microbatch buffers of a pipeline stage, for receiving, computing and sending
_LOGITS = 3 * 4  # bytes per logit: the loss holds three float32 arrays per chunk of logits


def _temporary(step: PlannedStep, is_tpu: bool) -> int:
    """Estimate the temporary bytes of a training step without the gradients.

    The estimate includes the inputs of all layers, the gathered kernels and activations of one layer with
    their gradients, the head, and one chunk of logits. Without an expert exchange, the head, the attention
    and the feed-forward of a layer are never live at the same time, so only the largest of the three counts.
    The estimate then also includes a copy of the parameters in the activations' dtype.
    """
    from nnxmoe.train.loop.loss import ChunkedLoss  # imported lazily because training imports Orbax

    config, work, mesh = step.config, step.work, step.mesh
    rows = step.rows // work.accumulate or 1
    tokens, tensor, width = rows * step.tokens_per_row, mesh.shape["tensor"], config.hidden_size * VALUES
    has_exchange = mesh.shape["expert"] > 1
    num_staged_layers = max((param.layers for param in step.parts if param.staged), default=0)
    runs, slots = [_LayerRun.of(step, False, tokens, config.num_hidden_layers - num_staged_layers)], 0
    if work.pipeline is not None:  # every turn of the pipeline stores the layer inputs of a stage
        stages = stages_of(mesh)
        microbatches_per_stage = work.pipeline.microbatches // stages
        turns = work.pipeline.num_turns(stages)
        runs.append(_LayerRun.of(step, True, tokens // microbatches_per_stage, num_staged_layers // stages * turns))
        slots = tokens // microbatches_per_stage * width * (microbatches_per_stage + _SLOTS)
    inputs = sum(run.tokens * width * (2 if work.offload else run.times) for run in runs)
    kernels = _kernel_bytes(step, is_tpu) * max(sum(map(step.gathered, run.kernels)) for run in runs)
    activations = [_activation_bytes(step, run, is_tpu) for run in runs]
    if work.remat:
        layer = kernels + max(activations)
    else:
        layer = kernels + sum(size * run.times / 2 for size, run in zip(activations, runs, strict=True))
    if mesh.shape[CONTEXT] > 1:  # one layer's gathered keys and values, and their gradients in float32
        layer += 3 * rows * work.seq * step.keys_per_token // config.num_hidden_layers
    head = config.vocab_size * config.hidden_size // tensor * (VALUES + (0 if work.lora else STATE))
    logits = min(ChunkedLoss().logits, tokens * config.vocab_size // tensor) * _LOGITS
    trained_params = [param for param in step.parts if param.trained]
    # The accumulated gradients exist in addition to the gradients of the current microbatch.
    accumulated_params = [param for param in trained_params if not work.lora and (work.accumulate > 1 or param.staged)]
    slots += sum(map(step.held, accumulated_params)) * STATE
    if has_exchange:
        return int(inputs + layer + head + logits + slots)
    return int(inputs + max(layer, head + logits) + sum(map(step.held, trained_params)) * VALUES + slots)


class _LayerRun(NamedTuple):
    """Layers that process the same number of tokens per call.

    Attributes:
        kernels: Kernels of one layer of the largest stack, such as DeepSeek's MoE layers.
        tokens: Tokens per call of a layer.
        times: Number of layer calls per step.
    """

    kernels: list[ParamSize]
    tokens: int
    times: int

    @classmethod
    def of(cls, step: PlannedStep, staged: bool, tokens: int, times: int) -> "_LayerRun":
        stacks: dict[int | None, list[ParamSize]] = {}
        for param in step.parts:
            if param.staged == staged and param.kernel and param.layers:
                stacks.setdefault(param.stack, []).append(param)
        return cls(
            max(stacks.values(), key=lambda stack: sum(param.size for param in stack), default=[]), tokens, times
        )


def _activation_bytes(step: PlannedStep, run: _LayerRun, is_tpu: bool) -> float:
    """Estimate the bytes of the inputs and outputs of a layer's linear maps, with their gradients."""
    routed_width = sum(param.width for param in run.kernels if param.experts)
    attention_width = sum(param.width for param in run.kernels if ".attention." in param.key)
    other_width = sum(param.width for param in run.kernels) - routed_width - attention_width
    experts_per_token, size = step.config.experts_per_token, step.mesh.shape["expert"]
    experts, tokens = max((param.experts for param in run.kernels), default=0), run.tokens
    rows = tokens * experts_per_token
    if size > 1 and experts:  # rows of the buffer that receives tokens for a device's experts
        chunk = -(-tokens // step.chunks)
        rows = buffer_size(step.work.buffer_factor, chunk, experts_per_token, size, experts // size)
    if size > 1:
        elements = _LIVE_EXCHANGE * tokens * (attention_width + other_width)
        elements += _live_routed(step, is_tpu) * rows * routed_width
    else:
        elements = max(
            _LIVE * tokens * attention_width, _LIVE * tokens * other_width + _LIVE_ROUTED * rows * routed_width
        )
    return elements * VALUES / step.mesh.shape["tensor"]


def _kernel_bytes(step: PlannedStep, is_tpu: bool) -> float:
    """Return the temporary bytes per element of one layer's gathered kernels."""
    if step.mesh.shape["expert"] == 1:
        return _KERNEL_BYTES_FROZEN if step.work.lora else _KERNEL_BYTES
    if is_tpu:
        return _KERNEL_BYTES_EXCHANGE_TPU
    return _KERNEL_BYTES_FROZEN if step.work.lora else _KERNEL_BYTES_EXCHANGE


def _live_routed(step: PlannedStep, is_tpu: bool) -> float:
    """Return the number of live arrays per input or output feature of the experts, with an exchange."""
    if is_tpu:
        return _LIVE_ROUTED_EXCHANGE_TPU
    return _LIVE_ROUTED_EXCHANGE if step.chunks == 1 else _LIVE_ROUTED_CHUNKS
