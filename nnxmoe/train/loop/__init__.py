"""Training loop: losses, one step, all steps, metrics and callbacks."""
