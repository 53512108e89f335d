"""A server in a thread of this process, and a small HTTP client."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import nnxmoe
from nnxmoe.apps.serve.app import make_app
from nnxmoe.apps.serve.server import make_server, serving_engine
from nnxmoe.apps.serve.settings import ServerSettings
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.generation.engine import Engine

TIMEOUT = 1200.0  # seconds; only a hang takes so long, a busy machine does not
Json = dict[str, Any]


# A chat template whose calls have the form of Hermes.
TOOL_TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- '<|system|><tool_call> ' ~ tools | tojson ~ '<|end|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|' ~ (m.role if m.role != 'tool' else 'user') ~ '|>' ~ m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.name ~ call.function.arguments.items() | list ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


class Gate:
    """Holds an engine between two steps: ``steps`` more are let through; None: all."""

    def __init__(self, engine: Engine):
        self._step, self._changed = engine.step, threading.Condition()
        self.steps: int | None = None
        engine.step = self._wait  # pyright: ignore[reportAttributeAccessIssue]

    def let(self, steps: int | None) -> None:
        """Lets so many more steps through."""
        with self._changed:
            self.steps = steps
            self._changed.notify()

    def _wait(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self.steps != 0, TIMEOUT)
            if self.steps is not None:
                self.steps -= 1
        return self._step()


class Client:
    """Requests to the server on a port of this machine."""

    def __init__(self, port: int):
        self.port = port

    def connect(self) -> http.client.HTTPConnection:
        """A connection, to be closed by the caller."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET, or of a POST of a body: JSON, or bytes as they are."""
        connection = self.connect()
        with contextlib.closing(connection):
            response = self.ask(connection, path, body, **headers)
            text = response.read()
            kind = response.getheader("content-type") or ""
            return response.status, json.loads(text) if kind.startswith("application/json") else text.decode()

    def ask(
        self, connection: http.client.HTTPConnection, path: str, body: Any = None, **headers: str
    ) -> http.client.HTTPResponse:
        """The response, whose body has not been read."""
        given = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        if body is None:
            connection.request("GET", path, headers=given)
        else:
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), given)
        return connection.getresponse()

    def stream(self, path: str, body: Json) -> list[Json]:
        """The events of a stream, which must end as it should."""
        with contextlib.closing(self.connect()) as connection:
            response = self.ask(connection, path, body | {"stream": True})
            assert response.status == 200, response.read()
            *found, last = response.read().decode().split("\n\n")[:-1]
        assert last == "data: [DONE]", last
        return [json.loads(event.removeprefix("data: ")) for event in found]

    def metric(self, name: str) -> float:
        """A counter or gauge of ``/metrics``."""
        lines = self.call("/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"nnxmoe_{name} "))

    def until(self, true: Callable[[], bool], seconds: float = TIMEOUT) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.01)

    def idle(self) -> bool:
        """Whether no slot is taken, and nothing waits."""
        return not any(map(self.metric, ("slots_running", "samples_waiting", "samples_admitted")))


class Running(Client):
    """A server of this process. ``gate``: holds its engine."""

    def __init__(self, engine: Engine, port: int, server: Any):
        super().__init__(port)
        self.engine, self.server, self.gate = engine, server, Gate(engine)


@contextlib.contextmanager
def serving(
    model: nnxmoe.CausalLM,
    tokenizer: Any,
    *,
    slots: int = 2,
    capacity: int = 256,
    return_routing: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """A server of a model named "tiny" on a free port; at the end it must stop, and its engine be closed."""
    engine = serving_engine(model, slots=slots, capacity=capacity, return_routing=return_routing)
    chosen = ServerSettings(**{"name": "tiny", "drain": 20.0, **settings})
    started, listener = threading.Event(), socket.create_server(("127.0.0.1", 0), backlog=256)
    server = make_server(make_app(engine, tokenizer, chosen, started.set), chosen)
    thread = threading.Thread(target=server.run, args=([listener],), name="server")
    thread.start()
    running = Running(engine, listener.getsockname()[1], server)
    try:
        assert started.wait(TIMEOUT)
        yield running
    finally:
        running.gate.let(None)
        server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "the server did not stop"
        listener.close()
    assert engine.running == engine.waiting == 0


@contextlib.contextmanager
def serving_tools(**settings: Any) -> Iterator[Running]:
    """A server of the demo whose chat template has tools."""
    tokenizer = nnxmoe.Tokenizer.from_pretrained(DEMO)
    tokenizer.chat_templates = {"default": TOOL_TEMPLATE}
    with serving(nnxmoe.from_pretrained(DEMO), tokenizer, capacity=512, **settings) as running:
        yield running
