"""The notebooks run, store small outputs without machine details, and use only the public API."""

import ast
import base64
import re
from typing import Any

import pytest

from tests.support.notebooks import FOLDER, PAIRED, executed, light

pytestmark = pytest.mark.notebooks

NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
PUBLIC = {"nnxmoe", *(f"nnxmoe.{name}" for name in ("convert", "linen", "models", "plot", "testing", "train"))}
PUBLIC |= {"nnxmoe.convert.maxtext", "nnxmoe.moe.balance"}
PATHS = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|private|Users|mnt|data|content)/|[A-Z]:\\\\")
LIMIT = 200_000


def stored(name: str) -> Any:
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def text(name: str) -> Any:
    import jupytext

    return jupytext.read(FOLDER / f"{name}.py")


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(output: Any) -> str:
    """Text of an output."""
    data = output.get("data", {})
    return "".join([output.get("text", ""), *(str(data[kind]) for kind in data if kind.startswith("text/"))])


def test_every_notebook_has_a_py_and_an_ipynb_file() -> None:
    assert NAMES == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    assert {"1-generate", "2-finetune", "3-inside-the-moe", "4-parity", "5-strategies"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name: str) -> None:
    """Every cell produces the same kinds of output as stored."""
    notebook = light(executed(text(name)))
    assert kinds(notebook) == kinds(stored(name))


def kinds(notebook: Any) -> Any:
    """Output types and MIME types per code cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs] for cell in code]


@pytest.mark.parametrize("name", NAMES)
def test_py_and_ipynb_have_equal_cells(name: str) -> None:
    assert cells(stored(name)) == cells(text(name))
    assert stored(name).metadata.jupytext == PAIRED == {"formats": text(name).metadata.jupytext.formats}
    assert stored(name).metadata.kernelspec.name == "python3" == text(name).metadata.kernelspec.name


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_small_and_have_no_paths(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LIMIT
    found = outputs(stored(name))
    pictures = [output.data["image/png"] for output in found if "image/png" in output.get("data", {})]
    assert all(base64.b64decode(png).startswith(b"\x89PNG") for png in pictures)
    for output in found:
        assert output.output_type != "error" and output.get("name") != "stderr"
        said = printed(output)
        assert not PATHS.search(said) and "Warning" not in said and "0x" not in said, said


def test_path_pattern_finds_paths() -> None:
    assert PATHS.search("reading /home/me/models") and PATHS.search("'/tmp/x'") and not PATHS.search("a/b, B/T/work")


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_has_a_title_and_learning_goals(name: str) -> None:
    first = cells(stored(name))[0]
    assert first[0] == "markdown" and first[1].startswith("# ") and "you learn" in first[1].lower()


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_use_only_the_public_api(name: str) -> None:
    assert not private((FOLDER / f"{name}.py").read_text(encoding="utf-8"))


def private(source: str) -> list[str]:
    """Non-public modules and underscore attributes used in ``source``."""
    odd = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            odd += [alias.name for alias in node.names if is_ours(alias.name) and alias.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            odd += [] if node.module in PUBLIC else [str(node.module)]
            odd += [alias.name for alias in node.names if alias.name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            odd.append(node.attr)
    return odd


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("nnxmoe", "tests", "models")


def test_private_names_are_found() -> None:
    assert private("from nnxmoe.layers import mlp\nimport tests.support.tiny\nmodel._forward()") == [
        "nnxmoe.layers",
        "tests.support.tiny",
        "_forward",
    ]
    assert not private("import nnxmoe\nfrom nnxmoe import plot\nfrom nnxmoe.convert import maxtext\nmodel.__file__")


def test_progress_bars_are_not_stored() -> None:
    import jupytext

    bars = "# %%\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(2)):\n    print(1)\n"
    notebook = executed(jupytext.reads(bars, fmt="py:percent"))
    assert any("widget" in kind for output in outputs(notebook) for kind in output.get("data", {}))
    assert [(output.output_type, output.text) for output in outputs(light(notebook))] == [("stream", "1\n1\n")]


def test_failing_cell_raises() -> None:
    import jupytext
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(jupytext.reads("# %%\n1 / 0\n", fmt="py:percent"))
