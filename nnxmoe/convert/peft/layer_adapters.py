"""Convert the adapters of single layers to and from PEFT's layout, and stack them for scanned layers."""

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
    """Tensor in a PEFT file with the ``a`` or ``b`` of one layer's adapter.

    Attributes:
        name: Name of the tensor.
        one: Shape of the layer's values in nnxmoe.
        rank: Rank of the adapter.
        experts: Number of experts, or 1.
        in_turn: Number of kernels with alternating outputs, or 1 if the kernels' outputs are consecutive.
        is_a: Whether the tensor is ``a`` instead of ``b``.
        times: Factor from values of ``b`` in nnxmoe to values in the file. For query projections, the factor on the
            queries from `DecoderConfig.fold_query_scale`, else 1.
    """

    name: str
    one: tuple[int, ...]
    rank: int
    experts: int
    in_turn: int
    is_a: bool
    times: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape in the file."""
        size, rows = math.prod(self.one), self.rank * self.experts
        return (rows, size // rows) if self.is_a else (size // rows, rows)

    def store(self, one: np.ndarray) -> np.ndarray:
        """Convert values from nnxmoe's layout to PEFT's layout."""
        if self.is_a:
            return one.reshape(self.shape)
        one = ValueChange(times=self.times)(one)
        flat_values = one.reshape(self.experts, self.in_turn, -1, self.rank).swapaxes(1, 2)
        flat_values = flat_values.reshape(self.experts, -1, self.rank)
        return np.ascontiguousarray(flat_values.transpose(1, 2, 0)).reshape(self.shape)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Convert values from PEFT's layout to nnxmoe's layout."""
        if self.is_a:
            return stored.reshape(self.one)
        values = stored.reshape(-1, self.in_turn, self.rank, self.experts).transpose(3, 1, 0, 2).reshape(self.one)
        return ValueChange(times=1 / self.times)(values).astype(values.dtype)


@dataclasses.dataclass(frozen=True)
class LayerAdapter:
    """Adapter of one layer.

    Attributes:
        slot: Slot in the model.
        layer: Index of the layer.
        numbers: Rank and alpha.
        module: Name of the module in PEFT's files.
    """

    slot: AdapterSlot
    layer: int
    numbers: Numbers
    module: str

    def stored(self, model: CausalLM) -> list[AdapterTensor]:
        """Return the tensors of ``a`` and ``b``."""
        slot, tensors = self.slot, []
        adapter = slot.shapes(*self.numbers, np.dtype(np.float32))
        first_row = options(family_of(model).hf_names(model.config), slot.key)[0]
        times = model.config.fold_query_scale()[1] if slot.key.startswith(QUERY) else 1.0
        for letter, variable in (("A", adapter.a), ("B", adapter.b)):
            suffix = f"lora_embedding_{letter}" if slot.name == "embed" else f"lora_{letter}.weight"
            name, layer_shape = f"base_model.model.{self.module}.{suffix}", variable.shape[slot.depth is not None :]
            experts = math.prod(ParamWeight(adapter.a).lead[slot.depth is not None :])
            in_turn = first_row.parts if first_row.alternate else 1
            tensors.append(AdapterTensor(name, layer_shape, self.numbers[0], experts, in_turn, letter == "A", times))
        return tensors


def parameter_name(model: CausalLM, slot: AdapterSlot, layer: int) -> str:
    """Return a slot's parameter name in transformers 5, such as ``model.layers.3.self_attn.q_proj.weight``."""
    if slot.name == "head":  # not the key, because a tied head has the key of the embedding
        return "lm_head.weight"
    name = in_transformers(family_of(model).hf_names(model.config), slot.key)
    return name.tensor(layer if slot.key.startswith("layer.") else None)


def layer_adapters(entries: Iterable[tuple[AdapterSlot, int, Numbers, str]]) -> list[LayerAdapter]:
    """Build a `LayerAdapter` for each (slot, layer, (rank, alpha), parameter name).

    If both slots of an experts module have an adapter, the first adapter is nested in the second as ``base_layer``.
    """
    entries = list(entries)
    counts, adapters = collections.Counter((slot.path, layer) for slot, layer, _, _ in entries), []
    for slot, layer, numbers, name in entries:
        is_nested = slot.name.startswith("experts.") and counts[slot.path, layer] > 1
        nested_suffix = ".base_layer" if is_nested and slot.attribute == next(iter(slot.owner.adapted)) else ""
        adapters.append(LayerAdapter(slot, layer, numbers, name.rpartition(".")[0] + nested_suffix))
    return adapters


@dataclasses.dataclass(frozen=True)
class AdapterValues:
    """Values of one layer's adapter: ``a [*E, rank, *ins]``, ``b [*E, *maps, *outs, rank]``, and (rank, alpha)."""

    a: np.ndarray
    b: np.ndarray
    numbers: Numbers


def stack_layers(slot: AdapterSlot, layers: Mapping[int, AdapterValues]) -> tuple[LoRA, np.ndarray, np.ndarray]:
    """Stack the adapters of all layers of a slot.

    In a scanned stack, layers without an adapter have zeros, and lower ranks are padded with zeros. If a layer's
    ``alpha / rank`` differs from the most common scale, the layer's ``b`` is multiplied by the ratio.

    Returns:
        Tuple of an abstract adapter (shapes only), and the values of ``a`` and ``b``.
    """
    numbers = {layer: values.numbers for layer, values in sorted(layers.items())}
    first_values = next(iter(layers.values()))
    if slot.depth is None:
        return slot.shapes(*first_values.numbers, first_values.a.dtype), first_values.a, first_values.b
    rank = max(rank for rank, _ in numbers.values())
    (scale, alpha), _ = collections.Counter((a / r, a * rank / r) for r, a in numbers.values()).most_common(1)[0]
    adapter = slot.shapes(rank, alpha, first_values.a.dtype)
    is_uniform = len(numbers) == slot.depth and len(set(numbers.values())) == 1
    adapter.layers = None if is_uniform else tuple(numbers.items())
    scaled_values = {
        layer: (values.a, scale_b(values.b, values.numbers[1] / values.numbers[0] / scale))
        for layer, values in layers.items()
    }
    host_arrays = []
    for index, variable in enumerate((adapter.a, adapter.b)):
        dtypes = {values[index].dtype for values in scaled_values.values()}
        host_arrays.append(np.zeros(variable.shape, dtypes.pop() if len(dtypes) == 1 else np.float32))
        for layer, values in scaled_values.items():
            host_arrays[-1][layer - slot.first][tuple(map(slice, values[index].shape))] = values[index]
    return adapter, host_arrays[0], host_arrays[1]


def scale_b(b: np.ndarray, factor: float) -> np.ndarray:
    """Multiply ``b`` by a factor. Unless the factor is a power of two, return float32 to avoid rounding."""
    if abs(factor - 1) < 1e-9:
        return b
    is_exact = math.frexp(factor)[0] == 0.5
    return (b.astype(np.float32) * np.float32(factor)).astype(b.dtype if is_exact else np.float32)
