"""Evaluation with lm-evaluation-harness: ``nnxmoe eval``. Requires the extra ``eval``, but not torch."""
