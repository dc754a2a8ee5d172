"""Any module as a stage of a graph: it takes tensors of several stages, and gives tensors to several.

Otherwise as `ModuleStage`. A tensor that several stages take gets the sum of their gradients, added from the last stage
down, the order in which autograd adds up the uses of a tensor in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.activations.captured import RandomState
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, has_gradients
from megatron.pipeline.runtime.stages.module.stage import AnyModuleStage, Loss, share_of_loss
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions

_Tensors = dict[int, tuple[Tensor, ...]]  # by the other stage


@dataclass
class _SavedInputs:
    """The saved inputs of a microbatch. `roots`: (target, autograd edges of its outputs), where backward starts."""

    inputs: _Tensors
    random_state: RandomState | None = None
    roots: list[tuple[int, list[object | None]]] = field(default_factory=list)
    loss: Tensor | None = None


class GraphModuleStage(AnyModuleStage):
    """Stage `index` of a graph, running `module`.

    Args:
        module: called as `module(data, inputs)`; `inputs`: stage -> tensors. Returns (stage -> tensors, the loss
            or None): a scalar mean, or a sum and its count.
        graph: the stages.
        edges: the other stage -> what travels between them.
        versions: the weight versions of the module's parameters, shared with its `ModuleUpdate`; `AheadVersions` of
            their kind where the schedule's weights look ahead.
        data: what a stage takes of a microbatch besides inputs.
        has_loss: the module returns a loss.
        recompute: the program contains R instructions for this stage.

    Raises:
        ValueError: edges that are not the graph's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        index: int,
        graph: StageGraph,
        edges: Mapping[int, EdgeTensors],
        versions: WeightVersions,
        data: Callable[[Microbatch], object] = lambda microbatch: None,
        has_loss: bool = False,
        recompute: bool = False,
        loss_name: str = "loss",
        device: torch.device | str = "cpu",
    ) -> None:
        sources, targets = (
            graph.makers(Travelling.ACTIVATION, index),
            graph.takers(Travelling.ACTIVATION, index),
        )
        if set(edges) != {*sources, *targets}:
            raise ValueError(
                f"stage {index} has edges with stages {sorted({*sources, *targets})}, and tensors are said for "
                f"{sorted(edges)}; give those of each edge"
            )
        super().__init__(
            module, index=index, num_stages=graph.num_stages, versions=versions, has_loss=has_loss,
            recompute=recompute, loss_name=loss_name, device=device,
        )  # fmt: skip
        self.edges = dict(edges)
        self._targets = targets
        self._with_gradients = graph.makers(Travelling.GRADIENT, index)  # the stages that give some back
        self._wanted = graph.takers(Travelling.GRADIENT, index)  # the stages that want gradients of what they gave
        self._data = data
        self._shared_gradients: dict[int, list[Tensor]] = {}  # source -> of the shared parameters it gave, so far

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
        self.activations.put(microbatch.index, saved)
        if self._recompute:
            saved.random_state = RandomState.capture(self._device)
            with torch.no_grad():
                outputs, loss = self._run(microbatch, inputs)
        else:
            outputs, loss = self._run_saving(microbatch, saved)
        if self._has_loss:
            self._add_loss(microbatch, loss)
        return self._handed_on(outputs)

    def backward(self, microbatch: Microbatch, output_grads: _Tensors) -> _Tensors:
        saved = self.activations.take(microbatch.index)
        roots, grads = [], []
        for target, edges in sorted(saved.roots, reverse=True, key=lambda pair: pair[0]):
            for edge, grad in zip(edges, output_grads[target], strict=True):
                if edge is not None and grad is not None:
                    roots.append(edge)
                    grads.append(grad)
        if saved.loss is not None:
            roots.insert(0, saved.loss)
            grads.insert(0, None)
        torch.autograd.backward(roots, grads)
        return {source: self._input_gradients(source, microbatch, saved.inputs[source]) for source in self._wanted}

    def _input_gradients(
        self, source: int, microbatch: Microbatch, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients for stage `source`. Those of shared parameters are added up over the batch, and None until its last
        microbatch (`shared_parameters`).
        """
        gradients, travelling = _gradients(inputs), self.edges[source].gradients
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

    def _run_saving(self, microbatch: Microbatch, saved: _SavedInputs) -> tuple[_Tensors, Loss | None]:
        """The forward with a graph, from inputs that are leaves of it."""
        saved.inputs = {
            source: tuple(
                tensor.detach().requires_grad_(source in self._wanted and has_gradients(tensor.dtype))
                for tensor in tensors
            )
            for source, tensors in saved.inputs.items()
        }
        outputs, loss = self._run(microbatch, saved.inputs)
        saved.roots = [
            (target, [_root(tensor) for tensor in outputs[target] if has_gradients(tensor.dtype)])
            for target in self._with_gradients
        ]
        saved.loss = None if loss is None else share_of_loss(loss, microbatch)
        return outputs, loss

    def _run(self, microbatch: Microbatch, inputs: _Tensors) -> tuple[_Tensors, Loss | None]:
        return self.module(self._data(microbatch), inputs)

    def _handed_on(self, outputs: _Tensors) -> _Tensors:
        return {target: tuple(tensor.detach() for tensor in outputs[target]) for target in self._targets}

    def _add_loss(self, microbatch: Microbatch, loss: Loss) -> None:
        """Add the loss of a training forward, once for each microbatch."""
        self._losses.add(microbatch.batch, loss)


def _root(tensor: Tensor) -> object | None:
    """The autograd edge where backward starts; None if the tensor has no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of the differentiable tensors; zeros where backward gave none."""
    wanted = (tensor for tensor in tensors if has_gradients(tensor.dtype))
    return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in wanted)
