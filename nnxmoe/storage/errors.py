"""The error of unusable checkpoints."""


class CheckpointError(ValueError):
    """Raised for an unusable checkpoint; the message names the file, the tensor or field, its value and the remedy."""
