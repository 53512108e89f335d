"""Separate the reasoning of an answer (``reasoning_content``) by the tags of the model family."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

# Tags in this order: Qwen3, DeepSeek-R1, GLM-4.5, Kimi and MiniMax. Magistral. Seed-OSS.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Tags around the reasoning of an answer.

    Attributes:
        start: tag before the reasoning.
        end: tag after the reasoning.
        inside: whether the prompt ends with ``start``.
        closed: whether the prompt ends with ``end``.
    """

    start: str
    end: str
    inside: bool = False
    closed: bool = False

    @classmethod
    def of(cls, template: str, prompt: str) -> "Reasoning | None":
        """Return the tags of a chat template, or None without tags. ``prompt`` is the rendered chat."""
        for start, end in _TAGS:
            if end in template:
                return cls(start, end, prompt.rstrip().endswith(start), prompt.rstrip().endswith(end))
        return None


def held(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end that may be the start of a mark, and the white space before them."""
    most = max(map(len, marks), default=0)
    places = range(max(0, len(text) - most), len(text))
    start = next((at for at in places if any(mark.startswith(text[at:]) for mark in marks)), len(text))
    return len(text) - len(text[:start].rstrip())


class ReasoningSplit:
    """Streaming splitter of text into reasoning and answer.

    Text that may be the start of a tag is held back until the next piece. White space around tags is
    held back too, and is part of neither output.

    Without the first tag there is no reasoning: models with reasoning disabled start with the answer.
    Some models repeat the first tag after a prompt that ends with it.
    """

    def __init__(self, tags: Reasoning):
        self._tags, self._held, self._strips = tags, "", True
        self._state: Literal["before", "inside", "after"] = "before"

    def put(self, piece: str) -> tuple[str, str]:
        """Read a piece and return the reasoning and the answer that can be emitted now."""
        text, thought = self._held + piece, ""
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
            thought, tag, text = text.partition(self._tags.end)
            if tag:
                self._state, thought = "after", self._stripped(thought).rstrip()
                self._strips = True
            else:
                keep = held(thought, (self._tags.end,))
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
                return self._stripped(thought), ""
        return thought, self._stripped(text)

    def end(self) -> tuple[str, str]:
        """Return the reasoning and the answer held back, at the end of the text."""
        held, self._held = self._held, ""
        inside = self._state == "inside" or (self._state == "before" and self._tags.inside)
        return (self._stripped(held), "") if inside else ("", held)

    def _stripped(self, text: str) -> str:
        """Strip white space at the start of a part."""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text
