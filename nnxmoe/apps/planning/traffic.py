"""Traffic between the devices of a mesh in one step, estimated from shapes."""

import dataclasses
from collections.abc import Callable

from nnxmoe.apps.planning.arithmetic import STATE, VALUES, PlannedStep
from nnxmoe.axes import CONTEXT, TOKEN_AXES
from nnxmoe.model.pipeline import AXIS, stages_of
from nnxmoe.sharding_rules import shard_count


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


def traffic(step: PlannedStep) -> list[Traffic]:
    """Estimate of the collectives of a step: gathered kernels, reduced gradients, tokens to experts and back, and keys
    that `AllGatherAttention` gathers.

    Assumes kernels gathered in the dtype of activations, or as codes, once per pass, and gradients reduced in float32;
    those of adapters are left out. The head is gathered once per part of a batch. Embeddings of tokens are exchanged
    instead of their table. Stages of a pipeline do all this in every turn, those of waiting included, and each turn
    sends a microbatch and a slot on, forward and backward.
    """
    config, work, mesh = step.config, step.work, step.mesh
    sums: dict[tuple[str, tuple[str, ...], str], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], what: str, size: float, times: int) -> None:
        one = sums.setdefault((kind, axes, what), [0.0, 0])
        one[0] += size * times
        one[1] += times

    head = "embed.table" if config.tie_word_embeddings else "head.kernel"
    token_axes = tuple(axis for axis in TOKEN_AXES if mesh.shape[axis] > 1)
    passes = (2 if work.remat else 1) if work.train else 1
    for part in step.parts:
        own = (*(("expert",) if part.experts else ()), *((AXIS,) if part.staged else ()))
        split = tuple(axis for axis in part.axes if axis in token_axes and axis not in own)
        what = "experts" if part.experts else "layers" if part.layers else "head" if part.key == head else "embedding"
        size, times, fraction = step.gathered(part), step.runs(part), 1 - 1 / shard_count(mesh, split)
        looked_up = part.key == "embed.table"
        if looked_up and split:
            _embeddings(step, split, part.over[0], add)
        gathered_over = () if looked_up and what != "head" else split
        if gathered_over:
            add("all-gather", split, what, size * part.stored * fraction, times * (1 if what == "head" else passes))
        if work.train and part.trained and not work.lora:
            if gathered_over:
                add("reduce-scatter", split, what, size * STATE * fraction, times)
            if rest := tuple(axis for axis in token_axes if axis not in part.axes):
                local = size / shard_count(mesh, split) * STATE
                add("all-reduce", rest, what, 2 * local * (1 - 1 / shard_count(mesh, rest)), times)
    _activations(step, add)
    if work.train and mesh.shape[CONTEXT] > 1:
        _keys(step, add)
    if work.pipeline is not None:
        sent = step.rows * stages_of(mesh) // work.pipeline.microbatches // work.accumulate
        sent *= work.seq * config.hidden_size * VALUES
        add("collective-permute", (AXIS,), "tokens", 2 * sent, 2 * work.turns(mesh))
        add("collective-permute", (AXIS,), "tokens", sent, 2 * work.accumulate)
    copies = config.experts_per_token if work.node_copies else 0
    return [
        Traffic(kind, axes, size, int(times), what, copies if (kind, what) == ("all-to-all", "tokens") else 0)
        for (kind, axes, what), (size, times) in sums.items()
    ]


def _embeddings(step: PlannedStep, split: tuple[str, ...], vocab: tuple[str, ...], add: Callable[..., None]) -> None:
    """Embeddings of each device's tokens, from the devices that have a part of D, and of V (see `Embed`)."""
    work, mesh = step.work, step.mesh
    tokens = step.rows * step.tokens_per_row // work.accumulate
    size, runs = tokens * step.config.hidden_size * VALUES, (2 if work.train else 1) * work.accumulate
    add("all-to-all", split, "embedding", size * (1 - 1 / shard_count(mesh, split)), runs)
    if vocab:
        add("all-reduce", vocab, "embedding", 2 * size * (1 - 1 / shard_count(mesh, vocab)), runs)


def _activations(step: PlannedStep, add: Callable[..., None]) -> None:
    """Tokens to the experts and back, and partial sums over the tensor axis."""
    config, work, mesh = step.config, step.work, step.mesh
    passes, vector = (3 if work.remat else 2) if work.train else 1, config.hidden_size * VALUES
    experts, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    norms = [part for part in step.parts if part.layers and part.key.endswith("attention_norm.scale")]
    for moe, parts in ((True, [part for part in step.parts if part.experts]), (False, norms)):
        for run in {(part.stack, part.staged): part for part in parts}.values():
            times, part_of_tokens = step.runs(run), step.rows * step.tokens_per_row / work.accumulate
            if run.staged and work.pipeline is not None:
                part_of_tokens *= stages_of(mesh) / work.pipeline.microbatches
            if moe and experts > 1:
                sent = part_of_tokens * config.experts_per_token * vector * (1 - 1 / experts)
                again = int(work.train and step.chunks > 1)  # each chunk is recomputed
                add("all-to-all", ("expert",), "tokens", sent, 2 * (passes + again) * times)
            if not moe and tensor > 1:
                summed = 2 * part_of_tokens * vector * (1 - 1 / tensor)
                add("all-reduce", ("tensor",), "tokens", summed, 2 * passes * times)


def _keys(step: PlannedStep, add: Callable[..., None]) -> None:
    """Keys and values, or latents, gathered from neighbour to neighbour, with their gradients on the way back, and each
    device's queries and outputs, as wide as the input of the output kernel, in balanced order and back."""
    config, work, mesh = step.config, step.work, step.mesh
    tokens, times = step.rows * step.tokens_per_row / work.accumulate, 3 if work.remat else 2
    times *= config.num_hidden_layers * work.accumulate
    width = max(part.width for part in step.parts if part.key.endswith("attention.o.kernel")) - config.hidden_size
    of_layer = step.keys_per_token / config.num_hidden_layers * VALUES / 2
    add("collective-permute", (CONTEXT,), "keys", tokens * of_layer, times * (mesh.shape[CONTEXT] - 1))
    add("collective-permute", (CONTEXT,), "tokens", tokens * width / mesh.shape["tensor"] * VALUES, 2 * times)
