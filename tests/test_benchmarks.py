"""The benchmarks run, and their measures and counts are right. Speed is not tested."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from tests.benchmarks import engine, gpu, moe, processes
from tests.benchmarks.bandwidth import weights_read
from tests.benchmarks.checkpoints import write_random
from tests.benchmarks.models import TINY
from tests.benchmarks.results import Result
from tests.support.arrays import max_error
from tests.support.running import PART_TOLERANCE

ROOT = Path(__file__).resolve().parents[1]
ENGINE = {
    "first token, ms", "prefill 16, tok/s", "prefill 48, tok/s", "decode batch 1, tok/s", "decode batch 2, tok/s",
    "decode context 48, tok/s", "warm-up of all calls, s", "load imports beforehand, s", "load, GB/s",
    "load and touch, GB/s", "load peak memory, x checkpoint", "load to the first token with warm-up, s",
}  # fmt: skip
TRAIN = {
    "train, ms", "train temporary, MB", "train scanned with remat, ms", "train scanned with remat temporary, MB",
}  # fmt: skip
LAYER = {"moe forward T=1, ms", "moe forward and backward T=1, ms", "moe weights T=1, GB/s"}
COMPILING = {
    *(f"compile {what}: {stage}, s" for stage in ("trace", "compile")
      for what in ("train step of 2 scanned layers", "forward of 2 unrolled layers")),
    *(f"decode step of 2 unrolled tiny layers{what}, ms" for what in ("", " in a compiled loop", " host overhead")),
    "build abstract deepseek-v3 of 671B, s",
}  # fmt: skip


def run_quick(folder: Path, *more: str) -> dict[str, Any]:
    """Run the benchmarks with --quick and return their JSON; asserts that the printed table equals the file."""
    files = "--json", str(folder / "found.json"), "--markdown", str(folder / "table.md")
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", *files, *more]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (folder / "table.md").read_text()
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_quick_run_reports_every_measure(tmp_path: Path) -> None:
    found = run_quick(tmp_path)
    measures = [result["measure"] for result in found["results"]]
    assert sorted(measures) == sorted({*ENGINE, *TRAIN, *LAYER, *COMPILING, "decode batch 1 weights, GB/s"})
    for result in found["results"]:
        values = [*result["ours"], result["median"], *(v for vs in result["beside"].values() for v in vs)]
        assert all(math.isfinite(value) and value > 0 for value in values), result
        assert (result["ratio"] is None) == (not result["beside"]), result
    assert found["machine"]["cores"] > 0 and found["versions"]["jax"] == jax.__version__
    assert "-m tests.benchmarks --quick" in found["command"] and not found["left out"]


@pytest.mark.oracle
def test_shared_measures_have_values_for_transformers(tmp_path: Path) -> None:
    """Every transformers setting has a value for every shared measure."""
    found = run_quick(tmp_path, "--sides", "ours", "theirs", "--models", "mixtral", "--only", "load", "first", "train")
    settings = {f"transformers {name}" for name in engine.SETTINGS}
    for result in found["results"]:
        alone = "temporary" in result["measure"] or "remat" in result["measure"]
        assert set(result["beside"]) == (set() if alone else settings), result


@pytest.mark.parametrize(
    ("measure", "ratio", "best"), [("decode, tok/s", 2.0, "fast"), ("first token, ms", 0.2, "slow"), ("x", 0.2, "slow")]
)
def test_ratio_of_medians_is_above_1_if_ours_is_better(measure: str, ratio: float, best: str) -> None:
    result = Result(
        "case", measure, [30.0, 1000.0, 20.0, 31.0, 5.0], {"slow": [6.0, 5.0, 7.0], "fast": [9.0, 15.0, 99.0]}
    )
    assert result.best == best and result.ratio == pytest.approx(ratio)
    assert result.json()["median"] == 30 and result.row().split(" | ")[2] == "30"


def test_processes_alternate_and_slow_settings_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"eager": [4.0, 5.0, 6.0], "grouped_mm": [3.5, 9.0, 9.0], "batched_mm": [1.0]}
    calls: list[str] = []

    def call(module: str, *arguments: str) -> dict[str, Any]:
        name = arguments[-1] if module == "theirs" else "ours"
        calls.append(name)
        value = {"ours": [8.0, 9.0, 27.0], **speeds}[name][calls.count(name) - 1]
        missing = {"prefill, tok/s": "TimeoutError: late"} if name == "batched_mm" else {}
        return {"decode, tok/s": value, "load, GB/s": 1.0, "skipped": missing}

    monkeypatch.setattr(processes, "call", call)
    (result, load), left_out = processes.alternating("case", ["folder"], engine.SETTINGS, 3)
    assert calls == ["ours", *engine.SETTINGS, "ours", "eager", "grouped_mm", "ours", "eager", "grouped_mm"]
    assert result.best == "transformers grouped_mm" and result.ratio == 1.0
    assert load.ratio == 1.0 and load.beside["transformers batched_mm"] == [1.0]
    assert left_out == ["case, transformers batched_mm: prefill, tok/s: TimeoutError: late"]


class Fake:
    """Engine with a fake clock: 0.5 s per prompt token, 0.25 s per new token and row."""

    limit = 10

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(engine.time, "perf_counter", lambda: self.now)

    def load(self) -> None:
        self.now += 4.0

    def weights(self) -> Sequence[np.ndarray]:
        self.now += 1.0
        return [np.ones(10_000)]

    def generate(self, ids: np.ndarray, new: int) -> None:
        if ids.shape[1] > 9:
            raise MemoryError("too long")
        self.now += ids.shape[1] / 2 + ids.shape[0] * (new - 1) / 4

    def train(self, length: int, layers: int, times: int) -> dict[str, float]:
        return {"train, ms": length * layers * times}


def test_engine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "memory", {"VmRSS": 3 * 10**9, "VmHWM": 25 * 10**9}.get)
    sizes = engine.Sizes(prompt=4, new=8, prefill=(6, 10), batches=(1, 2), context=8, train=(5, 2), times=3)
    measures = engine.Measures(Fake(monkeypatch), sizes, size=20 * 10**9, vocab=7)
    found = measures.run(["load", "first", "prefill", "decode"])
    assert found.pop("load imports beforehand, s") > 0
    assert found == {
        "load, GB/s": 5.0,
        "load peak memory, x checkpoint": 1.1,
        "load and touch, GB/s": 4.0,
        "load to the first token with warm-up, s": 7.0,
        "first token, ms": 2000.0,
        "prefill 6, tok/s": 2.0,
        "decode batch 1, tok/s": 4.0,
        "decode batch 2, tok/s": 4.0,
        "decode context 8, tok/s": 4.0,
        "warm-up of all calls, s": 2 + 2 + 3 + (2 + 4) + (2 + 6) + (4 + 6),
        "skipped": {"prefill 10, tok/s": "MemoryError: too long"},
    }
    assert measures.run(["train"]) == {"train, ms": 30, "skipped": {}}


def test_slow_measure_times_out() -> None:
    with pytest.raises(TimeoutError, match="more than 1 s"), engine.limited(1):
        while True:
            pass


SHAPE = moe.Shape(dim=16, width=12, experts=4, chosen=2, dtype="float32")


def test_ideal_layer_equals_autodiff() -> None:
    layer = moe.Layer(SHAPE, nnxmoe.Strategy())
    x, dy = layer.inputs(6)[0][0], layer.inputs(6)[1][0]
    y, pull = jax.vjp(moe.dense, layer.kernels[0], x)
    wanted, found = (y, *pull(dy)), moe.dense_gradients(layer.kernels[0], x, dy)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert max_error(a, b) < PART_TOLERANCE


def test_bytes_and_flops_of_a_layer() -> None:
    layer = moe.Layer(SHAPE, nnxmoe.Strategy())
    assert SHAPE.expert_bytes == sum(kernel.nbytes for kernel in layer.kernels[0]) == 4 * 3 * 16 * 12
    assert layer.touched(1) == [2 * SHAPE.expert_bytes] * moe.INPUTS
    rows = jnp.ones((2 * 5, 16))
    cost = jax.jit(lambda x: [moe.dot(moe.dot(x, k[0]) + moe.dot(x, k[1]), k[2]) for k in layer.kernels[:1]])
    counted = cost.lower(rows).compile().cost_analysis()
    assert counted is not None and SHAPE.flops(5) <= counted["flops"] < 1.1 * SHAPE.flops(5)


def test_weight_bytes_read_by_decoding(tmp_path: Path) -> None:
    """Two of eight experts are read; the embedding table is not."""
    write_random(tmp_path, TINY["mixtral"] | {"torch_dtype": "bfloat16"})
    layer = 64 + 64 + 64 * (64 + 32 + 32 + 64) + 64 * 8 + 2 * 3 * 64 * 96
    result = weights_read(tmp_path, Result("case", "decode batch 1, tok/s", [1e9]), {"copy": 1.0})
    assert result.ours[0] == pytest.approx(2 * (2 * layer + 64 + 64 * 64)) and result.beside == {"copy": [1.0]}


# Accelerator benchmarks, as far as they run on CPU


class Missing(nnxmoe.Masked):
    def __call__(self, rows: Any, kernel: Any, sizes: Any) -> Any:
        raise NotImplementedError("no such kernel here")


def test_accelerator_benchmark_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(nnxmoe.Strategy.auto().matmul) in gpu.matmuls()
    monkeypatch.setattr(gpu, "matmuls", lambda: {"Masked()": nnxmoe.Masked(), "Missing()": Missing()})
    left_out: list[str] = []
    found = list(gpu.layer_speeds("tiny", SHAPE, [3, 4], 3, left_out))
    assert [(result.case, result.measure) for result in found] == [
        ("tiny, Masked()", f"moe {what} T={tokens}, TFLOP/s")
        for tokens in (3, 4)
        for what in ("forward", "forward and backward")
    ]
    assert all(min([*result.ours, *result.beside["ideal"]]) > 0 for result in found)
    assert left_out == [f"tiny, Missing(), T={n}: NotImplementedError: no such kernel here" for n in (3, 4)]


def test_accelerator_benchmark_of_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda: 2.0)
    found = {"first token, ms": 1.0, "decode batch 1, tok/s": 1e6, "skipped": {}}
    monkeypatch.setattr(processes, "call", lambda *_: dict(found))
    models = {"llama": TINY["llama"] | {"torch_dtype": "float32"}}
    copy, first, decode, read = gpu.whole_models(models, ["--quick"], ["ours", "theirs"], 2, [])
    assert copy.ours == [2.0] and first.ratio == 1.0 and decode.beside == {"transformers": [1e6, 1e6]}
    assert read.best == "copy" and read.ours[0] == pytest.approx(
        1e-3 * 4 * (2 * (3 * 64 * 96 + 4 * 64 * 64 + 128) + 64 + 64 * 64)
    )


def test_accelerator_benchmark_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="needs an accelerator that JAX sees"):
        gpu.main()
