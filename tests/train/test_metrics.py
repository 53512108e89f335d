"""Metric logs, FLOP counts and model FLOPs utilization."""

import csv
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import train
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.storage.atomic_dir import refuse_unless_writable
from nnxmoe.runtime.hardware import of_device
from nnxmoe.train import lora
from nnxmoe.train.loop.measured import peak_flops, shown_metrics, token_flops
from tests.support import families
from tests.support.tiny import build_tiny, random_tokens


def progress(step: int, **metrics: float) -> train.Progress:
    return train.Progress(step, 9, {"step": step, "loss": 1 / step, **metrics}, np.zeros((0, 0)), lambda: None)  # pyright: ignore


@pytest.mark.wrong_types
@pytest.mark.parametrize("kind", [train.JsonLog, train.CsvLog])
def test_resumed_run_logs_each_step_once(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics"
    first = kind(path)
    for step in (1, 2, 3, 4):
        first(progress(step, **({"eval_loss": 0.5} if step == 2 else {})))
    again = kind(path)
    for step in (3, 4, 5):  # resumed from the checkpoint of step 2
        again(progress(step, **({"eval_loss": 0.25} if step == 4 else {})))
    text = path.read_text()
    rows = list(csv.DictReader(text.splitlines())) if kind is train.CsvLog else list(map(json.loads, text.splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([float(row["loss"]) for row in rows], [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert [float(row["eval_loss"]) for row in rows if row.get("eval_loss")] == [0.5, 0.25]
    assert [file.name for file in path.parent.iterdir()] == ["metrics"]


@pytest.mark.wrong_types
@pytest.mark.parametrize("kind", [train.JsonLog, train.CsvLog])
def test_truncated_last_line_is_dropped(kind: Any, tmp_path: Path) -> None:
    """A full disk truncates the line. A new run that starts at step 1 clears the log."""
    log = kind(tmp_path / "metrics")
    for step in (1, 2, 13):
        log(progress(step))
    log.path.write_text(log.path.read_text()[:-15])
    assert [int(row["step"]) for row in log.read()] == [1, 2]
    for step in (13, 14, 1, 2):
        log(progress(step))
        assert [int(row["step"]) for row in log.read()] == {13: [1, 2, 13], 14: [1, 2, 13, 14]}.get(step, [1, 2][:step])


@pytest.mark.wrong_types
def test_json_log_has_null_for_nan(tmp_path: Path) -> None:
    log = train.JsonLog(tmp_path / "metrics")
    log(progress(1, reward=math.nan, kl=math.inf))
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()]
    assert (row["loss"], row["reward"], row["kl"]) == (1.0, None, None)


def test_csv_log_rejects_new_columns(tmp_path: Path) -> None:
    log = train.CsvLog(tmp_path / "metrics.csv")
    log._begin(1)
    log.add({"step": 1})
    with pytest.raises(ValueError, match=r"metrics\.csv has no column for mfu: use a new file, or JsonLog"):
        log.add({"step": 2, "mfu": 0.5})


@pytest.mark.slow
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        train.TensorBoardLog(tmp_path)
    told: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: told.append("flushed"))
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda folder: writer))
    log = train.TensorBoardLog(tmp_path)
    train.fit(
        build_tiny("llama"), [{"tokens": random_tokens(2, 5)}], optimizer=optax.sgd(0.1), steps=2, callbacks=[log]
    )
    scalars = [row for row in told if row != "flushed"]
    assert {name for name, _, _ in scalars} >= {"loss", "tokens_per_second"} and told[-1] == "flushed"
    assert [step for name, _, step in scalars if name == "loss"] == [1, 2]


def test_tensorboard_writes_in_the_first_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *_: None, flush=lambda: None)
    writer_of = SimpleNamespace(SummaryWriter=lambda folder: made.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", writer_of)
    log = train.TensorBoardLog(tmp_path)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log(progress(1))
    assert not made
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    log(progress(1))
    assert made == [str(tmp_path)]


class WandbRun:
    """The methods of `wandb.Run` (wandb 0.31) that `WandbLog` calls, with their parameters."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.noted.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.noted.append(("finish", exit_code))


@pytest.mark.slow
def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins and ends with each call of `fit`, with an exit code of 1 after an error."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="WandbLog requires a package that is not installed: pip install wandb"):
        train.WandbLog("demo")
    noted: list[Any] = []

    def init(project: str | None = None, name: str | None = None, mode: str | None = None) -> WandbRun:
        noted.append((project, name, mode))
        return WandbRun(noted)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log, model = train.WandbLog("demo", name="first", mode="offline"), build_tiny("mixtral")
    assert not noted
    batches = [{"tokens": random_tokens(2, 5)}] * 2
    done = train.fit(model, batches, optimizer=optax.sgd(0.1), steps=2, callbacks=[log])
    begun, *steps, end = noted
    assert begun == ("demo", "first", "offline") and end == ("finish", 0)
    assert [{"step": step} | data for step, data in steps] == done.history
    with pytest.raises(ValueError, match="the data ended after 2"):
        train.fit(model, iter(batches), optimizer=optax.sgd(0.1), steps=3, callbacks=[log])
    assert noted[4] == begun and noted[-1] == ("finish", 1)


def slowly(count: int) -> Iterator[Any]:
    for _ in range(count):
        time.sleep(0.05)
        yield {"tokens": random_tokens(2, 5)}


@pytest.mark.slow
def test_the_parts_of_a_step_have_the_same_names_in_every_log(tmp_path: Path) -> None:
    """Data that take 50 ms a batch show in it; waiting for data and device is within the seconds of a step, checkpoints
    and evaluations are outside."""
    logs = train.JsonLog(tmp_path / "a"), train.CsvLog(tmp_path / "b")
    usual: dict[str, Any] = {"optimizer": optax.sgd(0.1), "evaluate": [{"tokens": random_tokens(2, 5)}], "steps": 4}
    saved = train.Checkpoints(tmp_path / "c", every=2)
    done = train.fit(build_tiny("mixtral"), slowly(4), checkpoint=saved, callbacks=logs, **usual).history
    names = {"step", "loss", "seconds", "tokens_per_second", "busiest_expert", "dropped"}
    names |= {"data_seconds", "device_seconds", "checkpoint_seconds"}
    for metrics in done:
        assert metrics.keys() >= names
        assert metrics["data_seconds"] + metrics["device_seconds"] <= metrics["seconds"]
    assert sum(metrics["data_seconds"] for metrics in done) >= 4 * 0.05
    assert done[2]["checkpoint_seconds"] > 0 == done[0]["checkpoint_seconds"]  # that of step 2
    assert [m["step"] for m in done if "eval_seconds" in m] == [4] and done[3]["eval_seconds"] > 0
    assert [row.keys() for row in logs[0].read()] == [metrics.keys() for metrics in done]
    assert set(logs[1].read()[0]) == done[3].keys()


def test_the_bar_shows_load_drops_and_skips() -> None:
    metrics = {"step": 3, "loss": 0.0, "seconds": 0.5, "tokens_per_second": 64.0, "busiest_expert": 1.5}
    quiet = shown_metrics(metrics | {"dropped": 0.0, "skipped": 0})
    assert quiet == {"loss": "0.0000", "tok/s": "64", "s/step": "0.500", "busiest expert": "1.5x"}
    loud = shown_metrics(metrics | {"dropped": 0.125, "skipped": 2, "mfu": 0.4, "data_seconds": 0.25})
    assert loud == quiet | {"mfu": "40.0%", "dropped": "12.5%", "skipped": "2", "data s/step": "0.250"}


def traced(folder: Path) -> list[Any]:
    """The numbers of the steps in the trace."""
    (file,) = folder.rglob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jaxlib 0.11 deprecates events.stats
        return sorted(dict(e.stats)["step_num"] for line in lines for e in line.events if e.name == "train")


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
def test_profiles_cover_exactly_their_steps(late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not the first, which compiles, also if each step waits for a callback; a checkpoint is due within them."""
    others = [] if late else [lambda told: None]
    run: dict[str, Any] = {"optimizer": optax.sgd(0.1), "callbacks": [train.Profile(tmp_path / "profile", 3), *others]}
    run["checkpoint"] = train.Checkpoints(tmp_path / "c", every=2)
    with caplog.at_level("INFO", "nnxmoe"):
        done = train.fit(build_tiny("llama"), [{"tokens": random_tokens(2, 5)}], steps=6, **run)
    assert len(done.history) == 6
    assert f"profiled steps 2 to 4: pip install xprof && xprof --logdir {tmp_path / 'profile'}" in caplog.text
    assert traced(tmp_path / "profile") == [2, 3, 4]
    assert len(list(tmp_path.rglob("*.trace.json.gz"))) == 1


@pytest.mark.slow
def test_profiles_of_short_and_failed_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They end with the run, so that the next run can be profiled."""
    model, batches = build_tiny("llama"), [{"tokens": random_tokens(2, 5)}] * 3
    usual: dict[str, Any] = {"optimizer": optax.sgd(0.1)}
    with pytest.raises(ValueError, match="the data ended after 3 batches"):
        train.fit(model, iter(batches), steps=9, callbacks=[train.Profile(tmp_path / "a", 4)], **usual)
    train.fit(model, batches, steps=3, callbacks=[train.Profile(tmp_path / "b", 9)], **usual)
    assert [traced(tmp_path / name) for name in "ab"] == [[2, 3], [2, 3]]
    train.fit(model, batches, steps=1, callbacks=[train.Profile(tmp_path / "d", 9)], **usual)
    assert "no step was profiled" in caplog.text and not (tmp_path / "d").exists()
    with pytest.raises(ValueError, match="steps must be a 32-bit integer >= 1, got 0"):
        train.Profile(tmp_path, 0)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_training_takes_six_flops_per_active_parameter(family: str) -> None:
    """Two forward, two for the input gradient, two for the weight gradient; none for an embedding lookup."""
    model = build_tiny(family)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    sizes = {path: v.size for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    config: Any = model.config
    experts = sum(size for path, size in sizes.items() if "experts" in path and "shared" not in path)
    active = sum(sizes.values()) - sizes["embed", "table"] * (model.head is not None)
    active -= experts - experts * config.experts_per_token // config.experts if experts else 0
    assert token_flops(model, names) == pytest.approx(6 * active)
    assert token_flops(model, ()) == pytest.approx(4 * active)
    int8 = nnxmoe.Int8()
    for method in [int8] if model.head is None else [int8, nnxmoe.Mixed(int8, int8, int8)]:
        assert token_flops(nnxmoe.quantize(model, method), ()) == pytest.approx(4 * active)


def test_lookups_in_a_second_table_are_no_products() -> None:
    """Gemma 4's inputs per layer, more than half of the parameters of E2B."""
    fields = families.load("gemma4_text").fields
    configs = [nnxmoe.config_from_hf(fields | {"vocab_size_per_layer_input": rows}) for rows in (60, 600)]
    assert len({token_flops(nnxmoe.models.model_class(config)(config, rngs=None), ()) for config in configs}) == 1


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        *(("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA T1000", None)),
        *(("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA A10", 125), ("NVIDIA A100-PCIE-40GB", 312)),
        *(
            ("TPU v4", 275),
            ("TPU v5 lite", 197),
            ("TPU v5", 459),
            ("TPU v5p", 459),
            ("TPU v6 lite", 918),
            ("cpu", None),
        ),
    ],
)
def test_peaks_of_devices(kind: str, peak: float | None) -> None:
    """JAX calls a v5p "TPU v5" and a v5e "TPU v5 lite"."""
    found = of_device(kind)
    assert (None if found is None else found.flops / 1e12) == peak


def test_flops_of_mixtral_8x7b() -> None:
    """It has 12.9 billion active parameters, including the embedding table, which is excluded here."""
    summary = summarize("mixtral-8x7b")
    model: Any = nnxmoe.models.Mixtral(summary.config, rngs=None)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert token_flops(model, names) == pytest.approx(6 * (summary.active - 32000 * 4096), rel=1e-6)


@pytest.mark.slow
def test_mfu_is_logged_if_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build_tiny("mixtral"), {"tokens": random_tokens(2, 6)}
    usual: dict[str, Any] = {"optimizer": optax.sgd(0.1), "steps": 1}
    assert peak_flops(None) is None and "mfu" not in train.fit(model, [batch], **usual).history[0]
    monkeypatch.setattr(sys.modules["nnxmoe.train.loop.run"], "peak_flops", lambda mesh: 1e9)
    metrics = train.fit(model, [batch], **usual).history[0]
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert metrics["mfu"] == pytest.approx(token_flops(model, names) * metrics["tokens_per_second"] / 1e9)
    lora.add(model, 2, rngs=nnx.Rngs(0))
    less = train.fit(model, [batch], **usual).history[0]
    assert less["mfu"] / less["tokens_per_second"] < 0.9 * metrics["mfu"] / metrics["tokens_per_second"]


@pytest.mark.parametrize("kind", [train.JsonLog, train.CsvLog])
def test_logs_with_blank_lines_are_resumed(kind: Any, tmp_path: Path) -> None:
    """Anywhere, also of spaces, as an editor or a shell leaves them; steps that are repeated are replaced."""
    log = kind(tmp_path / "metrics")
    for step in (1, 2):
        log(progress(step))
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("\n  \r\n" + "\n".join(lines) + "\n \n")
    again = kind(tmp_path / "metrics")
    assert [int(row["step"]) for row in again.read()] == [1, 2]
    for step in (2, 3):
        again(progress(step))
    assert [int(row["step"]) for row in again.read()] == [1, 2, 3] and "\n\n" not in log.path.read_text()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (train.JsonLog, '{"step": 1}\n{"ste\n'),
        (train.JsonLog, "[1, 2]\n"),
        (train.JsonLog, '{"loss": 1.0}\n'),
        (train.CsvLog, "loss,other\n1.0,2\n"),
        (train.CsvLog, "step,loss\nmany,2\n"),
    ],
)
def test_files_that_are_no_logs_are_refused(kind: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(text)
    with pytest.raises(ValueError, match=r"metrics has the line .*, which does not contain the metrics of a step"):
        kind(tmp_path / "metrics")(progress(2))
    assert (tmp_path / "metrics").read_text() == text


def test_what_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs, profiles and checkpoints below a file and below a dangling link; nothing is left behind."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    model, run = build_tiny("llama"), {"optimizer": optax.sgd(0.1), "steps": 1}
    monkeypatch.setattr(train.Step, "run", lambda *_: pytest.fail("a step was made"))
    for folder in (tmp_path / "file" / "run", tmp_path / "link", tmp_path / "link" / "run"):
        for options in (
            {"callbacks": [train.JsonLog(folder / "metrics.jsonl")]},
            {"callbacks": [train.CsvLog(folder / "metrics.csv")]},
            {"callbacks": [train.Profile(folder)]},
            {"checkpoint": folder},
        ):
            with pytest.raises(CheckpointError, match=rf"cannot write to {folder}[:,]"):
                train.fit(model, [{"tokens": random_tokens(2, 5)}], **run, **options)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/link is a link to {tmp_path}/absent, which does not exist"):
        refuse_unless_writable(tmp_path / "link" / "run")
    refuse_unless_writable(tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"cannot write to .*: Permission denied"):
        refuse_unless_writable(tmp_path / "link")


# Early stopping


def held_out(*losses: float) -> list[train.Progress]:
    """Steps 10, 20, … with these metrics, between others that are not evaluated."""
    names = frozenset({"step", "loss", "eval_loss", "eval_seconds"})
    found = [progress(step) for step in range(1, 10 * len(losses) + 1)]
    found = [dataclasses.replace(each, measured=names) for each in found]
    for number, loss in enumerate(losses, 1):
        found[10 * number - 1].metrics["eval_loss"] = loss
    return found


@pytest.mark.parametrize(
    ("losses", "options", "stops"),
    [
        ([3, 2, 1, 1.5, 1.4, 1.3], {}, 60),
        ([3, 2, 2.5, 1.9, 2, 2, 2], {}, 70),
        ([3, 2.95, 2.9, 1], {"patience": 2, "min_delta": 0.2}, 30),
        ([1, 2, 3, 4, 3], {"patience": 1, "mode": "max"}, 50),
        ([1, float("nan"), 0.5, 0.6], {"patience": 1}, 20),
        ([3, 2, 1], {"patience": 1}, None),
    ],
)
def test_early_stopping_counts_measurements(losses: list[float], options: Any, stops: int | None) -> None:
    stop = train.EarlyStopping("eval_loss", **options)
    for _ in range(2):  # another run counts anew
        with stop:
            assert next((each.step for each in held_out(*losses) if stop(each)), None) == stops


@pytest.mark.slow
def test_early_stopping_ends_a_run() -> None:
    """With a learning rate of 0 nothing improves; the other callbacks need not wait for each step."""
    batch = {"tokens": random_tokens(2, 5)}
    run: dict[str, Any] = {"optimizer": optax.sgd(0.0), "steps": 30}
    evaluate = train.Evaluation([batch], every=4)
    for metric, patience, steps in (("eval_loss", 2, 12), ("loss", 3, 4)):
        stop = train.EarlyStopping(metric, patience=patience)
        done = train.fit(build_tiny("llama"), [batch], evaluate=evaluate, callbacks=[stop], **run)
        assert len(done.history) == steps and "eval_loss" in done.history[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "evaluate", "message"),
    [
        ("eval_cross_entropy", 2, "this run measures .*cross_entropy, .*; did you mean"),
        ("evaluation", 2, "eval_loss, eval_seconds"),
        ("eval_loss", None, r"eval_loss needs evaluate=train.Evaluation\(batches, every=…\)"),
        ("eval_loss", 0, "eval_loss needs"),
    ],
)
def test_early_stopping_on_what_is_not_measured(metric: str, evaluate: int | None, message: str) -> None:
    """``evaluate`` 0: at the end only."""
    batch = {"tokens": random_tokens(2, 5)}
    held = None if evaluate is None else train.Evaluation([batch], every=evaluate or None)
    with pytest.raises(ValueError, match=message):
        stop = train.EarlyStopping(metric)
        train.fit(build_tiny("llama"), [batch], optimizer=optax.sgd(0.1), steps=9, evaluate=held, callbacks=[stop])


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "options", [{"metric": 3}, {"patience": 0}, {"patience": True}, {"min_delta": -1}, {"mode": "lower"}]
)
def test_invalid_early_stopping(options: Any) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        train.EarlyStopping(**{"metric": "eval_loss"} | options)
