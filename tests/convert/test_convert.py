"""``nnxmoe convert``: lossless conversion between all checkpoint formats, verification, and one-line errors."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.apps import cli
from nnxmoe.convert import conversion, maxtext, native
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.conversion import convert, detect_format
from nnxmoe.convert.files.errors import CheckpointError
from tests.support import families
from tests.support.arrays import identical, tensors
from tests.support.cases import HF_CASES
from tests.support.maxtext_cases import CASES, config_of, params_of
from tests.support.tiny import TINY, tiny_weights, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Unrolled())
MIXTRAL = str(HF_CASES / "mixtral_basic" / "model")  # head width 16: dividing queries by 4 is exact


MAXTEXT = str(CASES / "mixtral_scanned" / "orbax_to_maxtext")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start() -> nnxmoe.CausalLM:
    return nnxmoe.from_pretrained(MIXTRAL)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model saved in every checkpoint format."""
    where = tmp_path_factory.mktemp("kinds")
    model = nnxmoe.from_pretrained(MIXTRAL, strategy=PLAIN)
    nnxmoe.save_pretrained(model, where / "hf")
    maxtext.save(model, where / "maxtext")
    maxtext.save(model, where / "parameters only", parameters_only=True)
    nnxmoe.save(model, where / "orbax")
    return {path.name: path for path in where.iterdir()}


def _every_kind() -> list[Any]:
    """All pairs of formats; each format is read and written by default, and the other pairs are marked slow."""
    starts, to = ("hf", "maxtext", "parameters only", "orbax"), ("maxtext", "orbax", "hf")
    pairs = [(start, kind, i % 3 == j) for i, start in enumerate(starts) for j, kind in enumerate(to)]
    return [pytest.param(start, kind, marks=[] if usual else pytest.mark.slow) for start, kind, usual in pairs]


@pytest.mark.parametrize(("start", "to"), _every_kind())
def test_convert_between_every_pair_of_formats(
    start: str, to: str, kinds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is bitwise equal to the source and includes the tokenizer."""
    scan = ["--scan"] if to != "hf" and start == "hf" else []
    assert cli.main(["convert", str(kinds[start]), str(tmp_path / "out"), "--to", to, "--verify", *scan]) == 0
    printed = capsys.readouterr()
    arrays, speeds, verified = printed.out.splitlines()
    assert arrays.startswith(f"{tmp_path / 'out'}: ") and arrays.endswith("857.34 kB"), arrays
    assert "/s, written " in speeds and verified.startswith("verified: all arrays are equal")
    assert detect_format(str(tmp_path / "out")) == to
    load: Any = {"hf": nnxmoe.from_pretrained, "maxtext": maxtext.load, "orbax": nnxmoe.load}[to]
    again = load(tmp_path / "out")
    identical(tensors(again), tensors(nnxmoe.from_pretrained(MIXTRAL)))
    if to != "hf":
        stored = (maxtext if to == "maxtext" else native).read(tmp_path / "out")
        assert any("/layers/" in name or name.startswith("stacks/") for name in stored) is bool(scan)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (Path(MIXTRAL) / "tokenizer.json").read_bytes()
    assert again.generation_config == nnxmoe.from_pretrained(MIXTRAL).generation_config


@pytest.mark.slow
def test_rounded_queries_are_named_instead_of_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head width is 8: MaxText's queries in bfloat16 are rounded, and again on the way back."""
    fields = TINY["mixtral"]
    convert(
        str(write_checkpoint(tmp_path / "0", fields, tiny_weights(fields))), str(tmp_path / "1"), "hf", dtype="bfloat16"
    )
    steps = [("maxtext", ["--scan"], "divided by sqrt(8)"), ("orbax", [], ""), ("hf", [], "multiplied by 2.828")]
    for i, (to, options, rounded) in enumerate(steps, 1):
        line = ["convert", str(tmp_path / str(i)), str(tmp_path / str(i + 1)), "--to", to, "--verify", *options]
        assert cli.main(line) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("the arrays are equal to the written arrays, but" if rounded else "verified: "), last
        assert not rounded or f"queries {rounded} are rounded to bfloat16; --dtype float32 avoids it" in last
    line = ["convert", str(tmp_path / "1"), str(tmp_path / "f32"), "--to", "maxtext", "--verify", "--dtype", "float32"]
    assert cli.main(line) == 0 and "verified: " in capsys.readouterr().out
    line = [
        "convert",
        str(tmp_path / "0"),
        str(tmp_path / "changed"),
        "--to",
        "orbax",
        "--verify",
        "--dtype",
        "bfloat16",
    ]
    assert cli.main([*line, "--quantize", "int8"]) == 0
    assert (
        "(compared with the source after --dtype bfloat16 --quantize int8)" in capsys.readouterr().out.splitlines()[-1]
    )


@pytest.mark.slow
def test_round_trip_through_float32_restores_identical_files(tmp_path: Path) -> None:
    """bfloat16 through a float32 tree is byte-identical, although queries are divided by sqrt(8)."""
    fields = TINY["mixtral"]
    source = write_checkpoint(tmp_path / "source", fields, tiny_weights(fields))
    convert(str(source), str(tmp_path / "narrow"), "hf", dtype="bfloat16")
    convert(str(tmp_path / "narrow"), str(tmp_path / "tree"), "maxtext", scan=True, dtype="float32")
    convert(str(tmp_path / "tree"), str(tmp_path / "ours"), "orbax", dtype="bfloat16", verify=True)
    done = convert(str(tmp_path / "ours"), str(tmp_path / "back"), "hf", verify=True)
    assert done.difference == 0 and done.arrays == len(tiny_weights(fields)) and done.bytes > 0
    assert files(tmp_path / "back") == files(tmp_path / "narrow")


@pytest.mark.slow
def test_codes_of_files_become_floats_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also, a verified tree of MaxText's has the scanned biases of routers twice."""
    fields = TINY["deepseek_v3"]
    source = write_checkpoint(tmp_path / "source", fields, tiny_weights(fields))
    convert(str(source), str(tmp_path / "codes"), "hf", quantize=nnxmoe.Int8())
    with caplog.at_level("INFO", "nnxmoe"):
        convert(str(tmp_path / "codes"), str(tmp_path / "tree"), "maxtext", scan=True, verify=True)
    assert "quantized kernels are dequantized; pass --quantize METHOD to quantize them again" in caplog.text
    assert sum("gate/bias" in name for name in maxtext.read(tmp_path / "tree")) == 2


@pytest.mark.slow
def test_codes_are_verified_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Codes that are read as floats are bfloat16 by default, which logits in float32 would not pass."""
    fields = TINY["llama"]
    source = write_checkpoint(tmp_path / "source", fields, tiny_weights(fields))
    convert(str(source), str(tmp_path / "ours"), "orbax", quantize=nnxmoe.Int4(4))
    assert convert(str(tmp_path / "ours"), str(tmp_path / "codes"), "hf", verify=True).difference < 1e-4


@pytest.mark.slow
def test_codes_of_native_folders_become_floats_where_they_must(tmp_path: Path) -> None:
    """For MaxText, and before they are rounded to other codes."""
    fields = TINY["llama"]
    source = write_checkpoint(tmp_path / "source", fields, tiny_weights(fields))
    convert(str(source), str(tmp_path / "four"), "orbax", quantize=nnxmoe.Int4(4))
    convert(str(tmp_path / "four"), str(tmp_path / "tree"), "maxtext")
    floats = nnxmoe.dequantize(nnxmoe.load(tmp_path / "four"))
    found = tensors(maxtext.load(tmp_path / "tree"))
    assert all(np.allclose(found[name], array, rtol=1e-6, atol=0) for name, array in tensors(floats).items())
    convert(str(tmp_path / "four"), str(tmp_path / "eight"), "orbax", quantize=nnxmoe.Int8())
    identical(native_arrays(tmp_path / "eight"), native_arrays(nnxmoe.quantize(floats, nnxmoe.Int8())))


def native_arrays(model: Any) -> dict[str, np.ndarray]:
    found = native.read(model) if isinstance(model, Path) else native.arrays(model, False)
    return {name: np.asarray(array) for name, array in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v4", "nemotron_h"])
def test_verify_knows_names_and_integers_of_every_family(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of experts are written as int64, and the names of Nemotron-H begin with ``backbone``."""
    monkeypatch.setattr(conversion, "_logits", lambda model: np.zeros(1))
    case = families.load(kind)
    source = write_checkpoint(tmp_path / "source", case.fields, case.weights)
    for to, folder in (("orbax", "ours"), ("hf", "back")):
        convert(str(source), str(tmp_path / folder), to, verify=True)
    identical(load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.mark.slow
def test_maxtext_checkpoint_requires_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no config.json: the error asks for ``--config``, whose small files are then copied."""
    source, target = CASES / "mixtral_scanned" / "orbax_to_maxtext", tmp_path / "out"
    line = ["convert", str(source), str(target), "--to", "hf", "--verify"]
    assert cli.main(line) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "config.json" in error and "--config" in error, error
    (tmp_path / "sizes").mkdir()
    shutil.copy(CASES / "mixtral_scanned" / "hf_config.json", tmp_path / "sizes" / "config.json")
    shutil.copy(Path(MIXTRAL) / "tokenizer.json", tmp_path / "sizes")
    assert cli.main([*line, "--config", str(tmp_path / "sizes")]) == 0
    assert (target / "tokenizer.json").exists()
    wanted = maxtext.from_tree(params_of("mixtral_scanned"), config_of("mixtral_scanned"))
    identical(tensors(nnxmoe.from_pretrained(target)), tensors(wanted))


def test_missing_small_files_are_taken_from_the_config_folder(kinds: dict[str, Path], tmp_path: Path) -> None:
    """Small files of the source take precedence."""
    shutil.copytree(kinds["maxtext"], tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").unlink()
    (tmp_path / "config").mkdir()
    shutil.copy(kinds["maxtext"] / "config.json", tmp_path / "config")
    (tmp_path / "config" / "generation_config.json").write_text('{"eos_token_id": 9}')
    source, beside = str(tmp_path / "source"), str(tmp_path / "config")
    convert(source, str(tmp_path / "a"), "hf", config=beside)
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == {"eos_token_id": 9}
    convert(f"{source}/0/items", str(tmp_path / "b"), "hf", config=source)
    assert (tmp_path / "b" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.inf, 3e38, np.nan])
def test_verify_accepts_non_finite_values(value: float, tmp_path: Path) -> None:
    fields, weights = TINY["mixtral"], tiny_weights(TINY["mixtral"])
    weights["lm_head.weight"][0, 0] = weights["model.norm.weight"][3] = value
    source = str(write_checkpoint(tmp_path / "source", fields, weights))
    for to in ("hf", "maxtext", "orbax"):
        assert convert(source, str(tmp_path / to), to, verify=True).difference is not None


def test_format_is_detected_despite_stray_files(kinds: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("maxtext", "orbax"):
        folder = shutil.copytree(kinds[kind], tmp_path / kind)
        (folder / "adapter_model.safetensors").write_bytes(b"")
        assert detect_format(str(folder)) == kind


@pytest.mark.slow
def test_convert_on_a_mesh(eight: Callable[..., Any], tmp_path: Path) -> None:
    eight(convert_on_a_mesh, str(tmp_path))
    identical(tensors(nnxmoe.from_pretrained(tmp_path / "hf")), tensors(nnxmoe.from_pretrained(MIXTRAL)))


def convert_on_a_mesh(folder: str) -> None:
    for source, to, axes in (
        (MIXTRAL, "maxtext", {"fsdp": 2, "expert": 4}),
        (f"{folder}/maxtext", "orbax", {"fsdp": 8}),
        (f"{folder}/orbax", "hf", {"data": 2, "expert": 4}),
    ):
        mesh = nnxmoe.make_mesh(**axes)
        assert convert(source, f"{folder}/{to}", to, scan=to != "hf", mesh=mesh, verify=True).difference == 0


@pytest.mark.commands
def test_convert_on_a_mesh_from_the_command_line(tmp_path: Path) -> None:
    def run(mesh: str) -> subprocess.CompletedProcess[str]:
        line = ["convert", MIXTRAL, str(tmp_path / "out"), "--to", "orbax", "--mesh", mesh]
        env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        command = [sys.executable, "-m", "nnxmoe", *line]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)

    refused = run("expert=3")
    assert refused.returncode == 1 and "nnxmoe: error: " in refused.stderr and "Traceback" not in refused.stderr
    assert "need 3 devices, but there are 4" in refused.stderr.splitlines()[-1] and not list(tmp_path.iterdir()), (
        refused.stderr
    )
    done = run("fsdp=2,expert=2")
    assert done.returncode == 0 and "857.34 kB" in done.stdout, done.stderr
    identical(tensors(nnxmoe.load(tmp_path / "out")), tensors(start()))


# Errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["SOURCE", "new", "--to", "maxtext", "--quantize", "int8"],
            "--quantize is not supported for maxtext",
        ),
        (
            ["SOURCE", "new", "--to", "hf", "--scan"],
            "--scan is not supported for hf",
        ),
        (
            ["SOURCE", "full", "--to", "maxtext"],
            "full is not an empty folder, it contains mine.txt: save to a new folder",
        ),
        (["SOURCE", "full/mine.txt", "--to", "maxtext"], "mine.txt is not a folder"),
        (["SOURCE", "SOURCE", "--to", "maxtext"], "is not an empty folder"),
        (["nowhere", "new", "--to", "orbax"], "nowhere"),
        (["full", "new", "--to", "orbax"], "full contains no checkpoint: it has neither safetensors"),
        (["mixtral-8x7b", "new", "--to", "hf"], "mixtral-8x7b is a preset"),
        (
            ["MAXTEXT", "new", "--to", "maxtext", "--config", "nowhere"],
            "--config nowhere: neither a folder with config.json",
        ),
        (["MAXTEXT", "new", "--to", "maxtext", "--config", ""], "--config : neither a folder with config.json"),
        (["MAXTEXT", "new", "--to", "maxtext", "--config", "llama-3.1-8b"], "does not fit the config (llama)"),
        (
            ["SOURCE", "new", "--to", "maxtext", "--config", "mixtral-8x7b"],
            "already has a config.json: omit --config",
        ),
        (["SOURCE", "", "--to", "maxtext"], "folder is '': pass a path"),
    ],
)
def test_errors_are_one_line(
    line: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert cli.main(["convert", *(part.replace("SOURCE", MIXTRAL).replace("MAXTEXT", MAXTEXT) for part in line)]) == 1
    printed = capsys.readouterr()
    errors = [text for text in printed.err.splitlines() if text.startswith("nnxmoe: error: ")]
    assert len(errors) == 1 and message in errors[0] and printed.out == "" and "Traceback" not in printed.err
    assert files(tmp_path) == {"full/mine.txt": b"mine"} and [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("line", [["demo", "x"], ["demo", "x", "--to", "gguf"], ["demo", "--to", "hf"]])
def test_invalid_command_lines(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", *line])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "maxtext", "orbax"])
def test_verify_detects_one_flipped_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one array is flipped when the output is read back."""
    real = conversion.FORMATS[kind].read

    def read(folder: str, decoded: bool) -> Any:
        @contextlib.contextmanager
        def spoiled() -> Any:
            with real(folder, decoded) as found:
                if folder == str(tmp_path / "out"):
                    name = sorted(found)[len(found) // 2]
                    array = np.array(found[name])
                    array.view(np.uint32).reshape(-1)[-1] ^= 1
                    found = {**found, name: LazyArray.from_array(array)}
                yield found

        return spoiled()

    monkeypatch.setitem(conversion.FORMATS, kind, dataclasses.replace(conversion.FORMATS[kind], read=read))
    with pytest.raises(
        CheckpointError, match="differs from the written array: check the disk, delete the folder and retry"
    ):
        convert(MIXTRAL, str(tmp_path / "out"), kind, verify=True)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "out")
    convert(MIXTRAL, str(tmp_path / "out"), kind, verify=True)


@pytest.mark.slow
def test_verify_compares_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal arrays with a wrong config give different logits."""
    real = conversion.FORMATS["hf"].save

    def save(model: Any, folder: str, scan: bool) -> None:
        real(model, folder, scan)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 77.0, "rope_parameters": None}))

    monkeypatch.setitem(conversion.FORMATS, "hf", dataclasses.replace(conversion.FORMATS["hf"], save=save))
    with pytest.raises(CheckpointError, match="logits differ by"):
        convert(MIXTRAL, str(tmp_path / "out"), "hf", verify=True)


@pytest.mark.slow
def test_small_differences_that_nothing_explains_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, too, where the difference is less than rounded queries would make."""
    real = conversion.FORMATS["orbax"].save

    def save(model: Any, folder: str, scan: bool) -> None:
        real(model, folder, scan)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 2e-3}))

    monkeypatch.setitem(conversion.FORMATS, "orbax", dataclasses.replace(conversion.FORMATS["orbax"], save=save))
    with pytest.raises(
        CheckpointError, match=r"logits differ by .* although nothing was rounded: do not use this checkpoint"
    ):
        convert(MIXTRAL, str(tmp_path / "out"), "orbax", dtype="bfloat16", verify=True)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "maxtext", "orbax"])
def test_killed_conversion_leaves_no_output_folder(to: str, tmp_path: Path) -> None:
    """Killed after the first file is written; a second conversion succeeds."""
    command = [sys.executable, "-m", "nnxmoe", "convert", MIXTRAL, str(tmp_path / "out"), "--to", to]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None and not list(tmp_path.glob("*.tmp")):  # before, a probe creates "out"
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
    left = [path.name for path in tmp_path.iterdir()]
    assert all(name == "out" or name.endswith(".tmp") for name in left)
    if "out" not in left:
        convert(MIXTRAL, str(tmp_path / "out"), to)
    identical(
        tensors(conversion.FORMATS[to].load(str(tmp_path / "out"), None, None, PLAIN, False)),
        tensors(start()),
    )


@pytest.mark.slow
def test_expected_peak_memory_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    convert(MIXTRAL, str(tmp_path / "a"), "orbax")
    assert "expected peak memory 1.02 MB plus the program itself" in caplog.text
    conversion._announce({"x": LazyArray((10**6, 10**6), np.dtype(np.float32), lambda *_: None)}, None)
    assert "expected peak memory 12.00 TB" in caplog.text and "peak memory exceeds the " in caplog.text


@pytest.mark.slow
@pytest.mark.wrong_types
def test_invalid_arguments_are_refused_before_reading_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("detect_format", "local_folder"):
        monkeypatch.setattr(conversion, name, lambda *_: pytest.fail("read"))
    target, defaults = str(tmp_path / "out"), dict[str, Any](to="hf")
    invalid: list[dict[str, Any]] = [{"dtype": "x"}, {"dtype": 3}, {"to": "x"}, {"quantize": "int8"}]
    invalid += [{"scan": True}, {"to": "maxtext", "quantize": nnxmoe.Int8()}]
    for options in invalid:
        with pytest.raises(ValueError, match=next(iter(options))):
            conversion.convert("demo", target, **defaults | options)
    with pytest.raises(ValueError, match="folder is None"):
        conversion.convert("demo", None, "hf")  # type: ignore[arg-type]
