"""Changes to a plan that does not fit, each of them planned again."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.runtime.hardware import TABLE, Hardware

MOST = 10


@dataclasses.dataclass(frozen=True)
class Question:
    """The arguments of `plan` that were planned."""

    config: DecoderConfig
    mesh: Mapping[str, int]
    kind: Hardware
    batch: int
    seq: int
    train: bool
    choices: Any

    def answer(self, plan: Callable[..., Any]) -> Any:
        """The plan of it, by arithmetic."""
        work: dict[str, Any] = {"batch": self.batch, "seq": self.seq, "train": self.train}
        return plan(self.config, self.mesh, on=self.kind, **work, **vars(self.choices))


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
    change, chosen = dataclasses.replace, asked.choices

    def choose(**choices: Any) -> Question:
        return change(asked, choices=change(chosen, **choices))

    if asked.mesh["expert"] > 1 and asked.mesh["fsdp"] > 1 and "expert" not in (chosen.rules["embed"] or ()):
        wide = ("fsdp", "context", "expert")
        yield "rules embed -> (fsdp, context, expert)", choose(rules={**chosen.rules, "embed": wide})
    if asked.train and asked.mesh["expert"] > 1 and chosen.buffer_factor is None:
        for chunks in (4 * chosen.chunks, 16 * chosen.chunks):
            yield f"InChunks(RaggedAllToAll(), {chunks})", choose(chunks=chunks)
        dropping = "RaggedAllToAll(buffer_factor=1.25), which drops rows beyond it"
        yield dropping, choose(buffer_factor=1.25, chunks=None)
    if asked.train:
        for count in (2 * chosen.accumulate, 4 * chosen.accumulate, 8 * chosen.accumulate):
            if asked.batch % count == 0:
                yield f"accumulate={count}", choose(accumulate=count)
        if more := chosen.microbatches:
            yield f"microbatches={2 * more}", choose(microbatches=2 * more)
        if not chosen.remat:
            yield "remat", choose(remat=True)
    if asked.mesh["data"] > 1:
        mesh = {**asked.mesh, "data": 1, "fsdp": asked.mesh["fsdp"] * asked.mesh["data"]}
        yield "fsdp instead of data", change(asked, mesh=mesh)
    for axis in ("fsdp", "context", "expert", "tensor"):
        for more in (2, 4):
            mesh = {**asked.mesh, axis: asked.mesh[axis] * more}
            free = change(asked.kind, torus=(), topology="")
            yield f"{more} x the devices, {axis}={mesh[axis]}", change(asked, mesh=mesh, kind=free)
    alike = [kind for kind in TABLE.values() if _maker(kind) == _maker(asked.kind)]
    larger = sorted((kind for kind in alike if kind.memory > 1.1 * asked.kind.memory), key=lambda kind: kind.memory)
    for kind in larger[:2]:
        yield f"on {kind.name}", change(asked, kind=kind)


def _maker(kind: Hardware) -> tuple[str, bool]:
    return kind.platform, kind.name.startswith("mi")
