"""Texts that follow a schema, an expression or a grammar: valid or cut, with sampling, drafts and other requests."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxmoe
from nnxmoe import Engine, Grammar, Prefix, PromptLookup, RequestOptions, Sampling
from nnxmoe.apps.cli import main
from nnxmoe.apps.cli.generate_command import grammar_of
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.generation.grammar import empty_masks

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
        "inner": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
WILD = Sampling(temperature=1.4, top_p=0.98, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def model() -> nnxmoe.CausalLM:
    return nnxmoe.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> nnxmoe.Tokenizer:
    return nnxmoe.Tokenizer.from_pretrained(DEMO)


def follows(text: str) -> bool:
    """Whether a text is JSON that `SCHEMA` accepts."""
    found = json.loads(text)
    assert found.keys() == {"name", "age", "tags", "inner"}
    assert len(found["name"]) <= 8 and 0 <= found["age"] <= 120 and type(found["age"]) is int
    assert len(found["tags"]) <= 2 and set(found["tags"]) <= {"red", "blue"}
    return type(found["inner"]["ok"]) is bool


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, PromptLookup(3)])
def test_texts_follow_a_schema(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, draft: Any) -> None:
    """Greedy and sampled rows together; the ids with drafts are those without."""
    prompts = ["Give me JSON: ", "x", "Q: who? A: {"]
    given: dict[str, Any] = {"schema": SCHEMA, "max_new_tokens": 90, "draft": draft}
    greedy = list(nnxmoe.complete(model, prompts, tokenizer, **given))
    drawn = list(nnxmoe.complete(model, prompts, tokenizer, n=3, sampling=WILD, seed=5, slots=4, **given))
    for done in (*greedy, *drawn):
        assert done.finish == "stop" and follows(done.text), done
    assert len({done.text for done in drawn}) > 3
    if draft is not None:
        given["draft"] = None
        for found, again in ((greedy, {}), (drawn, {"n": 3, "sampling": WILD, "seed": 5})):
            plain = list(nnxmoe.complete(model, prompts, tokenizer, **given, **again))
            assert [done.ids for done in plain] == [done.ids for done in found]
        assert any(count for done in greedy for count in done.accepted if count)


@pytest.mark.slow
def test_rows_without_a_constraint_are_not_changed(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer) -> None:
    """To the bit, beside rows with one; requests that end early, are cancelled, or share a prefix."""
    ids = tokenizer.encode("Once upon a time there was")
    plain, held = RequestOptions(24, sampling=WILD, seed=3, logprobs=2), Grammar.json_schema(SCHEMA, tokenizer)
    constrained = RequestOptions(90, constraint=held)
    limits = RequestOptions(1, sampling=WILD, logprobs=2).required_limits(model.config.vocab_size)
    engine = Engine(model, slots=2, capacity=128, limits=limits)
    alone = engine.submit(ids, plain)
    engine.run()
    prefix = Prefix(tuple(ids[:3]))
    mixed = [engine.submit(ids, one, prefix) for one in (constrained, plain, constrained, plain, constrained)]
    for _ in range(4):
        engine.step()
    engine.cancel(mixed[0])
    engine.run()
    assert mixed[0].finish == "cancelled"
    for one in (mixed[1], mixed[3]):
        assert (one.ids, one.logprobs, one.top) == (alone.ids, alone.logprobs, alone.top)
    for one in (mixed[2], mixed[4]):
        assert one.finish == "stop" and follows(tokenizer.decode(one.ids, skip_special_tokens=True))


@pytest.mark.slow
def test_a_constraint_counts_before_every_other_option(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer) -> None:
    """A text that is complete ends, whatever the bias, the least number of ids or the cut of the distribution."""
    held = Grammar.choice(["yes", 'no "way"'], tokenizer)
    wanted = RequestOptions(12, 9, Sampling(temperature=1, top_k=1), constraint=held)
    biased = dataclasses.replace(wanted, logit_bias=dict.fromkeys(tokenizer.encode("yes", False), -1e9))
    engine = Engine(model, slots=2, capacity=64, limits=biased.required_limits(model.config.vocab_size))
    requests = [engine.submit([5, 6], one) for one in (wanted, biased)]
    engine.run()
    for one in requests:
        assert one.finish == "stop"
        assert tokenizer.decode(one.ids, skip_special_tokens=True) in ("yes", 'no "way"')


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda t: Grammar.regex(r"[a-c]{3}-\d{2,4}", t), r"[a-c]{3}-\d{2,4}"),
        (lambda t: Grammar.lark('start: ("ha" | "ho")+ "!"', t), r"(ha|ho)+!?"),
        (lambda t: Grammar.json_object(t), r"\{(.|\n)*"),
        (lambda t: Grammar.json_schema('{"enum": ["ü", "漢", "\U0001f680"]}', t), '"(ü|漢|\U0001f680)"'),
    ],
)
def test_other_forms(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, make: Any, pattern: str) -> None:
    done = next(
        nnxmoe.complete(model, ["abc "], tokenizer, constraint=make(tokenizer), max_new_tokens=40, sampling=WILD)
    )
    assert re.fullmatch(pattern, done.text), done.text


def test_a_text_without_room_is_cut(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer) -> None:
    done = next(nnxmoe.complete(model, ["x"], tokenizer, schema=SCHEMA, max_new_tokens=7))
    assert done.finish == "length" and len(done.ids) == 7 and done.text.startswith('{"name"'[: len(done.text)])


def test_grammars_of_a_tokenizer_share_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance, built = pytest.importorskip("llguidance"), list[int]()
    true = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *a, **k: built.append(1) or true(*a, **k))
    for count in (1, 2):
        tokenizer = nnxmoe.Tokenizer.from_pretrained(DEMO)
        for pattern in ("a+", "b+"):
            Grammar.regex(pattern, tokenizer).start(tokenizer.vocab_size, [2])
        assert len(built) == count


class _Even:
    """A constraint of one's own: even ids only, and after four of them an end."""

    def __init__(self, vocab: int, ends: Sequence[int]):
        self.made, self.vocab, self.end = 0, vocab, ends[0]

    def start(self, vocab: int, stop_ids: Sequence[int]) -> "_Even":
        return _Even(vocab, stop_ids)

    def advance(self, ids: Sequence[int]) -> None:
        self.made += len(ids)

    def masks(self, drafts: Sequence[int], out: np.ndarray) -> None:
        for place in range(len(drafts) + 1):
            out[place] = 0x55555555
            if self.made + place >= 4:
                out[place] = 0
                out[place, self.end // 32] = 1 << self.end % 32


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, PromptLookup(2)])
def test_a_constraint_is_an_object(model: nnxmoe.CausalLM, draft: Any) -> None:
    vocab = model.config.vocab_size
    engine = Engine(model, slots=1, capacity=64, draft=draft)
    request = engine.submit([4, 8, 4, 8, 4], RequestOptions(9, stop_ids=[7], constraint=_Even(vocab, [7])))
    engine.run()
    assert len(request.ids) == 5 and request.ids[-1] == 7 and all(i % 2 == 0 for i in request.ids[:4])
    masks = empty_masks(2, 3, 65)
    assert masks.shape == (2, 3, 3) and (masks == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: Grammar.json_schema({"type": "nonsense"}, t), "llguidance rejects the grammar"),
        (lambda t: Grammar.json_schema("{", t), "the schema is not JSON"),
        (lambda t: Grammar.json_schema("[1]", t), "a schema must be an object, true or false"),
        (lambda t: Grammar.json_schema("false", t), "the schema false accepts no value"),
        (lambda t: Grammar.choice("yes", t), "choices must be a non-empty list of texts, got 'yes'"),
        (lambda t: Grammar.choice([], t), "choices must be a non-empty list of texts"),
        pytest.param(
            lambda t: Grammar.choice(["a", 5], t), "a choice must be a str, got 5", marks=pytest.mark.wrong_types
        ),
        pytest.param(
            lambda t: Grammar.regex(None, t),
            "a regular expression must be a str, got None",
            marks=pytest.mark.wrong_types,
        ),
        (lambda t: Grammar.regex("(", t), "llguidance rejects the grammar"),
        (lambda t: Grammar.lark("start: nothing", t), "llguidance rejects the grammar"),
    ],
)
def test_grammars_that_are_refused(
    model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, make: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        list(nnxmoe.complete(model, ["x"], tokenizer, constraint=make(tokenizer)))


def test_refusals(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs ids that end the text"):
        list(nnxmoe.complete(model, ["x"], tokenizer, schema=SCHEMA, eos_token_id=None))
    with pytest.raises(ValueError, match="cannot be combined with constraint="):
        nnxmoe.complete(model, ["x"], tokenizer, schema=SCHEMA, constraint=Grammar.json_object(tokenizer))
    (tmp_path / "schema.json").write_text("{")
    with pytest.raises(ValueError, match=r"schema\.json: the schema is not JSON"):
        grammar_of(argparse.Namespace(json_schema=str(tmp_path / "schema.json")), tokenizer)


@pytest.mark.slow
def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, prompts = tmp_path / "schema.json", tmp_path / "prompts.txt"
    schema.write_text(json.dumps(SCHEMA))
    prompts.write_text("one\ntwo\n")
    options = ["--json-schema", str(schema), "--max-new-tokens", "90"]
    assert main(["generate", "demo", "Give JSON", *options]) == 0
    assert follows(capsys.readouterr().out)
    assert main(["generate", "demo", "--prompts", str(prompts), *options]) == 0
    assert all(follows(json.loads(line)["text"]) for line in capsys.readouterr().out.splitlines())
