"""nnxmoe beside transformers, in alternating processes, and beside what the machine allows: one table.

    python -m tests.benchmarks [--only decode,prefill,load,train,moe] [--models …] [--dtypes …] [--out FILE] …

Random models of 129M to 277M parameters, and narrow ones for training; then the mixture-of-experts layer alone, whose
limit is one dense product of the same work. The other side needs the 'oracle' extra. Prints medians in Markdown, also
when it is interrupted; the same command with the same --out continues.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from tests.benchmarks.models import MIDSIZE, TINY
from tests.benchmarks.plan import Plan, measure
from tests.benchmarks.processes import Job, have_transformers
from tests.benchmarks.results import OTHER

ONLY = ("decode", "prefill", "load", "train", "quantized", "moe")
DTYPES = ("float32", "bfloat16")


def several(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes names separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if wrong := set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))}: choose from {', '.join(allowed)}")
        return names

    return parse


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that depend on others."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, both = parser.add_argument, ["ours", "transformers"]
    add("--quick", action="store_true", help="one tiny model, float32, ours alone: tests that it runs, not how fast")
    add("--models", type=several(list(MIDSIZE)), metavar="NAMES", help=f"default: {','.join(MIDSIZE)}")
    add("--dtypes", type=several(DTYPES), metavar="NAMES", help=f"default: {','.join(DTYPES)}")
    add("--only", type=several(ONLY), default=list(ONLY), metavar="KINDS", help=f"default: {','.join(ONLY)}")
    add("--sides", type=several(both), metavar="SIDES", help="default: ours,transformers if it is installed")
    add("--repeats", type=int, metavar="N", help="processes per side (default 3)")
    add("--other-python", type=Path, metavar="PYTHON", help="also run our side with this Python, on another lane")
    add("--checkpoints", type=Path, metavar="DIR", help="keep the models and compiled programs (default: temporary)")
    add("--out", type=Path, metavar="FILE", help="append a JSON line per process; continues if the file has some")
    options = parser.parse_args(arguments)
    options.models = options.models or (["llama"] if options.quick else list(MIDSIZE))
    options.dtypes = options.dtypes or (["float32"] if options.quick else list(DTYPES))
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.sides = options.sides or (both if have_transformers() and not options.quick else ["ours"])
    if "transformers" in options.sides and not have_transformers():
        parser.error("--sides transformers needs torch and transformers: pip install -e '.[oracle]'")
    return options


def jobs(options: argparse.Namespace, where: Path) -> Iterator[Job]:
    """Of all dtypes and models: the machine first, the layer alone last."""
    lanes = {side: sys.executable for side in options.sides}
    if options.other_python:
        lanes = {"ours": sys.executable, OTHER: options.other_python, **lanes}
    plan = Plan(where, lanes, options.repeats, options.quick)
    fields = TINY if options.quick else MIDSIZE
    groups = [group for group in options.only if group != "moe"]
    for dtype in options.dtypes:
        models = {name: fields[name] | {"torch_dtype": dtype} for name in options.models}
        if set(groups) - {"load"}:
            yield from plan.model(options.models[0], models[options.models[0]], ["machine"])
        for name, one in models.items():
            yield from plan.model(name, one, groups)
        if "moe" in options.only:
            yield from plan.layers(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(arguments)
    if options.quick:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in the processes: compilation takes most of the time
    jax.config.update("jax_platforms", "cpu")  # in this process, which leaves an accelerator to the others
    with tempfile.TemporaryDirectory() as temporary:
        return measure(jobs(options, options.checkpoints or Path(temporary)), options.out)


if __name__ == "__main__":
    sys.exit(main())
