"""Whether megatron.core is there: the extra `core` brings its wheel, and a checkout of Megatron-LM its own."""

from importlib.util import find_spec


def require_core() -> None:
    """Does not import it.

    Raises:
        ValueError: it is not installed.
    """
    if find_spec("megatron.core") is None:
        raise ValueError(
            "megatron.core is not installed, and what this project trains is made of it; pip install '.[core]', or run "
            "from a Megatron-LM checkout through python -m megatron.pipeline.dropin"
        )
