"""Plan changes to a step that does not fit."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from nnxmoe.apps.planning.work import Work
from nnxmoe.mesh import abstract_mesh
from nnxmoe.runtime.hardware import TABLE, Hardware

MOST = 10


class _Change(NamedTuple):
    text: str
    kind: Hardware
    mesh: Mapping[str, int]
    work: Work


def changes(made: Any, plan: Callable[..., Any]) -> tuple[str, ...]:
    """Return one line per change that saves memory, with the memory after the change.

    Changes that fit come first.

    Args:
        made: A `Plan`.
        plan: Function that plans a name, config, hardware, mesh and work by arithmetic.
    """
    found, scale = [], made.memory / made.bytes.total  # compiled memory / estimated memory, 1 if not compiled
    for text, kind, mesh, work in _candidates(made.hardware, made.mesh, made.work):
        try:
            one = plan(made.model, made.config, kind, abstract_mesh(mesh), work)
        except ValueError:  # the mesh or the batch does not divide
            continue
        memory = one.memory * scale
        if memory < 0.98 * made.memory or kind.memory > made.hardware.memory:
            fits = memory <= kind.memory
            verdict = "fits by estimate" if fits else "does not fit"
            found.append((not fits, f"{text}: {memory / 1e9:.1f} GB, {verdict}, {one.seconds:.2g} s per step"))
    return tuple(line for _, line in sorted(found, key=lambda pair: pair[0])[:MOST])


def _candidates(kind: Hardware, mesh: Mapping[str, int], work: Work) -> Iterator[_Change]:
    def choose(text: str, **choices: Any) -> _Change:
        return _Change(text, kind, mesh, dataclasses.replace(work, **choices))

    if mesh["expert"] > 1 and mesh["fsdp"] > 1 and "expert" not in (work.rules["embed"] or ()):
        wide = ("fsdp", "context", "expert")
        yield choose("rules embed -> (fsdp, context, expert)", rules={**work.rules, "embed": wide})
    if work.train and mesh["expert"] > 1 and work.buffer_factor is None:
        for chunks in (4 * (work.chunks or 1), 16 * (work.chunks or 1)):
            yield choose(f"ChunkedExchange(RaggedAllToAll(), {chunks})", chunks=chunks)
        dropping = "RaggedAllToAll(buffer_factor=1.25), which drops rows beyond it"
        yield choose(dropping, buffer_factor=1.25, chunks=None)
    if work.train:
        for count in (2 * work.accumulate, 4 * work.accumulate, 8 * work.accumulate):
            if work.batch % count == 0:
                yield choose(f"accumulate={count}", accumulate=count)
        if more := work.microbatches:
            yield choose(f"microbatches={2 * more}", microbatches=2 * more)
        if not work.remat:
            yield choose("remat", remat=True)
    if mesh["data"] > 1:
        whole = {**mesh, "data": 1, "fsdp": mesh["fsdp"] * mesh["data"]}
        yield _Change("fsdp instead of data", kind, whole, work)
    free = dataclasses.replace(kind, torus=(), topology="")
    for axis in ("fsdp", "context", "expert", "tensor"):
        for more in (2, 4):
            larger = {**mesh, axis: mesh[axis] * more}
            yield _Change(f"{more} x the devices, {axis}={larger[axis]}", free, larger, work)
    alike = [other for other in TABLE.values() if _maker(other) == _maker(kind) and other.memory > 1.1 * kind.memory]
    for other in sorted(alike, key=lambda other: other.memory)[:2]:
        yield _Change(f"on {other.name}", other, mesh, work)


def _maker(kind: Hardware) -> tuple[str, bool]:
    return kind.platform, kind.name.startswith("mi")
