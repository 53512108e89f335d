"""Distance of test files from changed files, in imports.

`python -m tests.support.import_graph REVISION` prints the test files that the files that differ from a Git revision
affect, closest first. CI selects tests from these files.
"""

import ast
import functools
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from nnxmoe.api import MODULES as MODULES_OF_NAMES
from nnxmoe.models.index import MODULE_OF_CLASS

ROOT = Path(__file__).resolve().parents[2]
TYPE_CHECKING = {"TYPE_CHECKING", "_TYPE_CHECKING", "typing.TYPE_CHECKING"}
FOLDERS = {"nnxmoe": ROOT / "nnxmoe", "nnxmoe.models": ROOT / "models", "tests": ROOT / "tests"}


@functools.cache
def sources() -> dict[str, Path]:
    """Return the Python files of the package and of the tests, by module name."""
    files = {}
    for prefix, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return files


@functools.cache
def texts() -> dict[str, str]:
    """Return the source of each module."""
    return {module: path.read_text(encoding="utf-8") for module, path in sources().items()}


def module_of(name: str) -> str | None:
    """Return the module that defines a dotted name, or None if the name is not from the package or the tests."""
    package, _, rest = name.rpartition(".")
    if package == "nnxmoe" and rest in MODULES_OF_NAMES:
        return MODULES_OF_NAMES[rest]
    if package == "nnxmoe.models" and rest in MODULE_OF_CLASS:
        return f"nnxmoe.models.{MODULE_OF_CLASS[rest]}"
    while name not in sources():
        name, _, _ = name.rpartition(".")
        if not name:
            return None
    return name


def imported_names(tree: ast.Module) -> set[str]:
    """Return the names that a file imports, also inside functions, and the attributes of `nnxmoe` that it reads.

    Removes imports that only type checkers run from ``tree``.
    """
    names, package_aliases = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            package_aliases |= {alias.asname or "nnxmoe" for alias in node.names if alias.name == "nnxmoe"}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in package_aliases:
            names.add(f"nnxmoe.{node.attr}")
    return names


@functools.cache
def importers() -> dict[str, set[str]]:
    """Map each module to the modules that import it.

    The packages in `FOLDERS` are omitted, because nearly every file imports them.
    """
    # The registry imports families by name, which its syntax tree does not show.
    modules = {f"nnxmoe.models.{family}": {"nnxmoe.models.registry"} for family in MODULE_OF_CLASS.values()}
    for module, text in texts().items():
        for name in imported_names(ast.parse(text)):
            source = module_of(name)
            if source and source not in {module, *FOLDERS}:
                modules.setdefault(source, set()).add(module)
    return modules


def changed_files(revision: str) -> list[Path]:
    """Return the tracked files that differ between a Git revision and the working tree."""
    command = ["git", "diff", "--name-only", revision]
    return [ROOT / line for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()]


def readers(path: Path) -> set[str]:
    """Return the modules with a string that ends in the name of a data file, or else in the name of its folder."""
    for name in (path.name, path.stem, path.parent.name):
        modules = {module for module, text in texts().items() if f'{name}"' in text}
        if modules:
            return modules
    return set()


def distances(changed: Iterable[Path]) -> dict[Path, int]:
    """Return the number of imports from each Python file to the nearest changed file.

    Changed files, and modules that read a changed data file, have distance 0. Files that reach no changed file are
    omitted. Changed Markdown files are ignored.
    """
    modules = {path: module for module, path in sources().items()}
    nearest: dict[str, int] = {}
    for path in changed:
        if path in modules:
            nearest[modules[path]] = 0
        elif path.suffix != ".md":
            nearest |= dict.fromkeys(readers(path), 0)
    queue = deque(nearest)
    while queue:
        module = queue.popleft()
        for importer in importers().get(module, set()) - set(nearest):
            nearest[importer] = nearest[module] + 1
            queue.append(importer)
    return {sources()[module]: distance for module, distance in nearest.items()}


if __name__ == "__main__":
    distance_of = distances(changed_files(sys.argv[1]))
    for path, distance in sorted(distance_of.items(), key=lambda item: (item[1], item[0])):
        if path.name.startswith("test_"):
            print(distance, path.relative_to(ROOT))
