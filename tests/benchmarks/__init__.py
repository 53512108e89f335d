"""Measurements anyone can rerun: ``python -m tests.benchmarks`` beside transformers, and the single files."""
