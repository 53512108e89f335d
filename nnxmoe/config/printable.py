"""Values and names from files as they may appear in a message, escaped and cut to a sensible length; large numbers."""

import difflib
import re
from collections.abc import Iterable, Sequence

from jax.core import Tracer


def short(value: object, limit: int = 160) -> str:
    """A value for an error message: escaped, and cut if it is long."""
    if isinstance(value, str | list | tuple | dict) and len(value) > 10 * limit:
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, Tracer):
        return f"{value!a}, which JAX traces: pass a number, or mark the argument as static"
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def plain(name: str) -> str:
    """A name for a terminal: everything unprintable is escaped."""
    return short(name)[1:-1]


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few of many names."""
    shown = ", ".join(plain(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def did_you_mean(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean …?" with the known names nearest to an unknown one, ignoring case; "" if none is near."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, most, cutoff)
    return f"; did you mean {' or '.join(names[one] for one in near)}?" if near else ""


def bytes_text(size: float) -> str:
    """A number of bytes in a decimal unit, such as 1.50 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def parse_bytes(size: int | str) -> int:
    """Bytes of ``5GB``, ``500MB``, ``20KB`` or a plain number, at least 1. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{short(size)} is not a size such as '5GB' or '500MB'")
    return max(1, int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))


def count_text(number: float) -> str:
    """A large number in three digits, such as 46.7B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
