"""Traffic between the devices of a mesh in one step, estimated from shapes."""

import dataclasses
from typing import Any

from nnxmoe.axes import CONTEXT, TOKEN_AXES, AnyMesh, shards
from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.pipeline import AXIS, stages_of
from nnxmoe.planning.arithmetic import ParamSize, Work, gathered, keys_per_token, rows_per_device, tokens_per_row


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives in a step by collectives of one ``kind`` over mesh axes; ``times``: how often.
    ``copies``: rows of each token, of which one per node crosses the network; 0: all do."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    what: str = ""
    copies: int = 0


def traffic(config: DecoderConfig, found: list[ParamSize], work: Work, mesh: AnyMesh) -> list[Traffic]:
    """Estimate of the collectives of a step: gathered kernels, reduced gradients, tokens to experts and back, and keys
    that `GatherKeys` gathers.

    Assumes kernels gathered in the dtype of activations, or as codes, once per pass, and gradients reduced in float32;
    those of adapters are left out. The head is gathered once per part of a batch. Embeddings of tokens are exchanged
    instead of their table. Stages of a pipeline do all this in every turn, those of waiting included, and each turn
    sends a microbatch and a slot on, forward and backward.
    """
    sums: dict[tuple[str, tuple[str, ...], str], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], what: str, size: float, times: int) -> None:
        one = sums.setdefault((kind, axes, what), [0.0, 0])
        one[0] += size * times
        one[1] += times

    head = "embed.table" if config.tie_word_embeddings else "head.kernel"
    token_axes = tuple(axis for axis in TOKEN_AXES if mesh.shape[axis] > 1)
    rows, passes = rows_per_device(work.batch, mesh), (2 if work.remat else 1) if work.train else 1
    for part in found:
        own = (*(("expert",) if part.experts else ()), *((AXIS,) if part.staged else ()))
        split = tuple(axis for axis in part.axes if axis in token_axes and axis not in own)
        times = max(1, part.layers) * work.accumulate
        if part.staged:
            times = part.layers // stages_of(mesh) * work.turns(mesh)
        what = "experts" if part.experts else "layers" if part.layers else "head" if part.key == head else "embedding"
        size = gathered(part, mesh)
        fraction = 1 - 1 / shards(mesh, split)
        looked_up = part.key == "embed.table"
        if looked_up and split:
            _embeddings(config, work, mesh, rows, split, part.over[0], add)
        gathered_over = () if looked_up and what != "head" else split
        if gathered_over:
            add("all-gather", split, what, size * part.stored * fraction, times * (1 if what == "head" else passes))
        if work.train and part.trained and not work.lora:
            if gathered_over:
                add("reduce-scatter", split, what, size * work.state * fraction, times)
            if rest := tuple(axis for axis in token_axes if axis not in part.axes):
                local = size / shards(mesh, split) * work.state
                add("all-reduce", rest, what, 2 * local * (1 - 1 / shards(mesh, rest)), times)
    _activations(config, found, work, mesh, rows * tokens_per_row(work, mesh), add, 3 if work.remat else 2)
    if work.train and mesh.shape[CONTEXT] > 1:
        _keys(config, found, work, mesh, rows, add)
    if work.pipeline is not None:
        turns, stages = work.turns(mesh), stages_of(mesh)
        sent = rows * stages // work.pipeline.microbatches // work.accumulate * work.seq * config.hidden_size
        add("collective-permute", (AXIS,), "tokens", 2 * sent * work.values, 2 * turns)
        add("collective-permute", (AXIS,), "tokens", sent * work.values, 2 * work.accumulate)
    copies = config.experts_per_token if work.node_copies else 0
    return [
        Traffic(kind, axes, size, int(times), what, copies if (kind, what) == ("all-to-all", "tokens") else 0)
        for (kind, axes, what), (size, times) in sums.items()
    ]


def _embeddings(
    config: Any, work: Work, mesh: AnyMesh, rows: int, split: tuple[str, ...], vocab: tuple[str, ...], add: Any
) -> None:
    """Embeddings of each device's tokens, from the devices that have a part of D, and of V (see `Embed`)."""
    tokens = rows * tokens_per_row(work, mesh) // work.accumulate
    size, runs = tokens * config.hidden_size * work.values, (2 if work.train else 1) * work.accumulate
    add("all-to-all", split, "embedding", size * (1 - 1 / shards(mesh, split)), runs)
    if vocab:
        add("all-reduce", vocab, "embedding", 2 * size * (1 - 1 / shards(mesh, vocab)), runs)


def _activations(
    config: Any, found: list[ParamSize], work: Work, mesh: AnyMesh, tokens: int, add: Any, passes: int
) -> None:
    """Tokens to the experts and back, and partial sums over the tensor axis."""
    passes, vector = passes if work.train else 1, config.hidden_size * work.values
    experts, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    norms = [part for part in found if part.layers and part.key.endswith("attention_norm.scale")]
    for moe, parts in ((True, [part for part in found if part.experts]), (False, norms)):
        for run in {(part.stack, part.staged): part for part in parts}.values():
            times, part_of_tokens = run.layers * work.accumulate, tokens / work.accumulate
            if run.staged and work.pipeline is not None:
                times = run.layers // stages_of(mesh) * work.turns(mesh)
                part_of_tokens *= stages_of(mesh) / work.pipeline.microbatches
            if moe and experts > 1:
                sent = part_of_tokens * config.experts_per_token * vector * (1 - 1 / experts)
                again = int(work.train and work.chunks > 1)  # each chunk is recomputed
                add("all-to-all", ("expert",), "tokens", sent, 2 * (passes + again) * times)
            if not moe and tensor > 1:
                summed = 2 * part_of_tokens * vector * (1 - 1 / tensor)
                add("all-reduce", ("tensor",), "tokens", summed, 2 * passes * times)


def _keys(config: Any, found: list[ParamSize], work: Work, mesh: AnyMesh, rows: int, add: Any) -> None:
    """Keys and values, or latents, gathered from neighbour to neighbour, with their gradients on the way back, and each
    device's queries and outputs, as wide as the input of the output kernel, in balanced order and back."""
    tokens, times = rows * tokens_per_row(work, mesh) / work.accumulate, 3 if work.remat else 2
    times *= config.num_hidden_layers * work.accumulate
    width = max(part.width for part in found if part.key.endswith("attention.o.kernel")) - config.hidden_size
    of_layer = keys_per_token(config, found, mesh) / config.num_hidden_layers * work.values / 2
    add("collective-permute", (CONTEXT,), "keys", tokens * of_layer, times * (mesh.shape[CONTEXT] - 1))
    add("collective-permute", (CONTEXT,), "tokens", tokens * width / mesh.shape["tensor"] * work.values, 2 * times)
