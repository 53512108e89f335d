"""The adapters of single layers: where PEFT stores them, in which layout, and how they form the adapters of stacks."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from nnxmoe.convert.arrays.array_layout import QUERY, ValueChange
from nnxmoe.convert.peft.adapter_slots import AdapterSlot
from nnxmoe.convert.peft.peft_config import Numbers
from nnxmoe.layers.linear.kernel import ParamWeight
from nnxmoe.layers.linear.lora import LoRA
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import in_transformers, options
from nnxmoe.models import family_of


@dataclasses.dataclass(frozen=True)
class AdapterTensor:
    """The tensor of one layer's ``a`` or ``b`` in a file."""

    name: str
    one: tuple[int, ...]  # the shape of one layer here
    rank: int
    experts: int
    in_turn: int  # of how many kernels the outputs alternate; 1: they follow each other
    is_a: bool
    times: float  # of values in the file; `DecoderConfig.query_pre_attn_scalar` for queries, else 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in the file."""
        size, rows = math.prod(self.one), self.rank * self.experts
        return (rows, size // rows) if self.is_a else (size // rows, rows)

    def store(self, one: np.ndarray) -> np.ndarray:
        """Convert values to the layout of PEFT."""
        if self.is_a:
            return one.reshape(self.shape)
        one = ValueChange(times=self.times)(one)
        flat = one.reshape(self.experts, self.in_turn, -1, self.rank).swapaxes(1, 2)
        flat = flat.reshape(self.experts, -1, self.rank)
        return np.ascontiguousarray(flat.transpose(1, 2, 0)).reshape(self.shape)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Values from PEFT's layout."""
        if self.is_a:
            return stored.reshape(self.one)
        one = stored.reshape(-1, self.in_turn, self.rank, self.experts).transpose(3, 1, 0, 2).reshape(self.one)
        return ValueChange(times=1 / self.times)(one).astype(one.dtype)


@dataclasses.dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer: its place in the model, and its module in PEFT's files."""

    slot: AdapterSlot
    layer: int
    numbers: Numbers  # (rank, alpha)
    module: str

    def stored(self, model: CausalLM) -> list[AdapterTensor]:
        """The tensors of ``a`` and ``b``."""
        slot, found = self.slot, []
        made = slot.shapes(*self.numbers, np.dtype(np.float32))
        first = options(family_of(model).hf_names(model.config), slot.key)[0]
        times = model.config.folded()[1] if slot.key.startswith(QUERY) else 1.0
        for letter, variable in (("A", made.a), ("B", made.b)):
            kind = f"lora_embedding_{letter}" if slot.name == "embed" else f"lora_{letter}.weight"
            name, one = f"base_model.model.{self.module}.{kind}", variable.shape[slot.depth is not None :]
            experts = math.prod(ParamWeight(made.a).lead[slot.depth is not None :])
            in_turn = first.parts if first.alternate else 1
            found.append(AdapterTensor(name, one, self.numbers[0], experts, in_turn, letter == "A", times))
        return found


def parameter_name(model: CausalLM, slot: AdapterSlot, layer: int) -> str:
    """The parameter name in transformers 5 of a slot's kernels: ``model.layers.3.self_attn.q_proj.weight``."""
    if slot.name == "head":  # of a tied head too, which has the key of the embedding
        return "lm_head.weight"
    name = in_transformers(family_of(model).hf_names(model.config), slot.key)
    return name.tensor(layer if slot.key.startswith("layer.") else None)


def layer_adapters(found: Iterable[tuple[AdapterSlot, int, Numbers, str]]) -> list[LayerAdapter]:
    """The pieces of adapters given with their layers, numbers and parameters: two of one module are nested."""
    found = list(found)
    together, made = collections.Counter((slot.path, layer) for slot, layer, _, _ in found), []
    for slot, layer, numbers, name in found:
        nested = slot.name.startswith("experts.") and together[slot.path, layer] > 1
        inner = ".base_layer" if nested and slot.attribute == next(iter(slot.owner.adapted)) else ""
        made.append(LayerAdapter(slot, layer, numbers, name.rpartition(".")[0] + inner))
    return made


@dataclasses.dataclass(frozen=True)
class AdapterValues:
    """The values of one layer's adapter: ``a [*E, rank, *ins]``, ``b [*E, *maps, *outs, rank]``."""

    a: np.ndarray
    b: np.ndarray
    numbers: Numbers


def stack_layers(slot: AdapterSlot, layers: Mapping[int, AdapterValues]) -> tuple[LoRA, np.ndarray, np.ndarray]:
    """An adapter without values and its values, of all layers of a slot.

    In a stack, layers without an adapter get zeros, lower ranks are padded with zeros, and ``b`` is multiplied where
    ``alpha / rank`` differs from the scale of most layers.
    """
    numbers = {layer: one.numbers for layer, one in sorted(layers.items())}
    first = next(iter(layers.values()))
    if slot.depth is None:
        return slot.shapes(*first.numbers, first.a.dtype), first.a, first.b
    rank = max(rank for rank, _ in numbers.values())
    (scale, alpha), _ = collections.Counter((a / r, a * rank / r) for r, a in numbers.values()).most_common(1)[0]
    made = slot.shapes(rank, alpha, first.a.dtype)
    same = len(numbers) == slot.depth and len(set(numbers.values())) == 1
    made.layers = None if same else tuple(numbers.items())
    each = {layer: (one.a, scale_b(one.b, one.numbers[1] / one.numbers[0] / scale)) for layer, one in layers.items()}
    host = []
    for which, variable in enumerate((made.a, made.b)):
        kinds = {values[which].dtype for values in each.values()}
        host.append(np.zeros(variable.shape, kinds.pop() if len(kinds) == 1 else np.float32))
        for layer, values in each.items():
            host[-1][layer - slot.first][tuple(map(slice, values[which].shape))] = values[which]
    return made, host[0], host[1]


def scale_b(b: np.ndarray, times: float) -> np.ndarray:
    """``b`` times a number, in float32 where its own dtype would round."""
    if abs(times - 1) < 1e-9:
        return b
    exact = math.frexp(times)[0] == 0.5
    return (b.astype(np.float32) * np.float32(times)).astype(b.dtype if exact else np.float32)
