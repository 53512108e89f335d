"""Evaluation with lm-evaluation-harness: ``nnxmoe eval``. Needs the extra ``nnxmoe[eval]``, and no torch."""
