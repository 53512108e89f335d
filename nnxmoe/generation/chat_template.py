"""Renders untrusted chat templates: runs ``template_worker.py`` in a subprocess and reports its failures as errors.

One worker process serves all templates: started by the first render, restarted after a kill, closed at exit.
"""

import atexit
import contextlib
import difflib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

TEMPLATE_CHARACTERS = 256 * 1024
TEXT_CHARACTERS = 4 * 1024 * 1024  # limit on a conversation as JSON, and on the rendered text
SECONDS = 1.0  # limit per render, enforced by the worker's alarm
GRACE = 0.5  # seconds after that alarm until the parent kills the worker
START_SECONDS = 60.0
MEMORY = 64 * 1024 * 1024

_WHY = {
    "raised": "refuses this conversation: {detail}. Change the messages to a form that it accepts",
    "include": "includes another template ({detail}). A chat template must be a single file: inline that template",
    "output": "writes {detail}. Correct the template or shorten the messages",
    "security": "does something that is not allowed: {detail}. A template may only read its variables",
    "undefined": "uses something undefined: {detail}. Pass it in the messages or as a variable",
    "syntax": "has a syntax error: {detail}. Correct the template",
    "memory": f"needs more than {MEMORY >> 20} MB. Correct the template or shorten the messages",
    "recursion": "calls itself, or is nested, too deeply. Correct the template",
    "failed": "failed with {detail}. Correct the template, or the messages it does not expect",
    "time": f"took longer than the {SECONDS:g} s a template may take. Correct the template or shorten the messages",
    "died": "ended its process ({detail}). Correct the template",
}


class ChatTemplateError(ValueError):
    """Raised for a faulty chat template or unsuitable messages; the message says what to change."""


class _WorkerEnded(Exception):
    """Raised if the worker process has ended; ``reply`` is the reply to use instead."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.reply = {"error": kind, "detail": detail}


class _Worker:
    """A running worker process: one request line in, one reply line out. It is killed if the reply is late."""

    def __init__(self) -> None:
        found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        if not all(found):
            raise ChatTemplateError("chat templates need jinja2. Install it with: pip install jinja2")
        settings = {
            "path": [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin],
            "seconds": SECONDS,
            "memory": MEMORY,
            "output": TEXT_CHARACTERS,
        }
        keep = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py")), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in keep if name in os.environ},  # no API tokens or keys
                start_new_session=True,  # Ctrl-C in the terminal must not interrupt it
            )
        except OSError as error:
            raise ChatTemplateError(
                f"cannot start a process for chat templates: {sys.executable!r} fails with {error}"
            ) from error
        try:
            self.ask(b"", START_SECONDS)  # waits for "ready": Python may start slowly
        except BaseException as error:
            self.close()
            if isinstance(error, _WorkerEnded):
                why = f"cannot start a process for chat templates: {sys.executable!r} ended at its start ({error})"
                raise ChatTemplateError(why) from None
            raise

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Send a line and read a line. Raises _WorkerEnded if the worker dies or its reply is late."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests and replies
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            requests.write(request)
            requests.flush()
            line = replies.readline(8 * TEXT_CHARACTERS)
        except OSError:
            line = b""
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            raise _WorkerEnded("time", f"silent for {seconds:g} s")
        if not line.endswith(b"\n"):
            raise self._how_it_ended()
        return line

    def _how_it_ended(self) -> _WorkerEnded:
        """The reason, from the exit code; the alarm's signal means that the time limit was exceeded."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return _WorkerEnded("died", "broken answer")
        if os.name == "posix" and -code in (signal.SIGALRM, signal.SIGXCPU):
            return _WorkerEnded("time", "alarm")
        return _WorkerEnded("died", f"signal {-code}" if code < 0 else f"exit code {code}")

    def close(self) -> None:
        """Kill the process, wait for it, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()

    def disown(self) -> None:
        """In a forked child: close this process's ends of the pipes without flushing. The parent owns the worker."""
        self._process.returncode = 0
        for pipe in (self._process.stdin, self._process.stdout):
            cast(io.BufferedReader | io.BufferedWriter, pipe).raw.close()


class _Renderer:
    """The worker of this process, started on demand. Renders one template at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(self, request: bytes) -> dict[str, Any]:
        """The worker's reply. The worker is restarted after a failure that may have corrupted its state."""
        with self._lock:
            sound = False
            try:
                self._worker = self._worker or _Worker()
                line = self._worker.ask(request, SECONDS + GRACE)
                reply = cast(dict[str, Any], json.loads(line.decode("utf-8", "surrogatepass")))
                sound = reply.get("error") not in ("memory", "recursion", "security")
                return reply
            except _WorkerEnded as ended:
                return ended.reply
            except ChatTemplateError:
                raise
            except (ValueError, AttributeError, RecursionError):
                return {"error": "died", "detail": "broken answer"}
            finally:
                if not sound:
                    self._stop()

    def close(self) -> None:
        """Stop the worker if it is running."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker:
            worker.close()

    def forget(self) -> None:
        """In a forked child: drop the worker, which the parent owns, and the lock, which another thread may hold."""
        self._lock = threading.Lock()
        worker, self._worker = self._worker, None
        if worker:
            worker.disown()


_renderer = _Renderer()
atexit.register(_renderer.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renderer.forget)


def render_chat_template(template: str, variables: dict[str, Any], required: Iterable[str] = ()) -> str:
    """Render an untrusted template in a sandbox: about 1 second, 64 MB, no access to files or code.

    ``variables`` must be JSON-serialisable. Raises ChatTemplateError, or TypeError if the template does not read a
    variable named in ``required``.
    """
    if len(template) > TEMPLATE_CHARACTERS:
        raise _fault(f"is {len(template)} characters long; the limit is {TEMPLATE_CHARACTERS}. Shorten it")
    try:
        request = {"template": template, "variables": variables, "required": list(required)}
        asked = json.dumps(request, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"cannot be given these messages or variables: {error}. Use strings, numbers, lists and dicts only"
        raise _fault(why) from None
    if len(asked) - len(template) > TEXT_CHARACTERS:
        raise _fault(f"received {len(asked)} characters of messages; the limit is {TEXT_CHARACTERS}. Shorten them")
    reply = _renderer.render(asked.encode("utf-8", "surrogatepass") + b"\n")
    text = reply.get("text")
    if isinstance(text, str):
        return text
    if unused := reply.get("unused"):
        raise TypeError(_unused(str(unused), [*variables, *map(str, reply.get("names", ()))]))
    why = _WHY.get(str(reply.get("error")), _WHY["failed"])
    detail = _printable(str(reply.get("detail", ""))).rstrip(". ")
    raise _fault(why.format(detail=detail), reply.get("line"))


def _unused(name: str, known: list[str]) -> str:
    arguments = ("continue_final_message", "chat_template", "tokenize")
    near = difflib.get_close_matches(name, {*known, *arguments} - {name}, 1)
    hint = f"did you mean {near[0]!r}?" if near else "leave it out"
    return f"unexpected argument {name!r}: the chat template has no such variable; {hint}"


def _fault(why: str, line: int | None = None) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template{f', line {line},' if line else ''} {why}")


def _printable(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters become spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
