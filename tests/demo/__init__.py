"""How the embedded demo, a tiny Mixtral, is made and tested: its training text, its exam, and the training script."""
