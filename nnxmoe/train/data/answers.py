"""Encode chats as token ids, with a mask of the assistant's answers and their end tokens.

The template's ``{% generation %}`` tags mark the answers. Without tags, the answers are found by
comparing renderings: of the chat up to each answer, and of the chat with a marker in place of the
answer. Two kinds are needed, since many templates render an answer differently once more messages
follow (Qwen3, gpt-oss, DeepSeek-R1).
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from nnxmoe.tokenizer.messages import normalize_messages
from nnxmoe.tokenizer.tokenizer import Tokenizer, TokenizerError
from nnxmoe.tokenizer.tool_calls import convert_tool_calls

Span = tuple[int, int]
Chat = list[dict[str, Any]]
_MARK = "Qxanswerxq"


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    learned: Sequence[int],
    note: Callable[[str], None],
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Return the ids of a chat and the mask of the ids to learn.

    Args:
        learned: Indices of the messages to learn.
        note: Called with a message for each part that cannot be learned.
        tools: JSON schemas for the template.

    A text that ends with an answer gets the tokenizer's end token if the template writes none. Elsewhere
    the special token after an answer is learned as its end. Raises TokenizerError if no answer can be
    located.
    """
    given: dict[str, Any] = {"tools": list(tools)} if tools else {}
    render = functools.partial(tokenizer.render_chat, add_generation_prompt=False, **given)
    chat = convert_tool_calls(render, normalize_messages(messages))
    whole = render(chat)
    rendered = _RenderedChat(tokenizer, chat, whole.text, given)
    turns = [i for i, message in enumerate(chat) if message.get("role") == "assistant"]
    if whole.answers:
        spans = rendered.tagged(whole.answers, turns, learned)
    else:
        found = {turn: rendered.answer(turn) for turn in learned}
        spans = [span for span in found.values() if span is not None]
        for turn in [turn for turn, span in found.items() if span is None and spans]:
            note(f"the template leaves out or changes the answer messages[{turn}], which is not learned")
    if not spans:
        raise TokenizerError(
            "the chat template leaves out or changes the assistant's messages, so their tokens cannot be located: "
            'mark them with {% generation %} in the template, or pass the rendered chat as {"text": …}'
        )
    return _masked(tokenizer, whole.text, spans, note)


@dataclasses.dataclass(frozen=True)
class _RenderedChat:
    """A chat with its rendered text, to find the ranges of answers in the text."""

    tokenizer: Tokenizer
    chat: Chat
    text: str
    given: dict[str, Any]  # additional template variables

    def _render(self, chat: Chat, asked: bool = False) -> str:
        """Render messages, with the prompt for an answer if ``asked``."""
        return self.tokenizer.render_chat(chat, add_generation_prompt=asked, **self.given).text

    def tagged(self, answers: Sequence[Span], turns: list[int], learned: Sequence[int]) -> list[Span]:
        """Return the spans to learn from ``answers``, the spans marked by the template.

        These are the spans of the turns ``learned``. If the template does not mark one span per turn, they
        are all spans from the first learned turn on.
        """
        if len(answers) == len(turns):
            return [span for span, turn in zip(answers, turns, strict=True) if turn in learned]
        first = 0 if learned[0] == turns[0] else learned[0]
        start = len(os.path.commonprefix([self.text, self._render(self.chat[:first], True)])) if first else 0
        return [span for span in answers if span[0] >= start]

    def answer(self, turn: int) -> Span | None:
        """Find the range of an answer, from the end of its prompt to the next message, or None if unknown."""
        text, last = self.text, turn == len(self.chat) - 1
        asked = self._render(self.chat[:turn], True)
        answered = text if last else self._render(self.chat[: turn + 1])
        if text.startswith(asked) and text.startswith(answered) and len(answered) > len(asked):
            return len(asked), len(answered)
        if (place := self._content(self.chat, turn, text)) is None:
            empty = not self.chat[turn].get("content") and text.startswith(asked)
            return self._to_the_end_token(len(asked)) if empty else None
        start, end = place
        # The model also writes the text between prompt and content, such as an empty <think> block.
        if (prompt := self._prompt_end(asked, turn)) is not None:
            start = prompt if start is None else min(start, prompt)
        if start is None:
            return None
        if last:
            return start, len(text)
        alone = self._content(self.chat[: turn + 1], turn, answered)
        tail = "" if alone is None else answered[alone[1] :]
        return start, end + (len(tail) if text.startswith(tail, end) else 0)

    def _to_the_end_token(self, start: int) -> Span | None:
        """Find the range up to the next special token, for answers without content, such as tool calls."""
        ids, offsets = self.tokenizer.encode_with_offsets(self.text, add_special_tokens=False)
        ends = (b for i, (a, b) in zip(ids, offsets, strict=True) if a >= start and i in self.tokenizer.special_ids)
        return next(((start, end) for end in ends), None)

    def _prompt_end(self, asked: str, turn: int) -> int | None:
        """Find the end of an answer's prompt ``asked`` in the text.

        The text may contain only the beginning of the prompt.
        """
        if self.text.startswith(asked):
            return len(asked)
        history = self._render(self.chat[:turn])
        ids, offsets = self.tokenizer.encode_with_offsets(self.text, add_special_tokens=False)
        same = len(os.path.commonprefix([ids, self.tokenizer.encode(asked, add_special_tokens=False)]))
        end = offsets[same][0] if same < len(offsets) else len(self.text)
        return end if self.text.startswith(history) and end > len(history) else None

    def _content(self, chat: Chat, turn: int, text: str) -> tuple[int | None, int] | None:
        """Find the range of a message's content in a rendered chat.

        Renders the chat again with a marker in place of the content, else with a marker after the content.
        The start is None if only the end is certain. Returns None if the template changes the content.
        """
        if (content := chat[turn].get("content", "")) is None:
            return None
        instead: Any = _MARK if isinstance(content, str) else [{"type": "text", "text": _MARK}]
        after = [content + _MARK, content.rstrip() + _MARK] if isinstance(content, str) else []
        for value in (instead, *after):
            marked = self._render([*chat[:turn], chat[turn] | {"content": value}, *chat[turn + 1 :]])
            before, found, rest = marked.partition(_MARK)
            fits = found and _MARK not in rest and len(before) + len(rest) <= len(text)
            if fits and text.startswith(before) and text.endswith(rest):
                return (len(before) if value is instead else None), len(text) - len(rest)
        return None


def _masked(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span], note: Callable[[str], None]
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Return ids and mask of a text. A token that overlaps the start of an answer is learned."""
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    blank = np.array([not text[a:b].strip() for a, b in offsets], bool)
    special = np.isin(ids, [*tokenizer.special_ids, *([] if (eos := tokenizer.eos_token_id) is None else [eos])])
    learnt, closed = np.zeros(len(ids), bool), True
    for start, end in spans:
        inside = (starts < end) & ((ends > start) | ((starts == ends) & (starts >= start)))
        learnt |= inside
        solid = np.flatnonzero(inside & ~blank)
        if len(solid) and special[solid[-1]]:
            continue
        after = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else int(np.searchsorted(starts, end))
        following = after + np.flatnonzero(~blank[after:])[:1]
        if not len(following):
            closed = False
        elif special[following[0]]:
            learnt[after : following[0] + 1] = True
        else:
            note("no special token follows an answer, so its end is not learned")
    if not closed and eos is None:
        note("the tokenizer has no end token to learn after the last answer")
    more = [] if closed or eos is None else [eos]
    return np.asarray([*ids, *more], np.int32), np.concatenate([learnt, np.ones(len(more), bool)])
