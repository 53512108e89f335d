"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names follow PEFT 0.21 with transformers 5, where the experts of a layer are two parameters and one adapter covers all
experts: ``lora_A [E * rank, ins]``, ``lora_B [outs, rank * E]`` with the experts innermost, whichever way the base
parameter lies. The outputs are in its order: those of gate, then of up, or in turn (gpt-oss). If two parameters of a
module are adapted, PEFT nests the first in the second as its ``base_layer``.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.printable import plain
from nnxmoe.convert.core.dtypes import float_dtype
from nnxmoe.convert.core.layout import QUERY, Change
from nnxmoe.convert.hf.forms import Form
from nnxmoe.layers.lora import LoRA
from nnxmoe.model.causal_lm import CausalLM, refuse_shapes
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute, read_object
from nnxmoe.storage.multihost import gather, shared_folder, spans_hosts
from nnxmoe.storage.safetensors import TensorInfo, dtype_code, read_header
from nnxmoe.storage.write import Tensors, write_json, write_shares
from nnxmoe.train.lora.peft_config import CONFIG_FILE, Settings
from nnxmoe.train.lora.slots import Slot, adapted, refuse_adapted, slots

WEIGHTS_FILE = "adapter_model.safetensors"
_FLOATS = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Part:
    """One stored tensor: ``a`` or ``b`` of the adapter of one layer."""

    name: str
    slot: Slot
    which: str  # "a" or "b"
    index: int | None  # the layer's index in a scanned stack
    one: tuple[int, ...]  # the shape of one layer here
    rank: int
    experts: int | None  # None: a dense layer
    in_turn: int  # of how many kernels the outputs alternate; 1: they follow each other

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in the file."""
        size, rows = math.prod(self.one), self.rank * (self.experts or 1)
        return (rows, size // rows) if self.which == "a" else (size // rows, rows)

    def store(self, one: np.ndarray) -> np.ndarray:
        """Values in PEFT's layout."""
        if self.which == "a":
            return one.reshape(self.shape)
        flat = one.reshape(self.experts or 1, self.in_turn, -1, self.rank).swapaxes(1, 2)
        flat = flat.reshape(self.experts or 1, -1, self.rank)
        return np.ascontiguousarray(flat.transpose(1, 2, 0)).reshape(self.shape)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Values from PEFT's layout."""
        if self.which == "a":
            return stored.reshape(self.one)
        return stored.reshape(-1, self.in_turn, self.rank, self.experts or 1).transpose(3, 1, 0, 2).reshape(self.one)


def parameter_name(model: CausalLM, slot: Slot) -> str:
    """The parameter name in transformers 5 of a slot's kernels: ``model.layers.{layer}.self_attn.q_proj.weight``."""
    names = model.hf_table[slot.key]
    form = Form.of(names[0])
    return names[-1].partition("[")[0] if form.plain else form.tensor


def suffix(model: CausalLM, slot: Slot) -> str:
    """The parameter name within a layer: ``self_attn.q_proj.weight``."""
    return parameter_name(model, slot).partition("{layer}.")[2]


def layout(model: CausalLM, adapters: list[tuple[Slot, LoRA]]) -> Iterator[Part]:
    """The stored tensors of adapters."""
    together = collections.Counter(slot.path for slot, _ in adapters)
    for slot, adapter in adapters:
        inner = ".base_layer" if together[slot.path] > 1 and slot.attribute == next(iter(slot.owner.adapted)) else ""
        module = parameter_name(model, slot).rpartition(".")[0] + inner
        in_turn, axes = Form.of(model.hf_table[slot.key][0]).step, adapter.a.get_metadata()["axes"]
        experts = adapter.a.shape[axes.index("expert")] if "expert" in axes else None
        for index in [None] if slot.depth is None else range(slot.depth):
            where = "base_model.model." + module.format(layer=slot.first + (index or 0))
            for which, variable in (("a", adapter.a), ("b", adapter.b)):
                one = tuple(variable.shape[index is not None :])
                name = f"{where}.lora_{which.upper()}.weight"
                yield Part(name, slot, which, index, one, adapter.rank, experts, in_turn)


def save(model: CausalLM, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model's adapters in the format of ``peft``, which `load` reads too.

    The folder must be new or empty; ``overwrite`` replaces the adapter's files in it and keeps others. It is written
    completely or not at all. Raises ValueError if the model has no adapters, merged ones, or adapters in only some of
    the layers.
    """
    refuse_shapes(jax.tree.leaves(nnx.state(model)))
    if model.merged is not None:
        raise ValueError("cannot save: the model's adapters are merged; call lora.unmerge(model) first")
    adapters = [(slot, slot.adapter) for slot in adapted(model) if slot.adapter is not None]
    if not adapters:
        raise ValueError("cannot save: the model has no adapters; nnxmoe.save_pretrained writes whole models")
    _refuse_partial(model, adapters)
    numbers = {suffix(model, slot): (adapter.rank, adapter.alpha) for slot, adapter in adapters}
    settings = Settings.of(numbers, has_experts=any(slot.name == "router" for slot in slots(model)))
    base = None if model.load_report is None else model.load_report.source
    with shared_folder(folder, overwrite) as stage:
        if jax.process_index() == 0:
            write_json(stage / CONFIG_FILE, {**settings.fields, "base_model_name_or_path": base})
        shares = [(None, _tensors(model, adapters))]
        write_shares(stage, shares, 1 << 62, process=jax.process_index(), single=WEIGHTS_FILE)


def base_of(folder: str | os.PathLike[str]) -> str | None:
    """The base model that the adapter in a folder names; None if the folder holds no adapter, or a whole model.

    Raises CheckpointError if it names none.
    """
    path = absolute(folder) / CONFIG_FILE
    if not path.is_file() or path.with_name("config.json").is_file():
        return None
    name = read_object(path, "every adapter folder has this file", CheckpointError).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path} names no base model: give that model, and this folder as --adapter")
    return name


def _refuse_partial(model: CausalLM, adapters: list[tuple[Slot, LoRA]]) -> None:
    """Raises ValueError unless every adapted projection has adapters of one rank and alpha in all layers, as PEFT
    assumes."""
    numbers = {slot.place: (adapter.rank, adapter.alpha) for slot, adapter in adapters}
    first = {slot.name: (slot, numbers[slot.place]) for slot, _ in reversed(adapters)}
    for slot in slots(model):
        if slot.name in first and (found := numbers.get(slot.place)) != first[slot.name][1]:
            what = "no adapter" if found is None else "one of rank {} and alpha {}".format(*found)
            other, both = first[slot.name]
            raise ValueError(
                f"cannot save: {slot.place} has {what}, {other.place} one of rank {both[0]} and alpha {both[1]}; "
                "PEFT needs the same adapter in every layer"
            )


def _tensors(model: CausalLM, adapters: list[tuple[Slot, LoRA]]) -> Tensors:
    held = dict(zip((slot.place for slot, _ in adapters), adapters, strict=True))
    query = Change(times=model.config.folded()[1])
    for part in layout(model, adapters):
        value = getattr(held[part.slot.place][1], part.which).get_value()

        def make(part: Part = part, value: Any = value) -> np.ndarray:
            at = () if part.index is None else (part.index,)
            one = gather(value, at) if spans_hosts(value) else np.asarray(value[at])
            return part.store(query(one).astype(one.dtype) if _of_query(part) else one)

        yield part.name, dtype_code(value.dtype), part.shape, make


def _of_query(part: Part) -> bool:
    """Whether the scale of queries applies to a tensor, see `DecoderConfig.query_pre_attn_scalar`."""
    return part.which == "b" and part.slot.key.startswith(QUERY)


def load(model: CausalLM, folder: str | os.PathLike[str], dtype: Any = None) -> None:
    """Load the adapters that `save` or ``peft`` wrote to a folder into a model, in place, sharded over its mesh.

    ``dtype`` None keeps the stored dtype. Raises ValueError for other kinds of adapters, or with a list of all tensors
    that are missing, unexpected, or of another shape than the model and the rank require. The model is then unchanged.
    """
    refuse_adapted(model)
    kind, where = float_dtype(dtype), absolute(folder)
    settings, infos = Settings.read(where / CONFIG_FILE), read_header(where / WEIGHTS_FILE)
    adapters = _in_file(model, settings, infos)
    parts = list(layout(model, adapters))
    _check_tensors(where, parts, infos)
    values: dict[tuple[str, str], list[np.ndarray]] = collections.defaultdict(list)
    query = Change(times=1 / model.config.folded()[1])
    for part in parts:
        one = part.read(_values(infos[part.name]))
        values[part.slot.place, part.which].append(query(one).astype(one.dtype) if _of_query(part) else one)
    for slot, adapter in adapters:
        for which, variable in (("a", adapter.a), ("b", adapter.b)):
            layers = values.pop((slot.place, which))
            host = layers[0] if slot.depth is None else np.stack(layers)
            variable.set_value(put_array(host.astype(kind or host.dtype), model.strategy.sharding_of(variable)))
    for slot, adapter in adapters:
        slot.put(adapter)


def _in_file(model: CausalLM, settings: Settings, infos: Mapping[str, TensorInfo]) -> list[tuple[Slot, LoRA]]:
    """Adapters without values for the slots of which the file has a tensor, in any layer."""
    there = {name.rpartition(".lora_")[0] for name in infos}
    every, asked = slots(model), set[str]()
    for slot in every:
        name, _, last = parameter_name(model, slot).rpartition(".")
        for index in range(slot.depth or 1):
            module = "base_model.model." + name.format(layer=slot.first + index)
            alone = module in there and (last == "weight" or settings.has_parameter(suffix(model, slot)))
            if alone or f"{module}.base_layer" in there:
                asked.add(slot.name)
    numbers = {slot.name: settings.numbers(suffix(model, slot)) for slot in every if slot.name in asked}
    return [(slot, slot.shapes(*numbers[slot.name], np.dtype(np.float32))) for slot in every if slot.name in asked]


def _check_tensors(where: Path, parts: list[Part], infos: Mapping[str, TensorInfo]) -> None:
    wanted, faults = {part.name: part for part in parts}, []
    for name, part in wanted.items():
        if name not in infos:
            faults.append(f"missing: {name}")
        elif infos[name].shape != part.shape:
            shapes = f"{list(infos[name].shape)}, the model and rank {part.rank} require {list(part.shape)}"
            faults.append(f"shape: {name} has {shapes}")
        elif infos[name].dtype not in _FLOATS:
            faults.append(f"dtype: {name} is {infos[name].dtype}, not one of {', '.join(_FLOATS)}")
    faults += [f"unexpected: {plain(name)}" for name in infos if name not in wanted]
    if faults or not parts:
        lines = "\n  ".join(faults or ["it has no tensors"])
        raise CheckpointError(f"the adapter in {where} does not fit this model:\n  {lines}")


def _values(info: TensorInfo) -> np.ndarray:
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        return np.frombuffer(file.read(info.nbytes), info.numpy_dtype).reshape(info.shape)


def put_array(host: np.ndarray, place: Any) -> jax.Array:
    """A host array as a jax.Array with a sharding; None: on the default device."""
    return jnp.asarray(host) if place is None else jax.make_array_from_callback(host.shape, place, host.__getitem__)
