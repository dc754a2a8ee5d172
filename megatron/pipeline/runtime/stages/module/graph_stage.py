"""Any module as a stage of a graph, which exchanges tensors with several stages.

If several stages use a tensor, its gradient is the sum of their gradients. They are added from the last stage down to
the first, the order in which autograd adds the gradients of a tensor's uses in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.activations.saved_activations import RandomState
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors
from megatron.pipeline.runtime.stages.module.stage import AnyModuleStage, Loss, share_of_loss
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions

_Tensors = dict[int, tuple[Tensor, ...]]  # the other stage -> tensors


@dataclass
class _SavedInputs:
    """The data saved between the forward and the backward of a microbatch.

    `roots`: (target stage, autograd edges of the tensors sent there), from which the backward starts.
    """

    inputs: _Tensors
    random_state: RandomState | None = None
    roots: list[tuple[int, list[object | None]]] = field(default_factory=list)
    loss: Tensor | None = None


class GraphModuleStage(AnyModuleStage):
    """Stage `index` of a graph, running `module`. A frozen stage computes as in training, with dropout.

    Args:
        module: called as `module(data, inputs)`, where `inputs` is stage -> tensors. Returns (stage -> tensors, loss).
            The loss is None, a scalar mean, or (sum, count).
        index: the number of the stage.
        graph: the graph of the stages.
        edges: the other stage -> the tensors sent between the two stages.
        edges_at: microbatch -> `edges` with its shapes; None: all microbatches have the shapes of `edges`.
        versions: the weight versions of the module's parameters, shared with its `ModuleUpdate`; `AheadVersions` if
            forwards use weights ahead.
        data: microbatch -> the first argument of the module.
        has_loss: the module returns a loss.
        recompute: the program has R instructions for this stage.
        loss_name: the name of the loss.
        loss_scale: batch -> the factor by which its gradients are multiplied.
        device: the device of the module.
        keeps: the positions in a batch of the microbatches without R.

    Raises:
        ValueError: `edges` are not the edges of `graph`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        index: int,
        graph: StageGraph,
        edges: Mapping[int, EdgeTensors],
        edges_at: Callable[[Microbatch], Mapping[int, EdgeTensors]] | None = None,
        versions: WeightVersions,
        data: Callable[[Microbatch], object] = lambda microbatch: None,
        has_loss: bool = False,
        recompute: bool = False,
        loss_name: str = "loss",
        loss_scale: Callable[[int], float] = lambda batch: 1.0,
        device: torch.device | str = "cpu",
        keeps: frozenset[int] = frozenset(),
    ) -> None:
        sources, targets = (
            graph.makers(Travelling.ACTIVATION, index),
            graph.takers(Travelling.ACTIVATION, index),
        )
        if set(edges) != {*sources, *targets}:
            raise ValueError(
                f"stage {index} has edges with stages {sorted({*sources, *targets})}, and tensors are given for "
                f"{sorted(edges)}; give the tensors of each edge"
            )
        super().__init__(
            module, index=index, num_stages=graph.num_stages, versions=versions, has_loss=has_loss,
            recompute=recompute, keeps=keeps, loss_name=loss_name, device=device,
        )  # fmt: skip
        self.edges = dict(edges)
        self._edges_at = edges_at
        self._targets = targets
        self._with_gradients = graph.makers(Travelling.GRADIENT, index)  # the stages that send gradients to this stage
        self._wanted = graph.takers(Travelling.GRADIENT, index)  # the stages that receive gradients from this stage
        self._data = data
        self._loss_scale = loss_scale
        self._shared_gradients: dict[int, list[Tensor]] = {}  # source -> sums of gradients of its shared parameters

    def edges_at(self, microbatch: Microbatch) -> Mapping[int, EdgeTensors]:
        return self.edges if self._edges_at is None else self._edges_at(microbatch)

    def load_ahead(self, version: int, horizon: int) -> None:
        self._ahead(Ahead.PREDICTION).load_ahead(version, horizon)

    def load_provisional(self, version: int, unstepped: int) -> None:
        self._ahead(Ahead.PROVISIONAL_STEP).load_ahead(version, unstepped)

    def _ahead(self, wanted: Ahead) -> AheadVersions:
        versions = self._versions
        if not isinstance(versions, AheadVersions) or versions.ahead is not wanted:
            raise ValueError(
                f"stage {self.index} is to use {wanted.value} weights, which its {type(versions).__name__} have not; "
                f"give it AheadVersions with ahead={wanted}"
            )
        return versions

    def forward(self, microbatch: Microbatch, inputs: _Tensors) -> _Tensors:
        saved = _SavedInputs(inputs)
        assert microbatch.index not in self.activations, f"microbatch {microbatch.index} is saved already"
        self.activations[microbatch.index] = saved
        if self._recompute and microbatch.position not in self._keeps:
            saved.random_state = RandomState.capture(self._device)
            with torch.no_grad():
                outputs, loss = self._run(microbatch, inputs)
        else:
            outputs, loss = self._run_saving(microbatch, saved)
        if self._has_loss:
            self._add_loss(microbatch, loss)
        return self._handed_on(outputs)

    def forward_only(self, microbatch: Microbatch, input: _Tensors) -> _Tensors:
        if microbatch.batch == EVALUATION_BATCH:
            return super().forward_only(microbatch, input)
        with torch.no_grad():  # a frozen stage, which computes as in training
            outputs, _ = self._run(microbatch, input)
        return self._handed_on(outputs)

    def backward(self, microbatch: Microbatch, output_grads: _Tensors) -> _Tensors:
        saved = self.activations.pop(microbatch.index)
        roots, grads = [], []
        for target, edges in sorted(saved.roots, reverse=True, key=lambda pair: pair[0]):
            for edge, grad in zip(edges, output_grads[target], strict=True):
                if edge is not None and grad is not None:
                    roots.append(edge)
                    grads.append(grad)
        if saved.loss is not None:
            roots.insert(0, saved.loss)
            grads.insert(0, self._scale(saved.loss, microbatch))
        torch.autograd.backward(roots, grads)
        return {source: self._input_gradients(source, microbatch, saved.inputs[source]) for source in self._wanted}

    def _scale(self, loss: Tensor, microbatch: Microbatch) -> Tensor | None:
        """The gradient of the loss from which a backward starts; None for 1, infinite if its dtype cannot hold it."""
        scale = self._loss_scale(microbatch.batch)
        return None if scale == 1.0 else torch.full_like(loss, scale, dtype=torch.float32).to(loss.dtype)

    def _input_gradients(
        self, source: int, microbatch: Microbatch, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients to send to stage `source`.

        The gradients of shared parameters are added up over the batch. They are None before its last microbatch.
        """
        gradients, travelling = _gradients(inputs, self.edges[source].trained), self.edges[source].gradients
        if not travelling.has_shared:
            return gradients
        shared = [grad for grad, owner in zip(gradients, travelling.owners, strict=True) if owner is not None]
        if microbatch.position:
            for total, grad in zip(self._shared_gradients[source], shared, strict=True):
                total += grad
        else:
            self._shared_gradients[source] = shared
        if microbatch.position < microbatch.num_microbatches - 1:
            totals = [None] * len(shared)
        else:
            totals = self._shared_gradients.pop(source)
        found = iter(totals)
        return tuple(
            grad if owner is None else next(found) for grad, owner in zip(gradients, travelling.owners, strict=True)
        )

    def release_input(self, microbatch: Microbatch) -> Tensor:
        """Drop the saved inputs and return them as one tensor, packed as on their edge. For a stage of a chain."""
        saved = self.activations[microbatch.index]
        [(source, tensors)] = saved.inputs.items()
        saved.inputs = {}
        return self.edges_at(microbatch)[source].activations.pack([tensor.detach() for tensor in tensors])

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        """Save the inputs again that `release_input` packed."""
        source = self.index - 1
        travelling = self.edges_at(microbatch)[source].activations
        self.activations[microbatch.index].inputs = {source: travelling.unpack(input)}

    def _run_saving(self, microbatch: Microbatch, saved: _SavedInputs) -> tuple[_Tensors, Loss | None]:
        """Run the forward with a graph whose leaves are detached inputs, and save the inputs and the roots."""
        saved.inputs = {
            source: tuple(
                tensor.detach().requires_grad_(source in self._wanted and trained)
                for tensor, trained in zip(tensors, self.edges[source].trained, strict=True)
            )
            for source, tensors in saved.inputs.items()
        }
        outputs, loss = self._run(microbatch, saved.inputs)
        saved.roots = [
            (target, [_root(tensor) for tensor in compress(outputs[target], self.edges[target].trained)])
            for target in self._with_gradients
        ]
        saved.loss = None if loss is None else share_of_loss(loss, microbatch)
        return outputs, loss

    def _run(self, microbatch: Microbatch, inputs: _Tensors) -> tuple[_Tensors, Loss | None]:
        return self.module(self._data(microbatch), inputs)

    def _handed_on(self, outputs: _Tensors) -> _Tensors:
        return {target: tuple(tensor.detach() for tensor in outputs[target]) for target in self._targets}

    def _add_loss(self, microbatch: Microbatch, loss: Loss) -> None:
        """Record the loss of a forward in training; called once per microbatch."""
        self._losses.add(microbatch.batch, loss)


def _root(tensor: Tensor) -> object | None:
    """The autograd edge from which a backward starts; None if the tensor requires no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _gradients(tensors: Sequence[Tensor], trained: Sequence[bool]) -> tuple[Tensor, ...]:
    """The gradients of the tensors that are marked in `trained`; zeros if the backward has computed none."""
    return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in compress(tensors, trained))
