"""Checkpoints on disk: find, open and write them, atomically and from several processes."""
