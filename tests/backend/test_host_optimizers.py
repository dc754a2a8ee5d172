"""Names of types that megatron.core's optimizers ask for."""

import types

import torch

from megatron.backend.cpu import type_with_cuda_names


def asked_by(module: str, tensor: torch.Tensor, *args):
    """What a module of this name is told."""
    plain = torch.Tensor.type
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    asking = types.ModuleType(module)
    exec("def ask(told, *args): return told(*args)", asking.__dict__)
    return asking.ask(type_with_cuda_names(plain), tensor, *args)


def test_only_megatron_core_is_told_of_cuda():
    """Once, also where the name is CUDA's already; conversions stay what they are."""
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert asked_by("megatron.core.optimizer.optimizer", tensor) == "torch.cuda.BFloat16Tensor"
    assert asked_by("torch.nn.modules.module", tensor) == "torch.BFloat16Tensor"
    assert asked_by("megatron.core.optimizer.optimizer", tensor, torch.float32).dtype is torch.float32
    told_twice = type_with_cuda_names(lambda self, dtype, *args: "torch.cuda.HalfTensor")
    asking = types.ModuleType("megatron.core.optimizer")
    exec("def ask(told, *args): return told(*args)", asking.__dict__)
    assert asking.ask(told_twice, tensor) == "torch.cuda.HalfTensor"
