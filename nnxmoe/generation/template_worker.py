"""Renders chat templates in a separate process; ``chat_template.py`` runs this file by its path.

Templates come with checkpoints and are untrusted. Jinja's sandbox protects Python's internals, but it cannot stop
``'a' * 10**10``, ``9**9**9`` or nested loops, which spend their time inside one C call. The kernel therefore limits the
time, memory and files of this process. It imports the standard library and jinja2 only.

Started as ``python -I -S template_worker.py SETTINGS``; SETTINGS is a JSON object ``{path, seconds, memory, output}``:
folders for ``sys.path``, seconds and bytes per render, characters of output. It writes ``{"ready": true}`` and answers
each line ``{template, variables, required}`` with ``{"text"}``, ``{"error", "detail", "line"}``, or, if the template
does not read a required variable, ``{"unused", "names"}``: that variable, and the names that the template reads.
"""

import functools
import json
import math
import signal
import sys
import textwrap  # noqa: F401  (jinja2 imports it while rendering, when files can no longer be opened)
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":  # the parent's jinja2 and markupsafe: -S excludes every site-packages folder
    sys.path.extend(json.loads(sys.argv[1])["path"])

import jinja2
import jinja2.constants  # like textwrap: jinja2 imports it and debug while rendering
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

try:
    import resource
except ImportError:  # Windows has neither rlimits nor timers; there only the parent enforces the time limit
    resource = None


class RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class OtherTemplateWanted(jinja2.TemplateError):
    """The template asked for another file by include, import or extends."""


class OutputTooLong(Exception):
    """The template wrote more than the limit."""


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text; the body is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Turn the block into a call of :meth:`body`, so that it has its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        """Render the enclosed part."""
        return caller()


class NoLoader(jinja2.BaseLoader):
    """Refuses every other template by name, without opening files."""

    def get_source(self, environment: jinja2.Environment, template: str) -> NoReturn:
        raise OtherTemplateWanted(str(template))


class Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace()`` without underscore names, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter, so that namespace(self=...) works.
        namespace, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            check_name(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


class DictMaker:
    """The ``dict`` of templates: creates dictionaries, but does not expose the type's methods and bases."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dictionary with the given keys."""
        return dict.fromkeys(*args)


def check_name(name: object) -> None:
    """Refuse names that start with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def raise_exception(message: object) -> NoReturn:
    """Lets a template refuse a conversation."""
    raise RaisedByTemplate(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: unlike Jinja's own filter it does not escape ``<``, ``>``, ``&`` and ``'``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> jinja2.Environment:
    """The environment that Hugging Face chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols], loader=NoLoader()
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=Namespace,
        dict=DictMaker(),
    )
    return environment


def render(compiled: jinja2.Template, variables: dict[str, Any], longest: int) -> str:
    """Render in pieces, so that endless output stops at ``longest`` characters."""
    pieces: list[str] = []
    length = 0
    rendered: Iterator[str] = compiled.root_render_func(compiled.new_context(variables))
    for piece in rendered:
        length += len(piece)
        if length > longest:
            raise OutputTooLong(f"more than {longest} characters")
        pieces.append(piece)
    return "".join(pieces)


def unused_variable(environment: jinja2.Environment, template: str, required: list[str]) -> dict[str, Any]:
    """The reply for the first required variable that the template never reads; empty if it reads all."""
    if not required:
        return {}
    names = {node.name for node in environment.parse(template).find_all(jinja2.nodes.Name) if node.ctx == "load"}
    return next(({"unused": name, "names": sorted(names)} for name in required if name not in names), {})


# The first matching class determines the kind of an error.
KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (RaisedByTemplate, "raised"),
    (OtherTemplateWanted, "include"),
    (OutputTooLong, "output"),
    (jinja2.exceptions.SecurityError, "security"),
    (jinja2.UndefinedError, "undefined"),
    (jinja2.TemplateSyntaxError, "syntax"),
    (MemoryError, "memory"),
    (RecursionError, "recursion"),
)


def describe(error: Exception, compiled: jinja2.Template | None) -> dict[str, Any]:
    """The reply for a failed render: kind, text, and the template's line if known."""
    kind = next((name for cls, name in KINDS if isinstance(error, cls)), "failed")
    detail = str(error) if kind != "failed" else f"{type(error).__name__}: {error}"
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace and compiled:
        if trace.tb_frame.f_globals.get("__jinja_template__") is compiled:
            line = compiled.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return {"error": kind, "detail": detail[:2000], "line": line}


def limit_process(memory: int) -> None:
    """Limits this process: no new files, no writing, no children, no core dump, ``memory`` additional bytes."""
    if resource is None:
        return
    limits = {"NOFILE": 0, "FSIZE": 0, "NPROC": 0, "CORE": 0}
    statm = Path("/proc/self/statm")
    if statm.exists():  # other systems do not report it, and macOS does not enforce the limit
        limits["AS"] = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (ValueError, OSError, AttributeError):
            continue  # the system lacks this limit, or the hard limit is lower


def limit_time(seconds: float) -> None:
    """Let the kernel kill this process after ``seconds`` of wall time; 0 cancels the limit.

    SIGALRM keeps its default action: a Python handler would only run after the current C call.
    """
    if resource is None:
        return
    if seconds:  # limits the CPU time too, in case the alarm is lost
        used = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (used + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def serve(requests: BinaryIO, replies: BinaryIO, settings: dict[str, Any]) -> None:
    """Answer line by line until the parent closes the pipe."""
    environment = make_environment()
    compile_template = functools.lru_cache(maxsize=4)(environment.from_string)
    warm = compile_template("{% generation %}{{ [{}] | tojson }}{{ strftime_now('%Y %B') }}{% endgeneration %}")
    render(warm, {}, settings["output"])  # modules loaded on first use must load while files can be opened
    limit_process(settings["memory"])
    replies.write(b'{"ready": true}\n')
    replies.flush()
    for request in requests:
        limit_time(settings["seconds"])
        compiled = None
        try:
            asked = json.loads(request)
            compiled = compile_template(asked["template"])
            reply = unused_variable(environment, asked["template"], asked["required"])
            reply = reply or {"text": render(compiled, asked["variables"], settings["output"])}
            line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except Exception as error:
            line = json.dumps(describe(error, compiled)).encode()
        limit_time(0)
        replies.write(line + b"\n")
        replies.flush()


def main() -> None:
    """Reset the signal settings inherited from the parent, then serve."""
    if resource is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGXCPU})
    serve(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
