"""Models: layers, stacks of layers, and causal language models."""
