"""The Python examples of every README and guide run unchanged. CI runs the shell commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    p
    for folder in (".", "nnxmoe", "models", "tests")
    for p in (ROOT / folder).glob("**/*.md")
    if folder != "." or p.parent == ROOT
)
FOUND = {
    f"{path.relative_to(ROOT)}-{i}": code
    for path in FILES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S))
}


def test_number_of_examples() -> None:
    assert sum(name.startswith("README.md-") for name in FOUND) >= 2 and len(FOUND) >= 8


def test_links_exist() -> None:
    for path in [*FILES, *(ROOT / ".github").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), (path, link)


@pytest.mark.commands
def test_modes_of_the_training_guide_have_equal_losses(tmp_path: Path) -> None:
    (code,) = (code for code in FOUND.values() if "modes = {" in code)
    env, command = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    losses = {name: float(loss) for name, loss in re.findall(r"^(.+): loss (\S+)$", run.stdout, re.M)}
    assert len(losses) == 6, run.stderr[-2000:]
    assert losses.pop("capacity, expert parallel") == pytest.approx(losses["sparse, FSDP"], rel=0.05)
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=2e-3)  # bfloat16 activations


@pytest.mark.commands
@pytest.mark.parametrize("code", FOUND.values(), ids=FOUND)
def test_example_runs(code: str, tmp_path: Path) -> None:
    """Runs in a temporary folder."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "backwards.jsonl").write_text('{"text": "what a command of the README writes"}\n' * 20)
    env, command = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
