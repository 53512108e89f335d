"""The reasoning of an answer apart from the answer: ``reasoning_content``, split by the tags of the model's family."""

import dataclasses
from typing import Any, Literal

# Tags of Qwen3, DeepSeek-R1, GLM-4.5, Kimi and MiniMax; of Magistral; of Seed-OSS.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The tags around the reasoning of an answer. ``inside``: whether the prompt ends with the first of them."""

    start: str
    end: str
    inside: bool = False

    @classmethod
    def of(cls, template: str | None, prompt: str) -> "Reasoning | None":
        """The tags that a chat template has; None for models that do not reason. ``prompt``: the rendered chat."""
        for start, end in _TAGS:
            if template is not None and end in template:
                return cls(start, end, prompt.rstrip().endswith(start))
        return None


class ReasoningSplit:
    """Splits a text that comes in pieces. What may be the beginning of a tag waits for the next piece, as does white
    space beside tags, which belongs to neither part.

    Without a first tag there is no reasoning: models that were asked not to reason begin with the answer.
    """

    def __init__(self, tags: Reasoning):
        self._tags, self._held, self._strips = tags, "", True
        self._state: Literal["before", "inside", "after"] = "inside" if tags.inside else "before"

    def put(self, piece: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain after this piece."""
        text, thought = self._held + piece, ""
        self._held = ""
        if self._state == "before":
            rest = text.lstrip()
            if self._tags.start.startswith(rest):
                self._held = text
                return "", ""
            self._state = "inside" if rest.startswith(self._tags.start) else "after"
            if self._state == "after":
                self._strips = False
            text = rest.removeprefix(self._tags.start) if self._state == "inside" else text
        if self._state == "inside":
            thought, tag, text = text.partition(self._tags.end)
            if tag:
                self._state, thought = "after", self._stripped(thought).rstrip()
                self._strips = True
            else:
                keep = next(n for n in range(len(thought), -1, -1) if self._may_end(thought[len(thought) - n :]))
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
                return self._stripped(thought), ""
        return thought, self._stripped(text)

    def end(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (self._stripped(held), "") if self._state == "inside" else ("", held)

    def _may_end(self, text: str) -> bool:
        """Whether the last tag may follow this, or begin in it."""
        return self._tags.end.startswith(text.lstrip())

    def _stripped(self, text: str) -> str:
        """Without the white space before the first other letter of a part."""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text


def split(text: str, tags: Reasoning | None) -> tuple[str | None, str]:
    """The reasoning of a whole text, None without any, and the answer."""
    if tags is None:
        return None, text
    splitter = ReasoningSplit(tags)
    (first, second), (third, fourth) = splitter.put(text), splitter.end()
    reasoning = first + third
    return reasoning.rstrip() or None, second + fourth


def kept_ids(tokenizer: Any, tags: Reasoning | None) -> frozenset[int]:
    """The ids of tags that are special tokens, whose text is to be seen."""
    if tags is None:
        return frozenset()
    backend = getattr(tokenizer, "backend", tokenizer)
    return frozenset(i for i in map(backend.token_to_id, (tags.start, tags.end)) if i is not None)
