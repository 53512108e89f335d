"""The error of unusable checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the tensor or field, its value and the remedy."""
