"""The error that a user of checkpoints can act on."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read: which file or setting, why, and what to do, in one or two sentences."""
