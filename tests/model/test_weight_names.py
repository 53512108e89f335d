"""Typed names of weights: what part of a tensor each stands for, read, written, and of quantised tensors."""

import numpy as np

from nnxmoe.convert.arrays.coded_array import coded_array
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.arrays.tensor_parts import TensorPart, join_parts, split_tensors
from nnxmoe.layers.linear.code_format import CodeFormat
from nnxmoe.model.weight_names import Table, W, layer_of

RNG = np.random.default_rng(0)
FUSED = W("mlp.experts.gate_up")
# Rows of a table, the tensor of layer 3 that they divide, and the parts of it in NumPy.
PARTS = (
    ("mlp.up", [W("qkv").rows(i, 3) for i in range(3)], (12, 5), lambda t: np.split(t, 3, 0)),
    (
        "mlp.up",
        [W("qkv").rows(*at) for at in ((0, 6, 3), (3, 6, 1), (4, 6, 2))],
        (12, 5),
        lambda t: np.split(t, [6, 8]),
    ),
    ("mlp.up", [W("qkv").every(i, 2) for i in range(2)], (12,), lambda t: [t[0::2], t[1::2]]),
    ("mlp.up", [W("qkv").T], (12, 5), lambda t: [t.T]),
    ("moe.experts.up", [FUSED.rows(i, 2) for i in range(2)], (4, 6, 5), lambda t: np.split(t, 2, 1)),
    ("moe.experts.up", [FUSED.T.rows(i, 2) for i in range(2)], (4, 5, 6), lambda t: np.split(t.swapaxes(1, 2), 2, 1)),
    ("moe.experts.up", [FUSED.T.every(i, 2) for i in (0, 1)], (4, 5, 6), lambda t: [t.mT[:, i::2] for i in (0, 1)]),
)


def test_parts_of_a_tensor_are_read_and_joined() -> None:
    """In boxes of any size, and back into the same tensor."""
    for key, ws, shape, numpy in PARTS:
        tensor = RNG.standard_normal(shape).astype(np.float32)
        name, table = ws[0].tensor(3), {f"layer.{key}.{i}": w for i, w in enumerate(ws)}
        assert layer_of(name) == (3, ws[0].name)
        found = split_tensors(table, {name: LazyArray.from_array(tensor), "other": LazyArray.from_array(tensor)})
        assert found.keys() == {w.label(name) for w in ws} | {"other"}
        for w, wanted in zip(ws, numpy(tensor), strict=True):
            part = found[w.label(name)]
            assert (part.shape, part.tensors) == (wanted.shape, (name,))
            for _ in range(10):
                ends = [np.sort(RNG.choice(size + 1, 2, replace=False)) for size in wanted.shape]
                box = tuple(slice(int(a), int(b)) for a, b in ends)
                np.testing.assert_array_equal(part.read_box(box, np.empty), wanted[box], err_msg=w.label(name))
        views = {w.label(name): TensorPart(name, w, int(".experts." in key)) for w in ws}
        again = join_parts(found, {**views, "other": None})
        assert again.keys() == {name, "other"}
        np.testing.assert_array_equal(again[name], tensor)


def test_tensors_that_cannot_be_divided_are_faults() -> None:
    table: Table = {"layer.moe.experts.up": FUSED.rows(1, 2), "layer.moe.experts.down": W("down").T}
    arrays = {
        FUSED.tensor(0): LazyArray.from_array(np.zeros((4, 7, 5))),
        W("down").tensor(0): LazyArray.from_array(np.zeros(4)),
    }
    odd, flat = split_tensors(table, arrays).values()
    assert odd.fault is not None and "2 parts of equal size" in odd.fault
    assert flat.fault is not None and "must contain a kernel per expert" in flat.fault


def test_parts_of_a_quantised_tensor_stay_quantised() -> None:
    """With the scales of their tiles, unless two parts share a tile: then their values can be read and no codes."""
    codes = RNG.integers(-127, 128, (12, 5)).astype(np.int8)
    for tall, kept in ((1, True), (3, True), (12, True), (4, False)):
        form = CodeFormat("int8", (tall, 5))
        scale = RNG.uniform(1, 2, (-(-12 // tall), 1)).astype(np.float32)
        whole = coded_array(form, (12, 5), {"codes": LazyArray.from_array(codes), "scale": LazyArray.from_array(scale)})
        part = split_tensors({"layer.mlp.up": W("up").rows(1, 2)}, {"model.layers.0.up": whole})[
            "model.layers.0.up[1/2]"
        ]
        np.testing.assert_array_equal(part, np.asarray(whole)[6:])
        assert part.codes == form and part.fault is None
        assert all((each.fault is None) == kept for each in part.parts.values()), tall
        if kept:
            np.testing.assert_array_equal(part.parts["codes"], codes[6:])
