"""The training step beside MaxText's: compiled for a TPU slice that is not present, and run on CPUs."""
