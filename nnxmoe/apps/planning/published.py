"""Runs published by others, with the share of peak that whole steps reached."""

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
    """A published run: the arguments of `plan`, its ``seconds`` per step and its source.

    Attributes:
        experts: True if the model has experts.
        efficiency: Share of peak at which our operation count takes the published time. In decoding,
            share of bandwidth at which our byte count does. A test checks it.
        choices: Further arguments of `plan`, fields of `Work`.
        gflops_per_token: Published operations per second and device over tokens per second and
            device, if the publisher halves causal attention.
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
        """Dtype of products."""
        return self.choices.get("compute", "bf16")

    @property
    def kind(self) -> str:
        """Kind of device, without the shape of a slice."""
        return self.on.partition(":")[0]

    def __str__(self) -> str:
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{self.model} on {self.on}, {axes}, {self.batch} x {self.seq}: {self.seconds:g} s ({self.source})"


@functools.cache
def published() -> tuple[PublishedRun, ...]:
    """Read the table of published runs."""
    return tuple(PublishedRun(**row) for row in json.loads(_FILE.read_text()))


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Share of peak that whole steps reach: lowest, expected and highest. In decoding, share of bandwidth.

    Attributes:
        why: Source of the shares.
    """

    low: float
    expected: float
    high: float
    why: str

    @classmethod
    def of(cls, kind: Hardware, experts: bool, train: bool = True, compute: str = "bf16") -> "Efficiency":
        """Return the efficiency of published runs on the same kind of device with similar models.

        Without such runs, uses runs on the same platform, then all runs. Decoding and FP8 have too few runs
        to distinguish models with experts from models without. The peak is of bfloat16, also for FP8.
        """
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
        # Widen the range, since few runs do not show the whole spread.
        return cls(min(*found, 0.75 * middle), middle, min(0.95, max(*found, 1.25 * middle)), what + where)


def nearest(model: str, kind: Hardware, experts: bool, devices: int, train: bool) -> PublishedRun:
    """Return the published run most similar to a plan: by experts, device, model and number of devices."""
    name = kind.name.partition(":")[0]

    def distance(run: PublishedRun) -> tuple[bool, bool, float]:
        count = math.prod(run.mesh.values())
        return (
            run.experts != experts,
            run.kind != name,
            (run.model != model) * 8 + abs(count - devices) / (count + devices),
        )

    return min((run for run in published() if run.train == train), key=distance)
