"""Training: loss, step, fit, LoRA, data, checkpoints."""
