"""`search`: find the best meshes for a number of devices, by arithmetic."""

import contextlib
import dataclasses
import math
import os
from typing import Any

from nnxmoe.apps.planning.plan import Plan, plan, read_model, refuse_without_effect
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
    """Return the best plans of all meshes of this many devices.

    The best plans are the fastest plans that fit. If no plan fits, they need the least memory. Meshes
    that cannot shard the model or the batch are left out.

    Args:
        most: Maximum number of plans.
        microbatches: If set, include meshes with up to this many pipeline stages.
        options: Arguments of `plan`.

    Raises:
        ValueError: If no mesh can shard the model and the batch, or for an option that no mesh allows.
    """
    found, reason = list[Plan](), ""
    name, config = read_model(model)
    devices, most = check_positive("search", "devices", devices), check_positive("search", "most", most)
    if microbatches is not None:
        microbatches = check_positive("search", "microbatches", microbatches)
    _check_options(config, devices, microbatches, **options)
    for mesh in _meshes(devices, microbatches or 1, _contexts(**options)):
        try:
            parts = microbatches if mesh[AXIS] > 1 else None
            one = plan(config, mesh, advise=False, microbatches=parts, **options)
            found.append(dataclasses.replace(one, model=name))
        except ValueError as error:
            reason = reason or str(error)
    if not found:
        raise ValueError(f"no mesh of {devices} devices holds the model and the batch: {reason}")
    return _best(found)[:most]


def best_of(
    model: DecoderConfig | str | os.PathLike[str],
    devices: int,
    *,
    seq: int,
    train: bool = True,
    most: int = 10,
    **options: Any,
) -> list[Plan]:
    """Search meshes, batch sizes and, for training, with and without rematerialization.

    Tries 1 to 64 rows per device, or per group of devices that share rows on the axis ``context``.
    Returns the plans with the most tokens per second, or the plans with the least memory if no plan
    fits. See `search`.
    """
    devices, most = check_positive("search", "devices", devices), check_positive("search", "most", most)
    seq = check_positive("search", "seq", seq)
    options, found, meshes = {"seq": seq, "train": train, **options}, list[Plan](), list[Plan]()
    for parts in _contexts(**options):
        if devices % parts == 0:
            refused = (ValueError,) if parts > 1 else ()  # raised for a model that cannot split rows
            with contextlib.suppress(*refused):
                rows = devices // parts * options.get("accumulate", 1)
                every = search(model, devices, batch=rows, most=1000, **options)
                meshes += [one for one in every if one.mesh[CONTEXT] == parts][:6]
    name = meshes[0].model
    for one in meshes:
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for remat in (True, False) if train else (True,):
                with contextlib.suppress(ValueError):  # the batch does not divide
                    asked = {"batch": rows * devices // one.mesh[CONTEXT], "remat": remat}
                    asked["microbatches"] = one.work.microbatches  # None on meshes without stages
                    made = plan(one.config, one.mesh, advise=False, **options | asked)
                    found.append(dataclasses.replace(made, model=name))
    return _best(found)[:most]


def _check_options(config: DecoderConfig, devices: int, microbatches: int | None, **options: Any) -> None:
    """Raise ValueError for options that are invalid or have no effect on any mesh.

    Plans the options for one device.
    """
    if options.get("compile_for") is not None:
        raise ValueError("search compares meshes by arithmetic: leave compile_for out, then compile the best plan")
    if microbatches is not None and not options.get("train", True):
        raise ValueError(f"microbatches={microbatches}: pipeline stages do not decode: leave it out")
    anywhere: Any = dataclasses.replace(hardware(options.get("on", "h100")), torus=())
    one = plan(config, {}, advise=False, **options | {"on": anywhere})
    if options.get("strategy") is None:
        most = dataclasses.replace(one, mesh={**one.mesh, "expert": devices})
        work = Work(**{key: value for key, value in options.items() if key in _WORK}, microbatches=microbatches)
        refuse_without_effect(most, work)


def _best(found: list[Plan]) -> list[Plan]:
    """Sort the plans that fit by tokens per second, or all plans by memory if no plan fits."""
    if fitting := [one for one in found if one.fits]:
        return sorted(fitting, key=lambda one: (one.seconds / one.work.tokens, one.memory))
    return sorted(found, key=lambda one: one.memory)


def _contexts(*, seq: int, train: bool = True, **_: Any) -> list[int]:
    """Return the possible sizes of the axis ``context``.

    These are 1 and, for training, larger sizes with at least 8192 tokens per part of a row.
    """
    return [parts for parts in (1, 2, 4, 8, 16, 32) if parts == 1 or (train and seq // parts >= 8192)]


def _meshes(devices: int, stages: int, contexts: list[int]) -> list[dict[str, int]]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [
        {AXIS: pipe, "data": data, CONTEXT: parts, "expert": expert, "tensor": tensor}
        for pipe in sizes
        for data in sizes
        for parts in contexts
        for expert in sizes
        for tensor in sizes
        if pipe <= stages and tensor <= 8
    ]
    fitting = [mesh for mesh in found if devices % math.prod(mesh.values()) == 0]
    return [{**mesh, "fsdp": devices // math.prod(mesh.values())} for mesh in fitting]
