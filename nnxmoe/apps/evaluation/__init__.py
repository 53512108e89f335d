"""Evaluation with lm-evaluation-harness: ``nnxmoe eval``. Needs the extra ``eval``, and no torch."""
