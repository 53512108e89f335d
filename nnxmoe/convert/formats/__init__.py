"""Formats of quantized tensors in checkpoints: FP8, FP4, GPTQ, AWQ, NF4, compressed-tensors and GGUF."""
