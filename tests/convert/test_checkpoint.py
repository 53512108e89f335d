"""Training checkpoints: bitwise equal after restoring on any mesh, and atomic under every failure."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe.convert.files.errors import CheckpointError, error_summary
from nnxmoe.train.checkpoints import VERSION, Checkpoints
from tests.support.forked import forked
from tests.support.launch import Launch

Tree = dict[str, Any]


def tree(step: int) -> Tree:
    """Arrays of many dtypes whose values encode ``step``."""
    bits = jnp.asarray([0x7FC00123 + step, 0x80000000, 0xFFC00001], jnp.uint32)
    return {
        "params": {"a": jnp.full((6, 4), step, jnp.float32), "b.c": {"d": jnp.full(5, step, jnp.bfloat16)}},
        "moments": {"0": jnp.arange(4000.0).reshape(40, 100) + step, "nan": jax.lax.bitcast_convert_type(bits, float)},
        "low": {
            "f8": jnp.full(3, step, jnp.float8_e4m3fn),
            "i4": jnp.arange(4, dtype=jnp.int4),
            "no": jnp.ones((0, 3)),
        },
        "step": jnp.int32(step),
        "keys": {"old": jax.random.PRNGKey(step), "new": jax.random.key(step), "more": keys(step)},
    }


def keys(step: int) -> jax.Array:
    return jax.random.split(jax.random.key(step, impl="rbg"), 3)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return str(array.dtype), tuple(array.shape), np.asarray(data).tobytes()


def same(one: Tree, other: Tree) -> None:
    """Assert equal structure, dtypes, shapes and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert bits(a) == bits(b), path


def filled(folder: Path, steps: int = 2, **options: Any) -> Checkpoints:
    with Checkpoints(folder, **{"every": 1, **options}) as checkpoints:
        for step in range(1, steps + 1):
            assert checkpoints.save(step, tree(step), {"seen": step})
    return checkpoints


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# Round trips


def test_restore_is_bitwise_equal(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path / "run")
    assert checkpoints.latest() == 2
    for step in (1, 2):
        arrays, extra = checkpoints.restore(step, shapes(tree(0)))
        same(arrays, tree(step))
        assert extra == {"seen": step}
        assert jax.random.key_impl(arrays["keys"]["more"]) == jax.random.key_impl(keys(0))
    arrays, _ = checkpoints.restore(2, tree(0))  # arrays are accepted in place of ShapeDtypeStructs
    same(arrays, tree(2))
    nowhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree(0))
    same(checkpoints.restore(1, nowhere)[0], tree(1))


def test_arrays_may_be_donated_right_after_save(tmp_path: Path) -> None:
    """`save` copies before it returns, since the next training step overwrites the arrays."""
    grow = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    values = {"a": jnp.zeros((1000, 1000)), "b": jnp.zeros((8,), jnp.int32)}
    with Checkpoints(tmp_path / "run", keep=9, every=1) as checkpoints:
        for step in range(5):
            checkpoints.save(step, values)
            values = grow(values)
            values = grow(values)
    for step in range(5):
        arrays, _ = checkpoints.restore(step, values)
        assert all(np.all(np.asarray(x) == 2 * step) for x in arrays.values())


@pytest.mark.slow
def test_save_interval_and_retention(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run", keep=2, every=3) as checkpoints:
        assert checkpoints.latest() is None and not (tmp_path / "run").exists()
        assert [step for step in range(12) if checkpoints.save(step, tree(step))] == [0, 3, 6, 9]
        assert checkpoints.save(11, tree(11), force=True) and not checkpoints.save(11, tree(11), force=True)
        checkpoints.wait()
        assert listing(tmp_path / "run") == ["step_11", "step_9"]
        with pytest.raises(CheckpointError, match=r"contains step 11, which is later than step 6: resume"):
            checkpoints.save(6, tree(6))
    with Checkpoints(tmp_path / "run", keep=1, every=1) as again:
        assert again.latest() == 11 and not again.save(11, tree(11))
        assert again.save(12, tree(12))
    assert listing(tmp_path / "run") == ["step_12"]


def on_other_meshes(folder: Path) -> None:
    """Runs in a process with eight devices: saves on one mesh, restores on others with different shardings."""
    host = {"a": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.arange(16, dtype=np.float32)}

    def like(rows: str | None, columns: str | None, **sizes: int) -> Tree:
        mesh = nnxmoe.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])
        spec = {"a": PartitionSpec(rows, columns), "b": PartitionSpec(columns), "k": PartitionSpec()}
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec[name]))
            for name, shape, dtype in (("a", (8, 8), jnp.float32), ("b", (16,), jnp.float32), ("k", (), key.dtype))
        }

    key = jax.random.key(5)
    start = like("fsdp", "tensor", fsdp=4, tensor=2)
    arrays = {name: jax.device_put(x, start[name].sharding) for name, x in (host | {"k": key}).items()}
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, arrays)
    for other in (start, like("tensor", None, tensor=8), like(None, "fsdp", fsdp=2), like(None, None, data=1)):
        found, _ = checkpoints.restore(1, other)
        same(found, arrays)
        assert all(found[name].sharding == other[name].sharding for name in other)
    nowhere = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in start.items()}
    found, _ = checkpoints.restore(1, nowhere)
    assert all(array.devices() == {jax.local_devices()[0]} for array in found.values())


@pytest.mark.slow
def test_restore_on_another_mesh(tmp_path: Path, eight: Callable[..., Any]) -> None:
    eight(on_other_meshes, tmp_path / "run")


@pytest.mark.commands
def test_one_process_restores_what_two_saved(tmp_path: Path) -> None:
    with Launch(tmp_path, 2, "checkpoint", devices=2) as job:
        job.finish(120)
    checkpoints = Checkpoints(tmp_path / "run", every=1)
    assert checkpoints.latest() == 4 and {"step_3", "step_4"} == {
        n for n in listing(tmp_path / "run") if "tmp" not in n
    }
    like = {"a": jax.ShapeDtypeStruct((8, 6), jnp.float32), "k": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)}
    arrays, extra = checkpoints.restore(4, like)
    np.testing.assert_array_equal(arrays["a"], np.arange(48, dtype=np.float32).reshape(8, 6) + 4)
    assert extra == {"at": 4} and bits(arrays["k"]) == bits(jax.random.key(7))


# Mismatches


def test_error_lists_every_mismatch(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path / "run", 1)
    like = shapes(tree(0))
    del like["step"]
    like["params"]["new"] = like["params"].pop("a")
    like["low"]["i4"] = jax.ShapeDtypeStruct((4,), jnp.int8)
    like["moments"]["0"] = jax.ShapeDtypeStruct((100, 40), jnp.float32)
    like["keys"]["new"] = jax.ShapeDtypeStruct((), jax.random.key(0, impl="rbg").dtype)
    with pytest.raises(ValueError) as caught:
        checkpoints.restore(1, like)
    said = str(caught.value).splitlines()
    assert str(tmp_path / "run" / "step_1") in said[0]
    assert [line.strip() for line in said[1:]] == [
        "keys/new is [] key<fry>, not [] key<rbg>",
        "low/i4 is [4] int4, not [4] int8",
        "moments/0 is [40, 100] float32, not [100, 40] float32",
        "params/a [6, 4] float32 is unexpected",
        "params/new [6, 4] float32 is missing",
        "step [] int32 is unexpected",
    ]


def test_missing_steps(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=r"run/step_7/run/metadata: No such file"):
        checkpoints.restore(7, tree(0))
    assert Checkpoints(tmp_path / "nowhere", every=1).latest() is None and listing(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {}, "the dict is empty"),
        (lambda: {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "a has no values"),
        (lambda: {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "two arrays have the name 'a/b'"),
        (lambda: {"a": {"b": 1.0}}, "a/b is a float. Pass dicts of JAX arrays"),
        (lambda: {"a": np.ones(2)}, "a is a ndarray"),
    ],
)
def test_arrays_that_cannot_be_saved(tmp_path: Path, make: Callable[[], Tree], message: str) -> None:
    with Checkpoints(tmp_path / "run", every=1) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(0, make())
    donated = jnp.ones(3)
    donated.delete()
    with Checkpoints(tmp_path / "run", every=1) as checkpoints, pytest.raises(CheckpointError, match="or was donated"):
        checkpoints.save(0, {"a": donated})


_NOT_JSON = [{"a": float("nan")}, {"a": (1, 2)}, {1: 2}, {"a": np.int32(1)}, {"a": {1}}, {"a": "b" * 10**6}]


@pytest.mark.parametrize("extra", _NOT_JSON)
@pytest.mark.wrong_types
def test_extra_must_be_json_serializable(tmp_path: Path, extra: Any) -> None:
    with Checkpoints(tmp_path / "run", every=1) as checkpoints, pytest.raises(CheckpointError, match="JSON"):
        checkpoints.save(0, tree(0), extra)


@pytest.mark.wrong_types
def test_invalid_keep_every_and_step(tmp_path: Path) -> None:
    for options in ({"keep": 0}, {"every": 0}, {"keep": True}, {"every": 1.5}, {"keep": None}):
        with pytest.raises(ValueError, match=r"(keep|every) must be a 32-bit integer >= 1"):
            Checkpoints(tmp_path, **options)  # pyright: ignore
    for step in (-1, True, 1.5, "3"):
        with pytest.raises(ValueError, match="step must be a 64-bit integer >= 0"):
            Checkpoints(tmp_path, every=1).save(step, tree(0))  # pyright: ignore


# Unrelated folders and concurrent writers


@pytest.mark.parametrize("name", ["notes.txt", "5", "step_5.tmp"])
def test_folders_with_unrelated_files_are_refused(tmp_path: Path, name: str) -> None:
    """The folder is left unchanged. Hidden files such as .DS_Store are allowed."""
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    (run / name / "mine").write_text("mine")
    with (
        Checkpoints(run, every=1) as checkpoints,
        pytest.raises(CheckpointError, match=rf"holds {name}, which is not part of a training run"),
    ):
        checkpoints.save(5, tree(5))
    assert listing(run) == [name] and (run / name / "mine").read_text() == "mine"
    shutil.rmtree(run / name)
    (run / ".DS_Store").touch()
    filled(run, 1)
    (run / "late.txt").write_text("mine")
    with Checkpoints(run, every=1) as checkpoints, pytest.raises(CheckpointError, match=r"holds late\.txt"):
        checkpoints.save(5, tree(5))
    assert listing(run) == [".DS_Store", "late.txt", "step_1"]


def refused_lock(run: Path, pipe: Connection) -> None:
    with contextlib.suppress(CheckpointError), Checkpoints(run, every=1) as second:
        pipe.send(second.latest())
        try:
            second.save(1, state(1))
        except CheckpointError as error:
            pipe.send(str(error))
            raise


def fork_and_die(run: Path, pipe: Connection) -> None:
    pipe.send("go")
    checkpoints = Checkpoints(run, every=1)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, b"forked")
        time.sleep(20)
    os.read(reader, 1)  # until then the child may hold the lock
    os._exit(3)


@pytest.mark.slow
def test_one_process_writes_at_a_time_and_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run", every=1) as checkpoints:
        checkpoints.save(0, state(0))
        checkpoints.wait()
        _, said = forked(refused_lock, tmp_path / "run")
        assert said[0] == 0 and "is locked by another process" in said[1], "reading is for everyone"
    assert forked(fork_and_die, tmp_path / "run")[0] == 3
    with Checkpoints(tmp_path / "run", every=1) as checkpoints:
        assert checkpoints.save(2, state(2))


# Corruption


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("sound") / "run"
    filled(run, 3)
    yield run


@pytest.mark.slow
def test_damaged_step_is_named_and_the_run_continues_without_it(sound: Path, tmp_path: Path) -> None:
    """For every file of a step that is truncated or missing: its arrays are refused, or are right."""
    files = [path.relative_to(sound) for path in (sound / "step_3").rglob("*") if path.is_file()]
    assert len(files) >= 6
    refused = 0
    for number, file in enumerate(files):
        for cut in (True, False):
            run = tmp_path / f"{number} {cut}"
            shutil.copytree(sound, run)
            data = (run / file).read_bytes()
            (run / file).write_bytes(data[: len(data) // 2]) if cut else (run / file).unlink()
            try:
                same(Checkpoints(run, every=1).restore(3, tree(0))[0], tree(3))
            except CheckpointError as error:
                assert str(run / "step_3") in str(error) and "move " in str(error)
                refused += 1
    assert refused >= 6
    shutil.rmtree(run / "step_3")
    with Checkpoints(run, every=1) as checkpoints:
        assert checkpoints.latest() == 2 and checkpoints.save(3, tree(3))
    same(checkpoints.restore(3, tree(0))[0], tree(3))


@pytest.mark.slow
def test_damaged_orbax_metadata_does_not_matter(sound: Path, tmp_path: Path) -> None:
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        for content in (None, b"", b"{"):
            run = tmp_path / "run"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(sound, run)
            (run / "step_3" / name).unlink() if content is None else (run / "step_3" / name).write_bytes(content)
            with Checkpoints(run, keep=2, every=1) as checkpoints:
                assert checkpoints.latest() == 3
                same(checkpoints.restore(3, tree(0))[0], tree(3))
                assert checkpoints.save(4, tree(4))
            assert checkpoints.latest() == 4


def test_runs_of_another_version_are_refused_not_skipped(sound: Path, tmp_path: Path) -> None:
    """Its arrays may have another meaning, and skipping its steps would begin the run again."""
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    content = run / "step_3" / "run" / "metadata"
    content.write_text(json.dumps(json.loads(content.read_text()) | {"version": VERSION - 1}))
    with pytest.raises(CheckpointError, match=f"version {VERSION - 1} is not version {VERSION}. Continue.*new folder"):
        Checkpoints(run, every=1).restore(3, tree(0))


def test_incomplete_steps_of_killed_runs_are_skipped(sound: Path, tmp_path: Path) -> None:
    """Covers unfinished saves and half-deleted steps."""
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    shutil.copytree(run / "step_3", run / "step_4.orbax-checkpoint-tmp")
    shutil.rmtree(run / "step_1" / "arrays")
    assert Checkpoints(run, keep=2, every=1).latest() == 3
    assert len(listing(run)) == 4, "reading changes nothing"
    with Checkpoints(run, keep=2, every=1) as checkpoints:
        assert checkpoints.save(4, tree(4))
    assert listing(run) == ["step_3", "step_4"]


# Full disks


def in_small_files(run: Path, pipe: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    pipe.send("go")
    checkpoints = Checkpoints(run, every=1)
    checkpoints.save(1, tree(1))
    checkpoints.wait()
    for act in (checkpoints.wait, lambda: checkpoints.save(3, tree(3))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            assert checkpoints.save(2, tree(2))
            act()
            os._exit(4)
        except CheckpointError as caught:
            error = str(caught)
        finally:  # lifted first, so that a failure can be printed
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert f"cannot write step 2 to {run}" in error and "File too large" in error, error
        assert "step_2" not in listing(run) and checkpoints.latest() == 1, listing(run)
    assert checkpoints.save(2, tree(2))
    checkpoints.close()
    assert listing(run) == ["step_1", "step_2"], listing(run)
    same(checkpoints.restore(2, tree(0))[0], tree(2))
    os._exit(3)


@pytest.mark.slow
def test_full_disk_is_reported_by_the_next_call(tmp_path: Path) -> None:
    """The partial step is removed and can be saved again once there is space."""
    assert forked(in_small_files, tmp_path / "run")[0] == 3


def test_reason_of_an_error_of_tensorstore_is_kept() -> None:
    """What follows the reason is longer than a message may be."""
    said = f'Error writing "{"a/" * 150}": Failed to write 8554 bytes to file 20: File too large'
    found = error_summary(ValueError(f"{said} [tensorstore_spec='{{{'x' * 500}}}'] [os_error_code='27']"))
    assert found.endswith("File too large") and len(found) < 400


def test_a_failed_save_does_not_replace_the_error_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Checkpoints) -> None:
        raise CheckpointError("cannot write")

    monkeypatch.setattr(Checkpoints, "wait", fail)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path / "run"):
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="cannot write"), Checkpoints(tmp_path / "run"):
        pass


# Kills


def state(step: int) -> Tree:
    """State of a step, made without compiling anything."""
    numbers = np.random.default_rng(step)
    host = {"params": numbers.normal(size=(200, 300)), "key": numbers.integers(0, 2**32, 2, np.uint32), "step": step}
    return jax.device_put({name: np.asarray(x) for name, x in host.items()})


def train_for_ever(run: Path, pipe: Connection) -> None:
    """Resume from the latest step and save every step."""
    with Checkpoints(run, keep=2, every=1) as checkpoints:
        step = checkpoints.latest() or 0
        pipe.send(step)
        while True:
            step += 1
            checkpoints.save(step, state(step), {"seen": step})
            pipe.send(step)


@pytest.mark.slow
def test_thirty_random_kills_lose_at_most_one_step(tmp_path: Path) -> None:
    """The latest step is always complete; only the step being written is lost."""
    run, moments, seen, midway = tmp_path / "run", random.Random(0), set(), 0
    for _ in range(30):
        code, said = forked(train_for_ever, run, kill_after=moments.uniform(0, 0.5))
        assert code == -signal.SIGKILL
        checkpoints = Checkpoints(run, keep=2, every=1)
        latest = checkpoints.latest()
        if latest is None:
            assert said[-1] <= 1
            continue
        assert said[0] <= said[-1] - (len(said) > 1) <= latest <= said[-1] + 1
        arrays, extra = checkpoints.restore(latest, state(0))
        same(arrays, state(latest))
        assert extra == {"seen": latest}
        seen.add(latest)
        midway += any("tmp" in name for name in listing(run))
    assert len(seen) > 10 and midway > 10, "hardly a kill came in the middle of a save"
