"""`search`: the best meshes of a number of devices, by arithmetic."""

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
    fitting = [one for one in found if one.fits]
    return sorted(fitting or found, key=lambda one: (one.seconds if fitting else 0, one.memory))[:most]


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
