"""The training loop: the loss, one step, many steps, and what is measured on the way."""
