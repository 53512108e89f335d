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
    """Blocks of layers repeat; ``local``: for each layer of a block, whether it is recurrent or has a window.

    Scanned, the layers with the same number in their blocks form a group, called ``name``, in which ``{}`` is the
    number. ``nested``: the last layers of the blocks form the group ``global_layer`` below ``name``, and the others
    ``local_layers``, stacked by block and then by number.
    """

    local: Sequence[bool]
    name: str = "layers/layers_{}"
    nested: bool = False

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """The place of each layer, below ``decoder/``; ``sparse``: one value for each layer."""
        length, blocks = len(self.local), len(sparse) // len(self.local)
        if not scan:
            return [(f"layers_{i}", ()) for i in range(len(sparse))]
        if not self.nested:
            return [(self.name.format(i % length), (blocks,)) for i in range(len(sparse))]
        inner, last = (f"{self.name}/local_layers", (blocks, length - 1)), (f"{self.name}/global_layer", (blocks,))
        return [inner if (i + 1) % length else last for i in range(len(sparse))]
