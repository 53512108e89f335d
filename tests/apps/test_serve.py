"""The server: its answers are those of `complete` and `score`, faults are refused by name, and no slot is lost."""

import asyncio
import base64
import contextlib
import copy
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Sampling
from nnxmoe.apps import cli
from nnxmoe.apps.cli import serve_command
from nnxmoe.apps.serve import engine_thread
from nnxmoe.apps.serve.answer_form import AnswerForm
from nnxmoe.apps.serve.app import PAGE, Endpoints
from nnxmoe.apps.serve.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, LABELS, NEUTRAL
from nnxmoe.apps.serve.formats import TokenTexts
from nnxmoe.apps.serve.reasoning import Reasoning, ReasoningSplit
from nnxmoe.apps.serve.schema import BaseRequest, ChatRequest, CompletionRequest, decode
from nnxmoe.apps.serve.server import serving_engine
from nnxmoe.apps.serve.settings import Refused
from tests.benchmarks.server import Load
from tests.support.serving import TIMEOUT, Client, Json, Running, serving, serving_tools

DEMO = Path(__file__).parents[2] / "models" / "demo"
STORY: Json = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
LONG: Json = STORY | {"max_tokens": 200, "min_tokens": 200}
CHAT: Json = {"model": "tiny", "messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def demo() -> tuple[nnxmoe.CausalLM, nnxmoe.Tokenizer]:
    return nnxmoe.from_pretrained(DEMO, dtype="float32"), nnxmoe.Tokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def server(demo: Any) -> Iterator[Running]:
    with serving(*demo, queue=6, body=20_000) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no slot of the shared server is taken."""
    yield
    if "server" in request.fixturenames:
        running: Running = request.getfixturevalue("server")
        running.gate.let(None)
        running.until(running.idle)


def one(running: Client, path: str, body: Json) -> Json:
    """The only choice of a response."""
    status, found = running.call(path, body)
    assert status == 200, found
    (choice,) = found["choices"]
    return choice


@pytest.mark.slow
def test_answers_can_be_sent_back(server: Running) -> None:
    """Clients append the message of an answer, with its null fields, to the conversation."""
    answer = one(server, CHATS, CHAT | {"max_tokens": 4})["message"]
    turns = [*CHAT["messages"], answer | {"tool_calls": None, "annotations": []}, {"role": "user", "content": "And 1?"}]
    more = {"messages": turns, "tools": None, "tool_choice": None, "store": False, "max_tokens": 4}
    assert one(server, CHATS, CHAT | more)["message"]["role"] == "assistant"


@pytest.mark.parametrize("path", [COMPLETIONS, pytest.param(CHATS, marks=pytest.mark.slow)])
def test_experts_of_each_token(demo: Any, path: str) -> None:
    """Whole and streamed, with samples and a stop string; only for requests that ask, and servers that allow it."""
    model, tokenizer = demo
    body = (STORY if path == COMPLETIONS else CHAT) | {"max_tokens": 10, "n": 2, "temperature": 0.8, "seed": 3}
    body |= {"stop": "e", "return_routed_experts": True}
    prompt: Any = STORY["prompt"] if path == COMPLETIONS else CHAT["messages"]
    with serving(model, tokenizer, return_routing=True) as running:
        status, whole = running.call(path, body)
        assert status == 200, whole
        chunks = [event["choices"][0] for event in running.stream(path, body)]
        assert "routed_experts" not in one(running, path, body | {"n": 1, "return_routed_experts": False})
    options: dict[str, Any] = {"max_new_tokens": 10, "n": 2, "sampling": Sampling(0.8), "seed": 3, "stop": "e"}
    wanted = nnxmoe.complete(model, [prompt], tokenizer, return_routing=True, **options)
    for choice, done in zip(whole["choices"], wanted, strict=True):
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        np.testing.assert_array_equal(experts, done.routing)
        assert experts.dtype == np.uint8 and len(experts) == len(done.prompt_ids) + len(done.ids) - 1
        mine = [chunk.get("routed_experts") for chunk in chunks if chunk["index"] == choice["index"]]
        assert mine == [None] * (len(mine) - 1) + [choice["routed_experts"]]


def test_experts_need_an_option_of_the_server(server: Running) -> None:
    status, found = server.call(COMPLETIONS, STORY | {"return_routed_experts": True})
    assert status == 400 and "--enable-return-routed-experts" in found["error"]["message"]
    assert "routed_experts" not in one(server, COMPLETIONS, STORY | {"return_routed_experts": False})


@pytest.mark.slow
def test_prompts_without_a_seed_differ(server: Running) -> None:
    body = {"model": "tiny", "prompt": ["Once upon a time"] * 3, "temperature": 2, "max_tokens": 12}
    status, found = server.call(COMPLETIONS, body)
    assert status == 200 and len({choice["text"] for choice in found["choices"]}) > 1


@pytest.mark.slow
def test_the_sampling_of_the_checkpoint_is_the_default(demo: Any) -> None:
    """Fields of generation_config.json hold where a request leaves them out, and rules hold always."""
    model, tokenizer = demo
    words = tokenizer.encode(" there was", add_special_tokens=False)
    fields = {"do_sample": True, "temperature": 1e-3, "top_k": 1, "suppress_tokens": words}
    changed = copy.copy(model)
    changed.generation_config = {**model.generation_config, **fields}
    (expected,) = nnxmoe.complete(
        model, ["Once upon a time"], tokenizer, max_new_tokens=6, logit_bias=dict.fromkeys(words, -100.0)
    )
    with serving(changed, tokenizer) as running:
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6}
        for more in ({}, {"temperature": 0}, {"temperature": None}):
            assert one(running, COMPLETIONS, body | more)["text"] == expected.text
        texts = {one(running, COMPLETIONS, body | {"temperature": 2, "top_k": -1})["text"] for _ in range(3)}
        assert len(texts) > 1


PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}


@pytest.mark.slow
def test_answers_follow_the_form_that_is_asked_for(server: Running) -> None:
    """A schema, any object, expressions, choices and grammars: whole and streamed, several samples, beside a plain one,
    which is not changed."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    chat: Json = {**CHAT, "response_format": form, "max_tokens": 60, "temperature": 1.2, "seed": 3}
    plain = one(server, CHATS, CHAT | {"max_tokens": 20})
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(one, server, CHATS, CHAT | {"max_tokens": 20})
        status, found = server.call(CHATS, chat | {"n": 4, "logprobs": True})
    assert status == 200 and beside.result() == plain
    texts = [choice["message"]["content"] for choice in found["choices"]]
    for text in texts:
        person = json.loads(text)
        assert person.keys() == {"name", "age"} and len(person["name"]) < 10 and 0 <= person["age"] < 100
    events = server.stream(CHATS, chat | {"stream": True})
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == texts[0]
    assert one(server, CHATS, chat | {"response_format": {"type": "json_object"}})["message"]["content"][0] == "{"
    asked: list[tuple[Json, str]] = [
        ({"guided_regex": r"\d{3}-[ab]"}, r"\d{3}-[ab]"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'start: "a" "b"+ "."'}, r"ab+\."),
        ({"guided_json": {"const": 5}}, "5"),
    ]
    for more, pattern in asked:
        text = one(server, COMPLETIONS, STORY | {"max_tokens": 30, "temperature": 1.5, "seed": 1} | more)["text"]
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "answer"),
    [
        (False, "<think>\nI <b>\n\nx </thin k\n</think>\n\nThe  answer\n", "I <b>\n\nx </thin k", "The  answer\n"),
        (False, "plain <think> x</think>", None, "plain <think> x</think>"),
        (False, "\n plain", None, "\n plain"),
        (False, "<think>\n\n</think>\n\nhi", None, "hi"),
        (False, "<thi", None, "<thi"),
        (True, "so\n</think>\n\nok", "so", "ok"),
        (True, "cut off </thi", "cut off </thi", ""),
        (True, "\n<think>\nso</think>ok", "so", "ok"),
        (True, "<thi", "<thi", ""),
        (True, "", None, ""),
    ],
)
def test_reasoning_is_split_from_the_answer(inside: bool, text: str, reasoning: str | None, answer: str) -> None:
    """As a whole, and in pieces of every size."""
    tags = Reasoning("<think>", "</think>", inside)
    whole, _ = AnswerForm(tags).split(text)
    assert (whole.reasoning or None, whole.content) == (reasoning, answer)
    for size in range(1, len(text) + 1):
        splitter, found = ReasoningSplit(tags), ["", ""]
        pieces = [splitter.put(text[at : at + size]) for at in range(0, len(text), size)]
        for thought, said in (*pieces, splitter.end()):
            found[0], found[1] = found[0] + thought, found[1] + said
        assert (found[0].rstrip() or None, found[1]) == (reasoning, answer), size


@pytest.mark.slow
def test_models_that_reason(demo: Any) -> None:
    """The prompt ends within the reasoning, so that the answer is reasoning until the tag; else there is none."""
    model, tokenizer = demo
    thinks = copy.copy(tokenizer)
    thinks.chat_templates = {
        "default": tokenizer.chat_template + "{# </think> #}{{ {1: '<think>', 0: '<think></think>'}[thinking] or '' }}"
    }
    with serving(model, thinks) as running:
        plain = one(running, CHATS, CHAT)["message"]
        assert (plain["content"], plain["reasoning_content"]) == ("47 + 38 = 85.", None)
        body = CHAT | {"chat_template_kwargs": {"thinking": True}, "max_tokens": 12}
        message = one(running, CHATS, body)["message"]
        assert message["content"] == "" and message["reasoning_content"]
        deltas = [event["choices"][0]["delta"] for event in running.stream(CHATS, body | {"stream": True})]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thought.rstrip() == message["reasoning_content"]
        assert not "".join(delta.get("content", "") for delta in deltas)
        form = {"response_format": {"type": "json_object"}, "max_tokens": 60}
        shut = CHAT | {"chat_template_kwargs": {"thinking": False}}
        assert one(running, CHATS, shut | form)["message"]["content"].startswith("{")
        message = one(running, CHATS, body | form)["message"]  # the form is that of the answer, after the reasoning
        assert not message["content"] and message["reasoning_content"]


def test_special_tokens_that_are_kept(demo: Any) -> None:
    _, tokenizer = demo
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = [first, *tokenizer.encode("Hi", add_special_tokens=False), last]
    stream = nnxmoe.tokenizer.tokenizer.TextStream(tokenizer, keep=frozenset([last]))
    assert "".join(map(stream.put, ids)) + stream.end() == "Hi<|eos|>"


@pytest.mark.slow
def test_special_tokens_as_stop_strings(server: Running, demo: Any) -> None:
    _, tokenizer = demo
    (bos,) = tokenizer.encode(tokenizer.bos_token, add_special_tokens=False)
    body = STORY | {"stop": [tokenizer.bos_token], "logit_bias": {str(bos): 100}}
    assert one(server, COMPLETIONS, body)["finish_reason"] == "stop"


def test_connections_without_a_request_are_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnxmoe.apps.serve.server, "HEAD_SECONDS", 0.3)
    for sent in (b"", HEAD):
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as silent:
            silent.sendall(sent)
            assert silent.recv(100) == b""


def test_completions_are_those_of_complete(server: Running, demo: Any) -> None:
    """Texts and ids as prompts, several prompts and samples, and the same seed."""
    model, tokenizer = demo
    prompts, sampling = ["Once upon a time", "The fox"], nnxmoe.Sampling(temperature=0.9, top_p=0.95)
    expected = list(nnxmoe.complete(model, prompts, tokenizer, max_new_tokens=6, sampling=sampling, n=2, seed=7))
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0.9, "top_p": 0.95, "n": 2, "seed": 7}
    for given in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        status, found = server.call(COMPLETIONS, body | {"prompt": given})
        assert status == 200
        assert [choice["text"] for choice in found["choices"]] == [each.text for each in expected]
        assert [choice["finish_reason"] for choice in found["choices"]] == [each.finish for each in expected]
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        made = sum(len(each.ids) for each in expected)
        given_tokens = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
        usage = {"prompt_tokens": given_tokens, "completion_tokens": made, "total_tokens": given_tokens + made}
        assert found["usage"] == usage and found["object"] == "text_completion"
    alone = {"prompt": tokenizer.encode(prompts[1]), "n": 1}
    assert one(server, COMPLETIONS, body | alone)["text"] == expected[2].text


def test_the_default_prefix_cache_has_the_memory_of_four_slots(demo: Any) -> None:
    engine = serving_engine(demo[0], slots=1, capacity=64)
    assert engine.prefix_cache.max_prefixes == 4
    assert serving_engine(demo[0], slots=1, capacity=64, prefix_bytes=0).prefix_cache.max_prefixes == 0


def test_options_reach_the_engine(server: Running, demo: Any) -> None:
    _, tokenizer = demo
    text = one(server, COMPLETIONS, STORY | {"max_tokens": 12})["text"]
    stop = text[5:8]
    stopped = one(server, COMPLETIONS, STORY | {"max_tokens": 12, "stop": ["no such text", stop]})
    assert stopped["text"] == text[: text.index(stop)] and stopped["finish_reason"] == "stop"
    (banned,) = tokenizer.encode(text, add_special_tokens=False)[:1]
    biased = one(server, COMPLETIONS, STORY | {"logit_bias": {str(banned): -100}, "logprobs": 0})
    assert tokenizer.decode([banned]) != biased["logprobs"]["tokens"][0]
    assert one(server, COMPLETIONS, STORY | {"max_tokens": 0}) == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    seeded = [one(server, COMPLETIONS, STORY | {"temperature": 2, "seed": seed})["text"] for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    unseeded = {one(server, COMPLETIONS, STORY | {"temperature": 2})["text"] for _ in range(3)}
    assert len(unseeded) > 1


@pytest.mark.slow
def test_echoed_log_probabilities_are_those_of_score(server: Running, demo: Any) -> None:
    model, tokenizer = demo
    prompt = "Once upon a time there was a green fox"
    (expected,) = nnxmoe.score(model, [prompt], tokenizer, top=2)
    found = one(server, COMPLETIONS, STORY | {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1})
    logprobs, count = found["logprobs"], len(expected.ids) + 1
    assert found["text"].startswith(prompt) and "".join(logprobs["tokens"]) == found["text"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:count] == pytest.approx(expected.logprobs.tolist(), abs=1e-5)
    assert len(logprobs["tokens"]) == count + 1 == len(logprobs["text_offset"])
    for place in range(1, count):
        top, chosen = logprobs["top_logprobs"][place], logprobs["token_logprobs"][place]
        assert 2 <= len(top) <= 3
        assert (max(top.values()) == chosen) == expected.greedy[place - 1]
    for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert found["text"][offset:].startswith(text)
    ids = tokenizer.encode(prompt)
    again = one(server, COMPLETIONS, STORY | {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1})
    assert again["logprobs"] == logprobs and again["text"] == found["text"]
    single = one(server, COMPLETIONS, STORY | {"prompt": ids[:1], "echo": True, "logprobs": 1, "max_tokens": 0})
    assert single["logprobs"]["token_logprobs"] == [None] and single["text"] == tokenizer.decode(ids[:1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_streams_add_up_to_the_whole(server: Running, path: str) -> None:
    """Texts, log-probabilities, reasons and usage, with samples side by side and a stop string."""
    body = (STORY if path == COMPLETIONS else CHAT) | {"max_tokens": 10, "n": 2, "temperature": 0.8, "seed": 3}
    body |= {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    _, whole = server.call(path, body | {"stop": " w"})
    events = server.stream(path, body | {"stop": " w", "stream_options": {"include_usage": True}})
    *chunks, last = events
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in chunks) and len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in chunks if event["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if path == COMPLETIONS:
            assert "".join(part["text"] for part in mine) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [one for part in mine for one in part["logprobs"][name]] == values
        else:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
            parts = [one for part in mine[1:] for one in part["logprobs"]["content"]]
            assert parts == choice["logprobs"]["content"]


@pytest.mark.slow
def test_chats_are_rendered_by_the_template(server: Running, demo: Any) -> None:
    model, tokenizer = demo
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 47 + 38?"}]
    (expected,) = nnxmoe.complete(model, [prompt], tokenizer, max_new_tokens=20)
    parts = [
        prompt[0],
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "47 + 38?"}]},
    ]
    for messages in (prompt, parts):
        found = one(server, CHATS, CHAT | {"messages": messages, "max_completion_tokens": 20})
        assert found["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert found["finish_reason"] == "stop"
    assert one(server, CHATS, CHAT)["finish_reason"] == "stop"  # room by default, up to the slot's end


_TEXT = "messages[0].content[0].type '{}' is not supported: send a text, or text parts"
COMPLETION_FAULTS: list[tuple[Json, int, str | None, str]] = [
    ({"model": "gpt-4"}, 404, "model", "'tiny'"),
    ({"tools": [{}]}, 400, "tools", "use /v1/chat/completions"),
    ({"foo": 1}, 400, "foo", "foo is not a field of this API: leave it out"),
    ({"temprature": 1}, 400, "temprature", "did you mean temperature?"),
    ({"input": "x"}, 400, "input", "input is not a field of this API: leave it out"),  # no field is meant but this one
    ({"max tokens": 1}, 400, "max tokens", "max tokens is not a field of this API: did you mean max_tokens?"),
    ({"stream_options": {"foo": 1}, "stream": True}, 400, "foo", "stream_options.foo is not a field"),
    (
        {"stream_options": {"include_usage": "yes"}, "stream": True},
        400,
        "stream_options",
        "true or false, not a string",
    ),
    ({"frequency_penalty": 2.5}, 400, "frequency_penalty", "must be a number <= 2"),
    ({"presence_penalty": -3}, 400, "presence_penalty", "must be a number >= -2"),
    ({"use_beam_search": True}, 400, "use_beam_search", "not supported: leave it out"),
    ({"repeat_penalty": 1.1}, 400, "repeat_penalty", "use repetition_penalty"),
    ({"skip_special_tokens": False}, 400, "skip_special_tokens", "not supported"),
    ({"skip_special_tokens": 1}, 400, "skip_special_tokens", "not supported"),
    ({"stop_token_ids": [768]}, 400, "stop_token_ids", "767"),
    ({"stop_token_ids": [1] * 16, "stop": "a"}, 400, "stop_token_ids", "17 exceeds this server's maximum of 16"),
    ({"ignore_eos": True, "guided_regex": "a"}, 400, "ignore_eos", "guided_regex exclude each other"),
    ({"max_tokens": "5"}, 400, "max_tokens", "max_tokens must be an integer, not a string: write it without quotes"),
    ({"prompt": [5] * 256, "max_tokens": None}, 400, "prompt", "(256 tokens) leaves no room for an answer in 256"),
    ({"suffix": "x"}, 400, "suffix", "not supported"),
    ({"best_of": 3}, 400, "best_of", "not supported"),
    ({"echo": True, "stream": True}, 400, "echo", "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
    ({"temperature": -1}, 400, "temperature", ">= 0"),
    ({"temperature": 9}, 400, "temperature", "<= 2"),
    ({"temperature": "hot"}, 400, "temperature", "a number, not a string"),
    ({"top_p": 0}, 400, "top_p", "> 0"),
    ({"n": True}, 400, "n", "int"),
    ({"n": 17}, 400, "n", "16"),
    ({"max_tokens": -1}, 400, "max_tokens", ">= 0"),
    ({"max_tokens": 1000}, 400, "max_tokens", "exceed 256 tokens per row"),
    ({"min_tokens": 7}, 400, "min_tokens", "more than"),
    ({"logprobs": 6}, 400, "logprobs", "5"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": ["a", 1]}, 400, "prompt", "mixes"),
    ({"prompt": [1.5]}, 400, "prompt", "prompt[0] must be an integer, a string or a list"),
    ({"prompt": [768]}, 400, "prompt", "767"),
    ({"prompt": ["a"] * 129}, 400, "prompt", "128"),
    ({"prompt": ["a"] * 9}, 400, "n", "maximum of 8"),
    ({"stop": [""]}, 400, "stop", "0 characters"),
    ({"stop": ["a"] * 17}, 400, "stop", "16"),
    ({"stop": "a" * 257}, 400, "stop", "256"),
    ({"seed": 2**63}, 400, "seed", "9223372036854775807"),
    ({"logit_bias": {"768": 1}}, 400, "logit_bias", "767"),
    ({"logit_bias": {str(i): 1 for i in range(65)}}, 400, "logit_bias", "64"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "a key of logit_bias must be an integer, not a string"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias", "<= 100"),
]
CHAT_FAULTS: list[tuple[Json, int, str | None, str]] = [
    ({"messages": []}, 400, "messages", "empty"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages", "unknown role robot"),
    ({"messages": [{"content": "hi"}]}, 400, "role", 'messages[0].role is missing: send {"role"'),
    ({"messages": [{"role": "function", "content": "1"}]}, 400, "messages", "use the role tool, with tool_call_id"),
    ({"messages": ["hi"]}, 400, "messages", "messages[0] must be an object, not a string"),
    ({"tools": {"type": "function"}}, 400, "tools", "tools must be a list, not an object: send a list of tools"),
    ({"thinking": {"type": "disabled"}}, 400, "thinking", "or use chat_template_kwargs"),
    ({"prompt": "hi"}, 400, "prompt", "or use messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", _TEXT.format("image_url")),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_text"}]}]},
        400,
        "messages",
        _TEXT.format("input_text"),
    ),
    ({"messages": [{"role": "user", "content": "a " * 400}]}, 400, "messages", "leaves no room for an answer in 256"),
    ({"tools": [{"type": "function", "name": "f"}]}, 400, "name", 'write {"type": "function", "function": {"name"'),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools", "tools[0].function.name"),
    (
        {"tool_choice": "any"},
        400,
        "tool_choice",
        'tool_choice \'any\' is not supported: send "none", "auto", "required"',
    ),
    ({"best_of": 2}, 400, "best_of", "not supported"),
    ({"add_generation_prompt": False}, 400, "add_generation_prompt", "not supported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "tools is not supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "tool_calls", "tool_calls is not supported"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        400,
        "messages",
        "function_call is not supported: write it as",
    ),
    ({"messages": [{"role": "user", "content": "hi", "audio": {"id": "a"}}]}, 400, "audio", "does not read it"),
    ({"tool_choice": "required"}, 400, "tool_choice", "tool_choice needs tools"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", "needs the type json_schema"),
    ({"response_format": {"type": "xml"}}, 400, "response_format", "response_format.type 'xml' is not supported"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        400,
        "response_format",
        "x",
    ),
    ({"guided_regex": "(", "stop": None}, 400, "guided_regex", "llguidance rejects the grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice", "exclude each other"),
    ({"guided_grammar": "start: nothing"}, 400, "guided_grammar", "llguidance rejects the grammar"),
    ({"guided_json": "{"}, 400, "guided_json", "the schema is not JSON"),
    ({"service_tier": "flex"}, 400, "service_tier", "not supported"),
    ({"modalities": ["text", "audio"]}, 400, "modalities", "not supported"),
    ({"store": True}, 400, "store", "not supported"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort", "does not read it"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template_kwargs", "chat_template"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"max_tokens": 2, "max_completion_tokens": 1}, 400, "max_tokens", "not both"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "messages"),
]


def test_fields_that_ask_for_nothing_are_accepted(server: Running) -> None:
    """Null for any field, values without effect, labels, fields of messages for the template, and slashes."""
    chat, told = CHAT | {"max_tokens": 2}, CHAT["messages"][0]
    neutral: Json = {"functions": None, "function_call": None, "tools": [], "tool_choice": "none", "metadata": {}}
    neutral |= {
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "modalities": ["text"],
        "store": False,
        "user": "u",
    }
    neutral |= {"verbosity": "medium", "reasoning_effort": "none", "top_logprobs": 0, "max_completion_tokens": 2}
    neutral |= {
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
        "prompt_cache_key": "k",
        "no_field": None,
    }
    wanted = one(server, CHATS, chat)["message"]
    for change in (neutral, {"stream_options": {"include_usage": None}}, {"stream_options": {"include_usage": False}}):
        assert one(server, CHATS, chat | change)["message"] == wanted
    for more in ({"name": "bob"}, {"audio": None, "images": []}, {"id": 7}):
        assert one(server, CHATS, chat | {"messages": [told | more]})["message"] == wanted
    assert server.stream(CHATS, chat | {"stream_options": {"include_usage": None}})[-1]["choices"]
    assert one(
        server, COMPLETIONS + "/", STORY | {"suffix": "", "best_of": 1, "logit_bias": None, "metadata": {"a": "b"}}
    )
    assert server.call("/v1/models/")[1]["object"] == "list"
    developer, system = ([{"role": role, "content": "Be brief."}, told] for role in ("developer", "system"))
    first, second = (one(server, CHATS, chat | {"messages": messages}) for messages in (developer, system))
    assert first == second


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_neutral_value_is_left_out(kind: type[BaseRequest]) -> None:
    """Whether the field is supported or not; null for every field and below, and hints for caches, too."""
    chat = kind is ChatRequest
    base: Json = {"messages": CHAT["messages"]} if chat else {"prompt": "x"}
    table = NEUTRAL | (CHAT_NEUTRAL if chat else COMPLETION_NEUTRAL)
    assert not {name for name in table.keys() & LABELS}
    plain = decode(json.dumps(base).encode(), kind)
    others = {name: ("", [], {}) for name in (*table, "no_field") if name not in kind.__struct_fields__}
    others |= dict.fromkeys(LABELS, (0.5, "x"))
    for name, values in [*table.items(), *others.items()]:
        for value in (None, *values):
            assert decode(json.dumps({name: value} | base).encode(), kind) == plain, (name, value)
        if name in table and name not in {*kind.__struct_fields__, "messages", "prompt"}:
            for value in ("other", 7, [1], *(int(one) for one in values if isinstance(one, bool))):
                with pytest.raises(Refused, match=f"^{name} is not supported: leave it out") as refused:
                    decode(json.dumps({name: value} | base).encode(), kind)
                assert refused.value.param == name


def test_integral_floats_are_accepted() -> None:
    body = {"prompt": [[5, 6]], "max_tokens": 5, "n": 1, "temperature": 1, "stop_token_ids": [3]}
    floats = body | {"prompt": [[5.0, 6.0]], "max_tokens": 5.0, "n": 1.0, "temperature": 1.0, "stop_token_ids": [3.0]}
    requests = [decode(json.dumps(fields).encode(), CompletionRequest) for fields in (body, floats)]
    assert requests[0] == requests[1]
    assert isinstance(requests[1].prompt[0][0], int)
    with pytest.raises(Refused, match="max_tokens must be an integer, not a number with a fraction"):
        decode(json.dumps(body | {"max_tokens": 5.5}).encode(), CompletionRequest)


def test_nested_fields_that_ask_for_nothing() -> None:
    hint = {"cache_control": {"type": "ephemeral"}, "other": None}
    function: Json = {"name": "f", "parameters": {"default": None}}
    plain: Json = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": None}}},
        "stream": True,
    }
    (message,), ((part,), (tool,)) = plain["messages"], (plain["messages"][0]["content"], plain["tools"])
    form, choice = plain["response_format"], plain["tool_choice"]
    hinted: Json = {
        "messages": [message | hint | {"content": [part | hint]}],
        "tools": [tool | hint | {"function": function | hint}],
        "tool_choice": choice | {"other": None, "function": choice["function"] | {"other": None}},
        "stream_options": {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False} | hint,
        "response_format": form | {"other": None, "json_schema": form["json_schema"] | {"name": None, "strict": None}},
        "stream": True,
    }
    expected = decode(json.dumps(plain).encode(), ChatRequest)
    found = decode(json.dumps(hinted).encode(), ChatRequest)
    assert found.tools is not None and found.tools[0].function.parameters == {"default": None}
    found.stream_options = expected.stream_options  # which says False where the other says nothing
    assert found == expected


@pytest.mark.slow
def test_fields_of_other_servers(server: Running, demo: Any) -> None:
    """vLLM's ids that end an answer and usage in every chunk, penalties, and no name of the model."""
    model, tokenizer = demo
    for path, body in ((COMPLETIONS, STORY), (CHATS, CHAT | {"max_tokens": 8})):
        plain = one(server, path, body)
        assert one(server, path, {name: value for name, value in body.items() if name != "model"}) == plain
        assert one(server, path, body | {"model": ""}) == plain
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = server.stream(path, body | {"n": 2, "stream_options": options})
        made = [(event["choices"][0]["index"], event["usage"]) for event in chunks]
        prompt = last["usage"]["prompt_tokens"]
        for index in (0, 1):
            counts = [usage["completion_tokens"] for i, usage in made if i == index]
            assert counts == sorted(counts) and all(usage["prompt_tokens"] == prompt for _, usage in made)
            assert counts[0] <= 1 and counts[-1] * 2 == last["usage"]["completion_tokens"]
    sampling = nnxmoe.Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 40}
    (expected,) = nnxmoe.complete(model, [STORY["prompt"]], tokenizer, max_new_tokens=40, sampling=sampling)
    assert one(server, COMPLETIONS, STORY | penalties)["text"] == expected.text
    assert one(server, COMPLETIONS, STORY | {"max_tokens": 40})["text"] != expected.text
    assert one(server, CHATS, CHAT)["finish_reason"] == "stop"
    assert one(server, CHATS, CHAT | {"ignore_eos": True, "max_tokens": 60})["finish_reason"] == "length"
    stopped = one(server, COMPLETIONS, STORY | {"stop_token_ids": [expected.ids[0]], "max_tokens": 8})
    assert stopped["finish_reason"] == "stop" and stopped["text"] == tokenizer.decode(expected.ids[:1])
    room = one(server, COMPLETIONS, {"prompt": [5] * 250, "ignore_eos": True, "logprobs": 0})
    assert len(room["logprobs"]["tokens"]) == 6 and room["finish_reason"] == "length"


def test_requests_are_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A line each, but for successful polls; control characters of a path are escaped."""
    caplog.set_level("INFO", logger="nnxmoe")
    one(server, COMPLETIONS, STORY)
    server.stream(CHATS, CHAT | {"max_tokens": 3, "min_tokens": 3})
    for path in ("/health", "/v1/%1b[2J", "/v1/models/other"):
        server.call(path)
    logged: Callable[[], list[str]] = lambda: [m for m in caplog.messages if m.startswith(("GET", "POST"))]  # noqa: E731
    server.until(lambda: len(logged()) > 3)
    first, second, *refused = logged()
    number = r"[0-9.]+"
    assert re.fullmatch(rf"POST /v1/completions 200, {number} s, \d+ \+ 6 tokens, {number} per second", first)
    assert re.fullmatch(rf"POST /v1/chat/completions 200, {number} s, \d+ \+ 3 tokens, {number} per second", second)
    assert [re.sub(r", .*", "", line) for line in refused] == ["GET /v1/\\x1b[2J 404", "GET /v1/models/other 404"]
    assert ": the model 'other' does not exist" in refused[1]


@pytest.mark.slow
def test_offsets_after_characters_of_several_tokens(server: Running, demo: Any) -> None:
    """`text_offset` counts characters of the text, also behind an emoji, echoed or made."""
    _, tokenizer = demo
    emoji = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(emoji) > 1
    prompt = "A 🦊 and 🦊 x"
    found = one(server, COMPLETIONS, STORY | {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2})
    logprobs = found["logprobs"]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in text or found["text"].startswith(text, offset)
    assert {found["text"][offset] for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            if "\ufffd" in text} == {"🦊"}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "status", "param", "why"),
    [(COMPLETIONS, *fault) for fault in COMPLETION_FAULTS] + [(CHATS, *fault) for fault in CHAT_FAULTS],
)
def test_faults_are_refused_by_name(
    server: Running, path: str, change: Json, status: int, param: str | None, why: str
) -> None:
    found = server.call(path, (STORY if path == COMPLETIONS else CHAT) | change)
    assert found[0] == status and why in found[1]["error"]["message"], found
    assert found[1]["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": NaN}', 400),
        (b"[" * 19_000, 400),
        (b'{"model": "tiny", "prompt": ' + b"[" * 19_000, 400),
        (b'{"model": "tiny", "messages": [], "chat_template_kwargs": {"a": ' + b"[" * 19_000, 400),
        (b" " * 20_001, 413),
        (b" " * 3_000_000, 413),
    ],
)
def test_malformed_bodies(server: Running, body: bytes, status: int) -> None:
    for path in (COMPLETIONS, CHATS):
        found = server.call(path, body)
        assert found[0] == status and found[1]["error"]["message"], found


@pytest.mark.slow
def test_http_faults(server: Running) -> None:
    assert server.call("/v1/completions")[0] == 405 and server.call("/v1/nothing")[0] == 404
    assert server.call(COMPLETIONS, STORY, content_type="text/plain")[0] == 415
    assert server.call("/v1/models", host="evil.example")[0] == 200  # the fixture's server has no list of hosts
    assert server.call("/v1/models/tiny")[1]["id"] == "tiny" and server.call("/v1/models/other")[0] == 404
    assert server.call("/health") == (200, {"status": "ok"})
    for request in (b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as raw:
            raw.sendall(request)
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as raw:
        raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):  # 25,000 bytes, and no end
            raw.sendall(b"1388\r\n" + b" " * 5000 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_key_and_hosts(demo: Any) -> None:
    with serving(*demo, key="secret", hosts=frozenset({"127.0.0.1", "[::1]"}), body_seconds=0.3) as running:
        assert running.call("/health")[0] == running.call("/")[0] == 200
        for key in ("", "Bearer ", "Bearer wrong", "Basic secret", "Bearer s\xe9cret"):
            for path, body in (("/v1/models", None), (COMPLETIONS, STORY), ("/metrics", None)):
                status, found = running.call(path, body, authorization=key)
                assert status == 401 and found["error"]["code"] == "invalid_api_key"
        right = {"authorization": "bearer secret"}
        assert running.call(COMPLETIONS, STORY, **right)[0] == 200
        for host, status in (("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example:80", 403), ("", 403)):
            assert running.call("/v1/models", host=host, **right)[0] == status
        with socket.create_connection(("127.0.0.1", running.port), TIMEOUT) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n")
            raw.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")  # and the rest never comes
            assert raw.recv(100).startswith(b"HTTP/1.1 408")


def open_stream(running: Client, body: Json) -> socket.socket:
    """A connection to which a request was sent."""
    raw, text = socket.create_connection(("127.0.0.1", running.port), TIMEOUT), json.dumps(body).encode()
    raw.sendall(HEAD + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return raw


@pytest.mark.parametrize("body", [LONG | {"stream": True}, LONG, LONG | {"n": 2}, LONG | {"echo": True, "logprobs": 1}])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_client_that_goes_away_frees_its_slots(server: Running, body: Json, steps: int) -> None:
    """Streaming or not, while its prompt waits or its answer is made; the next request is answered."""
    before = server.metric("cancelled_total")
    server.gate.let(steps)
    raw = open_stream(server, body)
    server.until(lambda: server.engine.running + server.engine.waiting > 0 and server.gate.steps == 0)
    if steps:  # an abrupt end, RST, instead of FIN
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
    server.until(lambda: server.metric("cancelled_total") == before + 1)
    assert server.metric("samples_admitted") == 0
    server.gate.let(1)  # the thread reads its commands between steps
    server.until(lambda: server.engine.running == server.engine.waiting == 0)
    server.gate.let(None)
    assert one(server, COMPLETIONS, STORY)["finish_reason"] == "length"


@pytest.mark.slow
def test_a_full_queue_answers_429(server: Running) -> None:
    server.gate.let(0)
    waiting = [open_stream(server, LONG) for _ in range(8)]
    server.until(lambda: server.metric("samples_admitted") == 8)
    connection = server.connect()
    with contextlib.closing(connection):
        response = server.ask(connection, COMPLETIONS, STORY)
        assert response.status == 429 and response.getheader("retry-after") == "1"
    waiting.pop().close()
    server.until(lambda: server.metric("samples_admitted") == 7)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(one, server, COMPLETIONS, STORY)
        server.until(lambda: server.metric("samples_admitted") == 8)
        for raw in waiting:
            raw.close()
        server.gate.let(None)
        assert last.result()["finish_reason"] == "length"


def test_a_reader_that_does_not_read_delays_no_other(server: Running) -> None:
    stuck = [open_stream(server, LONG | {"stream": True, "logprobs": 5}) for _ in range(2)]
    assert one(server, COMPLETIONS, STORY)["finish_reason"] == "length"
    server.until(lambda: server.engine.running == 0)
    for raw in stuck:
        with raw:
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += raw.recv(1 << 16)
            assert b"data: [DONE]" in text and text.count(b'"finish_reason":"length"') == 1


@pytest.mark.slow
def test_requests_end_after_their_time(demo: Any) -> None:
    with serving(*demo, seconds=0.5) as running:
        running.gate.let(4)
        status, found = running.call(COMPLETIONS, LONG)
        assert status == 504 and "0.5 s" in found["error"]["message"]
        running.gate.let(None)
        running.until(running.idle)
        running.gate.let(4)
        connection = running.connect()
        with contextlib.closing(connection):
            response = running.ask(connection, COMPLETIONS, LONG | {"stream": True})
            *_, last = response.read().decode().split("\n\n")[:-1]
        assert response.status == 200 and "0.5 s" in json.loads(last.removeprefix("data: "))["error"]["message"]
        running.gate.let(None)
        running.until(running.idle)


def test_jobs_are_admitted_together_or_not_at_all(demo: Any) -> None:
    model, tokenizer = demo
    engine = nnxmoe.Engine(model, slots=2, capacity=64)

    async def submit() -> None:
        thread = engine_thread.EngineThread(engine, tokenizer, asyncio.get_running_loop())
        jobs = [engine_thread.SampleJob((5,) * n, nnxmoe.RequestOptions(4), (), lambda piece: None) for n in (8, 61)]
        with pytest.raises(ValueError, match="exceed the capacity of 64"):
            await thread.submit(jobs)
        assert engine.waiting == engine.running == 0
        await asyncio.to_thread(thread.close)

    asyncio.run(submit())


def test_a_failed_engine_is_reported(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To those who wait, to those who come later, and by /health."""
    with serving(*demo) as running:

        def fail() -> Any:
            raise RuntimeError("/home/me/models/x.safetensors: out of memory")

        monkeypatch.setattr(running.engine, "step", fail)
        for _ in range(2):
            status, found = running.call(COMPLETIONS, STORY)
            assert status == 503 and found["error"]["type"] == "server_error"
            assert found["error"]["message"].endswith(": x.safetensors: out of memory")
        status, found = running.call(COMPLETIONS, STORY | {"stream": True})
        assert status == 503
        status, found = running.call("/health")
        assert status == 503 and "/home" not in found["error"]["message"]


def test_a_failed_score_is_reported(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine_thread, "score", fail)
    with serving(*demo) as running:
        status, found = running.call(COMPLETIONS, STORY | {"echo": True, "logprobs": 1})
        assert status == 503 and "out of memory" in found["error"]["message"]
        assert running.call("/health")[0] == 503


@pytest.mark.slow
def test_answers_of_nan_logits_are_errors(demo: Any) -> None:
    """They have the status and type that clients know, in a stream as its last event; the server goes on."""
    model = nnx.merge(*nnx.split(demo[0]), copy=True)
    model.norm.scale.set_value(model.norm.scale.get_value() * jnp.nan)
    with serving(model, demo[1]) as running:
        for path, body in (
            (COMPLETIONS, STORY),
            (COMPLETIONS, STORY | {"prompt": ["Once", "Twice"], "n": 2}),
            (COMPLETIONS, STORY | {"echo": True, "logprobs": 1, "max_tokens": 0}),
            (CHATS, CHAT | {"logprobs": True}),
        ):
            status, found = running.call(path, body)
            assert status == 500 and found["error"]["type"] == "server_error", found
            assert "logits are NaN or infinite" in found["error"]["message"]
        status, text = running.call(COMPLETIONS, STORY | {"stream": True})
        *_, last = [line for line in text.splitlines() if line]
        assert status == 200 and json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert running.call("/health")[0] == 200
        running.until(running.idle)


def test_stopping_lets_requests_finish(demo: Any) -> None:
    with serving(*demo) as running:
        running.gate.let(3)
        raw = open_stream(running, LONG | {"stream": True})
        running.until(lambda: running.gate.steps == 0)
        running.server.should_exit = True
        running.until(lambda: not _answers(running.port))
        running.gate.let(None)
        text = b""
        with raw:
            while part := raw.recv(1 << 16):
                text += part
        assert b"data: [DONE]" in text


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT):
        return True
    return False


@pytest.mark.slow
def test_many_requests_at_once(server: Running, demo: Any) -> None:
    """Eight at a time of different lengths: each gets its own answer."""
    model, tokenizer = demo
    prompts = [("The fox " * (i % 5 + 1)).strip() for i in range(24)]
    expected = [each.text for each in nnxmoe.complete(model, prompts, tokenizer, max_new_tokens=8, slots=2)]
    with ThreadPoolExecutor(8) as pool:
        asked: Callable[[str], str] = lambda prompt: one(  # noqa: E731
            server, COMPLETIONS, STORY | {"prompt": prompt, "max_tokens": 8}
        )["text"]
        assert list(pool.map(asked, prompts)) == expected


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    status, page = server.call("/")
    assert status == 200 and page == PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:,)|https?:|//[a-z]+\.|@import|innerHTML", page)
    connection = server.connect()
    with contextlib.closing(connection):
        policy = server.ask(connection, "/").getheader("content-security-policy")
    assert policy is not None and policy.startswith("default-src 'none'")


def test_texts_of_single_tokens(demo: Any) -> None:
    _, tokenizer = demo
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("Once upon — a time", add_special_tokens=False)
    assert bytes(byte for i in ids for byte in texts.bytes(i) or []).decode() == "Once upon — a time"
    assert any("\ufffd" in texts.text(i) for i in ids)  # parts of a character
    assert texts.text(tokenizer.encode(" upon", add_special_tokens=False)[0]) == " upon"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sets/Tiny-1.5", "Tiny-1.5"),
        ("sets/Tiny-1.5/", "Tiny-1.5"),
        ("files/Tiny-1.5-Q8_0.gguf", "Tiny-1.5-Q8_0"),
        ("./files/tiny-Q4-00001-of-00003.GGUF", "tiny-Q4"),
        ("files/blob.v2", "blob.v2"),
    ],
)
def test_the_id_of_a_model_is_the_end_of_its_path(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name on the hub all, as clients of other servers give it."""
    (tmp_path / "sets" / "Tiny-1.5").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    if path.startswith(("files", "./files")):
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    assert serve_command.model_id(path) == name
    assert serve_command.model_id(str(tmp_path / path)) == name
    assert serve_command.model_id("org/Tiny-1.5") == "org/Tiny-1.5"
    monkeypatch.chdir(tmp_path / "sets" / "Tiny-1.5")
    assert serve_command.model_id(".") == "Tiny-1.5"


@pytest.mark.commands
def test_the_command_stops_gracefully() -> None:
    """SIGTERM while an answer is streamed: it is finished, and the exit status is 0."""
    line = [sys.executable, "-m", "nnxmoe", "serve", "demo", "--port", "0", "--slots", "2", "--capacity", "256"]
    process = subprocess.Popen(line, cwd=DEMO.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = next(int(found.group(1)) for said in process.stderr if (found := re.search(r":(\d+); Ctrl-C", said)))
        running = Client(port)
        assert running.call("/v1/models", host="evil.example")[0] == 403
        assert one(running, COMPLETIONS, STORY | {"model": "demo"})["finish_reason"] == "length"
        with open_stream(running, LONG | {"model": "demo", "stream": True}) as raw:
            text = raw.recv(200)
            process.send_signal(signal.SIGTERM)
            while part := raw.recv(1 << 16):
                text += part
        assert b"data: [DONE]" in text
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (["serve", str(DEMO), "--port", "70000"], "--port 70000"),
        (["serve", "./nowhere"], "no such folder"),
    ],
)
def test_the_command_refuses(line: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 1
    assert why in capsys.readouterr().err


@pytest.mark.wrong_types
def test_a_model_over_several_processes_is_refused() -> None:
    """Only the process that gets a request would take its steps."""
    engine: Any = SimpleNamespace(model=SimpleNamespace(mesh=SimpleNamespace(is_multi_process=True, shape={"fsdp": 2})))
    settings: Any = None
    with pytest.raises(ValueError, match="sharded over several processes"):
        Endpoints(engine, None, settings, lambda: None)


@pytest.mark.slow
def test_some_seconds_of_load() -> None:
    """The load test in short: nothing is lost, no slot leaks."""
    with serving_tools(queue=6, body=1 << 16) as running:
        found = asyncio.run(Load(running.port, "tiny", None, 1 << 16).run(clients=8, seconds=2))
    assert found.faults == [] and sum(found.done.values()) > 8
