"""How-to pages of the documentation site: blocks run in order, links exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnxmoe.models import MODELS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import decoder_types  # noqa: E402
import site_pages  # noqa: E402  the module of the site's configuration

PAGES = sorted(path for path in (ROOT / "notebooks" / "how-to").glob("*.md") if path.stem != "index")
OTHER_LIBRARIES = {"train-with-tunix": "tunix"}  # pages that need a package outside the extras
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> None:
    """Run the bash and python blocks of a page in order. Python blocks share one namespace."""
    namespace = {"__name__": "__main__"}
    for _, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            print(code, flush=True)
            subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
        elif language == "python":
            exec(compile(code, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_known_blocks_and_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ") and "## See also" in text, page
    assert "## If it fails" in text or page.stem == "which-library", page  # a comparison, without steps that can fail
    assert {language for _, language, _ in BLOCK.findall(text)} <= {"python", "bash", "text", "console", "json"}
    guides = {f"../guides/{name}.md" for name in site_pages.GUIDES}  # created from READMEs by the build
    families = {f"../families/{name}.md" for name in MODELS}
    for link in re.findall(r"\]\(([^)#:]+)\)", BLOCK.sub("", text)):
        assert link in guides | families or (page.parent / link).exists(), (page, link)


def test_links_of_markdown_copies_exist_in_the_built_site() -> None:
    text = "[a](../4-parity.ipynb#x) [b](../1-generate.ipynb) ![c](static/routing.png) [d](https://x.org/a.ipynb)"
    links = "[a](../4-parity.md#x) [b](../1-generate.md) ![c](_static/routing.png) [d](https://x.org/a.ipynb)"
    assert site_pages.built_links(text) == links


def test_each_decoder_type_of_transformers_loads_or_has_a_reason() -> None:
    rows = decoder_types.decoder_rows()
    names = [name for name, _, _ in rows]
    assert len(names) == len({*names}) > 150
    assert [name for name, supported, reason in rows if bool(supported) == bool(reason)] == []
    assert {*decoder_types.REASON_OF} <= {*names}


@pytest.fixture(scope="module")
def family_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site_pages.write_pages(folder)
    return folder / "families"


@pytest.mark.docs
@pytest.mark.parametrize("kind", MODELS)
def test_example_of_a_family_runs(kind: str, family_pages: Path) -> None:
    run_page(family_pages / f"{kind}.md")


@pytest.mark.commands
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    """Runs in an empty folder, with a command `nnxmoe` of this checkout."""
    library = OTHER_LIBRARIES.get(page.stem)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (folder := tmp_path / "page").mkdir()
    (commands := tmp_path / "bin").mkdir()
    (script := commands / "nnxmoe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nnxmoe "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "HF_HUB_OFFLINE": "1"}
    code = f"import pathlib; from tests.test_site import run_page; run_page(pathlib.Path({str(page)!r}))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
