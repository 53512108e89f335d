"""The benchmarks run, and their measurements, medians and limits are right. Speed is not tested."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from tests.benchmarks import agreement, engine, gpu, gpu_kernels, limits, moe, plan, processes, results
from tests.benchmarks.models import MIDSIZE, TINY, trained
from tests.benchmarks.processes import Job
from tests.benchmarks.results import OTHER, Record
from tests.support.arrays import max_error
from tests.support.running import PART_TOLERANCE

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"read, GB/s", "matrix product, GFLOP/s"}
LOADS = {
    f"load {variant}: {what}"
    for variant in [*plan.LOADS, plan.WITHOUT]
    for what in (
        "to first logits, s",
        "peak memory, x checkpoint",
        "peak memory to first logits, x checkpoint",
    )
}
DECODE = {"decode batch 1, tok/s", "decode batch 2, tok/s"}
PREFILL = {"prefill 16, tok/s", "prefill 48, tok/s"}
TRAIN = {"train full, ms", "train LoRA rank 2, ms"}
METHODS = ("int8", "experts=int8,others=int8,head=int8", "int4:16", "fp8:16")
QUANTISED = {f"{method}: {what}" for method in METHODS for what in {*DECODE, "prefill 16, tok/s"}}
LAYER = {"moe forward T=1, ms", "moe forward and backward T=1, ms"}
COMPILING = {
    *(f"compile {what}: {stage}, s" for stage in ("trace", "compile")
      for what in ("train step of 2 scanned layers", "forward of 2 unrolled layers")),
    *(f"decode step of 2 unrolled tiny layers{what}, ms" for what in ("", " in a compiled loop", " host overhead")),
    "build abstract deepseek-v3 of 671B, s",
}  # fmt: skip


def run_quick(out: Path, *more: str) -> tuple[list[results.Row], str]:
    """Run the benchmarks with --quick; returns the rows of its records and the table that it prints."""
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--out", str(out), *more]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    return results.rows(processes.read(out)), run.stdout


@pytest.mark.slow
def test_quick_decode_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode by the real process; the second run finds its record and starts none."""
    fields, out = TINY["llama"] | {"torch_dtype": "float32"}, tmp_path / "out.jsonl"
    (job,) = plan.Plan(tmp_path, {"ours": sys.executable}, 1, quick=True).model("llama", fields, ["decode"])
    assert plan.measure([job], out) == 0
    (record,) = processes.read(out)
    assert set(record.values) == DECODE == set(record.work) and min(record.values.values()) > 0
    assert record.versions["jax"] == jax.__version__
    monkeypatch.setattr(processes, "call", lambda *_, **__: pytest.fail("a process was started"))
    assert plan.measure([job], out) == 0 and len(out.read_text().splitlines()) == 1


@pytest.mark.slow
def test_quick_run_reports_every_row(tmp_path: Path) -> None:
    rows, table = run_quick(tmp_path / "out.jsonl")
    assert {row.what for row in rows} == {
        *("imports, s", *MACHINE, *DECODE, *PREFILL, *LOADS, *TRAIN, *QUANTISED, *LAYER)
    }
    for row in rows:
        assert row.ours is not None and math.isfinite(row.ours) and row.ours > 0, row
        assert (row.limit is not None) == (row.what in DECODE | PREFILL | TRAIN | QUANTISED | LAYER), row
        assert row.line(lane=False) in table


@pytest.mark.slow
def test_compiling_reports_every_measurement() -> None:
    arguments = ["scanned", 2, "unrolled", 2, "overhead", 2, "abstract", "deepseek-v3"]
    assert set(processes.call("compiling", *arguments)) == COMPILING


@pytest.mark.oracle
def test_transformers_has_every_row(tmp_path: Path) -> None:
    """With both settings of its experts."""
    more = ["--sides", "ours,transformers", "--models", "mixtral", "--only", "decode,load,train"]
    rows, table = run_quick(tmp_path / "out.jsonl", *more)
    assert "| nnxmoe | transformers |" in table
    for row in rows:
        several = row.what in DECODE | TRAIN
        theirs = {f"transformers {name}" for name in engine.SETTINGS} if several else {"transformers"}
        assert set(row.sides) == {"ours", *theirs}, row
        assert row.relative(row.theirs) is not None


def record(side: str, value: float, what: str = "decode batch 1, tok/s", round_: int = 0, **more: Any) -> Record:
    case = more.pop("case", "llama float32")
    return Record(f"{case} | decode | {side} | {round_}", case, side, {what: value}, **more)


def test_table_of_medians_and_ratios() -> None:
    """Of the better setting of transformers; the limit is the machine's best divided by the work."""
    work = {"decode batch 1, tok/s": ("read, GB/s", 0.5)}
    found = [record("ours", value, work=work) for value in (30.0, 1000.0, 20.0)]
    found += [record("transformers eager", value) for value in (6.0, 5.0, 7.0)]
    found += [record("transformers grouped_mm", value) for value in (9.0, 15.0, 99.0)]
    found += [record(OTHER, 25.0), record(OTHER, 3.0, "train, ms", 1, error="it failed")]
    found += [record("ours", 16.0, "read, GB/s", case="machine float32")]
    found += [record("transformers", 20.0, "read, GB/s", case="machine float32")]
    found += [record("ours", 4.0, "moe, ms", limits={"moe, ms": 3.0})]
    table = results.table(found).splitlines()
    columns = "| model | dtype | what | nnxmoe | nnxmoe, other lane | transformers | ratio | limit | of the limit |"
    assert columns in table and table[-1].endswith("it failed")
    assert "| llama | float32 | decode batch 1, tok/s | 30 | 25 | 15 | 2.00 | 40 | 0.75 |" in table
    assert "| llama | float32 | moe, ms | 4 |  |  |  | 3 | 0.75 |" in table


@pytest.mark.parametrize(("what", "ratio"), [("decode, tok/s", 2.0), ("train, ms", 0.5)])
def test_ratio_is_above_1_if_ours_is_better(what: str, ratio: float) -> None:
    (row,) = results.rows([record("ours", 8.0, what), record("transformers", 4.0, what)])
    assert row.relative(row.theirs) == ratio


def test_slower_setting_runs_once_and_failures_are_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    speeds, calls = {"eager": 4.0, "grouped_mm": 3.5}, []

    def call(module: str, *arguments: str, **_: Any) -> dict[str, Any]:
        calls.append(arguments[-1])
        if calls.count("ours") == 2 and arguments[-1] == "ours":
            raise RuntimeError("interrupted")
        return {"values": {"decode, tok/s": speeds.get(arguments[-1], 8.0)}}

    monkeypatch.setattr(processes, "call", call)
    sides = ["ours", *(f"transformers {name}" for name in speeds)]
    jobs = [Job("mixtral float32", "decode", side, i, "", [side.split()[-1]]) for i in range(2) for side in sides]
    assert plan.measure(jobs, tmp_path / "out") == 1
    assert calls == ["ours", "eager", "grouped_mm", "ours", "eager"]
    assert plan.measure(jobs, tmp_path / "out") == 0 and calls[5:] == ["ours"]


def test_load_is_reported_by_variant_after_the_compile_cache_is_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches = []

    def call(*_: Any, environment: dict[str, str], **__: Any) -> dict[str, Any]:
        caches.append(environment["NNXMOE_COMPILE_CACHE"])
        Path(caches[-1]).mkdir(parents=True, exist_ok=True)
        return {"values": {"imports, s": 1.0, "load to first logits, s": 2.0}}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "call", call)
    job = Job("case", "load", "ours", 0, "ours", [], cache=tmp_path / "cache", fill=True, variants=("cold",))
    assert job.record().values == {"imports, s": 1.0, "load cold: to first logits, s": 2.0}
    job.record()
    dataclasses.replace(job, cache=None).record()
    assert caches == [str(tmp_path / "cache")] * 3 + ["off"]


class Fake:
    """Engine with a fake clock: 0.5 s per prompt token, 0.25 s per step and row after 9 s for the first steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(engine.time, "perf_counter", lambda: self.now)

    def load(self) -> None:
        self.now += 4.0

    def generate(self, ids: np.ndarray, new: int) -> None:
        self.now += ids.shape[1] / 2

    def stamps(self, ids: np.ndarray, new: int) -> Sequence[float]:
        return [9.0 * min(i, 2) + i * len(ids) / 4 for i in range(new)]

    def training(self, fields: Any, tokens: np.ndarray, rank: int | None) -> Callable[[], None]:
        def step() -> None:
            self.now += tokens.size * (0.5 if rank else 1.0)

        return step

    def products(self, size: int) -> Sequence[Callable[[], None]]:
        return [lambda: self.load(), lambda: self.generate(np.ones((1, 4)), 1)]

    def copy(self) -> float | None:
        return 3.0


def test_engine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "memory", {"VmRSS": 3 * 10**9, "VmHWM": 25 * 10**9}.get)
    monkeypatch.setattr(engine, "age", lambda: 6.0)
    measures = engine.Measures(Fake(monkeypatch), engine.QUICK, TINY["llama"], size=20 * 10**9)
    assert measures.run("decode") == {"decode batch 1, tok/s": 4.0, "decode batch 2, tok/s": 4.0}
    assert measures.run("prefill") == {"prefill 16, tok/s": 2.0, "prefill 48, tok/s": 2.0}
    peaks = {f"load peak memory{until}, x checkpoint": 1.1 for until in ("", " to first logits")}
    assert measures.run("load") == {"imports, s": 6.0, "load to first logits, s": 6.5, **peaks}
    assert measures.run("train") == {"train full, ms": 32_000.0, "train LoRA rank 2, ms": 16_000.0}
    assert measures.run("machine") == {"read, GB/s": 3.0, "matrix product, GFLOP/s": 1024**3 / 1e9}


def test_read_bandwidth_is_positive() -> None:
    assert engine.read_bandwidth(megabytes=1, times=2) > 0


def test_work_of_decoding_and_prefill() -> None:
    """Two of eight experts are read at batch 1; the embedding table is not. A matrix of `n` weights is 2n FLOPs."""
    fields = TINY["mixtral"] | {"torch_dtype": "bfloat16"}
    norms, head, expert = 5 * 64, 64 * 64, 3 * 64 * 96
    rest = 2 * (64 * (64 + 32 + 32 + 64) + 64 * 8)
    sizes = dataclasses.replace(engine.QUICK, batches=(1, 8), prefill=((16, 1),))
    work = limits.work(fields, sizes)
    used = 8 * (1 - 0.75**8)  # experts that 8 tokens choose on average
    for batch, experts in ((1, 2), (8, used)):
        name, amount = work[f"decode batch {batch}, tok/s"]
        wanted = 2 * (norms + head + rest + 2 * experts * expert) / batch / 1e9
        assert name == "read, GB/s" and amount == pytest.approx(wanted)
    flops = 2 * (16 * (norms + rest + 4 * expert) + head) + 2 * 2 * 64 * 16**2
    assert work["prefill 16, tok/s"] == ("matrix product, GFLOP/s", pytest.approx(flops / 16 / 1e9))
    assert work["train full, ms"][1] == pytest.approx(1.5 * work["train LoRA rank 2, ms"][1])
    assert limits.limit("a, tok/s", 0.5, 20.0) == 40 and limits.limit("a, ms", 0.5, 20.0) == 25


@pytest.mark.parametrize("name", MIDSIZE)
def test_trained_model_is_narrow_and_deep(name: str) -> None:
    config = nnxmoe.config_from_hf(trained(MIDSIZE[name]))
    assert (config.hidden_size, config.num_hidden_layers) == (256, 8)


SHAPE = moe.Shape(dim=16, width=12, experts=4, chosen=2, dtype="float32")


@pytest.mark.slow
def test_ideal_layer_equals_autodiff() -> None:
    layer = moe.Layer(SHAPE, nnxmoe.Strategy())
    x, dy = layer.inputs(6)[0][0], layer.inputs(6)[1][0]
    y, pull = jax.vjp(moe.dense, layer.kernels[0], x)
    wanted, found = (y, *pull(dy)), moe.dense_gradients(layer.kernels[0], x, dy)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert max_error(a, b) < PART_TOLERANCE


def test_flops_of_a_layer() -> None:
    layer = moe.Layer(SHAPE, nnxmoe.Strategy())
    rows = jnp.ones((2 * 5, 16))
    cost = jax.jit(lambda x: [moe.dot(moe.dot(x, k[0]) + moe.dot(x, k[1]), k[2]) for k in layer.kernels[:1]])
    counted = cost.lower(rows).compile().cost_analysis()
    assert counted is not None and SHAPE.flops(5) <= counted["flops"] < 1.1 * SHAPE.flops(5)


# Accelerator benchmarks, as far as they run on CPU


class Missing(nnxmoe.MaskedMatmul):
    def __call__(self, rows: Any, kernel: Any, sizes: Any) -> Any:
        raise NotImplementedError("no such kernel here")


@pytest.mark.slow
def test_accelerator_benchmark_of_layers() -> None:
    assert str(nnxmoe.Strategy.auto().matmul) in gpu_kernels.matmuls()
    kernels = {"MaskedMatmul()": nnxmoe.MaskedMatmul(), "Missing()": Missing()}
    found = [measure() for measure in gpu_kernels.layer_speeds("tiny", SHAPE, [3, 4], 3, kernels)]
    assert [record.case for record in found] == ["tiny, MaskedMatmul() float32"] * 4 + ["tiny, Missing() float32"] * 4
    names = [f"moe {what} T={tokens}, TFLOP/s" for tokens in (3, 4) for what in ("forward", "forward and backward")]
    for name, record in zip(names, found, strict=False):
        assert list(record.values) == [name] == list(record.limits)
        assert min([*record.values.values(), *record.limits.values()]) > 0
    assert {record.error for record in found[4:]} == {"NotImplementedError: no such kernel here"}


def test_accelerator_benchmark_of_whole_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def call(module: str, *arguments: Any, **_: Any) -> dict[str, Any]:
        values = {"machine": {"read, GB/s": 2.0}, "decode": {"decode batch 1, tok/s": 1e4}}
        return {"values": values.get(arguments[1], {})}

    monkeypatch.setattr(processes, "call", call)
    made = plan.Plan(tmp_path, dict.fromkeys(["ours", "transformers"], ""), 2, quick=True)
    records: list[Record] = []
    processes.run(gpu.whole_models(made, {"llama": TINY["llama"] | {"torch_dtype": "float32"}}), records)
    copy, decode = results.rows(records)
    assert copy.ours == 2.0 and decode.sides == {"ours": [1e4, 1e4], "transformers": [1e4, 1e4]}
    weights = 2 * (3 * 64 * 96 + 4 * 64 * 64 + 128) + 64 + 64 * 64
    assert decode.limit == pytest.approx(2e9 / (4 * weights))


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.DEADLINES)
def test_parts_of_the_accelerator_benchmark(
    part: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All kinds of a part, in small. What this device or the model does not support is listed with its reason."""
    records: list[Record] = []
    monkeypatch.setattr(gpu, "table", lambda found: records.extend(found) or "")
    monkeypatch.setattr(gpu, "matmuls", lambda: {"MaskedMatmul()": nnxmoe.MaskedMatmul(), "Missing()": Missing()})
    for name in ("products", "quantized"):  # `Missing()` would be counted as a difference
        monkeypatch.setattr(agreement, name, lambda _: iter(()))
    monkeypatch.setattr(agreement, "models", lambda: iter(()))  # of the kind "numbers", attention and the exchange
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--part", str(part), "--minutes", "100"])
    assert gpu.main() == 0
    failed = {record.key for record in records if record.error}
    kernels = ("cuDNN", "tokamax mosaic", "JAX mosaic", "Missing()")
    assert failed and all("int4:3" in key or any(name in key for name in kernels) for key in failed)
    found = {what for record in records for what in record.values}
    assert found >= {
        1: {"prefill 2 x 16 by model, tok/s", "prefill 2 x 16 by engine, tok/s", "decode batch 2, tok/s"},
        2: {"train LoRA 2 x 8, ms", "train QLoRA 2 x 8, ms", "engine, 4 requests in 2 slots, tok/s",
            "start to first token, filled compile cache, s"},
    }[part]  # fmt: skip
    for record in records:
        for what, limit in record.limits.items():
            assert 0 < record.values[what] and 0 < limit
    assert "not all measured" not in capsys.readouterr().out


@pytest.mark.slow
def test_agreement_with_the_oracle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A product without its last group is found, and one that is refused is named."""

    class Short(nnxmoe.MaskedMatmul):
        def __call__(self, rows: Any, kernel: Any, sizes: Any) -> Any:
            return super().__call__(rows, kernel, sizes.at[-1].set(0))

    monkeypatch.setattr(agreement, "quantized", lambda _: iter(()))
    monkeypatch.setattr(agreement, "attention", lambda: iter(()))
    monkeypatch.setattr(agreement, "models", lambda: iter(()))
    assert agreement.report({"MaskedMatmul()": nnxmoe.MaskedMatmul()}) == 0
    assert agreement.report({"Short()": Short(), "Missing()": Missing()}) == 4 + 6
    text = capsys.readouterr().out
    assert "DIFFERS Short()" in text and "NotImplementedError: no such kernel here" in text


def test_accelerator_benchmark_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="needs an accelerator that JAX sees"):
        gpu.main()
