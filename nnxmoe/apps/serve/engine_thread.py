"""The thread that runs the engine.

Other threads send commands, and the engine thread returns the results of each step.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nnxmoe.apps.serve.settings import Refused
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import Event, Finish, Prefix, Request, RequestOptions, unusable_logits
from nnxmoe.generation.score import Score, score
from nnxmoe.generation.stop_strings import StopStringFilter

logger = logging.getLogger("nnxmoe")


@dataclasses.dataclass
class Sample:
    """A sample, or the additions of one step.

    Attributes:
        text: decoded text. May lag behind ``ids``.
        ids: new ids.
        logprobs: log-probability per id.
        top: most likely ids per position, with their log-probabilities.
        finish: why the sample is done, or None.
        echoed: number of prompt ids at the start of ``ids`` in a response.
        start: index in ``text`` where the new text begins.
    """

    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]] | None] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    echoed: int = 0
    start: int = 0

    def add(self, piece: "Sample") -> None:
        """Append a piece."""
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.top += piece.top
        self.finish = piece.finish


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A sample to generate.

    Attributes:
        ids: ids of the prompt.
        options: options of the request.
        stop: stop strings.
        put: receives the pieces of the sample, or the exception that ended it. Runs in the thread of
            the event loop.
        prefix: prefix of the prompt, or None.
        keep: ids of special tokens that are part of the text.
        request: the request, set once the engine has accepted it.
    """

    ids: tuple[int, ...]
    options: RequestOptions
    stop: tuple[str, ...]
    put: Callable[[Sample | BaseException], None]
    prefix: Prefix | None = None
    keep: frozenset[int] = frozenset()
    request: Request | None = None


class EngineThread:
    """Thread that runs an engine.

    Call the methods, except `close`, in the thread of ``loop``. They return immediately.

    Attributes:
        engine: the engine.
        failure: exception that ended the thread, or None. Every job receives it.
    """

    def __init__(self, engine: Engine, tokenizer: Any, loop: asyncio.AbstractEventLoop):
        self.engine = engine
        self.failure: BaseException | None = None
        self._tokenizer, self._loop = tokenizer, loop
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock, self._open = threading.Lock(), True  # the thread reads the inbox while it is open
        self._running: dict[Request, tuple[SampleJob, StopStringFilter]] = {}
        self._scoring: collections.deque[Callable[[], None]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="nnxmoe engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[SampleJob]) -> asyncio.Future[None]:
        """Append jobs to the engine's queue.

        The future raises ValueError if a job is invalid. In that case no job runs.
        """
        task, accepted = self._task(self._accept, jobs)
        self._send(task, task)
        return accepted

    def cancel(self, jobs: Sequence[SampleJob]) -> None:
        """End jobs and free their slots. No-op for jobs that are done."""
        self._send(lambda: self._cancel(jobs))

    def score(self, texts: Sequence[tuple[int, ...]], top: int) -> asyncio.Future[list[Score]]:
        """Compute log-probabilities of ids, between two steps. Cancelling the future cancels the work."""
        task, scores = self._task(self._score, texts, top)
        self._send(lambda: self._scoring.append(task), task)
        return scores

    def close(self, seconds: float = 60.0) -> None:
        """End all jobs and the thread. Waits up to ``seconds`` for the current step."""
        with self._lock:
            self._inbox.put(None)
        self._thread.join(seconds)

    def _task(self, call: Callable[..., Any], *given: Any) -> tuple[Callable[[], None], asyncio.Future[Any]]:
        """Create a command that runs ``call``, and the future of its result or of `failure`."""
        future = concurrent.futures.Future[Any]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the client disconnected
                return
            try:
                if self.failure is not None:
                    raise self.failure
                future.set_result(call(*given))
            except BaseException as error:
                future.set_exception(error)

        return run, asyncio.wrap_future(future, loop=self._loop)

    def _send(self, run: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
        """Run ``run`` in the thread. If the thread has ended, run ``otherwise`` in the calling thread."""
        with self._lock:
            if self._open:
                return self._inbox.put(run)
        otherwise()

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while self.failure is None and self._obey(wait=not (self._running or self._scoring)):
                if self._scoring:  # one pass at a time, so that steps of other requests wait for one pass at most
                    self._scoring.popleft()()
                if self._running:
                    self._deliver(self.engine.step())
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = error
        self._end()

    def _obey(self, wait: bool) -> bool:
        """Run pending commands. Returns False to end the thread."""
        try:
            while (command := self._inbox.get(block=wait)) is not None:
                wait = False
                command()
        except queue.Empty:
            return True
        return False

    def _accept(self, jobs: Sequence[SampleJob]) -> None:
        try:
            texts = [StopStringFilter(job.stop, self._tokenizer, job.ids, job.keep) for job in jobs]
            for job in jobs:
                job.request = self.engine.submit(job.ids, job.options, job.prefix)
                job.prefix = None  # the engine frees a prefix with the last request that needs it
        except Exception:  # errors of a tokenizer must not end other requests
            self._cancel(jobs)
            raise
        done = []
        for job, text in zip(jobs, texts, strict=True):
            assert job.request is not None
            if job.request.done:  # the request needs no new ids
                done.append((job, Sample(finish=job.request.finish)))
            else:
                self._running[job.request] = job, text
        self._hand_out(done)

    def _cancel(self, jobs: Sequence[SampleJob]) -> None:
        for job in jobs:
            if job.request is not None:
                self.engine.cancel(job.request)
                self._running.pop(job.request, None)

    def _deliver(self, events: Sequence[Event]) -> None:
        pieces = list[tuple[SampleJob, Sample | BaseException]]()
        for event in events:
            if event.request not in self._running:
                continue
            job, text = self._running[event.request]
            try:
                piece = self._piece(event, text)
                broken = piece.finish == "error"
                pieces.append((job, dataclasses.replace(piece, finish=None) if broken else piece))
                if broken:
                    pieces.append((job, self._broken()))
            except Exception as error:  # errors of a tokenizer must not end other requests
                logger.exception("a request failed")
                self._cancel([job])
                pieces.append((job, error))
        self._hand_out(pieces)

    def _piece(self, event: Event, text: StopStringFilter) -> Sample:
        """Convert an event to text. At a stop string, ends the request and drops the ids that follow."""
        request, before = event.request, text.count
        new = text.add_ids(event.ids, event.finish)
        finish = "stop" if text.stopped else event.finish
        if finish is not None:
            self.engine.cancel(request)
            del self._running[request]
        at = slice(before, text.count)
        return Sample(new, request.ids[at], [*request.logprobs[at]], [*request.top[at]], finish)

    def _score(self, texts: Sequence[tuple[int, ...]], top: int) -> list[Score]:
        try:
            scores = score(self.engine.model, texts, top=top)
        except ValueError:
            raise
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = error
            raise
        if any(math.isnan(one.total) for one in scores):
            raise self._broken()
        return scores

    def _broken(self) -> Refused:
        """Create the error for a request whose logits are NaN or infinite."""
        why = "the model's logits are NaN or infinite after these ids, so there is no answer: "
        return Refused(500, why + unusable_logits(self.engine.model))

    def _hand_out(self, pieces: Sequence[tuple[SampleJob, Sample | BaseException]]) -> None:
        try:
            if pieces:
                self._loop.call_soon_threadsafe(lambda: [job.put(piece) for job, piece in pieces])
        except RuntimeError:  # the event loop is closed because the server has ended
            logger.debug("an answer came after the server's end")

    def _end(self) -> None:
        self.failure = error = self.failure or RuntimeError("the server stops")
        with self._lock:
            self._open = False
        self._hand_out([(job, error) for job, _ in self._running.values()])
        self._running.clear()
        self.engine.close()
        unread = [self._inbox.get() for _ in range(self._inbox.qsize())]
        for command in filter(None, unread):
            command()
        for task in self._scoring:
            task()
