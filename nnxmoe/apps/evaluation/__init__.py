"""Evaluation with lm-evaluation-harness: ``nnxmoe eval``. Requires the ``eval`` extra, but not torch."""
