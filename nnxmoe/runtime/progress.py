"""Log messages and progress bars.

Messages go through the logger ``nnxmoe``, to which importing the package adds no handler. Python itself therefore
prints warnings on stderr in a script or notebook without logging set-up; ``logging.basicConfig(level="INFO")`` shows
all messages. The command line sets up its own handler. Bars are tqdm's (``TQDM_DISABLE=1`` switches them off).
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm  # not tqdm.auto: nbconvert and Colab store the first state of a notebook's widget

logger = logging.getLogger("nnxmoe")


@contextlib.contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Within this block the package's messages appear on stderr, unless the program has set up logging itself."""
    level, propagate, handler = logger.level, logger.propagate, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("nnxmoe: %(message)s"))
    own = not logging.getLogger().handlers
    logger.setLevel(logging.INFO)
    if own:
        logger.addHandler(handler)
        logger.propagate = False  # a library's logging.info(…) adds a root handler, which would print them again
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(handler)


def say(message: str, *args: Any) -> None:
    """Log a message that is not a warning (level INFO)."""
    logger.info(message, *args)


def progress_bar(**options: Any) -> tqdm:
    """A progress bar on one line; in the log of a program without terminal it is redrawn every ten seconds."""
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(dynamic_ncols=True, mininterval=0.1 if live else 10.0, **options)


def bytes_bar(total: int, description: str) -> tqdm:
    """A progress bar in bytes, with the speed; it appears after one second."""
    return progress_bar(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1000, delay=1)
