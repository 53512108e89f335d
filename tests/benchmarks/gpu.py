"""On an accelerator: the mixture-of-experts layer beside dense products, decoding beside a copy and transformers.

    python -m tests.benchmarks.gpu [--tokens 4096 8192 16384] [--only layers models] [--json FILE] [--markdown FILE]

TFLOP/s of one layer of Mixtral-8x7B and one of DeepSeek-V3, forward, and forward and backward, with each grouped
product that runs here, beside plain products of the same useful FLOPs. Then two random models, whole: the bytes of
weights that decoding reads a second beside the bytes that a copy reads and writes, and torch on the same device.
"""

import argparse
import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

import nnxmoe
from nnxmoe.kernels import tokamax
from nnxmoe.moe.grouped_matmul import GroupedMatmul
from tests.benchmarks.bandwidth import copy_bandwidth
from tests.benchmarks.checkpoints import write_random
from tests.benchmarks.models import MIDSIZE, Fields
from tests.benchmarks.moe import Layer, Shape
from tests.benchmarks.processes import both_sides, have_transformers
from tests.benchmarks.results import Result, report

LAYERS = {
    "Mixtral-8x7B layer": Shape(4096, 14336, 8, 2, "bfloat16"),
    "DeepSeek-V3 layer": Shape(7168, 2048, 256, 8, "bfloat16"),
}
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
MODELS: dict[str, Fields] = {  # 2.0 and 3.3 billion parameters: their weights are what a step of decoding waits for
    "llama": MIDSIZE["llama"] | _WIDE | {"intermediate_size": 14336},
    "mixtral": MIDSIZE["mixtral"] | _WIDE | {"intermediate_size": 7168},
}


def matmuls() -> dict[str, GroupedMatmul]:
    """What is installed, by name; the default of this backend first."""
    found: list[GroupedMatmul] = [nnxmoe.Strategy.auto().matmul, nnxmoe.Blocked(), nnxmoe.RaggedDot()]
    if tokamax.installed():
        found += [tokamax.Tokamax(), tokamax.Tokamax("triton"), tokamax.Tokamax("mosaic")]
    return {str(matmul): matmul for matmul in found}


def layer_speeds(name: str, shape: Shape, tokens: Sequence[int], times: int, left_out: list[str]) -> Iterator[Result]:
    """TFLOP/s with each grouped product; one that fails is left out, with its reason."""
    for label, matmul in matmuls().items():
        for count in tokens:
            try:
                took = Layer(shape, nnxmoe.Strategy(matmul=matmul)).time(count, times, at_most=10.0)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                left_out.append(f"{name}, {label}, T={count}: {type(error).__name__}: {str(error)[:200]}")
                continue
            for what, factor in (("forward", 1), ("forward and backward", 3)):
                work = factor * shape.flops(count) / 1e12
                speeds = {side: [work / value for value in values] for side, values in took[what].items()}
                ours = speeds.pop("nnxmoe")
                yield Result(f"{name}, {label}", f"moe {what} T={count}, TFLOP/s", ours, speeds)


def whole_models(
    models: Mapping[str, Fields], arguments: Sequence[str], sides: Sequence[str], repeat: int, left_out: list[str]
) -> Iterator[Result]:
    """Both sides in alternating processes on this device."""
    copy = copy_bandwidth()
    yield Result("this device", "copy, GB/s", [copy])
    for name, fields in models.items():
        with tempfile.TemporaryDirectory() as folder:
            write_random(Path(folder), fields)
            case, groups = f"{name} {fields['torch_dtype']}", ("first", "prefill", "decode")
            yield from both_sides(case, [folder, *groups, *arguments], sides, repeat, {"copy": copy}, left_out)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--only", nargs="+", choices=["layers", "models"], default=["models", "layers"])
    parser.add_argument("--repeat", type=int, default=3, help="processes of each side (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the device's memory with this one
    if jax.default_backend() == "cpu":
        sys.exit("tests.benchmarks.gpu needs an accelerator that JAX sees; on CPU: python -m tests.benchmarks")
    left_out, kinds = list[str](), list[Iterator[Result]]()
    if "models" in options.only:
        sides = ["ours", "theirs"] if _torch_here(left_out) else ["ours"]
        kinds.append(whole_models(MODELS, [], sides, options.repeat, left_out))
    if "layers" in options.only:
        kinds += [layer_speeds(name, shape, options.tokens, 10, left_out) for name, shape in LAYERS.items()]
    report(itertools.chain(*kinds), left_out, options.json, options.markdown)
    return 0


def _torch_here(left_out: list[str]) -> bool:
    if not have_transformers():
        left_out.append("transformers: not installed")
    elif not importlib.import_module("torch").cuda.is_available():
        left_out.append("transformers: torch does not see this device")
    return not left_out


if __name__ == "__main__":
    sys.exit(main())
