"""A small `megatron.training` in place of Megatron-LM's: the same functions, called in the same order, over the real
megatron.core. Written for these tests. Tests write it into a directory of their own (`fake_training.py`)."""

from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import pretrain

__all__ = ["get_args", "initialize_megatron", "pretrain"]
