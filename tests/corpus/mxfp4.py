"""Faults of experts in MXFP4, and of experts that are stored in one tensor with inputs first."""

from collections.abc import Callable, Iterator

import numpy as np

from tests.corpus.case import CONFIG, SINGLE, Case, Draft
from tests.support.gpt_oss import FIELDS, MXFP4, in_mxfp4
from tests.support.tiny import Weights, tiny_weights

GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
BLOCKS, SCALES = f"{DOWN}_blocks", f"{DOWN}_scales"


def cases() -> Iterator[Case]:
    """All of them."""
    for fault, change, names in CODES:
        verdict = "refuse" if names else "accept"
        yield Case("gpt_oss", f"MXFP4, {fault}", verdict, _codes(change), names)
    for fault, change, names in FLOATS:
        yield Case("gpt_oss", f"experts, {fault}", "refuse", _floats(change), names)
    for fault, changes, names in SETTINGS:
        yield Case("gpt_oss", f"MXFP4, {fault}", "refuse", _codes(lambda weights: None, **changes), names)
    declared = _floats(lambda weights: None, quantization_config=MXFP4)
    yield Case("gpt_oss", "MXFP4, declared beside floats", "refuse", declared, (CONFIG, "mxfp4"))


def _codes(change: Callable[[Weights], object], **fields: object) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.fields = dict(FIELDS["mxfp4"])
        draft.weights, plain = in_mxfp4(tiny_weights(draft.fields))
        draft.expected = (dict(draft.fields), plain)
        draft.fields |= fields
        change(draft.weights)
        draft.write()

    return make


def _floats(change: Callable[[Weights], object], **fields: object) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.fields |= fields
        change(draft.weights)
        draft.write()

    return make


def _set(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: np.ascontiguousarray(change(weights[name]))})


def _an_expert_less(weights: Weights) -> None:
    for name in (BLOCKS, SCALES):
        weights[name] = weights[name][:3].copy()


CODES: list[tuple[str, Callable[[Weights], object], tuple[str, ...]]] = [
    ("as it should be", lambda weights: None, ()),
    ("blocks without scales", lambda weights: weights.pop(SCALES), (SCALES, "missing")),
    ("scales without blocks", lambda weights: weights.pop(BLOCKS), (BLOCKS, "missing")),
    ("inputs before outputs", _set(BLOCKS, lambda b: b.reshape(4, 64, 1, 16)), (SCALES, "[4, 32, 2]", "[4, 64, 1]")),
    (
        "blocks of three dimensions",
        _set(BLOCKS, lambda b: b.reshape(4, 32, 32)),
        (BLOCKS, "[4, 32, 32]", "inputs / 32"),
    ),
    ("blocks of 32 bytes", _set(BLOCKS, lambda b: b.reshape(4, 32, 1, 32)), (BLOCKS, "[4, 32, 1, 32]")),
    ("a row of scales too few", _set(SCALES, lambda s: s[:, 1:]), (SCALES, "[4, 31, 2]", "[4, 32, 2]")),
    ("scales as floats", _set(SCALES, lambda s: s.astype(np.float32)), (SCALES, "F32")),
    ("an expert less", _an_expert_less, (BLOCKS, "[3, 32, 64]", "[4, 32, 64]")),
    ("the kernel as floats, too", lambda w: w.update({DOWN: np.zeros((4, 64, 32), np.float32)}), (DOWN, "twice")),
]
SETTINGS: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    ("not declared", {"quantization_config": None}, (BLOCKS, "quantization_config")),
    ("declared as FP8", {"quantization_config": {"quant_method": "fp8"}}, (BLOCKS, "'fp8'")),
]
FLOATS: list[tuple[str, Callable[[Weights], object], tuple[str, ...]]] = [
    (
        "outputs before inputs",
        _set(GATE_UP, lambda t: t.swapaxes(1, 2)),
        (GATE_UP, SINGLE, "[6, 12, 56]", "[6, 28, 24]"),
    ),
    (
        "an odd number of gates and ups",
        _set(GATE_UP, lambda t: t[..., 1:]),
        (GATE_UP, SINGLE, "[6, 24, 55]", "2 parts of equal size"),
    ),
    ("one expert's kernel alone", _set(DOWN, lambda t: t[0]), (DOWN, SINGLE, "[28, 24]", "a kernel per expert")),
    ("one less in a tensor for all", _set(DOWN, lambda t: t[1:]), (DOWN, SINGLE, "[5, 24, 28]")),
    ("no biases", lambda weights: weights.pop(f"{DOWN}_bias"), (f"{DOWN}_bias", "missing")),
]
