"""`plan`: what a model takes on a mesh of named devices, by arithmetic or from a compiled step."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from nnxmoe.axes import RULES, AnyMesh, Rules, abstract_mesh
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import did_you_mean
from nnxmoe.config.validate import check_positive
from nnxmoe.convert.hf.side_files import read_config
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.stack import Remat, Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import PRESETS, preset
from nnxmoe.moe.dispatch import Sorted, check_factor
from nnxmoe.moe.expert_parallel import ExpertParallel, InChunks, RaggedAllToAll, fewest_chunks
from nnxmoe.planning import advice, printing
from nnxmoe.planning.arithmetic import Bytes, Work, bytes_of, bytes_read, parts, rows_per_device
from nnxmoe.planning.operations import operations
from nnxmoe.planning.program import CompileJob, Program, compile_program, target
from nnxmoe.planning.torus import hardware, links, refuse_unheld
from nnxmoe.planning.traffic import Traffic, by_axis, traffic
from nnxmoe.runtime.hardware import CPU, Hardware
from nnxmoe.storage.hub import local_folder, snapshot


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations, traffic and time of one step on a mesh; printing it shows where each figure is from.

    ``bytes``: on one device. ``operations``: on all. ``traffic``: an estimate of what a device receives.
    ``decode_bytes``: what a device reads to decode one token per row. ``links``: mesh axis -> the name and rate of the
    link it uses. ``program``: the compiled step, if ``compiled_for`` names a
    platform. ``advice``: changes that were planned again, with what they give.
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
    links: Mapping[str, tuple[str, float]]
    program: Program | None = None
    compiled_for: str = ""
    advice: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def exact(self) -> bool:
        """Whether ``memory`` is that of a step compiled for the planned hardware."""
        return self.program is not None and self.compiled_for == self.hardware.platform

    @property
    def memory(self) -> int:
        """Bytes on one device while a step runs: of the step compiled for the hardware, else estimated."""
        return self.program.total if self.program is not None and self.exact else self.bytes.total

    @property
    def fits(self) -> bool:
        """Whether a device has this memory."""
        return self.memory <= self.hardware.memory

    @property
    def bubble(self) -> float:
        """The fraction of a step in which the stages of a pipeline wait."""
        return 0.0 if self.work.pipeline is None else self.work.pipeline.bubble(self.mesh[AXIS])

    @property
    def times(self) -> dict[str, float]:
        """Limiter -> seconds of one step if nothing else took time: compute, memory and network."""
        kind, network = self.hardware, 0.0
        for axes, size in by_axis(self.traffic).items():
            network += size / min(self.links[axis][1] for axis in axes)
        moved = self.decode_bytes
        if self.work.train:  # state is read and written, gathered kernels at least once
            moved = 2 * (self.bytes.arguments + self.bytes.gradients) + sum(
                t.bytes for t in self.traffic if t.what != "tokens"
            )
        compute = self.operations / self.devices / (kind.flops * kind.efficiency) / (1 - self.bubble)
        return {"compute": compute, "memory": moved / kind.bandwidth, "network": network}

    @property
    def limiter(self) -> str:
        """The slowest of compute, memory and network."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def seconds(self) -> float:
        """Seconds per step, as if the three overlapped perfectly."""
        return max(self.times.values())

    def __str__(self) -> str:
        return printing.table(self)

    def plot(self, ax: Any = None) -> Any:
        """Bars of the bytes on one device; requires matplotlib (``nnxmoe[notebooks]``)."""
        from nnxmoe import plot

        sizes = {name: size / 1e9 for name, size in dataclasses.asdict(self.bytes).items() if size > 1e-4 * self.memory}
        ax = plot.bars(sizes, f"GB of {self.hardware.memory / 1e9:.0f} on one {self.hardware.name}", ax, form="{:.3g}")
        seconds = ", ".join(f"{name} {value:.2g} s" for name, value in self.times.items())
        ax.set_title(f"{self.model} on {self.devices} devices\n{seconds} per step", fontsize=10)
        return ax


def plan(
    model: DecoderConfig | str | os.PathLike[str],
    mesh: Mapping[str, int] | AnyMesh,
    *,
    batch: int,
    seq: int,
    on: str | Hardware = "h100",
    train: bool = True,
    accumulate: int = 1,
    rules: Rules = RULES,
    across: str | None = None,
    remat: bool = True,
    buffer_factor: float | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
    compile_for: str | None = None,
    strategy: Strategy | None = None,
    advise: bool = True,
) -> Plan:
    """The plan of a training step (AdamW, float32 state) or of one decoded token per row, on devices ``on``.

    ``model``: a config, a preset, a folder or a hub id, of which config.json is fetched. ``mesh``: sizes of mesh axes.
    ``across``: the axis that crosses nodes or slices. ``buffer_factor``: of `RaggedAllToAll`; None: room for all rows
    of the expert axis. ``chunks``: of `InChunks`, which bounds this room and drops nothing; None: as many as `InChunks`
    chooses. ``microbatches``: of a `Pipeline` over the mesh axis ``pipe``; None: this axis splits the batch only.
    ``compile_for``: ``"cpu"`` compiles the step for virtual devices, ``"device"`` for the named hardware. ``strategy``:
    the one to compile, without a mesh, whose rules, pipeline, remat, ``buffer_factor`` and ``chunks`` count; leave out
    these arguments then. Raises ValueError for what the mesh or the torus cannot hold, and RuntimeError if the step
    does not compile.
    """
    name, config = _config(model)
    _check_sizes(mesh, batch, seq, accumulate, train, buffer_factor, chunks)
    if strategy is not None:
        if (
            rules is not RULES
            or microbatches is not None
            or buffer_factor is not None
            or chunks is not None
            or not remat
        ):
            raise ValueError(
                "give rules, microbatches, remat, buffer_factor and chunks by the strategy, or without one"
            )
        rules, remat = strategy.rules, strategy.remat is not None
        microbatches = None if strategy.pipeline is None else strategy.pipeline.microbatches
        exchange = strategy.dispatch.exchange if isinstance(strategy.dispatch, ExpertParallel) else None
        exchange, chunks = (exchange.exchange, exchange.chunks) if isinstance(exchange, InChunks) else (exchange, 1)
        buffer_factor = exchange.buffer_factor if isinstance(exchange, RaggedAllToAll) else None
    kind, sizes = hardware(on), abstract_mesh(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if across is not None and across not in sizes.shape:
        raise ValueError(f"across={across!r} is not a mesh axis: use one of {', '.join(sizes.shape)}")
    pipeline = None if microbatches is None else _pipeline(microbatches, sizes, train)
    shape = dict(sizes.shape)
    chunks = _chosen_chunks(config, shape["expert"], buffer_factor, train) if chunks is None else chunks
    work = Work(batch, seq, train, accumulate, buffer_factor, chunks, pipeline=pipeline)
    refuse_unheld(kind, {axis: size for axis, size in shape.items() if axis != across})
    rows_per_device(batch // accumulate, sizes)  # raises for parts that do not divide
    if pipeline is not None:
        pipeline.refuse_batch(batch // accumulate, sizes)
    found = parts(config, sizes, rules, pipeline)
    made = Plan(
        name,
        config,
        kind,
        shape,
        work,
        bytes_of(config, found, work, sizes, remat),
        operations(config, found, work, remat),
        tuple(traffic(config, found, work, sizes, remat)),
        bytes_read(config, found, work, sizes),
        links(kind, shape, across),
    )
    if compile_for is not None:
        made = _compiled(made, compile_for, strategy, rules, remat, across)
    if advise and not made.fits:
        options = {"batch": batch, "seq": seq, "train": train, "across": across, "remat": remat}
        options |= {"buffer_factor": buffer_factor, "chunks": chunks, "microbatches": microbatches}
        again = advice.Question(config, shape, kind, rules, accumulate, options)
        made = dataclasses.replace(made, advice=advice.changes(made, again, plan))
    return made


def _chosen_chunks(config: DecoderConfig, size: int, buffer_factor: float | None, train: bool) -> int:
    """The slices that `InChunks` chooses on an expert axis of this size; one token decoded per row is not sliced."""
    if not config.experts or not train:
        return 1
    return fewest_chunks(buffer_factor, config.experts_per_token, size, max(1, config.experts // size))


def _check_sizes(
    mesh: Mapping[str, int] | AnyMesh,
    batch: int,
    seq: int,
    accumulate: int,
    train: bool,
    buffer_factor: float | None,
    chunks: int | None,
) -> None:
    """Raises ValueError for numbers that no plan can have."""
    for what, number in (
        ("batch", batch),
        ("seq", seq),
        ("accumulate", accumulate),
        ("chunks", 1 if chunks is None else chunks),
    ):
        check_positive("plan", what, number)
    for axis, size in mesh.items() if isinstance(mesh, Mapping) else ():
        check_positive("mesh", axis, size)
    if buffer_factor is not None:
        check_factor("plan(buffer_factor", buffer_factor)
    if accumulate > 1 and not train:
        raise ValueError(f"accumulate={accumulate}: decoding has no parts to accumulate: leave it out")
    if batch % accumulate:
        raise ValueError(f"a batch of {batch} rows cannot be cut into accumulate={accumulate} parts: use a multiple")


def _compiled(
    made: Plan, compile_for: str, strategy: Strategy | None, rules: Rules, remat: bool, across: str | None
) -> Plan:
    """The plan with its step compiled."""
    platform = {"cpu": CPU, "device": made.hardware.platform}.get(compile_for)
    if platform is None:
        raise ValueError(f"compile_for={compile_for!r}: use 'cpu' or 'device'")
    pipeline = made.work.pipeline
    strategy = strategy or default_strategy(made.config, made.mesh, platform, made.work, remat)
    stacking = strategy.stacking if pipeline is None else Scanned()
    strategy = dataclasses.replace(strategy, rules=rules, pipeline=pipeline, stacking=stacking, scan_layers=None)
    job = CompileJob(made.config, strategy, made.mesh, made.work, platform, target(made.hardware, platform), across)
    return dataclasses.replace(made, program=compile_program(job), compiled_for=platform)


def search(
    model: DecoderConfig | str | os.PathLike[str],
    devices: int,
    *,
    most: int = 10,
    microbatches: int | None = None,
    **options: Any,
) -> list[Plan]:
    """The best plans of all meshes of this many devices, by time those that fit, or by memory if none does; options as
    of `plan`.

    ``microbatches``: also meshes with as many or fewer pipeline stages. Meshes that cannot shard the model or the batch
    are left out. ValueError if none can.
    """
    found, reason = list[Plan](), ""
    name, config = _config(model)
    for mesh in _meshes(devices, microbatches or 1):
        try:
            parts = microbatches if mesh[AXIS] > 1 else None
            one = plan(config, mesh, advise=False, microbatches=parts, **options)
            found.append(dataclasses.replace(one, model=name))
        except ValueError as error:
            reason = reason or str(error)
    if not found:
        raise ValueError(f"no mesh of {devices} devices holds the model and the batch: {reason}")
    fitting = [one for one in found if one.fits]
    return sorted(fitting or found, key=lambda one: (one.seconds if fitting else 0, one.memory))[:most]


def compared(plans: Sequence[Plan]) -> str:
    """A table with one line per plan."""
    return printing.compared(plans)


def _pipeline(microbatches: int, mesh: AnyMesh, train: bool) -> Pipeline:
    made = Pipeline(microbatches)
    made.check(mesh)
    if stages_of(mesh) == 1:
        raise ValueError(f"microbatches={microbatches}: the mesh has one stage: give it an axis {AXIS}")
    if not train:
        raise ValueError(f"microbatches={microbatches}: pipeline stages do not decode: leave it out, or plan training")
    return made


def _meshes(devices: int, stages: int) -> list[dict[str, int]]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [
        {AXIS: pipe, "data": data, "expert": expert, "tensor": tensor}
        for pipe in sizes
        for data in sizes
        for expert in sizes
        for tensor in sizes
        if pipe <= stages and tensor <= 8
    ]
    fitting = [mesh for mesh in found if devices % math.prod(mesh.values()) == 0]
    return [{**mesh, "fsdp": devices // math.prod(mesh.values())} for mesh in fitting]


def default_strategy(
    config: DecoderConfig, mesh: Mapping[str, int], platform: str, work: Work, remat: bool = True
) -> Strategy:
    """Scanned layers, recomputed while training, with experts over the expert axis if it has several devices, and the
    kernels that ``Strategy.auto`` chooses for the platform."""
    exchange = RaggedAllToAll(work.buffer_factor)
    exchange = exchange if work.chunks == 1 else InChunks(exchange, work.chunks)
    dispatch = ExpertParallel(Sorted(), exchange) if config.experts and mesh["expert"] > 1 else Sorted()
    return dataclasses.replace(
        Strategy.auto(platform),
        dispatch=dispatch,
        stacking=Scanned(),
        remat=Remat() if work.train and remat else None,
        scan_layers=None,
    )


def _config(model: DecoderConfig | str | os.PathLike[str]) -> tuple[str, DecoderConfig]:
    if isinstance(model, DecoderConfig):
        return next((name for name, config in PRESETS.items() if config == model), model.model_type), model
    if (found := preset(model)) is not None:
        return str(model).lower(), found
    if (folder := local_folder(model, ValueError)) is None:
        if "/" not in str(model):
            near = did_you_mean(str(model), PRESETS, 3) or f": use one of {', '.join(PRESETS)}"
            raise ValueError(f"{model} is neither a folder nor a preset{near}")
        folder = snapshot(str(model), None, False, ["config.json"], (), ValueError)
    return str(model), read_config(folder)
