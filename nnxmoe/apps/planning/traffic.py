"""Estimate the traffic between the devices of a mesh in one step, from shapes."""

import dataclasses
from collections.abc import Iterable

from nnxmoe.apps.planning.planned_step import STATE, VALUES, ParamSize, PlannedStep
from nnxmoe.axes import CONTEXT, TOKEN_AXES
from nnxmoe.model.pipeline import AXIS, stages_of
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one type over the same mesh axes in one step.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute.
        axes: Mesh axes of the collectives.
        bytes: Bytes that one device receives in all calls together.
        times: Number of calls.
        what: Transferred data: ``"tokens"``, ``"keys"``, or the `Role` of the parameters.
        copies: Number of experts per token if a token is sent once per node, or 0 if it is sent once per expert.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    what: str = ""
    copies: int = 0


class _Sums:
    """Total bytes and calls per type of collective, mesh axes and type of data."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, tuple[str, ...], str], float] = {}
        self.times: dict[tuple[str, tuple[str, ...], str], float] = {}

    def add(self, kind: str, axes: tuple[str, ...], what: str, size: float, times: float) -> None:
        """Add ``times`` calls of ``size`` bytes."""
        key = (kind, axes, what)
        self.bytes[key] = self.bytes.get(key, 0.0) + size * times
        self.times[key] = self.times.get(key, 0) + times


def traffic(step: PlannedStep) -> list[Traffic]:
    """Estimate the traffic of all collectives in a step.

    The collectives gather kernels, reduce gradients, exchange tokens with experts, and gather keys for
    `AllGatherAttention`.

    Kernels are gathered once per pass, in the dtype of activations or as quantized codes. The head is
    gathered once per part of a batch. Kernel gradients are reduced in `Work.reduce_dtype`. Gradients of
    adapters are not counted. Token embeddings are exchanged instead of the embedding table. A pipeline stage runs these
    collectives in every turn, including idle turns. In each turn, a stage sends its output and one stored
    microbatch to the next stage. In the backward pass, it sends their gradients to the previous stage.
    """
    config, work, mesh, sums = step.config, step.work, step.mesh, _Sums()
    for param in step.parts:
        _parameter(step, param, sums)
    _activations(step, sums)
    if work.train and mesh.shape[CONTEXT] > 1:
        _keys(step, sums)
    if work.pipeline is not None:
        tokens = step.rows * stages_of(mesh) // work.pipeline.microbatches // work.accumulate
        size = tokens * work.seq * config.hidden_size * VALUES
        sums.add("collective-permute", (AXIS,), "tokens", 2 * size, 2 * work.num_turns(mesh))
        sums.add("collective-permute", (AXIS,), "tokens", size, 2 * work.accumulate)
    collectives = list[Traffic]()
    for (kind, axes, data), size in sums.bytes.items():
        to_experts = (kind, data) == ("all-to-all", "tokens")
        copies = config.experts_per_token if work.node_copies and to_experts else 0
        collectives.append(Traffic(kind, axes, size, int(sums.times[kind, axes, data]), data, copies))
    return collectives


def _parameter(step: PlannedStep, param: ParamSize, sums: _Sums) -> None:
    """Add the all-gathers of a parameter and the reductions of its gradients."""
    work, mesh = step.work, step.mesh
    token_axes = tuple(axis for axis in TOKEN_AXES if mesh.shape[axis] > 1)
    # A device computes only its own experts and layers, so the axes that shard them are not gathered.
    computed_axes = (*(("expert",) if param.experts else ()), *((AXIS,) if param.staged else ()))
    axes = tuple(axis for axis in param.axes if axis in token_axes and axis not in computed_axes)
    size, times, fraction = step.gathered(param), step.runs(param), 1 - 1 / shard_count(mesh, axes)
    if param.is_table and axes:
        _embeddings(step, axes, param.over[-2], sums)
    is_gathered = axes and (not param.is_table or param.role == "head")
    if is_gathered:
        passes = 2 if work.train and work.remat and param.role != "head" else 1
        sums.add("all-gather", axes, param.role, size * param.stored * fraction, times * passes)
    if not work.train or not param.trained or work.lora:
        return
    itemsize = work.reduction_itemsize if param.kernel or param.role == "head" else STATE
    if is_gathered:
        sums.add("reduce-scatter", axes, param.role, size * itemsize * fraction, times)
    replicated_axes = tuple(axis for axis in token_axes if axis not in param.axes)
    if replicated_axes:
        shard = size / shard_count(mesh, axes) * itemsize
        sums.add(
            "all-reduce", replicated_axes, param.role, 2 * shard * (1 - 1 / shard_count(mesh, replicated_axes)), times
        )


def _embeddings(step: PlannedStep, axes: tuple[str, ...], vocab_axes: tuple[str, ...], sums: _Sums) -> None:
    """Add the all-to-all of token embeddings over ``axes``, and their all-reduce over ``vocab_axes``."""
    work, mesh = step.work, step.mesh
    tokens = step.rows * step.tokens_per_row // work.accumulate
    size, times = tokens * step.config.hidden_size * VALUES, (2 if work.train else 1) * work.accumulate
    sums.add("all-to-all", axes, "embedding", size * (1 - 1 / shard_count(mesh, axes)), times)
    if vocab_axes:
        sums.add("all-reduce", vocab_axes, "embedding", 2 * size * (1 - 1 / shard_count(mesh, vocab_axes)), times)


def _activations(step: PlannedStep, sums: _Sums) -> None:
    """Add the exchange of tokens with the experts, and the reduction of partial sums over the tensor axis."""
    work, mesh = step.work, step.mesh
    passes = (3 if work.remat else 2) if work.train else 1
    width = step.config.hidden_size * VALUES
    experts, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    if experts > 1:
        recomputed = int(work.train and step.chunks > 1)  # the backward pass recomputes each chunk
        for run in _runs(param for param in step.parts if param.experts):
            size = _tokens(step, run) * step.config.experts_per_token * width * (1 - 1 / experts)
            sums.add("all-to-all", ("expert",), "tokens", size, 2 * (passes + recomputed) * step.runs(run))
    if tensor > 1:
        # Each layer has at least one of these norms.
        norms = "attention_norm.scale", "attention_post_norm.scale", "attention_streams.scale"
        for run in _runs(param for param in step.parts if param.layers and param.key.endswith(norms)):
            size = 2 * _tokens(step, run) * width * (1 - 1 / tensor)
            sums.add("all-reduce", ("tensor",), "tokens", size, 2 * passes * step.runs(run))


def _runs(params: Iterable[ParamSize]) -> Iterable[ParamSize]:
    """Return one parameter per run of layers."""
    return {(param.stack, param.staged): param for param in params}.values()


def _tokens(step: PlannedStep, param: ParamSize) -> float:
    """Return the tokens per device in each call of a layer that uses the parameter."""
    tokens = step.rows * step.tokens_per_row / step.work.accumulate
    if param.staged and step.work.pipeline is not None:
        tokens *= stages_of(step.mesh) / step.work.pipeline.microbatches
    return tokens


def _keys(step: PlannedStep, sums: _Sums) -> None:
    """Add the ring exchange of keys and values, or latents, and of their gradients.

    Also adds the permutation of queries to the balanced order, and of attention outputs back.
    """
    config, work, mesh = step.config, step.work, step.mesh
    tokens = step.rows * step.tokens_per_row / work.accumulate
    times = (3 if work.remat else 2) * config.num_hidden_layers * work.accumulate
    width = max(param.width for param in step.parts if param.key.endswith("attention.o.kernel")) - config.hidden_size
    size = step.keys_per_token / config.num_hidden_layers * VALUES / 2
    sums.add("collective-permute", (CONTEXT,), "keys", tokens * size, times * (mesh.shape[CONTEXT] - 1))
    sums.add("collective-permute", (CONTEXT,), "tokens", tokens * width / mesh.shape["tensor"] * VALUES, 2 * times)
