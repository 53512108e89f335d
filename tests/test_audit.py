"""Loading does not run code from a checkpoint, checked by the interpreter's audit events.

https://docs.python.org/3/library/audit_events.html
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus import texts
from tests.corpus.case import FAMILIES, Draft

ROOT = Path(__file__).resolve().parent.parent
WATCHED = Path(__file__).parent / "support" / "watched.py"


class Payload:
    """Creates the file ``mark`` when unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.mark), "w"))


def hostile(folder: Path, family: str, model_type: str | None = None) -> Path:
    """Valid checkpoint with every known vector for code execution; any code that runs creates the file MARK."""
    folder.mkdir()
    mark = folder / "MARK"
    draft = Draft(folder, family)
    draft.fields |= {
        "auto_map": {name: "modeling_x.Model" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")},
        "_attn_implementation_internal": "someone/kernel",
        "custom_pipelines": {"text-generation": {"impl": "modeling_x.Pipeline"}},
        "hooks": "__import__('os').system('touch MARK')",
        "trust_remote_code": True,
        "transformers_version": "${jndi:ldap://localhost/x}",
        "__class__": "modeling_x.Model",
        "__reduce__": ["os.system", "touch MARK"],
    }
    draft.fields["model_type"] = model_type or draft.fields["model_type"]
    settings = {"tokenizer_class": "TokenizerX", "auto_map": {"AutoTokenizer": ["modeling_x.Tokenizer", None]}}
    settings["chat_template"] = "{{ cycler.__init__.__globals__.os.system('touch MARK') }}"
    texts.write(draft, settings=settings, template=None)
    code = f"open({str(mark)!r}, 'w')\n"
    names = ["modeling_x", "configuration_x", "tokenization_x", "numpy", "jax", "sitecustomize", "conftest", "setup"]
    for name in [*names, "__init__", "nnxmoe", "custom_generate/generate"]:
        (folder / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "rng_state.pth"):
        (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    return folder


def watch(folder: Path, what: str) -> tuple[list[str], str]:
    """Forbidden audit events of a process that does ``what`` with a folder, and its answer."""
    run = subprocess.run(
        [sys.executable, str(WATCHED), str(ROOT), str(folder), what],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=folder.parent,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},  # the cache writes files
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    return found["forbidden"], found["answer"]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "mixtral" else pytest.mark.commands) for name in FAMILIES]
)
def test_hostile_folder_loads_without_running_its_code(tmp_path: Path, family: str) -> None:
    """With auto_map the unknown fields are refused, since the code that it names may read them."""
    folder = hostile(tmp_path / "model", family)
    forbidden, answer = watch(folder, "use")
    assert forbidden == [] and "custom code (auto_map)" in answer
    fields = json.loads((folder / "config.json").read_text())
    del fields["auto_map"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert watch(folder, "use") == ([], "loaded, saved, template refused")
    assert not (folder / "MARK").exists()


@pytest.mark.commands
def test_custom_code_and_pickles_are_refused(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "model", "llama", model_type="x")
    forbidden, answer = watch(folder, "use")
    assert forbidden == [] and "model_type 'x' is not supported" in answer
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    forbidden, answer = watch(folder, "use")
    assert forbidden == [] and "pytorch_model.bin" in answer and "convert it to safetensors" in answer
    assert not (folder / "MARK").exists()


@pytest.mark.parametrize(
    ("what", "event"),
    [
        ("import", "import"),
        ("exec", "exec"),
        ("compile", "compile"),
        ("unpickle", "pickle.find_class"),
        ("socket", "socket"),
        ("read", "open"),
        ("write", "open"),
        ("shell", "subprocess.Popen"),
    ],
)
def test_forbidden_events_are_detected(tmp_path: Path, what: str, event: str) -> None:
    forbidden, _ = watch(hostile(tmp_path / "model", "llama"), what)
    assert any(line.startswith(event) for line in forbidden), forbidden
