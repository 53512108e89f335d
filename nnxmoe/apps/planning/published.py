"""Published runs, and the fraction of peak performance that their steps reached."""

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
    """A published run: the arguments of `plan`, the ``seconds`` per step and the source.

    Attributes:
        experts: Whether the model has experts.
        efficiency: Fraction of peak FLOP/s that the run reached, from the operations that `plan` counts and
            the published time. In decoding, fraction of peak bandwidth, from the bytes that `plan` counts.
        choices: Further arguments of `plan` (fields of `Work`).
        gflops_per_token: Published operations per token in billions, if the publisher counts half of
            causal attention.
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
        """Dtype of matrix products."""
        return self.choices.get("compute", "bf16")

    @property
    def kind(self) -> str:
        """Name of the hardware, without the shape of a slice."""
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
    """Lowest, expected and highest fraction of peak FLOP/s that steps reach, or of peak bandwidth in decoding.

    Attributes:
        why: Source of the fractions, as printed in a plan.
    """

    low: float
    expected: float
    high: float
    why: str

    @classmethod
    def of(cls, kind: Hardware, experts: bool, train: bool = True, compute: str = "bf16") -> "Efficiency":
        """Return the efficiency of published runs of similar models on the same hardware.

        Without such runs, uses runs on the same platform, else all runs. Models with and without experts are
        not distinguished for decoding and FP8, because these have too few runs. The peak is the bfloat16
        peak, also for FP8.
        """
        name = kind.name.partition(":")[0]
        any_model = not train or compute != "bf16"
        similar_runs = [run for run in published() if run.train == train and (any_model or run.experts == experts)]
        similar_runs = [run for run in similar_runs if run.compute == compute or not train]
        same_hardware = [run.efficiency for run in similar_runs if run.kind == name]
        same_platform = [
            run.efficiency for run in similar_runs if run.kind.startswith("tpu") == (kind.platform == "tpu")
        ]
        shares = same_hardware or same_platform or [run.efficiency for run in similar_runs]
        runs_text = f"models {'with' if experts else 'without'} experts" if train else "decoding"
        runs_text = f"training in {compute}" if train and any_model else runs_text
        runs_text = f"{len(shares)} published runs of {runs_text} on "
        device_text = name if same_hardware else f"other devices, since none ran on {name}"
        median = statistics.median(shares)
        # Widen the range, since a few runs do not show the full spread.
        return cls(min(*shares, 0.75 * median), median, min(0.95, max(*shares, 1.25 * median)), runs_text + device_text)


def nearest(model: str, device: Hardware, experts: bool, devices: int, train: bool) -> PublishedRun:
    """Return the published run that is most similar to a plan in experts, hardware, model and number of devices."""
    name = device.name.partition(":")[0]

    def distance(run: PublishedRun) -> tuple[bool, bool, float]:
        count = math.prod(run.mesh.values())
        return (
            run.experts != experts,
            run.kind != name,
            (run.model != model) * 8 + abs(count - devices) / (count + devices),
        )

    return min((run for run in published() if run.train == train), key=distance)
