"""Read files safely and download them: JSON, safetensors headers, and the Hugging Face hub."""
