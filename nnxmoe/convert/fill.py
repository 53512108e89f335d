"""Reads a checkpoint into a model: every layout, with or without a mesh, by the same threads.

Each parameter gets one aligned buffer per range that this process's devices hold. Arrays are read in blocks; a block
goes to every buffer that has a part of it, cast and transposed on the way, and each is read once.
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
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from nnxmoe.axes import axes_of
from nnxmoe.convert.layout import Change, Leaf, Parameter, Part, Path, parameters
from nnxmoe.convert.lazy_array import Box, LazyArray, LazyArrays, overlap, sizes, within
from nnxmoe.convert.report import LoadReport
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.progress import bytes_bar
from nnxmoe.storage.host import Blocks, Scratch, copy_into, count_nonfinite, few_threads, transpose_into
from nnxmoe.strategy import Strategy

AHEAD_BYTES = 128 << 20  # of parameters begun before the first of them is placed
Ranges = tuple[tuple[int, int], ...]  # (start, stop) per dimension
Buffers = dict[Ranges, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Target:
    """Where values of an array go: their box in the array, and a view of a buffer with the array's dimensions.

    ``cut``: the range of the last dimension to keep after the change, which needs all of it.
    """

    box: Box
    view: np.ndarray
    cut: slice | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that share arrays, with their dtypes and shardings, and those arrays."""

    wanted: list[tuple[Parameter, np.dtype, Sharding | None]]
    names: list[str]


def fill(
    model: CausalLM, leaves: Mapping[str, Leaf], arrays: LazyArrays, dtype: np.dtype | None, report: LoadReport
) -> None:
    """Give an abstract model its values and its report. ``dtype`` None: as stored; the router's bias is always
    float32."""
    started, groups = time.perf_counter(), grouped(model, leaves, arrays, dtype)
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
        bytes_read=filler.bytes_read,
        seconds=time.perf_counter() - started,
    )
    model.load_report.warn()


def _casts(groups: list[Group], leaves: Mapping[str, Leaf], arrays: LazyArrays) -> dict[str, tuple[str, ...]]:
    casts: dict[str, set[str]] = {}
    for group in groups:
        kinds = {parameter.path: kind for parameter, kind, _ in group.wanted}
        for name in group.names:
            before, after = arrays[name].kind, kinds[leaves[name].parts[0].parameter.path]
            if before != after:
                casts.setdefault(f"{before} -> {after}", set()).add(name)
    return {cast: tuple(sorted(names)) for cast, names in sorted(casts.items())}


def grouped(model: CausalLM, leaves: Mapping[str, Leaf], arrays: LazyArrays, dtype: np.dtype | None) -> list[Group]:
    """The model's parameters in groups that share no array, in the model's order."""
    names: dict[Path, list[str]] = {}
    for name, leaf in leaves.items():
        for path in {part.parameter.path for part in leaf.parts}:
            names.setdefault(path, []).append(name)
    every, done, groups = {p.path: p for p in parameters(model)}, set[Path](), []
    for path in every:
        paths, of_group = [path] if path not in done else [], dict[str, None]()
        done.add(path)
        for each in paths:  # grows while arrays lead to further parameters
            for name in names[each]:
                of_group[name] = None
                beside = dict.fromkeys(p.parameter.path for p in leaves[name].parts)
                paths += [other for other in beside if other not in done]
                done |= beside.keys()
        if paths:
            wanted = []
            for each in paths:
                stored = dtype or natural_dtype({arrays[name].kind for name in names[each]})
                kind = np.dtype(np.float32) if isinstance(every[each].variable, RouterBias) else stored
                wanted.append((every[each], kind, _sharding(model, every[each])))
            groups.append(Group(wanted, list(of_group)))
    return groups


def _sharding(model: CausalLM, parameter: Parameter) -> Sharding | None:
    try:
        return model.strategy.sharding_of(parameter.variable)
    except ValueError as error:
        raise ValueError(f"{parameter.key}: {error}") from None


class Filler:
    """Reads groups of parameters. A few threads read while the caller's places what is complete; the memory of
    parameters that are not yet placed is that of one group, or of several that have at most AHEAD_BYTES."""

    def __init__(self, leaves: Mapping[str, Leaf], arrays: LazyArrays, bar: Any = None):
        self.leaves, self.arrays, self.bar = leaves, arrays, bar
        self.nonfinite: dict[str, int] = {}
        self.bytes_read = 0
        self._scratch, self._blocks = Scratch(), Blocks()

    def place(self, groups: Iterable[Group]) -> dict[Path, jax.Array]:
        """The parameters of all groups, each on its devices."""
        placed: dict[Path, jax.Array] = {}
        begun: deque[tuple[Group, dict[Path, Buffers], list[Future[Any]]]] = deque()
        ahead = 0

        def place_first() -> int:
            group, buffers, reads = begun.popleft()
            self.finish(reads)
            for parameter, _, sharding in group.wanted:
                placed[parameter.path] = _placed(parameter.shape, buffers[parameter.path], sharding)
            return _nbytes(buffers)

        with few_threads() as pool:
            for group in groups:
                ranges = {p.path: _ranges_on(p, sharding) for p, _, sharding in group.wanted}
                size = sum(_size(ranges[p.path]) * kind.itemsize for p, kind, _ in group.wanted)
                while begun and ahead + size > AHEAD_BYTES:
                    ahead -= place_first()
                buffers = {p.path: {r: self._empty(r, kind) for r in ranges[p.path]} for p, kind, _ in group.wanted}
                begun.append((group, buffers, self.begin(group.names, buffers, pool)))
                ahead += size
            while begun:
                place_first()
        return placed

    def _empty(self, ranges: Ranges, dtype: np.dtype) -> np.ndarray:
        return self._blocks.empty(tuple(stop - start for start, stop in ranges), dtype)

    def begin(self, names: Iterable[str], buffers: Mapping[Path, Buffers], pool: Executor) -> list[Future[Any]]:
        """Start to read arrays into buffers of ranges of parameters."""
        found = []
        for name in names:
            leaf, array = self.leaves[name], self.arrays[name]
            targets = [t for part in leaf.parts for t in _targets(leaf, part, buffers.get(part.parameter.path, {}))]
            for box in _blocks(targets, array):
                reached = [(target, both) for target in targets if (both := overlap(target.box, box))]
                if reached:
                    tight = tuple(
                        slice(min(part.start for part in parts), max(part.stop for part in parts))
                        for parts in zip(*(both for _, both in reached), strict=True)
                    )
                    found.append(pool.submit(self._read, name, array, tight, reached, leaf.change))
        return found

    def finish(self, reads: list[Future[tuple[str, int, int]]]) -> None:
        """Wait for reads; an error in a thread is raised here."""
        running: set[Future[Any]] = set(reads)
        while running:  # woken seldom: this thread's steps take time from the others
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
        """Read a block and put it into its targets; (array's name, number of non-finite values, bytes read)."""
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
        if straight is not None and block is straight:
            bad = count_nonfinite(block)
        else:
            for target, both in targets:
                piece = change(block[within(both, box)])
                piece = piece if target.cut is None else piece[..., target.cut]
                at = within(both, target.box)
                at = at if target.cut is None else (*at[:-1], slice(None))
                bad += self._put(target.view[at], piece)
        return name, bad, math.prod(shape) * array.kind.itemsize

    def _put(self, view: np.ndarray, piece: np.ndarray) -> int:
        """``view[...] = piece``, cast; the number of non-finite values in the result."""
        while view.ndim > 2 and view.shape[0] == 1:
            view, piece = view[0], piece[0]
        if view.ndim == 2 and view.strides[0] < view.strides[1]:  # rows there are columns here
            cast = self._scratch.padded("cast", (view.shape[0], view.shape[1]), view.dtype)
            copy_into(cast, piece)
            transpose_into(view.T, cast)
            return count_nonfinite(cast)
        copy_into(view, piece)
        return count_nonfinite(view)


def _targets(leaf: Leaf, part: Part, buffers: Buffers) -> Iterator[Target]:
    """Where the values of a part go among the buffers of its parameter."""
    lead, whole = len(part.at), part.box(leaf.shape)
    inner = [i for i, at in enumerate(part.place) if not isinstance(at, int)]
    inner += range(len(part.place), len(leaf.shape))  # the array's dimensions that the part has
    for ranges, buffer in buffers.items():
        starts = [start for start, _ in ranges[:lead]]
        if not all(start <= at < stop for at, (start, stop) in zip(part.at, ranges, strict=False)):
            continue
        values = buffer[tuple(at - start for at, start in zip(part.at, starts, strict=True))]
        own = tuple(slice(*ends) for ends in ranges[lead:])
        there, box, cut = leaf.inner_box(own, part.parameter), list(whole), None
        view = leaf.view(values, part.parameter, sizes(there))
        for dim, piece in zip(inner, there, strict=True):
            box[dim] = slice(whole[dim].start + piece.start, whole[dim].start + piece.stop)
        if leaf.change.features != "as they are" and box[-1] != whole[-1]:
            cut, box[-1] = there[-1], whole[-1]
        for dim in range(len(leaf.shape)):
            view = view if dim in inner else np.expand_dims(view, dim)
        yield Target(tuple(box), view, cut)


def _blocks(targets: list[Target], array: LazyArray) -> Iterator[Box]:
    """Boxes of about ``array.block`` bytes that cover all targets."""
    if not targets:
        return
    ends = zip(*(target.box for target in targets), strict=True)
    box = tuple(slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in ends)
    lines = 1 if all(target.view.flags.c_contiguous for target in targets) else 64
    yield from _cut(box, array.kind.itemsize, array.block, lines)


def _cut(box: Box, item: int, limit: int, lines: int) -> Iterator[Box]:
    """A box in pieces of about ``limit`` bytes; their rows are a multiple of ``lines``, for whole cache lines."""
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


def _ranges_on(parameter: Parameter, sharding: Sharding | None) -> list[Ranges]:
    """The ranges of a parameter on this process's devices, each once."""
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


def natural_dtype(kinds: Iterable[np.dtype]) -> np.dtype:
    """The dtype that arrays of these dtypes are loaded as by default: the widest; FP8 as bfloat16, float64 as
    float32."""
    narrowed = {1: np.dtype(ml_dtypes.bfloat16), 8: np.dtype(np.float32)}
    return np.dtype(jnp.result_type(*(narrowed.get(kind.itemsize, kind) for kind in kinds)))


def activations_dtype(strategy: Strategy, variables: Iterable[nnx.Variable]) -> Any:
    """The strategy's dtype, or that of the matrices among a model's parameters."""
    return matrices_dtype(variables) if strategy.compute_dtype is None else jnp.dtype(strategy.compute_dtype)


def matrices_dtype(variables: Iterable[nnx.Variable]) -> Any:
    """The dtype that holds every matrix among a model's parameters."""
    return jnp.result_type(*{v.dtype for v in variables if is_matrix(v)})


def is_matrix(variable: nnx.Variable) -> bool:
    """Whether activations take a parameter's dtype: norms, biases and routers may have another."""
    axes = [axis for axis in axes_of(variable) if axis != "layers"]
    return isinstance(variable, nnx.Param) and len(axes) > 1 and "router" not in axes
