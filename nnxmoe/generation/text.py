"""Text to token ids and back: a checkpoint's tokenizer, its chat template, and streaming decoding.

Ids are computed by the ``tokenizers`` library from ``tokenizer.json``. ``add_bos_token`` in ``tokenizer_config.json``
is ignored, as transformers 5 does for such files.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers

from nnxmoe.generation.chat_template import ChatTemplateError, render_chat_template
from nnxmoe.generation.messages import cut_at_mark, mark_end, plain_messages
from nnxmoe.generation.tokenizer_files import (
    CONFIG,
    SPECIAL,
    TEMPLATE,
    TOKENIZER,
    TokenizerError,
    backend_failure,
    find_folder,
    read_backend,
    read_chat_templates,
    read_json,
    read_special_tokens,
)

__all__ = ["TextStream", "Tokenizer", "TokenizerError"]


class Tokenizer:
    """Encodes, decodes and renders chats for one checkpoint. Created by :meth:`from_pretrained`.

    ``special_tokens`` maps names such as ``bos_token`` to their text; they are also variables of the chat template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
        template_file: str | None = None,
    ) -> None:
        backend.no_truncation()  # truncation and padding in tokenizer.json are settings for training batches
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.source = source
        self._template_file = template_file or source
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.pad_token = special_tokens.get("pad_token")
        self.unk_token = special_tokens.get("unk_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self.pad_token_id = self._id_of(self.pad_token)

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | Path, revision: str | None = None, local_files_only: bool = False
    ) -> Self:
        """Read the tokenizer files of a local folder or a Hugging Face repository. Raises TokenizerError."""
        folder = find_folder(path_or_hub_id, revision, local_files_only)
        backend = read_backend(folder)
        config = read_json(folder / CONFIG)
        legacy = read_json(folder / SPECIAL)
        ours, old = read_special_tokens(config, folder / CONFIG), read_special_tokens(legacy, folder / SPECIAL)
        # The config takes precedence if it has added_tokens_decoder; older checkpoints rely on the map.
        special_tokens = {**old, **ours} if "added_tokens_decoder" in config else {**ours, **old}
        templates, template_file = read_chat_templates(folder, config)
        return cls(backend, special_tokens, templates, str(folder), str(template_file))

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, vocab_size={self.vocab_size})"

    @property
    def chat_template(self) -> str | None:
        """The default template."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text are encoded as special tokens."""
        if not isinstance(text, str):
            raise TypeError(f"encode takes a str, not {type(text).__name__}")
        try:
            text.encode()
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}. Remove lone surrogates") from None
        except BaseException as error:
            raise backend_failure(error, f"{self.source}: {TOKENIZER} cannot encode a text") from None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Text of one row of ids: a list, or an integer array of NumPy or JAX. Unknown ids are skipped."""
        row = np.asarray(ids)
        if row.ndim > 1:
            raise TokenizerError(f"decode takes one row of ids, not an array of shape {row.shape}: decode row by row")
        if row.size and not (np.issubdtype(row.dtype, np.integer) and 0 <= row.min() and row.max() < 2**32):
            raise TokenizerError(f"token ids must be integers >= 0, not {row.tolist()!r:.60} ({row.dtype})")
        return self.decode_list([int(i) for i in row.reshape(-1)], skip_special_tokens)

    def decode_list(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """:meth:`decode` without validation, for use in loops."""
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise backend_failure(error, f"{self.source}: {TOKENIZER} cannot decode") from None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> Any:
        """Render a conversation as the prompt the model was trained on: a str, or its ids with ``tokenize=True``.

        ``tools`` are JSON schemas; ``chat_template`` names one of several templates. ``continue_final_message`` leaves
        the last message open, for the model to continue its "content" (or the named field). Other keyword arguments are
        variables of the template, such as ``enable_thinking``; TypeError if the template does not read one of them.
        Raises TokenizerError, also if the template fails. It runs in a subprocess limited to 1 second and 64 MB.
        """
        plain, end = plain_messages(messages), None
        if continue_final_message:
            if add_generation_prompt:
                raise TokenizerError("pass add_generation_prompt or continue_final_message, not both")
            field = "content" if continue_final_message is True else continue_final_message
            plain, end = mark_end(plain, field)
        given = {
            **self.special_tokens,
            **variables,
            "messages": plain,
            "tools": tools if tools is None else list(tools),
            "documents": documents if documents is None else list(documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            text = render_chat_template(self._template(chat_template, tools is not None), given, variables)
        except ChatTemplateError as error:
            raise TokenizerError(f"{self._template_file}: {error}") from None
        text = text if end is None else cut_at_mark(text, end)
        # The rendered text already contains the special tokens.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _template(self, name: str | None, with_tools: bool) -> str:
        """The template of that name; None: "tool_use" if there are tools and it exists, else "default"."""
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if self.chat_templates:
            named = f"{self._template_file}: no chat template is named {name!r:.60}"
            raise TokenizerError(f"{named}. Pass chat_template= one of {sorted(self.chat_templates)!r:.300}")
        raise TokenizerError(
            f"{self.source}: no chat template, neither {TEMPLATE} nor 'chat_template' in {CONFIG}. This may be a base "
            "model: encode plain text instead, or add the template of its chat variant"
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


class TextStream:
    """Decodes tokens one by one: ``put`` returns the text that a token completes, ``end`` the rest.

    Incomplete characters are buffered until the tokens that complete them arrive. Each step decodes only a short
    window. It begins with tokens whose text has been returned, since decoders treat the start of a text differently
    (leading spaces). ``context``: the prompt's ids; the prompt's text followed by the pieces is the text of all ids.
    ``tokenizer``: a `Tokenizer`, or one of transformers.
    """

    LONGEST_WAIT = 64  # tokens; only invalid UTF-8 takes more than a few

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, context: Iterable[int] = ()) -> None:
        ours = isinstance(tokenizer, Tokenizer)
        self._decoder = tokenizer.decode_list if ours else tokenizer.decode
        self._special = tokenizer.special_ids if ours else frozenset(tokenizer.all_special_ids)
        self._skip = skip_special_tokens
        ids = (int(i) for i in context)
        self._window = [i for i in ids if not (skip_special_tokens and i in self._special)][-8:]
        self._shown = len(self._decode())  # characters of the window's text that have been returned
        self._settled = len(self._window)  # tokens of the window whose text has been returned

    def put(self, token_id: Any) -> str:
        """Returns the text that this token completes, possibly empty."""
        token = int(token_id)
        if self._skip and token in self._special:
            return ""
        self._window.append(token)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._window) - self._settled < self.LONGEST_WAIT:
            return self._unseen(text.rstrip("\ufffd"))
        piece = self._unseen(text)
        if piece:
            self._window = self._window[self._settled :]
            self._shown, self._settled = len(self._decode()), len(self._window)
        return piece

    def end(self) -> str:
        """Returns the rest, with U+FFFD for an incomplete character, and resets the stream."""
        piece = self._unseen(self._decode())
        self._window, self._shown, self._settled = [], 0, 0
        return piece

    def _decode(self) -> str:
        return self._decoder(self._window, self._skip)

    def _unseen(self, text: str) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece
