"""Log messages and progress bars.

The package logs to the logger ``nnxmoe`` and adds no handler. If a script or notebook does not
configure logging, Python therefore prints only warnings, on stderr.
``logging.basicConfig(level="INFO")`` shows all messages. The command line adds a handler.
Progress bars use tqdm (``TQDM_DISABLE=1`` disables them).
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm  # not tqdm.auto: nbconvert and Colab store only the first state of its notebook widget

logger = logging.getLogger("nnxmoe")


@contextlib.contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Print the package's messages on stderr in this block, unless logging is already configured."""
    level, propagate, handler = logger.level, logger.propagate, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("nnxmoe: %(message)s"))
    unconfigured = not logging.getLogger().handlers
    logger.setLevel(logging.INFO)
    if unconfigured:
        logger.addHandler(handler)
        logger.propagate = False  # avoid duplicates: a library's logging.info(…) adds a root handler
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(handler)


def say(message: str, *args: Any) -> None:
    """Log a message of level INFO."""
    logger.info(message, *args)


def progress_bar(**options: Any) -> tqdm:
    """Create a progress bar on one line. Without a terminal, it is redrawn every ten seconds."""
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(dynamic_ncols=True, mininterval=0.1 if live else 10.0, **options)


def bytes_bar(total: int, description: str) -> tqdm:
    """Create a progress bar for bytes that appears after one second."""
    return progress_bar(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1000, delay=1)
