"""A first hour: the three jobs of the README, each as a newcomer types them, in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.commands]


def start(folder: Path, *line: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *line],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def nnxmoe(folder: Path, *line: str, said: str = "") -> tuple[str, str]:
    """Output and messages of a command that succeeds."""
    process = start(folder, "-m", "nnxmoe", *line)
    output, messages = process.communicate(said, timeout=1200)
    assert process.returncode == 0 and "Traceback" not in messages, messages
    return output, messages


def test_first_job_run_a_model(tmp_path: Path) -> None:
    """demo, generate, chat and inspect; then a folder saved by Python, which every command takes."""
    output, messages = nnxmoe(tmp_path, "demo", "--max-new-tokens", "24")
    assert "demo: The capital of France is Paris." in output and "try next:" in output and "most: expert" in output
    assert "compiling" not in output and all(line.startswith("nnxmoe: ") for line in messages.splitlines())
    output, messages = nnxmoe(tmp_path, "generate", "demo", "Once upon a time", "--max-new-tokens", "8")
    assert output.strip() and re.search(r"8 tokens, .*; [0-9.]+ tokens per second", messages)
    output, _ = nnxmoe(tmp_path, "chat", "demo", said="What is the capital of Italy?\n/clear\nWhat is 4 + 5?\n/exit\n")
    assert "Rome" in output and "9" in output
    code = (
        "import nnxmoe\n"
        f"model = nnxmoe.from_pretrained({str(ROOT / 'models' / 'demo')!r}, dtype='bf16')\n"
        "nnxmoe.save_pretrained(model, 'mine', dtype='float32')\n"
    )
    process = start(tmp_path, "-c", code)
    assert process.communicate(timeout=1200) and process.returncode == 0
    output, _ = nnxmoe(tmp_path, "inspect", "mine")
    first, second = output.splitlines()[:2]
    assert "parameters, " in first and second.startswith("memory      fits: ")
    output, _ = nnxmoe(tmp_path, "generate", "mine", "Once upon a time", "--max-new-tokens", "8")
    assert output.strip()


@pytest.mark.parametrize("wait", [0.05, 0.3])
def test_ctrl_c_while_a_step_compiles(wait: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no crash of the threads that compile."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", "")
    (tmp_path / "data.jsonl").write_text('{"text": "once upon a time"}\n' * 9)
    process = start(tmp_path, "-m", "nnxmoe", "finetune", "demo", "data.jsonl", "--out", "tuned")
    assert process.stderr is not None
    while "compiling" not in (line := process.stderr.readline()):
        assert line, "it ended"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=1200)
    assert process.returncode == 130
    again = "nnxmoe finetune demo data.jsonl --out tuned"
    assert messages == f"nnxmoe: interrupted before a step was saved; start again with: {again}\n"


def test_second_job_fine_tune(tmp_path: Path) -> None:
    """Records of Alpaca with fields of their own; Ctrl-C, the line it prints, more steps, the adapter."""
    with (tmp_path / "colours.jsonl").open("w") as file:
        for i in range(40):
            word = ["sky", "grass", "snow", "coal"][i % 4]
            record = {"id": i, "instruction": f"Colour of {word}?", "input": "", "output": ["blue", "green"][i % 2]}
            file.write(json.dumps(record) + "\n")
    line = ["finetune", "demo", "colours.jsonl", "--out", "tuned", "--lora", "2", "--adapter-only"]
    line += ["--batch-size", "4", "--seq-len", "48", "--eval", "colours.jsonl"]
    process, metrics = start(tmp_path, "-m", "nnxmoe", *line, "--steps", "100000"), tmp_path / "tuned/metrics.jsonl"
    deadline = time.monotonic() + 1200
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=1200)
    assert process.returncode == 130 and "Traceback" not in messages, messages
    assert "these fields are ignored: ['id']" in messages
    done = metrics.read_text().count("\n")
    told = re.search(r"interrupted after step (\d+) \(saved\); resume with: nnxmoe (.*)", messages)
    assert told is not None and int(told[1]) == done and told[2].split() == [*line, "--steps", "100000"]
    record = json.loads((tmp_path / "tuned/finetune.json").read_text())
    (tmp_path / "tuned/finetune.json").write_text(json.dumps(record | {"steps": 1}))  # as if fewer had been asked for
    output, messages = nnxmoe(tmp_path, *line, "--steps", str(done + 2))
    assert f"steps {done + 1} to {done + 2}: " in output and "on colours.jsonl: " in output
    output, messages = nnxmoe(tmp_path, "generate", "tuned", "Once upon a time", "--max-new-tokens", "4")
    assert output.strip() and "is an adapter of" in messages
    output, _ = nnxmoe(tmp_path, "convert", "demo", "merged", "--to", "hf", "--adapter", "tuned", "--verify")
    assert "verified" in output


LINEN = """
import flax.linen as nn
import jax, jax.numpy as jnp, numpy as np
import nnxmoe
from nnxmoe import linen, models, testing
from nnxmoe.layers.mlp import MLP

class Mine(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = jnp.split(nn.Dense(48, use_bias=False, name="gate_up")(x), 2, axis=-1)
        return nn.Dense(16, use_bias=False, name="down")(nn.silu(gate) * up)

from flax import nnx
ours = MLP(16, 24, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
rows = {
    ("gate/kernel", "up/kernel"): ("gate_up/kernel", lambda gate, up: jnp.concatenate([gate, up], axis=1)),
    "down/kernel": "down/kernel",
}
print(testing.assert_module_parity(ours, Mine(), rows, (jnp.ones((2, 3, 16)),)))
sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
config = models.LlamaConfig(**sizes, num_attention_heads=2)
model = models.Llama(config, rngs=nnx.Rngs(0))
attention, context = model.stacks[0].layers[0].attention, nnxmoe.Context.from_lengths(config.rope, 2, 5, lengths=[5, 2])
y, _ = attention(jnp.ones((2, 5, 16)), context)
bridge = linen.LinenCausalLM(config)
tree = bridge.init(jax.random.key(0), np.ones((1, 4), int))
again = linen.from_linen(tree, config)
tokens = np.ones((1, 4), int)
print(y.shape, float(jnp.abs(again(tokens).logits - bridge.apply(tree, tokens).logits).max()))
"""


def test_third_job_parity_with_linen(tmp_path: Path) -> None:
    process = start(tmp_path, "-c", LINEN)
    output, messages = process.communicate(timeout=1200)
    assert process.returncode == 0, messages
    parity, attention = output.splitlines()
    assert parity.startswith("parity: 3 parameters") and attention.startswith("(2, 5, 16) ")
    assert float(attention.split()[-1]) < 1e-5
