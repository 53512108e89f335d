"""Training: the loss and its step, the loop around it, data, checkpoints and adapters."""
