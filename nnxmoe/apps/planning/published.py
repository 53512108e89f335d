"""Runs that others have published, and the share of peak that whole steps reached in them."""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxmoe.runtime.hardware import Hardware

_FILE = Path(__file__).with_name("published.json")


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run: the arguments of `plan`, its ``seconds`` per step and where they are published.

    ``choices``: fields of `Choices`. ``experts``: whether the model has any. ``efficiency``: the share of peak at which
    the operations that we count take the published time, in decoding the share of bandwidth at which the bytes do; a
    test holds it. ``gflops_per_token``: the published
    operations per second and device over the tokens per second and device, where the publisher halves causal attention.
    """

    model: str
    on: str
    mesh: Mapping[str, int]
    batch: int
    seq: int
    seconds: float
    source: str
    experts: bool
    efficiency: float
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gflops_per_token: float | None = None
    note: str = ""
    train: bool = True

    @property
    def compute(self) -> str:
        return self.choices.get("compute", "bf16")

    @property
    def kind(self) -> str:
        """The kind of device, without the shape of a slice."""
        return self.on.partition(":")[0]

    def __str__(self) -> str:
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{self.model} on {self.on}, {axes}, {self.batch} x {self.seq}: {self.seconds:g} s ({self.source})"


@functools.cache
def published() -> tuple[PublishedRun, ...]:
    """The runs of the table."""
    return tuple(PublishedRun(**row) for row in json.loads(_FILE.read_text()))


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The share of peak of whole steps, in decoding of the bandwidth: the lowest, the one to expect, the highest.
    ``why``: where they are from."""

    low: float
    expected: float
    high: float
    why: str

    @classmethod
    def of(cls, kind: Hardware, experts: bool, train: bool = True, compute: str = "bf16") -> "Efficiency":
        """That of the published runs on such devices and of such models; else of all devices of the platform. There are
        too few of decoding and in FP8 to tell models apart. The peak is that of bfloat16, of FP8 too."""
        name = kind.name.partition(":")[0]
        whole = not train or compute != "bf16"
        alike = [run for run in published() if run.train == train and (whole or run.experts == experts)]
        alike = [run for run in alike if run.compute == compute or not train]
        own = [run.efficiency for run in alike if run.kind == name]
        near = [run.efficiency for run in alike if run.kind.startswith("tpu") == (kind.platform == "tpu")]
        found = own or near or [run.efficiency for run in alike]
        what = f"models {'with' if experts else 'without'} experts" if train else "decoding"
        what = f"training in {compute}" if train and whole else what
        what = f"{len(found)} published runs of {what} on "
        where = name if own else f"other devices: none on {name}"
        middle = statistics.median(found)
        # A few runs do not span what happens.
        return cls(min(*found, 0.75 * middle), middle, min(0.95, max(*found, 1.25 * middle)), what + where)


def nearest(model: str, kind: Hardware, experts: bool, devices: int, train: bool) -> PublishedRun:
    """The published run that is most like a plan: with experts or without, by device, model and number of devices."""
    name = kind.name.partition(":")[0]

    def distance(run: PublishedRun) -> tuple[bool, bool, float]:
        count = math.prod(run.mesh.values())
        return (
            run.experts != experts,
            run.kind != name,
            (run.model != model) * 8 + abs(count - devices) / (count + devices),
        )

    return min((run for run in published() if run.train == train), key=distance)
