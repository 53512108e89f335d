"""Load a synthetic sharded Mixtral in a process of its own: peak memory beside the model's bytes, and GB/s.

    python -m tests.benchmarks.load [--megabytes 800] [--dtype bfloat16]

Prints one JSON line. ``peak_ratio`` is the peak resident memory over what importing costs, in model sizes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.checkpoints import write_random

CHILD = """
import json, sys, time
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
import jax, nnxmoe
from flax import nnx
jax.device_put(1.0).block_until_ready()
before = peak()
started = time.perf_counter()
model = nnxmoe.from_pretrained(sys.argv[1])
for leaf in jax.tree.leaves(nnx.state(model)):
    leaf.block_until_ready()
seconds = time.perf_counter() - started
size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
print(json.dumps({"bytes": size, "import_bytes": before, "peak_bytes": peak(), "seconds": seconds}))
"""


def config(megabytes: int, dtype: str) -> dict[str, object]:
    """A Mixtral of about that size: 4 layers, 8 experts, width 1024, and a vocabulary that is not negligible."""
    item = 4 if dtype == "float32" else 2
    layers, experts, dim, vocab = 4, 8, 1024, 16000
    rest = megabytes * 1e6 / item - 2 * vocab * dim - layers * dim * dim * 2.5
    width = int(rest / (layers * experts * 3 * dim)) // 16 * 16
    return {
        "model_type": "mixtral", "vocab_size": vocab, "hidden_size": dim, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_local_experts": experts, "num_experts_per_tok": 2, "torch_dtype": dtype,
    }  # fmt: skip


def make(folder: Path, megabytes: int, dtype: str) -> None:
    """Write the checkpoint in shards of a fifth of its size."""
    write_random(folder, config(megabytes, dtype), megabytes * 1_000_000 // 5)


def measure(folder: Path) -> dict[str, float]:
    """Load in a fresh process; sizes in bytes."""
    run = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=300)
    if run.returncode:
        raise RuntimeError(run.stderr)
    found = json.loads(run.stdout.splitlines()[-1])
    found["peak_ratio"] = (found["peak_bytes"] - found["import_bytes"]) / found["bytes"]
    found["gigabytes_per_second"] = found["bytes"] / found["seconds"] / 1e9
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "model", options.megabytes, options.dtype)
        print(json.dumps(measure(Path(folder) / "model")))


if __name__ == "__main__":
    main()
