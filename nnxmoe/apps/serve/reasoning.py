"""The reasoning of an answer apart from the answer: ``reasoning_content``, split by the tags of the model's family."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

# Tags of Qwen3, DeepSeek-R1, GLM-4.5, Kimi and MiniMax; of Magistral; of Seed-OSS.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The tags around the reasoning of an answer. ``inside`` and ``closed``: the prompt ends with the first of them, or
    with the last."""

    start: str
    end: str
    inside: bool = False
    closed: bool = False

    @classmethod
    def of(cls, template: str, prompt: str) -> "Reasoning | None":
        """The tags that a chat template has; None for models that do not reason. ``prompt``: the rendered chat."""
        for start, end in _TAGS:
            if end in template:
                return cls(start, end, prompt.rstrip().endswith(start), prompt.rstrip().endswith(end))
        return None


def held(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end may belong to a mark: its beginning, and white space before it."""
    most = max(map(len, marks), default=0)
    places = range(max(0, len(text) - most), len(text))
    start = next((at for at in places if any(mark.startswith(text[at:]) for mark in marks)), len(text))
    return len(text) - len(text[:start].rstrip())


class ReasoningSplit:
    """Splits a text that comes in pieces. What may be the beginning of a tag waits for the next piece, as does white
    space beside tags, which belongs to neither part.

    Without a first tag there is no reasoning: models that were asked not to reason begin with the answer. Some models
    repeat the first tag after a prompt that ends with it.
    """

    def __init__(self, tags: Reasoning):
        self._tags, self._held, self._strips = tags, "", True
        self._state: Literal["before", "inside", "after"] = "before"

    def put(self, piece: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain after this piece."""
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
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        inside = self._state == "inside" or (self._state == "before" and self._tags.inside)
        return (self._stripped(held), "") if inside else ("", held)

    def _stripped(self, text: str) -> str:
        """Without the white space before the first other letter of a part."""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text
