"""The thread that owns the engine: other threads send it commands, and it sends back what each step has made."""

import asyncio
import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nnxmoe.generation.complete import Continuation
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import Event, Finish, Prefix, Request, Wanted
from nnxmoe.generation.score import TOKENS, Score, score

logger = logging.getLogger("nnxmoe")


@dataclasses.dataclass
class Sample:
    """A sample, or what one step added to it. ``text`` may lag behind ``ids``; ``finish``: why the sample is done. In a
    response ``echoed`` ids of the prompt come first, and the new text begins at ``start``."""

    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]] | None] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    echoed: int = 0
    start: int = 0

    def add(self, piece: "Sample") -> None:
        """Append what a step has made."""
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.top += piece.top
        self.finish = piece.finish


@dataclasses.dataclass(eq=False)
class SampleJob:
    """One sample to make. ``put`` gets its pieces, in the event loop's thread, or the exception that ended it.
    ``keep``: special tokens that are in its text. ``request`` and ``text``: while the engine makes it."""

    ids: tuple[int, ...]
    wanted: Wanted
    stop: tuple[str, ...]
    put: Callable[[Sample | BaseException], None]
    prefix: Prefix | None = None
    keep: frozenset[int] = frozenset()
    request: Request | None = None
    text: Continuation | None = None


class _Scoring(NamedTuple):
    ids: tuple[int, ...]
    top: int
    done: asyncio.Future[Score]


class _Command(NamedTuple):
    run: Callable[[], None]
    result: asyncio.Future[Any] | None


class EngineThread:
    """Runs an engine. Its methods are called in the thread of ``loop``, and return at once.

    ``failure``: the exception that ended the thread; every job gets it.
    """

    def __init__(self, engine: Engine, tokenizer: Any, loop: asyncio.AbstractEventLoop):
        self.engine = engine
        self.failure: BaseException | None = None
        self._tokenizer, self._loop = tokenizer, loop
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock, self._open = threading.Lock(), True  # an open inbox is read
        self._running: dict[Request, SampleJob] = {}
        self._scoring: collections.deque[_Scoring] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="nnxmoe engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[SampleJob]) -> asyncio.Future[None]:
        """Append jobs to the engine's queue: all, or none if the result is a ValueError."""
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._send(lambda: self._accept(jobs, accepted), accepted)
        return accepted

    def cancel(self, jobs: Sequence[SampleJob]) -> None:
        """End jobs and free their slots; without effect on those that are done."""
        self._send(lambda: self._cancel(jobs))

    def score(self, ids: tuple[int, ...], top: int) -> asyncio.Future[Score]:
        """Log-probabilities of ids, computed between two steps. Cancelling the result cancels the work."""
        done: asyncio.Future[Score] = self._loop.create_future()
        self._send(lambda: self._scoring.append(_Scoring(ids, top, done)), done)
        return done

    def close(self, seconds: float = 60.0) -> None:
        """End all jobs and the thread, which finishes its step first."""
        with self._lock:
            self._inbox.put(None)
        self._thread.join(seconds)

    def _send(self, run: Callable[[], None], result: asyncio.Future[Any] | None = None) -> None:
        with self._lock:
            if self._open:
                self._inbox.put(_Command(run, result))
            elif result is not None:
                result.set_exception(self._why())

    def _why(self) -> BaseException:
        return self.failure or RuntimeError("the server stops")

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey(wait=not (self._running or self._scoring)):
                if self._scoring:
                    self._score()
                if self._running:
                    self._deliver(self.engine.step())
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = error
        self._end(self._why())

    def _obey(self, wait: bool) -> bool:
        """Run the commands that were sent. Returns False to end the thread."""
        try:
            while (command := self._inbox.get(block=wait)) is not None:
                wait = False
                try:
                    command.run()
                except BaseException:
                    self._inbox.put(command)  # unanswered: _end answers it, after `failure` is set
                    raise
        except queue.Empty:
            return True
        return False

    def _accept(self, jobs: Sequence[SampleJob], accepted: asyncio.Future[None]) -> None:
        try:
            for job in jobs:
                job.text = Continuation(self._tokenizer, job.stop, job.ids, job.keep)
            for job in jobs:
                job.request = self.engine.submit(job.ids, job.wanted, job.prefix)
                job.prefix = None  # the engine frees a prefix with the last request that needs it
        except Exception as error:  # of a tokenizer: it must not end other requests
            self._cancel(jobs)
            return self._tell(lambda error=error: _settle(accepted, error))
        done = []
        for job in jobs:
            assert job.request is not None
            if job.request.done:  # no new ids were asked for
                done.append((job, Sample(finish=job.request.finish)))
            else:
                self._running[job.request] = job
        self._tell(lambda: _settle(accepted, None))
        self._hand_out(done)

    def _cancel(self, jobs: Sequence[SampleJob]) -> None:
        for job in jobs:
            if job.request is not None:
                self.engine.cancel(job.request)
                self._running.pop(job.request, None)

    def _deliver(self, events: Sequence[Event]) -> None:
        pieces = list[tuple[SampleJob, Sample | BaseException]]()
        for event in events:
            if (job := self._running.get(event.request)) is None:
                continue
            try:
                pieces.append((job, self._piece(event, job.text)))
            except Exception as error:  # of a tokenizer: it must not end other requests
                logger.exception("a request failed")
                self._cancel([job])
                pieces.append((job, error))
        self._hand_out(pieces)

    def _piece(self, event: Event, text: Any) -> Sample:
        """Convert an event to text. At a stop string end the request and drop the ids that follow."""
        request, new, kept = event.request, "", 0
        for token in event.ids:
            new, kept = new + text.put(token), kept + 1
            if text.stopped:
                break
        finish = event.finish
        if finish is not None:
            new += text.end()
        if text.stopped:
            self.engine.cancel(request)
            finish = "stop"
        if finish is not None:
            del self._running[request]
        at = slice(event.start, event.start + kept)
        return Sample(new, event.ids[:kept], [*request.logprobs[at]], [*request.top[at]], finish)

    def _score(self) -> None:
        """One pass over texts that wait to be scored, so that the steps of others do not wait for more."""
        batch, room = list[_Scoring](), TOKENS
        while self._scoring and (not batch or len(self._scoring[0].ids) <= room):
            one = self._scoring.popleft()
            if not one.done.cancelled():
                batch.append(one)
                room -= len(one.ids)
        if not batch:
            return
        try:
            top = max(one.top for one in batch)
            found = score(self.engine.model, [one.ids for one in batch], top=top)
        except ValueError as error:
            return self._tell(lambda error=error: [_settle(one.done, error) for one in batch])
        except BaseException:
            self._scoring.extend(batch)  # unanswered: _end answers them, after `failure` is set
            raise
        self._tell(lambda: [_settle(one.done, None, each) for one, each in zip(batch, found, strict=True)])

    def _hand_out(self, pieces: Sequence[tuple[SampleJob, Sample | BaseException]]) -> None:
        if pieces:
            self._tell(lambda: [job.put(piece) for job, piece in pieces])

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._open = False
        unread = [self._inbox.get() for _ in range(self._inbox.qsize())]
        results = [command.result for command in unread if command is not None and command.result is not None]
        self._hand_out([(job, error) for job in self._running.values()])
        results += [one.done for one in self._scoring]
        self._tell(lambda: [_settle(result, error) for result in results])
        self._running.clear()
        self.engine.close()

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed: the server has ended
            logger.debug("an answer came after the server's end")


def _settle(future: asyncio.Future[Any], error: BaseException | None, value: Any = None) -> None:
    if future.done():  # cancelled, its client is gone
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
