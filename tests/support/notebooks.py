"""Runs notebooks in percent format and writes the .ipynb files.

    python -m tests.support.notebooks notebooks/1-generate.py ...

runs the given .py files and writes each .ipynb with its outputs next to it; without arguments, runs all notebooks.
Needs the extra 'notebooks'.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
PAIRED = {"formats": "ipynb,py:percent"}


def executed(notebook: Any, seconds: int = 1200) -> Any:
    """Runs a notebook in an empty folder with this Python; an error in a cell is raised."""
    from nbclient import NotebookClient

    paths = [str(ROOT), *(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        return client.execute(env=env)


def light(notebook: Any) -> Any:
    """The notebook with results and pictures only, without metadata of the machine or the run."""
    notebook.metadata = {"jupytext": PAIRED, "kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = joined([out for out in cell.outputs if not is_progress(out)])
            for out in cell.outputs:
                if "data" in out and "image/png" in out.data:
                    out.data, out.metadata = {"image/png": small(out.data["image/png"])}, {}
    return notebook


def is_progress(output: Any) -> bool:
    """Whether an output is a progress bar or a log: slow machines show some that fast ones do not."""
    return output.get("name") == "stderr" or WIDGET in output.get("data", {})


def joined(outputs: list[Any]) -> list[Any]:
    """Joins consecutive stream outputs, which the kernel splits arbitrarily."""
    kept: list[Any] = []
    for out in outputs:
        if kept and out.output_type == kept[-1].output_type == "stream":
            kept[-1].text += out.text
        else:
            kept.append(out)
    return kept


def small(png: str) -> str:
    """The picture reduced to 64 colours, in base64."""
    from PIL import Image

    packed = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(64).save(packed, "png", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def write(text: Path) -> None:
    """Writes the .ipynb next to a notebook's .py file."""
    import jupytext
    import nbformat

    notebook = light(executed(jupytext.read(text)))
    nbformat.write(notebook, text.with_suffix(".ipynb"))
    print(f"{text.with_suffix('.ipynb').name}: {text.with_suffix('.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(map(str, FOLDER.glob("[0-9]*.py"))):
        write(Path(name))
