"""Evaluation gives the numbers of the harness' own model of transformers, in process and through the server."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxmoe
from nnxmoe.apps import cli
from tests.support.serving import serving
from tests.support.tasks import TASKS, evaluate, quiet_harness, write_tasks

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"),
]

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "hf"
CLOSE = 2e-4  # per token
FOLDERS = {
    "demo": ROOT / "models" / "demo",
    **{name: CASES / name / "model" for name in ("mixtral_basic", "llama_basic", "deepseek_basic")},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_harness(tmp_path_factory.mktemp("datasets"))
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def harness_model(name: str, **options: Any) -> Any:
    from nnxmoe.apps.evaluation.harness import HarnessLM

    folder = FOLDERS[name]
    model = nnxmoe.from_pretrained(folder, dtype="float32")
    return HarnessLM(model, nnxmoe.Tokenizer.from_pretrained(folder), **options)


def transformers_model(name: str) -> Any:
    """The harness' own model of a checkpoint."""
    from lm_eval.models.huggingface import HFLM

    make: Any = HFLM
    return make(str(FOLDERS[name]), dtype="float32", device="cpu", batch_size=4)


def same(found: Any, expected: Any) -> None:
    """Compares metrics, log-likelihoods up to rounding, whether they are greedy, and texts."""
    for name in TASKS:
        for metric, value in expected[0][name].items():
            if isinstance(value, float):
                assert found[0][name][metric] == pytest.approx(value, rel=CLOSE), (name, metric)
        for ours, theirs in zip(found[1][name], expected[1][name], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                if isinstance(other, str):
                    assert one == other
                else:
                    assert np.allclose(one, other, rtol=CLOSE, atol=CLOSE), (name, one, other)


@pytest.mark.parametrize("name", FOLDERS)
def test_three_tasks_equal_those_of_transformers(name: str, tasks: Path) -> None:
    theirs = transformers_model(name)
    same(evaluate(harness_model(name), tasks), evaluate(theirs, tasks))


def test_chats_equal_those_of_transformers(tasks: Path) -> None:
    theirs = transformers_model("demo")
    found = evaluate(harness_model("demo"), tasks, apply_chat_template=True)
    same(found, evaluate(theirs, tasks, apply_chat_template=True))
    assert found[0]["local_answer"]["exact_match,none"] == 0  # answers are sentences, and passed on as they are
    assert found[1]["local_answer"][0] == ["47 + 38 = 85"]


@pytest.fixture(scope="module")
def over_http(tasks: Path) -> Iterator[tuple[Any, Any]]:
    """Our model in process and as ``local-completions``, with windows of the same length."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    ours = harness_model("demo", max_length=100)
    with serving(ours.model, ours.tokenizer, slots=4, capacity=128) as running:
        make: Any = LocalCompletionsAPI
        theirs = make(
            base_url=f"http://127.0.0.1:{running.port}/v1/completions",
            model="tiny",
            tokenizer=str(FOLDERS["demo"]),
            tokenizer_backend="huggingface",
            max_length=102,  # one for the prefix, one to generate
            num_concurrent=4,
            max_retries=1,
        )
        yield ours, theirs


def test_the_same_numbers_over_http(over_http: tuple[Any, Any], tasks: Path) -> None:
    ours, theirs = over_http
    same(evaluate(theirs, tasks), evaluate(ours, tasks))


def test_unknown_options_are_refused(tasks: Path) -> None:
    from lm_eval.api.instance import Instance

    model = harness_model("mixtral_basic")
    ask = lambda **options: model.generate_until([Instance("generate_until", {}, ("Hi", options), 0)])  # noqa: E731
    with pytest.raises(ValueError, match="num_beams"):
        ask(until=["x"], num_beams=3)
    with pytest.raises(ValueError, match="max_gen_toks=128 leaves no room"):
        ask(until=["x"], max_gen_toks=128)
    drawn = {"until": [], "do_sample": True, "temperature": 1.0, "top_k": 5, "max_gen_toks": 8}
    assert ask(**drawn) == ask(**drawn)


def test_options_are_checked_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the options of later groups of requests."""
    from lm_eval.api.instance import Instance

    from nnxmoe.generation import engine

    def no_step(_: Any) -> None:
        raise AssertionError("an answer was generated")

    monkeypatch.setattr(engine.Engine, "step", no_step)
    options: list[Any] = [{"until": ["x"], "max_gen_toks": 8}, {"until": ["x"], "max_gen_toks": 8, "num_beams": 3}]
    requests = [Instance("generate_until", {}, ("Hi", given), i) for i, given in enumerate(options)]
    with pytest.raises(ValueError, match="num_beams"):
        harness_model("mixtral_basic").generate_until(requests)
    with pytest.raises(AssertionError, match="an answer was generated"):
        harness_model("mixtral_basic").generate_until(requests[:1])


def test_the_command_prints_a_table(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # which is no git repository
    out = tmp_path / "results.json"
    line = ["eval", str(FOLDERS["demo"]), "--tasks", ",".join(TASKS), "--include-path", str(tasks)]
    assert cli.main([*line, "--limit", "2", "--out", str(out)]) == 0
    table, errors = capfd.readouterr()
    assert table.startswith(f"{FOLDERS['demo']}, bfloat16, the first 2 questions of each task\n")
    assert "fatal" not in errors
    assert all(f"|{name}" in table for name in TASKS) and "exact_match" in table
    assert json.loads(out.read_text())["results"]["local_choice"]["acc,none"] in (0.0, 0.5, 1.0)
    assert cli.main(["eval", str(FOLDERS["demo"]), "--tasks", "no_such_task"]) == 1
    assert "unknown task 'no_such_task'" in capfd.readouterr().err


WITHOUT_TORCH = """
import importlib.machinery, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        missing = name.partition(".")[0] in ("torch", "transformers")
        return None if missing else importlib.machinery.PathFinder.find_spec(name, *rest)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder  # as if they were not installed
from nnxmoe.apps import cli
status = cli.main(sys.argv[1:])
assert not {"torch", "transformers"} & set(sys.modules)
sys.exit(status)
"""


def test_torch_and_transformers_are_not_needed(tasks: Path) -> None:
    line = [sys.executable, "-c", WITHOUT_TORCH, "eval", str(FOLDERS["mixtral_basic"]), "--tasks", ",".join(TASKS)]
    done = subprocess.run([*line, "--include-path", str(tasks)], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert all(f"|{name}" in done.stdout for name in TASKS)
