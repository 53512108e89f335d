"""Checkpoints: from files to modules and back."""
