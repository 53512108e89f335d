"""What training takes on meshes of 8 to 256 devices, by arithmetic, before and after what bounds it.

    python -m tests.benchmarks.plans [--compile] [--ways "default;embed over both"] [--on tpu]
    python -m tests.benchmarks.plans --published

Prints the tables of nnxmoe/apps/planning/README.md: arguments and temporary bytes of one device in GB, and whether
they fit, for a row of 4096 tokens per device. ``--compile``: compiled for the hardware, one
to three minutes per cell.
``--published``: the steps that others have published, and what is planned for them.
"""

import argparse
import math
from typing import Any

import nnxmoe
from nnxmoe.apps.planning.plan import Plan
from nnxmoe.apps.planning.printing import seconds_text
from nnxmoe.apps.planning.published import PublishedRun, published

MIXTRAL = {
    ("h100", ""): ({"expert": 8}, {"fsdp": 8, "expert": 8}, {"fsdp": 32, "expert": 8}),
    ("tpu-v5p", "4x4x4"): ({"fsdp": 16, "expert": 4},),
    ("tpu-v5p", "4x8x8"): ({"fsdp": 32, "expert": 8},),
}
DEEPSEEK = {
    ("h100", ""): ({"expert": 8}, {"fsdp": 8, "expert": 8}, {"fsdp": 16, "expert": 16}),
    ("tpu-v5p", "4x4x4"): ({"fsdp": 4, "expert": 16},),
    ("tpu-v5p", "4x8x8"): ({"fsdp": 32, "expert": 8},),
}
MODELS = {"mixtral-8x7b": MIXTRAL, "mixtral-8x22b": MIXTRAL, "deepseek-v3": DEEPSEEK}
WIDE = {"rules": {**nnxmoe.RULES, "embed": ("fsdp", "expert")}}
WAYS: dict[str, dict[str, Any]] = {
    "ranks replicated": {"rules": {**nnxmoe.RULES, "q_rank": None, "kv_rank": None}, "chunks": 1},
    "room for all rows": {"chunks": 1},
    "default": {},
    "16 chunks": {"chunks": 16},
    "buffer 1.25": {"buffer_factor": 1.25},
    "embed over both, 16 chunks": {**WIDE, "chunks": 16},
    "embed over both, buffer 1.25": {**WIDE, "buffer_factor": 1.25},
}


def cell(model: str, mesh: dict[str, int], on: str, **options: Any) -> str:
    """Arguments and temporary bytes of a plan, and whether they fit."""
    options = {"rules": {**nnxmoe.RULES}} | options
    made = nnxmoe.plan(model, mesh, batch=math.prod(mesh.values()), seq=4096, on=on, advise=False, **options)
    given = made.bytes.arguments
    return f"{given / 1e9:.1f} + {(made.memory - given) / 1e9:.1f} {'yes' if made.fits else 'no'}"


def plan_of(run: PublishedRun, **more: Any) -> Plan:
    """The plan of a published run."""
    choices = dict(run.choices)
    choices["rules"] = {**nnxmoe.RULES, **{name: tuple(axes) for name, axes in choices.get("rules", {}).items()}}
    sizes: dict[str, Any] = {"batch": run.batch, "seq": run.seq, "on": run.on, "train": run.train}
    return nnxmoe.plan(run.model, run.mesh, advise=False, **sizes, **choices | more)


def published_table() -> str:
    """Published seconds per step beside the planned ones, in Markdown."""
    lines = ["| model | devices | mesh | rows x tokens | published | planned, range | error |", "|---" * 7 + "|"]
    for run in published():
        made = plan_of(run)
        low, high = (seconds_text(one) for one in made.range)
        axes = ", ".join(f"{axis} {size}" for axis, size in run.mesh.items())
        cells = [run.model, run.on, axes, f"{run.batch} x {run.seq}{'' if run.train else ', decoding'}"]
        cells += [seconds_text(run.seconds), f"{seconds_text(made.seconds)}, {low} to {high}"]
        lines.append(f"| {' | '.join([*cells, f'{made.seconds / run.seconds - 1:+.0%}'])} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", dest="compile_for", action="store_const", const="device")
    parser.add_argument("--ways", default=";".join(WAYS), help="names of columns that contain one of these")
    parser.add_argument("--on", default="", help="hardware whose name starts with this")
    parser.add_argument("--published", action="store_true")
    options = parser.parse_args()
    if options.published:
        return print(published_table())
    ways = {name: way for name, way in WAYS.items() if any(part in name for part in options.ways.split(";"))}
    print("| model | devices | mesh |", " | ".join(ways), "|")
    print("|---|---|---|" + "---|" * len(ways))
    for model, places in MODELS.items():
        for (kind, torus), meshes in places.items():
            for mesh in meshes if kind.startswith(options.on) else ():
                on = f"{kind}:{torus}" if torus else kind
                cells = [cell(model, mesh, on, compile_for=options.compile_for, **way) for way in ways.values()]
                axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
                devices = on if torus else f"{math.prod(mesh.values())} x {kind}"
                print(f"| {model} | {devices} | {axes} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
