"""Names of weights in Hugging Face checkpoints: the typed values in the table of a family."""

import dataclasses
import re
from collections.abc import Mapping

LAYERS = "model.layers"
_LAYER = re.compile(re.escape(LAYERS) + r"\.([0-9]{1,9})\.")


@dataclasses.dataclass(frozen=True)
class W:
    """The tensor, or the part of a tensor, that holds a parameter: a kernel ``[outs, ins]`` or a vector ``[outs]``, of
    experts with the dimension of all experts before them.

        W("self_attn.q_proj.weight")                   a tensor
        W("mlp.experts").each("up_proj.weight")        a tensor per expert: mlp.experts.0.up_proj.weight, …
        W("mlp.experts.gate_up_proj").rows(1, 2)       the second half of a tensor's outputs
        W("attention.qkv.weight").rows(0, 6, 4)        the first four sixths of them
        W("mlp.router.linear.weight").files_only         a tensor that only files have, not the model in transformers
        W("mlp.experts.gate_up_proj").T.every(0, 2)    every second output of a tensor with inputs before outputs

    Names are relative to the layer: for a key ``layer.…`` they follow ``model.layers.N.``.
    """

    name: str
    per_expert: str = ""  # the end of the name, after the number of the expert
    part: int = 0
    parts: int = 1
    span: int = 1  # of these parts
    alternate: bool = False  # whether the outputs of the parts alternate
    transposed: bool = False  # whether the tensor has inputs before outputs
    is_files_only: bool = False  # whether the model in transformers has the parameter under another name

    def each(self, name: str) -> "W":
        """Return the names of one tensor per expert."""
        return dataclasses.replace(self, per_expert=name)

    def rows(self, part: int, parts: int, span: int = 1) -> "W":
        """Select one of ``parts`` equal ranges of outputs, or ``span`` ranges from number ``part`` on."""
        return dataclasses.replace(self, part=part, parts=parts, span=span)

    def every(self, part: int, parts: int) -> "W":
        """Select the outputs ``part``, ``part + parts``, …"""
        return dataclasses.replace(self, part=part, parts=parts, alternate=True)

    @property
    def T(self) -> "W":
        """Return the name of a tensor with inputs before outputs."""
        return dataclasses.replace(self, transposed=True)

    @property
    def files_only(self) -> "W":
        """Return the name of a tensor that only files have; see `in_transformers`."""
        return dataclasses.replace(self, is_files_only=True)

    @property
    def whole(self) -> bool:
        """Whether the whole tensor is the parameter, or the parameter of one expert."""
        return self.parts == 1 and not self.transposed

    def tensor(self, layer: int | None, expert: int | str | None = None) -> str:
        """Return the name of the tensor in a checkpoint. ``layer`` is None outside of the layers."""
        return self.under(prefix_of(layer), expert)

    def under(self, prefix: str, expert: int | str | None = None) -> str:
        """Return the name of the tensor after a prefix, such as ``mtp.layers.0.``."""
        return prefix + (f"{self.name}.{expert}.{self.per_expert}" if self.per_expert else self.name)

    def label(self, tensor: str) -> str:
        """Label the part of a tensor: ``….gate_up_proj.T[0::2]``, ``….gate_up_proj[0/2]`` or ``….qkv[0+4/6]``."""
        between = "::" if self.alternate else f"+{self.span}/" if self.span > 1 else "/"
        rows = f"[{self.part}{between}{self.parts}]" if self.parts > 1 else ""
        return tensor + ".T" * self.transposed + rows


Table = Mapping[str, W | tuple[W, ...]]  # key of a parameter -> where it is, or alternatives: the first is written


def options(table: Table, key: str) -> tuple[W, ...]:
    """Return the alternatives in the row of a key."""
    row = table[key]
    return (row,) if isinstance(row, W) else row


def in_transformers(table: Table, key: str) -> W:
    """Return the name that a parameter has in transformers 5, and its adapters in PEFT.

    It is the last alternative that is neither a tensor per expert nor `W.files_only`.
    """
    return [w for w in options(table, key) if not w.per_expert and not w.is_files_only][-1]


def prefix_of(layer: int | None) -> str:
    """Return the prefix of the names of a layer's tensors; empty outside of the layers."""
    return "" if layer is None else f"{LAYERS}.{layer}."


def layer_of(name: str) -> tuple[int | None, str]:
    """Split a tensor's name into the number of its layer, None outside of the layers, and the rest."""
    match = _LAYER.match(name)
    return (int(match[1]), name[match.end() :]) if match else (None, name)
