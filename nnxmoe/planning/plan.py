"""`plan`: what a model takes on a mesh of named devices, by arithmetic or from a compiled step."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from nnxmoe.axes import RULES, AnyMesh, Rules
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import did_you_mean
from nnxmoe.config.validate import check_positive
from nnxmoe.convert.hf.side_files import read_config
from nnxmoe.mesh import abstract_mesh
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.remat import Remat
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import PRESETS, preset
from nnxmoe.moe.capacity import check_factor
from nnxmoe.moe.dispatch import Sorted
from nnxmoe.moe.expert_parallel import ExpertParallel, InChunks, RaggedAllToAll, fewest_chunks
from nnxmoe.planning import advice, printing
from nnxmoe.planning.arithmetic import Bytes, Work, bytes_of, bytes_read, parts, rows_per_device
from nnxmoe.planning.operations import operations
from nnxmoe.planning.program import CompileJob, Program, compile_program, target
from nnxmoe.planning.published import Efficiency
from nnxmoe.planning.torus import Route, hardware, refuse_unheld, routes, seconds
from nnxmoe.planning.traffic import Traffic, traffic
from nnxmoe.quantization.methods import Method, Mixed
from nnxmoe.runtime.hardware import CPU, Hardware
from nnxmoe.storage.hub import local_folder, snapshot


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations, traffic and time of one step on a mesh; printing it shows where each figure is from.

    ``bytes``: on one device. ``operations``: on all. ``traffic``: an estimate of what a device receives.
    ``decode_bytes``: what a device reads to decode one token per row. ``routes``: mesh axis -> how its devices reach
    each other. ``program``: the compiled step, if ``compiled_for`` names a
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
    routes: Mapping[str, Route]
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
        if self.work.pipeline is None:
            return 0.0
        idle = (self.mesh[AXIS] - 1) / self.work.interleaved
        return idle / (idle + self.work.pipeline.microbatches)

    @property
    def times(self) -> dict[str, float]:
        """Limiter -> seconds of one step if nothing else took time, at the efficiency to expect: compute, memory and
        network."""
        kind = self.hardware
        network = sum(
            seconds(one.kind, one.bytes, [self.routes[axis] for axis in one.axes], one.copies) for one in self.traffic
        )
        share, moved = self.efficiency.expected, self.decode_bytes / self.efficiency.expected
        if self.work.train:  # state is read and written, gathered kernels at least once
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
        """The share of peak that whole steps reach, in decoding of the bandwidth."""
        if (given := self.hardware.efficiency) is not None:
            return Efficiency.given(given)
        return Efficiency.of(self.hardware, self.config.experts > 0, self.work.train, self.work.compute)

    @property
    def seconds(self) -> float:
        """Seconds per step to expect: as if compute, memory and network overlapped perfectly."""
        return max(self.times.values())

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most seconds per step: with the highest efficiency of published runs, and with the lowest
        and nothing of the network hidden."""
        share, network = self.efficiency, self.times["network"]
        # Of a training step products depend on it, of decoding both.
        work = {name: time for name, time in self.times.items() if name != "network"}
        fixed = work.pop("memory") if self.work.train else 0.0
        whole = share.expected * max(work.values())
        return max(whole / share.high, fixed, network), max(whole / share.low, fixed) + network

    def __str__(self) -> str:
        return printing.table(self)

    def plot(self, ax: Any = None) -> Any:
        """Plot the bytes on one device as bars; requires matplotlib (``nnxmoe[notebooks]``)."""
        from nnxmoe import plot

        sizes = {name: size / 1e9 for name, size in dataclasses.asdict(self.bytes).items() if size > 1e-4 * self.memory}
        ax = plot.bars(sizes, f"GB of {self.hardware.memory / 1e9:.0f} on one {self.hardware.name}", ax, form="{:.3g}")
        seconds = ", ".join(f"{name} {value:.2g} s" for name, value in self.times.items())
        ax.set_title(f"{self.model} on {self.devices} devices\n{seconds} per step", fontsize=10)
        return ax


PLANNED_ONLY = ("interleaved", "node_copies", "lora", "split_rank", "compute")


@dataclasses.dataclass(frozen=True)
class Choices:
    """How a planned step is computed.

    ``accumulate``: parts of a training batch. ``across``: the mesh axis that crosses nodes or slices. ``rules``: over
    which mesh axes parameters are sharded. ``remat``: activations are recomputed. ``buffer_factor``: of
    `RaggedAllToAll`; None: room for all rows of the expert axis. ``chunks``: of `InChunks`, which bounds this room and
    drops nothing; None: as many as `InChunks` chooses. ``microbatches``: of a `Pipeline` over the mesh axis ``pipe``;
    None: this axis splits the batch only. ``offload``: of `Work`. ``interleaved``, ``node_copies``, ``lora``,
    ``split_rank`` and ``compute``: of `Work`, for plans by arithmetic only, as is ``quantize``, of weights that are not
    trained.
    ``compile_for``: ``"cpu"`` compiles the step for virtual devices, ``"device"`` for the named hardware. ``advise``:
    plan changes too if the step does not fit.
    """

    accumulate: int = 1
    across: str | None = None
    rules: Rules = dataclasses.field(default_factory=lambda: RULES)
    remat: bool = True
    buffer_factor: float | None = None
    chunks: int | None = None
    microbatches: int | None = None
    interleaved: int = 1
    offload: bool = False
    node_copies: bool = False
    lora: int = 0
    split_rank: bool = False
    compute: Literal["bf16", "fp8"] = "bf16"
    quantize: Method | Mixed | None = None
    compile_for: str | None = None
    advise: bool = True

    def of(self, strategy: Strategy) -> "Choices":
        """These choices with those that a strategy makes. Raises ValueError if both make one."""
        changed = (self.microbatches, self.buffer_factor, self.chunks) != (None, None, None)
        if changed or self.rules is not RULES or not self.remat:
            raise ValueError(
                "give rules, microbatches, remat, buffer_factor and chunks by the strategy, or without one"
            )
        exchange = strategy.dispatch.exchange if isinstance(strategy.dispatch, ExpertParallel) else None
        exchange, chunks = (exchange.exchange, exchange.chunks) if isinstance(exchange, InChunks) else (exchange, 1)
        return dataclasses.replace(
            self,
            rules=strategy.rules,
            remat=strategy.remat is not None,
            buffer_factor=exchange.buffer_factor if isinstance(exchange, RaggedAllToAll) else None,
            chunks=chunks,
            microbatches=None if strategy.pipeline is None else strategy.pipeline.microbatches,
        )


def plan(
    model: DecoderConfig | str | os.PathLike[str],
    mesh: Mapping[str, int] | AnyMesh,
    *,
    batch: int,
    seq: int,
    on: str | Hardware = "h100",
    train: bool = True,
    strategy: Strategy | None = None,
    **choices: Any,
) -> Plan:
    """Plan a training step (AdamW, float32 state), or one decoded token per row.

    Args:
        model: a config, a preset, a folder or a hub id, of which config.json is fetched.
        mesh: sizes of mesh axes.
        batch, seq: rows on all devices, and tokens per row or in the cache.
        on: the devices, such as ``h100`` or ``tpu-v5p:4x4x4``.
        strategy: the one to compile, without a mesh; its rules, pipeline, remat and exchange count.
        choices: fields of `nnxmoe.planning.plan.Choices`; with a strategy not those that it makes.

    Raises:
        ValueError: for what the mesh or the torus cannot hold.
        RuntimeError: if the step does not compile.
    """
    name, config = read_model(model)
    chosen = Choices(**choices)
    _check_sizes(mesh, batch, seq, train, chosen)
    chosen = chosen if strategy is None else chosen.of(strategy)
    kind, sizes = hardware(on), abstract_mesh(mesh if isinstance(mesh, Mapping) else mesh.shape)
    made = _by_arithmetic(name, config, kind, sizes, Work(batch, seq, train, chosen.accumulate), chosen)
    if chosen.advise and strategy is None:  # searches try one choice on many meshes
        _refuse_without_effect(config, sizes, chosen)
    if chosen.compile_for is not None:
        if told := [name for name in (*PLANNED_ONLY, "quantize") if getattr(chosen, name) != getattr(Choices, name)]:
            raise ValueError(f"{told[0]} is planned by arithmetic only: leave it out, or do not compile")
        made = _compiled(made, strategy, chosen)
    if chosen.advise and not made.fits:
        again = dataclasses.replace(chosen, chunks=made.work.chunks, compile_for=None, advise=False)
        again = advice.Question(config, made.mesh, kind, batch, seq, train, again)
        made = dataclasses.replace(made, advice=advice.changes(made, again, plan))
    return made


def _by_arithmetic(
    name: str, config: DecoderConfig, kind: Hardware, sizes: AnyMesh, work: Work, chosen: Choices
) -> Plan:
    shape, across = dict(sizes.shape), chosen.across
    if across is not None and across not in shape:
        raise ValueError(f"across={across!r} is not a mesh axis: use one of {', '.join(shape)}")
    pipeline = None if chosen.microbatches is None else _pipeline(chosen.microbatches, sizes, work.train)
    chunks = chosen.chunks if config.experts and shape["expert"] > 1 else 1
    if chunks is None:  # one token decoded per row is not sliced
        per_device = max(1, config.experts // shape["expert"])
        sliced = config.experts and work.train
        few = chosen.buffer_factor, config.experts_per_token, shape["expert"], per_device
        chunks = fewest_chunks(*few) if sliced else 1
    told = {name: getattr(chosen, name) for name in (*PLANNED_ONLY, "offload", "remat")}
    work = dataclasses.replace(work, buffer_factor=chosen.buffer_factor, chunks=chunks, pipeline=pipeline, **told)
    refuse_unheld(kind, {axis: size for axis, size in shape.items() if axis != across})
    rows_per_device(work.batch // work.accumulate, sizes)  # raises for parts that do not divide
    if pipeline is not None:
        pipeline.refuse_batch(work.batch // work.accumulate, sizes)
    found = parts(config, sizes, chosen.rules, pipeline, chosen.quantize)
    return Plan(
        name,
        config,
        kind,
        shape,
        work,
        bytes_of(config, found, work, sizes),
        operations(config, found, work),
        tuple(traffic(config, found, work, sizes)),
        bytes_read(config, found, work, sizes),
        routes(kind, shape, across),
    )


def _check_sizes(mesh: Mapping[str, int] | AnyMesh, batch: int, seq: int, train: bool, chosen: Choices) -> None:
    """Reject non-positive sizes, and batches that ``accumulate`` does not divide."""
    accumulate, chunks = chosen.accumulate, 1 if chosen.chunks is None else chosen.chunks
    for what, number in {"batch": batch, "seq": seq, "accumulate": accumulate, "chunks": chunks}.items():
        check_positive("plan", what, number)
    for axis, size in mesh.items() if isinstance(mesh, Mapping) else ():
        check_positive("mesh", axis, size)
    if chosen.buffer_factor is not None:
        check_factor("plan(buffer_factor", chosen.buffer_factor)
    if chosen.quantize is not None and train and not chosen.lora:
        raise ValueError("quantize: quantised weights are not trained: plan adapters (lora), or decoding (train=False)")
    if chosen.offload and not (train and chosen.remat):
        raise ValueError("offload: the host keeps inputs of layers that are computed again: plan training, with remat")
    if chosen.split_rank and not chosen.lora:
        raise ValueError("split_rank: there is no rank to split: plan adapters (lora)")
    if accumulate > 1 and not train:
        raise ValueError(f"accumulate={accumulate}: decoding has no parts to accumulate: leave it out")
    if batch % accumulate:
        raise ValueError(f"a batch of {batch} rows cannot be cut into accumulate={accumulate} parts: use a multiple")


def _refuse_without_effect(config: DecoderConfig, mesh: AnyMesh, chosen: Choices) -> None:
    """Raise ValueError for choices of an exchange or a pipeline that the mesh does not have."""
    exchanged = config.experts and mesh.shape["expert"] > 1
    asked = {
        "buffer_factor": chosen.buffer_factor,
        "node_copies": chosen.node_copies or None,
        "chunks": None if chosen.chunks == 1 else chosen.chunks,
    }
    for name, value in asked.items():
        if not exchanged and value is not None:
            raise ValueError(
                f"{name}={value}: no tokens are sent to experts: leave it out, or give a model with "
                "experts a mesh axis expert"
            )
    if chosen.interleaved > 1 and chosen.microbatches is None:
        raise ValueError(f"interleaved={chosen.interleaved}: there are no pipeline stages: give microbatches too")


def _compiled(made: Plan, strategy: Strategy | None, chosen: Choices) -> Plan:
    """The plan with its step compiled."""
    platform = {"cpu": CPU, "device": made.hardware.platform}.get(chosen.compile_for or "")
    if platform is None:
        raise ValueError(f"compile_for={chosen.compile_for!r}: use 'cpu' or 'device'")
    pipeline, device = made.work.pipeline, target(made.hardware, platform)
    strategy = strategy or default_strategy(made.config, made.mesh, platform, made.work)
    stacking = strategy.stacking if pipeline is None else Scanned()
    strategy = dataclasses.replace(strategy, rules=chosen.rules, pipeline=pipeline, stacking=stacking)
    job = CompileJob(made.config, strategy, made.mesh, made.work, platform, device, chosen.across)
    return dataclasses.replace(made, program=compile_program(job), compiled_for=platform)


def _pipeline(microbatches: int, mesh: AnyMesh, train: bool) -> Pipeline:
    made = Pipeline(microbatches)
    made.check(mesh)
    if stages_of(mesh) == 1:
        raise ValueError(f"microbatches={microbatches}: the mesh has one stage: give it an axis {AXIS}")
    if not train:
        raise ValueError(f"microbatches={microbatches}: pipeline stages do not decode: leave it out, or plan training")
    return made


def default_strategy(config: DecoderConfig, mesh: Mapping[str, int], platform: str, work: Work) -> Strategy:
    """Scanned layers, recomputed while training, with experts over the expert axis if it has several devices, and the
    kernels that ``Strategy.auto`` chooses for the platform."""
    exchange = RaggedAllToAll(work.buffer_factor)
    exchange = exchange if work.chunks == 1 else InChunks(exchange, work.chunks)
    dispatch = ExpertParallel(Sorted(), exchange) if config.experts and mesh["expert"] > 1 else Sorted()
    return dataclasses.replace(
        Strategy.auto(platform),
        dispatch=dispatch,
        stacking=Scanned(),
        remat=Remat(offload=("layer_input",) * work.offload) if work.train and work.remat else None,
    )


def read_model(model: DecoderConfig | str | os.PathLike[str]) -> tuple[str, DecoderConfig]:
    """The name and the config of what `plan` is given."""
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
