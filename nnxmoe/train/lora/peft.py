"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names are those that PEFT 0.21 gives on transformers 5. There the experts of a layer are two parameters, and an adapter
of a parameter holds all experts: ``lora_A [E * rank, ins]``, ``lora_B [outs, rank * E]`` with the experts innermost.
Of two adapted parameters of one module the first lies within the second, as its ``base_layer``.
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

from nnxmoe.config.printable import plain
from nnxmoe.convert.dtypes import float_dtype
from nnxmoe.convert.layout import QUERY, Change
from nnxmoe.layers.lora import LoRA
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute
from nnxmoe.storage.multihost import gather, shared_folder, spans_hosts
from nnxmoe.storage.safetensors import TensorInfo, dtype_code, read_header
from nnxmoe.storage.write import Tensors, write_json, write_shares
from nnxmoe.train.lora.peft_config import CONFIG_FILE, Settings
from nnxmoe.train.lora.slots import Slot, adapted, refuse_second, refuse_shapes, slots

WEIGHTS_FILE = "adapter_model.safetensors"
_FLOATS = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Part:
    """One stored tensor: ``a`` or ``b`` of a slot's adapter, of the layer ``index`` of a stack. ``one``: our shape of
    that layer; ``experts`` None: it has none."""

    name: str
    slot: Slot
    which: str
    index: int | None
    one: tuple[int, ...]
    rank: int
    experts: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """As it is stored."""
        size, rows = math.prod(self.one), self.rank * (self.experts or 1)
        return (rows, size // rows) if self.which == "a" else (size // rows, rows)

    def store(self, one: np.ndarray) -> np.ndarray:
        """Our values as PEFT has them."""
        flat = one.reshape(self.experts or 1, *((-1, self.rank) if self.which == "a" else (self.rank, -1)))
        order = (0, 2, 1) if self.which == "a" else (2, 1, 0)
        return np.ascontiguousarray(flat.transpose(order)).reshape(self.shape)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """PEFT's values as we have them."""
        count = self.experts or 1
        split = (count, self.rank, -1) if self.which == "a" else (-1, self.rank, count)
        return stored.reshape(split).transpose((0, 2, 1) if self.which == "a" else (2, 1, 0)).reshape(self.one)


def parameter_name(model: CausalLM, slot: Slot) -> str:
    """What transformers 5 calls a slot's kernels in memory: ``model.layers.{layer}.self_attn.q_proj.weight``."""
    return model.hf_table[slot.key][-1].partition("[")[0]


def suffix(model: CausalLM, slot: Slot) -> str:
    """The same without its layer: ``self_attn.q_proj.weight``."""
    return parameter_name(model, slot).partition("{layer}.")[2]


def layout(model: CausalLM, adapters: list[tuple[Slot, LoRA]]) -> Iterator[Part]:
    """The tensors of adapters."""
    together = collections.Counter(slot.path for slot, _ in adapters)
    for slot, adapter in adapters:
        inner = ".base_layer" if together[slot.path] > 1 and slot.attribute == next(iter(slot.owner.adapted)) else ""
        module = parameter_name(model, slot).rpartition(".")[0] + inner
        axes = adapter.a.get_metadata()["axes"]
        experts = adapter.a.shape[axes.index("expert")] if "expert" in axes else None
        for index in [None] if slot.depth is None else range(slot.depth):
            where = "base_model.model." + module.format(layer=slot.first + (index or 0))
            for which, variable in (("a", adapter.a), ("b", adapter.b)):
                one = tuple(variable.shape[index is not None :])
                name = f"{where}.lora_{which.upper()}.weight"
                yield Part(name, slot, which, index, one, adapter.rank, experts)


def save(model: CausalLM, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model's adapters for ``peft``, and for `load`. The folder must be new or empty, unless ``overwrite`` asks
    for what is in it to be replaced, other files staying; it appears whole or not at all. Raises ValueError where there
    are no adapters, merged ones, or only a part of them."""
    refuse_shapes(model)
    if model.merged is not None:
        raise ValueError("cannot save: the model's adapters are merged; lora.unmerge(model) first")
    adapters = [(slot, slot.adapter) for slot in adapted(model) if slot.adapter is not None]
    if not adapters:
        raise ValueError("cannot save: the model has no adapters; nnxmoe.save_pretrained writes whole models")
    _refuse_parts(model, adapters)
    numbers = {suffix(model, slot): (adapter.rank, adapter.alpha) for slot, adapter in adapters}
    settings = Settings.of(numbers, has_experts=any(slot.name == "router" for slot in slots(model)))
    base = None if model.load_report is None else model.load_report.source
    with shared_folder(folder, overwrite) as stage:
        if jax.process_index() == 0:
            write_json(stage / CONFIG_FILE, {**settings.fields, "base_model_name_or_path": base})
        shares = [(None, _tensors(model, adapters))]
        write_shares(stage, shares, 1 << 62, process=jax.process_index(), single=WEIGHTS_FILE)


def _refuse_parts(model: CausalLM, adapters: list[tuple[Slot, LoRA]]) -> None:
    """ValueError unless a projection has adapters in all of its layers, of one rank and alpha: else the file would be
    another adapter than the model's."""
    numbers = {slot.place: (adapter.rank, adapter.alpha) for slot, adapter in adapters}
    first = {slot.name: (slot, numbers[slot.place]) for slot, _ in reversed(adapters)}
    for slot in slots(model):
        if slot.name in first and (found := numbers.get(slot.place)) != first[slot.name][1]:
            what = "no adapter" if found is None else "one of rank {} and alpha {}".format(*found)
            other, both = first[slot.name]
            raise ValueError(
                f"cannot save: {slot.place} has {what}, {other.place} one of rank {both[0]} and alpha {both[1]}; "
                "an adapter is saved whole"
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
    """Whether it takes part in the scale of queries, see `DecoderConfig.query_pre_attn_scalar`."""
    return part.which == "b" and part.slot.key.startswith(QUERY)


def load(model: CausalLM, folder: str | os.PathLike[str], dtype: Any = None) -> None:
    """Give a model the adapters in a folder that `save` or ``peft`` wrote, in place, split over its mesh.

    ``dtype`` None: as stored. Raises ValueError for another kind of adapter, and one that lists every tensor that is
    missing, too much or of another shape than this model and the config's rank ask for; the model stays as it was.
    """
    refuse_second(model)
    kind, where = float_dtype(dtype), absolute(folder)
    settings, infos = Settings.read(where / CONFIG_FILE), read_header(where / WEIGHTS_FILE)
    adapters = _asked(model, settings, infos)
    parts = list(layout(model, adapters))
    _refuse_misfits(where, parts, infos)
    values: dict[tuple[str, str], list[np.ndarray]] = collections.defaultdict(list)
    query = Change(times=1 / model.config.folded()[1])
    for part in parts:
        one = part.read(_values(infos[part.name]))
        values[part.slot.place, part.which].append(query(one).astype(one.dtype) if _of_query(part) else one)
    for slot, adapter in adapters:
        for which, variable in (("a", adapter.a), ("b", adapter.b)):
            layers = values.pop((slot.place, which))
            host = layers[0] if slot.depth is None else np.stack(layers)
            variable.set_value(placed(host.astype(kind or host.dtype), model.strategy.sharding_of(variable)))
    for slot, adapter in adapters:
        slot.put(adapter)


def _asked(model: CausalLM, settings: Settings, infos: Mapping[str, TensorInfo]) -> list[tuple[Slot, LoRA]]:
    """Shapes of adapters for the slots that a file has tensors for, be it in one layer."""
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


def _refuse_misfits(where: Path, parts: list[Part], infos: Mapping[str, TensorInfo]) -> None:
    wanted, faults = {part.name: part for part in parts}, []
    for name, part in wanted.items():
        if name not in infos:
            faults.append(f"missing: {name}")
        elif infos[name].shape != part.shape:
            shapes = f"{list(infos[name].shape)}, the model and rank {part.rank} ask for {list(part.shape)}"
            faults.append(f"shape: {name} has {shapes}")
        elif infos[name].dtype not in _FLOATS:
            faults.append(f"dtype: {name} is {infos[name].dtype}, not one of {', '.join(_FLOATS)}")
    faults += [f"unexpected: {plain(name)}" for name in infos if name not in wanted]
    if faults or not parts:
        lines = "\n  ".join(faults or ["it has no tensors"])
        raise CheckpointError(f"the adapter in {where} is not one of this model:\n  {lines}")


def _values(info: TensorInfo) -> np.ndarray:
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        return np.frombuffer(file.read(info.nbytes), info.numpy_dtype).reshape(info.shape)


def placed(host: np.ndarray, place: Any) -> jax.Array:
    """An array where it belongs: on the default device where ``place`` is None."""
    return jnp.asarray(host) if place is None else jax.make_array_from_callback(host.shape, place, host.__getitem__)
