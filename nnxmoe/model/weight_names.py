"""Hugging Face weight names used in the model families' conversion tables."""

import dataclasses
import re
from collections.abc import Mapping

LAYERS = "model.layers"
_LAYER = re.compile(re.escape(LAYERS) + r"\.([0-9]{1,9})\.")


@dataclasses.dataclass(frozen=True)
class W:
    """Name of the checkpoint tensor, or part of a tensor, that stores a parameter.

    The tensor is a kernel ``[outs, ins]`` or a vector ``[outs]``. A tensor of all experts has a leading expert axis.
    For a key ``layer.…``, the name is relative to the layer: it follows ``model.layers.N.``.

        W("self_attn.q_proj.weight")                   a tensor
        W("mlp.experts").each("up_proj.weight")        one tensor per expert: mlp.experts.0.up_proj.weight, …
        W("mlp.experts.gate_up_proj").rows(1, 2)       the second half of a tensor's outputs
        W("attention.qkv.weight").rows(0, 6, 4)        the first four sixths of a tensor's outputs
        W("mlp.router.linear.weight").files_only       a tensor with a different name in transformers' model
        W("mlp.experts.gate_up_proj").T.every(0, 2)    every second output of a tensor with inputs before outputs
        W("ngram_embedding.weight").sharded(128)       tensors of consecutive rows: ngram_embedding.shard_0.weight, …
    """

    name: str
    per_expert: str = ""  # suffix of the name after the expert's index
    part: int = 0
    parts: int = 1
    span: int = 1  # Number of consecutive parts.
    alternate: bool = False  # Whether the outputs of the parts are interleaved.
    transposed: bool = False  # Whether the tensor is stored as [ins, outs].
    is_files_only: bool = False  # Whether transformers' model uses a different name for the parameter.
    max_shards: int = 0  # Maximum number of tensors that store the rows of the parameter. 0 for a single tensor.

    def each(self, name: str) -> "W":
        """Return the names of one tensor per expert. ``name`` follows the index of the expert."""
        return dataclasses.replace(self, per_expert=name)

    def rows(self, part: int, parts: int, span: int = 1) -> "W":
        """Divide the outputs into ``parts`` equal ranges and select ``span`` ranges, starting at index ``part``."""
        return dataclasses.replace(self, part=part, parts=parts, span=span)

    def every(self, part: int, parts: int) -> "W":
        """Select the outputs ``part``, ``part + parts``, …"""
        return dataclasses.replace(self, part=part, parts=parts, alternate=True)

    def sharded(self, max_shards: int) -> "W":
        """Return the name of a tensor whose rows are stored in up to ``max_shards`` tensors."""
        return dataclasses.replace(self, max_shards=max_shards)

    @property
    def T(self) -> "W":
        """Copy of the name for a tensor that is stored with inputs before outputs, ``[ins, outs]``."""
        return dataclasses.replace(self, transposed=True)

    @property
    def files_only(self) -> "W":
        """Copy of the name that `in_transformers` skips, because transformers' model uses a different name."""
        return dataclasses.replace(self, is_files_only=True)

    @property
    def whole(self) -> bool:
        """Whether the parameter, or its slice for one expert, is the complete tensor without transposition."""
        return self.parts == 1 and not self.transposed

    def tensor(self, layer: int | None, expert: int | str | None = None) -> str:
        """Return the tensor's name in a checkpoint. ``layer`` is None for tensors outside of the layers."""
        return self.under(prefix_of(layer), expert)

    def under(self, prefix: str, expert: int | str | None = None) -> str:
        """Return the tensor's name with a prefix such as ``mtp.layers.0.``."""
        return prefix + (f"{self.name}.{expert}.{self.per_expert}" if self.per_expert else self.name)

    def label(self, tensor: str) -> str:
        """Return a label for the part of ``tensor``.

        Examples: ``….gate_up_proj.T[0::2]``, ``….gate_up_proj[0/2]`` and ``….qkv[0+4/6]``.
        """
        separator = "::" if self.alternate else f"+{self.span}/" if self.span > 1 else "/"
        rows = f"[{self.part}{separator}{self.parts}]" if self.parts > 1 else ""
        return tensor + ".T" * self.transposed + rows


# Key of a parameter -> its tensor, or a tuple of alternatives. Saving writes the first alternative.
Table = Mapping[str, W | tuple[W, ...]]


def options(table: Table, key: str) -> tuple[W, ...]:
    """Return the alternative tensors of a key."""
    row = table[key]
    return (row,) if isinstance(row, W) else row


def in_transformers(table: Table, key: str) -> W:
    """Return the name of a parameter in transformers 5 and of its adapters in PEFT.

    This is the last alternative that is neither a tensor per expert nor `W.files_only`.
    """
    return [w for w in options(table, key) if not w.per_expert and not w.is_files_only][-1]


def prefix_of(layer: int | None) -> str:
    """Return the name prefix of a layer's tensors, or "" if ``layer`` is None."""
    return "" if layer is None else f"{LAYERS}.{layer}."


def layer_of(name: str) -> tuple[int | None, str]:
    """Split a tensor's name into its layer index and the rest. The index is None outside of the layers."""
    match = _LAYER.match(name)
    return (int(match[1]), name[match.end() :]) if match else (None, name)
