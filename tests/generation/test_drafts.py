"""What drafts cost, ``draft="auto"``, and ``--draft``.

`tests/generation/test_engine.py` shows that drafts change no id.
"""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from nnxmoe import Engine, ModelDraft, MTPDraft, PromptLookup
from nnxmoe.apps import cli
from nnxmoe.apps.cli import loading
from nnxmoe.generation import draft_cost
from nnxmoe.generation.draft_cost import acceptance
from nnxmoe.models import PRESETS, model_class
from tests.support.mtp import load_mtp, tiny_mtp, with_mtp
from tests.support.tiny import build_tiny, write_checkpoint

PROMPT = [3, 9, 14, 21, 30, 2, 8] * 3


@functools.cache
def preset(name: str, **options: Any) -> nnxmoe.CausalLM:
    """The shapes of a preset in bfloat16."""
    return model_class(PRESETS[name])(PRESETS[name], rngs=None, dtype=jnp.bfloat16, **options)


@functools.cache
def dense() -> nnxmoe.CausalLM:
    return build_tiny("mistral", nnxmoe.Strategy(), num_hidden_layers=2, sliding_window=12)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs as on a GPU, where products of few rows take no longer than reading."""
    monkeypatch.setattr(draft_cost, "CPU_FLOAT32", np.inf)
    monkeypatch.setitem(draft_cost.BALANCE, "cpu", draft_cost.BALANCE["gpu"])
    draft_cost._say_once.cache_clear()


def test_acceptance_makes_as_many_ids_as_a_step_costs() -> None:
    for ratio, count in ((1.5, 1), (2.3, 4), (3.02, 7)):
        share = acceptance(ratio, count)
        assert (1 - share ** (count + 1)) / (1 - share) == pytest.approx(ratio)
    assert acceptance(1.0, 4) == 0 and acceptance(5.1, 4) == float("inf")


def test_steps_read_the_experts_that_their_tokens_meet() -> None:
    """Held against simulated routing, for 2 of 6 experts."""
    model, rows, count = build_tiny("mixtral", nnxmoe.Strategy()), 3, 2
    cost = draft_cost.draft_cost(model, PromptLookup(count), slots=rows, capacity=40)
    blocks = [layer.moe for layer in model.stacks[0].layers]
    experts = 4 * 3 * sum(block.experts.gate[...].size for block in blocks)
    chosen = np.random.default_rng(0).random((4000, rows * (count + 1), 6)).argsort(axis=-1)[..., :2]
    plain, drafted = (np.mean([len(np.unique(step[:n])) for step in chosen]) / 6 for n in (rows, rows * (count + 1)))
    assert cost.bytes - cost.plain_bytes == pytest.approx(experts * (drafted - plain), rel=0.02)
    every = build_tiny("mixtral", nnxmoe.Strategy(dispatch=nnxmoe.Dense()))
    whole = draft_cost.draft_cost(every, PromptLookup(count), slots=rows, capacity=40)
    assert whole.bytes == whole.plain_bytes == pytest.approx(cost.plain_bytes + experts * (1 - plain), rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_break_even_of_published_models() -> None:
    """A model without experts reads nothing more; with 256, drafts pay late at batch 1 and early at 64; and the layer
    that drafts is read too."""
    assert nnxmoe.break_even(preset("llama-3.1-8b"), PromptLookup(7)) == 0
    assert nnxmoe.break_even(preset("mixtral-8x7b"), PromptLookup(4)) == pytest.approx(0.7, abs=0.03)
    assert nnxmoe.break_even(preset("llama-3.1-8b"), PromptLookup(7), slots=512, capacity=64) > 0.99
    model, lookup = preset("deepseek-v3", mtp=True), PromptLookup(1)
    ratios = [draft_cost.draft_cost(model, lookup, slots=slots, capacity=64).ratio for slots in (1, 16, 64)]
    assert ratios == pytest.approx([1.54, 1.56, 1.13], abs=0.01)
    auto = draft_cost.auto_cost(model, 1, 64)
    own = 11.5e9 * 2 * 0.12  # of the layer's 11.5B parameters, 16 of 256 experts and the rest
    assert auto.name == "1 draft by multi-token prediction" and auto.speed(0.85) == pytest.approx(1.16, abs=0.02)
    assert auto.bytes - auto.plain_bytes * ratios[0] == pytest.approx(own, rel=0.6)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_models_that_draft_cost_a_pass_per_draft() -> None:
    model = with_mtp()
    cost = {n: draft_cost.draft_cost(model, MTPDraft.of(model, n)).ratio for n in (1, 3)}
    free = {n: draft_cost.draft_cost(model, PromptLookup(n)).ratio for n in (1, 3)}
    assert cost[3] - free[3] > 2 * (cost[1] - free[1]) > 0
    assert nnxmoe.break_even(model, ModelDraft.of(model, 3)) == float("inf"), "drafts that cost what they save"


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator")
def test_auto_changes_no_id(caplog: pytest.LogCaptureFixture) -> None:
    """And says once what it chose."""
    caplog.set_level("INFO", logger="nnxmoe")
    model, options = dense(), {"max_new_tokens": 12, "eos_token_id": None}
    plain = nnxmoe.generate(model, [PROMPT], **options)
    for _ in range(2):
        assert (nnxmoe.generate(model, [PROMPT], **options, draft="auto") == plain).all()
    assert caplog.text.count("7 drafts by prompt lookup") == 1
    (done,) = nnxmoe.complete(model, [PROMPT], **options, draft="auto")
    tokenizer = SimpleNamespace(decode=lambda ids, *_: " ".join(map(str, ids)), all_special_ids=[])
    stream = nnxmoe.stream(model, tokenizer, PROMPT, **options, draft="auto")
    assert list(done.ids) == plain[0, len(PROMPT) :].tolist() and sum(done.accepted.values()) > 0
    assert "".join(stream) and stream.tokens == 12
    assert isinstance(Engine(with_mtp(), slots=8, capacity=60, draft="auto").draft, MTPDraft)


def test_auto_refuses_where_drafts_do_not_pay() -> None:
    mixtral = build_tiny("mixtral", nnxmoe.Strategy())
    with pytest.raises(ValueError, match=r"is not faster with 2 slots: 1 draft by prompt lookup.*33%.*Remove draft="):
        Engine(mixtral, slots=2, capacity=8, draft="auto")
    with pytest.raises(ValueError, match=r"draft=auto.*Capacity.*Sorted"):
        Engine(build_tiny("mixtral", nnxmoe.Strategy(dispatch=nnxmoe.Capacity(1.0))), draft="auto")


@pytest.mark.wrong_types
def test_other_texts_than_auto_are_refused() -> None:
    with pytest.raises(ValueError, match=r"draft='mtp': use 'auto', None, or an object"):
        Engine(dense(), draft="mtp")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "choice"),
    [("prompt", ("prompt", None)), ("prompt:3", ("prompt", 3)), ("mtp:2", ("mtp", 2)), ("auto", ("auto", None))],
)
def test_draft_on_the_command_line(text: str, choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice for one prompt, for many and for the server."""
    serve = pytest.importorskip("nnxmoe.apps.serve.server")
    model, seen = with_mtp(), list[Any]()

    class Stop(ValueError):
        """Ends a command that has passed its draft on."""

    def stop(*_: object, draft: Any = None, **__: object) -> None:
        seen.append(draft)
        raise Stop

    monkeypatch.setattr(loading, "load", lambda options: seen.append(options.draft) or (model, None))
    for owner, name in ((nnxmoe, "stream"), (nnxmoe, "complete"), (serve, "serving_engine")):
        monkeypatch.setattr(owner, name, stop)
    prompts = str(Path(__file__))
    for line in (["generate", "demo", "x"], ["generate", "demo", "--prompts", prompts], ["serve", "demo"]):
        seen.clear()
        with pytest.raises(Stop):
            cli.main([*line, "--draft", text, "--debug"])
        assert seen[0] == choice
        kind = {"prompt": PromptLookup, "mtp": MTPDraft, "auto": str}[choice[0]]
        assert isinstance(seen[1], kind) and (choice[1] is None or seen[1].count == choice[1])


@pytest.mark.parametrize("text", ["", "prompt:0", "prompt:", "auto:2", "mtp:x", "lookup"])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_other_drafts_are_refused_with_the_forms(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "demo", "--draft", text])
    assert f"{text!r} is not one of prompt, prompt:K, mtp, mtp:K or auto" in capsys.readouterr().err


def test_auto_loads_prediction_layers_where_the_files_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, weights = tiny_mtp(1)
    main = {name: array for name, array in weights.items() if ".layers.3." not in name}
    apart = load_mtp("qwen3_next")
    folders = {
        "apart": write_checkpoint(tmp_path / "apart", apart.fields, apart.weights),
        "numbered": write_checkpoint(tmp_path / "numbered", (v4 := load_mtp("deepseek_v4")).fields, v4.weights),
        "whole": write_checkpoint(tmp_path / "whole", fields, weights),
        "without": write_checkpoint(tmp_path / "without", fields, main),
        "none": write_checkpoint(tmp_path / "none", fields | {"num_nextn_predict_layers": 0}, main),
    }
    seen = []

    def load(path: str, mtp: bool, **_: object) -> None:
        seen.append((Path(path).name, mtp))
        raise ValueError("loaded")

    monkeypatch.setattr(nnxmoe, "from_pretrained", load)
    monkeypatch.setattr(nnxmoe.Tokenizer, "from_pretrained", lambda *_, **__: None)
    for folder in folders.values():
        assert cli.main(["generate", str(folder), "x", "--draft", "auto"]) == 1
    for draft in ("mtp:2", "prompt"):
        assert cli.main(["generate", str(folders["whole"]), "x", "--draft", draft]) == 1
    assert seen == [
        ("apart", True),
        ("numbered", True),
        ("whole", True),
        ("without", False),
        ("none", False),
        ("whole", True),
        ("whole", False),
    ]


@pytest.mark.slow
def test_inspect_prints_the_bytes_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "deepseek-v3", "--batch", "16"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("drafts"))
    assert "at batch 16; with 1 draft by multi-token prediction" in line and line.endswith("x the time")
