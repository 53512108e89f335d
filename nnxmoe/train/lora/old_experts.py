"""Experts' adapters as transformers 4 and PEFT stored them: one per expert and projection."""

import collections

import numpy as np

from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import options
from nnxmoe.train.lora.adapter_file import AdapterFile
from nnxmoe.train.lora.peft_config import Settings
from nnxmoe.train.lora.pieces import OneLayer, scaled
from nnxmoe.train.lora.slots import Slot


def expert_by_expert(model: CausalLM, slot: Slot, layer: int, settings: Settings, file: AdapterFile) -> OneLayer | None:
    """The adapters of a layer's experts as one; None if the file has none in this form.

    The ranks of gate and up are added, so that each keeps an ``a`` of its own: ``b`` is zero elsewhere. Experts without
    an adapter get zeros.
    """
    (lead, (ins,), (outs,)), _ = slot.dimensions
    found: dict[tuple[int, int], tuple[str, tuple[int, float]]] = {}
    for number, kernel in enumerate(slot.kernels):
        for w in options(model.hf_names(model.config), slot.key.rpartition(".")[0] + "." + kernel):
            for expert in range(lead[-1]) if w.per_expert else ():
                module = w.tensor(layer, expert).removesuffix(".weight")
                tensors = f"base_model.model.{module}.lora_"
                if f"{tensors}A.weight" in file and settings.has_module(own := file.in_base(module)):
                    found[number, expert] = tensors, settings.numbers(own)
    if not found:
        return None
    ranks = [max((r for (i, _), (_, (r, _)) in found.items() if i == n), default=0) for n in range(len(slot.kernels))]
    scale = collections.Counter(alpha / rank for _, (rank, alpha) in found.values()).most_common(1)[0][0]
    total, maps = sum(ranks), (len(ranks),) if len(ranks) > 1 else ()
    a = np.zeros((lead[-1], total, ins), np.float32)
    b = np.zeros((lead[-1], *maps, outs, total), np.float32)
    kinds = set()
    for (number, expert), (tensors, (rank, alpha)) in found.items():
        own = slice(start := sum(ranks[:number]), start + rank)
        low, high = (
            file.take(f"{tensors}A.weight", (rank, ins), rank),
            file.take(f"{tensors}B.weight", (outs, rank), rank),
        )
        high = scaled(high, alpha / rank / scale)
        kinds |= {low.dtype, high.dtype}
        a[expert, own] = low
        (b[expert, number] if maps else b[expert])[..., own] = high
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    return OneLayer(a.astype(kind), b.astype(kind), (total, scale * total))
