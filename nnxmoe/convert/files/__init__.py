"""Reads files safely and downloads them: JSON, safetensors, and the Hugging Face hub."""
