"""The optimizer's state shared out over the data-parallel replicas by whole parameters.

Problem: megatron.core's distributed optimizer cuts flat buffers into shards. An optimizer such as Muon steps a matrix
as a whole.

Solution: each parameter has one owner (`owners_of`): of an expert one of the ranks that hold it, of any other weight
one of the replicas. Gradients are averaged on all of them. megatron.core's plain optimizer of a rank holds and steps
the parameters that the rank owns. Then the ranks exchange the weights.

Weights lie in flat buffers, one for each owner, kind and dtype, and the parameters are views of them. So an exchange is
one broadcast of each buffer, in place. A slot of the weight versions is one set of such buffers, and the exchange fills
the slot that the parameters show. It uses megatron.core's groups of the replicas, on the thread that steps.

A tied embedding that two stages share is owned by replica 0 at both. A prediction may read the gradients of the owner
alone, and so both copies are predicted from the same gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.pipeline.placement.mapping import owners_of
from megatron.pipeline.runtime.stages.megatron.optimizers import is_dense, named_parameters, optimizers_of
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings

_ALIGNMENT = 64  # elements, as in megatron.core's buffers


class _Key(NamedTuple):
    """A flat buffer: `owner` is a rank of the replicas of dense parameters, or of those with the same experts."""

    is_dense: bool
    owner: int
    dtype: torch.dtype


class Owners:
    """The owners of one rank's parameters, and the flat buffers of the weights. The parameters move into slot 0.

    Args:
        chunks: the model chunks of the rank.
        bytes_of: (parameter, name) -> the bytes of the optimizer's state of the parameter.
    """

    def __init__(self, chunks: list[DistributedDataParallel], bytes_of: Callable[[Parameter, str], float]) -> None:
        self._groups = {True: chunks[0].intra_dp_cp_group, False: chunks[0].intra_expt_dp_group}
        self._names = {parameter: name for name, parameter in named_parameters(chunks).items()}
        tied = set(tied_embeddings(chunks))
        self._places: dict[Parameter, tuple[_Key, int]] = {}  # the flat buffer, and the offset there
        self._lengths: dict[_Key, int] = defaultdict(int)
        for kind, group in self._groups.items():
            own = [parameter for parameter in self._names if is_dense(parameter) is kind]
            owners = owners_of(
                [bytes_of(parameter, self._names[parameter]) for parameter in own],
                group.size(),
                pinned=[index for index, parameter in enumerate(own) if parameter in tied],
            )
            for parameter, owner in zip(own, owners, strict=True):
                key = _Key(kind, owner, parameter.dtype)
                self._places[parameter] = key, self._lengths[key]
                self._lengths[key] += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._slots: list[dict[_Key, Tensor]] = []
        self._shown = 0
        views = self.make()
        for parameter, name in self._names.items():
            views[name].copy_(parameter.data)
            parameter.data = views[name]

    @contextmanager
    def building(self) -> Iterator[None]:
        """In this block only the parameters that this replica owns require gradients, so an optimizer that
        megatron.core builds in the block gets no others."""
        others = [each for each, (key, _) in self._places.items() if key.owner != self._groups[key.is_dense].rank()]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def make(self) -> dict[str, Tensor]:
        """Allocate a slot. Return name -> view of it with the parameter's shape."""
        device = next(iter(self._names)).device
        flats = {key: torch.zeros(length, dtype=key.dtype, device=device) for key, length in self._lengths.items()}
        self._slots.append(flats)
        views = {}
        for parameter, (key, start) in self._places.items():
            views[self._names[parameter]] = flats[key][start : start + parameter.numel()].view(parameter.shape)
        return views

    def switch(self, slot: int) -> None:
        """Note the number of the slot that the parameters show."""
        self._shown = slot

    @torch.no_grad()
    def exchange(self) -> None:
        """Fill the slot that the parameters show with the weights of all owners. Collective over the replicas."""
        works = []
        for key, flat in self._slots[self._shown].items():
            group = self._groups[key.is_dense]
            works.append(dist.broadcast(flat, dist.get_global_rank(group, key.owner), group=group, async_op=True))
        for work in works:
            work.wait()


def owners(optimizer: MegatronOptimizer) -> Owners | None:
    """The owners that share out the state of an optimizer; None if each replica has all of it, or shards."""
    return getattr(optimizers_of(optimizer)[0], "owners", None)
