"""Checks of a model family's table of tensor names, run when the family is registered."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

from flax import nnx

from nnxmoe.axes import axes_of
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.printable import some
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family, row_missing
from nnxmoe.model.paths import name_of
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.model.weight_names import W, options


def refuse_unnamed_parameters(family: Family) -> None:
    """Raise ConfigError if a parameter of the family's models is missing from the table of tensor names.

    Builds abstract models from the default config (from a preset if the config has required fields), and from variants
    of the config with one boolean field flipped. The variants cover parameters that a field adds, such as biases.
    """
    for config_class in family.configs:
        configs = [config for config in family.presets.values() if type(config) is config_class]
        with contextlib.suppress(ConfigError, TypeError):
            configs.insert(0, config_class())
        for config in _variants(configs[0]) if configs else ():
            try:
                model = family.model(config, Strategy(stacking=Scanned()), rngs=None)
            except Exception:  # Default values may be incompatible. Saving checks the rows of actual configs.
                continue
            check_rows(model, family)


def _variants(config: DecoderConfig) -> Iterator[DecoderConfig]:
    """Yield the config, then its variants with one boolean field flipped."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            try:
                yield dataclasses.replace(config, **{field.name: not value})
            except ConfigError:  # the family supports only one value
                continue


def check_rows(model: CausalLM, family: Family) -> None:
    """Check the table of tensor names against a model's parameters.

    If a row has alternatives, checks the first alternative, because saving writes the first alternative.

    Raises:
        ConfigError: A parameter has no row, two parameters have the same tensor, or a part of a tensor is not covered
            by any row.
    """
    class_name, table = family.model.__name__, family.hf_names(model.config)
    parts = collections.defaultdict[tuple[str, int], list[str]](list)  # (tensor, part) -> parameters
    sizes = dict[str, int]()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, layer, _ = name_of(model, path)
        if key not in table:
            raise ConfigError(row_missing(family, key))
        w = options(table, key)[0]
        if w.per_expert and "expert" not in axes_of(variable):
            raise ConfigError(
                f"{class_name}: {key} has no expert axis, but its row in hf names one tensor per expert "
                f"({w.name}.N.{w.per_expert}). Use W({w.name!r})"
            )
        tensor = w.tensor(layer, "N")
        sizes[tensor] = w.parts
        for part in _covered(w):
            parts[tensor, part].append(key)
    if duplicates := {name: keys for (name, _), keys in parts.items() if len(keys) > 1}:
        name, keys = next(iter(duplicates.items()))
        raise ConfigError(
            f"{class_name}: hf maps {some(keys)} to the same tensor {name}. Use a different tensor for each"
        )
    for tensor, num_parts in sizes.items():
        if missing_parts := set(range(num_parts)) - {part for name, part in parts if name == tensor}:
            raise ConfigError(
                f"{class_name}: no row of hf covers part {min(missing_parts)} of the {num_parts} of {tensor}. Add a row"
            )


def _covered(w: W) -> range:
    return range(w.part, w.part + w.span)
