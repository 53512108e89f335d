"""Reads the arrays of a checkpoint into a model, for every layout, with or without a mesh.

Each parameter gets one aligned buffer per shard on this process's devices. Arrays are read in blocks, each block once;
its values are cast, transposed and copied into every buffer that overlaps it.
"""

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from nnxmoe.axes import keeps_dtype
from nnxmoe.config.printable import plain
from nnxmoe.convert.core.dtypes import activations_dtype, natural_dtype
from nnxmoe.convert.core.layout import Change, Leaf, Parameter, Path, parameters
from nnxmoe.convert.core.lazy_array import Box, LazyArray, LazyArrays, overlap, sizes, within
from nnxmoe.convert.core.report import LoadReport
from nnxmoe.convert.core.targets import Buffers, Ranges, Target, blocks, targets_of
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.quantization.kernels import bytes_by_kind
from nnxmoe.runtime.memory import local_bytes, refuse_beyond_memory
from nnxmoe.runtime.progress import bytes_bar
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.host import Blocks, Scratch, copy_into, count_nonfinite, few_threads, transpose_into

AHEAD_BYTES = 128 << 20  # limit on the parameters that are read but not yet placed on devices


# Parameters that share arrays, with their dtypes and shardings, and the names of those arrays.
Group = tuple[list[tuple[Parameter, np.dtype, Sharding | None]], list[str]]


def fill(
    model: CausalLM, leaves: Mapping[str, Leaf], arrays: LazyArrays, dtype: np.dtype | None, report: LoadReport
) -> None:
    """Set the values and ``load_report`` of an abstract model. ``dtype`` None: as stored. What has a dtype of
    its own keeps it."""
    started, groups = time.perf_counter(), grouped(model, leaves, arrays, dtype)
    wanted = [(parameter.shape, kind, place) for group, _ in groups for parameter, kind, place in group]
    kinds = sorted({str(kind) for _, kind, _ in wanted if kind.itemsize > 2})
    remedy = f"shard it over more devices (mesh=…){', or load it as bfloat16 (dtype=…)' if kinds else ''}"
    refuse_beyond_memory(local_bytes(wanted), f"{report.source}: the weights take", remedy)
    total = sum(arrays[name].nbytes for name in leaves)
    with bytes_bar(total, f"loading {os.path.basename(report.source)}") as bar:
        filler = Filler(leaves, arrays, bar)
        values = filler.place(groups)
    state = {path: variable.replace(values[path]) for path, variable in nnx.to_flat_state(nnx.state(model))}
    nnx.update(model, nnx.from_flat_state(state))
    model.dtype = activations_dtype(model.strategy, state.values())
    model.load_report = dataclasses.replace(
        report,
        loaded=report.loaded or tuple(sorted(leaves)),
        casts=_casts(groups, leaves, arrays),
        nonfinite=dict(sorted(filler.nonfinite.items())),
        weights=bytes_by_kind(model),
        bytes_read=filler.bytes_read,
        seconds=time.perf_counter() - started,
    )
    model.load_report.warn()


def _casts(groups: list[Group], leaves: Mapping[str, Leaf], arrays: LazyArrays) -> dict[str, tuple[str, ...]]:
    casts: dict[str, set[str]] = {}
    for group, names in groups:
        kinds = {parameter.path: kind for parameter, kind, _ in group}
        for name in names:
            before, after = arrays[name].kind, kinds[leaves[name].parts[0].path]
            if before != str(after):
                casts.setdefault(f"{before} -> {after}", set()).add(name)
    return {cast: tuple(sorted(names)) for cast, names in sorted(casts.items())}


def grouped(model: CausalLM, leaves: Mapping[str, Leaf], arrays: LazyArrays, dtype: np.dtype | None) -> list[Group]:
    """The model's parameters in disjoint groups, in the model's order; parameters that share an array share a group."""
    names: dict[Path, list[str]] = {}
    for name, leaf in leaves.items():
        for path in {part.path for part in leaf.parts}:
            names.setdefault(path, []).append(name)
    every, done, groups = {p.path: p for p in parameters(model, codes=True)}, set[Path](), []
    for path in every:
        paths, of_group = [path] if path not in done else [], dict[str, None]()
        done.add(path)
        for each in paths:  # the list grows during the loop, by parameters that share an array
            for name in names[each]:
                of_group[name] = None
                beside = dict.fromkeys(p.path for p in leaves[name].parts)
                paths += [other for other in beside if other not in done]
                done |= beside.keys()
        if paths:
            wanted = []
            for each in paths:
                variable = every[each].variable
                kind = dtype or natural_dtype(arrays[name] for name in names[each])
                if keeps_dtype(variable):
                    kind = np.dtype(variable.dtype)
                wanted.append((every[each], kind, model.strategy.sharding_of(every[each].variable)))
            groups.append((wanted, list(of_group)))
    return groups


class Filler:
    """Reads groups of parameters in a few threads, while the calling thread places finished groups on the devices.
    Unplaced parameters take the memory of one group, or of several groups of at most AHEAD_BYTES together."""

    def __init__(self, leaves: Mapping[str, Leaf], arrays: LazyArrays, bar: Any = None):
        self.leaves, self.arrays, self.bar = leaves, arrays, bar
        self.nonfinite: dict[str, int] = {}
        self.bytes_read = 0
        self._scratch, self._blocks = Scratch(), Blocks()

    def place(self, groups: Iterable[Group]) -> dict[Path, jax.Array]:
        """The parameters of all groups as JAX arrays with their shardings."""
        placed: dict[Path, jax.Array] = {}
        begun: deque[tuple[Any, dict[Path, Buffers], list[Future[Any]]]] = deque()
        ahead = 0

        def place_first() -> int:
            group, buffers, reads = begun.popleft()
            self.finish(reads)
            for parameter, _, sharding in group:
                placed[parameter.path] = _placed(parameter.shape, buffers[parameter.path], sharding)
            return _nbytes(buffers)

        with few_threads() as pool:
            for group, names in groups:
                ranges = {p.path: _ranges_on(p, sharding) for p, _, sharding in group}
                size = sum(_size(ranges[p.path]) * kind.itemsize for p, kind, _ in group)
                while begun and ahead + size > AHEAD_BYTES:
                    ahead -= place_first()
                buffers = {p.path: {r: self._empty(r, kind) for r in ranges[p.path]} for p, kind, _ in group}
                begun.append((group, buffers, self.begin(names, buffers, pool)))
                ahead += size
            while begun:
                place_first()
        return placed

    def _empty(self, ranges: Ranges, dtype: np.dtype) -> np.ndarray:
        return self._blocks.empty(tuple(stop - start for start, stop in ranges), dtype)

    def begin(self, names: Iterable[str], buffers: Mapping[Path, Buffers], pool: Executor) -> list[Future[Any]]:
        """Submit the reads of arrays into the buffers of parameters."""
        found = []
        for name in names:
            leaf, array = self.leaves[name], self.arrays[name]
            into = [buffers.get(part.path, {}) for part in leaf.parts]
            targets = [target for i, each in enumerate(into) for target in targets_of(leaf, i, each)]
            for box in blocks(targets, array):
                reached = [(target, both) for target in targets if (both := overlap(target.box, box))]
                if reached:
                    tight = tuple(
                        slice(min(part.start for part in parts), max(part.stop for part in parts))
                        for parts in zip(*(both for _, both in reached), strict=True)
                    )
                    found.append(pool.submit(self._read, name, array, tight, reached, leaf.change))
        return found

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

    def _read(
        self, name: str, array: LazyArray, box: Box, targets: list[tuple[Target, Box]], change: Change
    ) -> tuple[str, int, int]:
        """Read a block into its targets. Returns (array name, number of non-finite values, bytes read)."""
        shape, straight = sizes(box), None
        if len(targets) == 1 and change.none:
            target, both = targets[0]
            view = target.view[within(both, target.box)]
            straight = view if view.flags.c_contiguous else None

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if straight is not None and straight.dtype == dtype:
                return straight
            return self._scratch.empty("raw", (1, math.prod(shape)), dtype).reshape(shape)

        block, bad = array.read_box(box, empty), 0
        assert block.shape == shape, (name, block.shape, shape)
        below = getattr(self.leaves[name].parts[0].variable, "below", None)
        if below is not None and (odd := block[(block < 0) | (block >= below)]).size:
            raise CheckpointError(
                f"{plain(name)} in {array.file} has {odd[0]}: it must hold integers of 0 … {below - 1}"
            )
        if straight is not None and block is straight:
            bad = count_nonfinite(block)
        else:
            for target, both in targets:
                piece = change(block[within(both, box)])
                piece = piece if target.cut is None else piece[..., target.cut]
                at = within(both, target.box)
                at = at if target.cut is None else (*at[:-1], slice(None))
                bad += self._put(target.view[at], piece)
        return name, bad, array.bytes_of(box)

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


def _ranges_on(parameter: Parameter, sharding: Sharding | None) -> list[Ranges]:
    """The distinct shards of a parameter on this process's devices, as ranges."""
    if sharding is None:
        return [tuple((0, size) for size in parameter.shape)]
    indices = sharding.addressable_devices_indices_map(parameter.shape).values()
    return sorted({_ranges(index, parameter.shape) for index in indices})


def _ranges(index: Any, shape: tuple[int, ...]) -> Ranges:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _size(ranges: Iterable[Ranges]) -> int:
    return sum(math.prod(stop - start for start, stop in each) for each in ranges)


def _nbytes(buffers: Mapping[Path, Buffers]) -> int:
    return sum(buffer.nbytes for each in buffers.values() for buffer in each.values())


def _placed(shape: tuple[int, ...], buffers: Buffers, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(*buffers.values())
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[_ranges(index, shape)])
