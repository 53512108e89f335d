"""Comparison of training steps with MaxText: compiled for a TPU slice without TPUs, and run on CPUs."""
