"""Import graph of the package and the tests."""

import ast
from pathlib import Path

import pytest

from tests.support.import_graph import ROOT, distances, imported_names, module_of

SOURCE = """
import nnxmoe as nm
from nnxmoe import Sorted
from nnxmoe.moe import router
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nnxmoe.convert import native

def function():
    from nnxmoe.convert.gguf.gguf_file import GGUFFile
    return nm.generate
"""


def test_names_lead_to_the_modules_that_define_them() -> None:
    modules = {module_of(name) for name in imported_names(ast.parse(SOURCE))} - {None, "nnxmoe"}
    decode, gguf_file = "nnxmoe.generation.decode", "nnxmoe.convert.gguf.gguf_file"
    assert modules == {"nnxmoe.moe.dispatch", "nnxmoe.moe.router", decode, gguf_file}


@pytest.mark.parametrize(
    ("changed", "test_file", "distance"),
    [
        ("nnxmoe/moe/router.py", "tests/moe/test_moe.py", 1),
        ("nnxmoe/moe/selection.py", "tests/moe/test_balance.py", 1),
        ("nnxmoe/convert/gguf/gguf_file.py", "tests/convert/test_gguf.py", 1),
        ("models/mixtral.py", "tests/model/test_model.py", 1),
        ("tests/moe/test_moe.py", "tests/moe/test_moe.py", 0),
        ("nnxmoe/apps/serve/page.html", "tests/apps/test_serve.py", 1),  # it imports app.py, which reads the page
    ],
)
def test_number_of_imports(changed: str, test_file: str, distance: int) -> None:
    assert distances([ROOT / changed])[Path(ROOT / test_file)] == distance


def test_unrelated_files_are_not_reached() -> None:
    assert ROOT / "tests/moe/test_moe.py" not in distances([ROOT / "nnxmoe/apps/serve/app.py"])
    assert distances([ROOT / "README.md"]) == {}
