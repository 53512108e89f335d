"""Attention: grouped-query, latent and sparse attention, and the kernels that compute it."""
