"""Linear maps: dense and quantized kernels, LoRA adapters, and matrix products."""
