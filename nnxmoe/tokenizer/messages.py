"""Convert chat messages to the form that templates read, and implement ``continue_final_message``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnxmoe.tokenizer.chat_template import to_json_types
from nnxmoe.tokenizer.tokenizer_files import TokenizerError
from nnxmoe.tokenizer.tool_calls import pop_tool_calls

REASONING = ("reasoning_content", "thinking", "reasoning")  # Names of the reasoning field in different templates.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # Mark at the end of a message. The space shows whether templates strip it.


def is_message(value: Any) -> bool:
    """Return whether a value is a message: a mapping, a dataclass or a pydantic model."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, Mapping) or is_dataclass or callable(getattr(value, "model_dump", None))


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Convert messages to dicts of JSON types without None fields.

    Reasoning is stored under all names that templates use. Tool calls are validated (see
    `pop_tool_calls`). Dataclasses and pydantic models are converted, as in transformers.

    Args:
        messages: a list of messages, or an object with the attribute ``messages``.

    Raises:
        TokenizerError: if the messages are invalid or empty.
    """
    converted = to_json_types(getattr(messages, "messages", messages))
    if not isinstance(converted, list | tuple) or not all(isinstance(message, dict) for message in converted):
        raise TokenizerError('messages must be a list of dicts like {"role": "user", "content": "Hello"}')
    if not converted:
        raise TokenizerError("messages is empty: pass at least one message")
    normalized = []
    for number, message in enumerate(converted):
        fields = {name: value for name, value in message.items() if value is not None}
        if calls := pop_tool_calls(fields, f"messages[{number}]"):  # some templates only test if the field is defined
            fields["tool_calls"] = calls
        reasoning = next((fields[name] for name in REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        normalized.append(fields)
    return normalized


def mark_end(messages: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], str]:
    """Append a mark to a field of the last message.

    If the field is a list of blocks, the mark is appended to the last block with "text". Reasoning is
    marked in all fields that contain it.

    Returns:
        The messages, and the text of the field without the mark.

    Raises:
        TokenizerError: if the field has no text.
    """
    *earlier, last_message = messages
    value = last_message.get(field)
    if isinstance(value, str):
        names = [name for name in REASONING if last_message.get(name) == value] if field in REASONING else [field]
        return [*earlier, last_message | {name: value + _MARK for name in names}], value
    blocks = list(value) if isinstance(value, list | tuple) else []
    for i, block in reversed(list(enumerate(blocks))):
        if isinstance(block, Mapping) and isinstance(text := block.get("text"), str):
            blocks[i] = {**block, "text": text + _MARK}
            return [*earlier, last_message | {field: blocks}], text
    raise TokenizerError(f"continue_final_message: the last message has no text in {field!r:.60} to continue. Add text")


def cut_at_mark(rendered: str, text: str) -> str:
    """Cut the rendered chat at the mark that `mark_end` appended.

    Args:
        rendered: chat rendered from the messages of `mark_end`.
        text: text before the mark, as returned by `mark_end`.

    Raises:
        TokenizerError: if the template changes or omits the last message.
    """
    end = rendered.rfind(_MARK.strip())
    if end < 0 or text.strip() not in rendered:
        raise TokenizerError(
            "continue_final_message: the chat template changes or omits the last message, so its end cannot be "
            "found. Use add_generation_prompt=True and append the text to the prompt"
        )
    return rendered[:end] if rendered.startswith(_MARK, end) else rendered[:end].rstrip()
