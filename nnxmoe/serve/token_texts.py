"""The text, the bytes and the places of single tokens, for log-probabilities."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from nnxmoe.generation.text import TextStream


def _byte_level() -> dict[str, int]:
    """GPT-2's characters for bytes, in which byte-level vocabularies are written."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


class TokenTexts:
    """Texts of single tokens, each decoded after another token, because decoders strip a leading space."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skip = len(tokenizer.decode(self._before))
        self.text = functools.lru_cache(maxsize=1 << 18)(self._text)

    def _text(self, token: int) -> str:
        """The token's text; U+FFFD for bytes that are no whole character."""
        return self._tokenizer.decode([*self._before, token])[self._skip :]

    def bytes(self, token: int) -> list[int] | None:
        """The token's bytes; None if the vocabulary does not say which."""
        text = self.text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        raw = self._tokenizer.backend.id_to_token(token) or ""
        if found := re.fullmatch("<0x([0-9A-F]{2})>", raw):
            return [int(found.group(1), 16)]
        return [BYTE_LEVEL[letter] for letter in raw] if raw and all(letter in BYTE_LEVEL for letter in raw) else None

    def stream(self) -> TextStream:
        """A stream of text that follows other text."""
        return TextStream(self._tokenizer, context=self._before)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Where each of the ids of a text begins in it. Special tokens that the text does not show take no room."""
        stream, found, at = TextStream(self._tokenizer, skip_special_tokens=False), list[int](), 0
        for token in ids:
            found.append(at)
            piece = stream.put(token)
            shown = piece if text.startswith(piece, at) else piece.lstrip()  # the first token of SentencePiece
            hidden = token in self._tokenizer.special_ids and not text.startswith(shown, at)
            at += 0 if hidden else len(shown)
        return found
