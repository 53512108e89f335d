"""Measurements anyone can rerun: ``python -m tests.benchmarks.NAME``."""
