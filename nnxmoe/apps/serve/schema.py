"""Request bodies of the OpenAI API.

Unknown fields, wrong types and values out of range raise an error with the name of the field. Null values,
values without effect (`fields.NEUTRAL`) and labels are treated as absent.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from nnxmoe.apps.serve.fields import CACHE, LABELS, content_parts, effective, refusal
from nnxmoe.apps.serve.settings import Refused

Id = Annotated[int, Meta(ge=0, lt=2**31)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

GUIDED = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
        include_usage: Whether to append a chunk with the token counts.
        continuous_usage_stats: Whether all chunks contain the counts so far, if ``include_usage`` is set, as
            in vLLM.
        include_obfuscation: No effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None

    @property
    def usage(self) -> Literal["last", "always"] | None:
        """Which chunks report token counts. `None` if no chunk does."""
        return None if not self.include_usage else "always" if self.continuous_usage_stats else "last"


class JsonSchema(Struct):
    """JSON schema for answers.

    Attributes:
        schema: Schema that answers follow unless they are truncated. The other fields have no effect.
    """

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Struct):
    """A function that the model may call.

    Attributes:
        name: Name of the function.
        description: Description for the model.
        parameters: JSON schema of the arguments.
        strict: Whether to enforce ``parameters``, unless the answer is truncated.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Convert the tool to the dict that chat templates read."""
        fields = {"name": self.function.name, "description": self.function.description}
        fields["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


class FunctionName(Struct, forbid_unknown_fields=True):
    """Name of a function."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class BaseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of completion and chat requests. ``model`` defaults to the served model.

    ``min_tokens``, ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``stop_token_ids`` and
    ``guided_…`` are fields of vLLM, and ``return_routed_experts`` is a field of SGLang, not of OpenAI.
    """

    model: str | None = None
    max_tokens: Natural | None = None
    min_tokens: Natural | None = None
    n: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[Id, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    return_routed_experts: bool | None = None


class CompletionRequest(BaseRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    Attributes:
        prompt: A text, several texts, token ids, or several lists of token ids.
        echo: Whether the response includes the prompt.
        logprobs: Number of most likely tokens to report.
        best_of: Must equal ``n``.
    """

    prompt: str | list[str | Id | list[Id]]
    echo: bool | None = None
    logprobs: Natural | None = None
    best_of: Positive | None = None


class TextPart(Struct):
    """Text part of a message whose content is a list."""

    type: Literal["text"]
    text: str


class Message(Struct):
    """A message of a chat.

    Attributes:
        role: Role of the author.
        content: Text, or text parts.
        more: Further fields for the chat template.
    """

    role: str
    content: str | list[TextPart] | None = None
    more: dict[str, Any] = {}

    def plain(self) -> dict[str, Any]:
        """Convert the message to the dict that chat templates read. Joins text parts."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return {"role": self.role, "content": content, **self.more}


class ChatRequest(BaseRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    ``chat_template_kwargs`` are variables of the chat template, as in vLLM.
    """

    messages: list[Message]
    max_completion_tokens: Natural | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


Body = TypeVar("Body", bound=BaseRequest)


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decode a request body. Raises Refused with status 400 and the name of the field."""
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict):
            fields = {name: _integral_to_int(value) for name, value in fields.items() if name not in LABELS}
            fields = effective(fields, kind.__struct_fields__, chat=issubclass(kind, ChatRequest))
            if isinstance(messages := fields.get("messages"), list):
                fields["messages"] = [_split(message) if isinstance(message, dict) else message for message in messages]
        request = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise refusal(str(error), kind.__struct_fields__) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    _refuse_combinations(request)
    return request


def _integral_to_int(value: Any) -> Any:
    """Convert integral floats such as 5.0 to int, including floats in lists.

    Some clients serialize integers as floats.
    """
    if isinstance(value, list):
        return [_integral_to_int(element) for element in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _split(message: dict[str, Any]) -> dict[str, Any]:
    """Convert an object to the fields of `Message`.

    Null fields, and empty lists as in OpenAI's answers, are treated as absent.
    """
    fields = {name: value for name, value in message.items() if value not in (None, []) and name != CACHE}
    content_fields = {name: content_parts(fields.pop(name)) for name in ("role", "content") if name in fields}
    return {**content_fields, "more": fields}


def _refuse_combinations(request: BaseRequest) -> None:
    """Raise Refused for fields that exclude each other."""
    if isinstance(request, CompletionRequest):
        if request.best_of not in (None, request.n or 1):
            raise Refused(400, "best_of is not supported: leave it out, or set it to the value of n", "best_of")
        if request.echo and request.stream:
            raise Refused(400, "echo is not supported with stream: leave out echo or stream", "echo")
    if isinstance(request, ChatRequest):
        for i, message in enumerate(request.messages):
            if message.role == "function":
                reason = f"messages[{i}].role 'function' is not supported: use the role tool, with tool_call_id"
                raise Refused(400, reason, "messages")
    forms = [name for name in GUIDED if getattr(request, name) is not None]
    if len(forms) > 1:
        raise Refused(400, f"{forms[0]} and {forms[1]} exclude each other", forms[1])
    if forms and request.ignore_eos:
        raise Refused(400, f"ignore_eos and {forms[0]} exclude each other: the format ends the answer", "ignore_eos")
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise Refused(400, "response_format: json_schema needs the type json_schema, and vice versa", "response_format")
    options = request.stream_options or StreamOptions()
    if (options.include_usage or options.continuous_usage_stats) and not request.stream:
        raise Refused(400, "stream_options needs stream: true", "stream_options")
