"""Join sharded tensors on loading, and split them on saving.

A sharded tensor is stored as several tensors of consecutive rows, such as ``ngram_embedding.shard_0.weight``
(Qwen3.8-Flash-Next). Only this module handles such tensors.
"""

import itertools
import re
from collections.abc import Mapping, Set
from dataclasses import replace

import numpy as np

from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray, LazyArrays
from nnxmoe.model.weight_names import Table, layer_of, options

_SHARD = re.compile(r"(.+)\.shard_([0-9]{1,9})(\.[^.]+)")


def join_shards(sharded_names: Set[str], arrays: LazyArrays) -> LazyArrays:
    """Replace the shards of each tensor with a name in ``sharded_names`` (relative to its layer) with one array."""
    shards: dict[str, dict[int, str]] = {}
    for match in filter(None, map(_SHARD.fullmatch, arrays)):
        if layer_of(match[1] + match[3])[1] in sharded_names:
            shards.setdefault(match[1] + match[3], {})[int(match[2])] = match[0]
    used_names = {name for names in shards.values() for name in names.values()}
    joined = {name: _concatenate(name, [names[i] for i in sorted(names)], arrays) for name, names in shards.items()}
    return {name: array for name, array in arrays.items() if name not in used_names} | joined


def _concatenate(name: str, shards: list[str], arrays: LazyArrays) -> LazyArray:
    """Concatenate the rows of shards lazily. The result has a ``fault`` if a shard is missing or malformed."""
    parts, (stem, _, ending) = [arrays[shard] for shard in shards], name.rpartition(".")
    for i, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        fault = part.fault
        if shard != (expected := f"{stem}.shard_{i}.{ending}"):
            fault = f"{expected} is missing"
        elif len(part.shape) != 2 or (part.shape[1], part.dtype) != (parts[0].shape[1], parts[0].dtype):
            fault = f"{shard} differs in width or dtype from {shards[0]}"
        if fault is not None:
            return LazyArray.faulty(fault, tuple(shards))
    *starts, size = itertools.accumulate((part.shape[0] for part in parts), initial=0)

    def read(box: Box, empty: Empty) -> np.ndarray:
        rows = [slice(max(box[0].start - start, 0), box[0].stop - start) for start in starts]
        rows = [slice(row.start, min(row.stop, part.shape[0])) for row, part in zip(rows, parts, strict=True)]
        pairs = [(part, row) for part, row in zip(parts, rows, strict=True) if row.start < row.stop]
        return np.concatenate([part.read_box((row, *box[1:]), np.empty) for part, row in pairs])

    return replace(parts[0], shape=(size, *parts[0].shape[1:]), read_box=read, tensors=tuple(shards))


def split_shards(table: Table, keys: Mapping[str, str], tensors: LazyArrays) -> dict[str, LazyArray]:
    """Split each sharded tensor into shards of equally many rows. The last shard may be smaller, as in ``torch.chunk``.

    Args:
        table: Parameter key -> tensor name.
        keys: Tensor name -> parameter key.
        tensors: Tensors to save, by name.
    """
    result = dict(tensors)
    for name, key in keys.items():
        if name in tensors and (max_shards := options(table, key)[0].max_shards):
            array, (stem, _, ending) = result.pop(name), name.rpartition(".")
            starts = range(0, array.shape[0], -(-array.shape[0] // max_shards))
            for i, start in enumerate(starts):
                rows = range(start, min(start + starts.step, array.shape[0]))
                result[f"{stem}.shard_{i}.{ending}"] = array.take(rows, 0)
    return result
