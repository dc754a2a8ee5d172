"""Reductions of a batch over the ranks and replicas that run plain modules: gradients and the batch's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.backend.streams import streams_of
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.update.gradients import GradientBuffer, NormReduction, all_reduce_norm


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of which several stages have a copy.

    Attributes:
        names: the names of the copies on this rank.
        group: the ranks with copies; None if only this rank has any.
        counts_in_norm: whether the first copy on this rank counts in the norm; True on one rank only.
        adds: whether the gradient of this rank is added to the sum over the group; False on all but one of the ranks
            that have the same gradient, because their stages are copies.
    """

    names: tuple[str, ...]
    group: Any = None
    counts_in_norm: bool = True
    adds: bool = True


@dataclass(frozen=True, kw_only=True)
class ModuleReduction:
    """Runs the reductions of one rank. The groups are used on the chain's thread, so they are used for nothing else.

    Attributes:
        data_parallel_group: the replicas of this rank; None for one replica.
        copies_group: the ranks whose stages are copies of this rank's stages, in a program of all replicas; None for
            one copy. Copies share the microbatches of a batch, so each has a part of the gradients of its mean, and the
            parts are summed.
        job_group: all ranks of the job; None for a single rank.
        tied: the tied parameter of which this rank has copies; None: it has none.
        counts_in_norm: True on exactly one of the replicas, or of the copies.
        loss_names: the names of the losses, the same on all ranks.
        device: the device of the reduced tensors, on which the groups communicate.
        num_replicas: the number of pipelines with batches of their own.

    Raises:
        ValueError: both `data_parallel_group` and `copies_group` are given.
    """

    data_parallel_group: Any = None
    copies_group: Any = None
    job_group: Any = None
    tied: TiedParameter | None = None
    counts_in_norm: bool = True
    loss_names: tuple[str, ...] = ("loss",)
    device: torch.device | str = "cpu"
    num_replicas: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        if None not in (self.data_parallel_group, self.copies_group):
            raise ValueError(
                "data_parallel_group and copies_group are both given, and the copies of a stage are its replicas; give "
                "copies_group for a program with copies, else data_parallel_group"
            )
        group = self.data_parallel_group
        object.__setattr__(self, "num_replicas", 1 if group is None else torch.distributed.get_world_size(group))

    @property
    def uncounted(self) -> frozenset[str]:
        """The names of the copies that this rank leaves out of the norm."""
        return frozenset() if self.tied is None else frozenset(self.tied.names[1 if self.tied.counts_in_norm else 0 :])

    def warm_up(self) -> None:
        """Use each group once while nothing else runs. Collective over the groups.

        NCCL connects a group at its first use and waits for the whole device then. In training the device may run a
        receive that waits for another rank: a deadlock.
        """
        tied = None if self.tied is None else self.tied.group
        for group in (self.data_parallel_group, self.copies_group, tied, self.job_group):
            if group is not None:
                group.allreduce([torch.zeros(1, device=self.device)]).wait()
        streams = streams_of(self.device)
        streams.finish(streams.record())

    @property
    def _holders(self) -> Any:
        """The ranks with the same parameters as this one; None: there is no other."""
        return self.data_parallel_group if self.copies_group is None else self.copies_group

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Average the gradients over the replicas, or sum them over the copies."""
        for gradient in gradients if self._holders is not None else ():
            torch.distributed.all_reduce(gradient, group=self._holders)
            if self.copies_group is None:
                gradient.div_(self.num_replicas)

    def over_data(self, buffer: GradientBuffer) -> None:
        """Average the gradients of a buffer over the replicas, or sum them over the copies."""
        self.average(buffer.flat)

    @property
    def tied_key(self) -> str:
        """The name of this rank's copy of the tied parameter, where the copies are on different ranks."""
        (name,) = self.tied.names
        return name

    def over_partial_embedding(self, gradient: Tensor, *, over_data: bool) -> None:
        """Add up the gradients of the tied parameter over its stages. `over_data`: first average over the replicas."""
        if over_data:
            self.average([gradient])
        if not self.tied.adds:
            gradient.zero_()
        torch.distributed.all_reduce(gradient, group=self.tied.group)

    def unused_everywhere(self, buffer: GradientBuffer) -> list[str]:
        """The names of the gradients that are `untouched` on all replicas, or copies."""
        untouched = set(buffer.untouched())
        names = list(buffer.views)
        if self._holders is not None and names:
            used = torch.tensor([name not in untouched for name in names], dtype=torch.int32, device=self.device)
            torch.distributed.all_reduce(used, group=self._holders)
            untouched = {name for name, count in zip(names, used.tolist(), strict=True) if not count}
        return [name for name in names if name in untouched]

    def add_copies(self, views: Mapping[str, Tensor]) -> None:
        """Give all copies of the tied parameter the sum of their gradients."""
        first, *others = (views[name] for name in self.tied.names)
        for other in others:
            first.add_(other)
        if self.tied.group is not None:
            if not self.tied.adds:
                first.zero_()
            torch.distributed.all_reduce(first, group=self.tied.group)
        for other in others:
            other.copy_(first)

    def reduce_norm(
        self, report: BatchReport, norm_squared: float, stop_requests: int, losses: Mapping[str, tuple[float, float]]
    ) -> float:
        """Complete the report of a batch with the sums over all ranks of the job. Collective.

        The arguments are those of `sums`. Returns the result of `complete`.
        """
        return self.complete(report, self.sums(norm_squared, stop_requests, losses))

    def sums(self, norm_squared: float, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> NormReduction:
        """Sum the contributions of all ranks of the job to a batch. Collective.

        Args:
            norm_squared: the squared norm of the gradients that this rank counts.
            stop_requests: bits, see `NormReduction`.
            losses: name -> (numerator, denominator) on this rank.
        """
        return all_reduce_norm(
            norm_squared=norm_squared if self.counts_in_norm else 0.0,
            overflow=not math.isfinite(norm_squared),
            stop_requests=stop_requests,
            losses=losses,
            loss_names=self.loss_names,
            group=self.job_group,
            device=self.device,
        )

    def complete(self, report: BatchReport, sums: NormReduction) -> float:
        """Complete the report of a batch. Returns the count of the first loss, averaged over the replicas."""
        report.overflow = sums.num_overflows > 0
        report.grad_norm = sums.norm
        report.stop_requests = sums.stop_requests
        report.losses = {name: total / count if count else math.nan for name, (total, count) in sums.losses.items()}
        report.nan = not all(math.isfinite(loss) for loss in report.losses.values())
        return sums.losses[self.loss_names[0]][1] / self.num_replicas
