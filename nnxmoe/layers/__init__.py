"""Decoder layers: embeddings, norms, attention, recurrent layers, feed-forward layers, caches and kernels."""
