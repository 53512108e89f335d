"""Tokenizers: encoding, decoding, tokenizer files, chat templates and messages."""
