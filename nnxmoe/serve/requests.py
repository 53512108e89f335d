"""From request bodies to what the engine is asked for."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from nnxmoe.generation.complete import split_stops
from nnxmoe.generation.grammar import Grammar
from nnxmoe.generation.request import Limits, Prefix, Wanted, refuse_ids
from nnxmoe.generation.sampling import Sampling
from nnxmoe.generation.text import TokenizerError
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.serve.reasoning import Reasoning, kept_ids
from nnxmoe.serve.schema import GUIDED, BaseRequest, ChatRequest, CompletionRequest, Message
from nnxmoe.serve.settings import Refused, ServerSettings

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; of chats: what the slot has room for
COMPLETION_LOGPROBS, CHAT_LOGPROBS = 5, 20  # the most that the API allows
OURS = {"messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message"}
OURS |= {"chat_template"}  # a client's template would run in this process
CONTENT = ("tool_calls", "function_call", "audio", "refusal")  # fields of a message that are part of what was said


@dataclasses.dataclass(frozen=True)
class Planned:
    """A validated request: ``n`` samples of each prompt. ``texts``: of the prompts, where they are echoed.
    ``seeded``: the client gave a seed; without one each prompt has its own. ``scored``: the log-probabilities of echoed
    prompts are wanted too. ``reasoning``: the tags of it in the answers, and ``keep`` those that are special tokens."""

    prompts: list[tuple[int, ...]]
    wanted: Wanted
    n: int
    stop: tuple[str, ...]
    seeded: bool
    texts: list[str] | None = None
    scored: bool = False
    reasoning: Reasoning | None = None
    keep: frozenset[int] = frozenset()

    def samples(self) -> list[tuple[tuple[int, ...], Wanted, Prefix | None]]:
        """The ids, options and shared prefix of every sample, in the order of the response's choices."""
        found = []
        for ids in self.prompts:
            prefix = Prefix(ids) if self.n > 1 else None
            one = self.wanted if self.seeded else dataclasses.replace(self.wanted, seed=secrets.randbits(63))
            found += [(ids, dataclasses.replace(one, sample=i), prefix) for i in range(self.n)]
        return found


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans requests for one model. ``capacity``: tokens of a slot; ``stop_ids``: the model's end tokens.
    ``sampling``: of requests that leave it out."""

    settings: ServerSettings
    tokenizer: Any
    capacity: int
    vocab: int
    stop_ids: tuple[int, ...]
    limits: Limits
    sampling: Sampling = Sampling()

    def completion(self, request: CompletionRequest) -> Planned:
        """Plan the response to ``/v1/completions``. Raises Refused."""
        self._refuse_model(request)
        prompts, texts = self._prompts(request.prompt)
        most = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        logprobs = _at_most("logprobs", request.logprobs, COMPLETION_LOGPROBS)
        echo = bool(request.echo)
        plan = self._plan(request, prompts, most, logprobs)
        return dataclasses.replace(plan, texts=texts if echo else None, scored=echo and logprobs is not None)

    def chat(self, request: ChatRequest) -> Planned:
        """Plan the response to ``/v1/chat/completions``. Raises Refused, also if the chat template raises."""
        self._refuse_model(request)
        if request.top_logprobs and not request.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = _at_most("top_logprobs", request.top_logprobs, CHAT_LOGPROBS) or 0
        variables = self._variables(request)
        try:
            messages = [self._message(message) for message in request.messages]
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **variables)
        except (TokenizerError, TypeError) as error:
            raise Refused(400, getattr(error, "public", str(error)), "messages") from None
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise Refused(400, "give max_completion_tokens or max_tokens, not both", "max_tokens")
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        most = max(1, self.capacity - len(ids)) if asked is None else asked
        plan = self._plan(request, [tuple(ids)], most, logprobs if request.logprobs else None)
        if plan.wanted.constraint is not None:  # which holds from the first token on
            return plan
        tags = Reasoning.of(self.tokenizer.chat_template, self.tokenizer.decode(ids[-8:]))
        return dataclasses.replace(plan, reasoning=tags, keep=kept_ids(self.tokenizer, tags))

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """Variables of the chat template."""
        variables, effort = dict(request.chat_template_kwargs or {}), request.reasoning_effort
        if taken := sorted(OURS & set(variables)):
            raise Refused(400, f"chat_template_kwargs cannot set {taken[0]}", "chat_template_kwargs")
        if effort is None or (effort == "none" and not self._reads("reasoning_effort")):
            return variables
        if not self._reads("reasoning_effort"):
            why = "reasoning_effort is not supported: the model's chat template does not read it"
            raise Refused(400, why, "reasoning_effort")
        return {"reasoning_effort": effort, **variables}

    def _message(self, message: Message) -> dict[str, Any]:
        """A message for the chat template: the role developer is system unless the template knows it. Raises Refused
        for fields that the template would drop from the conversation."""
        if lost := [name for name in CONTENT if name in message.more and not self._reads(name)]:
            raise Refused(400, f"{lost[0]} is not supported: the model's chat template does not read it", lost[0])
        plain = message.plain()
        return plain | {"role": "system"} if plain["role"] == "developer" and not self._reads("developer") else plain

    def _reads(self, word: str) -> bool:
        """Whether the model's chat template has this word."""
        return word in (self.tokenizer.chat_template or "")

    def _plan(self, request: BaseRequest, prompts: list[tuple[int, ...]], most: int, logprobs: int | None) -> Planned:
        n = _at_most("n", request.n, self.settings.samples) or 1
        biases, least = request.logit_bias or {}, request.min_tokens or 0
        _at_most("logit_bias", len(biases), self.limits.biases)
        if least > most:
            raise Refused(400, f"min_tokens={least} is more than the {most} of max_tokens", "min_tokens")
        for ids in prompts:
            if not ids:
                raise Refused(400, "the prompt is empty: it needs at least one token", "prompt")
            if len(ids) + most > self.capacity:
                why = f"the prompt ({len(ids)} tokens) and max_tokens ({most}) exceed {self.capacity} tokens per row"
                why += ": shorten the prompt, lower max_tokens, or start the server with a larger --capacity"
                raise Refused(400, why, "max_tokens", "context_length_exceeded")
        self._refuse_ids("logit_bias", biases)
        texts, ids = split_stops(self._stops(request.stop), self.tokenizer)
        stop_ids, seed = (*self.stop_ids, *ids), request.seed or 0
        sampling = _sampling(request, self.sampling)
        form = self._constraint(request, stop_ids)
        more: dict[str, Any] = {"logit_bias": biases, "logprobs": logprobs, "constraint": form}
        wanted = Wanted(most, least, sampling, stop_ids, seed, **more)
        return Planned(prompts, wanted, n, texts, request.seed is not None)

    def _constraint(self, request: BaseRequest, stop_ids: tuple[int, ...]) -> Grammar | None:
        """What the answer must follow. Raises Refused."""
        name = next((name for name in GUIDED if getattr(request, name) is not None), None)
        if name is None:
            return None
        value, tokenizer = getattr(request, name), self.tokenizer
        try:
            match name:
                case "response_format" if value.type == "json_object":
                    found = Grammar.json_object(tokenizer)
                case "response_format":
                    found = Grammar.json_schema(value.json_schema.schema, tokenizer)
                case "guided_json":
                    found = Grammar.json_schema(value, tokenizer)
                case "guided_regex":
                    found = Grammar.regex(value, tokenizer)
                case "guided_choice":
                    found = Grammar.choice(value, tokenizer)
                case _:
                    found = Grammar.lark(value, tokenizer)
            found.start(self.vocab, stop_ids)  # here, and not in the engine's thread, it takes its time
            return found
        except ValueError as error:
            raise Refused(400, f"{name}: {error}", name) from None

    def _stops(self, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        _at_most("stop", len(stops), self.settings.stops)
        for text in stops:
            if not 0 < len(text) <= self.settings.stop_length:
                raise Refused(
                    400, f"stop: a string of {len(text)} characters, not 1 to {self.settings.stop_length}", "stop"
                )
        return stops

    def _prompts(self, prompt: Any) -> tuple[list[tuple[int, ...]], list[str]]:
        """The ids and texts of one prompt or several."""
        if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
            prompt = [prompt]
        if any(isinstance(part, int) for part in prompt):
            raise Refused(
                400, "prompt mixes token ids and texts: give one text, several, ids, or lists of ids", "prompt"
            )
        _at_most("prompt", len(prompt), self.settings.prompts)
        try:
            ids = [tuple(self.tokenizer.encode(one) if isinstance(one, str) else one) for one in prompt]
        except TokenizerError as error:
            raise Refused(400, error.public, "prompt") from None
        for one in ids:
            self._refuse_ids("prompt", one)
        texts = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in prompt]
        return ids, texts

    def _refuse_ids(self, name: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        try:
            refuse_ids(ids, self.vocab)
        except ValueError as error:
            raise Refused(400, f"{name}: {error}", name) from None

    def _refuse_model(self, request: BaseRequest) -> None:
        if request.model != self.settings.name:
            why = f"there is no model {request.model!r:.80} here, only {self.settings.name!r}"
            raise Refused(404, why, "model", "model_not_found")


def default_sampling(model: CausalLM) -> Sampling:
    """Sampling of requests that leave it out: the checkpoint's, with OpenAI's temperature 1 if that is greedy."""
    found = Sampling.from_checkpoint(model)
    return found if found.temperature else dataclasses.replace(found, temperature=1.0)


def _sampling(request: BaseRequest, default: Sampling) -> Sampling:
    """Sampling of a request."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return dataclasses.replace(default, **given | ({"top_k": None} if given.get("top_k") == -1 else {}))


def _at_most(name: str, value: int | None, most: int) -> int | None:
    if value is not None and value > most:
        raise Refused(400, f"{name}: {value} is more than the {most} that this server allows", name)
    return value
