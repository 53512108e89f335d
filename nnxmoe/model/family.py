"""Model families: model class, presets, and the names of weights in Hugging Face and MaxText checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import Table, W

# Per layer: its group in MaxText's parameter tree, and the sizes of the group's stacking axes.
Places = list[tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """MaxText's group names for dense layers and for layers with experts. Both groups may have the same name."""

    dense: str = "layers"
    sparse: str = "layers"

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """Return each layer's group below ``decoder/``, and the sizes of the group's stacking axes.

        Args:
            sparse: Whether each layer has experts.
            scan: Whether MaxText stacks the layers (``scan_layers``).
        """
        groups = [self.sparse if has_experts else self.dense for has_experts in sparse]
        if scan:
            return [(group, (groups.count(group),)) for group in groups]
        return [(f"{group}_{i - groups.index(group)}", ()) for i, group in enumerate(groups)]


@dataclasses.dataclass(frozen=True)
class LayerBlocks:
    """MaxText's groups for models with repeated blocks of different layer types.

    Scanned layers with the same index in their blocks form a group.

    Attributes:
        layer_types: Types of the layers in a block, as `MaxTextNames.layer_types` returns them.
        name: Name of a group. ``{}`` stands for the layer's index in its block.
        nested: Whether the last layer of each block is in the group ``global_layer`` below ``name``. The other layers
            are then in ``local_layers``, stacked by block and by index.
        first: Number of layers before the blocks.
    """

    layer_types: Sequence[str]
    name: str = "layers/layers_{}"
    nested: bool = False
    first: int = 0

    def places(self, sparse: Sequence[bool], scan: bool) -> Places:
        """Return groups and layer axes like `LayerGroups.places`. Only the length of ``sparse`` is used."""
        layer_places: Places = [(f"layers_{i}", ()) for i in range(len(sparse))]
        if not scan:
            return layer_places
        num_layers = len(sparse) - self.first
        return layer_places[: self.first] + [
            self._scanned(i, num_layers // len(self.layer_types)) for i in range(num_layers)
        ]

    def _scanned(self, i: int, num_blocks: int) -> tuple[str, tuple[int, ...]]:
        block_size = len(self.layer_types)
        if not self.nested:
            return self.name.format(i % block_size), (num_blocks,)
        if (i + 1) % block_size:
            return f"{self.name}/local_layers", (num_blocks, block_size - 1)
        return f"{self.name}/global_layer", (num_blocks,)


@dataclasses.dataclass(frozen=True)
class MaxTextNames:
    """Names of a family's parameters in MaxText. Subclasses override the methods if names depend on the config.

    Attributes:
        table: Key of a parameter -> `nnxmoe.convert.maxtext.layout.MaxTextRow`. Empty if MaxText does not
            support the family.
        groups: Groups of layers, if they are the same for all configs.
        scales_embeddings: Whether MaxText multiplies the embedding table by sqrt(hidden_size).
    """

    table: dict[str, tuple[Any, ...]]
    groups: LayerGroups | LayerBlocks = LayerGroups()
    scales_embeddings: bool = False

    def layers(self, config: Any) -> LayerGroups | LayerBlocks:
        """Return the groups of layers."""
        return self.groups

    def layer_types(self, config: Any) -> Sequence[str]:
        """Return the type of each layer. `LayerBlocks.layer_types` uses the same names."""
        return ["global" if window is None else "local" for window in config.windows]

    def columns(self, config: Any) -> Mapping[str, tuple[int, ...]]:
        """Return the columns, by parameter key, of parameters that share an array in MaxText.

        The columns contain the parameter's outputs.
        """
        return {}

    def streams(self, config: Any) -> int:
        """Return the number of residual streams with separate weight arrays in MaxText, or 0."""
        return 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """A model class with the names of its weights in files. Pass it to `nnxmoe.models.register`.

    Presets of the families in nnxmoe are in ``models/presets.json``. A custom family passes its presets.

    Attributes:
        model: The model class. Its ``configs`` are the config classes of the family.
        hf: Key of a parameter -> its tensor in Hugging Face checkpoints.
        hf_of_config: Function that returns the rows of ``hf`` that depend on the config.
        constants: Function that returns the int64 vectors in Hugging Face checkpoints whose values follow from the
            config, by tensor name.
        hf_root: Prefix of tensor names in saved checkpoints, in place of ``model.``.
        maxtext: Names in MaxText.
        mtp_prefixes: Two prefixes of tensors in prediction layers. The first is for tensors that only prediction layers
            have, the second for all other tensors. ``{}`` is the index of the prediction layer. If empty, prediction
            layers are numbered after the main layers.
        peft_excluded: Projections without adapters in PEFT.
        presets: Name -> config of a published checkpoint.
        hub_ids: Name of a preset -> its checkpoint on the Hugging Face Hub.
        checkpoint_notes: Name of a preset -> differences between its files and the loaded model.
    """

    model: type[CausalLM]
    hf: dict[str, W | tuple[W, ...]]
    hf_of_config: Callable[[Any], Table] | None = None
    constants: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}
    hf_root: str = "model."
    maxtext: MaxTextNames = MaxTextNames({})
    mtp_prefixes: tuple[str, ...] = ()
    peft_excluded: tuple[str, ...] = ()
    presets: Mapping[str, DecoderConfig] = dataclasses.field(default_factory=dict)
    hub_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checkpoint_notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def configs(self) -> tuple[type[DecoderConfig], ...]:
        """The config classes. Each has a different ``model_type``."""
        return self.model.configs

    def hf_names(self, config: Any) -> Table:
        """Return the name table ``hf`` extended with the rows that ``hf_of_config`` returns for this config."""
        return self.hf if self.hf_of_config is None else {**self.hf, **self.hf_of_config(config)}


def row_missing(family: Family, key: str) -> str:
    """Return the error message for a parameter without a row in ``hf``."""
    return (
        f"{family.model.__name__}: the parameter {key} has no row in hf, so checkpoints cannot contain it. Add "
        f'"{key}": W("its name in a layer")'
    )
