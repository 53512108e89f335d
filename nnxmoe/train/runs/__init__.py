"""Checkpoints of training runs: a folder of steps that are complete or absent, with one writer at a time."""
