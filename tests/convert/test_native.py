"""``nnxmoe.save`` and ``nnxmoe.load``: bitwise round trips, whatever the layer stacking or the mesh."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert import maxtext, native
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.maxtext import orbax_folder
from tests.support.arrays import flat, identical, max_error, tensors
from tests.support.cases import HF_CASES
from tests.support.maxtext_cases import CASES, KINDS, config_of, params_of
from tests.support.tiny import TINY, build_tiny, random_tokens, stacking_of, tiny_weights, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def plain(scan: bool = False, mesh: Any = None) -> nnxmoe.Strategy:
    return nnxmoe.Strategy(stacking=stacking_of(scan), mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stacked"),
    [
        pytest.param(kind, stacked, marks=pytest.mark.slow if stacked != bool(i % 2) else [])
        for i, kind in enumerate(KINDS)
        for stacked in (False, True)
    ],
)
def test_round_trip_between_scanned_and_unrolled(kind: str, stacked: bool, tmp_path: Path) -> None:
    """Stored scanned or unrolled and restored into both. DeepSeek has two stacks."""
    name, changes = KINDS[kind]
    model = build_tiny(name, plain(), **changes)
    nnxmoe.save(model, tmp_path / "a", scan_layers=stacked)
    for scan in (False, True):
        again = nnxmoe.load(tmp_path / "a", strategy=plain(scan))
        assert (
            again.strategy.stacking == (nnxmoe.Scanned() if scan else nnxmoe.Unrolled()) and again.dtype == model.dtype
        )
        assert again.config == dataclasses.replace(model.config, dtype="float32")  # the written config states the dtype
        identical(tensors(again), tensors(model))
        report = again.load_report
        assert report is not None and len(report.loaded) == len(native.arrays(model, stacked)) and not report.casts
        assert report.bytes_read == sum(array.nbytes for array in tensors(model).values())
        nnxmoe.save(again, tmp_path / f"b{scan}")
        stored = native.read(tmp_path / f"b{scan}")
        assert stored.keys() == native.arrays(model, scan).keys(), "as in the model"


def test_logits_are_bitwise_equal_after_a_round_trip(tmp_path: Path) -> None:
    model = nnxmoe.from_pretrained(HF_CASES / "deepseek_basic" / "model", strategy=plain(), dtype="bfloat16")
    nnxmoe.save(model, tmp_path / "a")
    again = nnxmoe.load(tmp_path / "a", strategy=plain())
    tokens = random_tokens(2, 9)
    np.testing.assert_array_equal(again(tokens).logits, model(tokens).logits)
    assert again.generation_config == model.generation_config and again.generation_config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_unscanned", "mixtral_scanned"])
def test_folded_query_scale_round_trips(name: str, tmp_path: Path) -> None:
    """Weights from MaxText return to MaxText bitwise equal; a cast rounds them once."""
    model = maxtext.from_tree(params_of(name), config_of(name))
    nnxmoe.save(model, tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    fields = json.loads(path.read_text())
    assert fields["query_pre_attn_scalar"] == model.config.query_pre_attn_scalar == 1
    again = nnxmoe.load(tmp_path / "a")
    identical(flat(maxtext.to_tree(again)), flat(maxtext.to_tree(model)))
    narrow = nnxmoe.load(tmp_path / "a", "bfloat16")
    assert narrow.dtype == jnp.bfloat16 and narrow.load_report is not None
    assert len(narrow.load_report.casts["float32 -> bfloat16"]) == len(narrow.load_report.loaded)
    for key, array in tensors(model).items():
        np.testing.assert_array_equal(tensors(narrow)[key], array.astype(jnp.bfloat16), err_msg=key)


def on_meshes(folder: str, kind: str, axis: str, size: int) -> None:
    """Save from one mesh and load on another and on none, in the native, MaxText and Hugging Face formats."""
    where, devices = Path(folder), jax.devices()
    start = build_tiny(kind, plain(), num_hidden_layers=3, attention_bias=kind == "llama")
    wanted, tokens = tensors(start), random_tokens(4, 6)
    logits = start(tokens).logits
    nnxmoe.save_pretrained(start, where / "hf")
    first = nnxmoe.make_mesh(fsdp=2, **{axis: size}, devices=devices[: 2 * size])
    strategy = dataclasses.replace(plain(True, first), rules={**nnxmoe.RULES, "vocab": None})
    model = nnxmoe.from_pretrained(where / "hf", strategy=strategy)
    nnxmoe.save(model, where / "native")
    maxtext.save(model, where / "maxtext")
    nnxmoe.save_pretrained(model, where / "hf again")
    identical(tensors(nnxmoe.from_pretrained(where / "hf again", strategy=plain())), wanted)
    divided = flat(maxtext.to_tree(maxtext.load(where / "maxtext")))
    identical(divided, flat(maxtext.to_tree(start)))
    four = nnxmoe.make_mesh(fsdp=4, devices=devices[:4])
    for scan, mesh in ((False, four), (True, four), (True, None)):
        model = nnxmoe.load(where / "native", mesh=mesh, strategy=plain(scan))
        identical(tensors(model), wanted)
        model = maxtext.load(where / "maxtext", mesh=mesh, strategy=plain(scan))
        identical(flat(maxtext.to_tree(model)), divided)
        assert len(model.embed.table.get_value().sharding.device_set) == (1 if mesh is None else 4)
    assert max_error(model(tokens).logits, logits) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axis", "size"), [("llama", "tensor", 2), ("mixtral", "expert", 2), ("deepseek_v3", "expert", 3)]
)
def test_load_on_another_mesh(kind: str, axis: str, size: int, eight: Callable[..., Any], tmp_path: Path) -> None:
    eight(on_meshes, str(tmp_path), kind, axis, size)


# Errors


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    nnxmoe.save(build_tiny("mixtral", plain()), tmp_path / "saved")
    return tmp_path / "saved"


def test_the_mesh_defaults_to_the_mesh_of_the_strategy(saved: Path) -> None:
    mesh = nnxmoe.make_mesh(data=1, devices=jax.devices()[:1])
    model = nnxmoe.load(saved, strategy=plain(mesh=mesh))
    assert model.mesh == mesh
    assert all(array.sharding.mesh == mesh for array in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_non_empty_folder_is_refused(saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(
        CheckpointError, match=r"is not an empty folder, it contains config\.json.*: save to a new folder$"
    ):
        nnxmoe.save(build_tiny("llama", plain()), saved)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_saving_a_model_without_values_writes_nothing(tmp_path: Path) -> None:
    model = type(build_tiny("llama"))(nnxmoe.config_from_hf(TINY["llama"]), rngs=None)
    with pytest.raises(ValueError, match="has a shape but no values"):
        nnxmoe.save(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_error_lists_every_mismatch_with_the_config(saved: Path) -> None:
    fields = json.loads((saved / "config.json").read_text()) | {"num_hidden_layers": 1, "num_attention_heads": 2}
    (saved / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        nnxmoe.load(saved)
    assert f"{saved}/parameters does not fit config.json" in str(caught.value)
    for fault in (
        "layers/1/moe/experts/down [6, 28, 24] is not a parameter",
        "layers/0/attention/q/kernel has shape [24, 4, 8], but the config requires [24, 2, 8]",
    ):
        assert fault in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 4}, "version 4 is not 3: load it with the nnxmoe release that saved it"),
        ({}, "version None is not 3"),
        ({"version": 3.0}, "version 3.0 is not 3"),
        ({"version": 3, "quantized": {"kind": "int8"}}, "quantized: it is not a list"),
        (
            {
                "version": 3,
                "quantized": [
                    {
                        "kind": "int5",
                        "tile": [1, 2],
                        "rounded": None,
                        "scale": "float32",
                        "zero": False,
                        "order": False,
                        "kernels": {"layer.mlp.up.kernel": [0]},
                    }
                ],
            },
            "is not a supported code dtype",
        ),
        (
            {
                "version": 3,
                "quantized": [
                    {
                        "kind": "int8",
                        "tile": [1, 99],
                        "rounded": None,
                        "scale": "float32",
                        "zero": False,
                        "order": False,
                        "kernels": {"layer.mlp.upper.kernel": [0]},
                    }
                ],
            },
            "layer.mlp.upper.kernel is not",
        ),
        (None, "nnxmoe.json"),
    ],
)
def test_invalid_format_versions(saved: Path, fields: Any, message: str) -> None:
    if fields is None:
        (saved / "nnxmoe.json").unlink()
    else:
        (saved / "nnxmoe.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=message):
        nnxmoe.load(saved)


@pytest.mark.slow
def test_missing_parameters_folder(saved: Path) -> None:
    shutil.rmtree(saved / "parameters")
    with pytest.raises(CheckpointError, match="parameters contains no Orbax checkpoint"):
        nnxmoe.load(saved)


@pytest.mark.slow
def test_wrong_loader_error_names_the_right_one(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"use nnxmoe\.load"):
        nnxmoe.from_pretrained(saved)
    with pytest.raises(CheckpointError, match=r"use nnxmoe\.convert\.maxtext\.load"):
        nnxmoe.from_pretrained(write_config(CASES / "mixtral_scanned", saved.parent / "maxtext"))
    with pytest.raises(CheckpointError, match=r"pass a folder that nnxmoe\.save wrote"):
        nnxmoe.load(HF_CASES / "mixtral_basic" / "model")
    with pytest.raises(ValueError, match="int8 is not supported for weights"):
        nnxmoe.load(saved, "int8")


def write_config(case: Path, folder: Path) -> Path:
    shutil.copytree(case / "orbax_to_maxtext", folder)
    shutil.copy(case / "hf_config.json", folder / "config.json")
    return folder


@pytest.mark.slow
def test_non_finite_values_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_tiny("mixtral", plain())
    scale = model.norm.scale
    scale.set_value(scale.get_value().at[3].set(jnp.nan))
    nnxmoe.save(model, tmp_path / "a")
    maxtext.save(model, tmp_path / "b")
    for again, name in (
        (nnxmoe.load(tmp_path / "a"), "norm/scale"),
        (maxtext.load(tmp_path / "b"), "decoder/decoder_norm/scale"),
    ):
        assert again.load_report is not None and again.load_report.nonfinite == {name: 1}
        assert f"1 values of 1 tensors are NaN or infinite: {name}" in caplog.text


@pytest.mark.slow
def test_values_that_overflow_in_a_cast_are_reported(tmp_path: Path) -> None:
    """Loading as float16, on one device and on a mesh."""
    model = build_tiny("llama", plain())
    kernel = model.stacks[0].layers[1].feed_forward.up.kernel
    kernel.set_value(kernel.get_value().at[2, 3].set(1e6))
    nnxmoe.save(model, tmp_path / "a")
    for mesh in (None, nnxmoe.make_mesh(fsdp=1)):
        again = nnxmoe.load(tmp_path / "a", "float16", mesh)
        assert again.load_report is not None
        assert again.load_report.nonfinite == {"layers/1/mlp/up/kernel": 1}


# Folder names


@pytest.mark.slow
def test_home_expansion_and_invalid_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = build_tiny("llama", plain())
    nnxmoe.save(model, "~/a b/ünï %20{}")
    maxtext.save(model, "~/m")
    nnxmoe.save_pretrained(model, "~/h")
    for again in (nnxmoe.load("~/a b/ünï %20{}"), maxtext.load("~/m"), nnxmoe.from_pretrained("~/h")):
        identical(flat(maxtext.to_tree(again)), flat(maxtext.to_tree(model)))
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    for name in ("a\\b", "a\nb", "", "a\0b"):
        for save in (nnxmoe.save, maxtext.save):
            with pytest.raises(CheckpointError, match=r"rename the folder|folder is .*: pass a path"):
                save(model, name)
    assert sorted(os.listdir()) == before == ["a b", "h", "m"]


@pytest.mark.slow
def test_two_checkpoints_never_share_a_folder(saved: Path, tmp_path: Path) -> None:
    """Otherwise each loader would read a different one."""
    model = build_tiny("llama", plain())
    maxtext.save(model, tmp_path / "a")
    maxtext.save(model, tmp_path / "b", parameters_only=True)
    shutil.copytree(tmp_path / "a" / "0" / "items", tmp_path / "c" / "7" / "default")
    for folder in (saved, *(tmp_path / name for name in "abc")):
        with pytest.raises(
            CheckpointError, match="contains an Orbax checkpoint, which would remain next to the new one"
        ):
            nnxmoe.save_pretrained(model, folder, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("save", [nnxmoe.save, pytest.param(maxtext.save, marks=pytest.mark.slow)])
def test_failed_or_interrupted_save_leaves_no_files(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny("mixtral", plain())

    class Store:
        """Stand-in for tensorstore on a full disk."""

        failure: BaseException = OSError(28, "No space left on device")

        async def open(self, *_: Any, **__: Any) -> Any:
            raise self.failure

    monkeypatch.setattr(orbax_folder.tensorstore, "open", Store().open)
    with pytest.raises(CheckpointError, match=r"cannot write: .*No space left on device; free disk space"):
        save(model, tmp_path / "a")
    assert not list(tmp_path.iterdir()) and "Traceback" not in capfd.readouterr().err
    monkeypatch.undo()
    interrupted = tmp_path / "script.py"
    interrupted.write_text(INTERRUPTED)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, str(interrupted), save.__module__, str(out / "a")]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=1200)
    assert run.returncode == 7 and not list(out.iterdir())


INTERRUPTED = """
import _thread, signal, sys, time
from importlib import import_module
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does not have
from nnxmoe.convert.maxtext import orbax_folder
from tests.support.tiny import build_tiny

real = orbax_folder._HostWriter._write

async def write(*arguments):
    _thread.interrupt_main()
    time.sleep(0.2)
    await real(*arguments)

orbax_folder._HostWriter._write = write
try:
    import_module(sys.argv[1]).save(build_tiny("mixtral"), sys.argv[2])
except KeyboardInterrupt:
    time.sleep(1)  # what goes on in the background
    sys.exit(7)
"""


# Tokenizer files


@pytest.mark.slow
def test_tokenizer_files_are_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From Hugging Face to the native format, to MaxText and back; unreadable files are logged."""
    source = shutil.copytree(HF_CASES / "mixtral_basic" / "model", tmp_path / "source")
    (source / "merges.txt").symlink_to(tmp_path / "nowhere")
    (source / "notes.txt").write_text("no file of a tokenizer")
    model = nnxmoe.from_pretrained(source)
    nnxmoe.save(model, tmp_path / "a")
    maxtext.save(nnxmoe.load(tmp_path / "a"), tmp_path / "b")
    nnxmoe.save_pretrained(maxtext.load(tmp_path / "b"), tmp_path / "c")
    assert "merges.txt" in caplog.text and "it was not copied" in caplog.text
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for folder in "abc":
            assert (tmp_path / folder / name).read_bytes() == (source / name).read_bytes(), (folder, name)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert nnxmoe.Tokenizer.from_pretrained(tmp_path / "c").encode("The quick") == nnxmoe.Tokenizer.from_pretrained(
        source
    ).encode("The quick")
    assert nnxmoe.from_pretrained(tmp_path / "c").generation_config == model.generation_config


def test_overwriting_copies_the_tokenizer_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model")
    nnxmoe.save_pretrained(model, tmp_path / "a")
    content = (tmp_path / "a" / "tokenizer.json").read_bytes()
    nnxmoe.save_pretrained(model, tmp_path / "a", overwrite=True)
    assert "replace" not in caplog.text
    (tmp_path / "a" / "tokenizer.json").write_text("another model's")
    nnxmoe.save_pretrained(model, tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == content
    assert "files of the saved model replace tokenizer.json" in caplog.text


@pytest.mark.slow
def test_missing_source_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = TINY["llama"]
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "source", fields, tiny_weights(fields)))
    shutil.rmtree(tmp_path / "source")
    nnxmoe.save(model, tmp_path / "a")
    assert "no longer exists: the tokenizer files are not copied" in caplog.text
    identical(tensors(nnxmoe.load(tmp_path / "a")), tensors(model))
