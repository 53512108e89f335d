"""Encode text to token ids and decode ids: tokenizer files, chat templates and messages."""
