"""From stored bytes to arrays on devices: only the slices asked for, in bounded pieces, each written once."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from nnxmoe.convert.table import Entry, Path, Piece
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.fp8 import check_scale_grid, dequantize_blocks, fp8_block
from nnxmoe.storage.host import Blocks, Scratch, copy_into, count_nonfinite, few_threads, transpose_into
from nnxmoe.storage.safetensors import TensorInfo

CHUNK_BYTES = 2 << 20  # what a thread does at a time: in the caches, and rare enough to leave the interpreter free
AHEAD_BYTES = 128 << 20  # of parameters begun before the first of them is placed
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")
Index = Sequence[slice]
Ranges = tuple[tuple[int, int], ...]  # (start, stop) of each dimension
Chunk = tuple[TensorInfo, slice, slice | None, np.ndarray | None, np.ndarray]  # rows, columns, scales, where they go
Begun = tuple[np.ndarray, list[Future[tuple[str, int]]]]


class Reader:
    """Reads the parameters of a plan from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, plan: list[Entry]):
        self.checkpoint = checkpoint
        self.plan = plan
        self.block = fp8_block(checkpoint.config, str(checkpoint.folder / "config.json"))
        self.nonfinite: dict[str, int] = {}
        self._scales: dict[str, np.ndarray] = {}
        self._scratch, self._blocks = Scratch(), Blocks()

    def faults(self) -> list[str]:
        """Every wrong shape, dtype or quantization among the tensors that are there."""
        found = []
        for entry, piece in ((e, p) for e in self.plan for p in e.pieces):
            info = self.checkpoint.tensors.get(piece.name)
            if info is None:
                continue
            if info.shape != entry.stored(piece):
                found.append(
                    f"{piece.name} in {info.file.name} has shape {list(info.shape)}, "
                    f"config.json asks for {list(entry.stored(piece))}"
                )
            if info.dtype not in FLOATS:
                found.append(
                    f"{piece.name} in {info.file.name} is {info.dtype}: weights must be one of {', '.join(FLOATS)}"
                )
            if info.dtype == "F8_E4M3":
                found += self._scale_faults(info)
        return list(dict.fromkeys(found))

    def _scale_faults(self, info: TensorInfo) -> list[str]:
        scale = self.checkpoint.tensors.get(info.name + "_scale_inv")
        if self.block is None:
            return [f"{info.name} in {info.file.name} is FP8, but config.json has no quantization_config"]
        if scale is None:
            return [f"{info.name}_scale_inv is missing: the FP8 tensor {info.name} needs its block scales"]
        if len(info.shape) != 2 or scale.dtype != "F32":
            return [f"{info.name}: FP8 weights must be 2-D with float32 scales, got {info.shape} and {scale.dtype}"]
        try:
            check_scale_grid(info.name, info.shape, scale.shape, self.block, info.file)
        except CheckpointError as error:
            return [str(error)]
        return []

    def natural(self, entry: Entry) -> np.dtype:
        """The dtype a parameter has when none is asked for: as stored; FP8 -> bfloat16, float64 -> float32."""
        return natural_dtype({self.checkpoint.info(piece.name).numpy_dtype for piece in entry.pieces})

    def place(self, wanted: Iterable[tuple[Entry, np.dtype, Sharding | None]], bar: Any) -> dict[Path, jax.Array]:
        """The parameters, each as one array of that dtype; with a sharding, each device's part read for itself.

        A few threads read while this one places what is complete. Memory not yet placed is that of one parameter, or
        of several whose bytes are at most AHEAD_BYTES.
        """
        placed: dict[Path, jax.Array] = {}
        begun: deque[tuple[Entry, Sharding | None, dict[Ranges, Begun]]] = deque()
        ahead = 0

        def place_first() -> int:
            entry, sharding, parts = begun.popleft()
            arrays = {key: self.finish(part, bar) for key, part in parts.items()}
            if sharding is None:
                placed[entry.path] = jax.device_put(*arrays.values())
            else:
                placed[entry.path] = jax.make_array_from_callback(
                    entry.shape, sharding, lambda index: arrays[_ranges(index, entry.shape)]
                )
            return sum(array.nbytes for array in arrays.values())

        with few_threads() as pool:
            for entry, dtype, sharding in wanted:
                everywhere: Any = {None: (slice(None),) * len(entry.shape)}
                indices = everywhere if sharding is None else sharding.addressable_devices_indices_map(entry.shape)
                keys = {_ranges(index, entry.shape) for index in indices.values()}  # devices may share one read
                size = sum(math.prod(stop - start for start, stop in key) for key in keys) * dtype.itemsize
                while begun and ahead + size > AHEAD_BYTES:
                    ahead -= place_first()
                begun.append((entry, sharding, {key: self.begin(entry, dtype, key, pool) for key in sorted(keys)}))
                ahead += size
            while begun:
                place_first()
        return placed

    def begin(self, entry: Entry, dtype: np.dtype, part: Ranges, pool: Executor) -> Begun:
        """Starts to read a part of a parameter, piece by piece, into one aligned buffer."""
        index = [slice(start, stop) for start, stop in part]
        out = self._blocks.empty(tuple(stop - start for start, stop in part), dtype)
        return out, [pool.submit(self._read, *chunk) for chunk in self._chunks(entry, index, out)]

    def finish(self, begun: Begun, bar: Any = None) -> np.ndarray:
        """Waits for a part; what went wrong in a thread is raised here."""
        out, reads = begun
        running: set[Any] = {None}
        while running:  # woken seldom: this thread's steps are time that the others cannot use
            done, running = wait(reads, timeout=0.1, return_when=FIRST_EXCEPTION)
            found = [read.result() for read in done]
            if bar is not None:
                bar.update(self.checkpoint.bytes_read - bar.n)
        for name, bad in found:
            if bad:
                self.nonfinite[name] = self.nonfinite.get(name, 0) + bad
        return out

    def _chunks(self, entry: Entry, index: Index, out: np.ndarray) -> Iterator[Chunk]:
        """What there is to read for a part of a parameter."""
        lead, inner = index[: entry.lead], index[entry.lead :]
        for piece in entry.pieces:
            if not all(s.start <= i < s.stop for i, s in zip(piece.at, lead, strict=False)):
                continue
            where = tuple(i - s.start for i, s in zip(piece.at, lead, strict=False))
            info = self.checkpoint.info(piece.name)
            if not piece.experts:
                yield from self._cut(entry, piece, info, inner, out[where])
                continue
            for e in range(lead[-1].start, lead[-1].stop):
                yield from self._cut(entry, piece, info.at(e), inner, out[(*where, e - lead[-1].start)])

    def _cut(self, entry: Entry, piece: Piece, info: TensorInfo, inner: Index, out: np.ndarray) -> Iterator[Chunk]:
        """Some rows at a time of a stored tensor, and the view of the parameter where they go."""
        if entry.inputs is None:  # stored as it is: rows of the first dimension, perhaps a range of the last
            rows, cols = inner[0], inner[-1] if len(inner) > 1 else None
        else:
            ins, outs = entry.inner[: entry.inputs], entry.inner[entry.inputs :]
            cols, rows = _flatten(inner[: entry.inputs], ins), _flatten(inner[entry.inputs :], outs)
            offset = piece.part * math.prod(outs)
            rows = slice(rows.start + offset, rows.stop + offset)
            out = out.reshape(cols.stop - cols.start, rows.stop - rows.start).T
        scales = self._scales_of(info) if info.numpy_dtype.itemsize == 1 else None
        step = max(1, CHUNK_BYTES // max(1, math.prod(out.shape[1:]) * out.itemsize))
        step = step if entry.inputs is None else max(64, step // 64 * 64)  # columns of whole cache lines
        for start in range(rows.start, rows.stop, step):
            some = slice(start, min(start + step, rows.stop))
            yield info, some, cols, scales, out[some.start - rows.start : some.stop - rows.start]

    def _scales_of(self, info: TensorInfo) -> np.ndarray:
        if info.name not in self._scales:
            self._scales = {info.name: self.checkpoint.read(info.name + "_scale_inv")}
        return self._scales[info.name]

    def _read(
        self, info: TensorInfo, rows: slice, cols: slice | None, scales: np.ndarray | None, out: np.ndarray
    ) -> tuple[str, int]:
        """Reads, dequantizes, casts and transposes; (the tensor's name, how many values are not finite)."""
        shape = len(out), math.prod(out.shape[1:])
        straight, same = out.flags.c_contiguous, info.numpy_dtype == out.dtype
        raw = out
        if not (straight and same):
            raw = self._scratch.empty("raw", shape, info.numpy_dtype).reshape(out.shape)
        self.checkpoint.read_into(info, raw, rows, cols)
        values = raw
        if scales is not None:
            assert self.block is not None and cols is not None
            values = dequantize_blocks(raw, scales, self.block, rows.start, cols.start)
        cast = out if straight else self._scratch.padded("cast", shape, out.dtype)
        if cast is not raw:
            copy_into(cast, values)
        if not straight:
            transpose_into(out.T, cast)
        return info.name, count_nonfinite(raw if same else cast)


def natural_dtype(kinds: Iterable[np.dtype]) -> np.dtype:
    """What arrays of these dtypes are loaded as where nothing else is asked: the widest; FP8 as bfloat16, float64 as
    float32."""
    narrowed = {1: np.dtype(ml_dtypes.bfloat16), 8: np.dtype(np.float32)}
    return np.dtype(jax.numpy.result_type(*(narrowed.get(kind.itemsize, kind) for kind in kinds)))


def _ranges(index: Index | None, shape: tuple[int, ...]) -> Ranges:
    assert index is not None
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _flatten(index: Index, shape: tuple[int, ...]) -> slice:
    """The range that slices of several dimensions make when those are flattened; only the first may be cut."""
    for part, size in itertools.islice(zip(index, shape, strict=True), 1, None):
        if part != slice(0, size):
            raise ValueError(f"only the first of the dimensions {shape} can be split, got {index}: change the rules")
    rest = math.prod(shape[1:])
    return slice(index[0].start * rest, index[0].stop * rest)
