"""ASGI application of the server: routes, access control and JSON errors."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nnxmoe.apps.serve.engine_thread import EngineThread
from nnxmoe.apps.serve.formats import ChatFormat, CompletionFormat, TokenTexts
from nnxmoe.apps.serve.reply import COUNTS, Reply, Service, json_response
from nnxmoe.apps.serve.requests import Planner
from nnxmoe.apps.serve.schema import ChatRequest, CompletionRequest, decode
from nnxmoe.apps.serve.settings import Refused, ServerSettings, public
from nnxmoe.config.printable import plain
from nnxmoe.generation.engine import Engine
from nnxmoe.runtime.progress import say

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
POLICY += "img-src data:"
OPEN_TO_ALL = ("/", "/health")
POLLED = ("/health", "/metrics")  # only failures are logged
DISCARD_SECONDS = 1.0


class Endpoints:
    """HTTP endpoints of one model.

    Attributes:
        service: State that all requests share. Set while the application runs.
        started: Called when the application starts.
    """

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings, started: Callable[[], None]):
        if (mesh := engine.model.mesh) is not None and mesh.is_multi_process:
            raise ValueError(
                f"the engine's model is sharded over several processes (mesh {dict(mesh.shape)}), but only one process "
                "receives requests: load the model on a mesh of local devices, "
                "nnxmoe.make_mesh(…, devices=jax.local_devices())"
            )
        self.engine, self.tokenizer, self.settings, self.started = engine, tokenizer, settings, started
        self.planner = Planner(engine, tokenizer, settings)
        self.texts, self.since = TokenTexts(tokenizer), int(time.time())
        self.service: Service

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Run the engine thread while the application runs."""
        thread = EngineThread(self.engine, self.tokenizer, asyncio.get_running_loop())
        self.service = Service(thread, self.settings)
        self.started()
        try:
            yield
        finally:
            await asyncio.to_thread(thread.close)

    async def page(self, _: Request) -> Response:
        """Return the chat page."""
        headers = {
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return HTMLResponse(PAGE.read_bytes(), headers=headers)

    async def health(self, _: Request) -> Response:
        """Return 200 while the engine runs, else 503."""
        if (failure := self.service.thread.failure) is not None:
            raise Refused(503, f"the engine failed: {type(failure).__name__}: {public(failure)}")
        return json_response({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """Return the metrics in the Prometheus text format."""
        return PlainTextResponse(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Return the served model, as a list or by name."""
        name = self.settings.name
        card = {
            "id": name,
            "object": "model",
            "created": self.since,
            "owned_by": "nnxmoe",
            "max_model_len": self.engine.capacity,
        }
        model_name = request.path_params.get("model")
        if model_name not in (None, name):
            raise Refused(404, f"the model {model_name!r:.80} does not exist: use {name!r}", "model", "model_not_found")
        return json_response({"object": "list", "data": [card]} if model_name is None else card)

    async def completions(self, request: Request) -> Response:
        """Handle ``/v1/completions``."""
        start, body = time.monotonic(), decode(await self._body(request), CompletionRequest)
        plan = await asyncio.to_thread(self.planner.completion, body)  # tokenization may take a second
        return Reply(self.service, plan, CompletionFormat(self.texts, plan.options.logprobs), start)

    async def chat(self, request: Request) -> Response:
        """Handle ``/v1/chat/completions``."""
        start, body = time.monotonic(), decode(await self._body(request), ChatRequest)
        plan = await asyncio.to_thread(self.planner.chat, body)  # templates and tokenization may take a second
        return Reply(self.service, plan, ChatFormat(self.texts, plan.options.logprobs, plan.answer), start)

    async def _body(self, request: Request) -> bytes:
        """Read the request body, with limits on size and time."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # browsers send JSON cross-site only after a CORS preflight
            raise Refused(415, f"the Content-Type is {content_type!r:.60}: send application/json")
        max_bytes = self.settings.body
        too_large = Refused(413, f"the body is larger than {max_bytes} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.settings.body_seconds:g} s") from None
        return bytes(body)


class _Body:
    """Wrapper around the ``receive`` callable of a request.

    Attributes:
        unread: Whether part of the body may still be unread.
    """

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes]):
        self._receive = receive
        self.unread = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers

    async def receive(self) -> Message:
        message = await self._receive()
        self.unread = self.unread and message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read the remaining body for up to DISCARD_SECONDS.

        Otherwise the connection of a client that is still sending would be reset before the client reads the
        response.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while self.unread:
                    await self.receive()


class Guard:
    """Middleware that checks the Host header and the API key, and counts responses by path and status.

    Reads the remaining body of rejected requests.
    """

    def __init__(self, app: ASGIApp, endpoints: Endpoints, paths: frozenset[str]):
        self._app, self._endpoints, self._paths = app, endpoints, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or reject a request. Strips trailing slashes from the path."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        since, status = time.monotonic(), 499  # 499 (client disconnected) unless a response is sent
        scope = {**scope, "path": scope["path"].rstrip("/") or "/", COUNTS: [0, 0, ""]}

        headers = dict(scope["headers"])
        body = _Body(receive, headers)

        async def count_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._endpoints.service.metrics.requests[path, message["status"]] += 1
                if message["status"] >= 400:
                    await body.discard()
                if body.unread:  # otherwise the server parses the rest as the next request
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        rejection = self._refused(scope["path"], headers)
        scope[COUNTS][2] = "" if rejection is None else rejection.why
        app = self._app if rejection is None else _error(rejection)
        try:
            await app(scope, body.receive, count_and_send)
        finally:
            if self._endpoints.settings.access_log and not (scope["path"] in POLLED and status < 400):
                _log(scope, status, time.monotonic() - since)

    def _refused(self, path: str, headers: dict[bytes, bytes]) -> Refused | None:
        settings = self._endpoints.settings
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
        if settings.hosts is not None and name not in settings.hosts:
            return Refused(403, f"the Host header is {name!r:.80}, not one of {sorted(settings.hosts)}")
        if settings.key is None or path in OPEN_TO_ALL:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), settings.key.encode()):
            return None
        return Refused(
            401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", None, "invalid_api_key"
        )


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Log one line per request: method, path, status, seconds, token counts and the reason of a rejection."""
    prompt_tokens, generated_tokens, reason = scope[COUNTS]
    tokens = (
        f", {prompt_tokens} + {generated_tokens} tokens, {generated_tokens / seconds:.1f} per second"
        if prompt_tokens
        else ""
    )
    reason = f": {plain(reason)}" if reason else ""
    say("%s %s %d, %.3f s%s%s", scope["method"], plain(scope["path"]), status, seconds, tokens, reason)


def _error(rejection: Refused) -> Response:
    headers = {"retry-after": "1"} if rejection.status == 429 else {}
    headers |= {"www-authenticate": "Bearer"} if rejection.status == 401 else {}
    return json_response(rejection.body(), rejection.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case Refused():
            request.scope[COUNTS][2] = error.why
            return _error(error)
        case HTTPException():
            return _error(Refused(error.status_code, f"{request.method} {request.url.path:.80}: {error.detail}"))
        case ClientDisconnect():  # disconnected while sending the body: no client reads this response
            return Response(status_code=499)
        case _:
            return _error(Refused(500, f"internal error: {type(error).__name__}; see the server's log"))


def make_app(engine: Engine, tokenizer: Any, settings: ServerSettings, started: Callable[[], None]) -> ASGIApp:
    """Create the application that serves an engine. The application closes the engine on shutdown.

    Args:
        engine: See `serving_engine`.
        tokenizer: Tokenizer of the model.
        settings: Settings of the server.
        started: Called once the application runs.
    """
    endpoints = Endpoints(engine, tokenizer, settings, started)
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model:path}", endpoints.models),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
    ]
    handlers: Any = dict.fromkeys((Refused, HTTPException, ClientDisconnect, Exception), _failed)
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=endpoints.lifespan)
    return Guard(app, endpoints, frozenset(route.path for route in routes))
