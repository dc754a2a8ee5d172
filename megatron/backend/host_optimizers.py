"""megatron.core's optimizers, made of parameters that lie on the host while the device is another.

Problem: on a GPU megatron.core steps with Apex's or Transformer Engine's kernels, where these are installed, which a
host cannot run; and it makes masters of weights by the name of their type, and knows only names on CUDA.

Solution: while such an optimizer is made, Adam and SGD are torch's, as where nothing else is installed, and types go by
their names on CUDA.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def optimizers_on_host() -> Iterator[None]:
    """In this context `get_megatron_optimizer` takes parameters of the host, for steps on the host."""
    from megatron.core import optimizer

    with (
        mock.patch.object(optimizer, "Adam", torch.optim.AdamW),
        mock.patch.object(optimizer, "SGD", torch.optim.SGD),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", True),
        mock.patch.object(torch.Tensor, "type", type_with_cuda_names(torch.Tensor.type)),
    ):
        yield


def type_with_cuda_names(tensor_type: Callable) -> Callable:
    """`torch.Tensor.type` that tells megatron.core of the host's tensors what it would be told on CUDA."""

    @functools.wraps(tensor_type)
    def named_type(self, dtype=None, *args, **kwargs):
        result = tensor_type(self, dtype, *args, **kwargs)
        asks = dtype is None and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core")
        if asks and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return named_type
