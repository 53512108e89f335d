"""Run a server in this process until SIGTERM or Ctrl-C."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nnxmoe.apps.serve.app import make_app
from nnxmoe.apps.serve.requests import CHAT_LOGPROBS, default_sampling
from nnxmoe.apps.serve.settings import ServerSettings
from nnxmoe.generation.draft_cost import DraftOption
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.ids import eos_ids
from nnxmoe.generation.passes import CacheSize, cache_bytes
from nnxmoe.generation.request import EngineLimits
from nnxmoe.generation.sampling import StaticSampling
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import say
from nnxmoe.tokenizer.tokenizer import Tokenizer

BIASES = 64  # maximum number of logit biases per request
PREFIX_CACHE_SLOTS = 4  # default size of the prefix cache
CONNECTIONS = 1024
HEAD_SECONDS = 30.0  # time limit for the request line and headers
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def serving_engine(
    model: CausalLM,
    *,
    slots: int = 8,
    capacity: int = 2048,
    draft: DraftOption = None,
    prefix_bytes: int | None = None,
    return_routing: bool = False,
) -> Engine:
    """Create an engine whose limits cover every option of the API.

    Args:
        model: The model to serve.
        slots: See `Engine`.
        capacity: See `Engine`. Limited to the model's ``max_position_embeddings``.
        draft: See `Engine`.
        prefix_bytes: See `Engine`. Defaults to the cache size of 4 slots, without the memory of a draft.
        return_routing: Whether requests may set ``return_routed_experts``.
    """
    rules = default_sampling(model).rules
    steps = StaticSampling(rules=() if rules is None else (rules,))
    max_stop_ids = len(eos_ids(model, ...)) + ServerSettings.stops
    limits = EngineLimits(max_stop_ids, BIASES, CHAT_LOGPROBS, steps, return_routing=return_routing)
    capacity = min(capacity, model.config.max_position_embeddings)
    if prefix_bytes is None:
        prefix_bytes = PREFIX_CACHE_SLOTS * cache_bytes(model, 1, CacheSize(capacity, 0))
    return Engine(model, slots=slots, capacity=capacity, limits=limits, draft=draft, prefix_bytes=prefix_bytes)


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C.

    On shutdown, the server rejects new connections, waits up to ``settings.drain`` seconds for running
    requests, and closes the engine.

    Args:
        engine: See `serving_engine`.
        tokenizer: Tokenizer of the model.
        settings: Settings of the server.
        host: Address to bind.
        port: Port to bind, or 0 for a free port.
        started: Called with the URL once the server accepts requests.

    Raises:
        OSError: If the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    engine.warm_up()
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}"
    app = make_app(engine, tokenizer, settings, lambda: started(address))
    with listener, _quiet_signals():
        make_server(app, settings).run([listener])
    say("the server has stopped")


def make_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """Create the uvicorn server of an application."""
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
    return uvicorn.Server(config)


class _Punctual(H11Protocol):
    """HTTP protocol with a time limit for the request head. uvicorn has no such limit."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._check(None)

    def _check(self, idle_since: object) -> None:
        """Close the connection if it was idle during the whole interval since the last check."""
        if self.transport.is_closing():
            return
        idle = self.cycle or self if self.cycle is None or self.cycle.response_complete else None
        if idle is not None and idle is idle_since:
            self.transport.close()
        else:
            self.loop.call_later(HEAD_SECONDS, self._check, idle)


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """Ignore SIGTERM in the block, because uvicorn raises the signal again after it has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
