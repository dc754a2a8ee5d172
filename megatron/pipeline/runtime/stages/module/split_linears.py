"""``nn.Linear`` in a backward of two halves.

The module's linears get a forward of their own, with the values of torch's, whose backward puts its weight product off
while an I runs (`weight_products`) and computes it otherwise, with the kernels of torch's. All else stays torch's own,
and has its weight gradients computed in I: biases, other layers, subclasses of ``nn.Linear``, weights that are frozen
or computed from others, and linears under autocast, which cast their weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.pipeline.runtime.activations.weight_products import collecting


def split_linears(module: nn.Module) -> None:
    """Give the plain linears of `module` that forward; again is free."""
    for each in module.modules():
        if type(each) is nn.Linear and "forward" not in vars(each):
            each.__class__ = _SplitLinear


class _SplitLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        is_plain = type(weight) is nn.Parameter and weight.requires_grad and input.dim() > 1
        if not is_plain or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, self.bias)
        # What a function returns may be changed in place only where it is no view, as the output of more dimensions is.
        output = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """``F.linear`` of two dimensions."""

    @staticmethod
    def forward(ctx, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.parameter = weight
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, output_grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad
        input_grad = output_grad @ weight.conj() if needs_input else None
        bias_grad = output_grad.sum(0) if needs_bias else None
        products = collecting()
        if products is None:
            return input_grad, _product(input, output_grad), bias_grad
        products.put_off(ctx.parameter, input, output_grad, _product)
        return input_grad, None, bias_grad


def _product(input: Tensor, output_grad: Tensor) -> Tensor:
    return output_grad.t() @ input.conj()
