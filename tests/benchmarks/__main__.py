"""nnxmoe beside transformers, in alternating processes, and beside what the machine could do.

    python -m tests.benchmarks [--quick] [--models …] [--dtypes …] [--only …] [--repeat N] [--json FILE] …

Three mid-size models of random weights: loading, the time to the first token, prefill, decoding, a training step. Then
the mixture-of-experts layer alone beside the ideal dense product, and tracing, compiling and host overhead. The other
side needs the 'oracle' extra. Prints a Markdown table of medians; ratios above 1: nnxmoe is better.

All of it takes one to two hours of an otherwise idle machine of two cores: choose with --models, --dtypes and --only.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from tests.benchmarks.checkpoints import write_random
from tests.benchmarks.engine import GROUPS
from tests.benchmarks.models import MIDSIZE, TINY
from tests.benchmarks.processes import both_sides, call, have_transformers
from tests.benchmarks.results import Result, report

LAYERS = [(1024, 2048, 8, 2), (1024, 512, 64, 6), (1024, 512, 256, 8)]  # D, F, E, X
COMPILING = [
    ("scanned", 8), ("scanned", 32), ("scanned", 61), ("unrolled", 32), ("overhead", 32), ("abstract", "deepseek-v3"),
]  # fmt: skip


def checkpoint(where: Path, name: str, dtype: str, quick: bool) -> Path:
    """Written, unless it is there."""
    fields = (TINY if quick else MIDSIZE)[name] | {"torch_dtype": dtype}
    folder = where / f"{'tiny-' * quick}{name}-{dtype}"
    file = folder / "config.json"
    if not file.exists() or json.loads(file.read_text()) != fields or not list(folder.glob("*.safetensors")):
        write_random(folder, fields)
    return folder


def models(options: argparse.Namespace, where: Path, left_out: list[str]) -> Iterator[Result]:
    """Both sides on each model; a training step has processes of its own, without a loaded model."""
    wanted = [[group for group in options.only if group in GROUPS and group != "train"]]
    wanted += [["train"]] * ("train" in options.only)
    limit = call("bandwidth") if "decode" in options.only else {}
    for name in options.models:
        for dtype in options.dtypes:
            folder = checkpoint(where, name, dtype, options.quick)
            for groups in filter(None, wanted):
                arguments = [folder, *groups, *["--quick"] * options.quick]
                yield from both_sides(f"{name} {dtype}", arguments, options.sides, options.repeat, limit, left_out)


def layers(options: argparse.Namespace) -> Iterator[Result]:
    """The mixture-of-experts layer alone."""
    shapes = [(32, 16, 4, 2)] if options.quick else LAYERS
    for shape in shapes:
        for dtype in options.dtypes:
            found = call("moe", *shape, dtype, *(["--tokens", 1] if options.quick else []))
            dim, width, experts, chosen = shape
            for measure, sides in found.items():
                case = f"E={experts} X={chosen} D={dim} F={width} {dtype}"
                yield Result(case, measure, sides.pop("nnxmoe"), sides)


def compiling(options: argparse.Namespace) -> Iterator[Result]:
    """Tracing, compiling, host overhead, shapes without arrays."""
    quick = [("scanned", 2, "unrolled", 2, "overhead", 2, "abstract", "deepseek-v3")]
    for arguments in quick if options.quick else COMPILING:
        found = [call("compiling", *arguments) for _ in range(options.repeat)]
        for measure in found[0]:
            yield Result("tiny deepseek", measure, [values[measure] for values in found])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what --quick does not say otherwise."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, every = parser.add_argument, [*GROUPS, "moe", "compile"]
    add("--quick", action="store_true", help="one tiny model, float32, ours alone: that it runs, not how fast")
    add("--models", nargs="+", choices=list(MIDSIZE))
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    add("--only", nargs="+", choices=every, default=every, help="kinds of measures")
    add("--sides", nargs="+", choices=["ours", "theirs"], help="default: both where transformers is installed")
    add("--repeat", type=int, help="processes of each side (default 3)")
    add("--checkpoints", type=Path, metavar="DIR", help="where to keep the models (default: nowhere)")
    add("--json", type=Path, metavar="FILE", help="write all single values")
    add("--markdown", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args(arguments)
    options.models = options.models or (["llama"] if options.quick else list(MIDSIZE))
    options.dtypes = options.dtypes or (["float32"] if options.quick else ["float32", "bfloat16"])
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.sides = options.sides or (["ours", "theirs"] if have_transformers() and not options.quick else ["ours"])
    if "theirs" in options.sides and not have_transformers():
        parser.error("--sides theirs needs torch and transformers: pip install -e '.[oracle]'")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options, left_out = parse(arguments), list[str]()
    if options.quick:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the processes that measure: compiling takes the time
    jax.config.update("jax_platforms", "cpu")  # of this process, which leaves an accelerator to those
    with contextlib.ExitStack() as stack:
        where = options.checkpoints or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds = [models(options, where, left_out)]
        kinds += [layers(options)] * ("moe" in options.only) + [compiling(options)] * ("compile" in options.only)
        report(itertools.chain(*kinds), left_out, options.json, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
