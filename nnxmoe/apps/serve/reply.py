"""HTTP responses: admit requests, and send the samples from the engine thread, whole or streamed.

Samples are cancelled when the request ends for any reason, for example because the client disconnects. This
frees the slots of the samples.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nnxmoe.apps.serve.engine_thread import EngineThread, Sample, SampleJob
from nnxmoe.apps.serve.formats import Format, Json, usage
from nnxmoe.apps.serve.prometheus import Metrics
from nnxmoe.apps.serve.requests import Planned
from nnxmoe.apps.serve.settings import Refused, ServerSettings, public
from nnxmoe.generation.score import TOKENS, Score

COUNTS = "nnxmoe.counts"  # key in the ASGI scope of (prompt tokens, generated tokens, rejection reason)
LAST_WORDS = 1.0  # seconds to send an error at the end of a stream, because the client may not read


class Service:
    """State that all requests share.

    Attributes:
        thread: The engine thread.
        settings: Settings of the server.
        admitted: Number of samples in all requests in progress.
        metrics: Metrics of the server.
    """

    def __init__(self, thread: EngineThread, settings: ServerSettings):
        self.thread, self.settings, self.admitted = thread, settings, 0
        engine = thread.engine
        gauges = {
            "slots": lambda: engine.slots,
            "slots_running": lambda: engine.running,
            "samples_waiting": lambda: engine.waiting,
            "samples_admitted": lambda: self.admitted,
            "prefixes_kept": lambda: len(engine.prefix_cache),
            "prefix_hits": lambda: engine.prefix_cache.hits,
            "prefix_tokens": lambda: engine.prefix_cache.tokens,
        }
        self.metrics = Metrics(gauges)


class Reply(Response):
    """Response to a request, whole or as server-sent events. Sending it generates the samples."""

    def __init__(self, service: Service, plan: Planned, form: Format, since: float):
        super().__init__()
        self._service, self._plan, self._form, self._since = service, plan, form, since
        common_fields = {"created": int(time.time()), "model": service.settings.name}
        self._head: Json = {"id": form.prefix + secrets.token_hex(12), **common_fields}
        self._samples = [Sample() for _ in range(len(plan.prompts) * plan.n)]
        self._queue: asyncio.Queue[tuple[int, Sample | BaseException]] = asyncio.Queue()
        self._admitted, self._started, self._made = False, False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send the response. Stops at the time limit, or if the client disconnects."""
        response = asyncio.ensure_future(self._send_stream(send) if self._plan.stream else self._send_whole(send))
        disconnect = asyncio.ensure_future(_gone(receive))
        try:
            done, _ = await asyncio.wait(
                (response, disconnect), timeout=self._service.settings.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (response, disconnect):
                task.cancel()
            await asyncio.gather(response, disconnect, return_exceptions=True)
            if self._admitted:
                scope[COUNTS][:2] = sum(map(len, self._plan.prompts)), self._made
            self._service.metrics.seconds.add(time.monotonic() - self._since)
        if response in done:
            try:
                response.result()
            except Refused as rejection:
                await self._fail(send, rejection)
        elif disconnect in done:
            self._service.metrics.counters["cancelled_total"] += 1
        else:
            reason = f"the request took longer than {self._service.settings.seconds:g} s: request fewer tokens"
            await self._fail(send, Refused(504, reason))

    async def _fail(self, send: Send, rejection: Refused) -> None:
        """Raise the error, or send the error as the last event if the response has started."""
        if not self._started:
            raise rejection
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await send({"type": "http.response.body", "body": _event(rejection.body()), "more_body": False})

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Start the samples of the plan, and cancel unfinished samples on exit.

        Raises Refused if the server does not admit that many samples.
        """
        service, plan, num_samples = self._service, self._plan, len(self._samples)
        max_samples = service.thread.engine.slots + service.settings.queue
        if num_samples > max_samples:
            raise Refused(400, f"{num_samples} samples exceed this server's maximum of {max_samples}", "n")
        if service.admitted + num_samples > max_samples:
            raise Refused(
                429,
                f"{service.admitted} samples are running or waiting (limit {max_samples}): try again later",
            )
        special_ids = frozenset(plan.answer.tokens.values())
        jobs = [
            SampleJob(
                ids, options, plan.stop, lambda piece, i=i: self._queue.put_nowait((i, piece)), prefix, special_ids
            )
            for i, (ids, options, prefix) in enumerate(plan.samples())
        ]
        service.admitted, self._admitted = service.admitted + num_samples, True
        try:
            await _refusing(service.thread.submit(jobs))
            service.metrics.counters["prompt_tokens_total"] += sum(map(len, plan.prompts))
            yield
        finally:
            service.admitted -= num_samples
            if not all(sample.finish for sample in self._samples):
                service.thread.cancel(jobs)

    async def _scores(self) -> list[Score | None]:
        """Score the prompts of the plan. The score of a prompt with a single id is `None`."""
        plan, scores_so_far = self._plan, list[Score | None]()
        top = min(1, plan.options.logprobs or 0) if (plan.options.logprobs or 0) < 2 else 5
        while texts := plan.prompts[len(scores_so_far) :]:
            sizes = itertools.accumulate(map(len, texts))
            batch = texts[: max(1, sum(size <= TOKENS for size in sizes))]  # texts that fit in one pass
            scores = iter(await _refusing(self._service.thread.score([ids for ids in batch if len(ids) > 1], top)))
            scores_so_far += [next(scores) if len(ids) > 1 else None for ids in batch]
        return scores_so_far

    async def _parts(self) -> AsyncIterator[dict[int, Sample]]:
        """Yield the new pieces per sample, as fast as the client reads, until all samples are done."""
        metrics = self._service.metrics
        while not all(sample.finish for sample in self._samples):
            news, events = dict[int, Sample](), [await self._queue.get()]
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            for index, piece in events:
                if isinstance(piece, Refused):
                    raise piece
                if isinstance(piece, BaseException):
                    raise Refused(503, f"the server cannot continue: {public(piece)}") from piece
                if piece.ids and not self._made:
                    metrics.first_token.add(time.monotonic() - self._since)
                self._made += len(piece.ids)
                metrics.counters["generated_tokens_total"] += len(piece.ids)
                self._samples[index].add(piece)
                news.setdefault(index, Sample()).add(piece)
            yield news

    async def _send_whole(self, send: Send) -> None:
        plan = self._plan
        async with self._running():
            scores = await self._scores() if plan.scored else []
            async for _ in self._parts():
                pass
        for index, sample in enumerate(self._samples):
            _echo(sample, plan, index // plan.n, scores)
        choices = [self._form.choice(index, sample) for index, sample in enumerate(self._samples)]
        body = {**self._head, "object": self._form.name, "choices": choices, "usage": usage(plan.prompts, self._made)}
        self._started = True
        unread: Any = None  # a whole response does not call `receive`
        await json_response(body)({"type": "http"}, unread, send)

    async def _send_stream(self, send: Send) -> None:
        head = {**self._head, "object": self._form.chunk}
        async with self._running():
            self._started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for index in range(len(self._samples)):
                await self._chunks(send, head, self._form.opening(index))
            async for pieces in self._parts():
                await self._chunks(
                    send, head, [self._form.delta(index, piece) for index, piece in sorted(pieces.items())]
                )
        if self._plan.usage is not None:
            await _send(send, _event({**head, "choices": [], "usage": usage(self._plan.prompts, self._made)}))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _chunks(self, send: Send, head: Json, choices: Sequence[Json]) -> None:
        if events := b"".join(
            _event({**head, "choices": [choice], **self._usage(choice["index"])}) for choice in choices
        ):
            await _send(send, events)

    def _usage(self, index: int) -> Json:
        """Return the field ``usage`` of a chunk, with the token counts of the sample so far."""
        plan = self._plan
        if plan.usage != "always":
            return {} if plan.usage is None else {"usage": None}
        return {"usage": usage([plan.prompts[index // plan.n]], len(self._samples[index].ids))}


def _echo(sample: Sample, plan: Planned, prompt: int, scores: Sequence[Score | None]) -> None:
    """Insert the prompt before the new text if the request echoes it. The first id has the log-probability `None`."""
    if plan.texts is None:
        return
    sample.text, sample.start = plan.texts[prompt] + sample.text, len(plan.texts[prompt])
    if plan.scored:
        score, sample.echoed = scores[prompt], len(plan.prompts[prompt])
        sample.ids = [*plan.prompts[prompt], *sample.ids]
        sample.logprobs = [None, *([] if score is None else score.logprobs.tolist()), *sample.logprobs]
        sample.top = [None, *([] if score is None else score.top), *sample.top]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Create a JSON response."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refusing(future: asyncio.Future[Any]) -> Any:
    """Return the result of a future. Converts a ValueError to status 400 and a RuntimeError to status 503."""
    try:
        return await future
    except ValueError as error:
        raise Refused(400, public(error)) from None
    except RuntimeError as error:
        raise Refused(503, f"the server cannot continue: {public(error)}") from None
