"""Linear maps: dense and quantized kernels, LoRA adapters, and the products that they compute."""
