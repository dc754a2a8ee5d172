"""The estimate of a configuration: seconds of an iteration, where they go, memory, and whether that fits a GPU.

An estimate of memory counts tensors. Beside them stand the CUDA context, communicators that are not counted, and what
the allocator loses between blocks: `LOST` of a GPU's memory while the pipeline computes.

Where sequences are split over tensor ranks, collectives gather what is split and scatter sums of it. Their operands,
`OPERANDS_OF_LAYER` a layer, are as large as the residual stream of all tensor ranks together. They wait on a stream of
their own, and the allocator cannot give them to others while the host is layers ahead. A run needs room for those of
`FEWEST` layers. What does not leave that, and what is lost, does not fit; it is borderline where its tensors alone do.

A layer that is recomputed as a whole asks for all of its activations at once, and leaves them a moment later. Where the
operands of a host that is far ahead, by `MOST` layers, have no room beside all else that was ever held, the allocator
waits for the device, gives its blocks back and asks for them anew, in one backward after the other ("PyTorch
periodically vacates the cache allocator", BPipe, appendix B). Such a rank is slowed: `Constants.pressed_efficiency`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.memory import GIB, RankMemory
from megatron.planner.memory.node_memory import HostVerdict

LOST = 0.09
"""The part of a GPU's memory that no tensor gets while the pipeline computes. From 8.5 to 9.5% none of the 56 runs of
GPT-3 96B of which BPipe says whether they ran is judged wrongly."""
OPERANDS_OF_LAYER = 8
"""Two sums in the forward, as many where it is recomputed, and four in the backward (time/work.py)."""
FEWEST, MOST = 4, 6.75
"""Layers whose operands wait at least, and of a host that is far ahead. The same runs bear 28 to 32 operands for the
one, beside `LOST`; of those that were slowed and those that were not, 53 to 55 tell one from the other."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on the memory of a pipeline, by the rank with the least free memory.

    Attributes:
        spare_gib: free GiB of that rank after `LOST` and waiting operands; missing GiB if negative.
        free_gib: free GiB of the GPU of the rank with the largest tensors; missing GiB if negative, and `rank` is then
            that rank.
        slowed: ranks whose allocator returns blocks and requests them again.
    """

    rank: int
    spare_gib: float
    free_gib: float
    slowed: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        return self.spare_gib >= 0

    @property
    def is_borderline(self) -> bool:
        """Whether it fits only without fragmentation and waiting operands."""
        return self.spare_gib < 0 <= self.free_gib

    @property
    def under_pressure(self) -> bool:
        """Whether it is borderline, or ranks are slowed for want of memory, even if the pipeline does not fit."""
        return self.is_borderline or bool(self.slowed)

    @property
    def word(self) -> str:
        if self.fits:
            return "slowed" if self.slowed else "fits"
        return "borderline" if self.is_borderline else "out of memory"


def judge(
    memory: Sequence[RankMemory],
    gib: float,
    shape: Architecture | None = None,
    setting: ActivationSetting | None = None,
) -> Verdict:
    """The verdict on GPUs with `memory_gib` GiB.

    `shape`, `setting`: the model and its activations; None: no operands of collectives wait.
    """
    is_known = shape is not None and setting is not None
    lost = lost_gib(gib, waiting=waiting_gib(shape, setting) if is_known else 0.0)

    def spare(rank: RankMemory) -> float:
        return gib - max(lost + rank.parts.while_computing / GIB, rank.total / GIB)

    recomputes_layers = is_known and setting.recompute.method is not None
    waiting = MOST * OPERANDS_OF_LAYER * operand_gib(shape, setting) if recomputes_layers else 0.0
    tightest, fullest = min(memory, key=spare), max(memory, key=lambda rank: rank.total)
    free = gib - fullest.total / GIB
    decisive = tightest if free >= 0 else fullest
    return Verdict(
        rank=decisive.rank,
        spare_gib=spare(decisive),
        free_gib=free,
        slowed=tuple(rank.rank for rank in memory if waiting and gib - rank.parts.held / GIB < waiting),
    )


def judge_fullest(num_bytes: float, gib: float, *, rank: int, waiting: float = 0.0) -> Verdict:
    """The verdict where nothing but this is known: what the fullest rank takes, and which one it is.

    `waiting`: GiB of operands that wait (`waiting_gib`); whether a rank is slowed is not judged.
    """
    free = gib - num_bytes / GIB
    return Verdict(rank=rank, spare_gib=free - lost_gib(gib, waiting=waiting), free_gib=free)


def lost_gib(gib: float, *, waiting: float = 0.0) -> float:
    """GiB of a GPU that no tensor can use: fragmentation and the like (`LOST`), and the operands that wait."""
    return LOST * gib + waiting


def waiting_gib(shape: Architecture, setting: ActivationSetting) -> float:
    """The least GiB of operands of collectives that wait while the pipeline computes."""
    return FEWEST * OPERANDS_OF_LAYER * operand_gib(shape, setting)


def operand_gib(shape: Architecture, setting: ActivationSetting) -> float:
    """GiB of an operand of a tensor-parallel collective that waits; 0 where whole sequences are summed, in place."""
    if setting.tensor == 1 or not setting.sequence_parallel:
        return 0.0
    tokens = setting.micro_batch_size * (shape.sequence_length // setting.context)
    return setting.residual_bytes * tokens * shape.hidden_size / GIB


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one configuration of one model on one cluster.

    Attributes:
        seconds: seconds of one iteration, a global batch.
        mfu: operations of the model in an iteration, without recomputation, over the operations at the GPUs' peak.
        bubble: fraction of an iteration in which the busiest rank of the pipeline does not compute, 0 to 1.
        memory: memory by rank of the pipeline.
        verdict: whether the fullest rank fits.
        host: whether the fullest node has the memory; None unless weights live on the host and the hosts' memory is
            known.
    """

    configuration: Configuration
    seconds: float
    mfu: float
    bubble: float
    memory: tuple[RankMemory, ...]
    verdict: Verdict
    host: HostVerdict | None = None

    @cached_property
    def memory_gib(self) -> float:
        """The memory of the fullest GPU."""
        return max(rank.total for rank in self.memory) / GIB

    @property
    def fits(self) -> bool:
        """Whether GPUs and hosts have the memory."""
        return self.verdict.fits and (self.host is None or self.host.fits)

    @property
    def under_pressure(self) -> bool:
        """Whether it is borderline, or ranks are slowed for want of memory, which `seconds` includes."""
        return self.verdict.under_pressure
