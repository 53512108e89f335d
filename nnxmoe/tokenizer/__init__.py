"""Text to token ids and back: tokenizer files, chat templates and messages."""
