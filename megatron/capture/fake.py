"""Parameters without memory: a model is captured, and its stages are cut, before anything is loaded.

Problem: a model of 2.85 billion parameters takes 11 GB, and each rank needs a part of that. torch's ``meta`` device is
no help, because the graph would name it wherever the model makes a tensor. Solution: parameters become fake tensors of
the CPU as soon as a module registers them, so that the model initialises nothing. Buffers stay real: no checkpoint has
those that are not persistent, such as the frequencies of rotary embeddings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from megatron.capture.stage import CapturedStage


@contextlib.contextmanager
def fake_parameters(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Models that are built in the block have fake parameters, real buffers, and are otherwise as without it.

    `dtype`: of the parameters of floating dtype, such as bfloat16; None: as the model says. (A model's ``to`` cannot
    convert fake ones.)

    Raises ValueError for a model that reads the values of its parameters while it is built.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            with mode:
                its = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                empty = torch.empty(parameter.shape, dtype=its, device=parameter.device)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter._is_hf_initialized = True  # so transformers does not give it values
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake
    try:
        yield
    except DataDependentOutputException as error:
        raise ValueError(
            f"the model reads values of its parameters while it is built ({error.func}); build it with real ones"
        ) from error
    finally:
        nn.Module.register_parameter = register


def is_fake(tensor: Tensor) -> bool:
    """Whether it has a shape and no values."""
    return isinstance(tensor, FakeTensor)


def give_values(stage: CapturedStage, values: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Put real parameters in the place of a stage's fake ones.

    `values`: name in the model -> tensor of the parameter's shape. They are converted to the parameter's dtype.
    """
    value_of = values if callable(values) else values.__getitem__
    for name, parameter in list(stage.named_parameters()):
        if is_fake(parameter):
            path, _, last = name.rpartition(".")
            value = value_of(name).to(parameter.dtype)
            assert value.shape == parameter.shape, f"{name} has shape {tuple(value.shape)}"
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            stage.get_submodule(path)._parameters[last] = real
