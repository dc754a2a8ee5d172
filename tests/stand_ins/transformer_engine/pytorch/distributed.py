"""Collectives along the sequence, and recomputation, which megatron.core leaves to Transformer Engine in FP8."""

import contextlib

import torch
from torch import Tensor

from .._release import missing
from .fp8 import _IN_RECOMPUTE, FP8GlobalStateManager, fp8_autocast

[CudaRNGStatesTracker] = missing("CudaRNGStatesTracker")  # for CUDA graphs
_first_modules: list[bool] = []


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    state = FP8GlobalStateManager._state
    _IN_RECOMPUTE[:] = [activation_recompute and (recompute_phase or state.enabled), recompute_phase]
    if activation_recompute and not recompute_phase:
        _first_modules.append(state.is_first)
    elif activation_recompute:
        state.is_first = _first_modules.pop(0)
    try:
        yield
    finally:
        _IN_RECOMPUTE[:] = [False, False]


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, get_rng_state_tracker, kwargs, *args):
        ctx.function, ctx.kwargs, ctx.tracker = function, kwargs, get_rng_state_tracker
        ctx.random = torch.get_rng_state(), get_rng_state_tracker and get_rng_state_tracker().get_states()
        with torch.no_grad(), activation_recompute_forward(True, False):
            outputs = function(*args, **kwargs)
        ctx.args, ctx.fp8 = args, FP8GlobalStateManager.is_fp8_enabled()
        ctx.recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        now = torch.get_rng_state(), ctx.tracker and ctx.tracker().get_states()
        _set_random(ctx.random, ctx.tracker)
        args = [each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
                for each in ctx.args]  # fmt: skip
        with (
            torch.enable_grad(),
            activation_recompute_forward(True, True),
            fp8_autocast(ctx.fp8, fp8_recipe=ctx.recipe),
        ):
            outputs = ctx.function(*args, **ctx.kwargs)
        _set_random(now, ctx.tracker)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        pairs = [(each, grad) for each, grad in zip(outputs, grads, strict=True)
                 if isinstance(each, Tensor) and each.requires_grad]  # fmt: skip
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        return None, None, None, *(each.grad if isinstance(each, Tensor) else None for each in args)


def _set_random(states: tuple, tracker) -> None:
    torch.set_rng_state(states[0])
    if tracker is not None:
        tracker().set_states(states[1])


def checkpoint(
    function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None, **kwargs
):
    if distribute_saved_activations:
        raise NotImplementedError("the stand-in's checkpoint does not distribute what it saves")
    tracker = get_rng_state_tracker
    return _Checkpoint.apply(function, tracker, kwargs, *args)


def gather_first_dimension(tensor: Tensor, group) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    torch.distributed.all_gather_into_tensor(result, tensor.contiguous(), group=group)
    return result


def scatter_sum_first_dimension(tensor: Tensor, group) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    torch.distributed.reduce_scatter_tensor(result, tensor.contiguous(), group=group)
    return result


def sum_of(tensor: Tensor, group) -> Tensor:
    torch.distributed.all_reduce(tensor, group=group)
    return tensor
