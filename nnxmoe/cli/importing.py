"""The option ``--import`` of every command: Python modules that register model families of the user's."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def add_option(parser: argparse.ArgumentParser, dest: str = "imports") -> None:
    """Add the option, which may be repeated."""
    what = "import a Python module, or FILE.py, first: one that calls nnxmoe.models.register; may be repeated"
    parser.add_argument("--import", dest=dest, action="append", default=[], metavar="MODULE", help=what)


def import_modules(names: Sequence[str]) -> None:
    """Import modules by name, also from the current folder, or by path. Raises ValueError if one cannot be imported."""
    for name in names:
        path = Path(name).expanduser().resolve() if name.endswith(".py") else None
        if path is not None and not path.is_file():
            raise ValueError(f"--import {name}: there is no such file")
        folder = os.getcwd() if path is None else str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # stays there: the module may import its neighbors later
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except Exception as error:  # whatever the module's code raises
            raise ValueError(f"--import {name}: {type(error).__name__}: {error}") from error
        if path is not None and path != Path(module.__file__ or "").resolve():
            raise ValueError(
                f"--import {name}: {path.stem} is the name of another module ({module.__file__}): rename the file"
            )
