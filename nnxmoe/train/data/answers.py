"""Encode chats as token ids, with a mask of the assistant's answers and their end tokens.

The template's ``{% generation %}`` tags mark the answers. Without tags, an answer is located by
comparing the rendered chat with two more renderings: one of the chat up to the answer, and one with a
marker in place of the answer. Both are needed, since many templates (Qwen3, gpt-oss, DeepSeek-R1)
render an answer differently if more messages follow.
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
    """Return the token ids of a chat and the loss mask.

    The loss includes the special token that ends an answer. If the chat ends with an answer and the
    template writes no end token, the tokenizer's EOS token is appended.

    Args:
        learned: Indices of the messages to train on.
        note: Callback that receives a warning if an answer, or the end of one, cannot be trained on.
        tools: JSON schemas of the tools, passed to the template.

    Raises:
        TokenizerError: If no answer can be located.
    """
    variables: dict[str, Any] = {"tools": list(tools)} if tools else {}
    render = functools.partial(tokenizer.render_chat, add_generation_prompt=False, **variables)
    chat = convert_tool_calls(render, normalize_messages(messages))
    rendering = render(chat)
    rendered = _RenderedChat(tokenizer, chat, rendering.text, variables)
    turns = [i for i, message in enumerate(chat) if message.get("role") == "assistant"]
    if rendering.answers:
        spans = rendered.tagged(rendering.answers, turns, learned)
    else:
        located = {turn: rendered.answer(turn) for turn in learned}
        spans = [span for span in located.values() if span is not None]
        for turn in [turn for turn, span in located.items() if span is None and spans]:
            note(f"the template omits or changes messages[{turn}], so this answer is not trained on")
    if not spans:
        raise TokenizerError(
            "the chat template omits or changes the assistant's messages, so their tokens cannot be located: "
            'mark them with {% generation %} in the template, or pass the rendered chat as {"text": …}'
        )
    return _masked(tokenizer, rendering.text, spans, note)


@dataclasses.dataclass(frozen=True)
class _RenderedChat:
    """Chat with its rendered text, to locate the answers in the text."""

    tokenizer: Tokenizer
    chat: Chat
    text: str
    given: dict[str, Any]  # additional template variables

    def _render(self, chat: Chat, prompted: bool = False) -> str:
        """Render messages, followed by the generation prompt if ``prompted``."""
        return self.tokenizer.render_chat(chat, add_generation_prompt=prompted, **self.given).text

    def tagged(self, answers: Sequence[Span], turns: list[int], learned: Sequence[int]) -> list[Span]:
        """Select the spans to train on from the spans that the template marks (``answers``).

        Returns the spans of the turns in ``learned``. If the template does not mark exactly one span per
        turn, returns all spans that start at or after the first turn in ``learned``.
        """
        if len(answers) == len(turns):
            return [span for span, turn in zip(answers, turns, strict=True) if turn in learned]
        first = 0 if learned[0] == turns[0] else learned[0]
        start = len(os.path.commonprefix([self.text, self._render(self.chat[:first], True)])) if first else 0
        return [span for span in answers if span[0] >= start]

    def answer(self, turn: int) -> Span | None:
        """Find the span of an answer, from the end of its prompt to the next message, or None if unknown."""
        text, last = self.text, turn == len(self.chat) - 1
        prompt = self._render(self.chat[:turn], True)
        through_answer = text if last else self._render(self.chat[: turn + 1])
        if text.startswith(prompt) and text.startswith(through_answer) and len(through_answer) > len(prompt):
            return len(prompt), len(through_answer)
        if (content := self._content(self.chat, turn, text)) is None:
            is_empty = not self.chat[turn].get("content") and text.startswith(prompt)
            return self._to_the_end_token(len(prompt)) if is_empty else None
        start, end = content
        # The model also generates the text between prompt and content, such as an empty <think> block.
        if (prompt_end := self._prompt_end(prompt, turn)) is not None:
            start = prompt_end if start is None else min(start, prompt_end)
        if start is None:
            return None
        if last:
            return start, len(text)
        last_content = self._content(self.chat[: turn + 1], turn, through_answer)
        tail = "" if last_content is None else through_answer[last_content[1] :]
        return start, end + (len(tail) if text.startswith(tail, end) else 0)

    def _to_the_end_token(self, start: int) -> Span | None:
        """Find the span up to the next special token, for answers without content, such as tool calls."""
        ids, offsets = self.tokenizer.encode_with_offsets(self.text, add_special_tokens=False)
        ends = (b for i, (a, b) in zip(ids, offsets, strict=True) if a >= start and i in self.tokenizer.special_ids)
        return next(((start, end) for end in ends), None)

    def _prompt_end(self, prompt: str, turn: int) -> int | None:
        """Find where the rendered ``prompt`` of an answer ends in the text.

        The text may contain only the first part of the prompt.
        """
        if self.text.startswith(prompt):
            return len(prompt)
        history = self._render(self.chat[:turn])
        ids, offsets = self.tokenizer.encode_with_offsets(self.text, add_special_tokens=False)
        num_equal = len(os.path.commonprefix([ids, self.tokenizer.encode(prompt, add_special_tokens=False)]))
        end = offsets[num_equal][0] if num_equal < len(offsets) else len(self.text)
        return end if self.text.startswith(history) and end > len(history) else None

    def _content(self, chat: Chat, turn: int, text: str) -> tuple[int | None, int] | None:
        """Find the span of a message's content in a rendered chat.

        Renders the chat again with a marker in place of the content. If the text around the marker differs,
        renders it with a marker after the content, and returns None as the start. Returns None if neither
        rendering matches.
        """
        if (content := chat[turn].get("content", "")) is None:
            return None
        replacement: Any = _MARK if isinstance(content, str) else [{"type": "text", "text": _MARK}]
        appended = [content + _MARK, content.rstrip() + _MARK] if isinstance(content, str) else []
        for value in (replacement, *appended):
            marked = self._render([*chat[:turn], chat[turn] | {"content": value}, *chat[turn + 1 :]])
            prefix, marker, suffix = marked.partition(_MARK)
            is_unique = marker and _MARK not in suffix and len(prefix) + len(suffix) <= len(text)
            if is_unique and text.startswith(prefix) and text.endswith(suffix):
                return (len(prefix) if value is replacement else None), len(text) - len(suffix)
        return None


def _masked(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span], note: Callable[[str], None]
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Return ids and loss mask of a text. The mask includes tokens that overlap the start of a span."""
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    blank = np.array([not text[a:b].strip() for a, b in offsets], bool)
    special = np.isin(ids, [*tokenizer.special_ids, *([] if (eos := tokenizer.eos_token_id) is None else [eos])])
    mask, ended = np.zeros(len(ids), bool), True
    for start, end in spans:
        in_span = (starts < end) & ((ends > start) | ((starts == ends) & (starts >= start)))
        mask |= in_span
        visible = np.flatnonzero(in_span & ~blank)
        if len(visible) and special[visible[-1]]:
            continue
        next_index = int(np.flatnonzero(in_span)[-1]) + 1 if in_span.any() else int(np.searchsorted(starts, end))
        following = next_index + np.flatnonzero(~blank[next_index:])[:1]
        if not len(following):
            ended = False
        elif special[following[0]]:
            mask[next_index : following[0] + 1] = True
        else:
            note("no special token follows an answer, so the end of the answer is not trained on")
    if not ended and eos is None:
        note("the tokenizer has no EOS token to append to the last answer")
    appended = [] if ended or eos is None else [eos]
    return np.asarray([*ids, *appended], np.int32), np.concatenate([mask, np.ones(len(appended), bool)])
