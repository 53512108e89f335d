"""Linear maps: dense and quantized kernels, LoRA adapters, and their matrix products."""
