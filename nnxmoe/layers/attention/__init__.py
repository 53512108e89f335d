"""Attention: grouped-query, latent and sparse attention, and their implementations."""
