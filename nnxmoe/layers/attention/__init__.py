"""Grouped-query, latent and sparse attention layers, and implementations of softmax attention."""
