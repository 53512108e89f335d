"""Checkpoint conversion: loading models from files and saving them."""
