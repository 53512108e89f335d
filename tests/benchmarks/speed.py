"""Prefill and decode beside transformers, in alternating processes (in one process they slow each other).

    python -m tests.benchmarks.speed [--repeat 3] [--dtype float32] [--models llama mixtral deepseek]

Random mid-size models. Prefill: 512 tokens to the first new one. Decode: milliseconds a token after it, batch 1 and 8.
Needs the 'oracle' extra for the other side. Prints a Markdown table of medians and ratios (above 1: nnxmoe is faster).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.checkpoints import write_random

COMMON = {"vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 4096}
MODELS = {
    "llama": {
        "model_type": "llama", "num_hidden_layers": 8, "intermediate_size": 2816, "num_key_value_heads": 4,
    },
    "mixtral": {
        "model_type": "mixtral", "num_hidden_layers": 4, "intermediate_size": 2048, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek": {
        "model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 2816,
        "num_key_value_heads": 16, "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
        "n_shared_experts": 1, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip

OURS = """
import sys, numpy as np, nnxmoe
model = nnxmoe.from_pretrained(sys.argv[1])
def run(ids, new): nnxmoe.generate(model, ids, max_new_tokens=new, eos_token_id=None)
"""
THEIRS = """
import sys, numpy as np, torch, transformers
torch.set_num_threads(2)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.generation_config.eos_token_id = None
def run(ids, new):
    ids = torch.tensor(ids)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
"""
MEASURE = """
import json, time
def best(ids, new, times):
    run(ids, new)
    took = []
    for _ in range(times):
        start = time.perf_counter(); run(ids, new); took.append(time.perf_counter() - start)
    return sorted(took)[len(took) // 2]
rng = np.random.default_rng(0)
long, short, eight = (rng.integers(0, 32000, shape) for shape in ((1, 512), (1, 16), (8, 16)))
found = {"prefill 512, tok/s": 512 / best(long, 1, 3)}
for name, ids in (("decode b1, tok/s", short), ("decode b8, tok/s", eight)):
    found[name] = len(ids) * 32 / (best(ids, 33, 3) - best(ids, 1, 3))
print(json.dumps(found))
"""


def measure(code: str, folder: Path) -> dict[str, float]:
    """One engine on one checkpoint in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", code + MEASURE, str(folder)], capture_output=True, text=True, timeout=900
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    print("| model | measure | nnxmoe | transformers | ratio |\n|---|---|---|---|---|")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_random(Path(folder), COMMON | MODELS[name] | {"torch_dtype": options.dtype})
            pairs = [(measure(OURS, Path(folder)), measure(THEIRS, Path(folder))) for _ in range(options.repeat)]
        for key in pairs[0][0]:
            ours, theirs = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
            print(f"| {name} {options.dtype} | {key} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
