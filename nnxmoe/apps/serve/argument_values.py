"""Convert the text of tool-call arguments to values, by the JSON schema of the tool.

Used for arguments that are written one by one.
"""

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": True, "False": False, "None": None}
_TYPES: Mapping[type, tuple[str, ...]] = {  # Python type of a JSON value -> names of the type in JSON Schema
    str: ("string",),
    bool: ("boolean",),
    type(None): ("null",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
}
_DEPTH = 8  # maximum depth of references and alternatives, because they may be recursive


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Convert the text of an argument to a value.

    The value is the text if the schema allows strings only. Otherwise the text is parsed as JSON or a
    Python literal. If the schema allows strings and the parsed type is not allowed, the value is the
    text, for example a postcode of digits that may also be null.

    Args:
        text: text of the argument.
        schema: schema of the argument.
        root: schema that contains ``schema``, for references.
    """
    types = _types(schema, root)
    value = text if is_text(resolved(schema, root)) else _read(text)
    return value if "string" not in types or not types.isdisjoint(_TYPES[type(value)]) else text


def properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    found = (schema or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Resolve the ``$ref`` of a schema in ``root``. Returns an empty schema if any value is allowed."""
    for _ in range(_DEPTH):
        if not (isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str) and path[:2] == "#/"):
            break
        found: Any = root
        for part in path[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return schema if isinstance(schema, Mapping) else {}


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a resolved schema enumerates, or an empty list."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a resolved schema allows strings only. The argument is then its text without quotes."""
    values = listed(schema)
    return all(isinstance(one, str) for one in values) if values else schema.get("type") == "string"


def _types(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> set[str]:
    """Return the JSON types that a schema allows. Empty if the schema does not restrict the type."""
    schema = resolved(schema, root)
    kinds = schema.get("type")
    found = {one for one in ([kinds] if isinstance(kinds, str) else _list(kinds)) if isinstance(one, str)}
    found |= {_TYPES[type(one)][0] for one in listed(schema)} if not found else set()
    others = [one for name in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(name))] if depth else []
    return found.union(*(_types(one, root, depth - 1) for one in others))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(text: str) -> Any:
    """Parse JSON or a Python literal (models write both). Returns the text if parsing fails."""
    found = text.strip()
    if found in _PYTHON:
        return _PYTHON[found]
    for read in (json.loads, ast.literal_eval) if found[:1] in ("[", "{") else (json.loads,):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = read(found)
            json.dumps(value, allow_nan=False)  # raises for values that JSON does not have, such as NaN and sets
            return value
    return text
