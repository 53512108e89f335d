"""Safetensors reading and writing, checkpoint folders, the hub cache, and errors for malformed files."""

import importlib
import json
import os
import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.utils
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import DTYPES, dtype_code, read_header
from nnxmoe.convert.storage.atomic_dir import atomic_dir
from nnxmoe.convert.storage.checkpoint import Checkpoint, hub_headers
from nnxmoe.convert.storage.write_safetensors import write_json, write_sharded
from tests.corpus.case import container, entry, pack

CONFIG = {"model_type": "llama", "hidden_size": 8}
FP8 = ml_dtypes.float8_e4m3fn


def make_folder(folder: Path, files: dict[str, bytes], config: Any = CONFIG, weight_map: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config))
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(call: Callable[[], Any], *parts: str) -> str:
    """Assert that ``call`` raises a CheckpointError with all ``parts`` in its one-line message; return the message."""
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500
    for part in parts:
        assert part in message, f"{part!r} not in {message!r}"
    return message


def random_array(code: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    size = DTYPES[code].itemsize * int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, size, dtype=np.uint8)
    return raw.view(DTYPES[code]).reshape(shape)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int64)


# Reading


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_is_read_raw(tmp_path: Path, code: str) -> None:
    arrays = {"odd": random_array("U8", (3,)), "t": random_array(code, (5, 7)), "scalar": random_array(code, ())}
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack(arrays)})) as checkpoint:
        assert list(checkpoint.tensors) == list(arrays)
        for name, array in arrays.items():
            assert same(checkpoint.read(name), array)
        assert checkpoint.tensors["t"].nbytes == arrays["t"].nbytes
        assert checkpoint.bytes_read == sum(array.nbytes for array in arrays.values())


def test_slices_match_a_full_read(tmp_path: Path) -> None:
    """Covers short rows (read in blocks), long rows (read one by one), one to three dimensions and odd offsets."""
    arrays = {
        "pad": random_array("U8", (3,)),
        "vector": random_array("BF16", (37,)),
        "short": random_array("BF16", (700, 1000)),
        "long": random_array("F32", (9, 3001)),
        "cube": random_array("F8_E4M3", (4, 6, 5)),
        "longcube": random_array("F16", (3, 2, 4097)),
        "none": random_array("F32", (0, 4)),
    }
    rng = random.Random(0)
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack(arrays)})) as checkpoint:
        for name, array in arrays.items():
            for _ in range(12):
                row, col = (sorted(rng.randint(0, array.shape[axis]) for _ in range(2)) for axis in (0, -1))
                rows, cols = slice(*row), slice(*col)
                before = checkpoint.bytes_read
                assert same(checkpoint.read(name, rows=rows), array[rows])
                assert same(checkpoint.read(name, cols=cols), array[..., cols])
                expected = array[rows].nbytes + array[..., cols].nbytes
                if array.ndim > 1:
                    assert same(checkpoint.read(name, rows, cols), array[rows][..., cols])
                    expected += array[rows][..., cols].nbytes
                assert checkpoint.bytes_read - before == expected


def test_open_ended_slices_and_read_into(tmp_path: Path) -> None:
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack({"a": A})})) as checkpoint:
        assert same(checkpoint.read("a", slice(1, None), slice(None, 2)), A[1:, :2])
        out = np.zeros((2, 2), np.float32)
        checkpoint.read_into("a", out, cols=slice(1, 3))
        assert same(out, A[:, 1:])
        for wrong in (np.zeros((2, 3)), np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32).T):
            with pytest.raises(ValueError, match="C-contiguous float32"):
                checkpoint.read_into("a", wrong)


def test_out_of_range_slices_are_refused(tmp_path: Path) -> None:
    arrays = {"a": A, "b": B, "s": np.float32(1).reshape(())}
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack(arrays)})) as checkpoint:
        for part in (slice(0, 3), slice(-1, None), slice(2, 1), slice(0, 2, 2)):
            refused(lambda part=part: checkpoint.read("a", rows=part), "model.safetensors", "'a'", "[2, 3]", "range")
        refused(lambda: checkpoint.read("b", slice(0, 1), slice(0, 1)), "one dimension")
        refused(lambda: checkpoint.read("s", slice(0, 1)), "scalar")
        refused(lambda: checkpoint.read("c"), str(tmp_path), "'c'")
        assert checkpoint.bytes_read == 0


@pytest.mark.parametrize("positional", [True, False])
def test_reads_from_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positional: bool) -> None:
    """Also on platforms without preadv."""
    if not positional:
        monkeypatch.delattr(os, "preadv")
    array = random_array("U8", (64, 5000))
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack({"t": array})})) as checkpoint:
        wrong: list[int] = []

        def work(row: int) -> None:
            for _ in range(20):
                if not same(
                    checkpoint.read("t", slice(row, row + 1), slice(row, 4000)), array[row : row + 1, row:4000]
                ):
                    wrong.append(row)

        threads = [threading.Thread(target=work, args=(row,)) for row in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert checkpoint.bytes_read == 20 * sum(4000 - row for row in range(16))


def test_file_truncated_after_opening(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"model.safetensors": pack({"a": A, "t": random_array("U8", (100, 5000))})})
    file = folder / "model.safetensors"
    with Checkpoint.open(folder) as checkpoint:
        assert same(checkpoint.read("a"), A)
        os.truncate(file, file.stat().st_size - 7000)
        refused(lambda: checkpoint.read("t"), str(file), "'t'", "truncated")
        refused(lambda: checkpoint.read("t", cols=slice(0, 10)), str(file), "'t'", "truncated")
        assert checkpoint.read("t", slice(0, 98)).shape == (98, 5000)
    whole = Checkpoint.open(make_folder(tmp_path / "second", {"model.safetensors": pack({"a": A})}))
    with open(tmp_path / "second/model.safetensors", "ab") as file:
        file.write(b"x")
    refused(lambda: whole.read("a"), "its size changed")
    whole.close()
    with pytest.raises(ValueError, match="closed"):
        whole.read("a")


# Headers

ONE = entry("F32", [1], 0, 4)
HEADER_FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "no header": (container(b""), "length is 0"),
    "length beyond file": (container({"a": ONE}, b"1234", length=1000), "length is 1000"),
    "length 2**40": (container({"a": ONE}, b"1234", length=2**40), str(2**40)),
    "length 2**64-1": (container({"a": ONE}, b"1234", length=2**64 - 1), str(2**64 - 1)),
    "not utf-8": (container(b'{"\xff":1}', b""), "invalid UTF-8"),
    "not JSON": (container(b"{'a': 1}"), "invalid JSON"),
    "deep nesting": (container(b"[" * 200_000), "invalid JSON"),
    "a list": (container([]), "invalid JSON"),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", "not a safetensors file"),
    "truncated data": (container({"a": ONE}, b"12"), "not fully covered"),
    "trailing byte": (container({"a": ONE}, b"12345"), "not fully covered"),
    "data without tensors": (container({}, b"1234"), "not fully covered"),
    "entry no object": (container({"a": 5}, b"1234"), "invalid JSON"),
    "no dtype": (container({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"), "missing field `dtype`"),
    "unknown dtype": (container({"a": entry("F33", [1], 0, 4)}, b"1234"), "F33"),
    "packed dtype": (container({"a": entry("F4", [2], 0, 1)}, b"1"), "'F4'"),
    "dtype a list": (container({"a": entry(["F32"], [1], 0, 4)}, b"1234"), "invalid JSON"),
    "no shape": (container({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"), "missing field `shape`"),
    "negative dim": (container({"a": entry("F32", [-1], 0, 4)}, b"1234"), "`-1`"),
    "negative dims": (container({"a": entry("F32", [-1, -1], 0, 4)}, b"1234"), "`-1`"),
    "float dim": (container({"a": entry("F32", [1.0], 0, 4)}, b"1234"), "`1.0`"),
    "bool dim": (container({"a": entry("F32", [True], 0, 4)}, b"1234"), "`true`"),
    "string dim": (container({"a": entry("F32", ["1"], 0, 4)}, b"1234"), 'string "1"'),
    "huge dims": (container({"a": entry("F32", [2**40, 2**40], 0, 4)}, b"1234"), "overflow"),
    "huge empty": (container({"a": entry("F32", [0, 2**62, 2**30], 0, 0)}), "2**63 bytes"),
    "rank 100": (container({"a": entry("F32", [1] * 100, 0, 4)}, b"1234"), "2**63 bytes"),
    "shape too large": (container({"a": entry("F32", [2], 0, 4)}, b"1234"), "invalid shape"),
    "shape too small": (container({"a": entry("F32", [0], 0, 4)}, b"1234"), "invalid shape"),
    "negative offset": (container({"a": entry("F32", [1], -4, 0)}, b"1234"), "`-4`"),
    "reversed offsets": (container({"a": entry("F32", [1], 4, 0)}, b"1234"), "`a`"),
    "offset beyond": (container({"a": entry("F32", [1], 4, 8)}, b"1234"), "`a`"),
    "one offset": (container({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234"), "invalid length 1"),
    "hole at start": (container({"a": entry("F32", [1], 4, 8)}, b"12345678"), "`a`"),
    "hole": (container({"a": ONE, "b": entry("F32", [1], 8, 12)}, bytes(12)), "`b`"),
    "overlap": (container({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)), "`b`"),
    "same bytes twice": (container({"a": ONE, "b": ONE}, b"1234"), "invalid offset"),
    "duplicate field": (
        container(b'{"a":{"dtype":"I32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        "duplicate field `dtype`",
    ),
    "metadata not text": (container({"__metadata__": {"format": 1}, "a": ONE}, b"1234"), "expected a string"),
    "metadata a list": (container({"__metadata__": [], "a": ONE}, b"1234"), "expected a map"),
    "number of 5000 digits": (container(b'{"a":%b}' % (b"9" * 5000)), "out of range"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_header_faults_name_file_and_fault(tmp_path: Path, fault: str) -> None:
    data, part = HEADER_FAULTS[fault]
    folder = make_folder(tmp_path, {"model.safetensors": data})
    refused(lambda: Checkpoint.open(folder), str(folder / "model.safetensors"), part)


def test_oversized_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 150_000_000))
    os.truncate(file, 200_000_000)  # sparse
    refused(lambda: read_header(file), str(file), "150000000")


def test_corrupted_header_bytes_are_never_misread(tmp_path: Path) -> None:
    """After changing one header byte, reading raises or agrees with the safetensors library."""
    good = pack({"a": A, "b": B})
    file = tmp_path / "model.safetensors"
    rng = random.Random(1)
    for _ in range(400):
        data = bytearray(good)
        data[rng.randrange(len(good) - A.nbytes - B.nbytes)] = rng.randrange(256)
        file.write_bytes(data)
        try:
            tensors = read_header(file)
        except CheckpointError as error:
            assert str(file) in str(error)
            continue
        with safetensors.safe_open(file, framework="np") as other:
            assert set(other.keys()) == set(tensors)


def test_tensor_order_padding_and_empty_tensors_are_accepted(tmp_path: Path) -> None:
    header = {"z": entry("U8", [0], 4, 4), "b": entry("U8", [2], 2, 4), "a": entry("U8", [2], 0, 2)}
    header["__metadata__"] = {"format": "pt"}
    file = tmp_path / "x.safetensors"
    file.write_bytes(container(json.dumps(header).encode() + b"   ", b"1234"))
    tensors = read_header(file)
    assert set(tensors) == {"z", "b", "a"} and tensors["b"].end == file.stat().st_size


def test_header_with_many_tensors(tmp_path: Path) -> None:
    header = {f"layers.{i}.weight": entry("U8", [1], i, i + 1) for i in range(5_000)}
    file = tmp_path / "x.safetensors"
    file.write_bytes(container(header, bytes(5_000)))
    assert len(read_header(file)) == 5_000


# Folders


def test_folder_faults(tmp_path: Path) -> None:
    good = {"model.safetensors": pack({"a": A})}
    refused(lambda: Checkpoint.open(tmp_path / "absent"), "no such folder", "absent")
    refused(lambda: Checkpoint.open("./absent"), "no such folder")
    refused(lambda: Checkpoint.open("~/no/such/folder/here"), "no such folder")
    refused(lambda: Checkpoint.open("one/two/three"), "no such folder")
    refused(lambda: Checkpoint.open(""), "path_or_hub_id")
    refused(lambda: Checkpoint.open("a\0b"), "path_or_hub_id")
    refused(lambda: Checkpoint.open("what is this?"), "neither")
    file = make_folder(tmp_path / "file", good) / "model.safetensors"
    refused(lambda: Checkpoint.open(file), "not a folder", str(file))
    for text, part in (("{", "JSON"), ("[1]", "object"), ('{"a":1,"a":2}', "'a'"), ("[" * 100_000, "JSON")):
        folder = make_folder(tmp_path / "config", good)
        (folder / "config.json").write_text(text)
        refused(lambda folder=folder: Checkpoint.open(folder), str(folder / "config.json"), part)
    (folder / "config.json").unlink()
    refused(lambda: Checkpoint.open(folder), f"{folder} has no config.json")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    refused(lambda: Checkpoint.open(folder), "an adapter of 'org/base'", "nnxmoe.train.lora.load(model, folder)")
    refused(lambda: Checkpoint.open(f"{folder}x"), f"did you mean {folder}?")
    (folder / "config.json").mkdir()
    refused(lambda: Checkpoint.open(folder), str(folder / "config.json"), "a folder")


def test_selection_of_weight_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    single = {"model.safetensors": pack({"a": A}), "model-00001-of-00002.safetensors": b"junk"}
    stale = make_folder(tmp_path / "1", single, weight_map={"b": "gone.safetensors"})
    assert [file.name for file in Checkpoint.open(stale).files] == ["model.safetensors"]
    other = make_folder(tmp_path / "2", {"weights.safetensors": pack({"a": A}), "consolidated.safetensors": b"junk"})
    assert same(Checkpoint.open(other).read("a"), A)
    assert "weights.safetensors" in caplog.text
    extra = make_folder(
        tmp_path / "3", {"x.safetensors": pack({"a": A}), "y.safetensors": b""}, weight_map={"a": "x.safetensors"}
    )
    assert [file.name for file in Checkpoint.open(extra).files] == ["x.safetensors"]
    for files, part in (
        ({}, "no weights"),
        ({"pytorch_model.bin": b"\x80\x04."}, "convert it to safetensors"),
        ({"model.pth": b"\x80\x04."}, "convert it to safetensors"),
        ({"consolidated.safetensors": pack({"a": A})}, "original layout"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "a.safetensors, b.safetensors"),
        ({"model-00001-of-00002.safetensors": pack({"a": A})}, "download the index"),
    ):
        folder = make_folder(tmp_path / f"bad{len(part)}{len(files)}{part[0]}{sorted(files)[:1]}", files)
        refused(lambda folder=folder: Checkpoint.open(folder), str(folder), part)


def test_special_files_in_place_of_weights(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    make_folder(tmp_path, {})
    target.mkdir()
    refused(lambda: Checkpoint.open(tmp_path), str(target), "a folder")
    target.rmdir()
    target.symlink_to(tmp_path / "gone")
    refused(lambda: Checkpoint.open(tmp_path), str(target), "links to", "gone")
    target.unlink()
    os.mkfifo(target)
    refused(lambda: Checkpoint.open(tmp_path), str(target), "not a regular file")


# Indexes

PATHS = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "sub/../../x.safetensors",
    "..",
    ".",
    "",
    "a\0.safetensors",
    "a\\b.safetensors",
]


@pytest.mark.parametrize("value", [*PATHS, None, 3, ["x.safetensors"], {}, "x" * 300, "\ud800.safetensors", "a\nb"])
def test_index_names_only_files_in_its_folder(tmp_path: Path, value: Any) -> None:
    (tmp_path / "x.safetensors").write_bytes(pack({"a": A}))
    (tmp_path / "m/sub").mkdir(parents=True)
    (tmp_path / "m/sub/x.safetensors").write_bytes(pack({"a": A}))
    folder = make_folder(tmp_path / "m", {}, weight_map={"a": value})
    refused(lambda: Checkpoint.open(folder), str(folder), "index.json", "'a'", "this folder or a subfolder")


def test_index_faults(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def folder(files: dict[str, bytes], weight_map: Any) -> Path:
        return make_folder(tmp_path / str(len(list(tmp_path.iterdir()))), files, weight_map=weight_map)

    good = {one: pack({"a": A}), two: pack({"b": B})}
    for faulty in ({}, [], "x", 3):
        path = folder(good, faulty)
        refused(lambda path=path: Checkpoint.open(path), "index.json", "weight_map")
    refused(lambda: Checkpoint.open(folder({one: good[one]}, {"a": one, "b": two})), two, "missing")
    refused(lambda: Checkpoint.open(folder(good, {"a": two, "b": one})), "'a'", one, two)
    refused(lambda: Checkpoint.open(folder(good, {"a": "pytorch_model.bin"})), "pytorch_model.bin", "convert")
    refused(
        lambda: Checkpoint.open(folder(good | {two: good[two][:-1]}, {"a": one, "b": two})), two, "not fully covered"
    )
    clash = good | {two: pack({"a": A + 1, "b": B})}
    refused(lambda: Checkpoint.open(folder(clash, {"c": one, "b": two})), "'a'", one, two, "different contents")
    clash = good | {two: pack({"a": A.T.copy(), "b": B})}
    refused(lambda: Checkpoint.open(folder(clash, {"c": one, "b": two})), "[2, 3]", "[3, 2]")
    path = folder(good, {"a": one, "b": two})
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{"a":"{one}","a":"{two}"}}}}')
    refused(lambda: Checkpoint.open(path), "index.json", "'a' occurs twice")


def test_shards_with_equal_copies_and_unlisted_tensors(tmp_path: Path) -> None:
    files = {"x.safetensors": pack({"a": A}), "y.safetensors": pack({"a": A, "b": B, "extra": B})}
    folder = make_folder(tmp_path, files, weight_map={"a": "y.safetensors", "b": "y.safetensors", "c": "x.safetensors"})
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.notes == ["model.safetensors.index.json lists c, which no file contains"]
    make_folder(tmp_path, {"x.safetensors": pack({"a": A, "c": B})}, weight_map=json.loads(
        (folder / "model.safetensors.index.json").read_text())["weight_map"])  # fmt: skip
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c", "extra"}
        assert checkpoint.tensors["a"].file.name == "y.safetensors"
        assert checkpoint.bytes_read == 0
        assert same(checkpoint.read("a"), A)


def test_index_decides_between_contents_and_names_files_in_subfolders(tmp_path: Path) -> None:
    """An overlay shard, in a folder of its own, replaces a tensor; listed rotary frequencies may be missing."""
    for place in ("over/lay/x.safetensors", "./over/lay/x.safetensors", "x.safetensors"):
        folder = tmp_path / place.replace("/", "-")
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(pack({"a": A + 1}))
        listed = {"a": place, "b": "base.safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq": place}
        make_folder(folder, {"base.safetensors": pack({"a": A, "b": B})}, weight_map=listed)
        with Checkpoint.open(folder) as checkpoint:
            assert same(checkpoint.read("a"), A + 1) and same(checkpoint.read("b"), B)
            (note,) = checkpoint.notes
            assert note.startswith("a of x.safetensors replaces") and "index.json says" in note


def test_names_of_a_model_without_head(tmp_path: Path) -> None:
    up = "layers.0.mlp.up_proj.weight"
    tensors = {"embed_tokens.weight": A, up: B, "lm_head.weight": A, "model.model.norm.weight": A, "model.norm.x": B}
    with Checkpoint.open(make_folder(tmp_path, {"model.safetensors": pack(tensors)})) as checkpoint:
        names = ("model.embed_tokens.weight", f"model.{up}", "lm_head.weight", "model.norm.weight", "model.norm.x")
        assert set(checkpoint.tensors) == set(names)
        assert same(checkpoint.read(f"model.{up}"), B)


# The hub


def hub_cache(cache: Path, repo_id: str, files: dict[str, bytes]) -> Path:
    """The hub cache's layout: snapshots/COMMIT/name -> ../../blobs/HASH."""
    base, commit = cache / f"models--{repo_id.replace('/', '--')}", "c0ffee00" * 5
    snapshot = base / "snapshots" / commit
    for folder in (base / "blobs", base / "refs", snapshot):
        folder.mkdir(parents=True)
    (base / "refs/main").write_text(commit)
    for number, (name, data) in enumerate(files.items()):
        (base / "blobs" / f"{number:064x}").write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Offline hub with an empty cache; `serve(handler)` answers requests by (method, path)."""
    if not hasattr(huggingface_hub, "set_client_factory"):
        pytest.skip("this huggingface_hub has no exchangeable HTTP client")
    from huggingface_hub.utils import _http

    usual = _http._GLOBAL_CLIENT_FACTORY
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    http = importlib.import_module(type(huggingface_hub.utils.get_session()).__module__.split(".")[0])
    requests: list[str] = []

    def serve(handler: Callable[[str, str], tuple[int, dict[str, str], bytes]] | None) -> list[str]:
        def answer(request: Any) -> Any:
            requests.append(f"{request.method} {request.url.path}")
            if handler is None:
                raise http.ConnectError("no network here")
            status, headers, body = handler(request.method, request.url.path)
            return http.Response(status, headers=headers, content=body if request.method != "HEAD" else b"")

        huggingface_hub.set_client_factory(lambda: http.Client(transport=http.MockTransport(answer)))
        return requests

    serve(None)
    yield serve
    huggingface_hub.set_client_factory(usual)


def hub_server(files: dict[str, bytes]) -> Callable[[str, str], tuple[int, dict[str, str], bytes]]:
    """Handler that serves ``files`` of the repository org/tiny and returns 404 otherwise."""

    def handler(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        name = path.removeprefix("/org/tiny/resolve/main/")
        if path.startswith("/api/models/org/tiny"):
            found = {"id": "org/tiny", "sha": "c0ffee00" * 5, "siblings": [{"rfilename": file} for file in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        if not path.startswith("/org/tiny/"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "c0ffee00" * 5}, b""
        size = str(len(files[name]))
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": "c0ffee00" * 5, "Content-Length": size}
        return 200, headers, files[name]

    return handler


def test_hub_cache_with_links_out_of_the_folder(tmp_path: Path, hub: Any) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": {"a": one, "b": two}}).encode()
    files = {"config.json": json.dumps(CONFIG).encode(), one: pack({"a": A}), two: pack({"b": B})}
    snapshot = hub_cache(tmp_path / "cache", "org/tiny", files | {"model.safetensors.index.json": index})
    for where in ("org/tiny", snapshot):
        with Checkpoint.open(where, local_files_only=True) as checkpoint:
            assert checkpoint.config == CONFIG
            assert same(checkpoint.read("a"), A) and same(checkpoint.read("b", slice(1, 3)), B[1:3])
    assert same(Checkpoint.open("org/tiny").read("a"), A)  # the hub is unreachable: the cache is used
    expected = (CONFIG, {"a": ("F32", (2, 3)), "b": ("I64", (4,))})
    assert hub_headers("org/tiny") == expected
    assert hub_headers("org/tiny", local_files_only=True) == expected


def test_hub_headers_fetch_no_weights(hub: Any) -> None:
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": pack({"a": A, "b": B})}
    requests = hub(hub_server(files))
    assert hub_headers("org/tiny") == (CONFIG, {"a": ("F32", (2, 3)), "b": ("I64", (4,))})
    assert sum("GET" in line and "safetensors" in line for line in requests) == 1  # the header, by range


def test_hub_headers_of_shards_and_bad_indexes(hub: Any) -> None:
    config = {
        "config.json": json.dumps(CONFIG).encode(),
        "x.safetensors": pack({"a": A}),
        "y.safetensors": pack({"b": B}),
    }

    def index(weight_map: Any) -> dict[str, bytes]:
        return config | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}

    hub(hub_server(index({"c": "x.safetensors"})))
    refused(lambda: hub_headers("org/tiny"), "org/tiny", "'c'", "x.safetensors")


def test_hub_headers_sharded(hub: Any) -> None:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "x.safetensors": pack({"a": A}),
        "y.safetensors": pack({"b": B}),
    }
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    hub(hub_server(files | {"model.safetensors.index.json": json.dumps(index).encode()}))
    assert hub_headers("org/tiny") == (CONFIG, {"a": ("F32", (2, 3)), "b": ("I64", (4,))})


def test_hub_errors_say_what_to_do(tmp_path: Path, hub: Any) -> None:
    refused(lambda: Checkpoint.open("org/tiny", local_files_only=True), "org/tiny", "local cache")
    refused(lambda: Checkpoint.open("org/tiny"), "org/tiny", "local cache")
    for code, part in (("RepoNotFound", "no such"), ("GatedRepo", "gated"), ("RevisionNotFound", "revision 'v9'")):
        hub(lambda method, path, code=code: (404, {"X-Error-Code": code}, b"{}"))
        refused(lambda: Checkpoint.open("org/tiny", revision="v9"), "org/tiny", part)
        refused(lambda: hub_headers("org/tiny", revision="v9"), "org/tiny", part)
    hub(hub_server({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."}))
    refused(lambda: hub_headers("org/tiny"), "org/tiny", "no model.safetensors")
    hub(hub_server({"config.json": b"{}", "model.safetensors": container(b"{x}")}))
    refused(lambda: hub_headers("org/tiny"), "org/tiny", "header")
    refused(lambda: hub_headers("not an id"), "not a hub id")
    hub_cache(tmp_path / "cache", "org/part", {"config.json": b"{}"})
    refused(lambda: Checkpoint.open("org/part", local_files_only=True), "no weights", "'org/part'", "online")


def test_download_asks_for_safe_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"model.safetensors": pack({"a": A})})
    seen: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        seen.update(options, repo_id=repo_id)
        if options["allow_patterns"] == ["sub/x[[]1].safetensors"]:
            (folder / "sub").mkdir()
            (folder / "sub" / "x[1].safetensors").write_bytes(pack({"a": A}))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert same(Checkpoint.open("org/tiny", revision="v1").read("a"), A)
    assert (seen["repo_id"], seen["revision"], seen["local_files_only"]) == ("org/tiny", "v1", False)
    names = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "model.py"]
    names += ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"]
    # Files that saving copies from a local folder are also fetched from the hub.
    names += (tokenizer := ["chat_template.jinja", "added_tokens.json", "tokenizer.model", "vocab.txt", "merges.txt"])
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=seen["allow_patterns"], ignore_patterns=seen["ignore_patterns"]
    )
    assert set(kept) == {*names[:5], *tokenizer}
    (folder / "model.safetensors").unlink()
    make_folder(folder, {}, weight_map={"a": "sub/x[1].safetensors"})
    assert same(Checkpoint.open("org/tiny").read("a"), A)


# Writing


def specs(arrays: dict[str, np.ndarray]) -> list[tuple[str, str, tuple[int, ...], Callable[[], np.ndarray]]]:
    return [(name, dtype_code(a.dtype), a.shape, lambda a=a: a) for name, a in arrays.items()]


def write(folder: Path, arrays: dict[str, np.ndarray], limit: int = 1 << 30) -> list[str]:
    with atomic_dir(folder, overwrite=True) as stage:
        files = write_sharded(stage, [(0, specs(arrays))], limit, process=0)
        write_json(stage / "config.json", CONFIG)
    assert not list(folder.parent.glob(f".{folder.name[:50]}.*")) and not list(folder.glob(".*"))
    return [file.name for file in files]


def test_round_trip_through_the_library(tmp_path: Path) -> None:
    arrays = {"b": np.array([True, False, True]), "a": A, "i": B, "s": np.array(3.5), "e": np.zeros((0, 3), np.float16)}
    arrays["t"] = np.arange(6.0).reshape(2, 3).T  # not contiguous
    assert write(tmp_path, arrays) == ["model.safetensors"]
    loaded = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(arrays) and all(same(loaded[name], array) for name, array in arrays.items())
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    for info in read_header(tmp_path / "model.safetensors").values():
        assert info.begin % info.numpy_dtype.itemsize == 0


def test_round_trip_in_shards(tmp_path: Path) -> None:
    arrays = {f"model.layers.{i}.w": random_array(code, (6, 10), i) for i, code in enumerate(sorted(DTYPES))}
    names = write(tmp_path, arrays, limit=500)
    count = len(names)
    assert count > 3 and names[0] == f"model-00001-of-{count:05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert set(index["weight_map"]) == set(arrays) and set(index["weight_map"].values()) == set(names)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(arrays)
        assert all(same(checkpoint.read(name), array) for name, array in arrays.items())
    for name in names:
        header = read_header(tmp_path / name)
        assert len(header) == 1 or sum(info.nbytes for info in header.values()) <= 500


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each array is created only after the previous one is freed."""
    alive = [0, 0]

    class Counted(np.ndarray):
        def __del__(self) -> None:
            alive[0] -= 1

    def make() -> np.ndarray:
        alive[0] += 1
        alive[1] = max(alive)
        return np.ndarray.__new__(Counted, (4,), np.float32)

    write_sharded(tmp_path, [(0, [(str(i), "F32", (4,), make) for i in range(9)])], 40, process=0)
    assert alive == [0, 1]


def test_overwriting_removes_files_of_the_old_layout(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    arrays = {"a": A, "b": B}
    write(folder, arrays)
    write(folder, {name: array + 1 for name, array in arrays.items()}, limit=30)
    assert not (folder / "model.safetensors").exists()
    with Checkpoint.open(folder) as checkpoint:  # a checkpoint rewritten from itself
        assert same(checkpoint.read("a"), A + 1)
        same_files = [(n, i.dtype, i.shape, lambda n=n: checkpoint.read(n)) for n, i in checkpoint.tensors.items()]
        with atomic_dir(folder, overwrite=True) as stage:
            write_sharded(stage, [(0, same_files)], 1 << 30, process=0)
            write_json(stage / "config.json", CONFIG)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert same(Checkpoint.open(folder).read("b"), B + 1)


@pytest.mark.slow
def test_failed_writes_keep_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder, {"a": A, "b": B}, limit=30)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def attempt(items: Any, limit: int = 30) -> None:
        with atomic_dir(folder, overwrite=True) as stage:
            write_sharded(stage, [(0, items)], limit, process=0)

    def fail() -> np.ndarray:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        attempt([*specs({"a": A + 1}), ("b", "I64", (4,), fail)])
    for wrong in (A.astype(np.float64), A.T, A.astype(">f4")):
        with pytest.raises(ValueError, match="was declared as F32"):
            attempt([("a", "F32", (2, 3), lambda wrong=wrong: wrong)])
    for item in (("a", "F33", (1,), fail), ("a", "F32", (-1,), fail), ("__metadata__", "F32", (1,), fail)):
        with pytest.raises(ValueError, match=r"cannot be written|reserved"):
            attempt([item])
    with pytest.raises(ValueError, match="twice"):
        attempt(specs({"a": A}) * 2)
    with pytest.raises(ValueError, match="max_shard_size"):
        attempt(specs({"a": A}), 0)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert os.listdir(tmp_path) == ["m"]
    with pytest.raises(CheckpointError, match=r"config\.json.*not a folder"), atomic_dir(folder / "config.json"):
        pass
    shares = [(0, specs({"a": A, "b": B}))]
    refused(lambda: write_sharded(folder, shares, 30, process=0), "cannot write", "model-00001", "exists")
    refused(lambda: dtype_code(np.dtype("datetime64[s]")), "datetime64")
