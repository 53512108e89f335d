"""Where MaxText's layout has the layers of a model: each family's class has one of these objects."""

from collections.abc import Sequence
from dataclasses import dataclass

# For each layer: the group that it belongs to, and the dimensions on which the layers of that group are stacked.
Places = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class LayerGroups:
    """The dense layers form one group and those with experts another, or all the same; layers of a group are equal."""

    dense: str = "layers"
    sparse: str = "layers"

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """The place of each layer, below ``decoder/``; ``sparse``: for each, whether it has experts."""
        groups = [self.sparse if has else self.dense for has in sparse]
        if scan:
            return [(group, (groups.count(group),)) for group in groups]
        return [(f"{group}_{i - groups.index(group)}", ()) for i, group in enumerate(groups)]


@dataclass(frozen=True)
class LayerBlocks:
    """After the ``first`` layers, blocks of layers of these ``kinds`` repeat (`CausalLM.maxtext_kinds`).

    Scanned, the layers with the same number in their blocks form a group, called ``name``, in which ``{}`` is the
    number. ``nested``: the last layers of the blocks form the group ``global_layer`` below ``name``, and the others
    ``local_layers``, stacked by block and then by number.
    """

    kinds: Sequence[str]
    name: str = "layers/layers_{}"
    nested: bool = False
    first: int = 0

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """The place of each layer, below ``decoder/``; ``sparse``: one value for each layer."""
        each: Places = [(f"layers_{i}", ()) for i in range(len(sparse))]
        rest = len(each) - self.first if scan else 0
        return each[: len(each) - rest] + [self._scanned(i, rest // len(self.kinds)) for i in range(rest)]

    def _scanned(self, i: int, blocks: int) -> tuple[str, tuple[int, ...]]:
        length = len(self.kinds)
        if not self.nested:
            return self.name.format(i % length), (blocks,)
        if (i + 1) % length:
            return f"{self.name}/local_layers", (blocks, length - 1)
        return f"{self.name}/global_layer", (blocks,)
