"""Training loop: objectives, training step, run, metrics and callbacks."""
