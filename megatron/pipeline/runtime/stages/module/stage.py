"""Any ``nn.Module`` as a pipeline stage.

The first stage draws its inputs from a callable, the last one turns its outputs into a loss. The gradient of a batch
is the mean over its microbatches, or over what its losses count (`losses`). Backward starts from an edge of the
autograd graph and not from the output tensor, so once an output has been sent nothing here holds its storage. Under
recompute the forward runs without a graph and only the input and the random state are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.activations.captured import CapturedActivations, NotCaptured
from megatron.pipeline.runtime.activations.kept import ActivationStore, RandomState, SavedActivations
from megatron.pipeline.runtime.activations.weight_products import DeferredProducts
from megatron.pipeline.runtime.contract.stage import Eviction, Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.relay.resident_weights import StageWeights
from megatron.pipeline.runtime.stages.module.losses import BatchLosses, Loss, sum_and_count
from megatron.pipeline.runtime.stages.module.split_linears import split_linears
from megatron.pipeline.runtime.update.versions import WeightVersions


class ModuleStage:
    """Stage `index` of `num_stages`, running `module`.

    `versions`: the weight versions of the module's parameters, shared with its `ModuleUpdate`, or its weights on the
    host, shared with its `ModuleRelayUpdate`; None where the stage is frozen. `source(microbatch)`: the input tensor of
    a microbatch, on the first stage. `loss(output, microbatch)`: on the last stage, its scalar mean loss, or its sum
    and count. `input_spec` / `output_spec`: what arrives and leaves, None at the ends. `recompute`: the program
    contains R instructions. `activation_memory`: the rank's, if activations are to be counted and moved; None: they
    stay in the graph. `input_needs_gradient`: False behind a frozen stage. A stage that is frozen itself is asked for
    `forward_only` alone.
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
    ) -> None:
        is_first, is_last = index == 0, index == num_stages - 1
        if (source is not None) != is_first or (input_spec is None) != is_first:
            raise ValueError(f"stage {index} of {num_stages}: the first stage takes a source, the others an input_spec")
        if (loss is not None) != is_last or (output_spec is None) != is_last:
            raise ValueError(f"stage {index} of {num_stages}: the last stage takes a loss, the others an output_spec")
        self.module = module
        self.index = index
        self.num_stages = num_stages
        self.input_spec = input_spec
        self.output_spec = output_spec
        self.loss_names = (loss_name,)
        self.activations = ActivationStore()
        self._versions = versions
        self._source = source
        self._loss = loss
        self._recompute = recompute
        self._device = torch.device(device)
        self._input_needs_gradient = input_needs_gradient
        self._captured = (
            NotCaptured(index) if activation_memory is None else CapturedActivations(index, module, activation_memory)
        )
        self._losses = BatchLosses()
        self._products = DeferredProducts()

    def load_version(self, version: int) -> None:
        self._versions.load(version)

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        saved = SavedActivations(input=None if input is None else input.requires_grad_(self._input_needs_gradient))
        self.activations.put(microbatch.index, saved)
        with self._captured.capture(microbatch.index):
            if self._recompute:
                saved.random_state = RandomState.capture(self._device)
                with torch.no_grad():
                    output = self._run(microbatch, input)
                saved.context = self._captured.keep(microbatch.index, input)
            else:
                output = self._run(microbatch, input)
                saved.root = self._root(output, microbatch)
        if self._loss is not None:
            self._losses.add(microbatch.batch, output)
            output, _ = sum_and_count(output)
        self._captured.seal(microbatch.index, input=input, output=output)
        return output.detach() if self._loss is None else None

    def recompute(self, microbatch: Microbatch) -> None:
        saved = self.activations.get(microbatch.index)
        now = RandomState.capture(self._device)
        saved.random_state.restore(self._device)
        if saved.input is not None:
            saved.input = self._captured.kept(saved.context).detach().requires_grad_(self._input_needs_gradient)
        saved.root = self._root(self._run(microbatch, saved.input), microbatch)
        now.restore(self._device)

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        saved = self.activations.take(microbatch.index)
        if self._loss is None:
            torch.autograd.backward((saved.root,), (output_grad,))
        else:
            torch.autograd.backward(saved.root)
        self._captured.drop(microbatch.index)
        return None if saved.input is None else saved.input.grad

    def split_backward(self) -> None:
        split_linears(self.module)

    def backward_input(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        """As `backward`, but for the weight products of the module's plain ``nn.Linear``."""
        with self._products.begin(microbatch.index).collect():
            return self.backward(microbatch, output_grad)

    def backward_weights(self, microbatch: Microbatch) -> None:
        self._products.compute(microbatch.index)

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        return self._products.num_bytes(microbatch.index)

    def free_output(self, microbatch: Microbatch) -> None:
        """Nothing to do: only the graph's edge is kept."""

    def evict(self, microbatch: Microbatch) -> Eviction:
        return self._captured.evict(microbatch.index)

    def load(self, microbatch: Microbatch, buffer: Tensor) -> None:
        self._captured.load(microbatch.index, buffer)

    def release_input(self, microbatch: Microbatch) -> Tensor:
        saved = self.activations.get(microbatch.index)
        input, saved.input, saved.context = saved.input.detach(), None, None
        return input

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        saved = self.activations.get(microbatch.index)
        saved.input = saved.context = input

    def saved_bytes(self, microbatch: Microbatch) -> int:
        return self._captured.saved_bytes(microbatch.index)

    def forward_only(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            output = self._run(microbatch, input)
        self.module.train(was_training)
        if self._loss is None:
            return output.detach()  # it may be the input itself, which is not ours to change
        self._losses.add(microbatch.batch, output)
        return None

    def take_losses(self, batch: int) -> dict[str, tuple[float, float]]:
        if self._loss is None:
            return {}
        return {self.loss_names[0]: self._losses.take(batch)}

    def _run(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | Loss:
        output = self.module(self._source(microbatch) if self._source is not None else input)
        return output if self._loss is None else self._loss(output, microbatch)

    def _root(self, output: Tensor | Loss, microbatch: Microbatch):
        """Where backward starts: the edge that made `output`, or on the last stage the loss's share of the batch's
        mean.
        """
        if self._loss is None:
            return get_gradient_edge(output)
        return sum_and_count(output)[0] / microbatch.num_microbatches
