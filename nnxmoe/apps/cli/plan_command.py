"""``nnxmoe plan``: estimate memory and time of a step on hardware that need not be present."""

import argparse
import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any

from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.options import add_quantize, count, mesh
from nnxmoe.config.printable import bytes_text

EXAMPLE = "plan deepseek-v3 --mesh fsdp=16,expert=16 --batch 256 --seq 4096 --on h200"

RATES = {"flops": "operations per second", "memory": "bytes"}
RATES |= dict.fromkeys(("bandwidth", "link", "network"), "bytes per second")
RATES |= {"efficiency": "fraction of the peak, 0 to 1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe plan``."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset such as deepseek-v3, 'demo', a folder or a hub id")
    meshes = parser.add_mutually_exclusive_group(required=True)
    meshes.add_argument("--mesh", type=mesh, metavar="AXES", help="sizes of mesh axes, such as fsdp=16,expert=16")
    help_text = "list the ten best meshes of N devices; without --batch, also search the number of rows"
    meshes.add_argument("--devices", "--search", dest="search", type=count, metavar="N", help=help_text)
    add("--layers", type=count, metavar="N", help="plan only the first N layers of the model")
    add("--batch", type=count, metavar="B", help="rows per step, on all devices together")
    add("--seq", type=count, default=4096, metavar="T", help="tokens per row, or in the cache with --decode (4096)")
    add("--on", default="h100", metavar="DEVICE", help="h100, h200, b200, tpu-v5p:4x4x4, … (h100)")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--train", dest="train", action="store_true", default=True, help="a training step (default)")
    task.add_argument("--decode", dest="train", action="store_false", help="decode one token per row with a full cache")
    add("--accumulate", type=count, default=1, metavar="N", help="accumulate gradients over N microbatches")
    help_text = "capacity of a device's receive buffer, as a multiple of the balanced load; further rows are dropped"
    add("--buffer-factor", type=float, metavar="F", help=help_text)
    help_text = "exchange tokens with experts in N chunks (default: enough that buffers hold 8 x the balanced load)"
    add("--chunks", type=count, metavar="N", help=help_text)
    help_text = "pipeline microbatches, a multiple of the stages (with --mesh pipe=…)"
    add("--microbatches", type=count, metavar="M", help=help_text)
    add("--no-remat", dest="remat", action="store_false", help="store all activations for the backward pass")
    help_text = "mesh axes that shard a parameter axis, such as embed=fsdp+expert (default: rules of nnxmoe finetune)"
    add("--rule", dest="rules", action="append", default=[], type=_rule, metavar="NAME=AXES", help=help_text)
    add("--across", metavar="AXIS", help="the mesh axis that crosses nodes or slices")
    add("--compare", type=mesh, metavar="AXES", help="also plan this mesh and compare both")
    help_text = "also print the time for N tokens, such as 15T, and with --price the cost"
    add("--tokens", type=tokens, metavar="N", help=help_text)
    add("--price", type=float, metavar="P", help="price per device-hour")
    add("--offload", action="store_true", help="offload the inputs of layers to the host")
    help_text = "groups of layers per pipeline stage, interleaved (arithmetic only)"
    add("--interleaved", type=count, default=1, metavar="V", help=help_text)
    help_text = "send one copy of a token per node, as DeepEP does (arithmetic only)"
    add("--node-copies", action="store_true", help=help_text)
    help_text = "train only adapters of this rank and freeze the weights (arithmetic only)"
    add("--lora", type=count, default=0, metavar="R", help=help_text)
    add(
        "--split-rank",
        action="store_true",
        help="divide the rank of expert adapters by the experts per token",
    )
    add_quantize(parser, keep=False)
    add("--compute", choices=["bf16", "fp8"], default="bf16", help="dtype of matrix products (arithmetic only)")
    add(
        "--compile",
        dest="compile_for",
        nargs="?",
        const="device",
        choices=["cpu", "device"],
        help="compile the step for the hardware given by --on (requires the plan-gpu or plan-tpu extra); with 'cpu', "
        "compile for virtual CPU devices instead",
    )
    for name, unit in RATES.items():
        add(f"--{name}", type=float, metavar="X", help=f"{name} of a device in {unit}, overriding the built-in value")
    add("--plot", metavar="FILE.png", help="also plot the memory and the time (requires the notebooks extra)")


def run(options: argparse.Namespace) -> None:
    """Print the memory, traffic and time of a step on a mesh of devices that need not be present."""
    import jax

    from nnxmoe.apps.planning import printing, search
    from nnxmoe.apps.planning.plan import plan
    from nnxmoe.apps.planning.torus import hardware
    from nnxmoe.apps.planning.work import Work
    from nnxmoe.sharding_rules import RULES

    jax.config.update("jax_platforms", "cpu")  # plans need no device, and JAX plugins print errors without one
    _check(options)
    rates = {name: getattr(options, name) for name in RATES if getattr(options, name) is not None}
    work = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(Work) if field.name in vars(options)
    }
    work["quantize"] = loading.quantize_method(options)
    work["on"] = dataclasses.replace(hardware(options.on), **rates)
    work["rules"] = {**RULES, **dict(options.rules)} if options.rules else RULES
    if options.search:
        search_meshes = search.search
        if options.batch is None:  # also search the batch size and rematerialization
            search_meshes = search.best_of
            del work["batch"], work["remat"]
        plans = search_meshes(options.model, options.search, **work)
        best, text = plans[0], printing.compared(plans)
        text += "" if best.fits else f"\n{_more_devices(options, search_meshes, work)}"
    else:
        best = plan(options.model, options.mesh, compile_for=options.compile_for, **work)
        text = str(best)
        if options.compare is not None:
            second_plan = plan(options.model, options.compare, advise=False, **work)
            text = printing.compared([best, second_plan])
    print(text)
    if options.tokens is not None:
        cost = printing.cost(best, options.tokens, options.price) if best.fits else "no time or cost: it does not fit"
        print(cost)
    if options.plot:
        best.plot().figure.savefig(os.fspath(options.plot), bbox_inches="tight")


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError if options exclude each other or a required option is missing."""
    if options.search and options.compile_for:
        raise ValueError("--search compares meshes by arithmetic: omit --compile, then compile the best mesh")
    if options.batch is None and not options.search:
        raise ValueError("--mesh needs --batch: set the rows per step, on all devices together")
    if options.price is not None and options.tokens is None:
        raise ValueError("--price needs --tokens: set the number of tokens to train on or to decode")
    if options.price is not None and not 0 <= options.price < math.inf:
        raise ValueError(f"--price {options.price}: use a non-negative number")


def _more_devices(options: argparse.Namespace, search_meshes: Callable[..., Any], work: dict[str, Any]) -> str:
    """Describe the smallest mesh of 2, 4, 8 or 16 times ``--devices`` devices that fits the model."""
    from nnxmoe.apps.planning.printing import axes_text

    for factor in (2, 4, 8, 16):
        devices = factor * options.search
        with contextlib.suppress(ValueError):  # no such mesh on this hardware, or the batch is not divisible
            best = search_meshes(options.model, devices, most=1, **work)[0]
            if best.fits:
                size = f"{axes_text(best)}, {bytes_text(best.memory)} each"
                return f"no mesh of {options.search} fits, but a mesh of {devices} does: {size}"
    return (
        f"no mesh of {options.search} fits, nor of {factor} times as many: "
        "nnxmoe plan with --mesh lists changes that save memory"
    )


def tokens(text: str) -> float:
    """Parse a number such as 500M, 1B or 14.8T."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMBT]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 500M, 1B or 14.8T")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def _rule(text: str) -> tuple[str, Any]:
    from nnxmoe.sharding_rules import RULES

    name, _, axes = text.partition("=")
    if name not in RULES or not re.fullmatch(r"[a-z]+(\+[a-z]+)*", axes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rule such as embed=fsdp+expert or embed=none")
    if axes == "none":
        return name, None
    names = tuple(axes.split("+"))
    return name, names if len(names) > 1 else axes
