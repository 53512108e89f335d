"""Format values, names and large numbers for messages. Text from files is escaped and truncated."""

import difflib
import re
from collections.abc import Iterable, Sequence

from jax.core import Tracer


def short(value: object, limit: int = 160) -> str:
    """Format a value for an error message. Escapes the text and truncates it to about ``limit`` characters."""
    if isinstance(value, str | list | tuple | dict) and len(value) > 10 * limit:
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, Tracer):
        return f"{value!a}, which is a traced value: pass a number, or mark the argument as static"
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def plain(name: str) -> str:
    """Escape the non-ASCII and unprintable characters of a name, for a terminal."""
    return short(name)[1:-1]


def some(names: Sequence[str], limit: int = 3) -> str:
    """Join up to ``limit`` names, followed by the number of remaining names."""
    text = ", ".join(plain(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean …?" with the known names that are most similar to ``name``, ignoring case.

    If ``name`` contains "-", as names of models do, names that start with it come first.
    Returns "" if no known name is similar.
    """
    names = {known_name.lower(): known_name for known_name in known}
    matches = [known_name for known_name in names if "-" in name and known_name.startswith(name.lower())]
    matches = list(dict.fromkeys(matches + difflib.get_close_matches(name.lower(), names, most, cutoff)))[:most]
    return f"; did you mean {' or '.join(names[known_name] for known_name in matches)}?" if matches else ""


def bytes_text(size: float) -> str:
    """Format a number of bytes in a decimal unit, such as 1.50 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def parse_bytes(size: int | str) -> int:
    """Parse a size such as ``5GB``, ``500MB``, ``20KB`` or a plain number of bytes. Returns at least 1.

    Units are decimal. Raises ValueError for other text.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{short(size)} is not a size such as '5GB' or '500MB'")
    return max(1, int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))


def count_text(number: float) -> str:
    """Format a large number with three significant digits, such as 46.7B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
