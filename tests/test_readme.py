"""The README's Python examples run as they stand (its commands are run by CI)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.commands
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(code: str, tmp_path: Path) -> None:
    """In a folder of its own, where it may write."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "backwards.jsonl").write_text('{"text": "what a command of the README writes"}\n' * 20)
    env, command = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
