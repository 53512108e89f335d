"""Install commands for optional dependencies. nnxmoe is not published on a package index."""

import importlib.metadata
import os
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra.

    Installs the extra from the package's checkout if there is a checkout, else the extra's requirements.
    """
    if (ROOT / "pyproject.toml").is_file():
        folder = "." if os.path.realpath(os.curdir) == str(ROOT) else str(ROOT)
        return f"pip install -e '{folder}[{extra}]'"
    return f"pip install {shlex.join(_requirements(extra))}"


def _requirements(extra: str) -> list[str]:
    """Return the requirements that an extra adds, without the ``extra ==`` marker."""
    extra_marker = rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]"
    requirements = []
    for line in importlib.metadata.requires("nnxmoe") or ():
        name, _, marker = (part.strip() for part in line.partition(";"))
        if re.search(extra_marker, marker):
            other_markers = re.sub(rf"\s*(\band\s+)?{extra_marker}(\s+and\b)?\s*", "", marker)
            requirements.append(f"{name}; {other_markers}" if other_markers else name)
    return requirements
