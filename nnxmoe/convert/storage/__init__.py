"""Checkpoints on disk: opening and writing them, atomically and by several processes."""
