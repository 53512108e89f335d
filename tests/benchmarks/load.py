"""Load a sharded Mixtral of any size: what ``tests.benchmarks.ours`` measures of it, peak memory and GB/s.

python -m tests.benchmarks.load [--megabytes 800] [--dtype bfloat16]
"""

import argparse
import json
import tempfile
from pathlib import Path

from tests.benchmarks.checkpoints import write_random
from tests.benchmarks.processes import call


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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "model", options.megabytes, options.dtype)
        print(json.dumps(call("ours", Path(folder) / "model", "load")))


if __name__ == "__main__":
    main()
