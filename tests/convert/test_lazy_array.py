"""Lazy arrays: chains of operations, read one box at a time, give the values of NumPy's operations."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe.convert import native
from nnxmoe.convert.arrays import model_arrays
from nnxmoe.convert.arrays.array_layout import ArrayLayout
from nnxmoe.convert.arrays.lazy_array import LazyArray, merge_columns
from tests.support.running import compiled_in
from tests.support.tiny import build_tiny, stacking_of

Pair = tuple[LazyArray, np.ndarray]  # a lazy array and the values that it must read


@st.composite
def shapes_of(draw: Any, size: int) -> tuple[int, ...]:
    """Shapes with ``size`` values, with dimensions of size 1 among them."""
    shape = list[int]()
    while size > 1 or not shape:
        shape.append(draw(st.sampled_from([factor for factor in range(size, 0, -1) if size % factor == 0])))
        size //= shape[-1]
    return tuple(shape)


def ranges(size: int) -> st.SearchStrategy[range]:
    """Non-empty ranges of indices with positive steps."""
    return st.builds(range, st.integers(0, min(1, size - 1)), st.just(size), st.sampled_from([2, 1, 3]))


OPERATIONS = ("reshape", "transpose", "swap", "take", "take range", "map", "map_blocks", "map_whole", "merge_columns")


def changed(data: st.DataObject, operation: str, pair: Pair) -> Pair:
    """Apply an operation with drawn arguments to a lazy array, and the same operation to its values."""
    draw, (lazy, values) = functools.partial(data.draw, label=operation), pair
    match operation:
        case "reshape":
            shape = draw(shapes_of(values.size))
            return lazy.reshape(shape), values.reshape(shape)
        case "transpose":
            order = tuple(draw(st.permutations(range(values.ndim))))
            return lazy.transpose(order), values.transpose(order)
        case "swap":
            return lazy.swap_leading_axes(), values.swapaxes(0, 1) if values.ndim > 1 else values
        case "take" | "take range":
            axis = draw(st.integers(-values.ndim, values.ndim - 1))
            size = values.shape[axis]
            lists = st.lists(st.integers(0, size - 1), min_size=1, max_size=5)
            index = draw(lists if operation == "take" else ranges(size))
            return lazy.take(index, axis), np.take(values, index, axis)
        case "map":
            return lazy.map(lambda part: 2 * part + 1), 2 * values + 1
        case "map_blocks":
            width = draw(st.sampled_from([width for width in (1, 2, 3) if values.shape[-1] % width == 0]))

            def mirror(part: np.ndarray) -> np.ndarray:
                """Append the reverse of each block to it."""
                blocks = part.reshape(*part.shape[:-1], -1, width)
                return np.concatenate([blocks, blocks[..., ::-1]], -1).reshape(*part.shape[:-1], -1)

            return lazy.map_blocks(width, 2 * width, mirror), mirror(values)
        case "map_whole":
            whole = lazy.map_whole(values.shape, values.dtype, np.flip)
            return dataclasses.replace(whole, global_array=lambda: np.flip(values)), np.flip(values)
        case _:
            columns = draw(st.permutations(range(2 * values.shape[-1])))
            parts = [(array, columns[i::2]) for i, array in enumerate((lazy, lazy.map(np.negative)))]
            merged = np.empty((*values.shape[:-1], len(columns)), values.dtype)
            merged[..., columns[::2]], merged[..., columns[1::2]] = values, -values
            return merge_columns(parts), merged


@st.composite
def boxes_of(draw: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Non-empty boxes of an array."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(slice(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_chains_of_operations_equal_those_of_numpy(data: st.DataObject) -> None:
    """All operations once, in any order: boxes of the result, and the whole result where an array spans processes."""
    shape = tuple(data.draw(st.lists(st.sampled_from([4, 3, 2, 1, 6]), min_size=2, max_size=4), "shape"))
    source = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    pair = dataclasses.replace(LazyArray.from_array(source), global_array=lambda: source), source
    for operation in data.draw(st.permutations(OPERATIONS), "operations"):
        pair = changed(data, operation, pair)
    lazy, values = pair
    assert (lazy.shape, lazy.dtype) == (values.shape, values.dtype)
    np.testing.assert_array_equal(np.asarray(lazy), values)
    for box in data.draw(st.lists(boxes_of(values.shape), min_size=3, max_size=3), "boxes"):
        np.testing.assert_array_equal(lazy.read_box(box, np.empty), values[box])
    assert lazy.global_array is not None
    np.testing.assert_array_equal(lazy.global_array(), values)


def test_boxes_of_reshaped_arrays() -> None:
    """They equal boxes of NumPy's arrays if dimensions are merged, are split or have size 1."""
    rng = np.random.default_rng(0)
    shapes = [(24,), (4, 6), (2, 3, 4), (1, 6, 2, 2), (3, 8, 1), (12, 1, 2)]
    for one, other in itertools.product(shapes, repeat=2):
        array = np.arange(24).reshape(one)
        reshaped, expected = LazyArray.from_array(array).reshape(other), array.reshape(other)
        for _ in range(20):
            ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in other]
            box = tuple(slice(int(low), int(high)) for low, high in ends)
            assert np.array_equal(reshaped.read_box(box, np.empty), expected[box]), (one, other, box)


def slice_of_sharded_stack() -> tuple[np.ndarray, str]:
    """Return index 5 of a stack that is sharded over eight devices, and the text of the compiled program."""
    sharding = NamedSharding(nnxmoe.make_mesh(expert=8), PartitionSpec("expert"))
    stack = jax.device_put(np.arange(768, dtype=np.float32).reshape(8, 12, 8), sharding)
    layout = ArrayLayout("", (12, 8))
    program = model_arrays._assemble.lower(layout, np.dtype("float32"), ((5,),), [stack]).compile()
    return np.asarray(program([stack])), program.as_text()


@pytest.mark.slow
def test_slices_are_read_without_gathering_the_stack(eight: Callable[..., Any]) -> None:
    value, program = eight(slice_of_sharded_stack)
    np.testing.assert_array_equal(value, np.arange(768).reshape(8, 12, 8)[5])
    assert "all-gather" not in program


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_whole_arrays_share_programs(scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that several hosts save, here on one host: of equal layers, and of layers that are saved again."""
    monkeypatch.setattr(model_arrays, "spans_hosts", lambda value: True)
    model = build_tiny("mixtral", nnxmoe.Strategy(stacking=stacking_of(scan)), num_hidden_layers=3)
    arrays = model_arrays.model_arrays(native.layout(model, False))

    def compute(layer: int) -> None:
        for name, array in arrays.items():
            if f"layers/{layer}/" in name and array.global_array is not None:
                results[name] = array.global_array()

    results: dict[str, Any] = {}
    counts = [compiled_in(functools.partial(compute, layer)) for layer in (0, 1, 2, 0, 1, 2)]
    assert counts[0] > 0 and not any(counts[3 if scan else 1 :])
    assert len(results) == 30
    for name, value in results.items():
        np.testing.assert_array_equal(value, np.asarray(arrays[name]))
