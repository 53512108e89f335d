"""A model family: its model class, its presets, and the names of its weights in checkpoints of other libraries."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import Table, W

# For each layer: its group in MaxText's tree, and the dimensions on which the layers of that group are stacked.
Places = list[tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """MaxText's groups of equal layers: the dense layers and the layers with experts. Both may have one name."""

    dense: str = "layers"
    sparse: str = "layers"

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """Return the place of each layer, below ``decoder/``. ``sparse``: whether each layer has experts."""
        groups = [self.sparse if has else self.dense for has in sparse]
        if scan:
            return [(group, (groups.count(group),)) for group in groups]
        return [(f"{group}_{i - groups.index(group)}", ()) for i, group in enumerate(groups)]


@dataclasses.dataclass(frozen=True)
class LayerBlocks:
    """MaxText's repeated blocks of layers of different types.

    Scanned layers with the same number in their blocks form a group.

    Attributes:
        layer_types: The types of the layers in a block, as `MaxTextNames.layer_types` has them.
        name: The name of a group, in which ``{}`` is the number of the layer in its block.
        nested: The last layers of the blocks form the group ``global_layer`` below ``name``. The other layers form
            ``local_layers``, stacked by block and then by number.
        first: The number of layers before the blocks.
    """

    layer_types: Sequence[str]
    name: str = "layers/layers_{}"
    nested: bool = False
    first: int = 0

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """Return the place of each layer, below ``decoder/``. ``sparse``: one value per layer."""
        unscanned: Places = [(f"layers_{i}", ()) for i in range(len(sparse))]
        if not scan:
            return unscanned
        count = len(sparse) - self.first
        return unscanned[: self.first] + [self._scanned(i, count // len(self.layer_types)) for i in range(count)]

    def _scanned(self, i: int, blocks: int) -> tuple[str, tuple[int, ...]]:
        length = len(self.layer_types)
        if not self.nested:
            return self.name.format(i % length), (blocks,)
        if (i + 1) % length:
            return f"{self.name}/local_layers", (blocks, length - 1)
        return f"{self.name}/global_layer", (blocks,)


@dataclasses.dataclass(frozen=True)
class MaxTextNames:
    """The names of a family's parameters in MaxText. A family whose names depend on the config overrides methods.

    Attributes:
        table: Key of a parameter -> `nnxmoe.convert.maxtext.maxtext_layout.MaxTextRow`. Empty if MaxText lacks the
            family.
        groups: The groups of layers, if they are the same for all configs.
        scales_embeddings: Whether MaxText multiplies the embedding table by sqrt(hidden_size).
    """

    table: dict[str, tuple[Any, ...]]
    groups: LayerGroups | LayerBlocks = LayerGroups()
    scales_embeddings: bool = False

    def layers(self, config: Any) -> LayerGroups | LayerBlocks:
        """Return the groups of layers."""
        return self.groups

    def layer_types(self, config: Any) -> Sequence[str]:
        """Return the type of each layer, as `LayerBlocks` lists them."""
        return ["global" if window is None else "local" for window in config.windows]

    def columns(self, config: Any) -> Mapping[str, tuple[int, ...]]:
        """Map parameters that share an array of MaxText to its columns that hold the outputs of each parameter."""
        return {}

    def streams(self, config: Any) -> int:
        """Return the number of residual streams whose weights are separate arrays in MaxText; 0 without streams."""
        return 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """A model class with its presets and the names of its weights in files; `nnxmoe.models.register` takes one.

    Attributes:
        model: The model class. Its ``configs`` are the configs of the family.
        hf: Key of a parameter -> its tensor in Hugging Face checkpoints.
        hf_of_config: Rows of that table that depend on the config.
        hf_root: The prefix of tensor names in saved checkpoints, in place of ``model.``.
        maxtext: The names in MaxText.
        mtp_prefixes: Prefixes of tensors in prediction layers: of tensors that only these layers have, and of the
            others. Empty: prediction layers are numbered after the other layers.
        peft_excluded: Projections for which PEFT has no adapters.
        presets: Name -> config of a published checkpoint.
        hub_ids: Name of a preset -> its checkpoint on the hub.
        checkpoint_notes: Name of a preset -> how its files differ from what is loaded.
    """

    model: type[CausalLM]
    hf: dict[str, W | tuple[W, ...]]
    hf_of_config: Callable[[Any], Table] | None = None
    hf_root: str = "model."
    maxtext: MaxTextNames = MaxTextNames({})
    mtp_prefixes: tuple[str, ...] = ()
    peft_excluded: tuple[str, ...] = ()
    presets: Mapping[str, DecoderConfig] = dataclasses.field(default_factory=dict)
    hub_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checkpoint_notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def configs(self) -> tuple[type[DecoderConfig], ...]:
        """The config classes, with different ``model_type``."""
        return self.model.configs

    def hf_names(self, config: Any) -> Table:
        """Return ``hf`` with the rows that depend on the config."""
        return self.hf if self.hf_of_config is None else {**self.hf, **self.hf_of_config(config)}


def row_missing(family: Family, key: str) -> str:
    """Return the error text for a parameter without a tensor name."""
    return (
        f"{family.model.__name__}: the parameter {key} has no row in hf, so that no checkpoint can hold it: add "
        f'"{key}": W("its name in a layer")'
    )
