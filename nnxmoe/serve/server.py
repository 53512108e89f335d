"""Runs a server in this process until it is told to stop."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nnxmoe.generation.draft_cost import Drafting
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import Limits, eos_ids
from nnxmoe.generation.sampling import Steps
from nnxmoe.generation.text import Tokenizer
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import say
from nnxmoe.serve.app import make_app
from nnxmoe.serve.requests import CHAT_LOGPROBS, default_sampling
from nnxmoe.serve.settings import ServerSettings

BIASES = 64  # of one request
CONNECTIONS = 1024
HEAD_SECONDS = 30.0  # to send the head of a request
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def serving_engine(
    model: CausalLM, *, slots: int = 8, capacity: int = 2048, draft: Drafting = None
) -> tuple[Engine, tuple[int, ...]]:
    """An engine with room for every option of the API, and the model's end tokens."""
    stop_ids, most = eos_ids(model, ...), model.config.max_position_embeddings
    rules = default_sampling(model).rules
    steps = Steps(rules=() if rules is None else (rules,))
    limits = Limits(len(stop_ids) + ServerSettings.stops, BIASES, CHAT_LOGPROBS, steps)
    return Engine(model, slots=slots, capacity=min(capacity, most), limits=limits, draft=draft), stop_ids


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    settings: ServerSettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves an engine until SIGTERM or Ctrl-C: then no new connections are taken, running requests have
    ``settings.drain`` seconds to finish, and the engine is closed.

    ``started`` is called with the address once requests are answered. Raises OSError if the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    engine.warm_up()
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}"
    server = make_server(make_app(engine, tokenizer, stop_ids, settings), settings, lambda: started(address))
    with listener, _quiet_signals():
        server.run([listener])
    say("the server has stopped")


def make_server(app: ASGIApp, settings: ServerSettings, started: Callable[[], None]) -> uvicorn.Server:
    """uvicorn with an application; ``started`` is called once it answers requests."""
    config = uvicorn.Config(
        app,
        http=_Punctual,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, round(settings.drain)),
        timeout_keep_alive=30,
        limit_concurrency=CONNECTIONS,
    )
    return _Server(config, started)


class _Punctual(H11Protocol):
    """Closes connections on which no whole head of a request arrives in time; uvicorn waits without end."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_watching(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None

    def _late(self) -> None:
        self._waiting = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """Calls ``started`` when it answers requests."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]):
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._started()


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """Within the block SIGTERM does not end the process: uvicorn raises it again when it has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
