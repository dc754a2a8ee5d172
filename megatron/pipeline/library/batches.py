"""A user's batches, their division into microbatches for the stages, and the announcement of each batch.

Problem: ranks post receives before any data of a batch arrive, and the last batch of a run may be smaller. Solution:
the rank of the first stage announces each batch by a few numbers: its number of samples, and the number of its shapes.
No rank waits longer for the announcement than for the batch's first activation: the first work of a rank in a batch
depends on the first stage, which announces the batch before it computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron.documents import counted
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec

_NAMES = frozenset({"inputs", "targets"})


@dataclass(frozen=True)
class MicrobatchData:
    """A microbatch's inputs for the first stage and targets for the last stage.

    Each is a tensor, or a tuple, list or dict of tensors; None on a rank without that stage.
    """

    inputs: Any = None
    targets: Any = None


@dataclass(frozen=True)
class BatchData:
    """A batch, divided into microbatches.

    Attributes:
        num_samples: number of samples for this pipeline.
        signature: structure, shapes and dtypes of a microbatch's inputs; () on a rank without the first stage. Batches
            with equal signatures lead to equal shapes on all edges.
    """

    microbatches: tuple[MicrobatchData, ...]
    num_samples: int
    signature: tuple


def split_batch(
    batch: Any, num_microbatches: int, *, has_inputs: bool, has_targets: bool, device: torch.device
) -> BatchData:
    """Split a batch on dimension 0 into equal parts, on `device`.

    Args:
        batch: a pair (inputs, targets), or a dict of `inputs` and `targets`. Any other value serves as inputs and as
            targets, so that the first rank may be given inputs alone and the last rank targets alone. Inputs and
            targets are a tensor each, or a tuple, list or dict of tensors.
        has_inputs, has_targets: whether this rank takes the inputs, and the targets.

    Raises:
        ValueError: no batch is given, or the batch cannot be split.
    """
    if batch is None:
        what = "inputs" if has_inputs else "targets"
        raise ValueError(f"this rank takes the {what} of each batch, and none is given; call step(batch) on it")
    inputs, targets = _parts(batch)
    wanted = {"inputs": (inputs if has_inputs else None), "targets": (targets if has_targets else None)}
    for name, has in (("inputs", has_inputs), ("targets", has_targets)):
        if has and wanted[name] is None:
            raise ValueError(f"the batch has no {name}, which this rank takes; give (inputs, targets)")
    leaves, structure = tree_flatten(wanted)
    sizes = {_size(leaf) for leaf in leaves if leaf is not None}
    if len(sizes) != 1:
        raise ValueError(f"the tensors of a batch have {sorted(sizes)} samples; give as many of each in dimension 0")
    (size,) = sizes
    if size == 0 or size % num_microbatches:
        raise ValueError(
            f"a batch of {counted(size, 'sample')} cannot be split into {num_microbatches} equal microbatches; give a "
            f"multiple of {num_microbatches}"
        )
    of_each = size // num_microbatches
    parts = [(None,) * num_microbatches if leaf is None else leaf.detach().to(device).split(of_each) for leaf in leaves]
    microbatches = [MicrobatchData(**tree_unflatten(list(each), structure)) for each in zip(*parts, strict=True)]
    return BatchData(tuple(microbatches), size, _signature(microbatches[0].inputs) if has_inputs else ())


def _parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping) and set(batch) <= _NAMES:
        return batch.get("inputs"), batch.get("targets")
    if isinstance(batch, Sequence) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Sequence):
        raise ValueError(
            f"a batch of {len(batch)} parts is not (inputs, targets); give a pair of tensors, tuples or dicts"
        )
    return batch, batch


def _size(leaf: Any) -> int:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        what = "a scalar" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise ValueError(f"a batch holds {what}, which cannot be split; give tensors with the samples in dimension 0")
    return len(leaf)


def _signature(inputs: Any) -> tuple:
    leaves, structure = tree_flatten(inputs)
    return str(structure), *(TensorSpec(tuple(leaf.shape), leaf.dtype) for leaf in leaves)


class MicrobatchFeed:
    """The data of the microbatches in flight: a call with a microbatch returns its data.

    Data are kept until their batch has ended, since a recompute asks for the data again.
    """

    def __init__(self) -> None:
        self._training: dict[int, MicrobatchData] = {}
        self._of_batch: dict[int, range] = {}
        self._evaluated: Sequence[MicrobatchData] = ()

    def add(self, batch: int, first_microbatch: int, data: BatchData) -> None:
        self._of_batch[batch] = range(first_microbatch, first_microbatch + len(data.microbatches))
        self._training.update(zip(self._of_batch[batch], data.microbatches, strict=True))

    def forget(self, batch: int) -> None:
        for index in self._of_batch.pop(batch, ()):
            del self._training[index]

    def evaluate(self, data: BatchData | None) -> None:
        """Begin the evaluation of a batch, or end it if `data` is None."""
        self._evaluated = () if data is None else data.microbatches

    def __call__(self, microbatch: Microbatch) -> MicrobatchData | None:
        if microbatch.batch == EVALUATION_BATCH:
            return self._evaluated[microbatch.position] if self._evaluated else None
        return self._training.get(microbatch.index)


# --- the announcement of a batch by the rank of the first stage -------------------------------------------------------


@dataclass(frozen=True)
class Announcement:
    """The numbers that the rank of the first stage sends to its pipeline before a batch.

    Attributes:
        number: the index of the batch's kind (shapes, and training or evaluation), in the order in which kinds first
            occur.
        num_samples: number of samples for this pipeline.
    """

    number: int
    num_samples: int


class Announcements:
    """The announcements of all batches, from the rank of the first stage to its pipeline.

    Args:
        source: the global rank that has the first stage.
        group: the process group of the pipeline's ranks; None for a single rank.
    """

    def __init__(self, source: int, group: Any) -> None:
        self._source, self._group = source, group
        self._is_source = group is None or dist.get_rank() == source
        self._numbers: dict[Hashable, int] = {}
        self._new: Hashable = None

    def exchange(self, data: BatchData | None, problem: ValueError | None, *, evaluates: bool) -> Announcement:
        """Send the batch's announcement to all ranks of the pipeline, and return it.

        `data` and `problem` are read on the source rank alone.

        Raises:
            ValueError: on all ranks, if the source has a problem.
        """
        number = num_samples = 0
        if self._is_source and problem is None:
            key = evaluates, data.signature
            number, num_samples = self._numbers.get(key, len(self._numbers)), data.num_samples
            self._new = key
        if self._group is not None:
            head = torch.tensor([number, num_samples, problem is not None])
            dist.broadcast(head, self._source, group=self._group)
            number, num_samples, has_problem = head.tolist()
            if has_problem:
                box = [str(problem)]
                dist.broadcast_object_list(box, self._source, group=self._group)
                if not self._is_source:
                    raise ValueError(box[0])
        if self._is_source and problem is not None:
            raise problem
        return Announcement(number, num_samples)

    def confirm(self) -> None:
        """Note that all ranks now know the shapes that were announced last."""
        if self._is_source:
            self._numbers[self._new] = len(self._numbers)
