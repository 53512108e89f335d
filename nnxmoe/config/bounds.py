"""Type and bounds checks of config fields. Configs declare the checks in field metadata."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from nnxmoe.config.printable import short


class ConfigError(ValueError):
    """Raised for an invalid or unsupported field of a model config."""


MAX_LAYERS = 1024
MAX_EXPERTS = 2**18  # total over all layers


@dataclasses.dataclass(frozen=True)
class Count:
    """Check that a field is an integer from ``least`` to ``most``."""

    least: int = 1
    most: int = 2**31 - 1

    def __call__(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            sign = "positive" if self.least else "non-negative"
            raise ConfigError(f"{name} must be a {sign} integer, got {short(value)}")
        if value > self.most:
            raise ConfigError(f"{name} {short(value)} exceeds the supported maximum of {self.most}")


@dataclasses.dataclass(frozen=True)
class Number:
    """Check that a field is a number above ``above`` and at most ``most``. Returns the number as a float."""

    above: float = 1e-6
    most: float = 1e6

    def __call__(self, name: str, value: object) -> float:
        lower_bound, label = (-math.inf, "finite") if self.above < 0 else (0, "positive")
        if isinstance(value, bool) or not isinstance(value, int | float) or not lower_bound < value < math.inf:
            raise ConfigError(f"{name} must be a {label} number, got {short(value)}")
        if not self.above < value <= self.most:
            raise ConfigError(
                f"{name} {short(value)} is out of range: it must be above {self.above:g} and at most {self.most:g}"
            )
        return float(value)


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Check that a field lists one of the ``allowed`` types per layer."""

    allowed: tuple[str, ...]

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{name} must list the type of each layer, got {short(value)}")
        if unknown_types := [layer_type for layer_type in value if layer_type not in self.allowed]:
            raise ConfigError(
                f"{name}: {short(unknown_types[0])} is not supported; supported: {', '.join(self.allowed)}"
            )


def is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    """Return whether a value equals an allowed value. Bools do not equal numbers."""
    return any(isinstance(value, bool) == isinstance(option, bool) and value == option for option in allowed)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Check that a field has one of the ``allowed`` values."""

    allowed: tuple[Any, ...]

    def __call__(self, name: str, value: object) -> None:
        if not is_one_of(value, self.allowed):
            raise ConfigError(
                f"{name} {short(value)} is not supported; supported: {', '.join(map(repr, self.allowed))}"
            )


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {short(value)}")


def count(default: int | None, *, least: int = 1, most: int = 2**31 - 1) -> Any:
    """Declare an integer config field. The default bounds allow all known models, but limit memory allocation."""
    return dataclasses.field(default=default, metadata={"check": Count(least, most)})


def number(default: float | None, *, above: float, most: float) -> Any:
    """Declare a float config field."""
    return dataclasses.field(default=default, metadata={"check": Number(above, most)})


def flag(default: bool) -> Any:
    """Declare a boolean config field that overrides a field with different bounds in a base class."""
    return dataclasses.field(default=default, metadata={"check": _flag})


def per_layer(*allowed: str) -> Any:
    """Declare a config field that lists one of the ``allowed`` types per layer, or is null."""
    return dataclasses.field(default=None, metadata={"check": PerLayer(allowed)})


def one_of(*allowed: Any) -> Any:
    """Declare a config field with one of the ``allowed`` values. The first is the default."""
    return dataclasses.field(default=allowed[0], metadata={"check": OneOf(allowed)})


def check_at_most(config: Any, name: str, other: str) -> None:
    """Raise ConfigError if the field ``name`` of a config is greater than the field ``other``. Null is valid."""
    value, limit = getattr(config, name), getattr(config, other)
    if value is not None and value > limit:
        raise ConfigError(f"{name} {value} is more than {other} {limit}")


def check_multiple(config: Any, name: str, other: str) -> None:
    """Raise ConfigError if the field ``name`` is not a multiple of the field ``other``. Accepts null in ``other``."""
    value, divisor = getattr(config, name), getattr(config, other)
    if divisor is not None and value % divisor:
        raise ConfigError(f"{name} {value} is not a multiple of {other} {divisor}")


def check_fields(config: Any) -> None:
    """Raise ConfigError for the first field of a config dataclass that has a wrong type or is out of bounds.

    A field without declared bounds inherits the bounds of the field that it overrides. Otherwise, the default bounds of
    the field's type apply. None is valid if the annotation includes None.
    """
    by_type: dict[Any, Callable[[str, object], Any]] = {int: Count(), float: Number(), bool: _flag}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        definitions = (vars(base).get("__dataclass_fields__", {}).get(field.name) for base in type(config).__mro__)
        checks = [
            definition.metadata["check"]
            for definition in definitions
            if definition is not None and "check" in definition.metadata
        ]
        check = checks[0] if checks else by_type.get(field.type) or _container(field.type)
        if check is not None and not (value is None and type(None) in get_args(field.type)):
            check(field.name, value)
            if isinstance(check, PerLayer) and value and len(value) != (layers := config.num_hidden_layers):
                raise ConfigError(f"{field.name} lists {len(value)} layers, not {layers} as in num_hidden_layers")


def _container(annotation: Any) -> Callable[[str, object], None] | None:
    """Build the check for a field whose annotation includes a sequence or mapping. Returns None for other fields."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = {get_origin(member) or member: get_args(member) for member in members}
    if not types.keys() & {Sequence, Mapping}:
        return None
    scalars = tuple(member for member in types if member not in (Sequence, Mapping))
    allowed = (*scalars, *((list, tuple) if Sequence in types else ()), *((Mapping,) if Mapping in types else ()))
    items = _scalars(types[Sequence][0]) if Sequence in types else ()
    names = " or ".join(item_type.__name__ for item_type in items) or "any"
    rule = f"list {names} values" if Sequence in types else "be an object"

    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(f"{name} must {rule}, got {short(value)}")
        for item in value if isinstance(value, list | tuple) and items else ():
            if not isinstance(item, items) or (isinstance(item, bool) and bool not in items):
                raise ConfigError(f"{name} must {rule}, got {short(item)}")

    return check


def _scalars(annotation: Any) -> tuple[type, ...]:
    """Return the scalar types of an annotation, plus int if float is included, or () if a type is not scalar."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    are_scalar = all(member in (int, float, str, bool, NoneType) for member in members)
    return (*members, *((int,) if float in members else ())) if are_scalar else ()


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_token_ids(fields: Mapping[str, Any], vocab: int) -> list[str]:
    """Check the special token ids of a config.

    Null ids and negative pad ids are treated as unset. ``eos_token_id`` may be a list.

    Returns:
        Name and value of each BOS or EOS id outside the vocabulary, such as "bos_token_id 5". These ids match no token.

    Raises:
        ConfigError: If a value is not a token id, or the pad id is outside the vocabulary. transformers also rejects
            such a pad id.
    """
    invalid_ids = []
    for name in TOKEN_IDS:
        value = fields.get(name)
        is_list = isinstance(value, list | tuple) and name == "eos_token_id" and len(value) > 0
        for token_id in () if value is None else value if is_list else (value,):  # pyright: ignore[reportGeneralTypeIssues]
            if type(token_id) is not int or abs(token_id) > 2**31:
                raise ConfigError(f"{name} {short(value)} must be a token id or null")
            if name == "pad_token_id" and not -vocab <= token_id < vocab:
                raise ConfigError(f"{name} {token_id} must be in the vocabulary, 0 to {vocab - 1}, or be null")
            if name != "pad_token_id" and not 0 <= token_id < vocab:
                invalid_ids.append(f"{name} {token_id}")
    return invalid_ids
