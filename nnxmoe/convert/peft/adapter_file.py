"""Read an adapter's tensors, including transformers 4 files with one adapter per expert and projection."""

import collections
from pathlib import Path

import numpy as np

from nnxmoe.config.printable import plain
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import read_header
from nnxmoe.convert.peft.adapter_slots import AdapterSlot
from nnxmoe.convert.peft.layer_adapters import AdapterValues, scale_b
from nnxmoe.convert.peft.peft_config import Settings
from nnxmoe.convert.storage.find_checkpoint import WRAPPERS, normalize_prefixes
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import options
from nnxmoe.models import family_of

WEIGHTS_FILE = "adapter_model.safetensors"
_OUTSIDE = "base_model.model."  # PEFT's prefix of the base model's names
_FLOATS = ("F32", "BF16", "F16")


class AdapterFile:
    """Tensors of a folder's ``adapter_model.safetensors``.

    Attributes:
        folder: Folder of the adapter.
        faults: Messages about tensors that are missing or do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / WEIGHTS_FILE
        self.faults: list[str] = []
        if not path.is_file() and (pickled := path.with_name("adapter_model.bin")).is_file():
            raise CheckpointError(
                f"{pickled} is pickled, which is not supported: convert it to safetensors with peft's "
                "PeftModel.from_pretrained(…).save_pretrained(…)"
            )
        header = read_header(path)
        inside = {name.removeprefix(_OUTSIDE): info for name, info in header.items() if name.startswith(_OUTSIDE)}
        self._infos = {name: info for name, info in header.items() if not name.startswith(_OUTSIDE)}
        self._infos |= {_OUTSIDE + name: info for name, info in normalize_prefixes(inside).items()}
        self._before = next((old for old in WRAPPERS if any(name.startswith(old) for name in inside)), "model.")
        self._unread = set(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def in_base(self, name: str) -> str:
        """Return the name of a module or parameter in the adapter's base model. The base model may be multimodal."""
        return self._before + name.removeprefix("model.") if name.startswith("model.") else name

    def skip(self, name: str) -> None:
        """Mark a tensor as read."""
        self._unread.discard(name)

    def take(self, name: str, shape: tuple[int, ...], rank: int | None = None) -> np.ndarray:
        """Return the values of a tensor.

        If the tensor is missing or has a wrong shape or dtype, add a message to ``faults`` and return zeros.
        """
        info = self._infos.get(name)
        if info is None:
            self.faults.append(f"missing: {name}")
            return np.zeros(shape, np.float32)
        self._unread.discard(name)
        if info.shape != shape:
            why = "the model requires" if rank is None else f"the model and rank {rank} require"
            self.faults.append(f"shape: {name} has {list(info.shape)}, {why} {list(shape)}")
        elif info.dtype not in _FLOATS:
            self.faults.append(f"dtype: {name} is {info.dtype}, not one of {', '.join(_FLOATS)}")
        else:
            with open(info.file, "rb") as file:
                file.seek(info.begin)
                return np.frombuffer(file.read(info.nbytes), info.numpy_dtype).reshape(shape)
        return np.zeros(shape, np.float32)

    def check(self) -> None:
        """Raise CheckpointError if there are faults or unread tensors, or if the file is empty."""
        faults = self.faults + [f"unexpected: {plain(name)}" for name in self._infos if name in self._unread]
        if faults or not self._infos:
            lines = "\n  ".join(faults or ["it has no tensors"])
            raise CheckpointError(f"the adapter in {self.folder} does not fit this model:\n  {lines}")


def read_expert_adapters(
    model: CausalLM, slot: AdapterSlot, layer: int, settings: Settings, file: AdapterFile
) -> AdapterValues | None:
    """Combine a layer's adapters per expert into a single adapter. Returns None if the file has no such adapters.

    The rank of the result is the sum of the ranks of gate and up. Each projection has its own rows of ``a``, and ``b``
    is zero for the other rows. The values of experts without an adapter are zero.
    """
    (lead, (ins,), (outs,)), _ = slot.dimensions
    found: dict[tuple[int, int], tuple[str, tuple[int, float]]] = {}
    for number, kernel in enumerate(slot.kernels):
        for w in options(family_of(model).hf_names(model.config), slot.key.rpartition(".")[0] + "." + kernel):
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
        high = scale_b(high, alpha / rank / scale)
        kinds |= {low.dtype, high.dtype}
        a[expert, own] = low
        (b[expert, number] if maps else b[expert])[..., own] = high
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    return AdapterValues(a.astype(kind), b.astype(kind), (total, scale * total))
