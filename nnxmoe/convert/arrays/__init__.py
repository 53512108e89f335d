"""Lazy arrays and the layouts that map parameters to tensors, for every checkpoint format."""
