"""Thread that runs the engine.

Other threads send commands. The engine thread passes the results of each step to the event loop.
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

import numpy as np
from jaxtyping import Integer

from nnxmoe.apps.serve.settings import Refused
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import Event, Finish, Prefix, Request, RequestOptions, unusable_logits
from nnxmoe.generation.score import Score, score
from nnxmoe.generation.stop_strings import StopStringFilter

logger = logging.getLogger("nnxmoe")


@dataclasses.dataclass
class Sample:
    """A generated sample, or the piece of a sample that one step adds.

    Attributes:
        text: Decoded text. May lag behind ``ids``.
        ids: New ids.
        logprobs: Log-probability per id.
        top: Most likely ids per position, with their log-probabilities.
        finish: Why the sample ended, or `None` if it is still running.
        echoed: Number of prompt ids at the start of ``ids``, if the response echoes the prompt.
        start: Index in ``text`` at which the generated text starts.
        routing: Experts of the prompt and of all new ids except the last. Set in the last piece, if requested.
    """

    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]] | None] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    echoed: int = 0
    start: int = 0
    routing: Integer[np.ndarray, "tokens L X"] | None = None

    def add(self, piece: "Sample") -> None:
        """Append a piece."""
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.top += piece.top
        self.finish, self.routing = piece.finish, piece.routing


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A sample to generate.

    Attributes:
        ids: Ids of the prompt.
        options: Options of the request.
        stop: Stop strings.
        put: Callback for the pieces of the sample, or for the exception that ended it. Called in the
            thread of the event loop.
        prefix: Prefix that several samples of the prompt share, or `None`.
        keep: Ids of special tokens that the decoded text includes.
        request: The engine's request for this job. Set once the engine has accepted the job.
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

    All methods except `close` must be called in the thread of ``loop``, and return immediately.

    Attributes:
        engine: The engine that the thread runs.
        failure: Exception that ended the thread, or `None`. Every job receives the exception.
    """

    def __init__(self, engine: Engine, tokenizer: Any, loop: asyncio.AbstractEventLoop):
        self.engine = engine
        self.failure: BaseException | None = None
        self._tokenizer, self._loop = tokenizer, loop
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock, self._open = threading.Lock(), True  # while open, the thread reads the inbox
        self._running: dict[Request, tuple[SampleJob, StopStringFilter]] = {}
        self._scoring: collections.deque[Callable[[], None]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="nnxmoe engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[SampleJob]) -> asyncio.Future[None]:
        """Append jobs to the engine's queue.

        The future raises ValueError if a job is invalid. In this case, no job runs.
        """
        task, accepted = self._task(self._accept, jobs)
        self._send(task, task)
        return accepted

    def cancel(self, jobs: Sequence[SampleJob]) -> None:
        """Cancel jobs and free their slots. No-op for jobs that are done."""
        self._send(lambda: self._cancel(jobs))

    def score(self, texts: Sequence[tuple[int, ...]], top: int) -> asyncio.Future[list[Score]]:
        """Compute the log-probabilities of texts between two engine steps.

        Cancelling the future cancels the computation.
        """
        task, scores = self._task(self._score, texts, top)
        self._send(lambda: self._scoring.append(task), task)
        return scores

    def close(self, seconds: float = 60.0) -> None:
        """Stop all jobs and the thread. Waits up to ``seconds`` for the current step."""
        with self._lock:
            self._inbox.put(None)
        self._thread.join(seconds)

    def _task(self, call: Callable[..., Any], *arguments: Any) -> tuple[Callable[[], None], asyncio.Future[Any]]:
        """Create a command that runs ``call``, and a future for its result. The future raises `failure` if set."""
        future = concurrent.futures.Future[Any]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the client disconnected
                return
            try:
                if self.failure is not None:
                    raise self.failure
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        return run, asyncio.wrap_future(future, loop=self._loop)

    def _send(self, run: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
        """Call ``run`` in the engine thread, or ``otherwise`` in the calling thread if the engine thread has ended."""
        with self._lock:
            if self._open:
                return self._inbox.put(run)
        otherwise()

    # The methods below run in the engine thread.

    def _run(self) -> None:
        try:
            while self.failure is None and self._obey(wait=not (self._running or self._scoring)):
                if self._scoring:  # one pass per step, so that other requests wait for at most one pass
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
                job.prefix = None  # lets the engine free the prefix with the last request that needs it
        except Exception:  # a tokenizer error must not end other requests
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
                is_broken = piece.finish == "error"
                pieces.append((job, dataclasses.replace(piece, finish=None) if is_broken else piece))
                if is_broken:
                    pieces.append((job, self._broken()))
            except Exception as error:  # a tokenizer error must not end other requests
                logger.exception("a request failed")
                self._cancel([job])
                pieces.append((job, error))
        self._hand_out(pieces)

    def _piece(self, event: Event, text: StopStringFilter) -> Sample:
        """Convert an event to text. At a stop string, ends the request and drops the ids after the string."""
        request, previous_count = event.request, text.count
        new_text = text.add_ids(event.ids, event.finish)
        finish = "stop" if text.stopped else event.finish
        span, routing = slice(previous_count, text.count), None
        if finish is not None:
            self.engine.cancel(request)
            del self._running[request]
            routing = request.routing
        sample = Sample(new_text, request.ids[span], [*request.logprobs[span]], [*request.top[span]], finish)
        sample.routing = None if routing is None else routing[: len(request.prompt) + text.count - 1]
        return sample

    def _score(self, texts: Sequence[tuple[int, ...]], top: int) -> list[Score]:
        try:
            scores = score(self.engine.model, texts, top=top)
        except ValueError:
            raise
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = error
            raise
        if any(math.isnan(text_score.total) for text_score in scores):
            raise self._broken()
        return scores

    def _broken(self) -> Refused:
        """Create the error for a request whose logits are NaN or infinite."""
        reason = "the model's logits are NaN or infinite after these ids, so there is no answer: "
        return Refused(500, reason + unusable_logits(self.engine.model))

    def _hand_out(self, pieces: Sequence[tuple[SampleJob, Sample | BaseException]]) -> None:
        try:
            if pieces:
                self._loop.call_soon_threadsafe(lambda: [job.put(piece) for job, piece in pieces])
        except RuntimeError:  # the event loop is closed because the server has stopped
            logger.debug("the server stopped before an answer could be delivered")

    def _end(self) -> None:
        self.failure = error = self.failure or RuntimeError("the server is shutting down")
        with self._lock:
            self._open = False
        self._hand_out([(job, error) for job, _ in self._running.values()])
        self._running.clear()
        self.engine.close()
        pending_commands = [self._inbox.get() for _ in range(self._inbox.qsize())]
        for command in filter(None, pending_commands):
            command()
        for task in self._scoring:
            task()
