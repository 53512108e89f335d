"""Saving is atomic: after any error a folder holds the whole old checkpoint or the whole new one, and no kill loses
either."""

import errno
import json
import os
import random
import resource
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.convert.storage import atomic_dir as atomic_dir_module
from nnxmoe.convert.storage.atomic_dir import atomic_dir
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.models import Llama, LlamaConfig
from nnxmoe.train import lora
from tests.support.forked import forked

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 32}


def model_of(version: int) -> nnxmoe.CausalLM:
    """Model whose weights, and one field of whose config, all encode ``version``."""
    model = Llama(LlamaConfig(**SMALL, rope_theta=1000.0 + version), rngs=None)
    state = nnx.to_flat_state(nnx.state(model))
    values = [(path, variable.replace(np.full(variable.shape, version, np.float32))) for path, variable in state]
    nnx.update(model, nnx.from_flat_state(values))
    return model


def version_in(folder: Path) -> int:
    """Version of the checkpoint in ``folder``; asserts that all files agree on it."""
    with Checkpoint.open(folder) as checkpoint:
        values = [np.unique(checkpoint.read(name)) for name in checkpoint.tensors]
        versions = set(np.concatenate(values).tolist()) | {checkpoint.config["rope_theta"] - 1000.0}
    assert len(versions) == 1, f"half new, half old: {versions}"
    assert nnxmoe.from_pretrained(folder).load_report.unexpected == ()
    return int(versions.pop())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _save_for_ever(folder: Path, version: int, pipe: Connection) -> None:
    models, save = [model_of(version), model_of(version + 1)], nnxmoe.save_pretrained  # imported before the kill
    pipe.send("go")
    while True:
        for model in models:
            save(model, folder, "2KB", overwrite=True)


@pytest.mark.slow
def test_save_is_atomic_under_thirty_random_kills(tmp_path: Path) -> None:
    """The folder holds one whole version, or was renamed an instant before the new one took its place; no file is
    lost."""
    folder, moments = tmp_path / "model", random.Random(0)
    nnxmoe.save_pretrained(model_of(0), folder, "2KB")
    (folder / "README.md").write_text("mine")
    (folder / "logs").mkdir()
    (folder / "logs" / "a.txt").write_text("mine too")
    seen, midway = set(), 0
    for trial in range(30):
        before = version_in(folder)
        code, _ = forked(_save_for_ever, folder, 2 * trial + 1, kill_after=moments.uniform(0, 0.4))
        assert code == -signal.SIGKILL
        for old in tmp_path.glob(".model.*.old"):  # as a user would
            if folder.exists():
                atomic_dir_module._carry_over(old, folder)
            else:
                old.rename(folder)
        now = version_in(folder)
        assert now in (before, 2 * trial + 1, 2 * trial + 2)
        assert (folder / "README.md").read_text() == "mine" and (folder / "logs" / "a.txt").read_text() == "mine too"
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        seen.add(now)
        midway += len([path for path in tmp_path.iterdir() if path.name.startswith(".model.")])
    assert len(seen) > 5 and midway > 30, "hardly a kill came in the middle of a save"


@pytest.mark.slow
def test_killed_first_save_leaves_nothing_or_a_whole_checkpoint(tmp_path: Path) -> None:
    moments, whole = random.Random(1), 0
    for trial in range(6):
        folder = tmp_path / str(trial)
        forked(_save_many, folder, kill_after=moments.uniform(0, 1))
        made = sorted(folder.iterdir()) if folder.exists() else []
        versions = [version_in(path) for path in made if not path.name.startswith(".")]
        assert all(version == 7 for version in versions)
        whole += len(versions)
    assert whole > 0


def _save_many(folder: Path, pipe: Connection) -> None:
    model, save = model_of(7), nnxmoe.save_pretrained
    pipe.send("go")
    for number in range(1000):
        save(model, folder / str(number), "2KB")


# Rejected targets


def test_non_empty_folder_requires_overwrite(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    nnxmoe.save_pretrained(model_of(1), folder)  # empty is fine
    with pytest.raises(nnxmoe.CheckpointError, match=r"model is not an empty folder.*config\.json.*overwrite=True"):
        nnxmoe.save_pretrained(model_of(2), folder)
    assert version_in(folder) == 1
    nnxmoe.save_pretrained(model_of(2), folder, "2KB", overwrite=True)
    assert version_in(folder) == 2 and not (folder / "model.safetensors").exists()
    assert os.listdir(tmp_path) == ["model"]


def test_file_as_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(nnxmoe.CheckpointError, match="file"):
            nnxmoe.save_pretrained(model_of(1), target, overwrite=True)
    assert contents(tmp_path) == {"file": b"mine"}


def test_symlinked_folder_is_followed_and_folder_of_symlinks_refused(tmp_path: Path) -> None:
    """A folder of symlinks is what the Hugging Face hub cache holds."""
    nnxmoe.save_pretrained(model_of(1), tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    nnxmoe.save_pretrained(model_of(2), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and version_in(tmp_path / "real") == 2
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "real").iterdir():
        (snapshot / file.name).symlink_to(file)
    with pytest.raises(nnxmoe.CheckpointError, match=r"snapshot.*config\.json.*is a symlink.*hub"):
        nnxmoe.save_pretrained(model_of(3), snapshot, overwrite=True)
    assert version_in(snapshot) == version_in(tmp_path / "real") == 2


def test_model_can_overwrite_the_checkpoint_it_was_loaded_from(tmp_path: Path) -> None:
    """Loading reads every array into memory, so the old files are no longer needed."""
    nnxmoe.save_pretrained(model_of(5), tmp_path / "model", "2KB")
    before = contents(tmp_path / "model")
    nnxmoe.save_pretrained(nnxmoe.from_pretrained(tmp_path / "model"), tmp_path / "model", "2KB", overwrite=True)
    after = contents(tmp_path / "model")
    assert before.keys() == after.keys()
    assert all(before[name] == data for name, data in after.items() if name != "config.json")
    assert json.loads(after["config.json"])["dtype"] == "float32"


def test_concurrent_save_raises_and_keeps_the_first(tmp_path: Path) -> None:
    with (
        pytest.raises(nnxmoe.CheckpointError, match="it is unchanged"),
        atomic_dir(tmp_path / "model") as stage,
    ):
        (stage / "config.json").write_text("{}")
        nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    assert version_in(tmp_path / "model") == 1 and os.listdir(tmp_path) == ["model"]


def test_models_without_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embed\.table has a shape but no values"):
        nnxmoe.save_pretrained(Llama(LlamaConfig(**SMALL), rngs=None), tmp_path / "model")
    assert os.listdir(tmp_path) == []


# I/O errors


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failing", range(0, 12, 2))
def test_full_disk_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, overwrite: bool
) -> None:
    folder = tmp_path / "model"
    if overwrite:
        nnxmoe.save_pretrained(model_of(1), folder, "2KB")
    calls = [0]

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(nnxmoe.CheckpointError, match=r"cannot write .*No space left on device"):
        nnxmoe.save_pretrained(model_of(2), folder, "2KB", overwrite=overwrite)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["model"] if overwrite else [])
    assert not overwrite or version_in(folder) == 1


def _save_small_files_only(folder: Path, pipe: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = model_of(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    pipe.send("go")
    try:
        nnxmoe.save_pretrained(model, folder, overwrite=True)
    except nnxmoe.CheckpointError as error:
        os._exit(3 if "cannot write" in str(error) and "File too large" in str(error) else 4)


@pytest.mark.slow
def test_file_size_limit_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    assert forked(_save_small_files_only, tmp_path / "model")[0] == 3
    assert version_in(tmp_path / "model") == 1 and os.listdir(tmp_path) == ["model"]


def _save_as_nobody(folder: Path, pipe: Connection) -> None:
    models, save = model_of(2), nnxmoe.save_pretrained  # its modules are not readable for nobody
    if os.getuid() == 0:
        os.setuid(65534)
    pipe.send("go")
    try:
        save(models, folder, overwrite=True)
    except nnxmoe.CheckpointError as error:
        os._exit(3 if "Permission denied" in str(error) and "nothing was changed" in str(error) else 4)


@pytest.mark.slow
def test_read_only_folder(tmp_path: Path) -> None:
    nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    modes = [(path, path.stat().st_mode) for path in (tmp_path, tmp_path / "model")]
    for path, _ in modes:
        path.chmod(0o555)
    try:
        for target in (tmp_path / "new", tmp_path / "model" / "below"):
            assert forked(_save_as_nobody, target)[0] == 3
    finally:
        for path, mode in modes:
            path.chmod(mode)
    assert version_in(tmp_path / "model") == 1 and os.listdir(tmp_path) == ["model"]


def test_mount_point_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point cannot be renamed. If empty, files are moved in one by one, config.json last."""
    folder = tmp_path / "mount"
    folder.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: (order.append(Path(new).name), rename(old, new)))
    nnxmoe.save_pretrained(model_of(1), folder, "2KB")
    assert order[-1] == "config.json" and len(order) > 5 and version_in(folder) == 1
    with pytest.raises(nnxmoe.CheckpointError, match="save to a new folder"):
        nnxmoe.save_pretrained(model_of(2), folder, overwrite=True)
    assert version_in(folder) == 1

    empty = tmp_path / "other"
    empty.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == empty)

    def fail(old: Any, new: Any) -> None:
        if "00003" in str(new):
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(nnxmoe.CheckpointError, match="Input/output error"):
        nnxmoe.save_pretrained(model_of(1), empty, "2KB")
    assert os.listdir(empty) == []

    def interrupt(old: Any, new: Any) -> None:
        rename(old, new)
        if "00003" in str(new):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        nnxmoe.save_pretrained(model_of(1), empty, "2KB")
    assert not [name for name in os.listdir(empty) if "00003" not in name]


def test_old_checkpoint_returns_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", os.rename
    nnxmoe.save_pretrained(model_of(1), folder)

    def fail(old: Any, new: Any) -> None:
        if str(old).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(nnxmoe.CheckpointError, match=r"Input/output error.*; it is unchanged"):
        nnxmoe.save_pretrained(model_of(2), folder, overwrite=True)
    assert version_in(folder) == 1 and os.listdir(tmp_path) == ["model"]


def test_unrelated_files_are_moved_on_overwrite(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    nnxmoe.save_pretrained(model_of(1), folder)
    (folder / "sub" / "deeper").mkdir(parents=True)
    (folder / "sub" / "deeper" / "big.bin").write_bytes(b"x" * 100)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "dangling").symlink_to("nowhere")
    inodes = {name: (folder / name).stat().st_ino for name in ("tokenizer.json", "sub/deeper/big.bin")}
    nnxmoe.save_pretrained(model_of(2), folder, overwrite=True)
    assert {name: (folder / name).stat().st_ino for name in inodes} == inodes
    assert os.readlink(folder / "dangling") == "nowhere" and version_in(folder) == 2


def test_overwriting_warns_of_files_that_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokenizer files in the folder stay if the saved model has none, with a warning, and are replaced otherwise."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "notes.txt").write_text("mine")
    nnxmoe.save_pretrained(model_of(1), folder, overwrite=True)
    (record,) = (record for record in caplog.records if "are kept" in record.message)
    kept = {path.name for path in DEMO.iterdir() if "token" in path.name or path.suffix == ".jinja"}
    assert kept and all(record.message.count(name) == 2 for name in kept), "listed twice: kept, and loaded"
    assert record.message.count("notes.txt") == 1
    for name in kept:
        (folder / name).write_text("foreign")
    caplog.clear()
    nnxmoe.save_pretrained(nnxmoe.from_pretrained("demo"), folder, overwrite=True)
    assert all((folder / name).read_bytes() == (DEMO / name).read_bytes() for name in kept)
    (record,) = (record for record in caplog.records if "are kept" in record.message)
    assert "notes.txt" in record.message and "will be loaded" not in record.message


def test_no_warning_for_new_folders_and_folders_of_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    nnxmoe.save_pretrained(model_of(2), tmp_path / "model", overwrite=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of a run that ends with this save")
    nnxmoe.save_pretrained(model_of(1), tmp_path / "run", overwrite=True)
    assert "kept" not in caplog.text and (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    nnxmoe.save_pretrained(model_of(1), tmp_path / "other", overwrite=True)
    assert "tokenizer.json will be loaded with the new model" in caplog.text


@pytest.mark.parametrize("name", ["old.gguf", "sha256-6a0746a1ec1a"])
def test_gguf_files_that_remain_next_to_a_saved_model_are_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(b"GGUF and the rest of another model")
    nnxmoe.save_pretrained(model_of(1), tmp_path, overwrite=True)
    assert f"files already in the folder are kept: {name}" in caplog.text


def test_model_and_adapter_do_not_share_a_folder(tmp_path: Path) -> None:
    """Programs differ in which of the two they read. Saving one raises and leaves the files of the other unchanged."""
    adapted = nnxmoe.from_pretrained("demo")
    lora.add(adapted, rank=2, rngs=nnx.Rngs(0))
    nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    before = contents(tmp_path / "model")
    with pytest.raises(nnxmoe.CheckpointError, match=r"contains a model \(config\.json.*new folder"):
        lora.save(adapted, tmp_path / "model", overwrite=True)
    assert contents(tmp_path / "model") == before
    lora.save(adapted, tmp_path / "adapter")
    lora.save(adapted, tmp_path / "adapter", overwrite=True)
    with pytest.raises(nnxmoe.CheckpointError, match=r"contains an adapter \(adapter_config\.json.*new folder"):
        nnxmoe.save_pretrained(model_of(1), tmp_path / "adapter", overwrite=True)


def test_leftovers_of_killed_saves_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".model.123-abcd.tmp").mkdir()
    nnxmoe.save_pretrained(model_of(1), tmp_path / "model")
    assert ".model.123-abcd.tmp" in caplog.text
    assert (tmp_path / ".model.123-abcd.tmp").exists(), "not ours to delete: another process may be at work"


def test_files_created_during_a_save_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    nnxmoe.save_pretrained(model_of(1), folder)
    with atomic_dir(folder, overwrite=True) as stage:
        (stage / "config.json").write_text("{}")
        (folder / "new_log.txt").write_text("mine")
    assert (folder / "new_log.txt").read_text() == "mine" and os.listdir(tmp_path) == ["model"]


def test_similar_file_names_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    nnxmoe.save_pretrained(model_of(1), folder)
    (folder / "model-٣-of-٣.safetensors").write_text("mine")
    nnxmoe.save_pretrained(model_of(2), folder, overwrite=True)
    assert (folder / "model-٣-of-٣.safetensors").read_text() == "mine" and version_in(folder) == 2
    (folder / "model-00001-of-00009.safetensors").mkdir()
    with pytest.raises(nnxmoe.CheckpointError, match=r"model-00001-of-00009\.safetensors is a folder"):
        nnxmoe.save_pretrained(model_of(3), folder, overwrite=True)
    with pytest.raises(nnxmoe.CheckpointError, match="folder is"):
        nnxmoe.save_pretrained(model_of(3), "a\0b")


def test_overwrite_keeps_the_folder_mode(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    nnxmoe.save_pretrained(model_of(1), folder)
    folder.chmod(0o700)
    nnxmoe.save_pretrained(model_of(2), folder, overwrite=True)
    assert folder.stat().st_mode & 0o777 == 0o700 and version_in(folder) == 2


def test_save_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current working directory is filled in place; one that holds a checkpoint is not replaced."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    nnxmoe.save_pretrained(model_of(1), ".")
    assert version_in(Path(os.getcwd())) == 1
    with pytest.raises(nnxmoe.CheckpointError, match="current working directory"):
        nnxmoe.save_pretrained(model_of(2), ".", overwrite=True)
    assert version_in(folder) == 1


def test_save_to_the_current_folder_keeps_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`finetune --out .` ends this way."""
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    Path("finetune.json").write_text("{}")
    Path("model.safetensors.index.json").write_text("{}")
    with pytest.raises(nnxmoe.CheckpointError, match="current working directory"):
        nnxmoe.save_pretrained(model_of(1), ".", "2KB", overwrite=True)
    Path("model.safetensors.index.json").unlink()
    with atomic_dir(".", overwrite=True) as stage:
        (stage / "config.json").write_text("1")
    Path("config.json").unlink()
    with pytest.raises(nnxmoe.CheckpointError, match=r"finetune\.json in it cannot be"), atomic_dir(".", True) as stage:
        (stage / "finetune.json").write_text("other")
    assert sorted(os.listdir()) == ["checkpoints", "finetune.json"] and Path("finetune.json").read_text() == "{}"
    nnxmoe.save_pretrained(model_of(1), ".", overwrite=True)
    assert version_in(tmp_path) == 1 and {"checkpoints", "finetune.json"} < set(os.listdir())


@pytest.mark.parametrize("size", ["0", "-1", "9" * 400, "\u0665GB", "1e9", "5XB", ""])
def test_invalid_max_shard_size(tmp_path: Path, size: str) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        nnxmoe.save_pretrained(model_of(1), tmp_path / "model", size)
