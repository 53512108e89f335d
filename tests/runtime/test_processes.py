"""Multi-process runs on this machine: results equal those of one process, and failures end the job in time.

Every launch has its own deadline, after which its whole process group is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.storage import multihost
from nnxmoe.models import GptOss, GptOssConfig
from nnxmoe.runtime import launch
from nnxmoe.runtime.processes import initialize
from tests.support import worker
from tests.support.arrays import flat, identical, tensors
from tests.support.launch import Launch, wait

ROOT = Path(__file__).resolve().parents[2]
SLACK = 1200.0  # seconds added to limits: only a hang takes so long


# Equal results


@pytest.mark.slow
@pytest.mark.parametrize(("count", "plans"), [(2, tuple(worker.PLANS)), (4, ("mixtral expert ragged",))])
def test_several_processes_match_a_single_one(tmp_path: Path, count: int, plans: tuple[str, ...]) -> None:
    """With four devices in total, each process reads only the bytes of its own shards, and the checkpoint they save
    together equals the model."""
    with numbers(tmp_path / "one", 1, plans) as one, numbers(tmp_path / "several", count, plans) as several:
        one.finish(280)
        several.finish(280)
    for plan in plans:
        wanted = dict(np.load(one.out / f"{plan} 0.npz"))
        assert len([name for name in wanted if name.startswith("gradient")]) > 10
        for i in range(count):
            ours = dict(np.load(several.out / f"{plan} {i}.npz"))
            same_numbers(ours, wanted)
            read = int(ours["bytes read"])
            assert read == int(ours["bytes held"]), "nothing but what its devices hold"
            assert read < int(wanted["bytes read"]) * (0.7 if "expert" in plan else 1.01 / count)
        start = nnxmoe.from_pretrained(worker.HF_CASES / worker.PLANS[plan][0] / "model")
        folders = {way: several.out / f"{plan} {way}" for way in ("hf", "maxtext", "native")}
        shards = sorted(path.stat().st_size for path in folders["hf"].glob("*.safetensors"))
        if "expert ragged" in plan:  # no process holds all of a split tensor, so one process writes those
            assert len(shards) >= count and sum(shards[:-1]) > (1 - 1.2 / count) * sum(shards), "each wrote its share"
        identical(tensors(nnxmoe.from_pretrained(folders["hf"])), tensors(start))
        identical(tensors(nnxmoe.load(folders["native"])), tensors(start))
        identical(flat(maxtext.to_tree(maxtext.load(folders["maxtext"]))), flat(maxtext.to_tree(start)))
        for folder in folders.values():
            assert nnxmoe.Tokenizer.from_pretrained(folder).encode("The quick"), "small files are there"
    assert not [path.name for path in several.out.iterdir() if path.name.startswith(".")], "nothing is left over"


@pytest.mark.slow
def test_every_process_passes_its_rows_whatever_crosses_processes(tmp_path: Path) -> None:
    """Where an axis that does not split rows crosses processes, each needs rows of others."""
    outs = {count: tmp_path / str(count) for count in (1, 2)}
    for count, out in outs.items():
        out.mkdir()
        with Launch(out, count, "shares", devices=worker.DEVICES // count) as job:
            job.finish(280)
    for name in worker.SHARED:
        wanted, found = np.load(outs[1] / f"{name} 0.npz"), [np.load(outs[2] / f"{name} {i}.npz") for i in range(2)]
        for each in found:
            np.testing.assert_allclose(each["losses"], wanted["losses"], rtol=2e-6, err_msg=name)
        assert wanted["losses"][0] - wanted["losses"][1] > 0.01, "it learns"
        reference = np.concatenate([each["reference"] for each in found])
        np.testing.assert_allclose(reference, wanted["reference"], rtol=2e-6, err_msg=name)


@pytest.mark.slow
def test_rollouts_of_two_processes_equal_those_of_one(tmp_path: Path) -> None:
    """Each process trains on its rows of the same samples, with the rewards of process 0."""
    outs = {count: tmp_path / str(count) for count in (1, 2)}
    for count, out in outs.items():
        out.mkdir()
        with Launch(out, count, "rollouts", devices=worker.DEVICES // count) as job:
            job.finish(SLACK)
    for name in ("fsdp", "context"):
        wanted = np.load(outs[1] / f"{name} 0.npz")["found"]
        for i in range(2):
            np.testing.assert_allclose(np.load(outs[2] / f"{name} {i}.npz")["found"], wanted, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_processes_stop_resume_and_save_together(tmp_path: Path) -> None:
    """If one process gets Ctrl-C, or its callback ends the run, all stop after the same step; each resumes at its own
    position in the data. Tensors of which each process holds a part, or some whole, are saved."""
    fields = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    config = GptOssConfig(vocab_size=64, layer_types=["full_attention"] * 4, sliding_window=None, **fields)
    nnxmoe.save_pretrained(GptOss(config, rngs=nnx.Rngs(0)), tmp_path / "base")
    with Launch(tmp_path, 2, "one stops") as job:
        job.finish(280)
    found = [np.load(tmp_path / f"stopped {i}.npz") for i in range(2)]
    for each in found:
        assert 2 <= len(each["first"]) < 6 and len(each["ended"]) == 2
        np.testing.assert_array_equal(each["resumed"], each["wanted"])
        np.testing.assert_array_equal(each["wanted"], found[0]["wanted"])
    start = tensors(nnxmoe.from_pretrained(tmp_path / "base"))
    for name in ("pipe", "expert"):
        identical(tensors(nnxmoe.from_pretrained(tmp_path / name)), start)


@pytest.mark.slow
def test_failed_save_raises_in_every_process(tmp_path: Path) -> None:
    """One reports the cause, the other that its peer failed; both continue, and no files remain."""
    with Launch(tmp_path, 2, "cannot save", devices=2) as job:
        job.finish(SLACK)
    assert len(list(tmp_path.glob("* failed *"))) == 6
    assert not [path.name for path in tmp_path.iterdir() if "never" in path.name]


def numbers(out: Path, count: int, plans: tuple[str, ...]) -> Launch:
    out.mkdir()
    return Launch(out, count, "numbers", *plans, devices=worker.DEVICES // count)


def same_numbers(ours: worker.Numbers, wanted: worker.Numbers) -> None:
    """Assert equal integers (routing, ids, text) and floats within 2e-6, relative to max(1, magnitude)."""
    assert set(ours) == set(wanted)
    for name in [name for name in wanted if "bytes" not in name]:
        if np.issubdtype(wanted[name].dtype, np.integer):
            np.testing.assert_array_equal(ours[name], wanted[name], err_msg=name)
        else:
            scale = max(1.0, float(np.abs(wanted[name]).max()))
            assert np.abs(ours[name] - wanted[name]).max() / scale < 2e-6, name


# Failures


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_others(tmp_path: Path, victim: int) -> None:
    """The connection or JAX's coordinator may detect it first."""
    with Launch(tmp_path, 2, "step") as job:
        job.ten()
        job.processes[victim].kill()
        assert job.end(1 - victim, SLACK) not in (0, -signal.SIGKILL)
        assert "worker.py" in job.said(1 - victim), "where it was"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["stop", "end"])
def test_stuck_process_ends_the_other(tmp_path: Path, task: str) -> None:
    """One process is stopped by a signal, or sleeps while the other waits at the end."""
    with Launch(tmp_path, 2, task) as job:
        job.ten()
        assert job.end(0, SLACK) not in (0, -signal.SIGKILL)
        assert job.processes[1].poll() is None or task == "end"


@pytest.mark.commands
def test_missing_process_times_out(tmp_path: Path) -> None:
    with Launch(tmp_path, 2, "missing", started=1) as job:
        assert job.end(0, SLACK) not in (0, -signal.SIGKILL)
        assert "DEADLINE_EXCEEDED" in job.said(0)


@pytest.mark.commands
def test_exception_ends_every_process(tmp_path: Path) -> None:
    with Launch(tmp_path, 2, "fail") as job:
        job.ten()
        assert job.end(1, SLACK) not in (0, -signal.SIGKILL)
        assert "ArithmeticError: the loss is not finite" in job.said(1)
        assert job.end(0, SLACK) not in (0, -signal.SIGKILL)


# Single process and launcher

SCRIPT = """
import logging, os, sys
from nnxmoe.runtime.processes import initialize
logging.basicConfig(level="INFO")
initialize(timeout=600)
import jax
if jax.process_count() > 1:
    try:
        initialize(timeout=600)
    except ValueError as error:
        assert "already connected to the other processes" in str(error)
counts = jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()
sys.stdout.write(f"{' '.join(map(str, counts))} {sys.argv[1:]}\\n")  # at once: both write to one pipe
sys.stdout.flush()
if "fail" in sys.argv and jax.process_index() == 1:
    sys.stderr.write("KeyError: 'here'")
    os._exit(1)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env, command = os.environ | {"PYTHONPATH": str(ROOT)} | variables, [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SLACK)


@pytest.mark.commands
def test_a_process_that_has_used_jax_runs_alone() -> None:
    """As in a notebook; one that a launcher has started fails, since its job has others."""
    used = "import jax; jax.devices(); from nnxmoe.runtime import processes; processes.initialize()"
    done = python("-c", used)
    assert done.returncode == 0, done.stderr
    assert "must be called before any JAX" in python("-c", used, OMPI_COMM_WORLD_SIZE="2").stderr


@pytest.mark.commands
def test_single_process(script: str) -> None:
    done = python(script)
    assert done.returncode == 0 and done.stdout.startswith("0 1 "), done.stderr
    assert "running as a single process" in done.stderr


@pytest.mark.wrong_types
@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_invalid_timeouts(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout .seconds. must be a finite positive number"):
        initialize(timeout=timeout)


def test_only_unconfigured_processes_run_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Options that do not describe the processes are not a configuration."""

    def no_cluster(**_: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", no_cluster)
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    with caplog.at_level("INFO", logger="nnxmoe"):
        initialize(timeout=5, local_device_ids=[0])
    assert "running as a single process" in caplog.text
    with pytest.raises(ValueError, match="coordinator_address should be defined"):
        initialize(timeout=5, num_processes=2)


@pytest.mark.parametrize("fails", [False, True])
def test_texts_for_several_processes_have_at_most_4000_bytes(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_text() -> str:
        if fails:
            raise CheckpointError("é" * 3000)
        return "é" * 3000

    assert multihost.broadcast_text(lambda: "é" * 3000) == "é" * 3000
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(multihost.multihost_utils, "broadcast_one_to_all", lambda data: data)
    if not fails:
        assert multihost.broadcast_text(compute_text) == "é" * 2000
        return
    with pytest.raises(CheckpointError):
        multihost.broadcast_text(compute_text)


@pytest.mark.commands
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' is not a number: set it"),
        ({"JAX_NUM_PROCESSES": "2"}, "coordinator_address should be defined"),
    ],
)
def test_incomplete_environment_variables(script: str, variables: dict[str, str], message: str) -> None:
    done = python(script, **variables)
    assert done.returncode == 1 and message in done.stderr and not done.stdout


@pytest.mark.commands
def test_jax_detects_slurm(script: str) -> None:
    """Uses only the variables that ``srun`` sets."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm["JAX_COORDINATOR_PORT"] = str(launch.free_port())
    with contextlib.ExitStack() as stack:
        running = []
        for i in "01":
            env = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_PROCID": i, "SLURM_LOCALID": i} | slurm
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            running.append(stack.enter_context(subprocess.Popen([sys.executable, script], env=env, **streams)))
            stack.callback(running[-1].kill)
        for i, process in enumerate(running):
            said, _ = process.communicate(timeout=SLACK)
            assert process.returncode == 0 and f"{i} 2 " in said, said


@pytest.mark.commands
def test_launcher_starts_processes_with_their_arguments(script: str) -> None:
    done = python("-m", "nnxmoe.runtime.launch", "--devices", "3", "2", script, "one", "--two")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.endswith("]"))
    assert lines == [f"{i} 2 3 6 ['one', '--two']" for i in range(2)]


@pytest.mark.commands
def test_finetune_needs_a_mesh_for_several_processes(tmp_path: Path) -> None:
    """Each would train alone, and write into the same folder."""
    command = ["-m", "nnxmoe", "finetune", "demo", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    done = python("-m", "nnxmoe.runtime.launch", "2", *command)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert "this job has 2 processes" in done.stderr and "--mesh fsdp=2" in done.stderr


@pytest.mark.commands
def test_launcher_stops_every_process_if_one_fails(script: str) -> None:
    done = python("-m", "nnxmoe.runtime.launch", "2", script, "fail")
    assert done.returncode == 1 and "KeyError: 'here'" in done.stderr
    assert "process 1 of 2 exited with 1; the other processes were stopped" in done.stderr


# Runs the launcher with the default SIGINT handler, which background jobs ignore.
HEARS = "import signal as s, sys; s.signal(s.SIGINT, s.default_int_handler); from nnxmoe.runtime import launch; "
HEARS += "sys.exit(launch.main())"


@contextlib.contextmanager
def launched(code: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of two processes that run the code, once each has written a file into the folder."""
    command = [sys.executable, "-c", HEARS, "2", "-c", code, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as launcher:
        try:
            wait(lambda: len(list(folder.iterdir())) == 2)
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.commands
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_launcher_kills_its_processes_on_a_signal(tmp_path: Path, number: int, status: int) -> None:
    """Including processes that ignore SIGINT and SIGTERM: the second Ctrl-C kills them."""
    deaf = "import os, signal, sys, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]"
    deaf += "; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(100)"
    with launched(deaf, tmp_path) as launcher:
        launcher.send_signal(number)
        if number == signal.SIGINT:
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(0.5)
            launcher.send_signal(number)
        assert launcher.wait(SLACK) == status
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


@pytest.mark.commands
def test_launcher_waits_for_processes_that_end_on_ctrl_c(tmp_path: Path) -> None:
    """As a training does, which saves its step."""
    saving = "import os, sys, time\ntry:\n    open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(100)\n"
    saving += "except KeyboardInterrupt:\n    time.sleep(0.5); open(f'{sys.argv[1]}/{os.getpid()} saved', 'w').close()"
    with launched(saving, tmp_path) as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(SLACK) == 130
    assert len(list(tmp_path.glob("* saved"))) == 2


@pytest.mark.parametrize("arguments", [("0", "script.py"), ("2",), ("two", "script.py")])
def test_launcher_rejects_invalid_arguments(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.main(arguments)
    assert "usage: python -m nnxmoe.runtime.launch" in capsys.readouterr().err
