"""How to install the optional dependencies of this installation; nnxmoe is on no package index."""

import importlib.metadata
import os
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str) -> str:
    """The command that installs an extra: from the checkout that this package runs from, or else its requirements."""
    if (ROOT / "pyproject.toml").is_file():
        folder = "." if os.path.realpath(os.curdir) == str(ROOT) else str(ROOT)
        return f"pip install -e '{folder}[{extra}]'"
    return f"pip install {shlex.join(_requirements(extra))}"


def _requirements(extra: str) -> list[str]:
    """The requirements that an extra adds, without the marker that names it."""
    names = rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]"
    found = []
    for line in importlib.metadata.requires("nnxmoe") or ():
        name, _, marker = (part.strip() for part in line.partition(";"))
        if re.search(names, marker):
            rest = re.sub(rf"\s*(\band\s+)?{names}(\s+and\b)?\s*", "", marker)
            found.append(f"{name}; {rest}" if rest else name)
    return found
