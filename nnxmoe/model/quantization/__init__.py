"""Quantized weights: how numbers become codes, and which kernels of a model hold them."""
