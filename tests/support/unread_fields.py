"""Finds fields that a family's config declares and no code reads, by the bytecode of its classes and modules."""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, OneOf, PerLayer
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family


def refuse_unread_fields(family: Family) -> None:
    """Raise ConfigError if the family's config declares a field that no method of the two classes and no function in
    their modules uses. Exempt are fields with a single supported value and the fields of all decoders."""
    common = {field.name for field in dataclasses.fields(DecoderConfig)}
    for config in family.configs:
        names = {name for code in _codes(config, family.model) for name in _names(code)}
        names |= {config.experts_field, config.experts_per_token_field}
        checks = {field.name: field.metadata.get("check") for field in dataclasses.fields(config)}
        fixed = {
            name for name, check in checks.items() if isinstance(check, OneOf | PerLayer) and len(check.allowed) == 1
        }
        if unread := checks.keys() - common - fixed - names:
            raise ConfigError(
                f"{config.__name__} declares {', '.join(sorted(unread))}, which nothing in {family.model.__name__} "
                "reads: use it there, or list it in `fixed` with the values that need no code, or in `ignored` if it "
                "never changes what the model computes"
            )


def _codes(*classes: type) -> Iterator[CodeType]:
    """Yield the code of all functions in the classes, in their bases, and in the modules that define these."""
    for owner in {base for each in classes for base in each.__mro__ if issubclass(base, (DecoderConfig, CausalLM))}:
        module = sys.modules[owner.__module__]
        for value in (*vars(owner).values(), *vars(module).values()):
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
            if isinstance(function, FunctionType) and not function.__code__.co_filename.startswith("<"):  # by dataclass
                yield function.__code__


def _names(code: Any) -> Iterator[str]:
    """Yield the attribute names and strings that code and its nested functions use."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType) and "__qualname__" not in value.co_names:  # a class body only declares fields
            yield from _names(value)
