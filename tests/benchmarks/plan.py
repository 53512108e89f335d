"""The processes of a run, and their measuring."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.checkpoints import from_page_cache, to_page_cache, write_random
from tests.benchmarks.engine import QUICK, SETTINGS, Sizes
from tests.benchmarks.limits import work
from tests.benchmarks.models import Fields
from tests.benchmarks.processes import Job, read, run
from tests.benchmarks.results import table

LAYERS = [(1024, 2048, 8, 2), (1024, 512, 64, 6)]  # D, F, E, X
LOADS: Mapping[str, tuple[bool, Callable[[Path], None]]] = {  # name -> whether in shards, preparation
    "one file, warm": (False, to_page_cache),
    "one file, cold": (False, from_page_cache),
    "shards, warm": (True, to_page_cache),
    "shards, cold": (True, from_page_cache),
}
METHODS = ("int8", "experts=int8,others=int8,head=int8", "int4", "fp8")
WARM, WITHOUT = "one file, warm", "one file, warm, no compile cache"


def checkpoint(folder: Path, fields: Fields, shards: bool = False) -> None:
    """Write a checkpoint, in one file or about five, unless it exists."""
    file, item = folder / "config.json", 2 if fields["torch_dtype"] == "bfloat16" else 4
    if not file.exists() or json.loads(file.read_text()) != fields or not list(folder.glob("*.safetensors")):
        parameters = 200e6 if fields["hidden_size"] > 64 else 100e3
        write_random(folder, fields, int(parameters * item / 5) if shards else 10**10)


class Plan:
    """The processes of a run, in order."""

    def __init__(self, where: Path, sides: Mapping[str, Path | str], repeats: int, quick: bool):
        self.where, self.lanes, self.repeats, self.quick = where, sides, repeats, quick
        self.sizes, self.prefix = (QUICK, "tiny-") if quick else (Sizes(), "")

    def model(self, name: str, fields: Fields, groups: Sequence[str]) -> Iterator[Job]:
        """All sides in turn on one model; ``fields`` is its config.json, with the dtype."""
        case, dtype = f"{self.prefix}{name} {fields['torch_dtype']}", fields["torch_dtype"]
        for group in groups:
            if group == "quantized":
                if dtype == "bfloat16" or self.quick:
                    yield from self.quantized(name, case, fields)
                continue
            settings = (
                SETTINGS if "num_experts_per_tok" in fields and group in ("decode", "prefill", "train") else ("",)
            )
            for round_, side in self.turns(settings):
                if group == "load":
                    yield from self.loads(name, case, fields, round_, side)
                    continue
                about = f"machine {dtype}" if group == "machine" else case
                yield self.job(about, group, name, fields, round_, side)

    def quantized(self, name: str, case: str, fields: Fields) -> Iterator[Job]:
        """Our sides with each method, in turn with floats, which the table compares them with."""
        mine = [side for side in self.lanes if side != "transformers"]
        for round_, side in itertools.product(range(self.repeats), mine):
            for group in ("decode", "prefill"):
                yield self.job(case, group, name, fields, round_, side)
            for method in METHODS:
                job = self.job(case, "quantized", name, fields, round_, side)
                group_of = ":16" if self.quick and "int8" not in method else ""  # widths of tiny models
                arguments = [*job.arguments, "--setting", method + group_of]
                yield dataclasses.replace(job, what=f"quantized {method}", arguments=arguments)

    def turns(self, settings: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Rounds and sides, transformers with each setting of its experts."""
        sides = [
            f"{side} {one}".strip() for side in self.lanes for one in (settings if side == "transformers" else [""])
        ]
        return itertools.product(range(self.repeats), sides)

    def loads(self, name: str, case: str, fields: Fields, round_: int, side: str) -> Iterator[Job]:
        """Each way to load, with the programs in the compile cache and, from one file, without."""
        for variant, (shards, pages) in LOADS.items():
            job = self.job(case, "load", name, fields, round_, side, shards, pages)
            if side.startswith("transformers"):
                also = [WITHOUT] if variant == WARM else []
                yield dataclasses.replace(job, what=f"load {variant}", variants=(variant, *also))
                continue
            if variant == WARM:
                yield dataclasses.replace(job, what=f"load {WITHOUT}", variants=(WITHOUT,), cache=None)
            yield dataclasses.replace(job, what=f"load {variant}", variants=(variant,), fill=True)

    def job(
        self, case: str, group: str, name: str, fields: Fields, round_: int, side: str, shards: bool = False,
        pages: Callable[[Path], None] = to_page_cache,
    ) -> Job:  # fmt: skip
        """The process of one side."""
        folder = self.where / f"{self.prefix}{name}-{fields['torch_dtype']}{'-shards' * shards}"
        lane, _, setting = side.partition(" ") if side.startswith("transformers") else (side, "", "")
        arguments = [folder, group, *(["--setting", setting] if setting else []), *["--quick"] * self.quick]

        def prepare() -> None:
            checkpoint(folder, fields, shards)
            pages(folder)

        module = "theirs" if lane == "transformers" else "ours"
        cache = self.where / "programs" / f"{lane} {case}".replace(" ", "-")
        costs = work(fields, self.sizes)
        return Job(case, group, side, round_, module, arguments, self.lanes[lane], cache, prepare, work=costs)

    def layers(self, dtype: str) -> Iterator[Job]:
        """The mixture-of-experts layer alone."""
        for shape in [(32, 16, 4, 2)] if self.quick else LAYERS:
            case = "MoE layer E={2} X={3} D={0} F={1} ".format(*shape) + dtype
            for round_, side in self.turns([]):
                arguments = [*shape, dtype, *(["--tokens", 1] if self.quick else [])]
                yield Job(case, "moe", side, round_, "moe", arguments, self.lanes[side])


def measure(jobs: Iterable[Job], out: Path | None) -> int:
    """Run the processes and print the table, of what there is if interrupted."""
    records = read(out) if out else []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print(table(records)))
        run(jobs, records, stack.enter_context(out.open("a")) if out else None)
    return int(any(record.error for record in records))
