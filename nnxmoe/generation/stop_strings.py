"""Truncate generated text at stop strings, for `complete`, the command line and the server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnxmoe.config.validate import as_python
from nnxmoe.generation.request import Finish
from nnxmoe.tokenizer.tokenizer import TextStream, Tokenizer


class StopStringFilter:
    """Streaming filter that truncates text at the first stop string. The stop string is dropped.

    Text is added in pieces (`add`) or as token ids (`add_ids`). Text that may be the start of a stop
    string is held back until more text is added.

    Args:
        stop: strings at which the text is truncated.
        tokenizer: decodes ids. If None, ids are only counted.
        context: ids of the prompt, which can affect how the first new ids are decoded.
        keep: ids of special tokens that are part of the text.

    Attributes:
        text: text so far, without the text that is held back.
        stopped: whether a stop string was found.
        count: number of ids so far, up to the end of the stop string.
    """

    def __init__(
        self,
        stop: Sequence[str],
        tokenizer: Any = None,
        context: Sequence[int] = (),
        keep: frozenset[int] = frozenset(),
    ):
        self.text, self.stopped, self.count = "", False, 0
        self._stop, self._held_back = tuple(stop), ""
        self._decoder = None if tokenizer is None else TextStream(tokenizer, context=context, keep=keep)

    def add_ids(self, ids: Sequence[int], finish: Finish | None) -> str:
        """Decode ids and return the text that can be emitted now.

        Args:
            ids: ids to append.
            finish: why generation ends after these ids, or None if it continues.
        """
        text = ""
        for token in ids:
            if self.stopped:
                break
            if self._decoder is not None:
                text += self.add(self._decoder.put(token))
            self.count += 1
        if finish is not None and not self.stopped:
            if self._decoder is not None:
                text += self.add(self._decoder.end())
            text += self.flush()
        return text

    def add(self, piece: str) -> str:
        """Append text and return the text that can be emitted now. Returns "" after a stop string."""
        if self.stopped:
            return ""
        text = self._held_back + piece
        starts = [text.find(stop) for stop in self._stop if stop in text]
        if starts:
            self.stopped, cut = True, min(starts)
        else:
            cut = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        text, self._held_back = text[:cut], text[cut:]
        self.text += text
        return text

    def flush(self) -> str:
        """Return the held-back text at the end of generation. Returns "" after a stop string."""
        text, self._held_back = "" if self.stopped else self._held_back, ""
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that is a suffix of ``text``."""
    return max((length for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0)


def check_stop_strings(
    stop: str | Sequence[str] | None, tokenizer: Any, vocab_size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Validate stop strings, then split them with `split_stop_strings`.

    Raises:
        ValueError: if a stop string is empty or not a str, or if there is no tokenizer.
    """
    if (stop := as_python(stop)) is None:
        return (), ()
    strings = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str | bytes | Mapping) else (stop,)
    if not strings:
        return (), ()
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop={stop!r:.60}: pass non-empty strings")
    if tokenizer is None:
        raise ValueError("stop strings need a tokenizer: pass tokenizer=")
    return split_stop_strings(strings, tokenizer, vocab_size)


def split_stop_strings(stop: Sequence[str], tokenizer: Any, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Separate stop strings that are special tokens from stop strings in the text.

    Returns:
        Strings to search for in the text, and ids of special tokens below ``vocab_size``. Special tokens
        do not appear in the text.
    """
    special_ids = tokenizer.special_ids if isinstance(tokenizer, Tokenizer) else frozenset(tokenizer.all_special_ids)
    strings, stop_ids = list[str](), list[int]()
    for string in stop:
        ids = list(tokenizer.encode(string, add_special_tokens=False))
        if len(ids) == 1 and ids[0] in special_ids and ids[0] < vocab_size:
            stop_ids.append(ids[0])
        else:
            strings.append(string)
    return tuple(strings), tuple(dict.fromkeys(stop_ids))
