"""A user's module as a stage, called with tensors, and the shapes of the tensors that stages exchange.

The first stage's module is called with the inputs of a microbatch: with a tensor, or with the items of a tuple or list
as positional arguments, or with the items of a dict as keyword arguments. Every other module is called with the tensors
of its source stages, in the order of the stages. A module returns a tensor, or a tuple or list of tensors. If several
stages take its output, a module may return a dict from stage to output.

Shapes are found by an additional run of the first microbatch: each stage in turn computes copies of the microbatch
without an autograd graph, and restores its buffers and the random state. So any module may be a stage, also a module
whose shapes depend on values. A module or a loss that writes to what it is given is always given copies from then on.
Otherwise a recompute would read the changed values, and autograd would refuse to change received tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from megatron.pipeline.library.batches import MicrobatchData
from megatron.pipeline.library.ranks import LossCounts, Ranks
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.activations.saved_activations import RandomState
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec, has_gradients
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.stages.module.stage import Loss

LossFunction = Callable[[Any, Any], Loss]


class StageModule(nn.Module):
    """A user's module with the interface that `GraphModuleStage` calls.

    Args:
        index: the index of the stage.
        targets: the stages that take the module's output; empty on the last stage, which computes the `loss`.
        with_gradients: the targets that send a gradient back.
        autocast: the dtype in which module and loss compute under ``torch.autocast``; None: no autocast.

    Attributes:
        is_given_copies: whether module and loss are called with copies, since one of them changes tensors in place.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        targets: Sequence[int],
        with_gradients: Sequence[int],
        loss: LossFunction | None,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = module
        self._index, self._targets, self._loss = index, tuple(targets), loss
        self._with_gradients = frozenset(with_gradients)
        self._autocast, self._device = autocast, device
        self._modes: list[tuple[nn.Module, bool]] = []
        self.is_given_copies = False
        self._has_sums: bool | None = None  # whether the loss returns (sum, count); None before its first call

    def forward(
        self, data: MicrobatchData | None, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Loss | None]:
        received = [tensor for source in sorted(inputs) for tensor in inputs[source]]
        output = self.output_of(received if inputs else data.inputs)
        return (self._handed_on(output), None) if self._targets else ({}, self.loss_of(output, data.targets))

    def output_of(self, inputs: Any) -> Any:
        """The module's output for `inputs`, which are passed as positional or keyword arguments (see above)."""
        inputs = _copies(inputs) if self.is_given_copies else inputs
        with self._precision():
            if isinstance(inputs, Mapping):
                return self.module(**inputs)
            return self.module(*inputs) if isinstance(inputs, (tuple, list)) else self.module(inputs)

    def loss_of(self, output: Any, targets: Any) -> Loss:
        """The loss of a microbatch: a mean, or a sum and a count.

        Raises ValueError for any other value, or if microbatches return different kinds.
        """
        targets = _copies(targets) if self.is_given_copies else targets
        with self._precision():
            loss = self._loss(output, targets)
        has_sum = isinstance(loss, (tuple, list)) and len(loss) == 2
        if self._has_sums not in (None, has_sum):
            raise ValueError("the loss returns a mean of one microbatch and (sum, count) of another; return one kind")
        self._has_sums = has_sum
        if not has_sum:
            return self._scalar(loss)
        total, count = loss
        if not isinstance(count, (Tensor, Real)):
            raise ValueError(f"the loss counts a {type(count).__name__}; return (sum, count) with a number or a scalar")
        return self._scalar(total), self._scalar(count).detach() if isinstance(count, Tensor) else float(count)

    def _precision(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def _handed_on(self, output: Any) -> dict[int, tuple[Tensor, ...]]:
        if isinstance(output, Mapping):
            if set(output) != set(self._targets):
                raise ValueError(
                    f"the module of stage {self._index} hands something to stages {sorted(output)}, and the schedule's "
                    f"edges go to {list(self._targets)}; return a dict with these keys"
                )
            return {target: self._tensors(output[target], target) for target in self._targets}
        return {target: self._tensors(output, target) for target in self._targets}

    def _tensors(self, output: Any, target: int) -> tuple[Tensor, ...]:
        tensors = (
            (output,) if isinstance(output, Tensor) else tuple(output) if isinstance(output, (tuple, list)) else ()
        )
        if not tensors or not all(isinstance(each, Tensor) for each in tensors):
            raise ValueError(
                f"the module of stage {self._index} returns a {type(output).__name__}; hand on a tensor, or a tuple of "
                "tensors"
            )
        if target in self._with_gradients and not any(has_gradients(each.dtype) for each in tensors):
            raise ValueError(
                f"the module of stage {self._index} hands on no tensor of a floating or complex dtype, so no "
                "gradient can come back; move its last layers to the next stage"
            )
        return tensors

    def _scalar(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            found = f"complex ({loss.dtype})" if isinstance(loss, Tensor) and loss.is_complex() else found
            raise ValueError(
                f"the loss is {found}; return its mean over the microbatch, a real scalar tensor, or (sum, count)"
            )
        return loss.reshape(())

    # After an evaluation each submodule returns to its former mode; `nn.Module.train` would give all the same mode.

    def eval(self) -> StageModule:
        self._modes = [(each, each.training) for each in self.module.modules()]
        self.module.eval()
        self.training = False
        return self

    def train(self, mode: bool = True) -> StageModule:
        for each, was_training in self._modes:
            each.training = was_training
        self._modes, self.training = [], mode
        return self


@contextmanager
def spare_buffers(module: nn.Module) -> Iterator[None]:
    """A block that works on copies of the module's buffers, such as running means; the originals stay unchanged."""
    kept = [(each, name, buffer) for each in module.modules() for name, buffer in each._buffers.items()]
    for each, name, buffer in kept:
        each._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for each, name, buffer in kept:
            each._buffers[name] = buffer


class LibraryStage(GraphModuleStage):
    """A `GraphModuleStage` whose recompute leaves the module's buffers unchanged, since the forward has updated them.

    `counts`: publishes the counts of losses to other ranks.
    """

    def __init__(self, module: StageModule, *, counts: LossCounts, **options: Any) -> None:
        super().__init__(module, **options)
        self._counts = counts

    def _add_loss(self, microbatch: Microbatch, loss: Loss) -> None:
        self._counts.say(microbatch, loss)
        super()._add_loss(microbatch, loss)

    def recompute(self, microbatch: Microbatch) -> None:
        with spare_buffers(self.module):
            super().recompute(microbatch)


class ChainModule(nn.Module):
    """A `StageModule` of a chain with the interface that `ModuleStage` calls."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, received: Tensor | MicrobatchData) -> Any:
        return self.stage.output_of(received.inputs if isinstance(received, MicrobatchData) else received)

    def eval(self) -> ChainModule:
        self.stage.eval()
        self.training = False
        return self

    def train(self, mode: bool = True) -> ChainModule:
        self.stage.train(mode)
        self.training = mode
        return self


Specs = dict[tuple[int, int], tuple[TensorSpec, ...]]
"""(source stage, target stage) -> the tensors that the source sends for each microbatch."""


@dataclass(frozen=True)
class Found:
    """The result of running a microbatch. `count`: the count of its loss if the loss is a sum; None if it is a mean."""

    specs: Specs
    count: float | None


def find_specs(
    modules: Mapping[int, StageModule],
    schedule: Any,
    ranks: Ranks,
    group: Any,
    *,
    data: MicrobatchData | None,
    evaluates: bool,
    device: torch.device,
) -> Found:
    """Find the tensors of all edges, and the kind of the loss, by running a microbatch.

    Collective: every rank of the pipeline must call it.

    Args:
        modules: the modules of this rank's stages, which must show the newest weights.
        group: the process group of the pipeline's ranks; None for a single rank.
        data: the first microbatch, on ranks with the first or the last stage.
        evaluates: whether to run the modules in evaluation mode.

    Raises:
        ValueError: on all ranks, if a stage cannot compute the microbatch.
    """
    graph: StageGraph = schedule.graph
    made: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # the tensors for stages of this rank, by (source, target)
    specs: Specs = {}
    count: float | None = None
    for index, place in enumerate(schedule.rank_of_stage):
        targets = graph.takers(Travelling.ACTIVATION, index)
        outputs: dict[int, tuple[Tensor, ...]] = {}
        found: Any = None
        if index in modules:
            inputs = {source: made.pop((source, index)) for source in graph.makers(Travelling.ACTIVATION, index)}
            try:
                outputs, loss = _run(modules[index], data, inputs, evaluates=evaluates, device=device)
                found = {target: tuple(map(_spec, tensors)) for target, tensors in outputs.items()}
                if isinstance(loss, tuple):
                    count = float(loss[1])
            except Exception as error:
                if group is None:
                    raise
                found, cause = f"stage {index} cannot compute a microbatch: {type(error).__name__}: {error}", error
        found, count = _broadcast((found, count), ranks.pipeline[place], group)
        if isinstance(found, str):
            raise ValueError(found) from (cause if index in modules else None)
        specs.update({(index, target): each for target, each in found.items()})
        for target in targets:
            taker = schedule.rank_of_stage[target]
            if taker == place and index in modules:
                made[index, target] = outputs[target]
            elif place == ranks.rank:
                _send(outputs[target], ranks.pipeline[taker], group)
            elif taker == ranks.rank:
                made[index, target] = _receive(ranks.pipeline[place], group, device)
    return Found(specs, count)


def edges_of(specs: Specs, stages: Iterable[int]) -> dict[int, dict[int, EdgeTensors]]:
    """For each stage in `stages`: neighbouring stage -> the tensors of the edge between the two stages."""
    edges = {pair: EdgeTensors(each) for pair, each in specs.items()}
    return {
        stage: {(set(pair) - {stage}).pop(): each for pair, each in edges.items() if stage in pair} for stage in stages
    }


def _run(
    module: StageModule,
    data: MicrobatchData | None,
    inputs: Mapping[int, tuple[Tensor, ...]],
    *,
    evaluates: bool,
    device: torch.device,
) -> tuple[dict[int, tuple[Tensor, ...]], Loss | None]:
    random_state, was_training = RandomState.capture(device), module.training
    if evaluates:
        module.eval()
    originals = [list(inputs.values()), None if data is None else [data.inputs, data.targets]]
    try:
        # Tensors of inference mode do not count the operations that change them in place.
        with torch.inference_mode(False), spare_buffers(module), torch.no_grad():
            copies = _copies(originals)
            given = [each for each in tree_leaves(copies) if isinstance(each, Tensor)]
            versions = [each._version for each in given]
            found = module(
                None if data is None else MicrobatchData(*copies[1]), dict(zip(inputs, copies[0], strict=True))
            )
            counted = [each._version for each in given] != versions
            module.is_given_copies |= counted or not _are_equal(given, tree_leaves(originals))
        return found
    finally:
        if evaluates:
            module.train(was_training)
        random_state.restore(device)


def _are_equal(copies: Sequence[Tensor], originals: Sequence[Any]) -> bool:
    """Whether copies have the values of the originals. This finds writes through ``data``, which no tensor counts."""
    try:
        tensors = [each for each in originals if isinstance(each, Tensor)]
        torch.testing.assert_close(list(copies), tensors, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def _copies(values: Any) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, values)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _broadcast(value: Any, source: int, group: Any) -> Any:
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def _send(tensors: tuple[Tensor, ...], to: int, group: Any) -> None:
    dist.send_object_list([tuple(each.cpu().clone() for each in tensors)], to, group=group)


def _receive(source: int, group: Any, device: torch.device) -> tuple[Tensor, ...]:
    box: list[Any] = [None]
    dist.recv_object_list(box, source, group=group)
    return tuple(each.to(device) for each in box[0])
