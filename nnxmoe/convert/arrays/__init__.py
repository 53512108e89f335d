"""Lazy arrays and the tables that map parameters to tensors, for every checkpoint format."""
