"""Faults of containers, indexes and folders, which know no model."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.corpus.case import (
    CONFIG,
    INDEX,
    ONE,
    SINGLE,
    TWO,
    Case,
    Draft,
    Verdict,
    container,
    entry,
    layout,
    pack,
    rotate,
)

NORM, HEAD = "model.norm.weight", "lm_head.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


def cases() -> Iterator[Case]:
    """All of them, each for one family in turn."""
    family = rotate()
    for fault, spoil, names in HEADERS:
        yield Case(next(family), f"header, {fault}", "refuse", _header(spoil), (SINGLE, *names))
    for fault, spoil, names in BYTES:
        yield Case(next(family), f"file, {fault}", "refuse", _bytes(spoil), (SINGLE, *names))
    for fault, value in PATHS:
        yield Case(next(family), f"index, a path that is {fault}", "refuse", _path(value), (INDEX, HEAD))
    for fault, verdict, make, names in FOLDERS:
        yield Case(next(family), fault, verdict, make, names)


# Headers: a function changes the parsed header of a sound file

Header = dict[str, Any]


def _header(spoil: Callable[[Header, bytes], tuple[Any, bytes]]) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.write_config()
        (draft.folder / SINGLE).write_bytes(container(*spoil(*layout(draft.weights))))

    return make


def _set(name: str, **changes: Any) -> Callable[[Header, bytes], tuple[Header, bytes]]:
    def spoil(header: Header, data: bytes) -> tuple[Header, bytes]:
        header[name] = {key: value for key, value in (header[name] | changes).items() if value is not ...}
        return header, data

    return spoil


def _shift(begin: int, end: int) -> Callable[[Header, bytes], tuple[Header, bytes]]:
    def spoil(header: Header, data: bytes) -> tuple[Header, bytes]:
        first, last = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [first + begin, last + end]
        return header, data

    return spoil


def _reverse(header: Header, data: bytes) -> tuple[Header, bytes]:
    header[NORM]["data_offsets"].reverse()
    return header, data


def _hole(header: Header, data: bytes) -> tuple[Header, bytes]:
    last = max(end for _, end in (one["data_offsets"] for one in header.values()))
    header["far"] = entry("F32", [1], last + 4, last + 8)
    return header, data + bytes(8)


def _add(name: str, value: Any) -> Callable[[Header, bytes], tuple[Header, bytes]]:
    return lambda header, data: (header | {name: value}, data)


HEADERS: list[tuple[str, Callable[[Header, bytes], tuple[Any, bytes]], tuple[str, ...]]] = [
    ("bytes that are no JSON", lambda h, d: (b"{not json}", d), ("safetensors",)),
    ("bytes that are no UTF-8", lambda h, d: (json.dumps(h).encode().replace(b"model.norm", b"model.n\xffrm"), d), ("safetensors",)),
    ("a list", lambda h, d: ([], d), ("safetensors",)),
    ("nested 200,000 deep", lambda h, d: (b'{"a":' * 200_000, d), ("safetensors",)),
    ("3 million empty lists", lambda h, d: (b"[" + b"[]," * 3_000_000 + b"[]]", d), ("safetensors",)),
    ("an entry of 4201 digits", _add("x", 7 * 10**4200), ("safetensors",)),
    ("NaN for a shape", _set(NORM, shape=[float("nan")]), ("safetensors",)),
    ("metadata that is no text", _add("__metadata__", {"format": 7}), ("safetensors",)),
    ("metadata that is a list", _add("__metadata__", ["pt"]), ("safetensors",)),
    ("an entry that is a number", _add("x", 7), ("safetensors",)),
    ("an entry that is null", _add("x", None), ("safetensors",)),
    ("no dtype", _set(NORM, dtype=...), ("safetensors",)),
    ("an unknown dtype", _set(NORM, dtype="F33"), ("safetensors",)),
    ("a dtype that is a list", _set(NORM, dtype=["F32"]), ("safetensors",)),
    ("no shape", _set(NORM, shape=...), ("safetensors",)),
    ("a negative dimension", _set(NORM, shape=[-24]), ("safetensors",)),
    ("two negative dimensions", _set(NORM, shape=[-4, -6]), ("safetensors",)),
    ("a dimension of true", _set(NORM, shape=[True]), ("safetensors",)),
    ("a dimension that is a text", _set(NORM, shape=["24"]), ("safetensors",)),
    ("a dimension of 24.0", _set(NORM, shape=[24.0]), ("safetensors",)),
    ("dimensions beyond 64 bits", _set(NORM, shape=[2**40, 2**40]), ("safetensors",)),
    ("dimensions that overflow to 24", _set(NORM, shape=[2**63 + 12, 2]), ("safetensors",)),
    ("a rank of 1000", _set(NORM, shape=[1] * 1000), ("safetensors",)),
    ("a shape too large for its bytes", _set(NORM, shape=[25]), ("safetensors",)),
    ("a shape too small for its bytes", _set(NORM, shape=[23]), ("safetensors",)),
    ("no offsets", _set(NORM, data_offsets=...), ("safetensors",)),
    ("one offset", _set(NORM, data_offsets=[0]), ("safetensors",)),
    ("negative offsets", _set(NORM, data_offsets=[-96, 0]), ("safetensors",)),
    ("reversed offsets", _reverse, ("safetensors",)),
    ("offsets beyond the file", _set(NORM, data_offsets=[10**9, 10**9 + 96]), ("safetensors",)),
    ("offsets of 2**64", _set(NORM, data_offsets=[2**64, 2**64 + 96]), ("safetensors",)),
    ("overlapping tensors", _shift(-4, -4), ("safetensors",)),
    ("a hole between tensors", _hole, ("safetensors",)),
    ("two tensors with the same bytes", lambda h, d: (h | {"copy": h[NORM]}, d), ("safetensors",)),
]  # fmt: skip


# Files: a function changes the bytes of a sound file


def _bytes(spoil: Callable[[bytes], bytes]) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.write()
        file = draft.folder / SINGLE
        file.write_bytes(spoil(file.read_bytes()))

    return make


def _length(value: int) -> Callable[[bytes], bytes]:
    return lambda data: struct.pack("<Q", value) + data[8:]


BYTES: list[tuple[str, Callable[[bytes], bytes], tuple[str, ...]]] = [
    ("empty", lambda data: b"", ("0 bytes",)),
    ("of seven bytes", lambda data: data[:7], ("7 bytes",)),
    ("cut within the header", lambda data: data[:100], ("header",)),
    ("cut within the data", lambda data: data[:-1], ("not fully covered",)),
    ("with a byte too many", lambda data: data + b"\0", ("not fully covered",)),
    ("with a megabyte too many", lambda data: data + bytes(1 << 20), ("not fully covered",)),
    ("whose header has length 0", _length(0), ("length is 0",)),
    ("whose header has length 2**40", _length(2**40), (str(2**40),)),
    ("whose header has length 2**64 - 1", _length(2**64 - 1), (str(2**64 - 1),)),
    ("whose header is one byte shorter", lambda data: _length(struct.unpack("<Q", data[:8])[0] - 1)(data), ("JSON",)),
    ("that is a web page", lambda data: b"<!DOCTYPE html><html><body>Not found</body></html>", ("safetensors",)),
    ("that is a Git LFS pointer", lambda data: LFS, ("git lfs pull",)),
    ("that is a pickle", lambda data: b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", ("header",)),
    ("that is a zip archive", lambda data: b"PK\x03\x04" + bytes(200), ("header",)),
    ("of zeros", lambda data: bytes(len(data)), ("length is 0",)),
]  # fmt: skip


# Indexes


def _path(value: Any) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        (draft.folder / "sub").mkdir()
        for place in ("../outside.safetensors", "sub/x.safetensors", "x.safetensors"):
            (draft.folder / place).write_bytes(pack({HEAD: draft.weights[HEAD]}))
        draft.write_shards()
        index = json.loads((draft.folder / INDEX).read_text())
        index["weight_map"][HEAD] = value
        (draft.folder / INDEX).write_text(json.dumps(index))

    return make


PATHS: list[tuple[str, Any]] = [
    ("above the folder", "../outside.safetensors"),
    ("above and back", "../model/x.safetensors"),
    ("absolute", "/etc/x.safetensors"),
    ("absolute and no safetensors", "/etc/passwd"),
    ("below and above", "sub/../../x.safetensors"),
    ("written with a backslash", "..\\outside.safetensors"),
    ("on a drive", "C:x.safetensors"),
    ("cut by a NUL", "x.safetensors\0.txt"),
    ("two dots", ".."),
    ("empty", ""),
    ("null", None),
    ("a number", 3),
    ("a list", [ONE]),
    ("5000 characters long", "x" * 5000),
    ("with a line break", "x\n.safetensors"),
    ("a lone surrogate", "\ud800.safetensors"),
    ("a pickle", "pytorch_model.bin"),
]


# Folders


def _index(**changes: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.write_shards(**changes)


def _raw_index(data: bytes) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.write_shards()
        (draft.folder / INDEX).write_bytes(data)

    return make


def _moved(name: str) -> Callable[[Draft], None]:
    """The index says the other file."""

    def make(draft: Draft) -> None:
        draft.write_shards()
        index = json.loads((draft.folder / INDEX).read_text())
        other = {ONE: TWO, TWO: ONE}
        index["weight_map"][name] = other[index["weight_map"][name]]
        (draft.folder / INDEX).write_text(json.dumps(index))

    return make


def _promised(draft: Draft) -> None:
    draft.write_shards()
    index = json.loads((draft.folder / INDEX).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = ONE
    (draft.folder / INDEX).write_text(json.dumps(index))


def _gone(draft: Draft) -> None:
    draft.write_shards()
    (draft.folder / TWO).unlink()


def _cut(draft: Draft) -> None:
    draft.write_shards()
    file = draft.folder / TWO
    file.write_bytes(file.read_bytes()[:-5])


def _copy(change: float, listed: bool = True) -> Callable[[Draft], None]:
    """A tensor in both shards; the index names the first one, or none."""

    def make(draft: Draft) -> None:
        draft.write_shards()
        names = json.loads((draft.folder / INDEX).read_text())["weight_map"]
        part = {name: draft.weights[name] for name, file in names.items() if file == TWO}
        lost = next(name for name, file in names.items() if file == ONE)
        (draft.folder / TWO).write_bytes(pack(part | {lost: draft.weights[lost] + np.float32(change)}))
        if not listed:
            del names[lost]
            (draft.folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return make


def _linked(draft: Draft) -> None:
    """As the hub's cache: links out of the folder."""
    draft.write_shards()
    blobs = draft.folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(draft.folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(f"../blobs/{number:064x}")


def _instead(name: str, put: Callable[[Any], Any]) -> Callable[[Draft], None]:
    """Something else in the place of a file."""

    def make(draft: Draft) -> None:
        draft.write()
        (draft.folder / name).unlink()
        put(draft.folder / name)

    return make


def _only(*names: str) -> Callable[[Draft], None]:
    """config.json and files that are never opened: reading them would wait for ever."""

    def make(draft: Draft) -> None:
        draft.write_config()
        for name in names:
            os.mkfifo(draft.folder / name)

    return make


def _beside(**files: bytes) -> Callable[[Draft], None]:
    """A sound single file, and others that must not disturb."""

    def make(draft: Draft) -> None:
        draft.write()
        for name, data in files.items():
            (draft.folder / name.replace("__", ".")).write_bytes(data)

    return make


def _hard_links(draft: Draft) -> None:
    draft.write_config()
    names = [f"{i}.safetensors" for i in range(20)]
    header = {f"x{i}": entry("U8", [1], i, i + 1) for i in range(30_000)}
    (draft.folder / names[0]).write_bytes(container(header, bytes(30_000)))
    for name in names[1:]:
        os.link(draft.folder / names[0], draft.folder / name)
    (draft.folder / INDEX).write_text(json.dumps({"weight_map": {f"x{i}": name for i, name in enumerate(names)}}))


def _stale_index(draft: Draft) -> None:
    draft.write()
    (draft.folder / INDEX).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))


def _no_index(draft: Draft) -> None:
    draft.write_shards()
    (draft.folder / INDEX).unlink()


def _other_name(draft: Draft) -> None:
    draft.write()
    (draft.folder / SINGLE).rename(draft.folder / "weights.safetensors")


FOLDERS: list[tuple[str, Verdict, Callable[[Draft], None], tuple[str, ...]]] = [
    ("index, no JSON", "refuse", _raw_index(b"{"), (INDEX, "JSON")),
    ("index, a list", "refuse", _raw_index(b"[]"), (INDEX, "object")),
    ("index, a Git LFS pointer", "refuse", _raw_index(LFS), (INDEX, "git lfs pull")),
    ("index, empty", "refuse", _raw_index(b""), (INDEX, "JSON")),
    ("index, nested deeply", "refuse", _raw_index(b'{"weight_map":' * 100_000), (INDEX, "JSON")),
    ("index, a name twice", "refuse", _raw_index(b'{"weight_map":{"a":"%b","a":"%b"}}' % (ONE.encode(), TWO.encode())), (INDEX, "twice")),
    ("index, 400,000 files", "refuse", _raw_index(json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(400_000)}}).encode()), (INDEX, "250000")),
    ("index, 50 MB", "refuse", _raw_index(b'{"x": "' + b"x" * 50_000_000 + b'"}'), (INDEX, "bytes")),
    ("shards, one under 20 names, 30,000 tensors", "refuse", _hard_links, ("32000000",)),
    ("config, a text of 30 MB", "refuse", lambda d: (d.folder / CONFIG).write_bytes(b'{"x": "' + b"x" * 30_000_000 + b'"}'), (CONFIG, "bytes")),
    ("index, no weight_map", "refuse", _raw_index(b'{"metadata":{}}'), (INDEX, "weight_map")),
    ("index, weight_map empty", "refuse", _index(weight_map={}), (INDEX, "weight_map")),
    ("index, weight_map a list", "refuse", _index(weight_map=[ONE]), (INDEX, "weight_map")),
    ("index, weight_map a text", "refuse", _index(weight_map=ONE), (INDEX, "weight_map")),
    ("index, no metadata", "accept", _index(metadata=None), ()),
    ("index, metadata nonsense", "accept", _index(metadata=[{"total_size": -1}]), ()),
    ("index, a tensor that is in the other file", "refuse", _moved(NORM), (INDEX, NORM, ONE, TWO)),
    ("index, a tensor that no file has", "report", _promised, (INDEX, "model.layers.0.extra.weight")),
    ("shards, one missing", "refuse", _gone, (TWO, INDEX)),
    ("shards, the last one cut", "refuse", _cut, (TWO,)),
    ("shards, a tensor in both, different", "report", _copy(0.5), (INDEX, ONE)),
    ("shards, a tensor in both, different, and not in the index", "refuse", _copy(0.5, listed=False), ("different", ONE, TWO)),
    ("shards, a tensor in both, equal", "accept", _copy(0.0), ()),
    ("shards, without index", "refuse", _no_index, (ONE, INDEX)),
    ("shards, linked as in the hub's cache", "accept", _linked, ()),
    ("weights, a folder", "refuse", _instead(SINGLE, lambda path: path.mkdir()), (SINGLE, "folder")),
    ("weights, a link to nothing", "refuse", _instead(SINGLE, lambda path: path.symlink_to("gone")), (SINGLE, "gone")),
    ("weights, a link to itself", "refuse", _instead(SINGLE, lambda path: path.symlink_to(SINGLE)), (SINGLE, "link")),
    ("weights, a pipe", "refuse", _instead(SINGLE, os.mkfifo), (SINGLE, "regular")),
    ("weights, a device", "refuse", _instead(SINGLE, lambda path: path.symlink_to("/dev/zero")), (SINGLE, "regular")),
    ("weights, none", "refuse", lambda draft: draft.write_config(), (SINGLE, INDEX)),
    ("weights, a pickle only", "refuse", _only("pytorch_model.bin"), ("pytorch_model.bin", "safetensors")),
    ("weights, pickled shards only", "refuse", _only("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"), ("pytorch_model", "convert")),
    ("weights, a .pth only", "refuse", _only("consolidated.00.pth"), ("consolidated.00.pth", "safetensors")),
    ("weights, a .gguf only", "refuse", _only("model-Q4_K.gguf"), ("model-Q4_K.gguf", "path")),
    ("weights, Mistral's own layout only", "refuse", _only("consolidated.safetensors"), ("consolidated.safetensors", "layout")),
    ("weights, under another name", "report", _other_name, ("weights.safetensors",)),
    ("beside the weights, pickles and code", "accept", _beside(pytorch_model__bin=b"\x80\x04.", modeling_x__py=b"raise SystemExit(3)"), ()),
    ("beside the weights, consolidated.safetensors", "accept", _beside(consolidated__safetensors=b"junk"), ()),
    ("beside the weights, a stale index", "accept", _stale_index, ()),
    ("config, missing", "refuse", _instead(CONFIG, lambda path: None), (CONFIG,)),
    ("config, a folder", "refuse", _instead(CONFIG, lambda path: path.mkdir()), (CONFIG, "folder")),
    ("config, a link to itself", "refuse", _instead(CONFIG, lambda path: path.symlink_to(CONFIG)), (CONFIG, "link")),
    ("config, a pipe", "refuse", _instead(CONFIG, os.mkfifo), (CONFIG, "regular")),
]  # fmt: skip
