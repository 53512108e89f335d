"""Adapter slots: the projections that can have an adapter, such as `attention.q`, `experts.gate_up` and `head`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.config.printable import plain, short
from nnxmoe.config.validate import as_python
from nnxmoe.convert.arrays.array_layout import Path
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear.kernel import as_weight, kernel_param
from nnxmoe.layers.linear.lora import LoRA
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.paths import layer_modules, name_of
from nnxmoe.models import family_of


@dataclasses.dataclass(frozen=True)
class AdapterSlot:
    """Attribute of a module that can contain an adapter, with the kernels that the adapter covers.

    Attributes:
        name: Name of the slot, the same in all layers.
        key: Key of the first kernel in the family's table of names.
        path: Path of the module in the model.
        owner: The module.
        attribute: Name of the attribute.
        kernels: Attribute names of the adapted kernels in the module.
        first: Index of the layer, or of the first layer of a scanned stack.
    """

    name: str
    key: str
    path: Path
    owner: Any
    attribute: str
    kernels: tuple[str, ...]
    first: int

    @property
    def place(self) -> str:
        """Path of the attribute, unique in the model."""
        return ".".join(map(str, (*self.path, self.attribute)))

    @property
    def adapter(self) -> LoRA | None:
        """Adapter in the slot. `None` if the slot is empty."""
        return getattr(self.owner, self.attribute)

    def put(self, adapter: LoRA | None) -> None:
        """Set the adapter. `None` removes the adapter."""
        setattr(self.owner, self.attribute, nnx.static(None) if adapter is None else nnx.data(adapter))

    @property
    def base(self) -> list[Any]:
        """Adapted kernels, each a parameter or a `QuantizedWeight`."""
        return [getattr(self.owner, name) for name in self.kernels]

    @property
    def depth(self) -> int | None:
        """Number of layers of a scanned stack, on the first axis. `None` for a single layer."""
        leading_sizes, axes = (part[0] for part in self.dimensions)
        return leading_sizes[0] if is_stacked(axes) else None

    @property
    def dimensions(self) -> tuple[Any, Any]:
        """Sizes and logical axes of the kernel, each as a tuple (lead, ins, outs)."""
        kernel: Any = self.base[0]
        if isinstance(self.owner, Embed):  # table [V, D]: ins = V for the embedding, ins = D for a tied head
            order = slice(None, None, 1 if self.attribute == "lora" else -1)
            return tuple(((), *((size,) for size in entries[order])) for entries in (kernel.shape, axes_of(kernel)))
        weight = as_weight(kernel)
        return (weight.lead, weight.ins, weight.outs), weight.logical_axes

    @property
    def layers(self) -> range:
        """Layer indices of the slot. The embedding and the head count as a single layer."""
        return range(self.first, self.first + (self.depth or 1))

    def shapes(self, rank: int, alpha: float, dtype: np.dtype) -> LoRA:
        """Return an abstract adapter (shapes only), with logical axes that shard it like the kernel."""
        (leading_sizes, ins, outs), (lead_axes, in_axes, out_axes) = self.dimensions
        if len(self.kernels) > 1:
            outs, out_axes = (len(self.kernels), *outs), ("gate_up", *out_axes)
        # `nnxmoe.train.lora` and `nnxmoe.convert.peft.adapter_folder` set the values.
        options: dict[str, Any] = {"lead": leading_sizes, "dtype": dtype, "rngs": None, "param_type": nnx.LoRAParam}
        a = kernel_param(ins, (rank,), (*lead_axes, *in_axes, "rank"), **options)
        b = kernel_param((rank,), outs, (*lead_axes, "rank", *out_axes), **options)
        return LoRA(a, b, alpha)


def adapter_slots(model: CausalLM) -> list[AdapterSlot]:
    """Return all slots in layer order, followed by the embedding and the head."""
    slots = []
    for path, module in layer_modules(model):
        for attribute, kernels in getattr(module, "adapted", {}).items():
            key, first_layer, _ = name_of(model, (*path, kernels[0]))
            name = key.removeprefix("layer.").removeprefix("moe.").removesuffix("." + kernels[0])
            name = name if kernels == ("kernel",) else f"{name}.{'_'.join(kernels)}"
            slots.append(AdapterSlot(name, key, path, module, attribute, kernels, first_layer or 0))
    slots.sort(key=lambda slot: (slot.first, slot.place))
    is_tied = model.head is None
    head_fields = (
        (("embed",), model.embed, "lora_head", ("table",)) if is_tied else (("head",), model.head, "lora", ("kernel",))
    )
    embed = AdapterSlot("embed", "embed.table", ("embed",), model.embed, "lora", ("table",), 0)
    return [*slots, embed, AdapterSlot("head", "embed.table" if is_tied else "head.kernel", *head_fields, 0)]


def select_slots(model: CausalLM, targets: str | Sequence[str] | None) -> list[AdapterSlot]:
    """Return the slots whose names equal a target or start with ``target.``.

    Args:
        model: Model with or without adapters.
        targets: Target or list of targets. If None, select all slots except router, embedding, head, indexers (which
            have no gradient), and the names in `Family.peft_excluded`.

    Raises:
        ValueError: A target matches no slot, or the list is empty.
    """
    check_model(model)
    slots = adapter_slots(model)
    if targets is None:
        excluded_names = "router", "embed", "head", "attention.indexer", *family_of(model).peft_excluded
        return [slot for slot in slots if not slot.name.startswith(excluded_names)]
    if not isinstance(as_python(targets), Iterable) or isinstance(targets, bytes):
        raise ValueError(f"targets={short(targets)}: pass the name of a projection, or a list of names")
    target_list, names = [targets] if isinstance(targets, str) else list(targets), sorted({slot.name for slot in slots})
    matches = {target: [name for name in names if f"{name}.".startswith(f"{target}.")] for target in target_list}
    if unknown_targets := [target for target in target_list if not matches[target]] if target_list else [""]:
        groups = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise ValueError(
            f"targets: {plain(str(unknown_targets[0])) or 'an empty list'} matches no projection of a "
            f"{model.config.model_type} model; use {groups}, or single projections: "
            f"{', '.join(n for n in names if '.' in n)}"
        )
    selected_names = {name for matched_names in matches.values() for name in matched_names}
    return [slot for slot in slots if slot.name in selected_names]


def values_per_slot(slots: Sequence[AdapterSlot], values: Any, label: str) -> list[Any]:
    """Return one value per slot.

    Args:
        slots: Slots to return values for.
        values: Value for all slots, or a mapping from targets to values. The longest target that matches a slot's
            name determines the slot's value.
        label: Name of the values in error messages.

    Raises:
        ValueError: A slot matches no target, or no slot uses a target.
    """
    if not isinstance(values, Mapping):
        return [values] * len(slots)
    keys = [
        max((target for target in values if f"{slot.name}.".startswith(f"{target}.")), key=len, default=None)
        for slot in slots
    ]
    if None in keys:
        raise ValueError(f"{label} has no value for the target {slots[keys.index(None)].name}: add one")
    if unused_targets := [target for target in values if target not in keys]:
        raise ValueError(f"{label} has a value for {plain(str(unused_targets[0]))}, which no adapter uses: remove it")
    return [values[key] for key in keys]


def adapted_slots(model: CausalLM) -> list[AdapterSlot]:
    """Return the slots with an adapter."""
    return [slot for slot in adapter_slots(model) if slot.adapter is not None]


def refuse_adapters(model: CausalLM) -> None:
    """Raise ValueError if ``model`` is not a model, or if it has adapters, merged or not."""
    check_model(model)
    if model.merged is not None:
        raise ValueError(
            "the model has merged adapters: call lora.unmerge(model), or merge them permanently with "
            "lora.merge(model, keep=False)"
        )
    if slots := adapted_slots(model):
        raise ValueError(
            f"the model already has {len(slots)} adapters, the first at {slots[0].name}: remove them with "
            "lora.remove(model), or merge them into the kernels with lora.merge(model, keep=False)"
        )


def unmerged_slots(model: CausalLM, operation: str) -> list[AdapterSlot]:
    """Return the slots with an adapter. Raises ValueError if there are no adapters, or merged adapters.

    ``operation`` is the name of the operation in the message.
    """
    check_model(model)
    if model.merged is not None:
        raise ValueError(f"cannot {operation}: the model's adapters are merged; call lora.unmerge(model) first")
    if not (slots := adapted_slots(model)):
        raise ValueError(f"cannot {operation}: the model has no adapters; add them with lora.add or lora.load")
    return slots
