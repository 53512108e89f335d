"""Which fields of its config a family reads: a declared field that nothing reads would be dropped in silence."""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, Kinds, OneOf
from nnxmoe.model.causal_lm import CausalLM


def refuse_unread(family: type[CausalLM]) -> None:
    """Raise ConfigError if a config of the family declares a field that no method of the two classes and no function of
    their modules names. Fields with a single supported value are exempt, and those of all decoders."""
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
    """The code of all functions of classes, of their bases and of their modules."""
    for kind in {base for each in classes for base in each.__mro__ if issubclass(base, (DecoderConfig, CausalLM))}:
        module = sys.modules[kind.__module__]
        for value in (*vars(kind).values(), *vars(module).values()):
            made = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
            if isinstance(made, FunctionType) and not made.__code__.co_filename.startswith("<"):  # by dataclasses
                yield made.__code__


def _names(code: Any) -> Iterator[str]:
    """The attributes and strings that code and the functions in it use."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType) and "__qualname__" not in value.co_names:  # not a class body, which declares
            yield from _names(value)
