"""Pipeline parallelism: layers sharded over the mesh axis ``pipe``, with microbatches sent from stage to stage."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from nnxmoe.axes import CONTEXT, AnyMesh
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.context import Context
from nnxmoe.layers.stateful import is_captured
from nnxmoe.model.layer import MakeLayer
from nnxmoe.model.output import Body, ByLayer
from nnxmoe.model.stack import (
    Remat,
    ScannedStack,
    UnrolledStack,
    by_layer,
    concatenate_layers,
    layer_keys,
    scan_layers,
)
from nnxmoe.moe.block import MoEInfo
from nnxmoe.moe.selection import Routing
from nnxmoe.sharding import batch_axes, replicate, shard_batch, shard_constraint, shard_map
from nnxmoe.sharding_rules import shard_count

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class Pipeline(CheckedFields):
    """A pipeline over the longest run of equal layers, with one stage per index of the mesh axis ``pipe``.

    The stages compute a batch in ``microbatches + stages - 1`` turns (GPipe, Huang et al. 2019).

    Attributes:
        microbatches: Number of microbatches per batch, a multiple of the size of ``pipe``.
        stages: Number of equal stages into which the layers can be split, a multiple of the size of ``pipe`` (the
            default). Layers left over run after the pipeline. If a checkpoint must load on meshes with different
            ``pipe`` sizes, set this to a common multiple of the sizes.
    """

    microbatches: int
    stages: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "microbatches", "stages")

    def check(self, mesh: AnyMesh | None) -> None:
        """Raise ValueError if the mesh does not fit the stages and microbatches, or shards tokens over ``context``."""
        if mesh is not None and AXIS not in mesh.shape:
            raise ValueError(f"{self}: the mesh {dict(mesh.shape)} has no axis {AXIS!r}. Use nnxmoe.make_mesh(pipe=…)")
        if mesh is not None and mesh.shape.get(CONTEXT, 1) > 1:
            raise ValueError(
                f"{self}: stages do not shard tokens over the mesh axis {CONTEXT!r} of size {mesh.shape[CONTEXT]}. Use "
                f"make_mesh({CONTEXT}=1), or no pipeline"
            )
        size = stages_of(mesh)
        if self.stages is not None and self.stages % size:
            raise ValueError(f"{self}: the stages must be a multiple of {size}, the size of the mesh axis {AXIS!r}")
        if self.microbatches % size:
            raise ValueError(
                f"{self}: the microbatches must be a multiple of {size}, the size of the mesh axis {AXIS!r}, because "
                f"all devices along the axis store the same number of microbatches"
            )

    def stack(self, mesh: AnyMesh | None, *arguments: Any) -> "PipelinedStack":
        """Build a stack that is split into stages. ``arguments`` are the arguments of a `Stacking`."""
        return PipelinedStack(self, mesh, *arguments)

    def refuse_batch(self, batch: int, mesh: AnyMesh) -> None:
        """Raise ValueError unless the batch size is a multiple of microbatches times shards per microbatch."""
        shards = shard_count(mesh, _rows_over(mesh))
        if batch % (self.microbatches * shards):
            raise ValueError(
                f"a batch of {batch} rows is not divisible by {self.microbatches} microbatches of {shards} shards "
                f"each: use a multiple of {self.microbatches * shards} rows, or fewer microbatches"
            )

    def explain(self, stages: int) -> str:
        """Describe a pipeline of ``stages`` stages in one line."""
        if stages == 1:
            return f"{self}: one stage on this mesh, so batches are not split"
        wait = f"of {self.num_turns(stages)} turns, each stage waits in {stages - 1} ({self.bubble(stages):.0%})"
        return f"{self}: {stages} stages; {wait}"

    def num_turns(self, stages: int) -> int:
        """Return the number of turns. In each turn, a stage computes a microbatch or is idle."""
        return self.microbatches + stages - 1

    def bubble(self, stages: int) -> float:
        """Return the fraction of turns in which a stage is idle: ``(S - 1) / (M + S - 1)``."""
        return (stages - 1) / self.num_turns(stages)


def stages_of(mesh: AnyMesh | None) -> int:
    """Return the number of stages on a mesh."""
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def _rows_over(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the mesh axes that shard the rows of a microbatch."""
    return tuple(axis for axis in batch_axes(mesh) if axis != AXIS)


class PipelinedStack(ScannedStack):
    """Scanned layers that run as a pipeline on a mesh with several stages, followed by the layers in ``rest``.

    Batches of inputs and outputs are also sharded over ``pipe``. A layer computes one microbatch at a time. Loads and
    dropped assignments are summed over microbatches. Results of `OutputRequest.reduce_routing` are averaged.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: AnyMesh | None,
        count: int,
        make: MakeLayer,
        rngs: nnx.Rngs | None,
        remat: Remat | None = None,
    ):
        stages = pipeline.stages or stages_of(mesh)
        if count < stages:
            raise ValueError(
                f"{pipeline}: the model's longest run of equal layers has {count}, fewer than {stages} stages. Use a "
                f"smaller mesh axis {AXIS!r}"
            )
        num_staged = count - count % stages
        keys = None if rngs is None else layer_keys(rngs, count)
        super().__init__(num_staged, make, None if keys is None else keys[:num_staged], remat, "stages")
        rest_keys = None if keys is None else keys[num_staged:]
        self.rest = ScannedStack(count - num_staged, make, rest_keys, remat) if num_staged < count else None
        self.pipeline, self.mesh = pipeline, mesh

    def refuse_stages(self, mesh: AnyMesh) -> None:
        """Raise ValueError if the number of stages of ``mesh`` does not divide the number of layers."""
        if self.count % (stages := stages_of(mesh)):
            raise ValueError(
                f"{self.count} layers are not divisible by {stages} pipeline stages: create the model with "
                f"Pipeline({self.pipeline.microbatches}, stages={stages}) to compute the remaining layers afterwards"
            )

    @property
    def depth(self) -> int:
        """Number of layers, including the layers after the pipeline."""
        return self.count + (0 if self.rest is None else self.rest.count)

    def unrolled(self, place: Callable[[nnx.Variable], Any]) -> UnrolledStack:
        """Copy the layers to an `UnrolledStack` with separate arrays per layer (see `ScannedStack.unrolled`)."""
        stacks = [super().unrolled(place), *([] if self.rest is None else [self.rest.unrolled(place)])]
        return UnrolledStack([layer for stack in stacks for layer in stack.layers], self.remat)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create caches for the layers in the pipeline and for the remaining layers."""
        self.refuse_decoding()
        rest = () if self.rest is None else (self.rest.empty_cache(batch, capacity, dtype, lookahead),)
        return super().empty_cache(batch, capacity, dtype, lookahead), *rest

    def refuse_decoding(self) -> None:
        """Raise ValueError if the mesh has several pipeline stages, which do not support decoding."""
        if (stages := stages_of(self.mesh)) > 1:
            raise ValueError(
                f"a model in {stages} pipeline stages cannot decode, because all stages but one would wait: load it on "
                f"a mesh with {AXIS}=1 and more devices along expert, tensor or fsdp"
            )

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None, first: int | Int[Array, ""] = 0
    ) -> Body:
        run = super().__call__ if stages_of(self.mesh) == 1 else self._in_stages
        caches = (None, None) if cache is None else cache
        outputs, depths = [run(x, context=context, cache=caches[0], first=first)], [self.count]
        if self.rest is not None:
            outputs.append(self.rest(outputs[0].x, context=context, cache=caches[1], first=first + self.count))
            depths.append(self.rest.count)
        out = concatenate_layers(outputs[-1].x, outputs, depths)
        return dataclasses.replace(out, cache=None if cache is None else out.cache)

    def _in_stages(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None, first: int | Int[Array, ""]
    ) -> Body:
        """Compute the layers as a pipeline. The `shard_map` is manual over the axis ``pipe`` only."""
        assert self.mesh is not None and cache is None
        if is_captured(self.layer):
            raise ValueError("nnx.capture cannot collect values from pipeline stages: use a mesh with pipe=1")
        self.pipeline.refuse_batch(len(x), self.mesh)
        layout = _Microbatches(self.pipeline.microbatches, stages_of(self.mesh), _rows_over(self.mesh), self.mesh)
        layers, tree = jax.tree.flatten(nnx.state(self.layer))
        leaves, tree_of_context = jax.tree.flatten(context)
        leaves = [
            layout.replicate(a) if a.ndim > 1 else a for a in leaves
        ]  # arrays with fewer than 2 axes have no rows

        def run(layers: list[Array], slots: Array, leaves: list[Array]) -> Any:
            state, stage = jax.tree.unflatten(tree, layers), jax.lax.axis_index(AXIS)

            def compute(x: Array, microbatch: Array) -> tuple[Array, Any]:
                select = functools.partial(jax.lax.dynamic_index_in_dim, index=layout.place(microbatch), keepdims=False)
                stage_context = jax.tree.unflatten(tree_of_context, [select(a) if a.ndim > 1 else a for a in leaves])
                first_layer = first + stage * (self.count // layout.stages)
                stage_context = stage_context.fold_key(microbatch)
                y, _, infos, hidden = scan_layers(self.layer, state, self.remat, x, stage_context, None, first_layer)
                return y, (infos, hidden)

            slots, outputs = _turns(compute, slots[0], stage, layout)
            return slots[None], outputs

        stage_spec, layer_spec = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
        specs = (stage_spec, stage_spec, PartitionSpec()), (stage_spec, layer_spec)
        y, (infos, hidden) = shard_map(run, self.mesh, *specs, (AXIS,))(layers, layout.split(x), leaves)
        layer_infos = ByLayer() if infos is None else by_layer(_joined(infos, layout))
        return Body(layout.join(y), None, layer_infos, () if hidden is None else tuple(layout.rows_of(hidden)))


def _turns(
    compute: Callable[[Array, Array], tuple[Array, Any]],
    slots: Float[Array, "per_stage rows T D"],
    stage: Int[Array, ""],
    layout: "_Microbatches",
) -> tuple[Float[Array, "per_stage rows T D"], Any]:
    """Compute all microbatches on one stage with ``compute(x, microbatch) -> y, outputs``.

    The slots of a stage store its share of the microbatches. Per turn, a stage sends its result and one slot to the
    next stage. The first stage computes that slot and instead sends the microbatch finished by the last stage.
    After one more turn and a roll of the slots, each microbatch is in its original slot.
    Returns the slots with the results, and the ``outputs`` of all microbatches ``[M, …]``.
    """
    count, ring = layout.parts, [(i, (i + 1) % layout.stages) for i in range(layout.stages)]

    def turn(carry: tuple[Array, Array], turn_index: Array) -> tuple[tuple[Array, Array], Any]:
        received, slots = carry
        microbatch, slot_index = turn_index - stage, turn_index % layout.per_stage
        slot = jax.lax.dynamic_index_in_dim(slots, slot_index, keepdims=False)
        x = jnp.where(stage == 0, slot, received)
        x = jnp.where((microbatch >= 0) & (microbatch < count), x, 0)  # idle stages compute with zeros
        y, outputs = compute(x, jnp.clip(microbatch, 0, count - 1))
        outgoing = jnp.stack([y, jnp.where(stage == 0, received, slot)])
        received, slot = jax.lax.ppermute(outgoing, AXIS, ring)
        return (received, jax.lax.dynamic_update_index_in_dim(slots, slot, slot_index, 0)), outputs

    turns = count + layout.stages - 1
    start = jnp.zeros_like(slots[0]), slots
    (received, slots), outputs = jax.lax.scan(turn, start, jnp.arange(turns))
    last = jnp.where(stage == 0, received, slots[turns % layout.per_stage])
    slots = slots.at[turns % layout.per_stage].set(jax.lax.ppermute(last, AXIS, ring))
    outputs = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, stage, count), outputs)  # drops idle turns
    return jnp.roll(slots, -layout.stages, axis=0), outputs


@dataclasses.dataclass(frozen=True)
class _Microbatches:
    """Layout of a batch as ``parts`` microbatches. Each stage stores the same number of microbatches."""

    parts: int
    stages: int
    axes: tuple[str, ...]  # mesh axes that shard the rows of a microbatch
    mesh: AnyMesh

    @property
    def per_stage(self) -> int:
        """Number of microbatches per stage."""
        return self.parts // self.stages

    def place(self, part: Any) -> Any:
        """Return the slot index, over all stages, of the microbatch that is computed as number ``part``."""
        return -(part // self.per_stage) % self.stages * self.per_stage + part % self.per_stage

    def split(self, a: Array) -> Array:
        """Split an array ``[B, …]`` by stage and microbatch. Rows stay on their device."""
        return self._cut(a, AXIS)

    def _cut(self, a: Array, stage_axis: str | None) -> Array:
        microbatches = a.reshape(self.stages, shard_count(self.mesh, self.axes), self.per_stage, -1, *a.shape[1:])
        microbatches = jnp.moveaxis(shard_constraint(microbatches, self.mesh, stage_axis, self.axes), 2, 1)
        return shard_constraint(
            microbatches.reshape(self.stages, self.per_stage, -1, *a.shape[1:]), self.mesh, stage_axis, None, self.axes
        )

    def join(self, a: Array) -> Array:
        """Join microbatches into an array ``[B, …]``. Inverse of `split`."""
        microbatches = a.reshape(self.stages, self.per_stage, shard_count(self.mesh, self.axes), -1, *a.shape[3:])
        return shard_batch(jnp.moveaxis(microbatches, 1, 2).reshape(-1, *a.shape[3:]), self.mesh)

    def replicate(self, a: Array) -> Array:
        """Split an array ``[B, …]`` into ``[M, rows, …]``, replicated over the stages."""
        return self._cut(a, None).reshape(self.parts, -1, *a.shape[1:])

    def rows_of(self, kept: Array) -> Array:
        """Join values ``[M, L, rows, …]`` from `_turns` into ``[L, B, …]``."""
        kept = kept[np.argsort(self.place(np.arange(self.parts)))]
        return jax.vmap(self.join, 2)(kept.reshape(self.stages, self.per_stage, *kept.shape[1:]))


def _joined(infos: MoEInfo, layout: _Microbatches) -> MoEInfo:
    """Combine the infos ``[M, L, …]`` of the microbatches into infos ``[L, …]`` of the batch."""
    # The small arrays are replicated, because slicing a sharded array takes one collective per layer.
    dispatch = jax.tree.map(lambda a: replicate(jnp.sum(a, axis=0, dtype=a.dtype), layout.mesh), infos.dispatch)
    if isinstance(infos.routing, Routing):
        return MoEInfo(jax.tree.map(layout.rows_of, infos.routing), dispatch)
    return MoEInfo(jax.tree.map(lambda a: replicate(jnp.mean(a, axis=0), layout.mesh), infos.routing), dispatch)
