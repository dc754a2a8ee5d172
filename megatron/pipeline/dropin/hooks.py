"""What is put in place in `megatron.training`."""


def install_hooks() -> None:
    """Import `megatron.training` and put our functions in place."""
    import megatron.training.training  # noqa: F401
