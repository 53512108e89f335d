"""Suggest memory-saving changes for a step that does not fit on its devices."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from nnxmoe.apps.planning.work import Work
from nnxmoe.mesh import abstract_mesh
from nnxmoe.runtime.hardware import TABLE, Hardware
from nnxmoe.sharding_rules import RULES

MOST = 10


class _Change(NamedTuple):
    text: str
    kind: Hardware
    mesh: Mapping[str, int]
    work: Work


def changes(step_plan: Any, plan: Callable[..., Any]) -> tuple[str, ...]:
    """Return one line per memory-saving change, with the memory and time of the changed step.

    Changes that make the step fit come first.

    Args:
        step_plan: A `Plan` that does not fit on its devices.
        plan: Function that returns the estimated plan for a name, config, hardware, mesh and work.
    """
    lines, scale = (
        [],
        step_plan.memory / step_plan.bytes.total,
    )  # compiled / estimated memory (1 if not compiled)
    candidate_work = step_plan.work
    if step_plan.other_rules is not None:  # `training_rules` depends on the mesh, so it runs for each candidate
        candidate_work = dataclasses.replace(candidate_work, rules=RULES)
    for text, device, mesh, work in _candidates(step_plan.hardware, step_plan.mesh, candidate_work):
        try:
            result = plan(step_plan.model, step_plan.config, device, abstract_mesh(mesh), work)
        except ValueError:  # the changed mesh cannot shard the model or the batch
            continue
        memory = result.memory * scale
        if memory < 0.98 * step_plan.memory or device.memory > step_plan.hardware.memory:
            fits = memory <= device.memory
            verdict = "fits by estimate" if fits else "does not fit"
            lines.append((not fits, f"{text}: {memory / 1e9:.1f} GB, {verdict}, {result.seconds:.2g} s per step"))
    return tuple(line for _, line in sorted(lines, key=lambda pair: pair[0])[:MOST])


def _candidates(device: Hardware, mesh: Mapping[str, int], work: Work) -> Iterator[_Change]:
    def choose(text: str, **choices: Any) -> _Change:
        return _Change(text, device, mesh, dataclasses.replace(work, **choices))

    if mesh["expert"] > 1 and "expert" not in (work.rules["embed"] or ()):
        embed_axes = ("fsdp", "context", "expert")
        yield choose("rules embed -> (fsdp, context, expert)", rules={**work.rules, "embed": embed_axes})
    if work.train and mesh["expert"] > 1 and work.buffer_factor is None:
        for chunks in (4 * (work.chunks or 1), 16 * (work.chunks or 1)):
            yield choose(f"ChunkedExchange(RaggedAllToAll(), {chunks})", chunks=chunks)
        dropping = "RaggedAllToAll(buffer_factor=1.25), dropping rows beyond the buffer"
        yield choose(dropping, buffer_factor=1.25, chunks=None)
    if work.train:
        for count in (2 * work.accumulate, 4 * work.accumulate, 8 * work.accumulate):
            if work.batch % count == 0:
                yield choose(f"accumulate={count}", accumulate=count)
        if factor := work.microbatches:
            yield choose(f"microbatches={2 * factor}", microbatches=2 * factor)
        if not work.remat:
            yield choose("remat", remat=True)
    if mesh["data"] > 1:
        fsdp_mesh = {**mesh, "data": 1, "fsdp": mesh["fsdp"] * mesh["data"]}
        yield _Change("fsdp instead of data", device, fsdp_mesh, work)
    no_torus = dataclasses.replace(device, torus=(), topology="")
    for axis in ("fsdp", "context", "expert", "tensor"):
        for factor in (2, 4):
            larger_mesh = {**mesh, axis: mesh[axis] * factor}
            yield _Change(f"{factor} x the devices, {axis}={larger_mesh[axis]}", no_torus, larger_mesh, work)
    upgrades = [
        candidate
        for candidate in TABLE.values()
        if _maker(candidate) == _maker(device) and candidate.memory > 1.1 * device.memory
    ]
    for candidate in sorted(upgrades, key=lambda candidate: candidate.memory)[:2]:
        yield _Change(f"on {candidate.name}", candidate, mesh, work)


def _maker(device: Hardware) -> tuple[str, bool]:
    return device.platform, device.name.startswith("mi")
