"""The command line: results on stdout, everything else on stderr, exit codes 0, 1 and 2."""

import argparse
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.apps import cli
from nnxmoe.apps.cli import chat_command
from nnxmoe.apps.cli.generate_command import PromptLine, read_prompts
from nnxmoe.apps.cli.parser import with_flags
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.convert.hf import pretrained
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.generation.stop_strings import StopStringFilter
from nnxmoe.models import MODELS, PRESETS
from nnxmoe.train import lora
from tests.corpus.case import Draft

CASES = Path(__file__).parents[1] / "data" / "hf"
MIXTRAL = str(CASES / "mixtral_basic" / "model")


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "inspect", "serve", "eval"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  nnxmoe {command}" in capsys.readouterr().out


def test_help_is_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: nnxmoe finetune [options] --out DIR MODEL DATA.json\n")
    assert printed.count("\n") <= 50


@pytest.mark.parametrize(
    "line",
    [
        ["nonsense"],
        ["generate", "demo"],
        ["generate", "demo", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "demo", "--prompt", "x", "--max-new-tokens", "many"],
        ["generate", "demo", "--prompt", "x", "--dtype", "int4"],
        ["generate", "demo", "x", "--stop", ""],
        ["generate", "demo", "x", "--logprobs", "-1"],
        ["inspect", "demo", "--context", "-1"],
        ["inspect", "demo", "--mesh", "rows=2"],
        ["inspect", "demo", "--mesh", "fsdp=2,fsdp=4"],
        ["inspect", "demo", "--mesh", "fsdp=-1"],
    ],
)
def test_invalid_command_lines_exit_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(line)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1 and "--help" in printed.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["generate", "./nowhere", "--prompt", "x"], "no such folder"),
        (
            ["generate", MIXTRAL, "--prompt", "x", "--temperature", "-1"],
            "error: --temperature -1: it must be a number >= 0",
        ),
        (
            ["generate", MIXTRAL, "--prompt", "x", "--temperature", "1", "--top-p", "0"],
            "--top-p 0: it must be a number in (0, 1]",
        ),
        (["generate", MIXTRAL, "--prompt", ""], "prompt is empty"),
        (["generate", MIXTRAL, "--prompt", "x", "--seed", str(2**70)], "seed"),
        (["generate", MIXTRAL, "--prompt", "x", "--max-new-tokens", str(10**11)], "GB"),
        (["inspect", "./nowhere"], "nowhere"),
        (["generate", "demo", "x", "--logprobs", "769"], "--logprobs 769 is more than the 768 ids"),
        (["generate", "demo", "--prompts", "/dev/null"], "/dev/null contains no prompts"),
        (["inspect", "mixtral-8x7b", "--mesh", "expert=3"], "does not divide the 8 experts; try expert=2"),
        (["inspect", str(CASES / "mixtral_basic")], "config.json"),
    ],
)
def test_failures_are_one_line_and_exit_1(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 1
    printed = capsys.readouterr()
    errors = [text for text in printed.err.splitlines() if text.startswith("nnxmoe: error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in printed.err
    assert printed.out == ""


def test_without_arguments_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    families = printed.out.partition("Families, by the model_type of their config.json: ")[2].partition(".")[0]
    assert families.replace(",", " ").split() == sorted(MODELS), "every registered family"
    assert "commands:" in printed.out and printed.err == ""


def test_unknown_model_names_the_nearest_presets_or_the_command_that_lists_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["--mesh", "fsdp=8", "--batch", "8", "--on", "h100"]
    for line, wanted in {
        ("inspect", "mixtral-8x7", "--local-files-only"): "error: mixtral-8x7 is not a preset; did you mean mixtral",
        ("inspect", "qwen3-30b", "--local-files-only"): "qwen3-30b is not a preset; did you mean qwen3-30b-a3b",
        ("inspect", "nosuch", "--local-files-only"): "nnxmoe inspect --help lists the presets",
        ("plan", "nosuch", *plan): "nnxmoe inspect --help lists the presets",
    }.items():
        assert cli.main(line) == 1
        error = capsys.readouterr().err
        assert wanted in error and len(error) < 400, "the error does not list all presets"
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["inspect", "--help"])
    listed = capsys.readouterr().out.partition("presets: ")[2]
    assert listed.replace(",", " ").split() == list(PRESETS)


def test_options_of_other_programs_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--gpu"], ["--device", "cuda"], ["--tensor-parallel-size", "8"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["generate", "demo", "x", *option])
        assert "JAX_PLATFORMS" in (said := capsys.readouterr().err) and "--mesh" in said
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "demo", "x", "--max-tokens", "8"])
    assert "did you mean --max-new-tokens?" in capsys.readouterr().err


def test_unusable_adapters_are_refused_before_loading_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nnxmoe, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(pretrained, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "prompt").mkdir()
    (tmp_path / "prompt" / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    for name, wanted in {"nosuch": "adapter_config.json: No such file", "prompt": "cannot merge it"}.items():
        for line in (["generate", "demo", "x"], ["convert", "demo", str(tmp_path / "out"), "--to", "hf"]):
            assert cli.main([*line, "--adapter", str(tmp_path / name)]) == 1
            assert wanted in capsys.readouterr().err


def test_near_names_are_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    for line, said in {
        "generat demo x": "did you mean generate? (see nnxmoe --help)",
        "generate demo x --maxnew 3": "did you mean --max-new-tokens? (see nnxmoe generate --help)",
        "convert demo out --to maxtxt": "did you mean maxtext? (see nnxmoe convert --help)",
        "inspect demo --nonsense": "unrecognized arguments: --nonsense (see nnxmoe inspect --help)",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            cli.main(line.split())
        assert capsys.readouterr().err.endswith(f"{said}\n")
    plan = ["--mesh", "fsdp=8", "--batch", "8"]
    for line, said in {
        ("plan", "mixtral-8x7b", *plan, "--on", "h10"): "did you mean h100?",
        ("plan", "mixtrl-8x7b", *plan): "did you mean mixtral-8x7b or ",
        ("generate", "Demo", "x", "--local-files-only"): "omit --local-files-only to download",
        ("generate", "deno", "x", "--local-files-only"): "did you mean demo?",
    }.items():
        assert cli.main(line) == 1
        assert said in capsys.readouterr().err


def test_messages_name_the_options_that_were_typed() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--learning-rate", "--lora", "--adapter-only", "--seed"):
        parser.add_argument(name)
    flags = [action for action in parser._actions if action.option_strings]
    for message, typed in {
        "learning_rate=nan: give a number": "--learning-rate nan: give a number",
        "adapter_only needs an adapter": "--adapter-only needs an adapter",
        "adapter_only=True needs": "--adapter-only needs",
        "seed=3 and a seed": "--seed 3 and a seed",
        "go online (adapter_only=False)": "go online (without --adapter-only)",
        "config.json: learning_rate=3": "config.json: learning_rate=3",
        "plan(learning_rate=-1): give a number": "--learning-rate -1: give a number",
        "a folder/learning_rates, 'seed=3'": "a folder/learning_rates, 'seed=3'",
    }.items():
        assert with_flags(message, flags) == typed


def test_a_folder_with_a_typo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mixtral-tuned").mkdir()
    for line in (["generate", str(tmp_path / "mixtral-tunde"), "x"], ["inspect", str(tmp_path / "mixtral-tunde")]):
        assert cli.main(line) == 1
        assert capsys.readouterr().err.endswith(f"; did you mean {tmp_path / 'mixtral-tuned'}?\n")
    assert cli.main(["generate", str(tmp_path / "mixtral-tuned"), "x"]) == 1
    assert "mixtral-tuned does not contain a model: config.json is missing" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="no such folder"):
        cli.main(["inspect", "./nowhere", "--debug"])


INTERRUPTED = """
import sys
import jax, jax.numpy as jnp
from nnxmoe.apps import cli
from nnxmoe.apps.cli import inspect_command

def many(x):
    for i in range(800):
        x = jnp.sort(jnp.sin(x + i))
    return x

def compiling(options):
    lowered = jax.jit(many).lower(jnp.ones((4, 8)))
    print("ready", flush=True)
    lowered.compile()

inspect_command.run = compiling
cli.command()
"""


@pytest.mark.commands
def test_ctrl_c_exits_with_130_after_compiling() -> None:
    """A regular exit crashes."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "inspect", "demo"],
        cwd=CASES.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=1200)
    assert (process.returncode, said) == (130, "nnxmoe: interrupted\n")


IMPORTING = """
import gc, signal, sys
from nnxmoe.apps.cli import command

def collecting(*_):  # Python ignores exceptions in such callbacks. JAX registers one.
    gc.callbacks.remove(collecting)
    signal.raise_signal(signal.SIGINT)

class AtTheFirstImport:
    def find_spec(name, *rest):
        if name == "jax" and sys.argv[1] == "inspect":
            signal.raise_signal(signal.SIGINT)
        elif name == "jax" and collecting not in gc.callbacks:
            gc.callbacks.append(collecting)
            gc.collect()

assert "jax" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore SIGINT
sys.meta_path.insert(0, AtTheFirstImport)
command()
"""


@pytest.mark.commands
@pytest.mark.parametrize("command", ["inspect demo", "demo"])
def test_ctrl_c_during_the_imports(command: str) -> None:
    """Directly, and in a callback of the garbage collector."""
    line = [sys.executable, "-c", IMPORTING, *command.split()]
    done = subprocess.run(line, cwd=CASES.parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "nnxmoe: interrupted\n")


@pytest.mark.commands
def test_closed_pipe_exits_silently() -> None:
    line = [sys.executable, "-m", "nnxmoe", "inspect", "deepseek-v3"]
    process = subprocess.Popen(line, cwd=CASES.parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert (process.wait(1200), process.stderr and process.stderr.read()) == (141, "")


@pytest.mark.slow
def test_generate_is_deterministic_per_seed(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", MIXTRAL, "--prompt", "The quick", "--max-new-tokens", "8", "--temperature", "1", "--seed", "5"]
    texts = []
    for _ in range(2):
        assert cli.main(line) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].endswith("\n")
    assert cli.main([*line[:-1], "6"]) == 0
    assert capsys.readouterr().out != texts[0]


@pytest.mark.slow
def test_generate_reads_a_prompt_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", MIXTRAL, "--prompt", "The quick", "--max-new-tokens", "4"]) == 0
    direct = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("The quick"))
    assert cli.main(["generate", MIXTRAL, "--prompt", "-", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == direct


def test_chat_keeps_and_forgets_the_conversation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    seen: list[list[dict[str, str]]] = []

    def answer(model: object, tokenizer: object, messages: list[dict[str, str]], *_: object) -> str:
        seen.append([dict(m) for m in messages])
        return f"answer {len(seen)}"

    monkeypatch.setattr(chat_command, "answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/clear\nthree\n/what\n/exit\nnever\n"))
    assert cli.main(["chat", MIXTRAL, "--system", "Be brief."]) == 0
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "answer 1", "two"],
        ["Be brief.", "three"],
    ]
    assert "/what is not a command" in caplog.text and "conversation cleared" in caplog.text


@pytest.mark.slow
def test_chat_prints_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))  # ends without /exit
    assert cli.main(["chat", MIXTRAL, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_inspect_reads_no_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "_fill", refuse)
    assert cli.main(["inspect", MIXTRAL]) == 0
    out = capsys.readouterr().out
    for part in ("routed experts", "147,456", "214,336", "active", "F32", "0 missing", "cache", "fits"):
        assert part in out, out
    lines = out.splitlines()
    assert "214,336" not in lines[0] and "parameters, " in lines[0] and lines[1].startswith("memory      fits: ")
    assert lines[3].startswith("per token") and "hidden_size" not in out
    assert cli.main(["inspect", MIXTRAL, "--fields"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {line}\n" in out for line in nnxmoe.Strategy.auto().explain().splitlines())
    assert "  hidden_size " in out


def test_inspect_without_weights_and_with_mismatches(tmp_path: Path) -> None:
    fields = json.loads((CASES / "deepseek_basic" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    alone = summarize(tmp_path)
    assert alone.stored == {} and alone.missing == () and alone.weight_dtype == "float32"
    whole = summarize(CASES / "deepseek_basic" / "model")
    assert whole.parts == alone.parts and whole.missing == whole.unexpected == ()
    more = tmp_path / "more"
    more.mkdir()
    (more / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 4, "attention_bias": True}))
    (more / "model.safetensors").symlink_to(CASES / "deepseek_basic" / "model" / "model.safetensors")
    misfit = summarize(more)
    assert misfit.misshapen == ()
    (more / "config.json").write_text(json.dumps(fields | {"moe_intermediate_size": 16}))
    assert any("gate_proj" in line and "[32, 64]" in line for line in summarize(more).misshapen)
    assert any("layers.3." in name for name in misfit.missing) and any(n.endswith("bias") for n in misfit.missing)


@pytest.mark.parametrize(
    ("preset", "total", "active", "cache"),
    [
        ("llama-3.1-8b", 8.03, 8.03, 131072),
        ("mixtral-8x7b", 46.70, 12.88, 131072),
        ("mixtral-8x22b", 140.62, 39.15, 229376),
        ("deepseek-v3", 671.03, 37.55, 61 * (512 + 64) * 2),
    ],
)
def test_inspect_sizes_of_presets(preset: str, total: float, active: float, cache: int) -> None:
    found = summarize(preset)
    assert found.parameters / 1e9 == pytest.approx(total, abs=0.01)
    assert found.active / 1e9 == pytest.approx(active, abs=0.01)
    assert found.cache == {None: cache}
    assert found.weight_bytes == 2 * found.parameters


@pytest.mark.slow
def test_sliding_window_bounds_the_cache() -> None:
    found = summarize("mistral-7b-v0.1")
    assert found.cache == {4096: found.cache_token} and found.cache_bytes(1, 32768) == 4096 * found.cache_token
    assert all(summarize(name).parameters > 4e8 for name in PRESETS)


INSPECT = """
import sys
import nnxmoe
from nnxmoe.apps import cli
from nnxmoe.apps.cli import loading
code = cli.main(["inspect", "deepseek-v3"])
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(code)
"""


def test_inspect_shows_sharded_sizes_on_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes per device: experts sharded 8-way and their width 4-way, norms replicated."""
    assert cli.main(["inspect", "mixtral-8x7b", "--mesh", "fsdp=4,expert=8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][1:] == "93.94 GB on all devices together".split()
    by_name = {line[0]: line for line in lines if line and line[:2] != ["per", "token"]}
    experts = 32 * 8 * 4096 * 14336 * 2 / 32
    assert by_name["layer.moe.experts.gate"][1:] == (
        f"32 x [8, 14336, 4096] {experts / 1e6:.2f} MB expert, -, fsdp".split()
    )
    assert by_name["layer.moe_norm.scale"][1:] == f"32 x [4096] {32 * 4096 * 2 / 1e3:.2f} kB whole".split()
    assert by_name["mesh"][1:] == "fsdp 4, expert 8".split()
    norms, router = 65 * 4096 * 2, 32 * 4096 * 8 * 2 / 4
    rest = (46_702_792_704 - 65 * 4096 - 32 * 4096 * 8 - 3 * experts * 32 / 2) * 2 / 4
    assert by_name["per"][2:4] == f"{(3 * experts + norms + router + rest) / 1e9:.2f} GB".split()


@pytest.mark.commands
def test_inspect_of_671_billion_parameters_uses_little_memory() -> None:
    command = [sys.executable, "-c", INSPECT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=CASES.parents[2])
    assert run.returncode == 0 and "671,026,419,200" in run.stdout, run.stderr
    peak = float(run.stderr.split()[-1])
    assert peak < 1e9, f"{peak / 1e6:.0f} MB"


def _cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-5])


def _pickles_only(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))

    return change


LFS = "version https://git-lfs.github.com/spec/v1\n"
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a shard is missing": (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), ("missing", "safetensors")),
    "a shard is cut": (_cut, ("not fully covered", "safetensors")),
    "pickles only": (_pickles_only, ("pytorch_model.bin", "convert it to safetensors")),
    "the index is a Git LFS pointer": (lambda f: next(f.glob("*index*")).write_text(LFS), ("git lfs pull",)),
    "config.json is missing": (lambda folder: (folder / "config.json").unlink(), ("config.json", "missing")),
    "config.json is cut": (
        lambda folder: (folder / "config.json").write_text('{"model_type":'),
        ("config.json", "JSON"),
    ),
    "an unknown model": (_config(model_type="gpt9"), ("config.json", "gpt9", "mixtral")),
    "a layer more than the files": (_config(num_hidden_layers=3), ("layers.2.", "missing")),
    "another width": (_config(intermediate_size=40), ("w1.weight", "config.json")),
    "10**8 layers": (_config(num_hidden_layers=10**8), ("config.json", "num_hidden_layers")),
    "GPTQ weights": (_config(quantization_config={"quant_method": "gptq"}), ("quantization_config", "bits")),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json", "missing")),
    "a broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), ("tokenizer.json", "JSON")),
    "a broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for"),
        ("chat_template.jinja",),
    ),
}


def in_this_process(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    code = cli.main(line)
    return code, *capfd.readouterr()


def in_another(line: list[str], *_: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in another process."""
    command = [sys.executable, "-m", "nnxmoe", *line]
    run = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[2], input="hi\n")
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("run", [in_this_process, pytest.param(in_another, marks=pytest.mark.commands)])
@pytest.mark.parametrize("fault", FAULTS)
def test_common_checkpoint_faults_are_one_line(
    fault: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, parts = FAULTS[fault]
    folder = tmp_path / "model"
    shutil.copytree(MIXTRAL, folder, copy_function=shutil.copyfile)
    spoil(folder)
    line = ["chat" if "template" in fault else "generate", str(folder)]
    line += [] if "template" in fault else ["--prompt", "The quick"]
    if fault not in ("GPTQ weights", "no tokenizer", "a broken tokenizer", "a broken template"):
        assert cli.main(["inspect", str(folder)]) == 1
    capfd.readouterr()
    code, out, err = run(line, monkeypatch, capfd)
    errors = [text for text in err.splitlines() if "loading" not in text and "nnxmoe: error: " in text]
    assert code == 1 and out == "" and "Traceback" not in err
    parts = parts if fault == "a broken template" else (*parts, str(folder))  # a server shows it to clients
    assert len(errors) == 1 and all(part in errors[0] for part in parts), err
    assert "template" in fault or len(err.splitlines()) == 1, err


@pytest.mark.slow
def test_generating_with_a_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "mixtral-8x7b", "--prompt", "x"]) == 1
    assert "is a preset, a config without weights: use mistralai/Mixtral-8x7B-v0.1" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"deepseek-v3 is a preset.*deepseek-ai/DeepSeek-V3, or a folder"):
        nnxmoe.from_pretrained("deepseek-v3")
    assert cli.main(["inspect", "deepseek-v3"]) == 0
    assert "published   deepseek-ai/DeepSeek-V3: 685B parameters in FP8" in capsys.readouterr().out


@pytest.mark.slow
def test_generate_tells_speed_and_hints_at_chat(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A prompt without an option; a message about what ended it; a model that ends at once is perhaps one for chats."""
    caplog.set_level("INFO", logger="nnxmoe")
    assert cli.main(["generate", MIXTRAL, "The quick", "--max-new-tokens", "5"]) == 0
    assert (
        "5 tokens, stopped by --max-new-tokens; " in caplog.text and " tokens per second after the first" in caplog.text
    )
    assert cli.main(["generate", "demo", "What is the capital of France?"]) == 0
    assert "it has a chat template, so try: nnxmoe chat demo" in caplog.text
    for line in ([], ["a", "--prompt", "b"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["generate", "demo", *line])
    capsys.readouterr()


@pytest.mark.slow
def test_adapters_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--adapter merges one into the model; a folder with nothing but an adapter names its base model."""
    model = nnxmoe.from_pretrained(MIXTRAL)
    lora.add(model, 2, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        variable.set_value(variable.get_value() + 0.3 if path[-1] == "b" else variable.get_value())
    lora.save(model, tmp_path / "adapter")
    tokenizer, line = nnxmoe.Tokenizer.from_pretrained(MIXTRAL), ["The quick", "--max-new-tokens", "6"]
    wanted = "".join(nnxmoe.stream(model, tokenizer, "The quick", max_new_tokens=6)) + "\n"
    assert wanted != "".join(nnxmoe.stream(lora.without(model), tokenizer, "The quick", max_new_tokens=6)) + "\n"
    merged = str(tmp_path / "merged")
    capsys.readouterr()
    assert cli.main(["generate", MIXTRAL, *line, "--adapter", str(tmp_path / "adapter")]) == 0
    assert capsys.readouterr().out == wanted
    assert cli.main(["generate", str(tmp_path / "adapter"), *line]) == 0
    assert capsys.readouterr().out == wanted
    assert cli.main(["convert", MIXTRAL, merged, "--to", "hf", "--adapter", str(tmp_path / "adapter"), "--verify"]) == 0
    capsys.readouterr()
    assert cli.main(["generate", merged, *line]) == 0
    assert capsys.readouterr().out == wanted
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": None}))
    assert cli.main(["generate", str(tmp_path / "adapter"), *line]) == 1
    assert "specifies no base model: pass the base model, and this folder as --adapter" in capsys.readouterr().err


def test_inspect_agrees_with_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Exit status 0 if the checkpoint loads and 1 otherwise; control characters in tensor names are escaped."""
    draft = Draft(tmp_path, "llama")
    draft.fields["tie_word_embeddings"] = True
    draft.weights["lm_head.weight"] = draft.weights.pop("model.embed_tokens.weight")
    draft.weights["z\n\x1b[2Jnnxmoe: error: fake"] = draft.weights["model.norm.weight"]
    draft.write()
    assert "\x1b" not in str(nnxmoe.from_pretrained(tmp_path).load_report)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and "0 missing, 1 belong to no parameter" in printed.out
    for text, noted in {
        "{": "generation_config.json",
        '{"pad_token_id": 70000}': "pad_token_id 70000 is not in",
    }.items():
        (tmp_path / "generation_config.json").write_text(text)
        assert any(noted in note for note in nnxmoe.from_pretrained(tmp_path).load_report.notes)
        caplog.clear()
        assert cli.main(["inspect", str(tmp_path)]) == 0 and noted in caplog.text
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "generation_config.json: eos_token_id" in capsys.readouterr().err


QUANTISED = {"quant_method": "fp8", "weight_block_size": [8, 8]}


@pytest.mark.parametrize(
    ("config", "scales", "message"),
    [
        (None, (3, 3), "is FP8, but config.json has no quantization_config"),
        (QUANTISED, None, "o_proj.weight_scale_inv is missing"),
        (QUANTISED, (3, 2), "o_proj.weight_scale_inv .*its scales must be"),  # inspect shortens long lines
    ],
)
def test_inspect_and_loading_agree_on_fp8(
    config: Any, scales: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, name = Draft(tmp_path, "mixtral"), "model.layers.0.self_attn.o_proj.weight"
    shape = draft.weights[name].shape
    assert shape == (24, 32)
    draft.weights[name] = draft.weights[name].astype(ml_dtypes.float8_e4m3fn)
    if config is not None:
        draft.fields["quantization_config"] = config
    if scales is not None:
        draft.weights[name + "_scale_inv"] = np.ones(scales, np.float32)
    draft.write()
    with pytest.raises(nnxmoe.LoadError, match=message):
        nnxmoe.from_pretrained(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert re.search(message, capsys.readouterr().err)


# Many prompts


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    """Only line feeds end a line; a byte order mark and carriage returns are dropped."""
    file = tmp_path / "prompts"
    lines = [
        "a text\u2028with a separator",
        json.dumps({"prompt": "x\u2028y"}, ensure_ascii=False),
        "",
        '{"prompt": [1, 2]}',
    ]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    found = read_prompts(str(file))
    assert [line.prompt for line in found] == ["a text\u2028with a separator", "x\u2028y", [1, 2]]
    assert [line.number for line in found] == [1, 2, 4]
    (tmp_path / "prompts.txt").write_text("{a text\n")
    assert read_prompts(str(tmp_path / "prompts.txt")) == [PromptLine("{a text", 1, {})]
    file.write_text('[{"prompt": "a"},\n {"prompt": "b", "id": 7}]')
    assert read_prompts(str(file)) == [PromptLine("a", 1, {}), PromptLine("b", 2, {"id": 7})]
    file.write_text('[{"prompt": "a"},\n\n{"prompt": 7}]')
    with pytest.raises(ValueError, match="prompts: item 2: prompt must be a text"):
        read_prompts(str(file))
    file.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompts is not UTF-8 .*: save it as UTF-8"):
        read_prompts(str(file))
    file.write_text('[{"prompt": "a"}, 7]')
    with pytest.raises(ValueError, match=r"prompts: item 2: each item of the array must be an object, got 7"):
        read_prompts(str(file))


def test_byte_order_mark_on_stdin_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('\ufeff{"prompt": "a"}\r\n\r\n'))
    assert read_prompts("-") == [PromptLine("a", 1, {})]


@pytest.mark.slow
def test_prompts_keep_their_own_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An id travels to the output; a field that the output also has is named in a warning."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once", "id": 7}\n\n{"messages": [{"role": "user", "content": "Hi"}], "text": "x"}\n')
    assert cli.main(["generate", "demo", "--prompts", str(file), "--max-new-tokens", "2"]) == 0
    printed = capsys.readouterr()
    first, second = map(json.loads, printed.out.splitlines())
    assert [first[name] for name in ("id", "index", "prompt", "line")] == [7, 0, "Once", 1]
    assert (second["index"], second["line"], second["messages"][0]["content"]) == (
        1,
        3,
        "Hi",
    ) and "prompt" not in second
    assert second["text"] != "x" and "['text']" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt", r"line 2 begins with \{ but is not JSON"),
        ('{"prompt": "a", "messages": []}', r"\"messages\", got \['messages', 'prompt'\]"),
        ('{"text": "a"}', r"\"messages\", got \['text'\]"),
        ('{"messages": "hey"}', "messages must be a list of messages, got 'hey'"),
        ('{"prompt": [1, "a"]}', "prompt must be a text or a list of ids"),
        ('{"prompt": []}', "prompt must be a text or a list of ids"),
        ('{"prompt": ""}', "prompts: line 2: prompt is empty"),
    ],
)
def test_prompts_that_cannot_be_read(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "prompts").write_text(f"fine\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(str(tmp_path / "prompts"))


@pytest.mark.slow
def test_options_of_many_prompts_for_one(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """--stop streams the text before it; --samples and --logprobs write JSON lines."""
    caplog.set_level("INFO", logger="nnxmoe")
    line = ["generate", "demo", "Once upon a time", "--max-new-tokens", "12"]
    assert cli.main(line) == 0
    whole = capsys.readouterr().out
    assert cli.main([*line, "--stop", "no such text", "--stop", whole[8:12]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[8:12])] + "\n"
    assert cli.main([*line, "--samples", "2", "--logprobs", "1"]) == 0
    printed = capsys.readouterr()
    first, second = map(json.loads, printed.out.splitlines())
    assert first["text"] == second["text"] == whole.removesuffix("\n") and "are equal" in caplog.text
    text, token, logprob = first["top_logprobs"][0][0]
    assert token == first["ids"][0] and logprob == first["logprobs"][0] and whole.startswith(text)


@pytest.mark.parametrize("stops", [("there",), ("th", "ther"), ("ere",), ("no such text",), ()])
def test_stop_strings_over_pieces(stops: tuple[str, ...]) -> None:
    """However a text is cut into pieces, it ends before the first stop string."""
    text = "once there was the end"
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    for size in range(1, 8):
        shown = StopStringFilter(stops)
        pieces = [shown.add(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join([*pieces, shown.flush()]) == text[: min(found, default=len(text))] == shown.text
        assert shown.stopped == bool(found)
