"""Split an answer into reasoning (``reasoning_content``) and content, at the tags of the model family."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

# In order: tags of Qwen3, DeepSeek-R1, GLM-4.5, Kimi and MiniMax; of Magistral; of Seed-OSS.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Tags around the reasoning of an answer.

    Attributes:
        start: Tag before the reasoning.
        end: Tag after the reasoning.
        inside: Whether the prompt ends with ``start``.
        closed: Whether the prompt ends with ``end``.
    """

    start: str
    end: str
    inside: bool = False
    closed: bool = False

    @classmethod
    def of(cls, template: str, prompt: str) -> "Reasoning | None":
        """Return the reasoning tags of a chat template, or `None`. ``prompt`` is the rendered chat."""
        for start, end in _TAGS:
            if end in template:
                return cls(start, end, prompt.rstrip().endswith(start), prompt.rstrip().endswith(end))
        return None


def held(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text that may start a mark, including the white space before them."""
    max_length = max(map(len, marks), default=0)
    positions = range(max(0, len(text) - max_length), len(text))
    start = next(
        (position for position in positions if any(mark.startswith(text[position:]) for mark in marks)), len(text)
    )
    return len(text) - len(text[:start].rstrip())


class ReasoningSplit:
    """Streaming splitter of text into reasoning and answer.

    Text that may start a tag is held back until the next piece. White space around tags is also held back, and
    is not part of the output.

    If neither the prompt ends nor the text starts with the start tag, the text has no reasoning, because models
    with reasoning disabled start with the answer. Some models repeat the start tag that ends the prompt.
    """

    def __init__(self, tags: Reasoning):
        self._tags, self._held, self._strips = tags, "", True
        self._state: Literal["before", "inside", "after"] = "before"

    def put(self, piece: str) -> tuple[str, str]:
        """Read a piece and return the reasoning and the answer that can be emitted now."""
        text, reasoning = self._held + piece, ""
        self._held = ""
        if self._state == "before":
            rest = text.lstrip()
            if self._tags.start.startswith(rest):
                self._held = text
                return "", ""
            self._strips = self._tags.inside or rest.startswith(self._tags.start)
            self._state = "inside" if self._strips else "after"
            text = rest.removeprefix(self._tags.start) if self._strips else text
        if self._state == "inside":
            reasoning, tag, text = text.partition(self._tags.end)
            if tag:
                self._state, reasoning = "after", self._stripped(reasoning).rstrip()
                self._strips = True
            else:
                num_held = held(reasoning, (self._tags.end,))
                reasoning, self._held = reasoning[: len(reasoning) - num_held], reasoning[len(reasoning) - num_held :]
                return self._stripped(reasoning), ""
        return reasoning, self._stripped(text)

    def end(self) -> tuple[str, str]:
        """At the end of the text, return the reasoning and the answer that were held back."""
        text, self._held = self._held, ""
        is_inside = self._state == "inside" or (self._state == "before" and self._tags.inside)
        return (self._stripped(text), "") if is_inside else ("", text)

    def _stripped(self, text: str) -> str:
        """Strip white space at the start of a part."""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text
