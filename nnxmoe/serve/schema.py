"""Request bodies, after the OpenAI API. Unknown fields, wrong types and values out of range are refused by name."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from nnxmoe.serve.settings import Refused

Id = Annotated[int, Meta(ge=0, lt=2**31)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Share = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``include_usage``: send a last chunk with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of request; null counts as left out. ``min_tokens``, ``top_k``, ``min_p`` and
    ``repetition_penalty`` are not OpenAI's; they have the names that vLLM gives them."""

    model: str
    max_tokens: Natural | None = None
    min_tokens: Natural | None = None
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[Id, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Accepted only where they change nothing: see `refuse_unsupported`.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class CompletionRequest(Options, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, several, token ids, or several lists of them."""

    prompt: str | list[str | Id | list[Id]]
    echo: bool | None = None
    logprobs: Natural | None = None
    best_of: Positive | None = None
    suffix: str | None = None


class Part(Struct, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """One turn of a chat. The null fields are those of OpenAI's answers, which clients send back."""

    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it, its parts joined."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return {"role": self.role, "content": content, "reasoning_content": self.reasoning_content}


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """Only plain text is supported."""

    type: Literal["text"]


class ChatRequest(Options, kw_only=True):
    """``POST /v1/chat/completions``. ``chat_template_kwargs``: variables of the template, as in vLLM."""

    messages: list[Message]
    max_completion_tokens: Natural | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none"] | None = None
    store: Literal[False] | None = None


Body = TypeVar("Body", bound=Options)


def decode(body: bytes, kind: type[Body]) -> Body:
    """The request in a body. Raises Refused with status 400 that names the field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Refused(400, f"{error}. See which fields this server takes in its README", _field(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    refuse_unsupported(request)
    return request


def refuse_unsupported(request: Options) -> None:
    """Raises Refused for fields of the API that would change the answer, and are not supported."""
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(request, name):
            raise Refused(400, f"{name} is not supported: leave it out, or use repetition_penalty", name)
    if isinstance(request, ChatRequest):
        lists = {"tools": request.tools}
        for message in request.messages:
            lists |= {name: value for name in ("annotations", "tool_calls") if (value := getattr(message, name))}
        for name, value in lists.items():
            if value:
                raise Refused(400, f"{name} is not supported: leave it out", name)
    if isinstance(request, CompletionRequest):
        if request.suffix:
            raise Refused(400, "suffix is not supported: leave it out", "suffix")
        if request.best_of not in (None, request.n or 1):
            raise Refused(400, "best_of is not supported: leave it out, or give the same number as n", "best_of")
        if request.echo and request.stream:
            raise Refused(400, "echo is not supported with stream: leave one of them out", "echo")
    if request.stream_options is not None and not request.stream:
        raise Refused(400, "stream_options needs stream: true", "stream_options")


def _field(message: str) -> str | None:
    """The field that an error of msgspec is about."""
    found = re.search(r"field `(\w+)`", message) or re.search(r"`\$\.(\w+)", message)
    return found.group(1) if found else None
