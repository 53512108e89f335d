"""Hugging Face checkpoints: safetensors files, config.json, generation_config.json and tokenizer files."""
