"""The compile cache, messages about compiling, memory limits, and Ctrl-C."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import nnxmoe
from nnxmoe.runtime import compile_cache, interrupts, memory, programs, progress
from tests.support.tiny import build_tiny, random_tokens

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> str:
    """What a new process prints, without this process's compilation cache; ``env`` None: unset."""
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# The compile cache

COUNT = """
import jax, nnxmoe
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
print(nnxmoe.compile_cache({arguments}))
jax.jit(lambda x: x * 2 + {salt})(1.0)
print(sum("cache_hits" in name for name in found), sum("cache_misses" in name for name in found))
"""


@pytest.mark.commands
def test_compile_cache_is_kept_in_the_users_folder(tmp_path: Path) -> None:
    """The second process reads what the first compiled; half a program is deleted; off and limits are obeyed."""
    home, code = {"XDG_CACHE_HOME": str(tmp_path)}, COUNT.format(arguments="", salt=3)
    folder = tmp_path / "nnxmoe" / "xla"
    first, second = (run(code, **home).split() for _ in range(2))
    assert first[0] == second[0] == str(folder)
    assert first[1] == "0" and second[1] == first[2] != "0"
    entries = sorted(folder.glob("*-cache"))
    entries[0].with_name(entries[0].name.replace("-cache", "-atime")).unlink()  # its writer was killed
    os.utime(entries[0], (0, 0))
    entries[0].write_bytes(b"half")
    os.utime(entries[0], (0, 0))
    third = run(code, **home).split()
    assert int(third[2]) == 1 and int(third[1]) == int(second[1]) - 1
    assert run(code, NNXMOE_COMPILE_CACHE="off").split()[0] == "None"
    other = tmp_path / "other"
    other.mkdir()
    (other / "jit_f-cache").write_bytes(b"a program that JAX keeps without a limit on the size")
    os.utime(other / "jit_f-cache", (0, 0))
    assert run(code, NNXMOE_COMPILE_CACHE=str(other)).split()[0] == str(other / "nnxmoe" / "xla")
    assert (other / "jit_f-cache").exists()
    own = run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine")).split()
    assert own[0] == str(tmp_path / "mine") and (tmp_path / "mine").is_dir()
    size = max(entry.stat().st_size for entry in folder.glob("*-cache"))
    small = tmp_path / "small" / "nnxmoe" / "xla"
    for salt in range(4):
        run(COUNT.format(arguments=f"{str(tmp_path / 'small')!r}, {2 * size}", salt=salt))
    assert sum(entry.stat().st_size for entry in small.glob("*-cache")) <= 2 * size


def test_compile_cache_without_a_writable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a message, not an error, and the settings of JAX are unchanged."""
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    settings = dict(jax.config.values)
    try:
        with caplog.at_level("INFO", logger="nnxmoe"):
            assert nnxmoe.compile_cache(tmp_path / "file" / "below") is None
        assert "compiled programs are not cached" in caplog.text and compile_cache.VARIABLE in caplog.text
        monkeypatch.setenv(compile_cache.VARIABLE, "OFF")
        assert nnxmoe.compile_cache() is None
        assert dict(jax.config.values) == settings
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


# Compiling


def test_only_compiling_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message comes before XLA compiles, once per block, and not for programs of this process or of the cache."""
    x = jnp.arange(5.0)

    def said(function: Any, *given: Any) -> list[str]:
        caplog.clear()
        with programs.announced("compiling a test"):
            function(*given)
        return [record.message for record in caplog.records]

    compiler = logging.getLogger("jax._src.compiler")
    before = jax.config.jax_compilation_cache_dir, compiler.level, list(compiler.filters)
    with caplog.at_level("INFO"):
        try:
            jax.config.update("jax_compilation_cache_dir", str(tmp_path))
            compilation_cache.reset_cache()
            functions = [jax.jit(lambda x: jnp.sin(x) * 1.0625) for _ in range(2)]
            assert said(lambda: [functions[0](x), functions[0](x[:3])]) == ["compiling a test"]
            assert said(functions[0], x) == said(functions[1], x) == []
            assert said(functions[1], x[:4]) == ["compiling a test"]
        finally:
            jax.config.update("jax_compilation_cache_dir", before[0])
            compilation_cache.reset_cache()
    assert (compiler.level, compiler.filters) == before[1:]


# Memory


def test_memory_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (
        ("48GB", 48e9),
        ("1.5 T", 1.5e12),
        ("200mb", 2e8),
        ("off", np.inf),
        (" Off", np.inf),
        ("2 GiB", 2**31),
    ):
        monkeypatch.setenv(memory.VARIABLE, text)
        assert memory.memory_bytes() == (size, f"NNXMOE_MEMORY={text}")
    for text in ("much", "1.2.3GB", ".", "-1GB", "GB"):
        monkeypatch.setenv(memory.VARIABLE, text)
        with pytest.raises(ValueError, match=r"NNXMOE_MEMORY='.*': set it to a size such as 48GB, or to off"):
            memory.memory_bytes()
    monkeypatch.delenv(memory.VARIABLE)
    have, where = memory.memory_bytes()
    assert 1e8 < have < 1e14 and "memory" in where


@pytest.mark.parametrize(
    ("files", "prefix"),
    [((".max", ".current", ".stat"), ""), ((".limit_in_bytes", ".usage_in_bytes", ".stat"), "total_")],
)
def test_cached_files_count_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files, prefix) -> None:
    """The page cache of a container after a download does not make a load fail."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    folder = tmp_path / "memory" if prefix else tmp_path
    folder.mkdir(exist_ok=True)
    stat = f"{prefix}active_file 30000\n{prefix}inactive_file 20000\n{prefix}inactive_anon 7\n"
    for name, text in zip(files, ("100000\n", "90000\n", stat), strict=True):
        (folder / f"memory{name}").write_text(text)
    assert memory.memory_bytes() == (60000.0, "the free memory of this container")


_V2, _V1 = ("", "max", "current"), ("memory/", "limit_in_bytes", "usage_in_bytes")
_ODD_STATS = {
    "missing": None,
    "empty": b"",
    "without file pages": b"inactive_anon 7\nslab 3\n",
    "odd text": b"active_file\ninactive_file much\n\xff\xfe x y z\nactive_file -5",
}


@pytest.mark.parametrize("version", [_V2, _V1], ids=["v2", "v1"])
@pytest.mark.parametrize("stat", _ODD_STATS.values(), ids=_ODD_STATS)
def test_container_limit_excludes_file_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[str, str, str], stat: bytes | None
) -> None:
    folder, limit, usage = version
    for usage_text, free in ((b"90000\n", 10_000.0), (b"", 100_000.0), (None, 100_000.0), (b"120000", 0.0)):
        group = tmp_path / str(usage_text) / folder
        texts = {limit: b"100000\n", usage: usage_text, "stat": stat}
        _write_group(group, {f"memory.{name}": text for name, text in texts.items()})
        monkeypatch.setattr(memory, "_CGROUP", tmp_path / str(usage_text))
        assert memory.memory_bytes() == (free, "the free memory of this container")


@pytest.mark.parametrize("version", [_V2, _V1], ids=["v2", "v1"])
@pytest.mark.parametrize("limit", [b"max\n", b"9" * 5000, b"9223372036854771712", None, b"", b"many", b"\xff", b"-1"])
def test_absent_and_unreadable_container_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: tuple[str, str, str],
    limit: bytes | None,
) -> None:
    """Without a limit the machine's memory counts. A warning names a limit that cannot be parsed."""
    folder, name, usage = version
    _write_group(tmp_path / folder, {f"memory.{name}": limit, f"memory.{usage}": b"5"})
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    have, where = memory.memory_bytes()
    assert have > 1e8 and "container" not in where
    odd = limit is not None and limit.strip() != b"max" and not limit.isdigit()
    assert [f"memory.{name}" in record.getMessage() for record in caplog.records] == [True] * odd


@pytest.mark.parametrize(
    ("version", "line"), [(_V2, "0::{}"), (_V1, "4:memory:{}"), (_V1, "11:cpu,memory:{}"), (_V1, "4:memory,hugetlb:{}")]
)
def test_lowest_limit_of_nested_cgroups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[str, str, str], line: str
) -> None:
    """systemd and batch systems set limits on the process's cgroup and on its parents."""
    folder, limit, usage = version
    path = "/job.slice/step_0"
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n" + line.format(path) + "\n")
    monkeypatch.setattr(memory, "_OF_PROCESS", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    for group, most, free in ((path, b"max", None), ("", b"80000", 79_000.0), ("/job.slice", b"50000", 49_000.0)):
        texts = {limit: most, usage: b"1000"}
        _write_group(tmp_path / folder / group[1:], {f"memory.{name}": text for name, text in texts.items()})
        assert free is None or memory.memory_bytes() == (free, "the free memory of this container")
    for outside in ("/../other", "/a/host/path", "/a\0b"):  # a container that sees its cgroup as the root
        (tmp_path / "own").write_text(line.format(outside))
        assert memory.memory_bytes() == (79_000.0, "the free memory of this container")


def _write_group(folder: Path, files: dict[str, bytes | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is not None:
            (folder / name).write_bytes(content)


@pytest.mark.commands
def test_memory_limit_of_the_process() -> None:
    code = (
        "import os, resource, jax; jax.devices(); from nnxmoe.runtime import memory\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))\n"
        "print(*memory.memory_bytes())"
    )
    size, _, where = run(code).partition(" ")
    assert 0 < float(size) <= 2**30 and where.strip() == "the process's limit (ulimit -v)"


def test_models_beyond_memory_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, training and generating name the size, and the remedies; the override works."""
    import optax

    model, tokens = build_tiny("mixtral", nnxmoe.Strategy()), random_tokens(2, 5)
    nnxmoe.save_pretrained(model, tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    sound = file.read_bytes()
    monkeypatch.setenv(memory.VARIABLE, "0.1MB")
    file.write_bytes(sound[: len(sound) - 4000] + bytes(4000))
    refused = (
        r"the weights take 127\.01 kB, NNXMOE_MEMORY=0\.1MB is 100\.00 kB: shard .*bfloat16.* set NNXMOE_MEMORY=off"
    )
    with pytest.raises(ValueError, match=refused):
        nnxmoe.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"training takes, without activations, .* train adapters"):
        nnxmoe.train.fit(model, [{"tokens": tokens}], optimizer=optax.adam(1e-3), steps=1)
    with pytest.raises(ValueError, match=r"a cache of 512 tokens for batch 2 takes .* fewer max_new_tokens"):
        nnxmoe.generate(model, tokens)
    monkeypatch.setenv(memory.VARIABLE, "off")
    assert len(jax.tree.leaves(nnx.state(nnxmoe.from_pretrained(tmp_path / "model")))) > 5


# Ctrl-C


def test_first_interrupt_only_asks_once_there_is_something_to_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        pytest.skip("SIGINT is ignored here, as in background jobs")
    with interrupts.stopping() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not stop.asked
        stop.deferred = True
        with caplog.at_level("INFO", logger="nnxmoe"):
            signal.raise_signal(signal.SIGINT)
        assert stop.asked and "stopping after this step" in caplog.text
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    found = []

    def elsewhere() -> None:
        with interrupts.stopping() as stop:
            found.append(stop.asked)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


FIT = """
import sys, numpy as np, optax, nnxmoe
model = nnxmoe.from_pretrained("{demo}")
data = [{{"tokens": np.random.default_rng(i).integers(0, 500, (2, 32))}} for i in range(3)]
def told(progress):
    print(progress.step, flush=True)
steps = int(sys.argv[1])
kept = {{"checkpoint": nnxmoe.train.Checkpoints("run", every=10**6)}}
fitted = nnxmoe.train.fit(model, data, optimizer=optax.sgd(1e-3), steps=steps, callbacks=[told], **kept)
print("done", fitted.history[0]["step"])
"""


LAST_STEPS = """
import signal, sys
import numpy as np, optax, nnxmoe
from nnxmoe.runtime.interrupts import Interrupted
from tests.support.tiny import build_tiny

for at in (2, 3):
    def interrupt(progress):
        if progress.step == at:
            signal.raise_signal(signal.SIGINT)

    try:
        nnxmoe.train.fit(
            build_tiny("llama", nnxmoe.Strategy()), [{"tokens": np.arange(18).reshape(2, 9)}],
            optimizer=optax.adam(1e-3), steps=3, checkpoint=f"run{at}", callbacks=[interrupt],
        )
    except Interrupted as error:
        print(len(error.fitted.history), error)
"""


@pytest.mark.commands
def test_interrupt_in_the_last_steps_of_fit_is_not_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_STEPS],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    lines = [f"3 interrupted after the last step; saved in {tmp_path / f'run{at}'}" for at in (2, 3)]
    assert done.stdout.splitlines() == lines, done.stderr


@pytest.mark.slow
def test_interrupted_fit_saves_and_continues(tmp_path: Path) -> None:
    """The last line of a script says where; the next run begins after the last step of this one."""
    script = tmp_path / "fit.py"
    script.write_text(FIT.format(demo=ROOT / "models" / "demo"))
    last = 0
    for steps in (10**6, 10**6, None):
        line = [sys.executable, str(script), str(last + 2 if steps is None else steps)]
        process = subprocess.Popen(
            line,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        first = int(process.stdout.readline())
        assert first == last + 1
        if steps is None:
            output, errors = process.communicate(timeout=1200)
            assert process.returncode == 0 and output.endswith(f"done {last + 1}\n"), errors
            return
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=1200)
        assert process.returncode == 1, errors  # Python knows the status of KeyboardInterrupt itself only
        last = int(output.split()[-1])
        assert f"interrupted at step {last} of 1000000; saved in {tmp_path / 'run'}" in errors.splitlines()[-1]


# Progress


def test_bars_of_quick_reads_are_not_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    with progress.bytes_bar(10, "loading") as bar:
        bar.update(10)
    assert "loading" not in capsys.readouterr().err


def test_messages_of_commands_are_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a library has added a handler to the root logger, as ``logging.info`` does."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with progress.messages_on_stderr():
        logging.basicConfig()
        progress.say("hello")
    assert capsys.readouterr().err == "nnxmoe: hello\n"
    progress.logger.warning("later")
    assert capsys.readouterr().err == "WARNING:nnxmoe:later\n"
