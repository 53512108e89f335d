"""Checkpoints of training runs: a folder that one run locks, with steps that are complete or absent."""
