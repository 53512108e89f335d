"""Malformed checkpoints, made on the spot: what is wrong with each, and what must happen.

``python -m tests.corpus`` runs every case in a process of its own and prints a table; ``python -m tests.corpus NAME``
runs those whose name has NAME in it; tests/convert/test_corpus.py runs them all.
"""
