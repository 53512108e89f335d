"""Training data: JSON lines, tokenization, packing, loss masks, and resumable batches."""

import gzip
import json
import pickle
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnxmoe
from nnxmoe import Tokenizer
from nnxmoe.train.data import batches as data_module
from nnxmoe.train.data import jsonl
from nnxmoe.train.data.bad_records import BadRecords, DataError, RecordError
from nnxmoe.train.data.batches import Batches, Rows, batches, place
from nnxmoe.train.data.documents import Document, Documents, fill
from nnxmoe.train.data.jsonl import JsonLines
from nnxmoe.train.data.record_list import RecordList
from nnxmoe.train.data.records import Record
from tests.support.cases import HF_CASES
from tests.support.running import forward
from tests.support.tiny import build_tiny

DEMO = Path(nnxmoe.models.__file__).parent / "demo"
USER, ASSISTANT = "user", "assistant"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(DEMO)


def chat(*turns: str) -> dict[str, Any]:
    """Chat with alternating user and assistant messages."""
    return {"messages": [{"role": (USER, ASSISTANT)[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in objects), encoding="utf-8")
    return path


def said(*turns: str) -> tuple[dict[str, Any], ...]:
    return tuple(chat(*turns)["messages"])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of very different lengths and chats."""
    numbers = np.random.RandomState(0)
    texts = [{"text": f"{i} " + "a small cat " * int(numbers.choice([1, 5, 20, 90]))} for i in range(40)]
    chats = [chat(f"Why {i}?", "So. " * int(numbers.randint(1, 9)), "And?", f"{i} is it.") for i in range(30)]
    objects = [*texts, *chats]
    return write(tmp_path_factory.mktemp("data") / "mixed.jsonl", *(objects[i] for i in numbers.permutation(70)))


@pytest.fixture(scope="module")
def documents(mixed: Path, tokenizer: Tokenizer) -> Documents:
    return Documents(mixed, tokenizer)


def segments(batch: dict[str, np.ndarray]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield tokens and loss mask per segment; asserts that it is contiguous and its positions start at 0."""
    for row in range(len(batch["tokens"])):
        ids = batch["segment_ids"][row]
        used = int((ids > 0).sum())
        assert not ids[used:].any() and not batch["loss_mask"][row][used:].any()
        assert np.all(np.diff(ids[:used]) >= 0) and set(ids[:used]) == set(range(1, ids.max() + 1))
        for segment in range(1, ids.max() + 1):
            at = ids == segment
            np.testing.assert_array_equal(batch["positions"][row][at], np.arange(at.sum()))
            yield tuple(batch["tokens"][row][at].tolist()), tuple(batch["loss_mask"][row][at].tolist())


def equal(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype == np.int32
            np.testing.assert_array_equal(a[name], b[name])


# Lines


def test_blank_lines_and_line_endings(tmp_path: Path) -> None:
    """Blank lines are numbered but skipped. CRLF, LF, a byte order mark and a missing final newline are accepted."""
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "one"}\r\n\n{"messages": [{"role": "user", "content": "é"},'.encode())
    with path.open("ab") as file:
        file.write(b'{"role": "assistant", "content": "yes"}]}\n  \n{"text": "a\\u2028b"}')
    lines = JsonLines(path)
    assert [line.text for line in lines] == ["one", None, "a\u2028b"]
    assert lines[1].messages == said("é", "yes") and lines[-1].text == "a\u2028b"
    assert [lines.where(i) for i in range(3)] == [f"{path} line {number}" for number in (1, 3, 5)]
    with pytest.raises(IndexError):
        lines[3]
    path.write_bytes('\ufeff\r\n\t\n{"text": "a"}\r\n{"text": "b"},\n'.encode() + b"\xef\xbb\xbf\n")
    lines = JsonLines(path, bad=BadRecords(0.5))
    assert (len(lines), lines.total, lines.where(0)) == (1, 2, f"{path} line 3")


def test_commas_and_brackets_inside_strings_are_not_counted(tmp_path: Path) -> None:
    """The limit on the number of JSON values per line ignores punctuation within strings."""
    text = '1,[{\\",' * 250_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert JsonLines(tmp_path / "a.jsonl")[0].text == text
    for values in ("[1" + ",1" * 1_100_000, '"' + '\\"' * 1_100_000 + ",1" * 1_100_000):
        (tmp_path / "b.jsonl").write_text(values)
        with pytest.raises(DataError, match=r"b\.jsonl has .*: line 1: "):
            JsonLines(tmp_path / "b.jsonl")


GOOD = b'{"text": "good"}\n'
BAD: list[tuple[bytes, str]] = [
    (b"hello", "is not valid JSON"),
    (b'{"text": "cut', "is not valid JSON"),
    (b'{"text": "a"} {"text": "b"}', "is not valid JSON: Extra data"),
    (b'{"text": "a", "text": "b"}', "the name 'text' occurs twice"),
    (b'{"text": NaN}', "NaN is not a JSON number"),
    (b'{"text": "\xff"}', "is not valid JSON: 'utf-8' codec"),
    (b"[" * 100_000, "is not valid JSON"),
    (b"[1]", r"\[1\] is not a JSON object"),
    (b"7", "7 is not a JSON object"),
    (b"{}", r"has the fields \[\]: write 'text'"),
    (b'{"meta": 1}', r"has the fields \['meta'\]"),
    (
        b'{"prompt": "a", "response": "b"}',
        r"'completion' is missing: the record has the fields \['prompt', 'response'\]",
    ),
    (b'{"prompt": "a", "completion": null}', "completion is null: it must be a non-empty string"),
    (b'{"instruction": "a", "response": "b"}', r"'output' is missing: .* fields \['instruction', 'response'\]"),
    (b'{"text": "a"},', "not valid JSON: Extra data.*remove the comma at its end"),
    (b'{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}', "completion is .*non-empty string"),
    (b'{"prompt": [{"role": "user", "content": "a"}], "completion": []}', "has no message from the assistant"),
    (b'{"instruction": "a", "output": 3}', "output is 3: it must be a non-empty string"),
    (b'{"instruction": "a", "input": ["b"], "output": "c"}', r"input is \['b'\]: it must be a string"),
    (
        b'{"conversations": [{"from": "function_call", "value": null}]}',
        r"conversations\[0\]: value is null: it must be the JSON text of a tool call",
    ),
    (
        b'{"conversations": [{"from": "robot", "value": "a"}]}',
        r"conversations\[0\] has the role 'robot': use system, dev",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
        "no message from the assistant",
    ),
    (
        b'{"tools": "[1]", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "schemas",
    ),
    (b'{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}', "weight 0.5: use 1, or 0"),
    (
        b'{"messages": [{"role": "assistant", "tool_calls": [], "content": 7}]}',
        "content is 7: it must be a non-empty string",
    ),
    (b'{"text": ""}', "text is '': it must be a non-empty string"),
    (b'{"text": " \\n"}', "text is ' .n': it must be a non-empty string"),
    (b'{"text": 3}', "text is 3: it must be a non-empty string"),
    (b'{"text": null}', "text is null"),
    (b'{"text": "\\ud800"}', "text is not valid Unicode: .*lone surrogates"),
    (b'{"messages": "a"}', "messages is 'a': it must be a list"),
    (b'{"messages": []}', "has no message from the assistant"),
    (b'{"messages": [1]}', r"messages\[0\] is 1: it must be an object"),
    (b'{"messages": [{"role": "user"}]}', r"messages\[0\]: 'content' is missing; its fields are \['role'\]"),
    (b'{"messages": [{"role": null, "content": "a"}]}', r"messages\[0\]: 'role' is null; its"),
    (b'{"messages": [{"role": "assistant", "tool_calls": []}]}', r"messages\[0\]: 'content' is missing"),
    (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}',
        r"messages\[0\]\.tool_calls\[0\]: the arguments '{' are not a JSON object",
    ),
    (
        b'{"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}',
        r'messages\[0\]\.function_call is not supported: write it as "tool_calls"',
    ),
    (
        b'{"messages": [{"role": "user", "content": ""}]}',
        r"messages\[0\]: content is '': it must be",
    ),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        r"messages\[0\]: content has {'type': 'text'}: only",
    ),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
        r'content has {.*image_url.*}: only {"type": "text", "text": …} is supported',
    ),
    (b'{"messages": [{"role": ["a"], "content": "a"}]}', r"messages\[0\] has the role \['a'\]"),
    (
        b'{"messages": [{"role": "user", "content": "a"}]}',
        "no message from the assistant",
    ),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "starts with an assistant message"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_bad_lines(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(path))} has 1 unusable record of 4, .*: line 3: .*{message}"
    ):
        JsonLines(path)


HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TYPED_CALL = CALL | {"tool_calls": [{"type": "function", **CALL["tool_calls"][0]}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
FORMS: list[tuple[dict[str, Any], Record]] = [
    ({"text": "one", "messages": None}, Record("one")),
    ({"messages": [HI | {"name": None}, HELLO]}, Record(None, (HI, HELLO), answers=(1,))),
    ({"prompt": "2 + 2 =", "completion": " 4"}, Record(" 4", prompt="2 + 2 =")),
    (
        {"prompt": [HI, HELLO, HI], "completion": [HELLO]},
        Record(None, (HI, HELLO) * 2, answers=(3,)),
    ),
    ({"prompt": [HI], "completion": [HI, HELLO]}, Record(None, (HI, HELLO), answers=(1,))),
    ({"instruction": "Add.", "output": "3"}, Record(None, said("Add.", "3"), answers=(1,))),
    ({"instruction": "Add.", "input": "1, 2", "output": "3"}, Record(None, said("Add.\n\n1, 2", "3"), answers=(1,))),
    (
        {"conversations": [{"from": "human", "value": "Hi", "weight": None}, {"from": "gpt", "value": "Hello"}]},
        Record(None, (HI, HELLO), answers=(1,)),
    ),
    (
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}, HELLO | {"weight": 1}]},
        Record(None, ({"role": "system", "content": "Be brief."}, HI, HELLO), answers=(2,)),
    ),
    (
        {"messages": [HI | {"name": "Ann"}, HELLO | {"weight": 0}, HI, HELLO]},
        Record(None, (HI | {"name": "Ann"}, HELLO, HI, HELLO), answers=(3,)),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"text": "i"}]}, HELLO]},
        Record(None, (HI, HELLO), answers=(1,)),
    ),
    (
        {"messages": [HI, CALL | {"content": None}, {"role": "tool", "content": "", "tool_call_id": "7"}, HELLO]},
        Record(None, (HI, CALL, {"role": "tool", "content": "", "tool_call_id": "7"}, HELLO), answers=(1, 3)),
    ),
    *(  # LLaMA-Factory's format
        (
            {"conversations": [{"from": name, "value": text} for name, text in turns]},
            Record(None, (HI, TYPED_CALL, {"role": "tool", "content": "3"}), answers=(1,)),
        )
        for call in ('{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {"a": 1}}]')
        for turns in [[("human", "Hi"), ("function_call", call), ("observation", "3")]]
    ),
    ({"messages": [HI, HELLO], "tools": TOOLS}, Record(None, (HI, HELLO), answers=(1,), tools=tuple(TOOLS))),
    (
        {"messages": [HI, HELLO], "tools": json.dumps(TOOLS)},
        Record(None, (HI, HELLO), answers=(1,), tools=tuple(TOOLS)),
    ),
]


def test_templates_get_tools_and_fields_of_messages(tokenizer: Tokenizer) -> None:
    template = "{% for t in tools %}{{ t.function.name }} {% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    template += (
        "{{ m.name }}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    )
    template += "{% endfor %}<|end|>"
    template += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    own = Tokenizer(tokenizer.backend, tokenizer.special_tokens, {"default": template}, "here")
    given = {"messages": [HI | {"name": "Ann"}, CALL, HI, HELLO | {"weight": 0}], "tools": TOOLS}
    document = Documents([given], own)[0]
    text = tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False)
    assert text == 'add <|user|>AnnHi<|end|><|assistant|>add{"a": 1}<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>'
    learnt = tokenizer.decode(document.tokens[document.learnt].tolist(), skip_special_tokens=False)
    assert learnt == 'add{"a": 1}<|end|>'


def test_forms_of_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a file and as a list of dicts; other fields are ignored with one notice."""
    path = write(tmp_path / "a.jsonl", *({"id": i} | value for i, (value, _) in enumerate(FORMS)))
    with caplog.at_level("INFO", logger="nnxmoe"):
        found = JsonLines(path)
    assert [found[i] for i in range(len(found))] == [record for _, record in FORMS]
    assert [entry.message for entry in caplog.records] == [f"{path}: these fields are ignored: ['id', 'messages']"]
    given = RecordList(iter([value for value, _ in FORMS]))
    assert [given[i] for i in range(len(given))] == [record for _, record in FORMS]


def test_arrays_and_compressed_files(tmp_path: Path) -> None:
    """The files of Alpaca and ShareGPT are JSON arrays; temporary files are removed."""
    values, path = [value for value, _ in FORMS], tmp_path / "a.json"
    for text in (json.dumps(values), "\ufeff\n" + json.dumps(values, indent=2)):
        for pack in (bytes, gzip.compress):
            path.write_bytes(pack(text.encode()))
            found = JsonLines(path)
            assert [found[i] for i in range(len(found))] == [record for _, record in FORMS]
            assert found.where(2) == f"{path} item 3"
    path.write_bytes(gzip.compress("\n\n".join(map(json.dumps, values)).encode()))
    found = JsonLines(path)
    assert found[1].messages == (HI, HELLO) and found.where(1) == f"{path} line 3"
    copy = found._lines_of
    assert copy.exists()
    del found
    assert not copy.exists()
    path.write_bytes(gzip.compress(GOOD * 99)[:-20])
    with pytest.raises(DataError, match=r"a\.json: .*The file is damaged"):
        JsonLines(path)
    for name, content, message in (
        ("a.json", b'[{"text": "a"}, {"txt": "b"}]', r"a\.json has .*: item 2: the record has the fields \['txt'\]"),
        ("a.json", b"[]", "is empty"),
        ("a.json", b'[{"text": "a"}', r"a\.json item 1 is not valid JSON: Expecting ',' or ']'"),
        ("a.json", b'[{"text": "a"},\n]', r"a\.json item 1 is not valid JSON: Illegal trailing comma.*line 2 column 1"),
        ("a.json", b'[{"text": "a"}, {"text": NaN}]', r"a\.json has .*: item 2: .*NaN is not a JSON number"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
        ("a.txt", b"Once upon a time\n", r"a\.txt is plain text: write JSON lines such as"),
        ("a.csv", b"text\nOnce\n", r"a\.csv is a table: write JSON lines such as"),
        ("a.parquet", b"PAR1\x00", "is a Parquet file: convert it"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            JsonLines(tmp_path / name)


def faulty(count: int) -> list[dict[str, Any]]:
    """Texts with every tenth one empty, and a chat that starts with an assistant message."""
    texts = [{"text": "" if i % 10 == 3 else f"{i} is here"} for i in range(count - 1)]
    return [*texts, {"messages": [HELLO, HI, HELLO]}]


@pytest.mark.parametrize("form", ["jsonl", "json", "list"])
def test_unusable_records_are_counted_by_reason(
    tmp_path: Path, form: str, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the allowed fraction they are skipped with one warning. Above it, one error counts them."""
    records = faulty(80)
    path = tmp_path / f"a.{form}"
    path.write_text("\n".join(map(json.dumps, records)) if form == "jsonl" else json.dumps(records))
    data, first, unit = (records, 3, "record") if form == "list" else (path, 4, "line" if form == "jsonl" else "item")
    numbers = ", ".join(str(first + 10 * i) for i in range(5))
    reasons = f"8 {unit}s ({numbers}, …): text is '': it must be a non-empty string; "
    reasons += f"{unit} {first + 76}: the chat starts with an assistant message"
    options: dict[str, Any] = {"batch_size": 2, "seq_len": 24, "epochs": 1}
    for limit in ({}, {"max_bad_fraction": 0}, {"max_bad_fraction": 0.11}):
        with pytest.raises(DataError) as failure:
            batches(data, tokenizer, **options, **limit)
        fraction = limit.get("max_bad_fraction", 0.01)
        assert f" has 9 unusable records of 80, more than max_bad_fraction={fraction}" in str(failure.value)
        assert reasons in str(failure.value)
    assert not caplog.records
    usable_batches = batches(data, tokenizer, **options, max_bad_fraction=9 / 80)
    (warning,) = (entry.message for entry in caplog.records)
    assert warning.startswith(f"{usable_batches.documents.lines}: skipped 9 of 80 records: {reasons}")
    usable = [record for record in records[:-1] if record["text"]]
    equal(usable_batches, batches(usable, tokenizer, **options))
    assert usable_batches.documents.lines.where(3).endswith(f"{unit} {first + 1}")


@pytest.mark.wrong_types
def test_invalid_fractions_and_data_without_usable_records(tokenizer: Tokenizer) -> None:
    for wrong in (-0.1, 1.1, float("nan"), True, "0.1"):
        with pytest.raises(ValueError, match=r"max_bad_fraction=.*pass a number from 0"):
            Documents([{"text": "a"}], tokenizer, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="has 2 unusable records of 2, so there is nothing to train on"):
        Documents([{"text": ""}, {"text": " "}], tokenizer, 1)
    assert len(Documents([{"text": "a"}] * 71 + [{}] * 29, tokenizer, 0.29)) == 71


def test_the_counter_of_bad_records_has_a_bounded_number_of_reasons() -> None:
    bad = BadRecords(1)
    for number in range(1, 1501):
        bad.add(number, RecordError("fault", "x" * number))
    assert bad.count == 1500 and len(bad._faults) == 1001
    assert "500 records (1001, 1002, 1003, 1004, 1005, …): other reasons" in bad._text("record")


ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)


def test_chats_rejected_by_the_template_are_unusable_records(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """They are detected while batches are built. Resumed runs and both of two processes skip the same records."""
    strict = Tokenizer(tokenizer.backend, tokenizer.special_tokens, {"default": ALTERNATE}, "here")
    records = [chat(f"a {i}", "b") if i % 20 != 7 else {"messages": [HI, HI, HELLO]} for i in range(60)]
    options: dict[str, Any] = {"batch_size": 2, "seq_len": 48, "epochs": 2, "seed": 5}
    why = "here: the chat template, line 1, refuses this conversation: roles must alternate"
    with pytest.raises(DataError, match=rf"has 3 unusable records of 60, .*: 3 records \(\d+, \d+, \d+\): {why}"):
        list(batches(records, strict, **options))
    with pytest.raises(DataError, match=rf"has 3 unusable records of 60, .*: 3 records \(7, 27, 47\): {why}"):
        Documents(records, strict).check()
    options["max_bad_fraction"] = 0.05
    assert not caplog.records
    all_batches = list(batches(records, strict, **options))
    first, last = (entry.message for entry in caplog.records)
    assert "skipped 1 of 60 records so far: " in first and "skipped 3 of 60 records: 3" in last
    usable = Documents([record for record in records if len(record["messages"]) == 2], strict)
    learned = sum(int(document.learnt.sum()) for document in usable)
    assert sum(batch["loss_mask"].sum() for batch in all_batches) == 2 * learned
    for steps in (1, 3, len(all_batches) - 1):
        interrupted = batches(records, strict, **options)
        for _ in range(steps):
            next(interrupted)
        resumed = batches(records, strict, **options)
        resumed.set_state(interrupted.get_state())
        equal(all_batches[steps:], resumed)
    halves = [batches(records, strict, **options, share=(i, 2)) for i in range(2)]
    for batch, *parts in zip(all_batches, *halves, strict=True):
        equal([batch], [{name: np.concatenate([part[name] for part in parts]) for name in batch}])
    equal([Rows(Documents(records, strict, 0.05), 8)[7]], [fill([], 8, tokenizer.pad_token_id or 0)])


def test_values_of_records_may_be_arrays(tokenizer: Tokenizer) -> None:
    """pandas reads lists of Parquet files as arrays. NaN counts as absent. Other types raise with the field's name."""
    call = CALL | {
        "tool_calls": np.array([{"function": {"name": "add", "arguments": {"a": np.arange(2, dtype=np.uint8)}}}])
    }
    parts = np.array([{"type": "text", "text": "Hi"}], object)
    values = {
        "messages": np.array([HI | {"content": parts}, call, HELLO], object),
        "system": float("nan"),
        "n": np.ones(2),
    }
    (record,) = RecordList([values, {"text": "a"}][:1])
    assert record.messages[0] == HI and record.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [0, 1]}
    completion = {"prompt": (HI,), "completion": [HELLO | {"weight": jax.numpy.int8(1)}]}
    assert RecordList([completion])[0] == Record(None, (HI, HELLO), answers=(1,))
    with pytest.raises(DataError, match=r"record 0: messages .*Decimal\('0\.1'\).*of type Decimal"):
        RecordList([{"messages": [HI, HELLO | {"cost": Decimal("0.1")}]}])


def test_nulls_of_typed_columns_are_absent_fields(tmp_path: Path) -> None:
    """In a typed column every object has the fields of all objects, null where absent. Other nulls are preserved."""

    class Dataset(list[Any]):
        features = None

    def calls(**fields: Any) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": {"a": 1, "b": None}, "parameters": None}
        return [HI | fields, {"role": ASSISTANT, "content": None, "tool_calls": [{"function": function}]}]

    filled = calls(tool_calls=None)
    forms: list[tuple[list[Any], Any]] = [
        (Dataset([{"messages": calls()}]), {"a": 1}),
        ([{"messages": np.array(calls(), object)}], {"a": 1}),  # as pandas reads Parquet
        ([{"messages": filled, "text": None}], {"a": 1}),
        ([{"prompt": filled[:1], "completion": filled[1:]}], {"a": 1}),
        ([{"messages": calls()}], {"a": 1, "b": None}),
    ]
    for records, arguments in forms:
        (record,) = RecordList(records)
        assert record.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    lines = JsonLines(write(tmp_path / "a.jsonl", {"messages": filled, "tools": [{"name": "add", "strict": None}]}))
    assert lines[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert lines[0].tools == ({"name": "add"},)


def test_learned_part_of_prompts_with_completions(tokenizer: Tokenizer) -> None:
    """A completion, and the answers that belong to it, are learned; their prompts are not."""
    documents = Documents([FORMS[2][0], FORMS[3][0]], tokenizer)
    text, dialogue = documents[0], documents[1]
    assert tokenizer.decode(text.tokens.tolist(), skip_special_tokens=True) == "2 + 2 = 4"
    assert tokenizer.decode(text.tokens[text.learnt].tolist(), skip_special_tokens=True) == " 4" and text.learnt[-1]
    assert tokenizer.decode(dialogue.tokens[dialogue.learnt].tolist(), skip_special_tokens=True) == "Hello"
    assert not dialogue.learnt[: len(dialogue.tokens) // 2].any()


def test_lists_give_the_batches_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    values = [value for value, _ in FORMS if not re.search("tool|function_call", json.dumps(value))] * 3
    path = write(tmp_path / "a.jsonl", *values)
    options: dict[str, Any] = {"batch_size": 2, "seq_len": 24, "epochs": 1}
    equal(batches(path, tokenizer, **options), batches(values, tokenizer, **options))
    again = batches(values, tokenizer, **options)
    next(again)
    resumed = batches(iter(values), tokenizer, **options)
    resumed.set_state(again.get_state())
    equal(again, resumed)
    with pytest.raises(DataError, match=r"the list of records: the state is from different data"):
        batches(values[:-1], tokenizer, **options).set_state(again.get_state())


@pytest.mark.wrong_types
def test_unusable_lists(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"batch_size": 2, "seq_len": 24}
    for wrong, message in (
        ([], "there are no records"),
        ({"text": "a"}, "not training data"),
        ([{}], "record 0: the record has the fi"),
        (["a text"], "record 0: 'a text' is not a JSON object: write"),
    ):
        with pytest.raises(DataError, match=message):
            batches(wrong, tokenizer, **options)


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl: No such file.*a file of JSON lines"):
        JsonLines(path)
    with pytest.raises(DataError, match="is a folder"):
        JsonLines(tmp_path)
    for content, message in ((b"", "is empty"), (b"\n \n", "is empty"), (b"version https://git-lfs", "Git LFS")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            JsonLines(path)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 20)
    path.write_bytes((GOOD + b'{"text": "' + b"a" * 1000 + b'"}\n') * 2)
    with pytest.raises(DataError, match=r"2 unusable.* 2 lines \(2, 4\): .* more than 20 bytes"):
        JsonLines(path)
    lines = JsonLines(path, bad=BadRecords(0.5))
    assert [lines[i].text for i in range(len(lines))] == ["good"] * 2 and lines.where(1) == f"{path} line 3"


def test_file_modified_after_opening(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    documents = Documents(path, tokenizer)
    path.write_bytes(path.read_bytes() + GOOD)
    with pytest.raises(DataError, match="was modified after it was opened"):
        documents[0]


def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"{i} " * 6000} for i in range(300)))
    assert path.stat().st_size > 6_000_000
    tracemalloc.start()
    lines = JsonLines(path)
    assert str(lines[200].text).startswith("200 ")
    assert tracemalloc.get_traced_memory()[1] < 600_000
    tracemalloc.stop()


# Documents


def test_all_tokens_of_a_text_are_trained_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Includes the end-of-sequence token."""
    documents = Documents(write(tmp_path / "a", {"text": "A cat."}, {"text": "A cat.<|eos|>"}), tokenizer)
    for document in documents:
        assert document.tokens.tolist() == [*tokenizer.encode("A cat."), tokenizer.eos_token_id]
        assert document.tokens.dtype == np.int32 and document.learnt.all() and not document.chat


@pytest.mark.parametrize("folder", [DEMO, *sorted(path / "model" for path in HF_CASES.iterdir())], ids=str)
def test_only_assistant_tokens_of_a_chat_are_trained_on(tmp_path: Path, folder: Path) -> None:
    """Token ids are those of the chat template; the mask covers each answer and the token that ends it."""
    tokenizer = Tokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        pytest.skip("no chat template")
    given = chat("Hello there", "Hi.", "How much?", "the <|user|> the", "Thanks")
    given["messages"].insert(0, {"role": "system", "content": "Be brief."})
    document = Documents(write(tmp_path / "a", given), tokenizer)[0]
    assert document.tokens.tolist() == tokenizer.apply_chat_template(given["messages"], tokenize=True)
    learnt = "".join(
        tokenizer.decode(document.tokens[part]) if document.learnt[part][0] else "|"
        for part in np.split(np.arange(len(document.tokens)), np.flatnonzero(np.diff(document.learnt)) + 1)
    )
    assert learnt.replace(" ", "") == "|Hi.<|end|>|the<|user|>the<|end|>|"


TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
EACH, ASKS, TAG = (
    "{% for m in messages %}",
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% generation %}",
)
ANSWER = "<|{{ m.role }}|>{% if m.role == 'assistant' %}"
# Qwen3: a <think> block in the last answer only.
QWEN3 = (
    EACH + "{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n' }}"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1] }}{% endif %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}{{ m.content.split('</think>')[-1].strip('\\n') }}<|end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
HARMONY = (
    EACH
    + "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|assistant|>final:{{ m.content }}"
    "<|eos|>{% elif m.role == 'assistant' %}<|assistant|>final:{{ m.content }}<|end|>{% else %}" + TURN + "{% endif %}"
    "{% endfor %}" + ASKS
)
R1 = (
    EACH + "{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
GLM = EACH + ANSWER + "<think></think>{% endif %}{{ '\\n' + m.content }}{% endfor %}" + ASKS
TAGGED = (
    EACH
    + ANSWER
    + "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OTHER_PROMPT = EACH + TURN + "{% endfor %}{% if add_generation_prompt %}<|bos|>{% endif %}"
EARLIER_ENDS = "{% if not loop.first %}{{ '<|end|>\\n' }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
PLAIN = (
    "{{ '\\n' + m.role + ': ' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}"
)
ENDED = "x<|end|>| y <|end|>"
# name -> template, what is learned of ["q", "x", "r", " y "], and the warning
SHAPES: dict[str, tuple[str, str, str]] = {
    "only appended": (EACH + TURN + "{% endfor %}" + ASKS, ENDED, ""),
    "Qwen3": (QWEN3, "x<|end|>\n|<think>\n\n</think>\n\n y <|end|>\n", ""),
    "harmony": (HARMONY, "final:x<|end|>|final: y <|eos|>", ""),
    "R1": (R1, "x<|eos|>| y <|eos|>", ""),
    "GLM": (GLM, "<think></think>\nx<|user|>|<think></think>\n y <|eos|>", ""),
    "end before the next turn": (EACH + EARLIER_ENDS + ASKS, "x<|end|>| y <|eos|>", ""),
    "tags": (TAGGED, ENDED, ""),
    "tags without the end": (TAGGED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"), ENDED, ""),
    "trimmed": (EACH + TURN.replace("content", "content | trim") + "{% endfor %}" + ASKS, "x<|end|>|y<|end|>", ""),
    "a count at the start": ("{{ messages | length }}" + EACH + TURN + "{% endfor %}" + ASKS, ENDED, ""),
    "another prompt": (OTHER_PROMPT, ENDED, ""),
    "the last answer only": (
        EACH.replace("es %}", "es[-2:] %}") + TURN + "{% endfor %}" + ASKS,
        " y <|end|>",
        "omits",
    ),
    "without special tokens": (EACH + PLAIN, "x| y <|eos|>", "no special token follows an answer"),
}


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Tokens of single bytes and special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([f"<|{name}|>" for name in ("bos", "eos", "end", USER, ASSISTANT)])
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, {"eos_token": "<|eos|>"}, {}, "here")


def learnt_of(tokenizer: Tokenizer, template: str, *turns: str) -> str:
    other = Tokenizer(tokenizer.backend, tokenizer.special_tokens, {"default": template}, "here")
    document = Documents([chat(*turns)], other)[0]
    parts = np.split(np.arange(len(document.tokens)), np.flatnonzero(np.diff(document.learnt)) + 1)
    return "|".join(tokenizer.decode(document.tokens[part]) for part in parts if document.learnt[part][0])


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_learned_with_their_ends(letters: Tokenizer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    template, expected, warning = SHAPES[name]
    assert learnt_of(letters, template, "q", "x", "r", " y ") == expected
    assert re.search(warning, caplog.text) if warning else not caplog.text
    alone = learnt_of(letters, template, "q", "🦊é")
    assert alone.startswith(("🦊é", "<think>", "final:")) and alone.rstrip().endswith(("<|end|>", "<|eos|>"))


@pytest.mark.oracle
def test_tagged_answers_against_transformers(letters: Tokenizer) -> None:
    loaded = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=letters.backend)
    messages = chat("q 🦊", "é🦊\n x", "r", "y")["messages"]
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, "chat_template": TAGGED}
    expected = loaded.apply_chat_template(messages, **how)
    document = Documents([{"messages": messages}], Tokenizer(letters.backend, {}, {"default": TAGGED}, "here"))[0]
    assert document.tokens.tolist() == expected["input_ids"] and sum(expected["assistant_masks"]) > 8
    assert document.learnt.tolist() == [bool(one) for one in expected["assistant_masks"]]


def test_reasoning_is_learned_where_the_template_writes_it(letters: Tokenizer) -> None:
    thought = "<think>hm</think>x"
    assert learnt_of(letters, QWEN3, "q", thought, "r", thought) == "x<|end|>\n|<think>\nhm\n</think>\n\nx<|end|>\n"
    assert learnt_of(letters, R1, "q", thought) == "x<|eos|>"


CALLS = (
    EACH + "{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% if m.content %}{{ '\\n' }}{% endif %}<call>{{ call | tojson }}{% endfor %}<|end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def test_answers_without_content_are_learned(letters: Tokenizer) -> None:
    """Qwen3 writes a call of a tool differently from a last answer, and with a line end after content only."""
    messages = [*chat("q", "x")["messages"], {"role": "tool", "content": "t"}, {"role": ASSISTANT, "content": "y"}]
    messages[1] = {"role": ASSISTANT, "content": None, "tool_calls": [CALL["tool_calls"][0]["function"]]}
    other = Tokenizer(letters.backend, letters.special_tokens, {"default": CALLS}, "here")
    document = Documents([{"messages": messages}], other)[0]
    learned = other.decode(document.tokens[document.learnt])
    call = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
    assert learned == f"<call>{call}<|end|><think>\n\n</think>\n\ny<|end|>\n"


CALL_FORMS = {  # how templates render a call
    "tojson": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "items": "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
    "text": "{{ c.function.name + ' ' + c.function.arguments }}",
}


@pytest.mark.parametrize("name", CALL_FORMS)
def test_tool_calls_are_learned_as_the_template_renders_them(letters: Tokenizer, name: str) -> None:
    """Arguments may be an object or JSON text, calls in OpenAI's form or flat, messages with or without content."""
    turn = f"{{% for c in m.tool_calls or [] %}}{CALL_FORMS[name]}{{% endfor %}}<|end|>"
    template = EACH + TURN.replace("<|end|>", turn) + "{% endfor %}" + ASKS
    other = Tokenizer(letters.backend, letters.special_tokens, {"default": template}, "here")
    learned = set[str]()
    for arguments in ({"days": 3, "to": "Zürich"}, '{"days": 3, "to": "Zürich"}'):
        call = {"name": "find", "arguments": arguments}
        for calls in ([call], [{"id": "a", "type": "function", "function": call}], json.dumps([{"function": call}])):
            for content in ({"content": None}, {"content": ""}, {}):
                messages = [
                    HI,
                    {"role": ASSISTANT, "tool_calls": calls, **content},
                    {"role": "tool", "content": "ok"},
                    HELLO,
                ]
                document = Documents([{"messages": messages}], other)[0]
                learned.add(other.decode(document.tokens[document.learnt]))
    expected = {
        "tojson": '{"name": "find", "parameters": {"days": 3, "to": "Zürich"}}',
        "items": "find<days>3<to>Zürich",
        "text": 'find {"days": 3, "to": "Zürich"}',
    }[name]
    assert learned == {f"{expected}<|end|>Hello<|end|>"}


def test_template_that_leaves_out_all_answers_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    users = EACH.replace("in messages", "in messages if m.role == 'user'") + TURN + "{% endfor %}"
    other = Tokenizer(tokenizer.backend, tokenizer.special_tokens, {"default": users}, "here")
    documents = Documents(write(tmp_path / "a", {"text": "fine"}, chat("a ca", "t", "no", "yes")), other)
    assert documents[0].learnt.all()
    with pytest.raises(
        DataError, match=r"a has 1 un.*line 2: the chat template omits or changes the assistant's messages"
    ):
        documents.check()


def test_token_that_spans_the_start_of_an_answer_is_learned(tokenizer: Tokenizer) -> None:
    """'ca' followed by 't' is one token."""
    assert learnt_of(tokenizer, EACH + "{{ m.content }}{% endfor %}", "a ca", "t").endswith("cat<|eos|>")


def test_template_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer(tokenizer.backend, {}, {"default": "{{ raise_exception('no') }}"}, "here")
    for asked, message in (
        (other, "line 1: here: .*refuses this conv"),
        (Tokenizer(tokenizer.backend, {}, {}, "x"), "no chat"),
    ):
        with pytest.raises(DataError, match=message):
            Documents(write(tmp_path / "a", chat("a", "b")), asked)[0]


# Packing


def document(size: int, start: int = 0, is_chat: bool = False) -> Document:
    return Document(np.arange(start, start + size, dtype=np.int32), np.arange(size) % 3 > 0, is_chat)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(2, 20))
@settings(max_examples=200, deadline=None)
def test_packing_keeps_every_token_and_separates_documents(sizes: list[int], length: int) -> None:
    given = [document(size, 1000 * i) for i, size in enumerate(sizes)]
    found = [piece for one in given for piece in one.pieces(length)]
    rows = place([len(piece.tokens) for piece in found], length)
    assert sorted(i for row in rows for i in row) == list(range(len(found)))
    filled = [fill([found[i] for i in row], length, 7) for row in rows]
    batch = {name: np.stack([row[name] for row in filled]) for name in filled[0]} if filled else {"tokens": []}
    seen = list(segments(batch))  # pyright: ignore
    assert all(len({token // 1000 for token in tokens}) == 1 for tokens, _ in seen)
    joined: dict[int, list[tuple[int, ...]]] = {}
    for ids, mask in sorted(seen):
        joined.setdefault(ids[0] // 1000, []).append(ids + mask)
    for i, one in enumerate(given):
        parts = joined.get(i, [])
        cut = [slice(start, start + length) for start in range(0, len(one.tokens), length)]
        kept = [part for part in cut if one.learnt[part][1:].any()]  # in the others nothing is predicted
        assert [t for part in parts for t in part[: len(part) // 2]] == [t for part in kept for t in one.tokens[part]]
        assert [t for part in parts for t in part[len(part) // 2 :]] == [t for part in kept for t in one.learnt[part]]


def test_no_row_is_without_a_token_to_predict(tokenizer: Tokenizer) -> None:
    """A text that is one token longer than a row, of which the second row would have nothing to predict."""
    text = {"text": "a small cat"}
    length = len(Documents([text], tokenizer)[0].tokens) - 1
    made = list(batches([text], tokenizer, batch_size=1, seq_len=length, epochs=1))
    assert [int(batch["segment_ids"].sum()) for batch in made] == [length]


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_leaves_no_two_rows_that_fit_into_one(sizes: list[int]) -> None:
    used = sorted(sum(sizes[i] for i in row) for row in place(sizes, 20))
    assert len(used) < 2 or used[0] + used[1] > 20


def test_long_chats_are_truncated(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """A chat whose question alone is too long is dropped. One line says how many there are, once that is known."""
    objects = chat("Hi", "a cat " * 50), chat("Hi " * 50, "yes"), {"text": "a cat " * 50}
    data = batches(write(tmp_path / "a", *objects), tokenizer, batch_size=2, seq_len=40, shuffle=False, epochs=2)
    seen = [segment for batch in data for segment in segments(batch)]
    whole = [data.documents[i] for i in range(3)]
    first = (tuple(whole[0].tokens[:40].tolist()), tuple(whole[0].learnt[:40].astype(int).tolist()))
    assert seen.count(first) == 2
    assert sum(len(tokens) for tokens, _ in seen) == 2 * (40 + len(whole[2].tokens))
    cut, out = "1 of 3 are truncated", "1 of 3 are skipped, since no answer begins within the row"
    told = [entry.message.rpartition("seq_len=40: ")[2] for entry in caplog.records]
    assert told == [f"{cut} so far", f"{cut}, {out}"]
    caplog.clear()
    documents = Documents(objects, tokenizer)
    documents.check()
    for _ in range(2):  # as in evaluations, of which the first one warns
        list(Batches(documents, 2, 40, epochs=1))
    assert [entry.message.rpartition("seq_len=40: ")[2] for entry in caplog.records] == [f"{cut}, {out}"]
    only = batches(write(tmp_path / "b", objects[1]), tokenizer, batch_size=2, seq_len=40)
    with pytest.raises(DataError, match=r"b: no chat has an answer within its first 40 tokens"):
        next(only)


# Batches


def expected(documents: Documents, length: int) -> Counter[Any]:
    found = (piece for one in documents for piece in one.pieces(length))
    return Counter((tuple(p.tokens.tolist()), tuple(p.learnt.astype(int).tolist())) for p in found)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [16, 64, 512])
def test_epoch_contains_every_document_once(documents: Documents, length: int, pack: bool) -> None:
    """Two epochs contain each document twice; the last batch is padded."""
    made = list(Batches(documents, 4, length, pack=pack, epochs=2))
    assert all(array.shape == (4, length) and array.dtype == np.int32 for batch in made for array in batch.values())
    seen = Counter(segment for batch in made for segment in segments(batch))
    assert seen == Counter({segment: 2 * n for segment, n in expected(documents, length).items()})
    if pack and length < 512:
        assert np.mean([batch["segment_ids"] > 0 for batch in made[:-1]]) > 0.9
    assert not pack or max(batch["segment_ids"].max() for batch in made) > 1


def test_shuffling_depends_on_epoch_and_seed(documents: Documents) -> None:
    """The order for a seed is fixed and does not depend on library versions."""

    def first(epochs: int = 3, **options: Any) -> list[list[int]]:
        made = Batches(documents, 1, 600, pack=False, epochs=epochs, **options)
        rows = [batch["tokens"][0, :6].tolist() for batch in made]
        return [rows[i : i + len(documents)] for i in range(0, len(rows), len(documents))]

    one, two, three = first()
    assert sorted(one) == sorted(two) == sorted(three) and one != two != three != one
    assert first() == [one, two, three] and first(seed=1)[0] not in (one, two, three)
    straight = [document.tokens[:6].tolist() for document in documents]
    assert [[t for t in row if t] for row in first(1, shuffle=False)[0]] == [[t for t in row if t] for row in straight]
    assert list(Batches(documents, 1, 600, seed=5)._order(0)[:6]) == [41, 22, 9, 39, 25, 65]


@given(
    st.integers(0, 2**32 - 1), st.integers(2, 200), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 80)
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resumed_batches_equal_an_uninterrupted_run(
    documents: Documents, seed: int, length: int, size: int, shuffle: bool, pack: bool, at: int
) -> None:
    """From any point, including after the end; the state passes through JSON into an advanced iterator."""

    def make() -> Batches:
        return Batches(documents, size, length, seed=seed, shuffle=shuffle, pack=pack, epochs=2)

    straight, resumed = make(), make()
    for _ in islice(straight, at):
        pass
    state = json.loads(json.dumps(straight.get_state()))
    next(resumed)
    resumed.set_state(state)
    assert resumed.get_state() == state
    equal(list(islice(straight, 30)), list(islice(resumed, 30)))
    assert straight.get_state() == resumed.get_state()


def test_resuming_tokenizes_few_documents_again(
    mixed: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only documents packed with the next row are tokenized again, and later epochs reuse the cache."""
    monkeypatch.setattr(data_module, "_window", lambda length: 4 * length)
    straight = batches(mixed, tokenizer, batch_size=2, seq_len=64, epochs=3)
    for _ in range(20):
        next(straight)
    state, after = straight.get_state(), next(straight)
    made: list[str] = []
    real = Documents._make
    monkeypatch.setattr(
        Documents, "_make", lambda self, record, where: (made.append(where), real(self, record, where))[1]
    )
    resumed = batches(mixed, tokenizer, batch_size=2, seq_len=64, epochs=3)
    resumed.set_state(state)
    equal([after], [next(resumed)])
    assert 0 < len(made) < 15 and len(resumed.documents) == 70
    for _ in resumed:
        pass
    assert len(made) == len(set(made)) <= 70


def test_interrupt_does_not_lose_rows(documents: Documents) -> None:
    straight, other = Batches(documents, 8, 64), Batches(documents, 8, 64)
    equal([next(straight)], [next(other)])
    after, rows = next(straight), other._rows

    def interrupted() -> Any:
        yield from islice(rows, 4)
        raise KeyboardInterrupt

    other._rows = interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(other)
    equal([after], [next(other)])


def test_process_shares_add_up_to_the_batch(documents: Documents) -> None:
    """All shares have the same state, which can be resumed with another number of processes."""
    assert jax.process_count() == 1
    whole = Batches(documents, 4, 64)
    halves = [Batches(documents, 4, 64, share=(i, 2)) for i in range(2)]
    for _ in range(5):
        batch, parts = next(whole), [next(half) for half in halves]
        equal([batch], [{name: np.concatenate([part[name] for part in parts]) for name in batch}])
    assert whole.get_state() == halves[0].get_state() == halves[1].get_state()
    last = Batches(documents, 4, 64, share=(3, 4))
    last.set_state(halves[0].get_state())
    np.testing.assert_array_equal(next(last)["tokens"][0], next(whole)["tokens"][3])
    for share in ((0, 3), (2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="cannot be split"):
            Batches(documents, 4, 64, share=share)


OTHER: list[tuple[str, Callable[[Documents], Batches]]] = [
    ("batch_size was 4, is 2", lambda d: Batches(d, 2, 64)),
    ("seq_len was 64, is 32", lambda d: Batches(d, 4, 32)),
    ("seed was 0, is 1", lambda d: Batches(d, 4, 64, seed=1)),
    ("shuffle was True, is False", lambda d: Batches(d, 4, 64, shuffle=False)),
    ("pack was True, is False, seed was 0, is 2", lambda d: Batches(d, 4, 64, pack=False, seed=2)),
]


@pytest.mark.parametrize(("message", "make"), OTHER)
def test_state_from_other_settings_is_refused(
    documents: Documents, message: str, make: Callable[[Documents], Batches]
) -> None:
    state = Batches(documents, 4, 64).get_state()
    with pytest.raises(DataError, match=rf"mixed\.jsonl: the state is from different data or settings \({message}\)"):
        make(documents).set_state(state)
    Batches(documents, 4, 64, epochs=5).set_state(state)  # more epochs are allowed


def test_state_from_other_data_is_refused(
    mixed: Path, tmp_path: Path, tokenizer: Tokenizer, documents: Documents
) -> None:
    state = Batches(documents, 4, 64).get_state()
    path = tmp_path / "a.jsonl"
    path.write_bytes(mixed.read_bytes())
    batches(path, tokenizer, batch_size=4, seq_len=64).set_state(state)  # another path is allowed
    path.write_bytes(mixed.read_bytes().replace(b"cat", b"dog"))
    with pytest.raises(DataError, match=r"\(file's sha256 was '[0-9a-f]+', is '[0-9a-f]+'\)"):
        batches(path, tokenizer, batch_size=4, seq_len=64).set_state(state)
    other = Tokenizer(tokenizer.backend, tokenizer.special_tokens, {"default": "x"}, "here")
    with pytest.raises(DataError, match=r"\(tokenizer's sha256 was"):
        batches(mixed, other, batch_size=4, seq_len=64).set_state(state)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"data": None},
        {"position": None},
        {"position": {"epoch": 0, "document": 0}},
        {"position": {"epoch": 0, "document": 0, "row": -1}},
        {"position": {"epoch": 0, "document": 0, "row": "1"}},
        {"position": {"epoch": True, "document": 0, "row": 1}},
        {"position": {"epoch": 0, "document": 0, "row": 1, "more": 1}},
    ],
)
def test_malformed_states(documents: Documents, change: dict[str, Any]) -> None:
    data = Batches(documents, 4, 64)
    with pytest.raises(DataError, match="pass the result of get_state"):
        data.set_state(data.get_state() | change)
    with pytest.raises(DataError, match="pass the result of get_state"):
        data.set_state({})


@pytest.mark.wrong_types
def test_invalid_settings(documents: Documents) -> None:
    for options in (
        {"batch_size": 0},
        {"seq_len": 1},
        {"seed": -1},
        {"epochs": 0},
        {"batch_size": 2.5},
        {"seed": True},
    ):
        with pytest.raises(ValueError, match=rf"^{next(iter(options))}=.*pass an int of at least"):
            Batches(documents, **({"batch_size": 2, "seq_len": 8} | options))


def test_model_separates_packed_documents(documents: Documents) -> None:
    """Logits of a packed document equal those of the document alone."""
    model = build_tiny("llama", vocab_size=768)
    batch = next(Batches(documents, 1, 96))
    out = forward(model, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]).logits
    at = batch["segment_ids"][0] == 2
    assert at.sum() > 10
    np.testing.assert_allclose(out[:, at], forward(model, batch["tokens"][:, at]).logits, atol=2e-4)


# grain


def test_rows_can_be_pickled(documents: Documents) -> None:
    """grain sends them to its worker processes."""
    copy = pickle.loads(pickle.dumps(Rows(documents, 32)))
    assert len(copy) == 70
    equal([copy[3]], [Rows(documents, 32)[3]])


def test_rows_of_chats_without_an_answer_are_padding(tokenizer: Tokenizer) -> None:
    """The question of the first chat is longer than a row."""
    rows = Rows(Documents([chat("Hi " * 50, "yes"), chat("Hi", "yes")], tokenizer), 40)
    assert len(rows) == 2 and all(len(array) == 40 for array in rows[0].values())
    assert not rows[0]["loss_mask"].any() and not rows[0]["segment_ids"].any()
    assert rows[1]["loss_mask"].any() and rows[1]["segment_ids"].any()


@pytest.mark.grain
def test_grain_resumes_over_rows(documents: Documents) -> None:
    """Uses grain's own shuffling, batching and iterator state."""
    import grain

    def make() -> Any:
        source = grain.MapDataset.source(Rows(documents, 48))
        return iter(source.shuffle(seed=3).repeat(2).batch(4).to_iter_dataset())

    straight, resumed = make(), make()
    first = [next(straight) for _ in range(7)]
    assert first[0]["tokens"].shape == (4, 48)
    state = straight.get_state()
    rest = list(straight)
    assert len(rest) == 28
    resumed.set_state(state)
    equal(rest, list(resumed))
