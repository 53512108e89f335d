"""Convert request bodies to prompts and options for the engine."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from nnxmoe.apps.serve.answer_form import PLAIN, AnswerForm
from nnxmoe.apps.serve.call_formats import FORMATS, format_of
from nnxmoe.apps.serve.schema import GUIDED, BaseRequest, ChatRequest, CompletionRequest, Message, NamedTool
from nnxmoe.apps.serve.settings import Refused, ServerSettings
from nnxmoe.apps.serve.tool_options import ToolOptions
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.grammar import Grammar, symbols
from nnxmoe.generation.ids import check_ids, eos_ids
from nnxmoe.generation.request import Prefix, RequestOptions
from nnxmoe.generation.sampling import OPTIONS, Sampling
from nnxmoe.generation.stop_strings import split_stop_strings
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.tokenizer.tokenizer import TokenizerError

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions. Chats default to the free tokens of a slot.
COMPLETION_LOGPROBS, CHAT_LOGPROBS = 5, 20  # maximum values that the API allows
OURS = {"messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message"}
OURS |= {"chat_template"}  # a client's template must not run in this process
_GUIDES: Mapping[str, Callable[[Any, Any], Grammar]] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": Grammar.lark,
}
ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = ("tool_calls", "audio", "refusal")  # fields of a message that are part of the conversation


@dataclasses.dataclass(frozen=True)
class Planned:
    """A validated request.

    Attributes:
        prompts: Ids of the prompts.
        options: Engine options that all samples share.
        n: Number of samples per prompt.
        stop: Stop strings.
        seeded: Whether the client set a seed. If not, each prompt gets a random seed.
        stream: Whether to stream the response.
        usage: Which chunks of a stream report token counts. `None` for no chunk.
        texts: Texts of the prompts to echo, or `None`.
        scored: Whether to return the log-probabilities of echoed prompts.
        answer: Structure of the answers.
    """

    prompts: list[tuple[int, ...]]
    options: RequestOptions
    n: int
    stop: tuple[str, ...]
    seeded: bool
    stream: bool = False
    usage: Literal["last", "always"] | None = None
    texts: list[str] | None = None
    scored: bool = False
    answer: AnswerForm = PLAIN

    def samples(self) -> list[tuple[tuple[int, ...], RequestOptions, Prefix | None]]:
        """Return ids, options and shared prefix of every sample, in the order of the choices of the response."""
        samples = []
        for ids in self.prompts:
            prefix = Prefix(ids) if self.n > 1 else None
            options = self.options if self.seeded else dataclasses.replace(self.options, seed=secrets.randbits(63))
            samples += [(ids, dataclasses.replace(options, sample=i), prefix) for i in range(self.n)]
        return samples


class Planner:
    """Validator of requests for an engine. ``sampling`` has the defaults of absent sampling fields."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings):
        self.tokenizer, self.settings, self.capacity = tokenizer, settings, engine.capacity
        self.vocab, self.limits = engine.model.vocab_size, engine.limits
        self.stop_ids, self.sampling = eos_ids(engine.model, ...), default_sampling(engine.model)
        self.symbols = symbols(tokenizer)

    def completion(self, request: CompletionRequest) -> Planned:
        """Plan the response to ``/v1/completions``. Raises Refused if the request is invalid."""
        self._refuse_model(request)
        prompts, texts = self._prompts(request.prompt)
        max_tokens = self._most("prompt", prompts, request.max_tokens, COMPLETION_TOKENS)
        logprobs = _at_most("logprobs", request.logprobs, COMPLETION_LOGPROBS)
        plan = self._plan(request, prompts, max_tokens, logprobs)
        if not request.echo:
            return plan
        return dataclasses.replace(plan, texts=texts, scored=logprobs is not None)

    def chat(self, request: ChatRequest) -> Planned:
        """Plan the response to ``/v1/chat/completions``. Raises Refused if the request or the chat is invalid."""
        self._refuse_model(request)
        if request.top_logprobs and not request.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = _at_most("top_logprobs", request.top_logprobs, CHAT_LOGPROBS) or 0
        variables, calls = self._variables(request), self._calls(request)
        self._refuse_roles(request.messages)
        ids = self._rendered(request, calls, variables)
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise Refused(400, "send max_completion_tokens or max_tokens, not both", "max_tokens")
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        max_tokens = self._most("messages", [tuple(ids)], limit)
        template, end = self._template_for(calls is not None), self.tokenizer.decode(ids[-8:])
        answer = AnswerForm.of(template, end, calls, self.symbols)
        return self._plan(request, [tuple(ids)], max_tokens, logprobs if request.logprobs else None, answer)

    def _rendered(self, request: ChatRequest, calls: ToolOptions | None, variables: Mapping[str, Any]) -> list[int]:
        tools = [tool.plain() for tool in request.tools or ()] if calls is not None else None
        messages = [self._message(message) for message in request.messages]
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, tools=tools, **variables
            )
        except (TokenizerError, TypeError) as error:
            raise Refused(400, getattr(error, "public", str(error)), "messages") from None

    def _calls(self, request: ChatRequest) -> ToolOptions | None:
        """Return the tools that the answer may call, or `None`. Raises Refused if the tools cannot be used."""
        choice, tools = request.tool_choice, request.tools or []
        tool_name = choice.function.name if isinstance(choice, NamedTool) else None
        if choice not in (None, "none", "auto") and not tools:
            raise Refused(400, "tool_choice needs tools to choose from: send tools", "tool_choice")
        if choice == "none" or not tools:
            return None
        parameters = {tool.function.name: tool.function.parameters for tool in tools}
        if len(parameters) < len(tools):
            raise Refused(400, "tools: two functions have the same name", "tools")
        if tool_name is not None and tool_name not in parameters:
            raise Refused(400, f"tool_choice: there is no function {tool_name!r:.80} in tools", "tool_choice")
        template = self._template_for(tools=True)
        if "tools" not in template:
            reason = "tools is not supported: the model's chat template does not read tools (a template for tools "
            raise Refused(400, reason + "can be added as additional_chat_templates/tool_use.jinja)", "tools")
        if (form := format_of(template)) is None:
            reason = f"tools is not supported: the chat template uses none of the call formats {', '.join(FORMATS)}"
            raise Refused(400, reason, "tools")
        parameters = parameters if tool_name is None else {tool_name: parameters[tool_name]}
        strict = any(tool.function.strict for tool in tools)
        must, several = choice not in (None, "auto"), tool_name is None and request.parallel_tool_calls is not False
        return ToolOptions(form, parameters, must, strict, several, tool_name is not None)

    def _template_for(self, tools: bool) -> str:
        templates = self.tokenizer.chat_templates
        return (templates.get("tool_use") if tools else None) or self.tokenizer.chat_template or ""

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        variables, effort = dict(request.chat_template_kwargs or {}), request.reasoning_effort
        if protected_names := sorted(OURS & set(variables)):
            raise Refused(400, f"chat_template_kwargs cannot set {protected_names[0]}", "chat_template_kwargs")
        reads_effort = self._reads("reasoning_effort")
        if effort is None or (effort == "none" and not reads_effort):
            return variables
        if not reads_effort:
            reason = "reasoning_effort is not supported: the model's chat template does not read it"
            raise Refused(400, reason, "reasoning_effort")
        return {"reasoning_effort": effort, **variables}

    def _refuse_roles(self, messages: Sequence[Message]) -> None:
        """Raise Refused for a role that neither the API nor the chat template defines."""
        for i, message in enumerate(messages):
            if message.role not in ROLES and not self._reads(repr(message.role)):
                reason = f"messages[{i}].role: unknown role {message.role:.40}: use one of {', '.join(ROLES)}"
                raise Refused(400, reason, "messages")

    def _message(self, message: Message) -> dict[str, Any]:
        """Convert a message to a dict for the template. Raises Refused if the template would drop a field."""
        if names := [name for name in CONTENT if name in message.more and not self._reads(name)]:
            raise Refused(400, f"{names[0]} is not supported: the model's chat template does not read it", names[0])
        entry = message.plain()  # the role developer becomes system unless the template reads it
        return entry | {"role": "system"} if entry["role"] == "developer" and not self._reads("developer") else entry

    def _reads(self, word: str) -> bool:
        """Return whether a chat template contains a word. A quoted word matches with single or double quotes."""
        texts = [self._template_for(tools) for tools in (False, True)]
        return any(word in text or word in text.replace('"', "'") for text in texts)

    def _plan(
        self,
        request: BaseRequest,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        logprobs: int | None,
        answer: AnswerForm = PLAIN,
    ) -> Planned:
        n = _at_most("n", request.n, self.settings.samples) or 1
        biases, min_tokens = request.logit_bias or {}, request.min_tokens or 0
        _at_most("logit_bias", len(biases), self.limits.max_logit_biases)
        return_routing = bool(request.return_routed_experts)
        if return_routing and not self.limits.return_routing:
            reason = "return_routed_experts: start the server with --enable-return-routed-experts"
            raise Refused(400, reason, "return_routed_experts")
        if min_tokens > max_tokens:
            raise Refused(400, f"min_tokens={min_tokens} is more than the limit of {max_tokens} tokens", "min_tokens")
        with _refusing("logit_bias"):
            check_ids(biases, self.vocab)
        stops = self._stops(request.stop, len(request.stop_token_ids or ()))
        texts, ids = split_stop_strings(stops, self.tokenizer, self.vocab)
        with _refusing("stop_token_ids"):
            check_ids(request.stop_token_ids or (), self.vocab)
        end_ids = () if request.ignore_eos else (*self.stop_ids, *(i for i in answer.stop_ids if i < self.vocab))
        stop_ids, seed = (*end_ids, *(request.stop_token_ids or ()), *ids), request.seed or 0
        sampling = _sampling(request, self.sampling)
        grammar = self._constraint(request, stop_ids, answer)
        extra_options: dict[str, Any] = {"logit_bias": biases, "logprobs": logprobs, "constraint": grammar}
        options = RequestOptions(
            max_tokens, min_tokens, sampling, stop_ids, seed, **extra_options, return_routing=return_routing
        )
        usage = None if request.stream_options is None else request.stream_options.usage
        seeded, stream = request.seed is not None, bool(request.stream)
        return Planned(prompts, options, n, texts, seeded, stream, usage, answer=answer)

    def _most(self, field: str, prompts: Sequence[Sequence[int]], limit: int | None, default: int | None = None) -> int:
        """Return the maximum number of new tokens: ``limit``, else the free tokens up to ``default``."""
        if not all(prompts):
            raise Refused(400, f"{field}: the prompt is empty, but it needs at least one token", field)
        prompt_length = max(map(len, prompts))
        room = self.capacity - prompt_length
        if limit is None and room > 0:
            return min(default or room, room)
        if limit is not None and limit <= room:
            return limit
        problem = "leaves no room for an answer in" if limit is None else f"and max_tokens ({limit}) exceed"
        reason = f"the prompt ({prompt_length} tokens) {problem} {self.capacity} tokens per row: shorten the prompt, "
        reason += f"{'' if limit is None else 'lower max_tokens, '}or start the server with a larger --capacity"
        raise Refused(400, reason, field if limit is None else "max_tokens", "context_length_exceeded")

    def _constraint(self, request: BaseRequest, stop_ids: tuple[int, ...], answer: AnswerForm) -> Grammar | None:
        name = next((name for name in GUIDED if getattr(request, name) is not None), None)
        with _refusing(name or "tools"):
            form = None if name is None else self._form(name, getattr(request, name))
            grammar = answer.grammar(form, self.tokenizer)
            if grammar is not None:
                grammar.start(self.vocab, stop_ids)  # compiles the grammar, which would block the engine thread
            return grammar

    def _form(self, name: str, value: Any) -> Grammar:
        if name == "response_format":
            schema = None if value.json_schema is None else value.json_schema.schema
            grammar_types = Grammar.json_object, Grammar.json_schema
            return grammar_types[0](self.tokenizer) if schema is None else grammar_types[1](schema, self.tokenizer)
        return _GUIDES[name](value, self.tokenizer)

    def _stops(self, stop: str | Sequence[str] | None, ids: int = 0) -> tuple[str, ...]:
        """Return the stop strings. Raises Refused if a string is empty or too long, or for too many strings and ids."""
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        _at_most("stop_token_ids" if ids else "stop", len(stops) + ids, self.settings.stops)
        for text in stops:
            if not 0 < len(text) <= self.settings.stop_length:
                reason = f"stop: a string has {len(text)} characters, but must have 1 to {self.settings.stop_length}"
                raise Refused(400, reason, "stop")
        return stops

    def _prompts(self, prompt: Any) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the ids and texts of one or more prompts. Raises Refused if a prompt is invalid."""
        if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
            prompt = [prompt]
        if any(isinstance(part, int) for part in prompt):
            reason = "prompt mixes token ids and texts: send a text, a list of texts, a list of ids, or lists of ids"
            raise Refused(400, reason, "prompt")
        _at_most("prompt", len(prompt), self.settings.prompts)
        try:
            ids = [tuple(self.tokenizer.encode(item) if isinstance(item, str) else item) for item in prompt]
        except TokenizerError as error:
            raise Refused(400, error.public, "prompt") from None
        with _refusing("prompt"):
            for item in ids:
                check_ids(item, self.vocab)
        texts = [item if isinstance(item, str) else self.tokenizer.decode(item) for item in prompt]
        return ids, texts

    def _refuse_model(self, request: BaseRequest) -> None:
        if request.model and request.model != self.settings.name:
            reason = f"the model {request.model!r:.80} does not exist: use {self.settings.name!r}"
            raise Refused(404, reason, "model", "model_not_found")


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Convert a ValueError in the block to Refused."""
    try:
        yield
    except ValueError as error:
        raise Refused(400, f"{field}: {error}", field) from None


def default_sampling(model: CausalLM) -> Sampling:
    """Return the sampling options of the checkpoint. Greedy options get temperature 1, OpenAI's default."""
    sampling = Sampling.from_checkpoint(model)
    return sampling if sampling.temperature else dataclasses.replace(sampling, temperature=1.0)


def _sampling(request: BaseRequest, default: Sampling) -> Sampling:
    fields = {name: value for name in OPTIONS if (value := getattr(request, name)) is not None}
    return dataclasses.replace(default, **fields | ({"top_k": None} if fields.get("top_k") == -1 else {}))


def _at_most(name: str, value: int | None, maximum: int) -> int | None:
    if value is not None and value > maximum:
        raise Refused(400, f"{name}: {value} exceeds this server's maximum of {maximum}", name)
    return value
