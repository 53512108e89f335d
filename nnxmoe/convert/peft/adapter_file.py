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
        if not path.is_file() and (pickle_file := path.with_name("adapter_model.bin")).is_file():
            raise CheckpointError(
                f"{pickle_file} is pickled, which is not supported: convert it to safetensors with peft's "
                "PeftModel.from_pretrained(…).save_pretrained(…)"
            )
        header = read_header(path)
        base_infos = {name.removeprefix(_OUTSIDE): info for name, info in header.items() if name.startswith(_OUTSIDE)}
        self._infos = {name: info for name, info in header.items() if not name.startswith(_OUTSIDE)}
        self._infos |= {_OUTSIDE + name: info for name, info in normalize_prefixes(base_infos).items()}
        self._before = next(
            (wrapper for wrapper in WRAPPERS if any(name.startswith(wrapper) for name in base_infos)), "model."
        )
        self._unread = set(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def in_base(self, name: str) -> str:
        """Return the name of a module or parameter in the adapter's base model, which may be multimodal."""
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
            requirement = "the model requires" if rank is None else f"the model and rank {rank} require"
            self.faults.append(f"shape: {name} has {list(info.shape)}, {requirement} {list(shape)}")
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
    """Combine the per-expert adapters of a layer into a single adapter. Returns `None` if there are none.

    The rank of the result is the sum of the ranks of gate and up. Each projection uses separate rows of ``a``, and
    ``b`` is zero for the rows of the other projection. The values of experts without an adapter are zero.
    """
    (leading_sizes, (ins,), (outs,)), _ = slot.dimensions
    adapters: dict[tuple[int, int], tuple[str, tuple[int, float]]] = {}
    for number, kernel in enumerate(slot.kernels):
        for w in options(family_of(model).hf_names(model.config), slot.key.rpartition(".")[0] + "." + kernel):
            for expert in range(leading_sizes[-1]) if w.per_expert else ():
                module = w.tensor(layer, expert).removesuffix(".weight")
                prefix = f"base_model.model.{module}.lora_"
                if f"{prefix}A.weight" in file and settings.has_module(target := file.in_base(module)):
                    adapters[number, expert] = prefix, settings.numbers(target)
    if not adapters:
        return None
    ranks = [
        max((r for (i, _), (_, (r, _)) in adapters.items() if i == n), default=0) for n in range(len(slot.kernels))
    ]
    scale = collections.Counter(alpha / rank for _, (rank, alpha) in adapters.values()).most_common(1)[0][0]
    total_rank, kernel_sizes = sum(ranks), (len(ranks),) if len(ranks) > 1 else ()
    a = np.zeros((leading_sizes[-1], total_rank, ins), np.float32)
    b = np.zeros((leading_sizes[-1], *kernel_sizes, outs, total_rank), np.float32)
    dtypes = set()
    for (number, expert), (prefix, (rank, alpha)) in adapters.items():
        target = slice(first_rank := sum(ranks[:number]), first_rank + rank)
        a_values, b_values = (
            file.take(f"{prefix}A.weight", (rank, ins), rank),
            file.take(f"{prefix}B.weight", (outs, rank), rank),
        )
        b_values = scale_b(b_values, alpha / rank / scale)
        dtypes |= {a_values.dtype, b_values.dtype}
        a[expert, target] = a_values
        (b[expert, number] if kernel_sizes else b[expert])[..., target] = b_values
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    return AdapterValues(a.astype(dtype), b.astype(dtype), (total_rank, scale * total_rank))
