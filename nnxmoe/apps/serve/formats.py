"""Responses of the OpenAI API for completions and chats, whole or in chunks.

A format has the attributes ``name`` (object name of a whole response), ``chunk`` (object name of a
chunk) and ``prefix`` (prefix of response ids). `opening` creates the choices before the first piece,
`choice` creates a choice of a whole response, and `delta` creates a choice of a chunk.
"""

import base64
import dataclasses
import functools
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnxmoe.apps.serve.answer_form import PLAIN, AnswerForm, AnswerSplit
from nnxmoe.apps.serve.call_split import CallPiece
from nnxmoe.apps.serve.engine_thread import Sample
from nnxmoe.apps.serve.harmony import HarmonySplit
from nnxmoe.tokenizer.tokenizer import TextStream

Json = dict[str, Any]


def _byte_level() -> dict[str, int]:
    """Return the mapping from characters to bytes of GPT-2's byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTE_LEVEL = _byte_level()


class TokenTexts:
    """Texts of single tokens.

    Each token is decoded after a fixed token, because decoders strip a leading space.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skip = len(tokenizer.decode(self._before))
        self.text = functools.lru_cache(maxsize=1 << 18)(self._text)

    def _text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for an incomplete character."""
        return self._tokenizer.decode([*self._before, token])[self._skip :]

    def bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token, or None if the vocabulary does not determine them."""
        text = self.text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        key = self._tokenizer.backend.id_to_token(token) or ""
        if byte_match := re.fullmatch("<0x([0-9A-F]{2})>", key):
            return [int(byte_match.group(1), 16)]
        return [BYTE_LEVEL[letter] for letter in key] if key and all(letter in BYTE_LEVEL for letter in key) else None

    def stream(self) -> TextStream:
        """Create a text stream for tokens that follow other text."""
        return TextStream(self._tokenizer, context=self._before)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the offset of each id's text in ``text``. Special tokens that the text omits have length 0."""
        stream, starts, offset = TextStream(self._tokenizer, skip_special_tokens=False), list[int](), 0
        for token in ids:
            starts.append(offset)
            piece = stream.put(token)
            # SentencePiece drops the space of the first token.
            visible_piece = piece if text.startswith(piece, offset) else piece.lstrip()
            is_hidden = token in self._tokenizer.special_ids and not text.startswith(visible_piece, offset)
            offset += 0 if is_hidden else len(visible_piece)
        return starts


@dataclasses.dataclass(frozen=True)
class CompletionFormat:
    """Format of ``/v1/completions``.

    Attributes:
        texts: Texts of single tokens.
        logprobs: Number of most likely tokens to report per position. `None` reports no log-probabilities.
        places: Maps the index of a sample to its text stream and the length of its text so far.
    """

    texts: TokenTexts
    logprobs: int | None
    places: dict[int, tuple[TextStream, int]] = dataclasses.field(default_factory=dict)
    name = chunk = "text_completion"
    prefix = "cmpl-"

    def opening(self, index: int) -> list[Json]:
        """Return no choices, because a stream of completions starts with the first text."""
        return []

    def choice(self, index: int, sample: Sample) -> Json:
        """Create a choice with the text and the log-probabilities."""
        logprobs = None if self.logprobs is None else self._logprobs(index, sample)
        choice = {"index": index, "text": sample.text, "logprobs": logprobs, "finish_reason": sample.finish}
        return choice | _routed_experts(sample)

    delta = choice

    def _logprobs(self, index: int, sample: Sample) -> Json:
        """Format log-probabilities.

        The most likely tokens of a position include the sampled token. If several tokens have the same text
        (parts of characters), only the most likely token is listed.
        """
        tokens, tops = [self.texts.text(token) for token in sample.ids], []
        for token, logprob, top in zip(tokens, sample.logprobs, sample.top, strict=True):
            pairs = [] if top is None else [(self.texts.text(i), value) for i, value in top[: self.logprobs]]
            logprobs: dict[str, float] = {}
            for text, value in pairs:
                logprobs.setdefault(text, value)
            if logprob is not None:
                logprobs.setdefault(token, logprob)
            tops.append(logprobs or None)
        offsets = {"text_offset": self._offsets(index, sample)}
        return {"tokens": tokens, "token_logprobs": sample.logprobs, "top_logprobs": tops, **offsets}

    def _offsets(self, index: int, sample: Sample) -> list[int]:
        """Return the text offset of each id. Ids that together form one character have the same offset."""
        offsets = self.texts.offsets(sample.ids[: sample.echoed], sample.text[: sample.start])
        stream, offset = self.places.get(index) or (self.texts.stream(), sample.start)
        for token in sample.ids[sample.echoed :]:
            offsets.append(offset)
            offset += len(stream.put(token))
        self.places[index] = stream, offset
        return offsets


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """Format of ``/v1/chat/completions``.

    Attributes:
        texts: Texts of single tokens.
        logprobs: Number of most likely tokens to report per position. `None` reports no log-probabilities.
        answer: Structure of the answers, by which the text of a sample is split.
        splits: Maps the index of a streamed sample to its splitter.
    """

    texts: TokenTexts
    logprobs: int | None
    answer: AnswerForm = PLAIN
    splits: dict[int, AnswerSplit | HarmonySplit] = dataclasses.field(default_factory=dict)
    name, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, index: int) -> list[Json]:
        """Create the first choice of a stream, which contains the role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, sample: Sample) -> Json:
        """Create a choice of a response that is not streamed."""
        parts, count = self.answer.split(sample.text, cut=sample.finish == "length")
        message = {"role": "assistant", "content": parts.content or (None if count else ""), "refusal": None}
        message |= {"reasoning_content": parts.reasoning or None} if self.answer.reasons else {}
        message |= {"tool_calls": _calls(parts.calls, whole=True)} if count else {}
        return self._with(index, sample, {"message": message}, count)

    def delta(self, index: int, part: Sample) -> Json:
        """Create a choice of a chunk from the new part of a sample."""
        splitter = self.splits.setdefault(index, self.answer.splitter())
        answer_part = splitter.put(part.text)
        answer_part = answer_part.followed_by(splitter.end(cut=part.finish == "length")) if part.finish else answer_part
        calls = _calls(answer_part.calls, whole=False)
        parts = {"reasoning_content": answer_part.reasoning, "content": answer_part.content, "tool_calls": calls}
        return self._with(index, part, {"delta": {name: item for name, item in parts.items() if item}}, splitter.count)

    def _with(self, index: int, sample: Sample, body: Json, calls: int) -> Json:
        logprobs = None if self.logprobs is None else {"content": self._logprobs(sample), "refusal": None}
        finish_reason: str | None = sample.finish
        if finish_reason == "stop" and calls and self.answer.calls is not None and not self.answer.calls.named:
            finish_reason = "tool_calls"
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice | _routed_experts(sample)

    def _logprobs(self, sample: Sample) -> list[Json]:
        return [
            self._token(token, logprob)
            | {"top_logprobs": [self._token(*pair) for pair in (top or [])[: self.logprobs]]}
            for token, logprob, top in zip(sample.ids, sample.logprobs, sample.top, strict=True)
        ]

    def _token(self, token: int, logprob: float | None) -> Json:
        return {"token": self.texts.text(token), "logprob": logprob, "bytes": self.texts.bytes(token)}


def _routed_experts(sample: Sample) -> Json:
    """Encode the routing as vLLM does, as a base64-encoded ``.npy`` file. Empty unless a sample with routing ends."""
    if sample.routing is None:
        return {}
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(sample.routing))
    return {"routed_experts": base64.b64encode(buffer.getvalue()).decode()}


def _calls(pieces: Sequence[CallPiece], whole: bool) -> list[Json]:
    """Join the pieces of each call.

    If not ``whole``, calls have an index, and only the first piece of a call has a name.
    """
    calls: dict[int, Json] = {}
    for piece in pieces:
        if piece.call_index not in calls:
            identity = {} if piece.name is None else {"id": piece.id, "type": "function"}
            function = {} if piece.name is None else {"name": piece.name}
            index_field = {} if whole else {"index": piece.call_index}
            calls[piece.call_index] = {**index_field, **identity, "function": {**function, "arguments": ""}}
        calls[piece.call_index]["function"]["arguments"] += piece.arguments
    return list(calls.values())


Format = CompletionFormat | ChatFormat


def usage(prompts: Sequence[Sequence[int]], generated_tokens: int) -> Json:
    """Create the token counts of a response."""
    prompt_tokens = sum(map(len, prompts))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }
