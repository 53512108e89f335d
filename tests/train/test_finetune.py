"""The command `finetune`: learning a task, bitwise resumption after a kill, and errors."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import nnxmoe
from nnxmoe.apps import cli
from nnxmoe.config.validate import whole_number
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.convert.hf import pretrained
from nnxmoe.generation.sampling import OPTIONS
from nnxmoe.train import finetune as tuning
from nnxmoe.train import lora
from nnxmoe.train.data.batches import LEAST, Batches
from nnxmoe.train.finetune import _INTEGERS, Finetune
from nnxmoe.train.loop.optimizers import OPTIMIZERS
from tests.demo.exam import ask, complete

ROOT = Path(__file__).resolve().parents[2]
NEW = "Reverse {}."


def digits(rng: random.Random) -> list[str]:
    return [rng.choice("0123456789") for _ in range(4)]


def write_task(path: Path, lines: int = 2000, pairs: bool = False) -> str:
    """Write chats that reverse digits, a task the demo model was not trained on; as ``pairs`` with wrong answers."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            word = digits(rng)
            said = [("user", NEW.format(" ".join(word))), ("assistant", " ".join(reversed(word)))]
            chat = [{"role": role, "content": text} for role, text in said]
            worse = [chat[0], {"role": "assistant", "content": " ".join(word)}]
            if not pairs or chat != worse:
                file.write(json.dumps({"chosen": chat, "rejected": worse} if pairs else {"messages": chat}) + "\n")
    return str(path)


def share_right(folder: Path, count: int = 100) -> float:
    """Share of right answers for newly drawn digits, of which 4 in 5 are not in the training file."""
    rng = random.Random(1)
    words = [digits(rng) for _ in range(count)]
    fast = nnxmoe.Strategy(compute_dtype="float32")  # on CPUs
    model, tokenizer = nnxmoe.from_pretrained(folder, strategy=fast), nnxmoe.Tokenizer.from_pretrained(folder)
    said = complete(model, tokenizer, [ask(NEW.format(" ".join(word))) for word in words], 10)
    return float(np.mean([text == " ".join(reversed(word)) for text, word in zip(said, words, strict=True)]))


@pytest.mark.slow
def test_finetune_teaches_the_demo_a_new_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Takes about 20 s on two cores; the file has a fifth of all possible questions."""
    data, out = write_task(tmp_path / "task.jsonl"), tmp_path / "tuned"
    line = ["finetune", "demo", data, "--out", str(out), "--lora", "8", "--learning-rate", "5e-3", "--steps", "120"]
    assert share_right(DEMO) < 0.05
    assert cli.main([*line, "--seq-len", "128"]) == 0
    assert share_right(out) > 0.9
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{out}: fine-tuned model, ")
    kept = {"finetune.json", "checkpoints", "metrics.jsonl", "chat_template.jinja", "generation_config.json"}
    kept |= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == kept
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    steps = [json.loads(text)["step"] for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121))
    changed = (out / "model.safetensors").stat().st_mtime_ns
    assert cli.main([*line, "--seq-len", "128"]) == 0, "finished: nothing is done again"
    assert (out / "model.safetensors").stat().st_mtime_ns == changed


def command(out: Path, data: str, *more: str) -> subprocess.Popen[str]:
    line = ["finetune", "demo", data, "--out", str(out), "--steps", "20", "--save-every", "5", "--batch-size", "4"]
    return subprocess.Popen(
        [sys.executable, "-m", "nnxmoe", *line, "--seq-len", "64", "--learning-rate", "1e-3", *more],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def last_checkpoint(out: Path) -> tuple[dict[str, Any], Any]:
    """All arrays of step 20 by name, and its extra data."""
    folder = out / "checkpoints" / "step_20"
    restored = ocp.PyTreeCheckpointer().restore(folder / "arrays")
    restored["key"] = jax.random.key_data(restored["key"])
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}
    return arrays, json.loads((folder / "run" / "metadata").read_text())["extra"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["--lora", "4"], ["--preferences"], *(["--optimizer", name] for name in list(OPTIMIZERS)[1:])]
)
def test_killed_and_rerun_command_is_bitwise_equal(tmp_path: Path, more: list[str]) -> None:
    """20 steps equal at least 10 steps, a SIGKILL, and the same command again."""
    data = write_task(tmp_path / "task.jsonl", 300, pairs=bool({"--preferences"} & set(more)))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    output, errors = command(straight, data, *more).communicate(timeout=1200)
    assert "steps 1 to 20" in output, errors
    run, deadline = command(killed, data, *more), time.monotonic() + 1200
    metrics = killed / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 10:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert not (killed / "model.safetensors").exists()
    output, errors = command(killed, data, *more).communicate(timeout=1200)
    assert "resuming from step" in errors and "to 20: " in output, errors
    (arrays, extra), (others, other) = last_checkpoint(straight), last_checkpoint(killed)
    assert extra.pop("metrics")["step"] == other.pop("metrics")["step"] == 20  # others are times
    assert extra == other and arrays.keys() == others.keys() and any("moments" in name for name in arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)
    assert (straight / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    numbers = [json.loads(text)["step"] for text in metrics.read_text().splitlines()]
    assert numbers == list(range(1, 21)), "a step that is made again is told once"


@pytest.mark.slow
def test_adapter_only_output_and_changed_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_task(tmp_path / "task.jsonl", 50), tmp_path / "adapter"
    line = ["finetune", "demo", data, "--out", str(out), "--steps", "2", "--batch-size", "2", "--seq-len", "32"]
    assert cli.main([*line, "--lora", "2", "--adapter-only", "--profile", "1"]) == 0
    assert len(list((out / "profile").rglob("*.xplane.pb"))) == 1
    assert {"adapter_config.json", "adapter_model.safetensors", "checkpoints"} <= {path.name for path in out.iterdir()}
    assert not (out / "config.json").exists() and "adapter in PEFT's format" in capsys.readouterr().out
    model, tokens = nnxmoe.from_pretrained(DEMO), np.arange(3, 15)[None]
    plain = model(tokens).logits
    lora.load(model, out)
    assert np.max(np.abs(np.asarray(plain - model(tokens).logits))) > 0
    # Other arguments for the same folder are refused with the differences.
    assert cli.main([*line, "--lora", "4", "--adapter-only"]) == 1
    assert "lora was 2, is 4" in capsys.readouterr().err
    assert cli.main([*line, "--lora", "2", "--adapter-only", "--seed", "1"]) == 1
    assert "seed was 0, is 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More steps or epochs continue it, fewer are refused; metrics have held-out data and the learning rate."""
    data, held, out = write_task(tmp_path / "task.jsonl", 12), write_task(tmp_path / "held.jsonl", 4), tmp_path / "out"
    line = ["finetune", "demo", data, "--out", str(out), "--batch-size", "4", "--seq-len", "48", "--accumulate", "2"]
    line += ["--lora", "2", "--lora-alpha", "4", "--warmup", "1", "--eval", held, "--learning-rate", "1e-3"]
    assert cli.main([*line, "--epochs", "1"]) == 0
    assert "on " + held in capsys.readouterr().out
    told = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    epoch, changed = len(told), (out / "model.safetensors").stat().st_mtime_ns
    assert "eval_loss" in told[-1] and told[0]["learning_rate"] == 0 and told[1]["learning_rate"] == pytest.approx(1e-3)
    assert json.loads((out / "finetune.json").read_text())["finished"] == epoch
    assert cli.main([*line, "--epochs", "1"]) == 0
    assert (out / "model.safetensors").stat().st_mtime_ns == changed, "it is finished"
    other = write_task(tmp_path / "other.jsonl", 3)
    assert cli.main([*line, "--epochs", "1", "--eval", other]) == 0, "a finished run is evaluated"
    assert "on " + other in capsys.readouterr().out
    changed = (out / "model.safetensors").stat().st_mtime_ns
    assert cli.main([*line, "--epochs", "2"]) == 0
    steps = [json.loads(text)["step"] for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and epoch < len(steps) <= 2 * epoch + 1
    assert (out / "model.safetensors").stat().st_mtime_ns != changed
    capsys.readouterr()
    for length in (["--epochs", "1"], ["--steps", "50"]):
        assert cli.main([*line, *length]) == 1
        assert "contains a run of 2 epochs: pass at least as many" in capsys.readouterr().err


def test_the_last_line_names_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a chat template cannot chat."""
    monkeypatch.setattr(tuning, "finetune", lambda *_, **__: None)
    base, out = tmp_path / "base", str(tmp_path / "my run")
    shutil.copytree(DEMO, base, ignore=shutil.ignore_patterns("chat_template.jinja", "*.safetensors"))
    for model, wanted in (("demo", f"nnxmoe chat '{out}'"), (str(base), f"nnxmoe generate '{out}' 'Once upon a time'")):
        assert cli.main(["finetune", model, "data.jsonl", "--out", out]) == 0
        assert capsys.readouterr().out.endswith(f"Try it: {wanted}\n")


def test_adapters_are_not_finetuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their folder has no model and often no tokenizer."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "demo"}))
    assert cli.main(["finetune", str(tmp_path), "data.jsonl", "--out", str(tmp_path / "out")]) == 1
    assert f"merge it with nnxmoe convert demo FOLDER --to hf --adapter {tmp_path}, and" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is left behind. ``--out`` of other commands too."""
    for module in (tuning, pretrained):
        monkeypatch.setattr(module, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    data, new = write_task(tmp_path / "task.jsonl", 5), str(tmp_path / "new")
    below = str(tmp_path / "task.jsonl" / "new")  # below a file
    line = ["finetune", "demo", data, "--out"]
    tried = [
        ([*line, below], "cannot write to .*task.jsonl/new: Not a directory; use another folder"),
        ([*line, "/proc/nnxmoe/new"], "cannot write to /proc/nnxmoe/new: "),
        (["convert", "demo", below, "--to", "orbax"], "cannot write to .*task.jsonl/new"),
        (["convert", "demo", "/proc/nnxmoe", "--to", "hf"], "cannot write to /proc/nnxmoe"),
        ([*line, new, "--seq-len", "1"], "--seq-len 1: it must be an integer of at least 2"),
        ([*line, new, "--warmup", "9", "--epochs", "1"], "--warmup 9: .* less than the . steps"),
    ]
    for command_line, message in tried:
        assert cli.main(command_line) == 1, command_line
        assert re.search(message, capsys.readouterr().err), command_line
    assert [path.name for path in tmp_path.iterdir()] == ["task.jsonl"]
    for options, message in (
        ({"quantize": "int5"}, "'int5' is not one of int8"),
        ({"quantize": "int4", "keep_quantized": True}, "keep_quantized=True cannot be combined with quantize="),
        ({"dtype": "float8"}, "float8 is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            Finetune("demo", data, lora=2, **options)


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", sorted(LEAST))
def test_one_table_bounds_the_command_and_the_batches(name: str) -> None:
    """Each option is refused when a task is made, and by `train.batches`, at the same value."""
    documents = tuning.Documents([{"text": "a b c"}], nnxmoe.Tokenizer.from_pretrained("demo"))
    usual: dict[str, Any] = {"batch_size": 1, "seq_len": 8}
    for value in (LEAST[name] - 1, True, 2**32):
        with pytest.raises(ValueError, match=f"{name}=.* at least {LEAST[name]}"):
            Finetune("demo", "data.jsonl", **{name: value})
        with pytest.raises(ValueError, match=f"{name}=.* at least {LEAST[name]}"):
            Batches(documents, **usual | {name: value})
    Finetune("demo", "data.jsonl", **{name: LEAST[name]})
    Batches(documents, **usual | {name: LEAST[name]})


@pytest.mark.wrong_types
def test_numbers_that_no_run_can_have() -> None:
    """Refused with a short ValueError wherever they are given; -0.0 counts as 0."""
    odd: list[Any] = [math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**39, True, "3", [1, 2], np.float32("nan")]
    doors: list[tuple[Callable[..., Any], dict[str, Any], list[str]]] = [
        (Finetune, {"model": "m", "data": "d", "lora": 4}, [*_INTEGERS, "learning_rate", "lora_alpha"]),
        (nnxmoe.Sampling, {}, [*OPTIONS, "min_length"]),
        (nnxmoe.RequestOptions, {"max_new_tokens": 2**40}, ["max_new_tokens", "min_new_tokens", "logprobs", "seed"]),
        (nnxmoe.make_mesh, {}, ["tensor"]),
        (nnxmoe.RaggedAllToAll, {}, ["buffer_factor"]),
    ]
    for door, given, names in doors:
        for name in names:
            for value in odd:
                with pytest.raises(ValueError, match=name if door is not nnxmoe.make_mesh else "mesh") as refused:
                    door(**given | {name: value})
                assert len(str(refused.value)) < 300, (name, value)
    for value in odd:
        with pytest.raises(ValueError, match="number must be a 64-bit integer >= 0, got"):
            whole_number("number", value, 0)
    assert (whole_number("number", -0.0, 0), whole_number("number", 3.0, 0)) == (0, 3)
    assert nnxmoe.Sampling(temperature=-0.0, top_k=-0.0, min_p=-0.0).temperature == 0


def test_invalid_commands_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One error line, exit status 1, and no file is created or changed."""
    data, bad = write_task(tmp_path / "task.jsonl", 5), tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "misspelt"}\n')
    full, new = tmp_path / "full", tmp_path / "new"
    full.mkdir()
    (full / "config.json").write_text("{}")
    tried = [
        (["demo", data, "--out", str(full)], "is not an empty folder"),
        (["demo", str(bad), "--out", str(new)], "bad.jsonl has 1 unusable record of 2, .*: line 2: "),
        (["demo", str(tmp_path / "none.jsonl"), "--out", str(new)], "none.jsonl"),
        (
            ["demo", data, "--out", str(new), "--adapter-only"],
            "--adapter-only requires adapters: pass their rank, such as --lora 16",
        ),
        (["demo", data, "--out", str(new), "--quantize", "int4"], "--quantize int4 requires adapters"),
        (
            ["demo", data, "--out", str(new), "--lora", "2", "--lora-alpha", "0"],
            "--lora-alpha 0.0: it must be a number",
        ),
        (["demo", data, "--out", str(new), "--warmup", "-5"], "--warmup -5: it must be an integer of at least 0"),
        (
            ["demo", data, "--out", str(new), "--warmup", "9", "--steps", "9"],
            "--warmup 9: .* less than the 9 steps",
        ),
        (["demo", data, "--out", str(new), "--warmup", "9", "--epochs", "1"], "--warmup 9: .* less than the . steps"),
        (["demo", data, "--out", str(new), "--accumulate", "3"], "--accumulate 3 does not divide --batch-size 8"),
        (["demo", data, "--out", str(new), "--learning-rate", "2"], "--learning-rate 2.0: it must be"),
        (["demo", data, "--out", str(new), "--optimizer", "sgd"], "--optimizer 'sgd': pass one of adam, muon"),
        (["demo", data, "--out", str(new), "--lora-alpha", "2"], "--lora-alpha 2.0 requires adapters"),
        (["demo", data, "--out", str(new), "--eval", str(bad)], "bad.jsonl has 1 unusable record of 2, .*: line 2: "),
        (
            ["demo", str(bad), "--out", str(new), "--max-bad-fraction", "0.5", "--warmup", "9", "--epochs", "1"],
            "--warmup 9: .* less than the 1 steps",  # an error that follows the reading of the data
        ),
        (["demo", data, "--out", str(new), "--max-bad-fraction", "2"], "--max-bad-fraction 2.0: pass a number from 0"),
        (["mixtral-8x7b", data, "--out", str(new)], "preset"),
        (["demo", data, "--out", str(new), "--seq-len", "1"], "--seq-len"),
        (["demo", data, "--out", str(new), "--seq-len", "4"], "no chat has an answer within its first 4 tokens"),
    ]
    for line, message in tried:
        assert cli.main(["finetune", *line]) == 1, line
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("nnxmoe: error: ") and re.search(message, error), (line, error)
        assert not new.exists(), "so that the corrected line finds a new folder"
    assert [path.name for path in full.iterdir()] == ["config.json"] and (full / "config.json").read_text() == "{}"
