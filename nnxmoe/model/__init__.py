"""From parts to models: layer, stack, decoder, and the causal language model around it."""
