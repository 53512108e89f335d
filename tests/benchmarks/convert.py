"""Conversions of a synthetic checkpoint, each by the command line in a process of its own: memory and speed.

``python -m tests.benchmarks.convert [MEGABYTES] [FOLDER]`` prints for each direction the largest memory, what the
import takes of it, the ratio of the rest to the checkpoint's size, and the speeds that the command says.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.checkpoints import write_random

# 1/800 of the megabytes are what one unit of the experts' width adds: 4 layers of 8 experts of 3 x 1024 x width floats.
FIELDS = {
    "model_type": "mixtral",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
STEPS = [
    ("hf", "maxtext scanned", ["--to", "maxtext", "--scan"]),
    ("maxtext scanned", "hf again", ["--to", "hf"]),
    ("hf", "maxtext", ["--to", "maxtext"]),
    ("maxtext", "hf a third time", ["--to", "hf"]),
    ("hf", "orbax", ["--to", "orbax"]),
    ("orbax", "orbax scanned", ["--to", "orbax", "--scan"]),
    ("orbax scanned", "hf a fourth time", ["--to", "hf"]),
]


def run(*command: str) -> tuple[int, str]:
    """The largest memory of a process in bytes, and what it printed."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, *command], stdout=out, env=os.environ | {"TQDM_DISABLE": "1"})
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed with status {status}")
        out.seek(0)
        return usage.ru_maxrss * 1024, out.read()


def main(megabytes: int, where: Path) -> None:
    width = round((megabytes - 50) * 1e6 / (4 * 8 * 3 * 1024 * 4))
    write_random(where / "hf", FIELDS | {"intermediate_size": width})
    size = sum(path.stat().st_size for path in (where / "hf").glob("*.safetensors"))
    base, _ = run("-c", "import jax, nnxmoe.apps.cli, nnxmoe.convert.conversion; jax.devices()")
    print(f"{size / 1e6:.0f} MB in {width} x 8 experts, 4 layers; the import alone takes {base / 1e6:.0f} MB")
    print(f"{'from':18} {'to':18} {'peak MB':>8} {'(peak - import) / size':>24}  speeds")
    for source, target, options in STEPS:
        peak, said = run("-m", "nnxmoe", "convert", str(where / source), str(where / target), *options)
        speeds = said.splitlines()[1]
        print(f"{source:18} {target:18} {peak / 1e6:8.0f} {(peak - base) / size:24.2f}  {speeds}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 800, Path(folder))
