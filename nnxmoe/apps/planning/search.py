"""Search the best meshes for a number of devices, by arithmetic."""

import contextlib
import dataclasses
import math
import os
from typing import Any

from nnxmoe.apps.planning.plan import Plan, plan, refuse_without_effect
from nnxmoe.apps.planning.planned_model import read_model
from nnxmoe.apps.planning.torus import hardware
from nnxmoe.apps.planning.work import Work
from nnxmoe.axes import CONTEXT
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.validate import check_positive
from nnxmoe.model.pipeline import AXIS

_WORK = {field.name for field in dataclasses.fields(Work)}


def search(
    model: DecoderConfig | str | os.PathLike[str],
    devices: int,
    *,
    most: int = 10,
    microbatches: int | None = None,
    **options: Any,
) -> list[Plan]:
    """Return the best plans among all meshes of ``devices`` devices.

    The best plans are the fastest plans that fit, or the plans with the least memory if no plan fits.
    Meshes that cannot shard the model or the batch are skipped.

    Args:
        model: See `plan`.
        devices: Number of devices.
        most: Maximum number of plans to return.
        microbatches: If set, include meshes with up to this many pipeline stages.
        options: Further arguments of `plan`.

    Raises:
        ValueError: If no mesh can shard the model and the batch, or if an option is invalid or has no
            effect on any mesh.
    """
    plans, reason = list[Plan](), ""
    name, config = read_model(model)
    devices, most = check_positive("search", "devices", devices), check_positive("search", "most", most)
    if microbatches is not None:
        microbatches = check_positive("search", "microbatches", microbatches)
    _check_options(config, devices, microbatches, **options)
    for mesh in _meshes(devices, microbatches or 1, _contexts(**options)):
        try:
            stage_microbatches = microbatches if mesh[AXIS] > 1 else None
            candidate = plan(config, mesh, advise=False, microbatches=stage_microbatches, **options)
            plans.append(dataclasses.replace(candidate, model=name))
        except ValueError as error:
            reason = reason or str(error)
    if not plans:
        raise ValueError(f"no mesh of {devices} devices can shard the model and the batch: {reason}")
    return _best(plans)[:most]


def best_of(
    model: DecoderConfig | str | os.PathLike[str],
    devices: int,
    *,
    seq: int,
    train: bool = True,
    most: int = 10,
    **options: Any,
) -> list[Plan]:
    """Return the best plans among meshes, batch sizes and, for training, with or without rematerialization.

    Tries 1, 2, 4, …, 64 rows per device and microbatch. With an axis ``context``, rows are counted per group of devices
    that shard a row. The best plans have the most tokens per second, or the least memory if no plan fits. See `search`.
    """
    devices, most = check_positive("search", "devices", devices), check_positive("search", "most", most)
    seq = check_positive("search", "seq", seq)
    accumulate = check_positive("search", "accumulate", options.get("accumulate", 1))
    options, plans, meshes = {"seq": seq, "train": train, **options}, list[Plan](), list[Plan]()
    for context_size in _contexts(**options):
        if devices % context_size == 0:
            errors = (ValueError,) if context_size > 1 else ()  # raised if the model does not support sharded rows
            with contextlib.suppress(*errors):
                rows = devices // context_size * accumulate
                all_plans = search(model, devices, batch=rows, most=1000, **options)
                meshes += [candidate for candidate in all_plans if candidate.mesh[CONTEXT] == context_size][:6]
    name = meshes[0].model
    for candidate in meshes:
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for remat in (True, False) if train else (True,):
                with contextlib.suppress(ValueError):  # the batch is not divisible
                    overrides = {"batch": rows * accumulate * devices // candidate.mesh[CONTEXT], "remat": remat}
                    overrides["microbatches"] = candidate.work.microbatches  # None on meshes without pipeline stages
                    step_plan = plan(candidate.config, candidate.mesh, advise=False, **options | overrides)
                    plans.append(dataclasses.replace(step_plan, model=name))
    return _best(plans)[:most]


def _check_options(config: DecoderConfig, devices: int, microbatches: int | None, **options: Any) -> None:
    """Raise ValueError for options that are invalid or have no effect on any mesh.

    Validates the options by planning a step on one device.
    """
    if "advise" in options:
        raise ValueError("search does not support advise: omit it, and call plan(…, advise=True) for the best mesh")
    if options.get("compile_for") is not None:
        raise ValueError("search compares meshes by arithmetic: omit compile_for, then compile the best plan")
    if microbatches is not None and not options.get("train", True):
        raise ValueError(f"microbatches={microbatches} is not supported in decoding: omit it")
    hardware_without_torus: Any = dataclasses.replace(hardware(options.get("on", "h100")), torus=())
    single_device_plan = plan(config, {}, advise=False, **options | {"on": hardware_without_torus})
    if options.get("strategy") is None:
        widest_plan = dataclasses.replace(single_device_plan, mesh={**single_device_plan.mesh, "expert": devices})
        work = Work(**{key: value for key, value in options.items() if key in _WORK}, microbatches=microbatches)
        refuse_without_effect(widest_plan, work)


def _best(plans: list[Plan]) -> list[Plan]:
    """Sort the plans that fit by tokens per second, or all plans by memory if no plan fits."""
    if fitting_plans := [candidate for candidate in plans if candidate.fits]:
        return sorted(
            fitting_plans, key=lambda candidate: (candidate.seconds / candidate.work.tokens, candidate.memory)
        )
    return sorted(plans, key=lambda candidate: candidate.memory)


def _contexts(*, seq: int, train: bool = True, **_: Any) -> list[int]:
    """Return the sizes of the axis ``context`` to search.

    The sizes are 1 and, in training, powers of two up to 32 that leave at least 8192 tokens per device and row.
    """
    return [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or (train and seq // size >= 8192)]


def _meshes(devices: int, stages: int, contexts: list[int]) -> list[dict[str, int]]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    all_shapes = [
        {AXIS: pipe, "data": data, CONTEXT: context_size, "expert": expert, "tensor": tensor}
        for pipe in sizes
        for data in sizes
        for context_size in contexts
        for expert in sizes
        for tensor in sizes
        if pipe <= stages and tensor <= 8
    ]
    shapes = [mesh for mesh in all_shapes if devices % math.prod(mesh.values()) == 0]
    return [{**mesh, "fsdp": devices // math.prod(mesh.values())} for mesh in shapes]
