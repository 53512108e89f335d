"""Render chat templates in jinja2's immutable sandbox, as transformers does.

Templates have the same filters and functions as in transformers. The sandbox denies access to Python
internals and files. As in transformers, run time and memory of a template are not limited.
"""

import contextvars
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class ChatTemplateError(ValueError):
    """Raised if a chat template is invalid or cannot render the messages."""


class _Raised(jinja2.TemplateError):
    """Raised if the template calls ``raise_exception``."""


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """Rendered chat.

    Attributes:
        text: the rendered text.
        answers: character ranges inside ``{% generation %}`` tags.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass
class _Tracker:
    """Text rendered so far, and the text inside ``{% generation %}`` tags.

    Attributes:
        pieces: pieces of the rendered text.
        length: number of rendered characters.
        found: start and text of each block inside tags.
    """

    pieces: list[str] = dataclasses.field(default_factory=list)
    length: int = 0
    found: list[tuple[int, str]] = dataclasses.field(default_factory=list)


_tracker: contextvars.ContextVar[_Tracker] = contextvars.ContextVar("tracker")


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for ``{% generation %}...{% endgeneration %}``.

    The tags mark the assistant's text. The body is rendered unchanged.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Convert the block to a call to `body` so that the block has its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        """Render the block and record its position."""
        text = caller()
        _tracker.get().found.append((_tracker.get().length, text))
        return text


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace()`` without names that start with an underscore, because they expose Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # All parameters are variadic so that templates can call namespace(self=...).
        namespace, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _DictMaker:
    """Replacement for ``dict`` in templates that does not expose the methods and bases of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace() does not accept the name {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize a value as JSON, as in training data.

    Unlike Jinja's filter, this filter does not escape ``<``, ``>``, ``&`` and ``'``.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": _DictMaker(),
    }
    return environment


_compiled = functools.lru_cache(maxsize=32)(lambda template: _environment().from_string(template))


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads. Raises ChatTemplateError for invalid templates."""
    try:
        nodes = _environment().parse(template).find_all(jinja2.nodes.Name)
        return frozenset(node.name for node in nodes if node.ctx == "load")
    except (jinja2.TemplateError, RecursionError) as error:
        raise _template_error(error, None) from None


def render_chat_template(template: str, variables: Mapping[str, Any]) -> RenderedChat:
    """Render a template in the sandbox. Raises ChatTemplateError if rendering fails."""
    compiled, tracker = None, _Tracker()
    token = _tracker.set(tracker)
    try:
        compiled = _compiled(template)
        # unlike render(), root_render_func preserves the traceback, so errors can report the template line
        for piece in compiled.root_render_func(compiled.new_context(to_json_types(variables))):
            tracker.pieces.append(piece)
            tracker.length += len(piece)
    except Exception as error:
        raise _template_error(error, compiled) from None
    finally:
        _tracker.reset(token)
    text = "".join(tracker.pieces)
    # In a macro or {% set %}, the block is rendered before the preceding text, so the position is unknown.
    positions_known = all(text.startswith(part, start) for start, part in tracker.found)
    answers = tuple((start, start + len(part)) for start, part in tracker.found if part) if positions_known else ()
    return RenderedChat(text, answers)


def _placeholder(value: object) -> str:
    return f"<{type(value).__name__}>"


def to_json_types(value: Any, fallback: Callable[[Any], Any] = _placeholder) -> Any:
    """Convert a value to JSON types. Their methods are safe in the sandbox.

    Args:
        value: the value. Arrays, dataclasses and pydantic models are supported.
        fallback: converts objects of other types. Defaults to the text ``<type name>``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # converts subclasses, such as enums, to str
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {to_json_types(name, fallback): to_json_types(item, fallback) for name, item in value.items()}
    if isinstance(value, list | tuple):
        values = [to_json_types(item, fallback) for item in value]
        return tuple(values) if type(value) is tuple else values
    if hasattr(value, "dtype") and callable(convert := getattr(value, "tolist", None)):  # NumPy and JAX arrays
        return to_json_types(convert(), fallback)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_types(getattr(value, field.name), fallback) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic models, such as OpenAI messages
        return to_json_types(dump(), fallback)
    return fallback(value)


def _template_error(error: Exception, compiled: jinja2.Template | None) -> ChatTemplateError:
    """Convert an exception to a ChatTemplateError, with the template line if it is known."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace and compiled:
        if trace.tb_frame.f_globals.get("__jinja_template__") is compiled:
            line = compiled.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    text = "".join(character if character.isprintable() else " " for character in str(error)[:2000]).rstrip(". ")
    match error:
        case _Raised():
            reason = f"refuses this conversation: {text}"
        case jinja2.TemplateSyntaxError():
            reason = f"has a syntax error: {text}"
        case jinja2.UndefinedError():
            reason = f"uses an undefined value: {text}. Pass the value in the messages or as a variable"
        case jinja2.exceptions.SecurityError():
            reason = f"performs an operation that is not allowed: {text}"
        case RecursionError():
            reason = "recurses or is nested too deeply"
        case _:
            reason = f"failed with {type(error).__name__}: {text}"
    return ChatTemplateError(f"the chat template{f', line {line},' if line else ''} {reason}")
