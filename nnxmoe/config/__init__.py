"""Validation of config.json fields and of arguments. Independent of specific model families."""
