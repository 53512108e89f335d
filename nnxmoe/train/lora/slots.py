"""The places in a model that can hold an adapter, and their names: `attention.q`, `mlp.up`, `experts.gate_up`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from nnxmoe.axes import of_layers
from nnxmoe.config.printable import plain
from nnxmoe.convert.core.layout import Path
from nnxmoe.layers.kernel import kernel_param
from nnxmoe.layers.lora import LoRA, LoRAParam
from nnxmoe.layers.quantized import labels_of
from nnxmoe.model.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for an adapter: an attribute of a module, with the kernels that it adapts side by side."""

    name: str  # the same in every layer
    key: str  # of the first kernel, in the tables of names
    path: Path
    owner: Any
    attribute: str
    kernels: tuple[str, ...]
    first: int  # the layer, or the first layer of a scanned stack

    @property
    def place(self) -> str:
        """The path of the attribute, unique in the model."""
        return ".".join(map(str, (*self.path, self.attribute)))

    @property
    def adapter(self) -> LoRA | None:
        """The adapter, if there is one."""
        return getattr(self.owner, self.attribute)

    def put(self, adapter: LoRA | None) -> None:
        """Set the adapter, or remove it with None."""
        setattr(self.owner, self.attribute, nnx.static(None) if adapter is None else nnx.data(adapter))

    @property
    def base(self) -> list[Any]:
        """The adapted kernels: a `KernelParam` or `QuantizedWeight` each."""
        return [getattr(self.owner, name) for name in self.kernels]

    @property
    def depth(self) -> int | None:
        """The number of layers of a scanned stack, on the first axis; None for a single layer."""
        kernel = self.base[0]
        return kernel.lead[0] if of_layers(kernel.logical_axes[0]) else None

    def shapes(self, rank: int, alpha: float, dtype: np.dtype) -> LoRA:
        """An adapter without values, with logical axes by which it is sharded like its kernel."""
        kernel = self.base[0]
        (lead, ins, outs), (lead_axes, in_axes, out_axes) = (kernel.lead, kernel.ins, kernel.outs), kernel.logical_axes
        if len(self.kernels) > 1:
            outs, out_axes = (len(self.kernels), *outs), ("gate_up", *out_axes)
        # `nnxmoe.train.lora` and `nnxmoe.train.lora.peft` set the values.
        kw: dict[str, Any] = {"lead": lead, "dtype": dtype, "rngs": None, "kind": LoRAParam}
        a = kernel_param(ins, (rank,), (*lead_axes, *in_axes, "rank"), **kw)
        b = kernel_param((rank,), outs, (*lead_axes, "rank", *out_axes), **kw)
        return LoRA(a, b, alpha)


def slots(model: CausalLM) -> list[Slot]:
    """All slots, in the order of the layers. The embedding and the head have none."""
    found = []
    for path, module in model.layer_modules():
        for attribute, kernels in getattr(module, "adapted", {}).items():
            key, labels = labels_of(getattr(module, kernels[0]))
            name = key.removeprefix("layer.").removeprefix("moe.").removesuffix("." + kernels[0])
            name = name if kernels == ("kernel",) else f"{name}.{'_'.join(kernels)}"
            found.append(Slot(name, key, path, module, attribute, kernels, labels["layer"]))
    return sorted(found, key=lambda slot: (slot.first, slot.place))


def chosen(model: CausalLM, targets: str | Sequence[str] | None) -> list[Slot]:
    """The slots whose names equal a target or start with ``target.``; None: all but the router."""
    every = slots(model)
    if targets is None:
        return [slot for slot in every if slot.name != "router"]
    asked, names = [targets] if isinstance(targets, str) else list(targets), sorted({slot.name for slot in every})
    known = {target: [name for name in names if f"{name}.".startswith(f"{target}.")] for target in asked}
    if odd := [target for target in asked if not known[target]] if asked else [""]:
        groups = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise ValueError(
            f"targets: {plain(str(odd[0])) or 'an empty list'} names no projection of a {model.config.model_type} "
            f"model; use {groups}, or single projections: {', '.join(n for n in names if '.' in n)}"
        )
    wanted = {name for found in known.values() for name in found}
    return [slot for slot in every if slot.name in wanted]


def adapted(model: CausalLM) -> list[Slot]:
    """The slots that have an adapter."""
    return [slot for slot in slots(model) if slot.adapter is not None]


def refuse_adapted(model: CausalLM) -> None:
    """Raises ValueError if the model has adapters already, merged or not."""
    if model.merged is not None:
        raise ValueError(
            "the model has merged adapters: call lora.unmerge(model), or merge them for good with "
            "lora.merge(model, keep=False)"
        )
    if found := adapted(model):
        raise ValueError(
            f"the model already has {len(found)} adapters, the first at {found[0].name}: remove them with "
            "lora.remove(model), or make them part of the kernels with lora.merge(model, keep=False)"
        )


def unmerged(model: CausalLM, what: str) -> list[Slot]:
    """The slots with an adapter. Raises ValueError, naming the operation ``what``, if there are none or merged ones."""
    if model.merged is not None:
        raise ValueError(f"cannot {what}: the model's adapters are merged; call lora.unmerge(model) first")
    if not (found := adapted(model)):
        raise ValueError(f"cannot {what}: the model has no adapters; add them with lora.add or lora.load")
    return found
