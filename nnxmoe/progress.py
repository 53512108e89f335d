"""What a person waiting sees: short messages and progress bars, on stderr.

Messages go through the logger ``nnxmoe`` (level INFO; ``logging.getLogger("nnxmoe").setLevel("WARNING")`` silences
them); bars are tqdm's (``TQDM_DISABLE=1`` switches them off).
"""

import logging
import sys
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("nnxmoe")


class _Stderr(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is when the message comes, so that redirection works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


def setup_logging() -> None:
    """Give the package's logger a handler, once, unless the program has made its own arrangements."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("nnxmoe: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def say(message: str, *args: Any) -> None:
    """Tell the waiting person something that is no warning."""
    logger.info(message, *args)


def bytes_bar(total: int, description: str) -> tqdm:
    """A bar over bytes with its speed."""
    return tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1000, dynamic_ncols=True)
