"""The command ``nnxmoe plan``: its options, and what it prints."""

import argparse
import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any

from nnxmoe.apps.cli import commands
from nnxmoe.apps.cli.options import add_quantize, count, mesh
from nnxmoe.config.printable import bytes_text

RATES = {"flops": "operations per second", "memory": "bytes"}
RATES |= dict.fromkeys(("bandwidth", "link", "network"), "bytes per second")
RATES |= {"efficiency": "share of the peak, 0 to 1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset such as deepseek-v3, 'demo', a folder or a hub id")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", type=mesh, metavar="AXES", help="sizes of mesh axes, such as fsdp=16,expert=16")
    what = "compare the meshes of N devices, and without --batch also numbers of rows: the best ten"
    where.add_argument("--devices", "--search", dest="search", type=count, metavar="N", help=what)
    add("--batch", type=count, metavar="B", help="rows of one step, over all devices")
    add("--seq", type=count, default=4096, metavar="T", help="tokens per row, with --decode those in the cache (4096)")
    add("--on", default="h100", metavar="DEVICE", help="h100, h200, b200, tpu-v5p:4x4x4, … (h100)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--train", dest="train", action="store_true", default=True, help="a training step (default)")
    kind.add_argument("--decode", dest="train", action="store_false", help="one token for every row, with a full cache")
    add("--accumulate", type=count, default=1, metavar="N", help="compute each batch in N parts")
    what = "most rows that a device receives for its experts, as a multiple of the even load; others are dropped"
    add("--buffer-factor", type=float, metavar="F", help=what)
    what = "send tokens to experts in N parts, one after another (default: so many that buffers hold 8 x the even load)"
    add("--chunks", type=count, metavar="N", help=what)
    what = "parts of a batch in the pipeline of --mesh pipe=…; a multiple of its stages"
    add("--microbatches", type=count, metavar="M", help=what)
    add("--no-remat", dest="remat", action="store_false", help="keep all activations for the backward")
    what = "mesh axes that shard an axis of parameters, such as embed=fsdp+expert"
    add("--rule", dest="rules", action="append", default=[], type=_rule, metavar="NAME=AXES", help=what)
    add("--across", metavar="AXIS", help="the mesh axis that crosses nodes or slices")
    add("--compare", type=mesh, metavar="AXES", help="a second mesh, to be planned too")
    what = "how long so many tokens take, such as 15T; with --price in money too"
    add("--tokens", type=tokens, metavar="N", help=what)
    add("--price", type=float, metavar="P", help="of a device and hour")
    add("--offload", action="store_true", help="the host keeps the inputs of layers")
    what = "groups of layers of each pipeline stage, one after another (arithmetic only)"
    add("--interleaved", type=count, default=1, metavar="V", help=what)
    what = "the exchange sends one copy of a token per node, as DeepEP's (arithmetic only)"
    add("--node-copies", action="store_true", help=what)
    what = "train adapters of this rank only; the weights are frozen (arithmetic only)"
    add("--lora", type=count, default=0, metavar="R", help=what)
    add("--split-rank", action="store_true", help="adapters of experts have the rank / experts per token")
    add_quantize(parser, keep=False)
    add("--compute", choices=["bf16", "fp8"], default="bf16", help="how products are computed (arithmetic only)")
    add(
        "--compile",
        dest="compile_for",
        nargs="?",
        const="device",
        choices=["cpu", "device"],
        help="compile the step: for the devices of --on (need the extras plan-gpu and plan-tpu), or for virtual CPUs",
    )
    for name, unit in RATES.items():
        add(f"--{name}", type=float, metavar="X", help=f"{name} of a device, in {unit}, instead of the table's")
    add("--plot", metavar="FILE.png", help="also draw the bytes and the time (needs the extra notebooks)")


def run(options: argparse.Namespace) -> None:
    """Print the memory, traffic and time of a step on a mesh of devices that need not be there."""
    import jax

    from nnxmoe.apps.planning import printing, search
    from nnxmoe.apps.planning.plan import plan
    from nnxmoe.apps.planning.torus import hardware
    from nnxmoe.apps.planning.work import Work
    from nnxmoe.sharding_rules import RULES

    jax.config.update("jax_platforms", "cpu")  # a plan uses no device, and compilers without one print errors
    changed = {name: value for name in RATES if (value := getattr(options, name)) is not None}
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(Work)}
    asked["quantize"] = commands.method(options)
    asked |= {"on": dataclasses.replace(hardware(options.on), **changed), "rules": {**RULES, **dict(options.rules)}}
    if options.search and options.compile_for:
        raise ValueError("--search compares meshes by arithmetic: leave --compile out, then compile the best one")
    if options.batch is None and not options.search:
        raise ValueError("--mesh needs --batch: the rows of one step, over all devices")
    if options.price is not None and options.tokens is None:
        raise ValueError("--price needs --tokens: how many are to be computed")
    if options.price is not None and not 0 <= options.price < math.inf:
        raise ValueError(f"--price {options.price}: give a number that is not negative")
    if options.search:
        find = search.search
        if options.batch is None:  # the batch size and rematerialisation are searched too
            find = search.best_of
            del asked["batch"], asked["remat"]
        found = find(options.model, options.search, **asked)
        best, text = found[0], printing.compared(found)
        text += "" if best.fits else f"\n{_enough(options, find, asked)}"
    else:
        best = plan(options.model, options.mesh, compile_for=options.compile_for, **asked)
        text = str(best)
        if options.compare is not None:
            other = plan(options.model, options.compare, advise=False, **asked)
            text = printing.compared([best, other])
    print(text)
    if options.tokens is not None:
        cost = printing.cost(best, options.tokens, options.price) if best.fits else "no time or cost: it does not fit"
        print(cost)
    if options.plot:
        best.plot().figure.savefig(os.fspath(options.plot), bbox_inches="tight")


def _enough(options: argparse.Namespace, find: Callable[..., Any], asked: dict[str, Any]) -> str:
    """The fewest devices that fit, of several times as many as were asked for."""
    from nnxmoe.apps.planning.printing import axes_text

    for times in (2, 4, 8, 16):
        count = times * options.search
        with contextlib.suppress(ValueError):  # no such mesh of the hardware, or the batch does not divide
            best = find(options.model, count, most=1, **asked)[0]
            if best.fits:
                size = f"{axes_text(best)}, {bytes_text(best.memory)} each"
                return f"no mesh of {options.search} fits; one of {count} does: {size}"
    return f"no mesh of {options.search} fits, nor of {times} times as many: nnxmoe plan with --mesh lists what helps"


def tokens(text: str) -> float:
    """A number such as 500M, 1B or 14.8T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMBT]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 500M, 1B or 14.8T")
    return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2]]


def _rule(text: str) -> tuple[str, Any]:
    from nnxmoe.sharding_rules import RULES

    name, _, axes = text.partition("=")
    if name not in RULES or not re.fullmatch(r"[a-z]+(\+[a-z]+)*", axes):
        raise argparse.ArgumentTypeError(f"{text!r} is not like embed=fsdp+expert, or embed=none")
    several = tuple(axes.split("+"))
    return name, None if axes == "none" else several if len(several) > 1 else axes
