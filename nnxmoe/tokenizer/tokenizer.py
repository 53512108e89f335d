"""Tokenizer with chat templates, and a streaming text decoder.

The ``tokenizers`` library computes ids from ``tokenizer.json``. As in transformers 5, ``add_bos_token`` in
``tokenizer_config.json`` is then ignored.
"""

import copy
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
import tokenizers

from nnxmoe.config.printable import short
from nnxmoe.runtime.progress import logger
from nnxmoe.tokenizer import byte_level
from nnxmoe.tokenizer.added_tokens import add_declared_tokens, read_special_tokens
from nnxmoe.tokenizer.chat_template import ChatTemplateError, RenderedChat, render_chat_template, template_variables
from nnxmoe.tokenizer.messages import cut_at_mark, mark_end, normalize_messages
from nnxmoe.tokenizer.tokenizer_files import (
    CONFIG,
    TEMPLATE,
    TOKENIZER,
    TokenizerError,
    backend_failure,
    find_folder,
    read_backend,
    read_chat_templates,
    read_config,
)
from nnxmoe.tokenizer.tool_calls import convert_tool_calls

__all__ = ["TextStream", "Tokenizer", "TokenizerError"]

_TENSORS = {None: list, "np": np.asarray, "jax": jnp.asarray}
_ENCODING_OPTIONS = (
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
    "return_assistant_tokens_mask",
)


class Tokenizer:
    """Tokenizer and chat templates of a checkpoint. Create with `from_pretrained`.

    Attributes:
        backend: tokenizer of the ``tokenizers`` library.
        special_tokens: texts of special tokens by name, such as ``bos_token``. They are also
            variables of the chat template.
        chat_templates: chat templates by name.
        source: path of the checkpoint.
        vocab_size: largest id + 1, including added tokens.
        special_ids: ids of special tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
        template_file: str | None = None,
    ) -> None:
        if backend.truncation is not None or backend.padding is not None:  # Settings saved for training batches.
            backend = copy.deepcopy(backend)  # Do not change the caller's backend.
            backend.no_truncation()
            backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.source = source
        self._template_file = template_file or source
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        named_tokens = [special_tokens.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = named_tokens
        ids = [None if token is None else backend.token_to_id(token) for token in named_tokens]
        self.bos_token_id, self.eos_token_id, self.pad_token_id, _ = ids
        self._warned: set[str] = set()

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | Path, revision: str | None = None, local_files_only: bool = False
    ) -> Self:
        """Load the tokenizer from a local folder, a Hugging Face repository or a GGUF file.

        Raises:
            TokenizerError: if a tokenizer file is missing or invalid.
            CheckpointError: if a GGUF file is malformed. Both errors are ValueErrors.
        """
        folder = find_folder(path_or_hub_id, revision, local_files_only)
        config = read_config(folder)
        merges = byte_level.has_merges(folder)
        backend, defaults = byte_level.build_byte_level_bpe(folder, config) if merges else (read_backend(folder), {})
        named_tokens = read_special_tokens(folder, config, defaults)
        add_declared_tokens(backend, folder, config, named_tokens)
        special = {name: value if isinstance(value, str) else value["content"] for name, value in named_tokens.items()}
        if merges:
            byte_level.add_bos_and_eos(backend, config, (special.get("bos_token"), special.get("eos_token")))
        templates, template_file = read_chat_templates(folder, config)
        return cls(backend, special, templates, str(folder), str(template_file))

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, vocab_size={self.vocab_size})"

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """Tokenize one or several texts, like the tokenizers in transformers.

        Args:
            padding: True to pad on the right to the longest text, "max_length" to pad to ``max_length``.
            truncation: whether to truncate to ``max_length``.
            return_tensors: "np" or "jax" to return arrays [B, T]. Defaults to lists.

        Returns:
            ``input_ids`` and ``attention_mask``.
        """
        if return_tensors not in _TENSORS:
            raise ValueError(f"return_tensors={return_tensors!r}: use 'np', 'jax' or None")
        if padding not in (False, True, "longest", "max_length", "do_not_pad"):
            raise ValueError(f"padding={padding!r}: use True, 'longest', 'max_length' or False")
        if max_length is None and (truncation or padding == "max_length"):
            raise ValueError("truncation and padding='max_length' require max_length=")
        is_single = isinstance(text, str)
        rows = [self.encode(item, add_special_tokens) for item in ([text] if is_single else text)]
        rows = [row[:max_length] for row in rows] if truncation else rows
        longest = max(map(len, rows), default=0)
        is_padded = padding not in (False, "do_not_pad")
        width = max(longest, (max_length or 0) if padding == "max_length" else 0) if is_padded else 0
        if return_tensors and not is_padded and len(set(map(len, rows))) > 1:
            raise ValueError(
                f"the texts have {sorted(set(map(len, rows)))} tokens: pass padding=True to return one array"
            )
        pad = next((i for i in (self.pad_token_id, self.eos_token_id) if i is not None), 0)
        encoding = {
            "input_ids": [row + [pad] * (width - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in rows],
        }
        if return_tensors is None and is_single:
            return {name: value[0] for name, value in encoding.items()}
        return {name: _TENSORS[return_tensors](value) for name, value in encoding.items()}

    @property
    def chat_template(self) -> str | None:
        """Default chat template, or None if there is none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Special tokens in the text are encoded as special tokens."""
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text and compute character offsets.

        Returns:
            Token ids, and the character range of each token. Tokens that encode parts of the same
            character have the same range.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode takes a str, not {type(text).__name__}")
        try:
            text.encode()
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids), list(encoding.offsets)
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}. Remove lone surrogates") from None
        except BaseException as error:
            raise backend_failure(error, f"{self.source}: {TOKENIZER} cannot encode a text", self.source) from None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Decode a row of ids: a list, or a NumPy or JAX integer array. Unknown ids are skipped."""
        row = np.asarray(ids)
        if row.ndim > 1:
            raise TokenizerError(f"decode takes one row of ids, not an array of shape {row.shape}: decode row by row")
        if row.size and not (np.issubdtype(row.dtype, np.integer) and 0 <= row.min() and row.max() < 2**32):
            raise TokenizerError(f"token ids must be integers >= 0, not {row.tolist()!r:.60} ({row.dtype})")
        return self.decode_list([int(i) for i in row.reshape(-1)], skip_special_tokens)

    def decode_list(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode ids without validation, for use in loops. See `decode`."""
        if skip_special_tokens:  # `tokenizers` 0.23 does not skip special tokens that the normalizer changes
            ids = [i for i in ids if i not in self.special_ids]
        try:
            return self.backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            raise backend_failure(error, f"{self.source}: {TOKENIZER} cannot decode", self.source) from None

    def apply_chat_template(
        self,
        messages: Any,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> Any:
        """Render a conversation in the prompt format that the model was trained on.

        A warning lists variables that the template does not read.

        Args:
            messages: a list of dicts, dataclasses or pydantic models, or an object with the list as
                attribute ``messages``. Arguments of tool calls (objects or JSON text) are converted to
                the form that the template reads.
            add_generation_prompt: whether to append the start of an assistant message.
            tokenize: whether to return ids.
            tools: JSON schemas of the tools.
            documents: documents for retrieval-augmented generation.
            chat_template: a template, or the name of one of the checkpoint's templates.
            continue_final_message: True to end the prompt inside the last message, so that the model
                continues the "content" of the message. A str names a different field to continue.
            variables: further variables of the template.

        Returns:
            The rendered text, or its ids with ``tokenize=True``.

        Raises:
            TokenizerError: if an argument is invalid or the template fails.
        """
        options = {"tools": tools, "documents": documents, "add_generation_prompt": bool(add_generation_prompt)}
        render = functools.partial(self.render_chat, chat_template=chat_template, **options, **variables)
        normalized, last_text = convert_tool_calls(render, normalize_messages(messages)), None
        if continue_final_message:
            if add_generation_prompt:
                raise TokenizerError("pass add_generation_prompt or continue_final_message, not both")
            field = "content" if continue_final_message is True else continue_final_message
            normalized, last_text = mark_end(normalized, field)
        text = render(normalized).text
        text = text if last_text is None else cut_at_mark(text, last_text)
        return self.encode(text, add_special_tokens=False) if tokenize else text  # the template includes special tokens

    def render_chat(
        self, plain: list[dict[str, Any]], chat_template: str | None = None, **variables: Any
    ) -> RenderedChat:
        """Render messages that consist of JSON types.

        The result includes the character ranges that the template marks as answers.
        """
        for name in ("tools", "documents"):
            value = variables.setdefault(name, None)
            items = list(value) if isinstance(value, Iterable) else [value]
            if value is not None and not all(isinstance(item, Mapping) for item in items):
                raise TokenizerError(f"{name} is {value!r:.100}: it must be a list of dicts (tools are JSON schemas)")
            variables[name] = None if value is None else items
        if not isinstance(chat_template, str | None):
            raise TokenizerError(f"chat_template={short(chat_template)}: pass a template, or the name of one")
        try:
            template = self._template(chat_template, variables["tools"] is not None)
            self._warn_of_unread(template_variables(template), variables)
            return render_chat_template(template, {**self.special_tokens, **variables, "messages": plain})
        except ChatTemplateError as error:
            raise TokenizerError(f"{self._template_file}: {error}", self.source) from None

    def _warn_of_unread(self, template_names: frozenset[str], variables: Mapping[str, Any]) -> None:
        """Warn once about each variable that the template does not read. Raises TypeError for encoding options."""
        for name in sorted(
            variables.keys() - template_names - {"tools", "documents", "add_generation_prompt"} - self._warned
        ):
            if name in _ENCODING_OPTIONS:
                raise TypeError(
                    f"unexpected argument {name!r}: the result is a str, or a list of ids with tokenize=True"
                )
            if len(self._warned) > 100:  # limits memory, because clients of a server choose the names
                return
            self._warned.add(name)
            matches = difflib.get_close_matches(
                name, {*template_names, "add_generation_prompt", "continue_final_message"}, 1
            )
            hint = f": did you mean {matches[0]!r}?" if matches else ""
            logger.warning("the chat template does not read %r, so it has no effect%s", name, hint)

    def _template(self, name: str | None, with_tools: bool) -> str:
        """Return a chat template by name.

        If ``name`` is None, returns "tool_use" if there are tools and the template exists, else
        "default". A name that contains a brace is returned as a template.
        """
        if name is not None and "{" in name:
            return name
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if self.chat_templates:
            problem = f"{self._template_file}: no chat template is named {name!r:.60}"
            remedy_text = f"Set chat_template to one of {sorted(self.chat_templates)!r:.300}"
            raise TokenizerError(f"{problem}. {remedy_text}", self.source)
        reason = (
            f"{self.source}: no chat template found, neither {TEMPLATE} nor 'chat_template' in {CONFIG}. This may be a "
        )
        remedy = "base model: encode plain text instead, or add the template of its chat variant"
        raise TokenizerError(reason + remedy, self.source)


class TextStream:
    """Streaming decoder. ``put`` returns the text that a token completes. ``end`` returns the remaining text.

    Bytes of an incomplete character are buffered until the character is complete. Each step decodes
    only a short window. The window starts with tokens whose text has been returned, because decoders
    treat the start of a text differently (leading spaces). The text of ``context`` plus all returned
    pieces equals the decoded text of all ids.

    Args:
        tokenizer: a `Tokenizer`, or a tokenizer of transformers.
        skip_special_tokens: whether to omit special tokens from the text.
        context: ids of the prompt.
        keep: ids of special tokens that are not skipped.
    """

    LONGEST_WAIT = 64  # In tokens. A character of valid UTF-8 needs only a few tokens.

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        context: Iterable[int] = (),
        keep: frozenset[int] = frozenset(),
    ) -> None:
        is_nnxmoe = isinstance(tokenizer, Tokenizer)
        if not is_nnxmoe and not hasattr(tokenizer, "all_special_ids"):
            class_name = type(tokenizer).__name__
            raise ValueError(f"tokenizer is a {class_name}: pass an nnxmoe.Tokenizer, or a tokenizer of transformers")
        self._decoder = tokenizer.decode_list if is_nnxmoe else tokenizer.decode
        self._special = (tokenizer.special_ids if is_nnxmoe else frozenset(tokenizer.all_special_ids)) - keep
        self._skip, self._skips_later = skip_special_tokens, skip_special_tokens and not keep
        ids = (int(i) for i in context)
        self._window = [i for i in ids if not (skip_special_tokens and i in self._special)][-8:]
        self._returned_chars = len(self._decode())  # Characters of the window's text that have been returned.
        self._returned_tokens = len(self._window)  # Tokens of the window whose text has been returned.

    def put(self, token_id: Any) -> str:
        """Return the text that this token completes, possibly empty."""
        token = int(token_id)
        if self._skip and token in self._special:
            return ""
        self._window.append(token)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._window) - self._returned_tokens < self.LONGEST_WAIT:
            return self._new_text(text.rstrip("\ufffd"))
        piece = self._new_text(text)
        if piece:
            self._window = self._window[self._returned_tokens :]
            self._returned_chars, self._returned_tokens = len(self._decode()), len(self._window)
        return piece

    def end(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character, and reset the stream."""
        piece = self._new_text(self._decode())
        self._window, self._returned_chars, self._returned_tokens = [], 0, 0
        return piece

    def _decode(self) -> str:
        return self._decoder(self._window, self._skips_later)

    def _new_text(self, text: str) -> str:
        piece = text[self._returned_chars :]
        self._returned_chars = max(self._returned_chars, len(text))
        return piece
