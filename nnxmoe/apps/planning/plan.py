"""`plan`: memory, time and traffic of a model on a mesh, by arithmetic or from a compiled step."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from nnxmoe.apps.planning import advice, printing
from nnxmoe.apps.planning.arithmetic import Bytes, bytes_of, bytes_read
from nnxmoe.apps.planning.compilation import CompileJob, Program, compile_program, target
from nnxmoe.apps.planning.operations import operations
from nnxmoe.apps.planning.planned_step import PlannedStep, rows_per_device
from nnxmoe.apps.planning.published import Efficiency
from nnxmoe.apps.planning.torus import Route, hardware, refuse_unheld, routes, seconds
from nnxmoe.apps.planning.traffic import Traffic, traffic
from nnxmoe.apps.planning.work import PLANNED_ONLY, Work
from nnxmoe.axes import AnyMesh
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import short
from nnxmoe.convert.files.hub import local_folder, snapshot
from nnxmoe.convert.hf.auxiliary_files import read_config
from nnxmoe.mesh import abstract_mesh
from nnxmoe.model.pipeline import AXIS
from nnxmoe.model.remat import Remat
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import PRESETS, near_presets, preset
from nnxmoe.moe.dispatch import Sorted
from nnxmoe.moe.expert_parallel import ChunkedExchange, ExpertParallel, RaggedAllToAll
from nnxmoe.runtime.hardware import CPU, Hardware


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations, traffic and time of one step on a mesh. Printing it shows each figure's source.

    Attributes:
        bytes: Bytes on one device.
        operations: Operations on all devices.
        traffic: Estimate of the data that a device receives.
        decode_bytes: Bytes that a device reads to decode one token per row.
        routes: Mesh axis -> connection between its devices.
        program: The compiled step, if ``compiled_for`` names a platform.
        advice: Changes that were planned, with their results.
    """

    model: str
    config: DecoderConfig
    hardware: Hardware
    mesh: Mapping[str, int]
    work: Work
    bytes: Bytes
    operations: float
    traffic: tuple[Traffic, ...]
    decode_bytes: float
    routes: Mapping[str, Route]
    program: Program | None = None
    compiled_for: str = ""
    advice: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def exact(self) -> bool:
        """True if ``memory`` is from a step compiled for the planned hardware."""
        return self.program is not None and self.compiled_for == self.hardware.platform

    @property
    def memory(self) -> int:
        """Bytes on one device while a step runs, from the step compiled for the hardware, else estimated."""
        return self.program.total if self.program is not None and self.exact else self.bytes.total

    @property
    def fits(self) -> bool:
        """True if ``memory`` is at most the memory of a device."""
        return self.memory <= self.hardware.memory

    @property
    def bubble(self) -> float:
        """Fraction of a step in which the stages of a pipeline wait."""
        if self.work.pipeline is None:
            return 0.0
        idle = (self.mesh[AXIS] - 1) / self.work.interleaved
        return idle / (idle + self.work.pipeline.microbatches)

    @property
    def times(self) -> dict[str, float]:
        """Limiter -> seconds of one step if only this limiter took time, at the expected efficiency.

        The limiters are compute, memory and network.
        """
        kind = self.hardware
        network = sum(
            seconds(one.kind, one.bytes, [self.routes[axis] for axis in one.axes], one.copies) for one in self.traffic
        )
        share, moved = self.efficiency.expected, self.decode_bytes / self.efficiency.expected
        if self.work.train:  # state is read and written; gathered kernels are moved at least once
            moved = 2 * (self.bytes.arguments + self.bytes.gradients) + sum(
                t.bytes for t in self.traffic if t.what != "tokens"
            )
        compute = self.operations / self.devices / (kind.flops * share) / (1 - self.bubble)
        return {"compute": compute, "memory": moved / kind.bandwidth, "network": network}

    @property
    def limiter(self) -> str:
        """The slowest of compute, memory and network."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def efficiency(self) -> Efficiency:
        """Share of peak that whole steps reach. In decoding, share of the bandwidth."""
        if (given := self.hardware.efficiency) is not None:
            return Efficiency(given, given, given, "as given")
        return Efficiency.of(self.hardware, self.config.experts > 0, self.work.train, self.work.compute)

    @property
    def seconds(self) -> float:
        """Expected seconds per step, with perfect overlap of compute, memory and network."""
        return max(self.times.values())

    @property
    def range(self) -> tuple[float, float]:
        """Minimum and maximum seconds per step.

        The minimum uses the highest efficiency of published runs. The maximum uses the lowest efficiency,
        without overlap of the network.
        """
        share, network = self.efficiency, self.times["network"]
        # The efficiency scales compute in training, and compute and memory in decoding.
        work = {name: time for name, time in self.times.items() if name != "network"}
        fixed = work.pop("memory") if self.work.train else 0.0
        whole = share.expected * max(work.values())
        return max(whole / share.high, fixed, network), max(whole / share.low, fixed) + network

    def __str__(self) -> str:
        return printing.table(self)

    def plot(self, ax: Any = None) -> Any:
        """Plot the bytes on one device as bars. Requires matplotlib (the extra ``notebooks``)."""
        from nnxmoe import plot

        sizes = {name: size / 1e9 for name, size in dataclasses.asdict(self.bytes).items() if size > 1e-4 * self.memory}
        ax = plot.bars(sizes, f"GB of {self.hardware.memory / 1e9:.0f} on one {self.hardware.name}", ax, form="{:.3g}")
        seconds = ", ".join(f"{name} {value:.2g} s" for name, value in self.times.items())
        ax.set_title(f"{self.model} on {self.devices} devices\n{seconds} per step", fontsize=10)
        return ax


def plan(
    model: DecoderConfig | str | os.PathLike[str],
    mesh: str | Mapping[str, int] | AnyMesh,
    *,
    batch: int,
    seq: int,
    on: str | Hardware = "h100",
    train: bool = True,
    strategy: Strategy | None = None,
    compile_for: str | None = None,
    advise: bool = True,
    **choices: Any,
) -> Plan:
    """Plan a training step (AdamW, float32 state), or one decoded token per row.

    Args:
        model: A config, a preset, a folder or a hub id. Only config.json is fetched.
        mesh: Sizes of mesh axes, as a mapping or as in the command line: ``"fsdp=16,expert=16"``.
        batch, seq: Rows on all devices, and tokens per row or in the cache.
        on: The devices, such as ``h100`` or ``tpu-v5p:4x4x4``.
        strategy: The strategy to compile, without a mesh. Its rules, pipeline, remat and exchange
            determine the plan.
        compile_for: ``"cpu"`` compiles the step for virtual devices, ``"device"`` for the named
            hardware.
        advise: Also plan changes if the step does not fit.
        choices: Fields of `nnxmoe.apps.planning.work.Work`, except fields set by ``strategy``.

    Raises:
        ValueError: If the mesh or the torus does not fit the model or the step.
        RuntimeError: If the step does not compile.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ValueError(f"plan(strategy={short(strategy)}): give a Strategy, or None")
    if compile_for not in (None, "cpu", "device"):
        raise ValueError(f"plan(compile_for={short(compile_for)}): use 'cpu' or 'device', or None")
    if not isinstance(advise, bool):
        raise ValueError(f"plan(advise={short(advise)}): give True or False")
    name, config = read_model(model)
    work = Work(batch, seq, train, **choices)
    work.check()
    work = work if strategy is None else work.of(strategy)
    made = _by_arithmetic(name, config, hardware(on), abstract_mesh(mesh), work)
    if advise and strategy is None:  # `search` tries one choice on many meshes
        refuse_without_effect(made, work)
    if compile_for is not None:
        if told := [name for name in PLANNED_ONLY if getattr(work, name) != getattr(Work, name)]:
            raise ValueError(f"{told[0]} is planned by arithmetic only: leave it out, or do not compile")
        made = _compiled(made, strategy, compile_for)
    if advise and not made.fits:
        made = dataclasses.replace(made, advice=advice.changes(made, _by_arithmetic))
    return made


def _by_arithmetic(name: str, config: DecoderConfig, kind: Hardware, mesh: AnyMesh, work: Work) -> Plan:
    work.check_mesh(mesh)
    shape = dict(mesh.shape)
    refuse_unheld(kind, {axis: size for axis, size in shape.items() if axis != work.across})
    rows_per_device(work.batch // work.accumulate, mesh)  # raises ValueError if the parts do not divide
    step = PlannedStep.of(config, mesh, work)
    return Plan(
        name,
        config,
        kind,
        shape,
        dataclasses.replace(work, chunks=step.chunks),
        bytes_of(step),
        operations(step),
        tuple(traffic(step)),
        bytes_read(step),
        routes(kind, shape, work.across),
    )


def refuse_without_effect(made: Plan, work: Work) -> None:
    """Raise ValueError for options of an exchange or a pipeline that the mesh does not have."""
    exchanged = made.config.experts and made.mesh["expert"] > 1
    asked = {
        "buffer_factor": work.buffer_factor,
        "node_copies": work.node_copies or None,
        "chunks": None if work.chunks == 1 else work.chunks,
    }
    for name, value in asked.items():
        if not exchanged and value is not None:
            raise ValueError(
                f"{name}={value}: no tokens are sent to experts: leave it out, or give a model with "
                "experts a mesh axis expert"
            )
    if work.interleaved > 1 and work.microbatches is None:
        raise ValueError(f"interleaved={work.interleaved}: there are no pipeline stages: give microbatches too")


def _compiled(made: Plan, strategy: Strategy | None, compile_for: str) -> Plan:
    """Compile the step of a plan."""
    platform = CPU if compile_for == "cpu" else made.hardware.platform
    pipeline, device = made.work.pipeline, target(made.hardware, platform)
    strategy = strategy or default_strategy(made.config, made.mesh, platform, made.work)
    stacking = strategy.stacking if pipeline is None else Scanned()
    strategy = dataclasses.replace(strategy, rules=made.work.rules, pipeline=pipeline, stacking=stacking)
    job = CompileJob(made.config, strategy, made.mesh, made.work, platform, device)
    return dataclasses.replace(made, program=compile_program(job), compiled_for=platform)


def default_strategy(config: DecoderConfig, mesh: Mapping[str, int], platform: str, work: Work) -> Strategy:
    """Return a strategy with scanned layers, and with rematerialization if ``work`` trains with remat.

    Experts are sharded over the expert axis if it has several devices. The kernels are as chosen by
    ``Strategy.auto`` for the platform.
    """
    exchange = ChunkedExchange(RaggedAllToAll(work.buffer_factor), work.chunks)
    dispatch = ExpertParallel(Sorted(), exchange) if config.experts and mesh["expert"] > 1 else Sorted()
    return dataclasses.replace(
        Strategy.auto(platform),
        dispatch=dispatch,
        stacking=Scanned(),
        remat=Remat(offload=("layer_input",) * work.offload) if work.train and work.remat else None,
    )


def read_model(model: DecoderConfig | str | os.PathLike[str]) -> tuple[str, DecoderConfig]:
    """Return the name and the config of the ``model`` argument of `plan`."""
    if isinstance(model, DecoderConfig):
        return next((name for name, config in PRESETS.items() if config == model), model.model_type), model
    if (found := preset(model)) is not None:
        return str(model).lower(), found
    if (folder := local_folder(model, ValueError)) is None:
        if "/" not in str(model):
            raise ValueError(f"{model} is neither a folder nor a preset{near_presets(model)}")
        folder = snapshot(str(model), None, False, ["config.json"], (), ValueError)
    return str(model), read_config(folder)
