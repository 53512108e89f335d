"""Weight quantization: rounding methods, and replacement of a model's kernels by quantized kernels."""
