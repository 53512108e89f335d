"""Text generation: tokenizer, chat templates, sampling and decoding."""
