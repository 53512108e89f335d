"""Changes to a plan that does not fit, each of them planned again."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nnxmoe.axes import Rules
from nnxmoe.config.base import DecoderConfig
from nnxmoe.runtime.hardware import TABLE, Hardware

MOST = 8


@dataclasses.dataclass(frozen=True)
class Question:
    """The arguments of `plan` that were planned."""

    config: DecoderConfig
    mesh: Mapping[str, int]
    kind: Hardware
    rules: Rules
    accumulate: int
    options: Mapping[str, Any]

    def answer(self, plan: Callable[..., Any]) -> Any:
        """The plan of it, by arithmetic."""
        return plan(
            self.config,
            self.mesh,
            on=self.kind,
            rules=self.rules,
            accumulate=self.accumulate,
            advise=False,
            **self.options,
        )


def changes(made: Any, asked: Question, plan: Callable[..., Any]) -> tuple[str, ...]:
    """One line per change that saves memory, with the memory it leaves; those that fit come first."""
    found, scale = [], made.memory / made.bytes.total  # what a compiled step takes, of its estimate
    for text, other in _candidates(asked):
        try:
            one = other.answer(plan)
        except ValueError:  # the mesh or the batch does not divide
            continue
        memory = one.memory * scale
        if memory < 0.98 * made.memory or other.kind.memory > asked.kind.memory:
            fits = memory <= other.kind.memory
            verdict = "fits by estimate" if fits else "does not fit"
            found.append((not fits, f"{text}: {memory / 1e9:.1f} GB, {verdict}, {one.seconds:.2g} s per step"))
    return tuple(line for _, line in sorted(found, key=lambda pair: pair[0])[:MOST])


def _candidates(asked: Question) -> Iterator[tuple[str, Question]]:
    change = dataclasses.replace
    if asked.mesh["expert"] > 1 and asked.mesh["fsdp"] > 1 and asked.rules["embed"] == "fsdp":
        rules = {**asked.rules, "embed": ("fsdp", "expert")}
        yield "rules embed -> (fsdp, expert)", change(asked, rules=rules)
    if asked.mesh["expert"] > 1 and asked.options["buffer_factor"] is None and asked.options["train"]:
        for more in (4, 16):
            chunks = more * asked.options["chunks"]
            yield f"InChunks(RaggedAllToAll(), {chunks})", change(asked, options={**asked.options, "chunks": chunks})
        bounded = {**asked.options, "buffer_factor": 1.25, "chunks": None}
        yield "RaggedAllToAll(buffer_factor=1.25), which drops rows beyond it", change(asked, options=bounded)
    if asked.options["train"]:
        for more in (2, 4, 8):
            count = asked.accumulate * more
            if asked.options["batch"] % count == 0:
                yield f"accumulate={count}", change(asked, accumulate=count)
        if more := asked.options["microbatches"]:
            yield f"microbatches={2 * more}", change(asked, options={**asked.options, "microbatches": 2 * more})
        if not asked.options["remat"]:
            yield "remat", change(asked, options={**asked.options, "remat": True})
    if asked.mesh["data"] > 1:
        mesh = {**asked.mesh, "data": 1, "fsdp": asked.mesh["fsdp"] * asked.mesh["data"]}
        yield "fsdp instead of data", change(asked, mesh=mesh)
    for axis in ("fsdp", "expert", "tensor"):
        for more in (2, 4):
            mesh = {**asked.mesh, axis: asked.mesh[axis] * more}
            free = change(asked.kind, torus=(), topology="")
            yield f"{more} x the devices, {axis}={mesh[axis]}", change(asked, mesh=mesh, kind=free)
    for kind in TABLE.values():
        if kind.platform == asked.kind.platform and kind.memory > 1.1 * asked.kind.memory:
            yield f"on {kind.name}", change(asked, kind=kind)
