"""What training takes on meshes of 8 to 256 devices, by arithmetic, before and after what bounds it.

    python -m tests.benchmarks.plans

Prints the table of nnxmoe/planning/README.md: arguments and temporary bytes of one device in GB, and whether they fit,
for a row of 4096 tokens per device.
"""

import math
from typing import Any

import nnxmoe

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
    "ranks replicated": {"rules": {**nnxmoe.RULES, "q_rank": None, "kv_rank": None}},
    "default": {},
    "4 chunks": {"chunks": 4},
    "buffer 1.25": {"buffer_factor": 1.25},
    "embed over both, 4 chunks": {**WIDE, "chunks": 4},
    "embed over both, buffer 1.25": {**WIDE, "buffer_factor": 1.25},
}


def main() -> None:
    """The command."""
    print("| model | devices | mesh |", " | ".join(WAYS), "|")
    print("|---|---|---|" + "---|" * len(WAYS))
    for model, places in MODELS.items():
        for (kind, torus), meshes in places.items():
            for mesh in meshes:
                devices, cells = math.prod(mesh.values()), list[str]()
                on = f"{kind}:{torus}" if torus else kind
                for options in WAYS.values():
                    made = nnxmoe.plan(model, mesh, batch=devices, seq=4096, on=on, advise=False, **options)
                    rest = made.bytes.total - made.bytes.arguments
                    sizes = f"{made.bytes.arguments / 1e9:.1f} + {rest / 1e9:.1f}"
                    cells.append(f"{sizes} {'yes' if made.fits else 'no'}")
                axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
                print(f"| {model} | {on if torus else f'{devices} x {kind}'} | {axes} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
