"""Writes ``tests/data/quantised`` with the tools themselves: ``python -m tests.support.freeze_quantised``.

Needs torch, and without their dependencies autoawq 0.2.9, auto-gptq 0.7.1 and bitsandbytes 0.50.2, whose CPU code
quantises one projection of a tiny Llama and says which floats its codes stand for.
"""

import importlib
import sys
import types
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.support.quantised import FIELDS, FOLDER, MODULE
from tests.support.tiny import tiny_weights


def module_of(package: str, name: str) -> Any:
    """A module of a package, without running the package's own ``__init__``, which imports what is not installed."""
    if package not in sys.modules:
        found, bare = find_spec(package), types.ModuleType(package)
        assert found is not None and found.submodule_search_locations
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules[package] = bare
    return importlib.import_module(f"{package}.{name}")


def grouped(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float16 scales and zero points ``[O, I / group]`` that cover the range of each group with a code to spare at
    either end: the tools do not clip, and write a zero point of 0 over other bits."""
    parts = weight.reshape(len(weight), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 3)).half().float()
    return scales, 1 + torch.round(-low / scales)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    library, packing = module_of("awq", "modules.linear.gemm"), importlib.import_module("awq.utils.packing_utils")
    scales, zeros = grouped(weight, 4, 32)
    made = library.WQLinear_GEMM.from_linear(linear(weight), 4, 32, scales=scales.T, zeros=zeros.T)
    values = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, 32)
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}, values.T


def gptq(weight: torch.Tensor, bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    library = module_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda_old")
    scales, zeros = grouped(weight, bits, 32)
    made = library.QuantLinear(bits, 32, weight.shape[1], len(weight), bias=False, weight_dtype=torch.float16)
    made.pack(linear(weight.half()), scales.half(), zeros.half(), None)
    with torch.no_grad():
        values = made(torch.eye(weight.shape[1]).half())  # a product with 1 and zeros rounds nothing more
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, values.T


def nf4(weight: torch.Tensor, nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    library = importlib.import_module("bitsandbytes.functional")
    codes, state = library.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
    stored = {"weight": codes, **{f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}}
    return stored, library.dequantize_4bit(codes, state)


def main() -> None:
    """The command."""
    weight = torch.tensor(tiny_weights(FIELDS["llama"])[f"{MODULE}.weight"]).float()
    made = {
        "awq": awq(weight),
        "gptq-4": gptq(weight, 4),
        "gptq-8": gptq(weight, 8),
        "nf4": nf4(weight, False),
        "nf4-nested": nf4(weight, True),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, (stored, values) in made.items():
        assert float((values.float() - weight).abs().max()) < 0.5 * float(weight.abs().max())
        tensors = {ending: np.ascontiguousarray(value.numpy()) for ending, value in stored.items()}
        save_file({**tensors, "values": values.float().contiguous().numpy()}, FOLDER / f"{name}.safetensors")


if __name__ == "__main__":
    main()
