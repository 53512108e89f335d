"""Checks of a model family when it is registered: the fields of its configs and the rows of its tables of names."""

import collections
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from flax import nnx

from nnxmoe.axes import axes_of
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, Kinds, OneOf
from nnxmoe.config.printable import some
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.paths import name_of
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.model.weight_names import W, options


def refuse_unread_fields(family: type[CausalLM]) -> None:
    """Raise ConfigError if the family's config declares a field that no method of the two classes and no function in
    their modules uses. Exempt are fields with a single supported value and the fields of all decoders."""
    common = {field.name for field in dataclasses.fields(DecoderConfig)}
    for config in family.configs:
        names = {name for code in _codes(config, family) for name in _names(code)}
        names |= {config.experts_field, config.chosen_field}
        checks = {field.name: field.metadata.get("check") for field in dataclasses.fields(config)}
        fixed = {name for name, check in checks.items() if isinstance(check, OneOf | Kinds) and len(check.allowed) == 1}
        if unread := checks.keys() - common - fixed - names:
            raise ConfigError(
                f"{config.__name__} declares {', '.join(sorted(unread))}, which nothing in {family.__name__} reads: "
                "use it there, or list it in `fixed` with the values that need no code, or in `ignored` if it never "
                "changes what the model computes"
            )


def _codes(*classes: type) -> Iterator[CodeType]:
    """Yield the code of all functions in the classes, in their bases, and in the modules that define these."""
    for kind in {base for each in classes for base in each.__mro__ if issubclass(base, (DecoderConfig, CausalLM))}:
        module = sys.modules[kind.__module__]
        for value in (*vars(kind).values(), *vars(module).values()):
            made = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
            if isinstance(made, FunctionType) and not made.__code__.co_filename.startswith("<"):  # by dataclass
                yield made.__code__


def _names(code: Any) -> Iterator[str]:
    """Yield the attribute names and strings that code and its nested functions use."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType) and "__qualname__" not in value.co_names:  # a class body only declares fields
            yield from _names(value)


def refuse_unnamed_parameters(family: type[CausalLM]) -> None:
    """Raise ConfigError if a model of the family has a parameter that its table of tensor names does not describe.

    Builds abstract models from the default config (a preset if fields are required), and from configs with one boolean
    field flipped, since a bias that a field adds needs a row too.
    """
    for kind in family.configs:
        presets = [config for config in family.presets.values() if type(config) is kind]
        with contextlib.suppress(ConfigError, TypeError):
            presets.insert(0, kind())
        for config in _variants(presets[0]) if presets else ():
            try:
                model = family(config, Strategy(stacking=Scanned()), rngs=None)
            except Exception:  # defaults need not be compatible; saving checks the rows of real configs
                continue
            check_rows(model)


def _variants(config: DecoderConfig) -> Iterator[DecoderConfig]:
    """Yield the config, and variants of it with one boolean field flipped."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            try:
                yield dataclasses.replace(config, **{field.name: not value})
            except ConfigError:  # the family supports only one value
                continue


def check_rows(model: CausalLM) -> None:
    """Raise ConfigError unless each parameter of a model has a row, no two have the same tensor, and each tensor is
    written completely. If a row has alternatives, the first is checked, because it is the one written."""
    family, table = type(model), type(model).hf_names(model.config)
    parts = collections.defaultdict[tuple[str, int], list[str]](list)  # (tensor, part) -> parameters
    sizes = dict[str, int]()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, layer, _ = name_of(model, path)
        if key not in table:
            raise ConfigError(row_missing(family, key))
        w = options(table, key)[0]
        if w.per_expert and "expert" not in axes_of(variable):
            raise ConfigError(
                f"{family.__name__}: {key} has no dimension of experts, and its row in hf_table a tensor per expert "
                f"({w.name}.N.{w.per_expert}): write W({w.name!r})"
            )
        tensor = w.tensor(layer, "N")
        sizes[tensor] = w.parts
        for part in _covered(w):
            parts[tensor, part].append(key)
    if twice := {name: keys for (name, _), keys in parts.items() if len(keys) > 1}:
        name, keys = next(iter(twice.items()))
        raise ConfigError(f"{family.__name__}: hf_table gives {some(keys)} the same tensor, {name}: name one for each")
    for tensor, count in sizes.items():
        if missing := set(range(count)) - {part for name, part in parts if name == tensor}:
            raise ConfigError(
                f"{family.__name__}: no row of hf_table has part {min(missing)} of the {count} of {tensor}: add it"
            )


def _covered(w: W) -> range:
    return range(w.part, w.part + w.span)


def row_missing(family: type[CausalLM], key: str) -> str:
    """Error text for a parameter without a tensor name."""
    return (
        f"{family.__name__}: the parameter {key} has no row in hf_table, so that no checkpoint can hold it: add "
        f'"{key}": W("its name in a layer")'
    )
