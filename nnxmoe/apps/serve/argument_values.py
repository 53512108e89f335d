"""Convert the text of tool-call arguments to values, according to the tool's JSON schema.

Only call formats that put each argument in tags need this conversion.
"""

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": True, "False": False, "None": None}
_TYPES: Mapping[type, tuple[str, ...]] = {  # maps the Python type of a JSON value to names in JSON Schema
    str: ("string",),
    bool: ("boolean",),
    type(None): ("null",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
}
_DEPTH = 8  # maximum depth of references and alternatives, which may be recursive


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Convert the text of an argument to a value.

    If the schema allows only strings, the value is the text. Otherwise the text is parsed as JSON or as a Python
    literal. If the schema does not allow the parsed type but allows strings, the value is the text. For example,
    a postcode of digits stays a string if the schema allows string and null.

    Args:
        text: Text of the argument.
        schema: JSON schema of the argument.
        root: JSON schema in which the references of ``schema`` are resolved.
    """
    types = _types(schema, root)
    value = text if is_text(resolved(schema, root)) else _read(text)
    return value if "string" not in types or not types.isdisjoint(_TYPES[type(value)]) else text


def properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    schemas = (schema or {}).get("properties")
    return schemas if isinstance(schemas, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Resolve the ``$ref`` of a schema in ``root``. Returns an empty schema if any value is allowed."""
    for _ in range(_DEPTH):
        if not (isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str) and path[:2] == "#/"):
            break
        node: Any = root
        for part in path[2:].split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        schema = node
    return schema if isinstance(schema, Mapping) else {}


def listed(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of a resolved schema's ``const`` or ``enum``, or an empty list."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a resolved schema allows only strings. Models write string arguments without quotes."""
    values = listed(schema)
    return all(isinstance(value, str) for value in values) if values else schema.get("type") == "string"


def _types(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> set[str]:
    """Return the JSON types that a schema allows, or an empty set if the schema does not restrict the type."""
    schema = resolved(schema, root)
    declared_types = schema.get("type")
    types = {
        item
        for item in ([declared_types] if isinstance(declared_types, str) else _list(declared_types))
        if isinstance(item, str)
    }
    types |= {_TYPES[type(item)][0] for item in listed(schema)} if not types else set()
    alternatives = [item for name in ("anyOf", "oneOf", "allOf") for item in _list(schema.get(name))] if depth else []
    return types.union(*(_types(item, root, depth - 1) for item in alternatives))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(text: str) -> Any:
    """Parse JSON or a Python literal, since models write both. Returns the text if parsing fails."""
    stripped_text = text.strip()
    if stripped_text in _PYTHON:
        return _PYTHON[stripped_text]
    for parse in (json.loads, ast.literal_eval) if stripped_text[:1] in ("[", "{") else (json.loads,):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = parse(stripped_text)
            json.dumps(value, allow_nan=False)  # raises for values that are not valid JSON, such as NaN and sets
            return value
    return text
