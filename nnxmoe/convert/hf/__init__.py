"""Hugging Face checkpoints: safetensors files, config.json and the files beside them."""
