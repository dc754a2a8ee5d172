"""The cross entropy of logits that tensor ranks share, in FP32."""

import torch
from torch import Tensor

from .._release import pinned


@pinned
def parallel_cross_entropy(inp=None, target=None, dist_process_group=None, ignore_idx=-100, is_cg_capturable=False,
                           _input=None) -> Tensor:  # fmt: skip
    """The loss of each token, [..] float32; `inp`: [.., vocabulary of this rank], `target`: [..]."""
    return _CrossEntropy.apply(_input if inp is None else inp, target, dist_process_group, ignore_idx)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, group, ignored: int) -> Tensor:
        logits_fp32 = logits.float()
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        largest = logits_fp32.amax(dim=-1)
        if size > 1:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        shifted = logits_fp32 - largest.unsqueeze(-1)
        sums = shifted.exp().sum(dim=-1)
        own = target - rank * logits.shape[-1]
        is_own = (own >= 0) & (own < logits.shape[-1])
        own = own.clamp(0, logits.shape[-1] - 1)
        chosen = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * is_own
        if size > 1:
            torch.distributed.all_reduce(sums, group=group)
            torch.distributed.all_reduce(chosen, group=group)
        probabilities = shifted.exp() / sums.unsqueeze(-1)
        probabilities.scatter_add_(-1, own.unsqueeze(-1), -is_own.unsqueeze(-1).to(probabilities.dtype))
        counts = target != ignored
        ctx.save_for_backward(probabilities * counts.unsqueeze(-1))
        ctx.dtype = logits.dtype
        return (sums.log() - chosen) * counts

    @staticmethod
    def backward(ctx, grad: Tensor):
        [gradient] = ctx.saved_tensors
        return (gradient * grad.unsqueeze(-1)).to(ctx.dtype), None, None, None
