"""Pipeline stages: layers sharded over the mesh axis ``pipe``, with microbatches that go from stage to stage."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import CONTEXT, AnyMesh
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.context import Context
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
from nnxmoe.model.stateful import is_captured
from nnxmoe.moe.block import MoEInfo
from nnxmoe.moe.router import Routing
from nnxmoe.sharding import batch_axes, replicate, shard_batch, shard_constraint, shard_map
from nnxmoe.sharding_rules import shard_count

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Splits the longest run of equal layers into stages, one per device of the mesh axis ``pipe``.

    A batch passes through them as ``microbatches`` parts, a multiple of the stages, in ``microbatches + stages - 1``
    turns (GPipe; Huang et al. 2019). ``stages``: the number of layers in the pipeline is a multiple of it, and the
    layers left over follow outside; None: the size of ``pipe``. Set it to the largest size if checkpoints of a model
    with such layers are to be loaded on several meshes.
    """

    microbatches: int
    stages: int | None = None

    def __post_init__(self) -> None:
        set_positive(self, "microbatches", "stages")

    def check(self, mesh: AnyMesh | None) -> None:
        """Raise ValueError if a mesh has no axis for the stages, another number of them, or tokens over ``context``."""
        if mesh is not None and AXIS not in mesh.shape:
            raise ValueError(f"{self}: the mesh {dict(mesh.shape)} has no axis {AXIS!r}: use nnxmoe.make_mesh(pipe=…)")
        if mesh is not None and mesh.shape.get(CONTEXT, 1) > 1:
            raise ValueError(
                f"{self}: stages do not shard tokens over the mesh axis {CONTEXT!r} of size {mesh.shape[CONTEXT]}: use "
                f"make_mesh({CONTEXT}=1), or no pipeline"
            )
        size = stages_of(mesh)
        if self.stages is not None and self.stages % size:
            raise ValueError(f"{self}: the stages are no multiple of {size}, the size of the mesh axis {AXIS!r}")
        if self.microbatches % size:
            raise ValueError(
                f"{self}: the microbatches must be a multiple of {size}, the size of the mesh axis {AXIS!r}, because "
                f"each of its devices has the rows of equally many"
            )

    def stack(self, mesh: AnyMesh | None, *given: Any) -> "PipelinedStack":
        """Make a stack in stages; ``given``: the arguments of ``Strategy.stacking``."""
        return PipelinedStack(self, mesh, *given)

    def refuse_batch(self, batch: int, mesh: AnyMesh) -> None:
        """Raise ValueError if a batch does not divide into the microbatches and their shards."""
        over = shard_count(mesh, _rows_over(mesh))
        if batch % (self.microbatches * over):
            raise ValueError(
                f"a batch of {batch} rows is not divisible by {self.microbatches} microbatches of {over} shards each: "
                f"use a multiple of {self.microbatches * over} rows, or fewer microbatches"
            )

    def explain(self, stages: int) -> str:
        """Describe a pipeline of this many stages in one line."""
        if stages == 1:
            return f"{self}: one stage on this mesh, which computes whole batches"
        wait = f"of {self.turns(stages)} turns each waits in {stages - 1} ({self.bubble(stages):.0%})"
        return f"{self}: {stages} stages; {wait}"

    def turns(self, stages: int) -> int:
        """Number of turns of a stage, in which it computes a microbatch or waits."""
        return self.microbatches + stages - 1

    def bubble(self, stages: int) -> float:
        """The fraction of these turns in which a stage waits: ``(S - 1) / (M + S - 1)``."""
        return (stages - 1) / self.turns(stages)


def stages_of(mesh: AnyMesh | None) -> int:
    """The number of stages on a mesh."""
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def _rows_over(mesh: AnyMesh) -> tuple[str, ...]:
    """The mesh axes that shard the rows of a microbatch."""
    return tuple(axis for axis in batch_axes(mesh) if axis != AXIS)


class PipelinedStack(ScannedStack):
    """Scanned layers that a mesh with several stages computes as a pipeline, then ``rest``, the layers left over.

    The batch comes and leaves sharded over ``pipe`` too. Layers see one microbatch at a time: of their infos, loads and
    dropped assignments are summed over the microbatches, and results of `OutputRequest.reduce_routing` averaged.
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
                f"{pipeline}: the model's longest run of equal layers has {count}, fewer than {stages} stages: use a "
                f"smaller mesh axis {AXIS!r}"
            )
        inside = count - count % stages
        keys = None if rngs is None else layer_keys(rngs, count)
        super().__init__(inside, make, None if keys is None else keys[:inside], remat, "stages")
        after = None if keys is None else keys[inside:]
        self.rest = ScannedStack(count - inside, make, after, remat) if inside < count else None
        self.pipeline, self.mesh = pipeline, mesh

    def refuse_stages(self, mesh: AnyMesh) -> None:
        """Raise ValueError if the layers do not divide over the stages of another mesh."""
        if self.count % (stages := stages_of(mesh)):
            raise ValueError(
                f"{self.count} layers are not divisible by {stages} pipeline stages: make the model with "
                f"Pipeline({self.pipeline.microbatches}, stages={stages}), which computes the others outside"
            )

    @property
    def depth(self) -> int:
        """Number of layers, including those outside of the stages."""
        return self.count + (0 if self.rest is None else self.rest.count)

    def unrolled(self, place: Callable[[nnx.Variable], Any]) -> UnrolledStack:
        """The same layers with arrays of their own; see `ScannedStack.unrolled`."""
        stacks = [super().unrolled(place), *([] if self.rest is None else [self.rest.unrolled(place)])]
        return UnrolledStack([layer for stack in stacks for layer in stack.layers], self.remat)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> Any:
        """The caches of the layers in the pipeline, and of those left over."""
        self.refuse_decoding()
        rest = () if self.rest is None else (self.rest.empty_cache(batch, capacity, dtype, lookahead),)
        return super().empty_cache(batch, capacity, dtype, lookahead), *rest

    def refuse_decoding(self) -> None:
        """Raise ValueError if there are several stages."""
        if (stages := stages_of(self.mesh)) > 1:
            raise ValueError(
                f"a model in {stages} pipeline stages cannot decode, because all stages but one would wait: load it on "
                f"a mesh with {AXIS}=1 and more devices along expert, tensor or fsdp"
            )

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any, first: int | Int[Array, ""] = 0) -> Body:
        run = super().__call__ if stages_of(self.mesh) == 1 else self._in_stages
        caches = (None, None) if cache is None else cache
        outputs, depths = [run(x, context=context, cache=caches[0], first=first)], [self.count]
        if self.rest is not None:
            outputs.append(self.rest(outputs[0].x, context=context, cache=caches[1], first=first + self.count))
            depths.append(self.rest.count)
        out = concatenate_layers(outputs[-1].x, outputs, depths)
        return dataclasses.replace(out, cache=None if cache is None else out.cache)

    def _in_stages(self, x: Float[Array, "B T D"], context: Context, cache: Any, first: int | Int[Array, ""]) -> Body:
        """The layers of the pipeline. Manual over its axis only: within a stage, arrays are sharded as without a
        pipeline."""
        assert self.mesh is not None and cache is None
        if is_captured(self.layer):
            raise ValueError("nnx.capture cannot collect values from pipeline stages: use a mesh with pipe=1")
        self.pipeline.refuse_batch(len(x), self.mesh)
        cut = _Microbatches(self.pipeline.microbatches, stages_of(self.mesh), _rows_over(self.mesh), self.mesh)
        layers, tree = jax.tree.flatten(nnx.state(self.layer))
        shared, tree_of_shared = jax.tree.flatten(context)
        shared = [cut.on_all(a) if a.ndim > 1 else a for a in shared]  # all but a common index and the key have rows

        def run(layers: list[Array], slots: Array, shared: list[Array]) -> Any:
            state, stage = jax.tree.unflatten(tree, layers), jax.lax.axis_index(AXIS)

            def compute(x: Array, part: Array) -> tuple[Array, Any]:
                at = functools.partial(jax.lax.dynamic_index_in_dim, index=cut.place(part), keepdims=False)
                own = jax.tree.unflatten(tree_of_shared, [at(a) if a.ndim > 1 else a for a in shared])
                number = first + stage * (self.count // cut.stages)
                own = own.for_layer(part)
                y, _, infos, hidden = scan_layers(self.layer, state, self.remat, x, own, None, number)
                return y, (infos, hidden)

            slots, kept = _turns(compute, slots[0], stage, cut)
            return slots[None], kept

        staged, of_layers = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
        specs = (staged, staged, PartitionSpec()), (staged, of_layers)
        y, (infos, hidden) = shard_map(run, self.mesh, *specs, (AXIS,))(layers, cut.apart(x), shared)
        each = ByLayer() if infos is None else by_layer(_joined(infos, cut))
        return Body(cut.together(y), None, each, () if hidden is None else tuple(cut.rows_of(hidden)))


def _turns(
    compute: Callable[[Array, Array], tuple[Array, Any]],
    slots: Float[Array, "held rows T D"],
    stage: Int[Array, ""],
    cut: "_Microbatches",
) -> tuple[Float[Array, "held rows T D"], Any]:
    """On one stage: ``compute(x, microbatch) -> y, kept`` for all microbatches, and what was kept, ``[M, …]``.

    Each stage holds its share of the microbatches in slots. In each turn it sends what it has computed to the next
    stage, and one slot with it. The first stage computes the microbatch that arrives there, and puts one that the last
    stage has finished in its place: after one more turn each stands where it came from, but for a roll of the slots.
    """
    parts, ring = cut.parts, [(i, (i + 1) % cut.stages) for i in range(cut.stages)]

    def turn(carry: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], Any]:
        arrived, slots = carry
        part, at = number - stage, number % cut.held
        slot = jax.lax.dynamic_index_in_dim(slots, at, keepdims=False)
        given = jnp.where(stage == 0, slot, arrived)
        given = jnp.where((part >= 0) & (part < parts), given, 0)  # a stage that waits computes finite values
        y, kept = compute(given, jnp.clip(part, 0, parts - 1))
        sent = jnp.stack([y, jnp.where(stage == 0, arrived, slot)])
        arrived, slot = jax.lax.ppermute(sent, AXIS, ring)
        return (arrived, jax.lax.dynamic_update_index_in_dim(slots, slot, at, 0)), kept

    turns = parts + cut.stages - 1
    start = jnp.zeros_like(slots[0]), slots
    (arrived, slots), kept = jax.lax.scan(turn, start, jnp.arange(turns))
    last = jnp.where(stage == 0, arrived, slots[turns % cut.held])
    slots = slots.at[turns % cut.held].set(jax.lax.ppermute(last, AXIS, ring))
    kept = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, stage, parts), kept)  # without turns of waiting
    return jnp.roll(slots, -cut.stages, axis=0), kept


@dataclasses.dataclass(frozen=True)
class _Microbatches:
    """The rows of a batch as ``parts`` microbatches. Each stage holds equally many, of rows that its devices have."""

    parts: int
    stages: int
    axes: tuple[str, ...]  # of the mesh, that shard the rows of a microbatch
    mesh: AnyMesh

    @property
    def held(self) -> int:
        """Microbatches per stage."""
        return self.parts // self.stages

    def place(self, part: Any) -> Any:
        """Index of the microbatch computed as number ``part`` among those of all stages: slots move from the last stage
        to the first."""
        return -(part // self.held) % self.stages * self.held + part % self.held

    def apart(self, a: Array) -> Array:
        """An array ``[B, …]`` by stage and microbatch; no row leaves its device."""
        return self._cut(a, AXIS)

    def _cut(self, a: Array, over: str | None) -> Array:
        cut = a.reshape(self.stages, shard_count(self.mesh, self.axes), self.held, -1, *a.shape[1:])
        cut = jnp.moveaxis(shard_constraint(cut, self.mesh, over, self.axes), 2, 1)
        return shard_constraint(cut.reshape(self.stages, self.held, -1, *a.shape[1:]), self.mesh, over, None, self.axes)

    def together(self, a: Array) -> Array:
        """The inverse of `apart`."""
        cut = a.reshape(self.stages, self.held, shard_count(self.mesh, self.axes), -1, *a.shape[3:])
        return shard_batch(jnp.moveaxis(cut, 1, 2).reshape(-1, *a.shape[3:]), self.mesh)

    def on_all(self, a: Array) -> Array:
        """``[B, …] -> [M, rows, …]``, the same on every stage."""
        return self._cut(a, None).reshape(self.parts, -1, *a.shape[1:])

    def rows_of(self, kept: Array) -> Array:
        """``[M, L, rows, …] -> [L, B, …]`` for the values kept by `_turns`."""
        kept = kept[np.argsort(self.place(np.arange(self.parts)))]
        return jax.vmap(self.together, 2)(kept.reshape(self.stages, self.held, *kept.shape[1:]))


def _joined(infos: MoEInfo, cut: _Microbatches) -> MoEInfo:
    """The infos ``[L, …]`` of a batch, from those of its microbatches ``[M, L, …]``.

    Small ones are replicated at once: a layer's slice of sharded ones would take a collective of its own.
    """
    dispatch = jax.tree.map(lambda a: replicate(jnp.sum(a, axis=0, dtype=a.dtype), cut.mesh), infos.dispatch)
    if isinstance(infos.routing, Routing):
        return MoEInfo(jax.tree.map(cut.rows_of, infos.routing), dispatch)
    return MoEInfo(jax.tree.map(lambda a: replicate(jnp.mean(a, axis=0), cut.mesh), infos.routing), dispatch)
