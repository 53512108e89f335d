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

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; chats default to the free tokens of a slot
COMPLETION_LOGPROBS, CHAT_LOGPROBS = 5, 20  # largest values that the API allows
OURS = {"messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message"}
OURS |= {"chat_template"}  # a client's template must not run in this process
_GUIDES: Mapping[str, Callable[[Any, Any], Grammar]] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": Grammar.lark,
}
ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = ("tool_calls", "function_call", "audio", "refusal")  # fields of a message that are part of the conversation


@dataclasses.dataclass(frozen=True)
class Planned:
    """A validated request.

    Attributes:
        prompts: ids of the prompts.
        options: options of each sample.
        n: number of samples per prompt.
        stop: stop strings.
        seeded: whether the client set a seed. Otherwise each prompt gets a random seed.
        stream: whether the response is streamed.
        usage: chunks of a stream that report token counts, or None.
        texts: texts of the prompts if they are echoed, else None.
        scored: whether log-probabilities of echoed prompts are requested.
        answer: form of the answers.
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
        """List ids, options and shared prefix of every sample, in the order of the response's choices."""
        found = []
        for ids in self.prompts:
            prefix = Prefix(ids) if self.n > 1 else None
            one = self.options if self.seeded else dataclasses.replace(self.options, seed=secrets.randbits(63))
            found += [(ids, dataclasses.replace(one, sample=i), prefix) for i in range(self.n)]
        return found


class Planner:
    """Planner of requests for an engine. ``sampling`` applies to requests without sampling fields."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: ServerSettings):
        self.tokenizer, self.settings, self.capacity = tokenizer, settings, engine.capacity
        self.vocab, self.biases = engine.model.vocab_size, engine.limits.max_logit_biases
        self.stop_ids, self.sampling = eos_ids(engine.model, ...), default_sampling(engine.model)
        self.symbols = symbols(tokenizer)

    def completion(self, request: CompletionRequest) -> Planned:
        """Plan the response to ``/v1/completions``. Raises Refused."""
        self._refuse_model(request)
        prompts, texts = self._prompts(request.prompt)
        most = self._most("prompt", prompts, request.max_tokens, COMPLETION_TOKENS)
        logprobs = _at_most("logprobs", request.logprobs, COMPLETION_LOGPROBS)
        plan = self._plan(request, prompts, most, logprobs)
        if not request.echo:
            return plan
        return dataclasses.replace(plan, texts=texts, scored=logprobs is not None)

    def chat(self, request: ChatRequest) -> Planned:
        """Plan the response to ``/v1/chat/completions``. Raises Refused, also if the chat template raises."""
        self._refuse_model(request)
        if request.top_logprobs and not request.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = _at_most("top_logprobs", request.top_logprobs, CHAT_LOGPROBS) or 0
        variables, calls = self._variables(request), self._calls(request)
        self._refuse_roles(request.messages)
        ids = self._rendered(request, calls, variables)
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise Refused(400, "give max_completion_tokens or max_tokens, not both", "max_tokens")
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        most = self._most("messages", [tuple(ids)], asked)
        template, end = self._template_for(calls is not None), self.tokenizer.decode(ids[-8:])
        answer = AnswerForm.of(template, end, calls, self.symbols)
        return self._plan(request, [tuple(ids)], most, logprobs if request.logprobs else None, answer)

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
        """Read the tools of the request, or None if no tool may be called. Raises Refused."""
        choice, tools = request.tool_choice, request.tools or []
        named = choice.function.name if isinstance(choice, NamedTool) else None
        if choice not in (None, "none", "auto") and not tools:
            raise Refused(400, "tool_choice needs tools to choose from: give tools", "tool_choice")
        if choice == "none" or not tools:
            return None
        parameters = {tool.function.name: tool.function.parameters for tool in tools}
        if len(parameters) < len(tools):
            raise Refused(400, "tools: two functions have the same name", "tools")
        if named is not None and named not in parameters:
            raise Refused(400, f"tool_choice: there is no function {named!r:.80} in tools", "tool_choice")
        template = self._template_for(tools=True)
        if "tools" not in template:
            why = "tools is not supported: the model's chat template does not read them (a template that does may lie "
            raise Refused(400, why + "in additional_chat_templates/tool_use.jinja)", "tools")
        if (form := format_of(template)) is None:
            why = f"tools is not supported: the chat template writes calls in none of the forms of {', '.join(FORMATS)}"
            raise Refused(400, why, "tools")
        parameters = parameters if named is None else {named: parameters[named]}
        strict = any(tool.function.strict for tool in tools)
        must, several = choice not in (None, "auto"), named is None and request.parallel_tool_calls is not False
        return ToolOptions(form, parameters, must, strict, several, named is not None)

    def _template_for(self, tools: bool) -> str:
        templates = self.tokenizer.chat_templates
        return (templates.get("tool_use") if tools else None) or self.tokenizer.chat_template or ""

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        variables, effort = dict(request.chat_template_kwargs or {}), request.reasoning_effort
        if taken := sorted(OURS & set(variables)):
            raise Refused(400, f"chat_template_kwargs cannot set {taken[0]}", "chat_template_kwargs")
        reads = self._reads("reasoning_effort")
        if effort is None or (effort == "none" and not reads):
            return variables
        if not reads:
            why = "reasoning_effort is not supported: the model's chat template does not read it"
            raise Refused(400, why, "reasoning_effort")
        return {"reasoning_effort": effort, **variables}

    def _refuse_roles(self, messages: Sequence[Message]) -> None:
        """Raise Refused for a role that is unknown to the API and the chat template."""
        for i, message in enumerate(messages):
            if message.role not in ROLES and not self._reads(repr(message.role)):
                why = f"messages[{i}].role: unknown role {message.role:.40}: give one of {', '.join(ROLES)}"
                raise Refused(400, why, "messages")

    def _message(self, message: Message) -> dict[str, Any]:
        """Convert a message for the template. Raises Refused if the template would drop a field."""
        if lost := [name for name in CONTENT if name in message.more and not self._reads(name)]:
            raise Refused(400, f"{lost[0]} is not supported: the model's chat template does not read it", lost[0])
        plain = message.plain()  # the role developer becomes system unless the template reads it
        return plain | {"role": "system"} if plain["role"] == "developer" and not self._reads("developer") else plain

    def _reads(self, word: str) -> bool:
        """Return whether a chat template contains a word. Quoted words match with either kind of quotes."""
        texts = [self._template_for(tools) for tools in (False, True)]
        return any(word in text or word in text.replace('"', "'") for text in texts)

    def _plan(
        self,
        request: BaseRequest,
        prompts: list[tuple[int, ...]],
        most: int,
        logprobs: int | None,
        answer: AnswerForm = PLAIN,
    ) -> Planned:
        n = _at_most("n", request.n, self.settings.samples) or 1
        biases, least = request.logit_bias or {}, request.min_tokens or 0
        _at_most("logit_bias", len(biases), self.biases)
        if least > most:
            raise Refused(400, f"min_tokens={least} is more than the {most} of max_tokens", "min_tokens")
        with _refusing("logit_bias"):
            check_ids(biases, self.vocab)
        stops = self._stops(request.stop, len(request.stop_token_ids or ()))
        texts, ids = split_stop_strings(stops, self.tokenizer, self.vocab)
        with _refusing("stop_token_ids"):
            check_ids(request.stop_token_ids or (), self.vocab)
        ends = () if request.ignore_eos else (*self.stop_ids, *(i for i in answer.stop_ids if i < self.vocab))
        stop_ids, seed = (*ends, *(request.stop_token_ids or ()), *ids), request.seed or 0
        sampling = _sampling(request, self.sampling)
        form = self._constraint(request, stop_ids, answer)
        more: dict[str, Any] = {"logit_bias": biases, "logprobs": logprobs, "constraint": form}
        options = RequestOptions(most, least, sampling, stop_ids, seed, **more)
        usage = None if request.stream_options is None else request.stream_options.usage
        seeded, stream = request.seed is not None, bool(request.stream)
        return Planned(prompts, options, n, texts, seeded, stream, usage, answer=answer)

    def _most(self, field: str, prompts: Sequence[Sequence[int]], asked: int | None, default: int | None = None) -> int:
        """Return the maximum number of new tokens: ``asked``, else the free tokens up to ``default``."""
        if not all(prompts):
            raise Refused(400, f"{field}: the prompt is empty: it needs at least one token", field)
        longest = max(map(len, prompts))
        room = self.capacity - longest
        if asked is None and room > 0:
            return min(default or room, room)
        if asked is not None and asked <= room:
            return asked
        what = "leaves no room for an answer in" if asked is None else f"and max_tokens ({asked}) exceed"
        why = f"the prompt ({longest} tokens) {what} {self.capacity} tokens per row: shorten the prompt, "
        why += f"{'' if asked is None else 'lower max_tokens, '}or start the server with a larger --capacity"
        raise Refused(400, why, field if asked is None else "max_tokens", "context_length_exceeded")

    def _constraint(self, request: BaseRequest, stop_ids: tuple[int, ...], answer: AnswerForm) -> Grammar | None:
        name = next((name for name in GUIDED if getattr(request, name) is not None), None)
        with _refusing(name or "tools"):
            form = None if name is None else self._form(name, getattr(request, name))
            found = answer.grammar(form, self.tokenizer)
            if found is not None:
                found.start(self.vocab, stop_ids)  # compile here: it is slow and must not block the engine thread
            return found

    def _form(self, name: str, value: Any) -> Grammar:
        if name == "response_format":
            schema = None if value.json_schema is None else value.json_schema.schema
            forms = Grammar.json_object, Grammar.json_schema
            return forms[0](self.tokenizer) if schema is None else forms[1](schema, self.tokenizer)
        return _GUIDES[name](value, self.tokenizer)

    def _stops(self, stop: str | Sequence[str] | None, ids: int = 0) -> tuple[str, ...]:
        """Return the stop strings. Raises Refused for empty, long or too many strings (with ``ids``)."""
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        _at_most("stop_token_ids" if ids else "stop", len(stops) + ids, self.settings.stops)
        for text in stops:
            if not 0 < len(text) <= self.settings.stop_length:
                why = f"stop: a string of {len(text)} characters, not 1 to {self.settings.stop_length}"
                raise Refused(400, why, "stop")
        return stops

    def _prompts(self, prompt: Any) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the ids and texts of a prompt or several prompts. Raises Refused."""
        if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
            prompt = [prompt]
        if any(isinstance(part, int) for part in prompt):
            why = "prompt mixes token ids and texts: give one text, several, ids, or lists of ids"
            raise Refused(400, why, "prompt")
        _at_most("prompt", len(prompt), self.settings.prompts)
        try:
            ids = [tuple(self.tokenizer.encode(one) if isinstance(one, str) else one) for one in prompt]
        except TokenizerError as error:
            raise Refused(400, error.public, "prompt") from None
        with _refusing("prompt"):
            for one in ids:
                check_ids(one, self.vocab)
        texts = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in prompt]
        return ids, texts

    def _refuse_model(self, request: BaseRequest) -> None:
        if request.model not in (None, self.settings.name):
            why = f"there is no model {request.model!r:.80} here, only {self.settings.name!r}"
            raise Refused(404, why, "model", "model_not_found")


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Convert a ValueError in this block to a Refused."""
    try:
        yield
    except ValueError as error:
        raise Refused(400, f"{field}: {error}", field) from None


def default_sampling(model: CausalLM) -> Sampling:
    """Return the checkpoint's sampling options. If they are greedy, use OpenAI's temperature 1."""
    found = Sampling.from_checkpoint(model)
    return found if found.temperature else dataclasses.replace(found, temperature=1.0)


def _sampling(request: BaseRequest, default: Sampling) -> Sampling:
    given = {name: value for name in OPTIONS if (value := getattr(request, name)) is not None}
    return dataclasses.replace(default, **given | ({"top_k": None} if given.get("top_k") == -1 else {}))


def _at_most(name: str, value: int | None, most: int) -> int | None:
    if value is not None and value > most:
        raise Refused(400, f"{name}: {value} is more than the {most} that this server allows", name)
    return value
