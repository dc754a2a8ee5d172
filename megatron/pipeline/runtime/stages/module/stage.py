"""Any ``nn.Module`` as a pipeline stage, with losses and split backwards.

The first stage gets its inputs from a callable, and the last stage computes a loss from its outputs. The backward
starts from an edge of the autograd graph and not from the output tensor. So after an output was sent, the stage does
not hold its storage. Under recompute the forward runs without a graph, and only the input and the random state are
saved.

Losses. The loss of a microbatch is a mean, or a sum with its count. The gradient of a batch is the mean over its
microbatches, or the sum divided by the total count on all replicas. The total count is known only after the last
microbatch. So each backward divides a sum, like a mean, by the number of microbatches, and `ModuleUpdate` divides the
gradients by the mean count of a microbatch.

Split backward. The forward of each plain ``nn.Linear`` of the module is replaced by one with the same values. While an
I runs, its backward postpones the weight product (`weight_products`); otherwise it computes the product with torch's
kernels. I computes all other weight gradients: those of biases, of other layers, of subclasses of ``nn.Linear``, of
weights that are computed from other parameters, and of linear layers under autocast, which cast their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron.pipeline.runtime.activations.saved_activations import (
    ActivationMemory,
    CapturingStage,
    RandomState,
    SavedActivations,
)
from megatron.pipeline.runtime.activations.weight_products import DeferredProducts, collecting
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.relay.resident_weights import StageWeights
from megatron.pipeline.runtime.update.versions import WeightVersions


class AnyModuleStage:
    """Base of the stages that run a module.

    A subclass adds `forward`, `backward` and

    - `_run`: returns the outputs of the module and the loss or None, from the inputs of the stage;
    - `_run_saving`: the same with a graph, from the saved data of a microbatch, to which it adds the roots of the
      backward;
    - `_handed_on`: returns the outputs for other stages, without their graph.

    Args:
        module: the module of the stage.
        index: the number of the stage.
        num_stages: the number of stages.
        versions: the weight versions of the module's parameters, shared with its `ModuleUpdate`, or its weights on the
            device, from `weights` of its `ModuleRelayUpdate`; None if the stage is frozen.
        has_loss: the stage computes a loss.
        recompute: the program has R instructions for this stage.
        keeps: the positions in a batch of the microbatches without R.
        loss_name: the name of the loss.
        device: the device of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        num_stages: int,
        versions: WeightVersions | StageWeights | None,
        has_loss: bool,
        recompute: bool,
        loss_name: str,
        device: torch.device | str,
        keeps: frozenset[int] = frozenset(),
    ) -> None:
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self.loss_names = (loss_name,)
        self.activations: dict[int, Any] = {}  # microbatch -> what is saved between its forward and its backward
        self._versions = versions
        self._has_loss = has_loss
        self._recompute, self._keeps = recompute, keeps
        self._device = torch.device(device)
        self._losses = BatchLosses()
        self._products = DeferredProducts()

    def load_version(self, version: int) -> None:
        self._versions.load(version)

    def recompute_from_now(self, recompute: bool, *, keeps: frozenset[int]) -> None:
        """Change what the constructor was given, because the program changes. Call it while nothing is in flight."""
        self._recompute, self._keeps = recompute, keeps

    def abandon(self) -> None:
        """Drop the data of all microbatches and batches in flight, after another rank was lost."""
        self.activations.clear()
        self._losses, self._products = BatchLosses(), DeferredProducts()

    def recompute(self, microbatch: Microbatch) -> None:
        saved = self.activations[microbatch.index]
        now = RandomState.capture(self._device)
        saved.random_state.restore(self._device)
        self._run_saving(microbatch, saved)
        now.restore(self._device)

    def split_backward(self) -> None:
        split_linears(self.module)

    def backward_input(self, microbatch: Microbatch, output_grad: Any) -> Any:
        """Run `backward` without the weight products of plain ``nn.Linear`` layers."""
        with self._products.begin(microbatch.index).collect():
            return self.backward(microbatch, output_grad)

    def backward_weights(self, microbatch: Microbatch) -> None:
        self._products.compute(microbatch.index)

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        return self._products.num_bytes(microbatch.index)

    def free_output(self, microbatch: Microbatch) -> None:
        """Do nothing: the stage holds only an edge of the graph, and not the output."""

    def forward_only(self, microbatch: Microbatch, input: Any) -> Any:
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            outputs, loss = self._run(microbatch, input)
        self.module.train(was_training)
        if self._has_loss:
            self._losses.add(microbatch.batch, loss)
        return self._handed_on(outputs)

    def take_losses(self, batch: int) -> dict[str, tuple[float, float]]:
        return {self.loss_names[0]: self._losses.take(batch)} if self._has_loss else {}


class ModuleStage(CapturingStage, AnyModuleStage):
    """Stage `index` of a chain of `num_stages`, running `module`.

    A frozen stage runs only `forward_only`, in evaluation mode.

    Args:
        source: microbatch -> input tensor; only on the first stage.
        loss: (output, microbatch) -> scalar mean loss, or (sum, count); only on the last stage.
        input_spec: the tensor that the stage receives per microbatch; None on the first stage.
        output_spec: the tensor that the stage sends per microbatch; None on the last stage.
        activation_memory: counts and moves the activations of the rank; None: activations stay in the graph.
        input_needs_gradient: False if the stage before is frozen.
        module, index, num_stages, versions, recompute, keeps, loss_name, device: as for `AnyModuleStage`.

    Raises:
        ValueError: `source`, `loss` or a spec is missing, or given on another stage.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        index: int,
        num_stages: int,
        versions: WeightVersions | StageWeights | None,
        source: Callable[[Microbatch], Tensor] | None = None,
        loss: Callable[[Tensor, Microbatch], Loss] | None = None,
        input_spec: TensorSpec | None = None,
        output_spec: TensorSpec | None = None,
        recompute: bool = False,
        loss_name: str = "loss",
        device: torch.device | str = "cpu",
        activation_memory: ActivationMemory | None = None,
        input_needs_gradient: bool = True,
        keeps: frozenset[int] = frozenset(),
    ) -> None:
        is_first, is_last = index == 0, index == num_stages - 1
        if (source is not None) != is_first or (input_spec is None) != is_first:
            raise ValueError(f"stage {index} of {num_stages}: the first stage takes a source, the others an input_spec")
        if (loss is not None) != is_last or (output_spec is None) != is_last:
            raise ValueError(f"stage {index} of {num_stages}: the last stage takes a loss, the others an output_spec")
        super().__init__(
            module, index=index, num_stages=num_stages, versions=versions, has_loss=loss is not None,
            recompute=recompute, keeps=keeps, loss_name=loss_name, device=device,
        )  # fmt: skip
        self.input_spec = input_spec
        self.output_spec = output_spec
        self._source = source
        self._loss = loss
        self._input_needs_gradient = input_needs_gradient
        self._capture(module, activation_memory)

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        saved = SavedActivations(input=None if input is None else input.requires_grad_(self._input_needs_gradient))
        assert microbatch.index not in self.activations, f"microbatch {microbatch.index} is saved already"
        self.activations[microbatch.index] = saved
        again = self._recompute and microbatch.position not in self._keeps
        with self._captured.capture(microbatch.index):
            if again:
                saved.random_state = RandomState.capture(self._device)
                with torch.no_grad():
                    output, loss = self._run(microbatch, input)
                saved.kept_input = self._captured.keep(microbatch.index, input)
            else:
                output, loss = self._run_saving(microbatch, saved)
        if loss is not None:
            self._losses.add(microbatch.batch, loss)
            output, _ = sum_and_count(loss)
        handed_on = self._handed_on(None if self._has_loss else output)  # before the input, which may be it, is emptied
        may_move = not (again and self._keeps)
        self._captured.seal(microbatch.index, input=input, output=output, may_move=may_move)
        return handed_on

    def recompute(self, microbatch: Microbatch) -> None:
        saved = self.activations[microbatch.index]
        kept = self._captured.kept(saved.kept_input)
        if kept is not None:
            saved.input = kept.detach().requires_grad_(self._input_needs_gradient)
        super().recompute(microbatch)

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        saved = self.activations.pop(microbatch.index)
        if self._loss is not None:
            torch.autograd.backward(saved.root)
        elif saved.root is not None:  # else the stage trains nothing, and no gradient leads further back
            torch.autograd.backward((saved.root,), (output_grad,))
        self._captured.drop(microbatch.index)
        if saved.input is None or not saved.input.requires_grad:
            return None
        return torch.zeros_like(saved.input) if saved.input.grad is None else saved.input.grad

    def _run(self, microbatch: Microbatch, input: Tensor | None) -> tuple[Tensor | None, Loss | None]:
        output = self.module(self._source(microbatch) if self._source is not None else input)
        return (output, None) if self._loss is None else (None, self._loss(output, microbatch))

    def _run_saving(self, microbatch: Microbatch, saved: SavedActivations) -> tuple[Tensor | None, Loss | None]:
        output, loss = self._run(microbatch, saved.input)
        if loss is not None:
            saved.root = share_of_loss(loss, microbatch)
        elif output.requires_grad:
            saved.root = get_gradient_edge(output)
        return output, loss

    def _handed_on(self, outputs: Tensor | None) -> Tensor | None:
        return None if outputs is None else outputs.detach()  # a new tensor, since the output may be the input


def split_linears(module: nn.Module) -> None:
    """Replace the plain ``nn.Linear`` layers of `module` so that their backwards can be split.

    A second call changes nothing.
    """
    for each in module.modules():
        if type(each) is nn.Linear and "forward" not in vars(each):
            each.__class__ = _SplitLinear


class _SplitLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        is_plain = type(weight) is nn.Parameter and weight.requires_grad and input.dim() > 1
        if not is_plain or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, self.bias)
        # With more than two dimensions F.linear returns a view. If an autograd function returned this view, the user
        # could not change it in place.
        output = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """``F.linear`` for inputs of two dimensions, whose weight product can be postponed."""

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


Loss = Tensor | tuple[Tensor, Tensor | float]
"""A scalar mean over a microbatch, or (scalar sum, count)."""

Counts = Callable[[int, int], float]
"""(batch, n) -> the count of the losses of its first n microbatches, as the mean over the replicas."""


def by_microbatches(batch: int, num_microbatches: int) -> float:
    """The count of losses that are means: 1 per microbatch."""
    return float(num_microbatches)


def sum_and_count(loss: Loss) -> tuple[Tensor, Tensor | float]:
    """(sum, count) of a loss; a mean has the count 1."""
    return loss if isinstance(loss, tuple) else (loss, 1.0)


def share_of_loss(loss: Loss, microbatch: Microbatch) -> Tensor:
    """The loss of a microbatch divided by the number of microbatches: its share of the loss of the batch."""
    return sum_and_count(loss)[0] / microbatch.num_microbatches


class BatchLosses:
    """The sums of the losses of each batch, in float64 on their device. Only `take` waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor | float]] = {}

    def add(self, batch: int, loss: Loss) -> None:
        total, count = sum_and_count(loss)
        sums = self._sums.get(batch) or (torch.zeros((), dtype=torch.float64, device=total.device), 0.0)
        counted = count.detach().double() if isinstance(count, Tensor) else count
        self._sums[batch] = sums[0] + total.detach(), sums[1] + counted

    def take(self, batch: int) -> tuple[float, float]:
        """Remove and return (sum, count) over all microbatches of a batch; zeros if the stage took none of them.

        Raises:
            ValueError: the count is negative or not finite.
        """
        total, count = self._sums.pop(batch, (torch.zeros(()), 0.0))
        if not 0 <= (number := float(count)) < math.inf:
            raise ValueError(
                f"the losses of batch {batch} count {number:g}; return (sum, count) with a count from 0 on"
            )
        return total.item(), number
