"""GGUF files of llama.cpp: header, config fields and tokenizer."""
