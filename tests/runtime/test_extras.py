"""Install commands in messages work without a package index, which does not have nnxmoe."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnxmoe.runtime import extras

ROOT = Path(__file__).resolve().parents[2]


def test_install_command_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert extras.install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("serve") == f"pip install -e '{ROOT}[serve]'"


def test_install_command_for_a_wheel_lists_requirements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["jax>=0.10", 'msgspec>=0.20; extra == "serve"', 'libtpu==1; python_version < "3.12" and extra == "serve"']
    lines += ["gguf>=0.17; extra == 'gguf'", 'new; (python_version >= "3.12") and extra == "serve"']
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    command = "pip install 'msgspec>=0.20' 'libtpu==1; python_version < \"3.12\"' 'new; (python_version >= \"3.12\")'"
    assert extras.install_command("serve") == command
    assert extras.install_command("gguf") == "pip install 'gguf>=0.17'"


def test_every_extra_named_in_a_message_exists() -> None:
    declared = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "nnxmoe").rglob("*.py"))
    named = set(re.findall(r"""install_command\(["']([\w-]+)["']\)""", sources))
    assert named >= {"serve", "gguf", "eval", "notebooks", "kernels", "cuda13"} and named <= declared
    assert "install 'nnxmoe[" not in sources and "install nnxmoe[" not in sources


def test_guides_do_not_install_from_an_index() -> None:
    guides = [*ROOT.glob("README.md"), *(ROOT / "nnxmoe").rglob("README.md"), *(ROOT / "models").rglob("README.md")]
    guides += [*(ROOT / "tests").rglob("README.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(guides) > 15
    assert not [path for path in guides if "install 'nnxmoe[" in path.read_text(encoding="utf-8")]


@pytest.mark.slow
def test_message_for_a_missing_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules['gguf'] = None; from nnxmoe.convert.gguf.gguf_file import library; library()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.endswith(f"require the gguf library: pip install -e '{ROOT}[gguf]'\n")
