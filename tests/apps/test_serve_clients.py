"""The server with other people's clients: the official openai package, and a headless browser on the page."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnxmoe
from nnxmoe.apps.serve.schema import LABELS, ChatRequest, CompletionRequest, decode
from nnxmoe.apps.serve.settings import Refused
from tests.support.serving import TIMEOUT, Json, Running, serving, serving_tools

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

DEMO = Path(__file__).parents[2] / "models" / "demo"
QUESTION: Any = [{"role": "user", "content": "What is 47 + 38?"}]
ANSWER = "47 + 38 = 85."
BROWSER = "NNXMOE_TEST_BROWSER"  # the path of a Chromium that playwright did not install


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test where a package is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model, tokenizer = nnxmoe.from_pretrained(DEMO, dtype="float32"), nnxmoe.Tokenizer.from_pretrained(DEMO)
    with serving(model, tokenizer, key="secret") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Any:
    import openai

    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0, timeout=TIMEOUT
    )


@needs("openai")
def test_openai_chats(client: Any) -> None:
    """Whole and streamed, with log-probabilities and usage."""
    ask = dict(model="tiny", messages=QUESTION, temperature=0, seed=1, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**ask)
    (choice,) = whole.choices
    assert choice.message.content == ANSWER and choice.finish_reason == "stop"
    tokens = choice.logprobs.content
    assert len(tokens) == whole.usage.completion_tokens and all(len(token.top_logprobs) == 2 for token in tokens)
    assert b"".join(bytes(token.bytes) for token in tokens).startswith(ANSWER.encode())
    more = [*QUESTION, choice.message, {"role": "user", "content": "And 1 more?"}]  # a client's next turn
    assert client.chat.completions.create(**{**ask, "messages": more}).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["tiny"]


@needs("openai")
def test_openai_asks_for_a_schema(client: Any) -> None:
    """As a field, and as a class of pydantic, which the client turns into a schema and back."""
    import pydantic

    class Person(pydantic.BaseModel):
        age: typing.Annotated[int, pydantic.Field(ge=0, le=99)]
        married: bool

    ask = dict(model="tiny", messages=QUESTION, temperature=1, seed=4, max_tokens=100)
    answer = client.chat.completions.parse(**ask, response_format=Person).choices[0].message
    assert isinstance(answer.parsed, Person) and answer.parsed == Person.model_validate_json(answer.content)
    chunks = client.chat.completions.create(**ask, response_format={"type": "json_object"}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith("{")


@needs("openai")
def test_openai_calls_tools() -> None:
    """The loop of a client: calls, what they return, an answer; whole and by the client's own reader of streams."""
    import openai
    import pydantic

    class Weather(pydantic.BaseModel):
        city: typing.Literal["Rome", "Oslo"]
        days: typing.Annotated[int, pydantic.Field(ge=1, le=9)]

    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with serving_tools() as running:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="x", max_retries=0)
        ask: Json = dict(model="tiny", tools=tools, parallel_tool_calls=False, max_tokens=120, temperature=0)
        first = client.chat.completions.parse(**ask, messages=QUESTION, tool_choice="required").choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content is None
        calls = first.message.tool_calls
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
        with client.chat.completions.stream(**ask, messages=QUESTION, tool_choice="required") as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_completion().choices[0]
        assert kinds.count("tool_calls.function.arguments.delta") > 3 and last.finish_reason == "tool_calls"
        assert [one.function.arguments for one in last.message.tool_calls] == [one.function.arguments for one in calls]
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        turns = [*QUESTION, first.message, *answers]
        final = client.chat.completions.create(**ask, messages=turns, tool_choice="none").choices[0]
        assert final.message.content and not final.message.tool_calls


@needs("openai")
def test_every_field_of_the_client_may_be_null() -> None:
    """No field is unknown: left empty it changes nothing, with a value it is used or refused by name."""
    from openai.resources import chat, completions

    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    odd: Json = {"model": "tiny", "prompt": "x", "messages": QUESTION, "stream": True, "n": 2, "stop": "x", "seed": 1}
    for create, kind in (
        (chat.completions.Completions.create, ChatRequest),
        (completions.Completions.create, CompletionRequest),
    ):
        names = set(inspect.signature(create).parameters) - own
        assert len(names) > 15
        body: Json = {name: odd[name] for name in ("model", "prompt", "messages") if name in names}
        assert decode(json.dumps(dict.fromkeys(names) | body).encode(), kind) == decode(json.dumps(body).encode(), kind)
        for name in names - set(kind.__struct_fields__) - LABELS:
            with pytest.raises(Refused, match="is not supported: leave it out") as refused:
                decode(json.dumps(body | {name: {"a": 1}}).encode(), kind)
            assert refused.value.param == name and refused.value.status == 400


@needs("openai")
def test_a_model_on_a_mesh_answers_as_on_one_device() -> None:
    """``nnxmoe serve --mesh`` on eight devices: texts and log-probabilities of the engine on one."""
    import openai

    model, prompts = nnxmoe.from_pretrained(DEMO, dtype="float32"), ["Once upon a time", "The fox"]
    expected = list(nnxmoe.complete(model, prompts, max_new_tokens=12, logprobs=0))
    line = [sys.executable, "-m", "nnxmoe", "serve", "demo", "--port", "0", "--slots", "8", "--capacity", "64"]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NNXMOE_COMPILE_CACHE": "off"}
    options = ["--mesh", "fsdp=2,expert=4", "--dtype", "float32"]
    process = subprocess.Popen([*line, *options], cwd=DEMO.parents[1], env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = list[str]()
        for text in process.stderr:
            said.append(text)
            if found := re.search(r"(http://\S+:\d+); Ctrl-C", text):
                break
        else:
            raise AssertionError("".join(said))
        assert "nnxmoe: running on 8 x cpu\n" in said
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
        ask = dict(model="demo", prompt=prompts, max_tokens=12, temperature=0, logprobs=0)
        answers = client.completions.create(**ask).choices
        assert [answer.text for answer in answers] == [one.text for one in expected]
        for answer, one in zip(answers, expected, strict=True):
            assert answer.logprobs.token_logprobs == pytest.approx(one.logprobs, abs=1e-4)
    finally:
        process.kill()


@needs("openai")
def test_openai_completions(client: Any) -> None:
    ask = dict(
        model="tiny", prompt=["Once upon a time", "The fox"], max_tokens=5, temperature=0, n=2, logprobs=1, echo=True
    )
    found = client.completions.create(**ask)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[1].text and found.choices[2].text.startswith("The fox")
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) and "".join(logprobs.tokens) == found.choices[0].text


@needs("openai")
def test_openai_cancels_a_stream(client: Any, server: Running) -> None:
    server.gate.let(4)
    with client.completions.create(model="tiny", prompt="The fox", max_tokens=200, stream=True) as stream:
        assert next(iter(stream)).choices[0].text
    server.gate.let(None)
    server.until(lambda: server.engine.running == 0)


@needs("openai")
def test_openai_errors(client: Any, server: Running) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="tools is not supported") as refused:
        client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.APITimeoutError):  # the client gives up, which frees the slot
        server.gate.let(2)
        client.with_options(timeout=0.5).completions.create(model="tiny", prompt="The fox", max_tokens=200)
    server.gate.let(None)
    server.until(lambda: server.engine.running == server.engine.waiting == 0)


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a headless Chromium, that of playwright or of the system."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get(BROWSER) or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip(f"no Chromium: run playwright install chromium, or set {BROWSER}=PATH")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=1000 * TIMEOUT)
        found = browser.new_page()
        found.set_default_timeout(1000 * TIMEOUT)
        yield found
        browser.close()


@needs("playwright")
def test_the_page_in_a_browser(page: Any, server: Running) -> None:
    """Without a key, with one; an answer, the next one after it, stopping, markup as text; nothing loaded elsewhere."""
    from playwright.sync_api import expect

    expect.set_options(timeout=1000 * TIMEOUT)
    requests, errors = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    status, answers = page.locator("#status"), page.locator(".assistant")
    page.goto(f"http://127.0.0.1:{server.port}/")
    expect(status).to_contain_text("API key")
    page.fill("#text", "What is 47 + 38?")
    page.press("#text", "Enter")
    page.wait_for_selector(".error")
    assert "API key" in page.inner_text(".error")
    page.fill("#key", "secret")
    page.fill("#text", "What is 47 + 38?")
    page.click("#send")
    expect(status).to_contain_text("tokens")
    assert answers.inner_text() == ANSWER and page.inner_text("#model") == "tiny"
    page.click("#again")
    expect(status).to_contain_text("tokens")
    expect(page.locator(".tools button")).to_have_count(1)  # offered when the stream has ended, after its last numbers
    assert answers.inner_text() == ANSWER
    markup = "() => markdown('# A\\n**b** `c`\\n- d\\n```\\n<i>\\n```').map(one => one.outerHTML).join('')"
    wanted = "<h3>A</h3><p><strong>b</strong> <code>c</code></p><ul><li>d</li></ul><pre><code>&lt;i&gt;</code></pre>"
    assert page.evaluate(markup) == wanted
    page.fill("#text", "<img src=x onerror=alert(1)><b>bold</b>")
    server.gate.let(3)
    page.click("#send")
    expect(answers).to_have_count(2)
    assert page.inner_text(".user >> nth=2").startswith("<img") and page.locator("#log img, #log b").count() == 0
    page.click("#stop")
    expect(page.locator("#stop")).to_be_disabled()
    server.gate.let(None)
    server.until(lambda: server.engine.running == server.engine.waiting == 0)
    page.click("#clear")
    assert page.inner_text("#log") == ""
    assert all(url.startswith(f"http://127.0.0.1:{server.port}/") or url.startswith("data:") for url in requests)
    assert errors == []
