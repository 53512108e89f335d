"""`search`: the best meshes of a number of devices, by arithmetic."""

import contextlib
import dataclasses
import math
import os
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.pipeline import AXIS
from nnxmoe.planning.plan import Plan, plan, read_model


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
    name, config = read_model(model)
    for mesh in _meshes(devices, microbatches or 1):
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
    """`search` that also chooses the rows of a batch (1 to 64 per device) and, to train, whether activations are
    computed again: the plans with the most tokens per second, or those with the least memory if none fits."""
    meshes, found = search(model, devices, batch=devices, seq=seq, train=train, most=6, **options), list[Plan]()
    name = meshes[0].model
    for one in meshes:
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for remat in (True, False) if train else (True,):
                with contextlib.suppress(ValueError):  # the batch does not divide
                    asked = {**options, "remat": remat, "batch": rows * devices, "seq": seq, "train": train}
                    made = plan(meshes[0].config, one.mesh, advise=False, **asked)
                    found.append(dataclasses.replace(made, model=name))
    return _best(found)[:most]


def _best(found: list[Plan]) -> list[Plan]:
    """Those that fit by tokens per second, or all by memory if none does."""
    if fitting := [one for one in found if one.fits]:
        return sorted(fitting, key=lambda one: (one.seconds / one.work.tokens, one.memory))
    return sorted(found, key=lambda one: one.memory)


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
