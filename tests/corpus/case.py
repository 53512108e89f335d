"""One case of the corpus, and the sound checkpoint that it spoils."""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnxmoe.convert.files.safetensors import dtype_code
from tests.support.families import load
from tests.support.tiny import TINY, Fields, Weights, tiny_weights

FAMILIES = ("llama", "mixtral", "deepseek_v3")
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Verdict = Literal["refuse", "report", "accept"]


def sound(family: str) -> tuple[Fields, Weights]:
    """The config and the tensors of a family's tiny checkpoint."""
    if family in TINY:
        return dict(TINY[family]), tiny_weights(TINY[family])
    frozen = load(family)
    return dict(frozen.fields), dict(frozen.weights)


class Draft:
    """A sound tiny checkpoint, not yet written. ``fields`` and ``weights`` are to be spoiled; the logits of what is
    accepted or reported must be those of ``expected``."""

    def __init__(self, folder: Path, family: str):
        self.folder = folder
        self.fields, self.weights = sound(family)
        self.expected: tuple[Fields, Weights] = (dict(self.fields), dict(self.weights))

    def expect(self) -> None:
        """What the draft holds now is what must be computed."""
        self.expected = (dict(self.fields), dict(self.weights))

    def write(self) -> None:
        """As one file."""
        self.write_config()
        (self.folder / SINGLE).write_bytes(pack(self.weights))

    def write_config(self) -> None:
        """config.json alone."""
        (self.folder / CONFIG).write_text(json.dumps(self.fields))

    def write_shards(self, **changes: Any) -> None:
        """As two files and an index, whose fields may be changed."""
        self.write_config()
        names = sorted(self.weights)
        half = len(names) // 2
        for file, part in ((ONE, names[:half]), (TWO, names[half:])):
            (self.folder / file).write_bytes(pack({name: self.weights[name] for name in part}))
        weight_map = {name: ONE if i < half else TWO for i, name in enumerate(names)}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map} | changes
        (self.folder / INDEX).write_text(json.dumps(index))


@dataclasses.dataclass(frozen=True)
class Case:
    """``make`` writes the folder; ``names`` must occur in the error, or in the report and the warnings."""

    family: str
    fault: str
    verdict: Verdict
    make: Callable[[Draft], None]
    names: tuple[str, ...]
    action: Literal["load", "chat", "generate"] = "load"

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        return f"{self.family}: {self.fault}"


def rotate() -> Iterator[str]:
    """One family after the other, for faults that know no model."""
    while True:
        yield from FAMILIES


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from a header (an object, or raw bytes) and data, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def layout(arrays: Weights) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a sound file."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = entry(dtype_code(array.dtype), list(array.shape), len(data), len(data) + len(raw))
        data += raw
    return header, data


def pack(arrays: Weights) -> bytes:
    """A sound safetensors file."""
    return container(*layout(arrays))
