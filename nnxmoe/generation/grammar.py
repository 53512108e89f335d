"""Constrain output to a JSON schema, a regular expression or a grammar, using llguidance.

The output matches the grammar, or is a prefix of a match if ``max_new_tokens`` truncates the output.
"""

import copy
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

from nnxmoe.config.printable import short
from nnxmoe.runtime.extras import install_command
from nnxmoe.runtime.progress import logger

# Allows one space, or a line break with indentation, between JSON tokens. Without a limit, small models emit whitespace
# forever. A schema may override this pattern in "x-guidance".
_JSON = {"whitespace_pattern": r" ?|\r?\n[ \t]{0,40}"}


class ConstraintState(Protocol):
    """State of a constraint while one text is generated."""

    def advance(self, ids: Sequence[int]) -> None:
        """Append generated ids to the text."""
        ...

    def masks(self, drafts: Sequence[int], out: UInt32[np.ndarray, "W words"]) -> None:
        """Write a bit mask of the allowed ids before the first draft and after each draft.

        Args:
            drafts: ids that may follow the text.
            out: output array of the masks. Bit v % 32 of word v // 32 is set if id v is allowed.
        """
        ...


class Constraint(Protocol):
    """Restriction on the new ids of a request."""

    def start(self, vocab: int, stop_ids: Sequence[int]) -> ConstraintState:
        """Return the state before the first new id.

        Args:
            vocab: size of the vocabulary.
            stop_ids: ids that end a text.

        Raises:
            ValueError: if the constraint is invalid.
        """
        ...


class Grammar:
    """`Constraint` that uses llguidance (extra ``serve``).

    Grammars with the same tokenizer share tables. Building the tables takes about a second.

    Args:
        text: grammar in llguidance's Lark dialect, or in the JSON form that llguidance returns.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, text: str, tokenizer: Any):
        self._text, self._tokenizer = text, tokenizer
        self._started: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, tokenizer: Any) -> "Grammar":
        """Create a grammar for JSON that matches a schema.

        Args:
            schema: the schema, as an object, a bool or JSON text.
            tokenizer: tokenizer of the model.

        Raises:
            ValueError: if the schema is not a JSON object or ``true``. `start` raises for unsupported
                keywords.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"the schema is not JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"a schema must be an object, true or false, got {short(schema)}")
        if schema is False:
            raise ValueError("the schema false accepts no value: pass an object, or true to accept any value")
        text = json.dumps({} if schema is True else dict(schema))
        return cls(_library().LLMatcher.grammar_from_json_schema(text, defaults=_JSON), tokenizer)

    @classmethod
    def json_object(cls, tokenizer: Any) -> "Grammar":
        """Create a grammar for any JSON object."""
        return cls.json_schema({"type": "object"}, tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> "Grammar":
        """Create a grammar for texts that fully match a regular expression (Rust syntax).

        Raises:
            ValueError: if ``pattern`` is not a str.
        """
        if not isinstance(pattern, str):
            raise ValueError(f"a regular expression must be a str, got {short(pattern)}")
        return cls(_library().LLMatcher.grammar_from_regex(pattern), tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: Any) -> "Grammar":
        """Create a grammar that accepts one of several texts.

        Raises:
            ValueError: if the list is empty or has an element that is not a str.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ValueError(f"choices must be a non-empty list of texts, got {short(texts)}")
        if invalid_choices := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"a choice must be a str, got {short(invalid_choices[0])}")
        return cls.lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> "Grammar":
        """Create a grammar in llguidance's Lark dialect."""
        return cls(_library().LLMatcher.grammar_from_lark(text), tokenizer)

    def within(self, lark: str) -> "Grammar":
        """Embed this grammar in the Lark grammar ``lark``, which refers to this grammar as ``@form``."""
        # The text is JSON with a list of grammars, or unchanged Lark text.
        is_json = self._text.lstrip().startswith("{")
        form, *other_grammars = json.loads(self._text)["grammars"] if is_json else [{"lark_grammar": self._text}]
        grammars = [{"lark_grammar": lark}, form | {"name": "form"}, *other_grammars]
        return Grammar(json.dumps({"grammars": grammars}), self._tokenizer)

    def start(self, vocab: int, stop_ids: Sequence[int]) -> ConstraintState:
        """Return the state before the first new id.

        Raises:
            ValueError: if llguidance rejects the grammar, or if ``stop_ids`` is empty.
        """
        end_ids = tuple(dict.fromkeys(stop_ids))
        if not end_ids:
            raise ValueError("a grammar needs ids that end the text: pass eos_token_id or stop_ids")
        with self._lock:
            if (vocab, end_ids) not in self._started:
                tables = _tables(self._tokenizer, vocab, end_ids)
                matcher = _library().LLMatcher(tables, self._text, log_level=0)
                if matcher.is_error():
                    raise ValueError(f"llguidance rejects the grammar: {short(matcher.get_error().strip(), 400)}")
                self._started[vocab, end_ids] = matcher
            return _Matching(self._started[vocab, end_ids].deep_copy(), end_ids)


class _Matching:
    def __init__(self, matcher: Any, ends: tuple[int, ...]):
        self._matcher, self._ends, self._warned = matcher, ends, False

    def advance(self, ids: Sequence[int]) -> None:
        self._matcher.consume_tokens([int(i) for i in ids])

    def masks(self, drafts: Sequence[int], out: np.ndarray) -> None:
        consumed = 0
        for index, draft in enumerate((*drafts, None)):
            self._write(out[index])
            if draft is None or self._matcher.is_stopped() or not self._matcher.try_consume_tokens([int(draft)]):
                break  # masks after a rejected draft are not used
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)

    def _write(self, row: np.ndarray) -> None:
        """Write one mask. If the text is complete or llguidance has failed, the mask allows only stop ids."""
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_stopped():
            if self._matcher.is_error() and not self._warned:
                self._warned = True
                reason = short(self._matcher.get_error().strip(), 200)
                logger.warning("llguidance failed, so a text with a grammar is truncated (%s)", reason)
            row[:] = 0
            for end_id in self._ends:
                row[end_id // 32] |= np.uint32(1 << end_id % 32)


def symbols(tokenizer: Any) -> dict[str, int]:
    """Return the ids of added tokens that llguidance treats as symbols (``<[id]>`` in Lark), not as text."""
    added = _backend(tokenizer).get_added_tokens_decoder().items()
    has_brackets = lambda text: text.startswith("<") and text.endswith(">")  # noqa: E731
    return {token.content: i for i, token in added if token.special or has_brackets(token.content)}


def empty_masks(rows: int, width: int, vocab: int) -> UInt32[np.ndarray, "B W words"]:
    """Create masks that allow every id."""
    return np.full((rows, width, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)


_tables_cache: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_tables_lock = threading.Lock()


def _tables(tokenizer: Any, vocab: int, end_ids: tuple[int, ...]) -> Any:
    """Build llguidance's tables for a tokenizer. Cached per tokenizer, vocabulary size and stop ids."""
    with _tables_lock:
        tables = _tables_cache.setdefault(tokenizer, {})
        if (vocab, end_ids) not in tables:
            backend = copy.deepcopy(_backend(tokenizer))
            backend.no_padding()
            backend.no_truncation()
            tables[vocab, end_ids] = _library().LLTokenizer(backend.to_str(), n_vocab=vocab, eos_token=list(end_ids))
        return tables[vocab, end_ids]


def _backend(tokenizer: Any) -> Any:
    return getattr(tokenizer, "backend", None) or tokenizer.backend_tokenizer


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"schemas and grammars need llguidance: {install_command('serve')}") from error
    return llguidance
