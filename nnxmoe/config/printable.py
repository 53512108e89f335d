"""Values and names from files, as they may appear in a message: escaped, and cut to a sensible length."""

from collections.abc import Sequence


def short(value: object, limit: int = 160) -> str:
    """Shows a value from a file in an error message: escaped, and cut where it would fill the screen."""
    if isinstance(value, str | list | tuple | dict) and len(value) > 10 * limit:
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def plain(name: str) -> str:
    """A name from a file for a terminal: nothing in it that is not printable."""
    return short(name)[1:-1]


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few of many names."""
    shown = ", ".join(plain(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
