"""Reads the arrays of a checkpoint into a model, for every layout, with or without a mesh.

Each parameter gets one aligned buffer per shard on this process's devices. Arrays are read in blocks, each block once;
its values are cast, transposed and copied into every buffer that overlaps it.
"""

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from nnxmoe.axes import keeps_dtype
from nnxmoe.config.printable import plain
from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter, Path, parameters
from nnxmoe.convert.arrays.dtypes import default_dtype, matrix_dtype
from nnxmoe.convert.arrays.lazy_array import Box, LazyArray, LazyArrays, overlap, sizes, within
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.host_memory import (
    BlockAllocator,
    ScratchBuffers,
    copy_into,
    count_nonfinite,
    reader_threads,
    transpose_into,
)
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.quantized_kernels import bytes_by_dtype
from nnxmoe.runtime.memory import local_bytes, refuse_beyond_memory
from nnxmoe.runtime.progress import bytes_bar

AHEAD_BYTES = 128 << 20  # limit on the parameters that are read but not yet placed on devices


Ranges = tuple[tuple[int, int], ...]  # (start, stop) per dimension
Buffers = dict[Ranges, np.ndarray]
Wanted = tuple[Parameter, np.dtype, Sharding | None]
Group = tuple[list[Wanted], list[str]]  # parameters that share arrays, and the names of those arrays


def load_parameters(
    model: CausalLM, leaves: Mapping[str, ArrayLayout], arrays: LazyArrays, dtype: np.dtype | None, report: LoadReport
) -> None:
    """Set the values and ``load_report`` of an abstract model. ``dtype`` None: as stored. Parameters with
    a dtype of their own keep it."""
    started, groups = time.perf_counter(), group_parameters(model, leaves, arrays, dtype)
    wanted = [(parameter.shape, kind, place) for group, _ in groups for parameter, kind, place in group]
    kinds = sorted({str(kind) for _, kind, _ in wanted if kind.itemsize > 2})
    remedy = f"shard it over more devices (mesh=…){', or load it as bfloat16 (dtype=…)' if kinds else ''}"
    refuse_beyond_memory(local_bytes(wanted), f"{report.source}: the weights take", remedy)
    total = sum(arrays[name].nbytes for name in leaves)
    with bytes_bar(total, f"loading {os.path.basename(report.source)}") as bar:
        filler = ParameterLoader(leaves, arrays, bar)
        values = filler.place(groups)
    state = {path: variable.replace(values[path]) for path, variable in nnx.to_flat_state(nnx.state(model))}
    nnx.update(model, nnx.from_flat_state(state))
    compute_dtype = model.strategy.compute_dtype
    model.dtype = matrix_dtype(state.values()) if compute_dtype is None else jnp.dtype(compute_dtype)
    model.load_report = dataclasses.replace(
        report,
        loaded=report.loaded or tuple(sorted(leaves)),
        casts=_casts(groups, leaves, arrays),
        nonfinite=dict(sorted(filler.nonfinite.items())),
        weights=bytes_by_dtype(model),
        bytes_read=filler.bytes_read,
        seconds=time.perf_counter() - started,
    )
    model.load_report.warn()


def _casts(groups: list[Group], leaves: Mapping[str, ArrayLayout], arrays: LazyArrays) -> dict[str, tuple[str, ...]]:
    casts: dict[str, set[str]] = {}
    for group, names in groups:
        kinds = {parameter.path: kind for parameter, kind, _ in group}
        for name in names:
            before, after = arrays[name].kind, kinds[leaves[name].parts[0].path]
            if before != str(after):
                casts.setdefault(f"{before} -> {after}", set()).add(name)
    return {cast: tuple(sorted(names)) for cast, names in sorted(casts.items())}


def group_parameters(
    model: CausalLM, leaves: Mapping[str, ArrayLayout], arrays: LazyArrays, dtype: np.dtype | None
) -> list[Group]:
    """The model's parameters in disjoint groups, in the model's order; parameters that share an array share a group."""
    groups = {p.path: ([p], list[str]()) for p in parameters(model, codes=True)}
    stored: dict[Path, list[LazyArray]] = {path: [] for path in groups}
    for name, leaf in leaves.items():
        paths = {part.path: None for part in leaf.parts}
        group, *others = {id(groups[path]): groups[path] for path in paths}.values()
        group[1].append(name)
        for members, names in others:
            group[0].extend(members)
            group[1].extend(names)
            groups |= dict.fromkeys((member.path for member in members), group)
        for path in paths:
            stored[path].append(arrays[name])

    def wanted(parameter: Parameter) -> Wanted:
        variable = parameter.variable
        kind = np.dtype(variable.dtype) if keeps_dtype(variable) else dtype or default_dtype(stored[parameter.path])
        return parameter, kind, model.strategy.sharding_of(variable)

    distinct = {id(group): group for group in groups.values()}.values()
    return [([wanted(member) for member in members], names) for members, names in distinct]


class ParameterLoader:
    """Reads groups of parameters in a few threads, while the calling thread places finished groups on the devices.
    Unplaced parameters take the memory of one group, or of several groups of at most AHEAD_BYTES together."""

    def __init__(self, leaves: Mapping[str, ArrayLayout], arrays: LazyArrays, bar: Any = None):
        self.leaves, self.arrays, self.bar = leaves, arrays, bar
        self.nonfinite: dict[str, int] = {}
        self.bytes_read = 0
        self._scratch, self._blocks = ScratchBuffers(), BlockAllocator()

    def place(self, groups: Iterable[Group]) -> dict[Path, jax.Array]:
        """The parameters of all groups as JAX arrays with their shardings."""
        placed: dict[Path, jax.Array] = {}
        begun: deque[tuple[Any, dict[Path, Buffers], int, list[Future[Any]]]] = deque()
        ahead = 0

        def place_first() -> int:
            group, buffers, size, reads = begun.popleft()
            self.finish(reads)
            for parameter, _, sharding in group:
                placed[parameter.path] = _placed(parameter.shape, buffers[parameter.path], sharding)
            return size

        with reader_threads() as pool:
            for group, names in groups:
                buffers = {wanted[0].path: self._buffers(*wanted) for wanted in group}
                size = sum(buffer.nbytes for each in buffers.values() for buffer in each.values())
                while begun and ahead + size > AHEAD_BYTES:
                    ahead -= place_first()
                begun.append((group, buffers, size, self.begin(names, buffers, pool)))
                ahead += size
            while begun:
                place_first()
        return placed

    def _buffers(self, parameter: Parameter, dtype: np.dtype, sharding: Sharding | None) -> Buffers:
        """A buffer for each distinct shard of a parameter on this process's devices."""
        shape, indices = parameter.shape, [(slice(None),) * len(parameter.shape)]
        if sharding is not None:
            indices = sharding.addressable_devices_indices_map(shape).values()
        shards = sorted({_ranges(index, shape) for index in indices})
        return {r: self._blocks.empty(tuple(stop - start for start, stop in r), dtype) for r in shards}

    def begin(self, names: Iterable[str], buffers: Mapping[Path, Buffers], pool: Executor) -> list[Future[Any]]:
        """Submit the reads of arrays into the buffers of parameters."""
        reads = []
        for name in names:
            leaf, array = self.leaves[name], self.arrays[name]
            targets = _targets(leaf, buffers)
            if not targets:
                continue
            item = -(-array.nbytes // max(1, array.size))
            lines = 1 if all(view.flags.c_contiguous for _, view in targets) else 64
            for block in _cut(_hull(box for box, _ in targets), item, array.block, lines):
                into = [
                    (both, view[within(both, box)])
                    for box, view in targets
                    if (both := overlap(box, block)) is not None
                ]
                if into:
                    box = _hull(both for both, _ in into)
                    reads.append(pool.submit(self._read, name, leaf.change.of(array), box, into))
        return reads

    def finish(self, reads: list[Future[tuple[str, int, int]]]) -> None:
        """Wait for the reads and raise the first exception of a thread."""
        running: set[Future[Any]] = set(reads)
        while running:  # every 0.1 s only, because each wake-up takes the GIL from the readers
            done, running = wait(running, timeout=0.1, return_when=FIRST_EXCEPTION)
            for name, bad, size in [read.result() for read in done]:
                self.bytes_read += size
                if bad:
                    self.nonfinite[name] = self.nonfinite.get(name, 0) + bad
            if self.bar is not None:
                self.bar.update(self.bytes_read - self.bar.n)

    def _read(self, name: str, array: LazyArray, box: Box, into: list[tuple[Box, np.ndarray]]) -> tuple[str, int, int]:
        """Read a box into views of its parts. Returns (array name, number of non-finite values, bytes read)."""
        straight = into[0][1] if len(into) == 1 and into[0][1].flags.c_contiguous else None

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if straight is not None and straight.dtype == dtype:
                return straight
            return self._scratch.empty("raw", (1, math.prod(shape)), dtype).reshape(shape)

        block = array.read_box(box, empty)
        assert block.shape == sizes(box), (name, block.shape, box)
        below = getattr(self.leaves[name].parts[0].variable, "below", None)
        if below is not None and (odd := block[(block < 0) | (block >= below)]).size:
            raise CheckpointError(
                f"{plain(name)} in {array.file} has {odd[0]}: it must hold integers of 0 … {below - 1}"
            )
        if block is straight:
            bad = count_nonfinite(block)
        else:
            bad = sum(self._put(view, block[within(part, box)]) for part, view in into)
        return name, bad, self.arrays[name].bytes_of(box)

    def _put(self, view: np.ndarray, piece: np.ndarray) -> int:
        """``view[...] = piece``, cast. Returns the number of non-finite values in the result."""
        if view.ndim > 2 and not view.flags.c_contiguous:
            view, piece = _merged(view, piece)
        if view.ndim > 2:
            return sum(self._put(*pair) for pair in zip(view, piece, strict=True))
        if view.ndim == 2 and view.strides[0] < view.strides[1]:  # the view is a transpose
            cast = self._scratch.padded("cast", (view.shape[0], view.shape[1]), view.dtype)
            copy_into(cast, piece)
            transpose_into(view.T, cast)
            return count_nonfinite(cast)
        copy_into(view, piece)
        return count_nonfinite(view)


def _merged(view: np.ndarray, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays without dimensions of size 1 and with neighbouring dimensions merged where the view stays a view."""
    view, shape = view.squeeze(), list[int]()
    for i, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if i and view.strides[i - 1] == stride * size:
            shape[-1] *= size
        else:
            shape.append(size)
    return view.reshape(shape), piece.reshape(shape)


def _targets(leaf: ArrayLayout, buffers: Mapping[Path, Buffers]) -> list[tuple[Box, np.ndarray]]:
    """Boxes of an array, and the views of buffers that receive their values, with the dimensions of the array."""
    found = []
    for number, part in enumerate(leaf.parts):
        for ranges, buffer in buffers.get(part.path, {}).items():
            lead = ranges[: len(part.at)]
            if all(start <= at < stop for at, (start, stop) in zip(part.at, lead, strict=True)):
                values = buffer[tuple(at - start for at, (start, _) in zip(part.at, lead, strict=True))]
                box = leaf.inner_box(tuple(slice(*ends) for ends in ranges[len(lead) :]), part)
                view = leaf.view(values, part, sizes(box))
                view = view if leaf.axis is None else np.expand_dims(view, leaf.axis)
                found.append((leaf.stacked(box, number), view))
    return found


def _hull(boxes: Iterable[Box]) -> Box:
    """The smallest box that contains all boxes."""
    ends = zip(*boxes, strict=True)
    return tuple(slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in ends)


def _cut(box: Box, item: int, limit: int, lines: int) -> Iterator[Box]:
    """A box in pieces of about ``limit`` bytes; row counts are multiples of ``lines``, to fill whole cache lines."""
    if not box:
        yield box
        return
    first, rest = box[0], box[1:]
    row = max(1, item * math.prod(sizes(rest)))
    if len(rest) > 1 and row > limit:
        for i in range(first.start, first.stop):
            yield from ((slice(i, i + 1), *inner) for inner in _cut(rest, item, limit, lines))
        return
    step = max(lines, limit // row // lines * lines)
    for start in range(first.start, first.stop, step):
        yield slice(start, min(start + step, first.stop)), *rest


def _ranges(index: Any, shape: tuple[int, ...]) -> Ranges:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _placed(shape: tuple[int, ...], buffers: Buffers, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(*buffers.values())
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[_ranges(index, shape)])
