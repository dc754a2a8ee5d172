"""All stages of a model in one process, one after another: what a pipeline of them has to compute.

Each boundary is as in a pipeline: what is sent is detached and has memory of its own, and gradients are handed back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.capture.cut import CapturedStage, StageData


def train_in_turn(
    stages: Mapping[int, CapturedStage], data: StageData, *, recompute: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of one microbatch through all stages; gradients are added to the parameters'.

    `recompute`: forwards keep their inputs only and run again before the backward. Returns the detached loss and what
    was to be kept.
    """
    received: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    made, loss, kept = {}, None, {}
    for index, stage in sorted(stages.items()):
        inputs = {source: received[source, index] for source in stage.sources}
        with torch.set_grad_enabled(not recompute):
            made[index] = outputs, its_loss, results = stage.run(data, inputs)
        loss = loss if its_loss is None else its_loss.detach()
        kept |= {name: tensor.detach() for name, tensor in results.items()}
        for target, tensors in outputs.items():
            received[index, target] = tuple(
                tensor.detach().clone().requires_grad_(edge.has_gradient)
                for tensor, edge in zip(tensors, stage.targets[target], strict=True)
            )
            assert all(tensor.is_contiguous() for tensor in tensors), "what travels is contiguous"
    for index, stage in sorted(stages.items(), reverse=True):
        if recompute:
            made[index] = stage.run(data, {source: received[source, index] for source in stage.sources})
        outputs, its_loss, _ = made.pop(index)
        roots, gradients = ([], []) if its_loss is None else ([its_loss], [None])
        for target in sorted(outputs, reverse=True):
            for tensor, copy, edge in zip(outputs[target], received[index, target], stage.targets[target], strict=True):
                assert edge.has_gradient or not tensor.requires_grad, f"the gradient of {edge.name} is lost"
                if tensor.requires_grad:
                    roots.append(tensor)
                    gradients.append(torch.zeros_like(copy) if copy.grad is None else copy.grad.contiguous())
        if roots:  # a stage may have nothing to train
            torch.autograd.backward(roots, gradients)
    return loss, kept
