"""Arguments of calls that are written one by one, as texts: their values, by the JSON schema of the tool."""

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": True, "False": False, "None": None}
_TYPES: Mapping[type, tuple[str, ...]] = {  # names in JSON Schema of the types that JSON is read as
    str: ("string",),
    bool: ("boolean",),
    type(None): ("null",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
}
_DEPTH = 8  # of references and alternatives, which may refer to themselves


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of an argument: the text as it is where its schema, a part of ``root``, wants one, else what is read.

    With a schema that allows strings and other types, a text that reads as none of the others stays a string, such as
    the digits of a postcode that may be null.
    """
    types = _types(schema, root)
    value = text if is_text(resolved(schema, root)) else _read(text)
    return value if "string" not in types or not types.isdisjoint(_TYPES[type(value)]) else text


def properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by name."""
    found = (schema or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A schema, or the part of ``root`` that its ``$ref`` names; empty if it allows anything."""
    for _ in range(_DEPTH):
        if not (isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str) and path[:2] == "#/"):
            break
        found: Any = root
        for part in path[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return schema if isinstance(schema, Mapping) else {}


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a resolved schema allows; empty if it lists none."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a resolved schema allows strings only. Then an argument is the text itself, without quotes."""
    values = listed(schema)
    return all(isinstance(one, str) for one in values) if values else schema.get("type") == "string"


def _types(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> set[str]:
    """The types that a schema allows; empty if it names none."""
    schema = resolved(schema, root)
    kinds = schema.get("type")
    found = {one for one in ([kinds] if isinstance(kinds, str) else _list(kinds)) if isinstance(one, str)}
    found |= {_TYPES[type(one)][0] for one in listed(schema)} if not found else set()
    others = [one for name in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(name))] if depth else []
    return found.union(*(_types(one, root, depth - 1) for one in others))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(text: str) -> Any:
    """JSON, or literals of Python, which models write too; else the text."""
    found = text.strip()
    if found in _PYTHON:
        return _PYTHON[found]
    for read in (json.loads, ast.literal_eval) if found[:1] in ("[", "{") else (json.loads,):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = read(found)
            json.dumps(value, allow_nan=False)  # raises for what JSON does not have, such as NaN and sets
            return value
    return text
