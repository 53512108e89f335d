"""Layers with a recurrent state instead of keys and values: delta rules, Mamba-2 and short convolutions."""
