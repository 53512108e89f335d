"""The option ``--import`` of every command: import Python modules that register custom model families."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def add_option(parser: argparse.ArgumentParser, dest: str = "imports") -> None:
    """Add the repeatable option ``--import``.

    A command needs a ``dest`` other than the main parser's: argparse would overwrite the value given before the command
    with the default of the subparser.
    """
    text = "import a Python module or FILE.py that calls nnxmoe.models.register; may be repeated"
    parser.add_argument("--import", dest=dest, action="append", default=[], metavar="MODULE", help=text)


def import_modules(names: Sequence[str]) -> None:
    """Import modules by path, or by name (the current folder is searched too). Raises ValueError if an import fails."""
    for name in names:
        path = Path(name).expanduser().resolve() if name.endswith(".py") else None
        if path is not None and not path.is_file():
            raise ValueError(f"--import {name}: file not found")
        folder = os.getcwd() if path is None else str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # not removed again: the module may import files beside it later
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except Exception as error:  # the module may raise anything
            raise ValueError(f"--import {name}: {type(error).__name__}: {error}") from error
        if path is not None and path != Path(module.__file__ or "").resolve():
            raise ValueError(
                f"--import {name}: another module has the name {path.stem} ({module.__file__}): rename the file"
            )
