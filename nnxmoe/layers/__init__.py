"""Layers of a decoder: embedding, norms, attention, recurrent layers, feed-forwards, and their caches and kernels."""
