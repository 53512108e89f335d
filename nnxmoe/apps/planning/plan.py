"""Plan the memory, time and traffic of a model on a mesh, by arithmetic or from a compiled step."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from nnxmoe.apps.planning import advice, printing
from nnxmoe.apps.planning.arithmetic import Bytes, bytes_of, bytes_read
from nnxmoe.apps.planning.compilation import CompileJob, Program, compile_program, target
from nnxmoe.apps.planning.operations import operations
from nnxmoe.apps.planning.planned_model import first_layers, read_model
from nnxmoe.apps.planning.planned_step import PlannedStep, abstract, rows_per_device
from nnxmoe.apps.planning.published import Efficiency
from nnxmoe.apps.planning.torus import Route, hardware, refuse_unheld, routes, seconds
from nnxmoe.apps.planning.traffic import Traffic, traffic
from nnxmoe.apps.planning.work import PLANNED_ONLY, Work
from nnxmoe.axes import AnyMesh
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import short
from nnxmoe.mesh import abstract_mesh
from nnxmoe.model.pipeline import AXIS
from nnxmoe.model.remat import Remat
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.moe.dispatch import Sorted
from nnxmoe.moe.expert_parallel import ChunkedExchange, ExpertParallel, RaggedAllToAll
from nnxmoe.runtime.hardware import CPU, Hardware
from nnxmoe.sharding_rules import training_rules


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations, traffic and time of one step on a mesh.

    ``str(plan)`` lists every figure with its source.

    Attributes:
        bytes: Bytes on one device.
        operations: Floating-point operations on all devices.
        traffic: Estimated data that one device receives.
        decode_bytes: Bytes that one device reads to decode one token per row.
        routes: Maps a mesh axis to the connection between its devices.
        program: The compiled step, or `None` if the step was not compiled.
        compiled_for: Platform of ``program``, or an empty string.
        advice: Changes that save memory, with their results. Empty if the step fits.
        other_rules: The plan of the same step with `RULES`, or `None` unless `training_rules` replaced `RULES`.
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
    other_rules: "Plan | None" = None

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def exact(self) -> bool:
        """Whether ``memory`` comes from a step compiled for the planned hardware."""
        return self.program is not None and self.compiled_for == self.hardware.platform

    @property
    def memory(self) -> int:
        """Bytes on one device while a step runs. Estimated unless the step was compiled for the hardware."""
        return self.program.total if self.program is not None and self.exact else self.bytes.total

    @property
    def fits(self) -> bool:
        """Whether ``memory`` is at most the memory of a device."""
        return self.memory <= self.hardware.memory

    @property
    def received(self) -> float:
        """Estimated bytes that one device receives in a step."""
        return sum(collective.bytes for collective in self.traffic)

    @property
    def bubble(self) -> float:
        """Fraction of a step in which pipeline stages are idle."""
        if self.work.pipeline is None:
            return 0.0
        idle = (self.mesh[AXIS] - 1) / self.work.interleaved
        return idle / (idle + self.work.pipeline.microbatches)

    @property
    def times(self) -> dict[str, float]:
        """Seconds per step that compute, memory and network would each take alone, at the expected efficiency."""
        device = self.hardware
        network = sum(
            seconds(
                collective.kind, collective.bytes, [self.routes[axis] for axis in collective.axes], collective.copies
            )
            for collective in self.traffic
        )
        efficiency, moved_bytes = self.efficiency.expected, self.decode_bytes / self.efficiency.expected
        if self.work.train:  # the state is read and written, and gathered kernels are moved at least once
            moved_bytes = 2 * (self.bytes.arguments + self.bytes.gradients) + sum(
                transfer.bytes for transfer in self.traffic if transfer.what != "tokens"
            )
        compute = self.operations / self.devices / (device.flops * efficiency) / (1 - self.bubble)
        return {"compute": compute, "memory": moved_bytes / device.bandwidth, "network": network}

    @property
    def limiter(self) -> str:
        """The slowest of compute, memory and network."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def efficiency(self) -> Efficiency:
        """Fraction of peak FLOP/s achieved by a full training step, or of peak memory bandwidth in decoding."""
        if (efficiency := self.hardware.efficiency) is not None:
            return Efficiency(efficiency, efficiency, efficiency, "as given")
        return Efficiency.of(self.hardware, self.config.experts > 0, self.work.train, self.work.compute)

    @property
    def seconds(self) -> float:
        """Expected seconds per step, with perfect overlap of compute, memory and network."""
        return max(self.times.values())

    @property
    def range(self) -> tuple[float, float]:
        """Minimum and maximum seconds per step.

        The minimum assumes the highest efficiency of published runs. The maximum assumes the lowest
        efficiency, and no overlap of communication with computation.
        """
        efficiency, network = self.efficiency, self.times["network"]
        # The efficiency scales compute in training, and compute and memory in decoding.
        work = {name: time for name, time in self.times.items() if name != "network"}
        memory_seconds = work.pop("memory") if self.work.train else 0.0
        peak_seconds = efficiency.expected * max(work.values())
        return max(peak_seconds / efficiency.high, memory_seconds, network), max(
            peak_seconds / efficiency.low, memory_seconds
        ) + network

    def __str__(self) -> str:
        return printing.table(self)

    def plot(self, ax: Any = None) -> Any:
        """Plot the bytes on one device as a bar chart. Requires matplotlib (the ``notebooks`` extra)."""
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
    """Plan one training step (AdamW, float32 state) or one decoding step.

    Args:
        model: A config, a preset, a folder or a hub id. Only config.json is downloaded.
        mesh: Sizes of mesh axes, as a mapping or as a string such as ``"fsdp=16,expert=16"``.
        batch: Rows per step, on all devices together.
        seq: Tokens per row in training, or tokens per row in the cache in decoding.
        on: Hardware, such as ``h100`` or ``tpu-v5p:4x4x4``.
        train: Plan a training step. If False, plan the decoding of one token per row.
        strategy: Strategy without a mesh. The plan uses its rules, pipeline, remat and exchange.
        compile_for: ``"cpu"`` compiles the step for virtual CPU devices, ``"device"`` for the hardware.
        advise: If the step does not fit, also plan changes that save memory.
        choices: Fields of `nnxmoe.apps.planning.work.Work`, except fields that ``strategy`` sets.

    Raises:
        ValueError: If the mesh does not fit the model, the batch or the torus of the hardware, or if
            options are invalid.
        RuntimeError: If the step fails to compile.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ValueError(f"plan(strategy={short(strategy)}): use a Strategy, or None")
    if compile_for not in (None, "cpu", "device"):
        raise ValueError(f"plan(compile_for={short(compile_for)}): use 'cpu' or 'device', or None")
    if not isinstance(advise, bool):
        raise ValueError(f"plan(advise={short(advise)}): use True or False")
    name, config = read_model(model)
    work = Work(batch, seq, train, **choices)
    work.check()
    work = work if strategy is None else work.of(strategy)
    config = config if work.layers is None else first_layers(config, work.layers)
    step_plan = _with_default_rules(name, config, hardware(on), abstract_mesh(mesh), work)
    if advise and strategy is None:  # `search` passes options that have no effect on some meshes
        refuse_without_effect(step_plan, work)
    if compile_for is not None:
        if unsupported_fields := [name for name in PLANNED_ONLY if getattr(work, name) != getattr(Work, name)]:
            raise ValueError(f"{unsupported_fields[0]} is not supported with compile_for: omit one of the two")
        step_plan = _compiled(step_plan, strategy, compile_for)
    if advise and not step_plan.fits:
        step_plan = dataclasses.replace(step_plan, advice=advice.changes(step_plan, _with_default_rules))
    return step_plan


def _by_arithmetic(name: str, config: DecoderConfig, device: Hardware, mesh: AnyMesh, work: Work) -> Plan:
    work.check_mesh(mesh)
    shape = dict(mesh.shape)
    refuse_unheld(device, {axis: size for axis, size in shape.items() if axis != work.across})
    rows_per_device(work.batch // work.accumulate, mesh)  # raises ValueError if the batch is not divisible
    step = PlannedStep.of(config, mesh, work)
    return Plan(
        name,
        config,
        device,
        shape,
        dataclasses.replace(work, chunks=step.chunks),
        bytes_of(step, device.platform),
        operations(step),
        tuple(traffic(step)),
        bytes_read(step),
        routes(device, shape, work.across),
    )


def _with_default_rules(name: str, config: DecoderConfig, device: Hardware, mesh: AnyMesh, work: Work) -> Plan:
    """Plan a step with the rules of ``work``.

    If a training step has the default rules, `training_rules` replaces them, as in `fit`. The plan with the default
    rules is then added as ``other_rules``.
    """
    rules = training_rules(abstract(config), mesh, work.rules) if work.train and not work.lora else work.rules
    step_plan = _by_arithmetic(name, config, device, mesh, dataclasses.replace(work, rules=rules))
    if rules == work.rules:
        return step_plan
    return dataclasses.replace(step_plan, other_rules=_by_arithmetic(name, config, device, mesh, work))


def refuse_without_effect(step_plan: Plan, work: Work) -> None:
    """Raise ValueError for options that need an expert exchange or a pipeline if the step has none."""
    has_exchange = step_plan.config.experts and step_plan.mesh["expert"] > 1
    exchange_options = {
        "buffer_factor": work.buffer_factor,
        "node_copies": work.node_copies or None,
        "chunks": None if work.chunks == 1 else work.chunks,
    }
    for name, value in exchange_options.items():
        if not has_exchange and value is not None:
            raise ValueError(
                f"{name}={value} has no effect because no tokens are sent to experts. Omit it, or use a model "
                "with experts and a mesh axis expert"
            )
    if work.interleaved > 1 and work.microbatches is None:
        raise ValueError(f"interleaved={work.interleaved} has no effect without a pipeline: set microbatches too")


def _compiled(step_plan: Plan, strategy: Strategy | None, compile_for: str) -> Plan:
    """Return the plan with its compiled step."""
    platform = CPU if compile_for == "cpu" else step_plan.hardware.platform
    pipeline, device = step_plan.work.pipeline, target(step_plan.hardware, platform)
    strategy = strategy or default_strategy(step_plan.config, step_plan.mesh, platform, step_plan.work)
    stacking = strategy.stacking if pipeline is None else Scanned()
    strategy = dataclasses.replace(strategy, rules=step_plan.work.rules, pipeline=pipeline, stacking=stacking)
    job = CompileJob(step_plan.config, strategy, step_plan.mesh, step_plan.work, platform, device)
    return dataclasses.replace(step_plan, program=compile_program(job), compiled_for=platform)


def default_strategy(config: DecoderConfig, mesh: Mapping[str, int], platform: str, work: Work) -> Strategy:
    """Return ``Strategy.auto`` for the platform, with scanned layers.

    Adds rematerialization if ``work`` trains with remat, and expert parallelism if the expert axis has
    several devices.
    """
    exchange = ChunkedExchange(RaggedAllToAll(work.buffer_factor), work.chunks)
    dispatch = ExpertParallel(Sorted(), exchange) if config.experts and mesh["expert"] > 1 else Sorted()
    return dataclasses.replace(
        Strategy.auto(platform),
        dispatch=dispatch,
        stacking=Scanned(),
        reduce_dtype=work.reduce_dtype,
        remat=Remat(offload=("layer_input",) * work.offload) if work.train and work.remat else None,
    )
