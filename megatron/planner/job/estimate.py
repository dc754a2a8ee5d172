"""The estimate of a configuration: seconds of an iteration, MFU, pipeline bubble, memory, and whether it fits a GPU.

An estimate of memory counts tensors. The CUDA context, uncounted communicators and fragmentation of the allocator need
memory, too. While the pipeline computes, they take the fraction `LOST` of a GPU's memory.

Where sequences are split over tensor ranks, collectives gather activations and scatter their sums. A layer has
`OPERANDS_OF_LAYER` operands of such collectives, each as large as the residual stream of all tensor ranks together.
They wait on a separate stream, and the allocator cannot reuse their memory while the host is layers ahead. A run needs
room for the operands of `FEWEST` layers. A configuration that leaves too little room for the lost memory and for these
operands does not fit. It is borderline if its tensors alone fit.

A layer that is recomputed as a whole allocates all of its activations at once and frees them soon after. A host can be
far ahead, by `MOST` layers. If the operands of that many layers have no room beside everything that was ever held, the
allocator waits for the device, returns its blocks and allocates them again, in every backward ("PyTorch periodically
vacates the cache allocator", BPipe, appendix B). Such a rank is slowed (`Constants.pressed_efficiency`).
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
"""The fraction of a GPU's memory that no tensor gets while the pipeline computes. BPipe says for 56 runs of GPT-3 96B
whether they ran. Any value from 8.5% to 9.5% judges all of them rightly."""
OPERANDS_OF_LAYER = 8
"""Two sums in the forward, two when it is recomputed, and four in the backward (time/work.py)."""
FEWEST, MOST = 4, 6.75
"""The least number of layers whose operands wait, and that number for a host that is far ahead. The same runs agree
with 28 to 32 operands for the first, beside `LOST`. A limit of 53 to 55 operands separates slowed runs from others."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on the memory of a pipeline, by the rank with the least free memory.

    Attributes:
        rank: the rank with the least free memory. If `free_gib` is negative, the rank with the largest tensors.
        spare_gib: free GiB of `rank` after `LOST` and waiting operands. If negative, the missing GiB.
        free_gib: free GiB of the rank with the largest tensors, when only tensors count. If negative, the missing GiB.
        slowed: ranks whose allocator returns blocks and allocates them again.
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
        """Whether the pipeline fits only without fragmentation and waiting operands."""
        return self.spare_gib < 0 <= self.free_gib

    @property
    def under_pressure(self) -> bool:
        """Whether memory is borderline or slows ranks. Ranks may be slowed even if the pipeline does not fit."""
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
    """Return the verdict on the memory of a pipeline's ranks, on GPUs with `gib` GiB.

    `shape`, `setting`: the model and how its activations are saved. If either is None, no operands of collectives wait.
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
    """Return the verdict if only the fullest rank and its bytes are known. Does not judge whether ranks are slowed.

    `waiting`: GiB of waiting operands (`waiting_gib`).
    """
    free = gib - num_bytes / GIB
    return Verdict(rank=rank, spare_gib=free - lost_gib(gib, waiting=waiting), free_gib=free)


def lost_gib(gib: float, *, waiting: float = 0.0) -> float:
    """Return the GiB of a GPU that no other tensor can use: the fraction `LOST`, and waiting operands."""
    return LOST * gib + waiting


def waiting_gib(shape: Architecture, setting: ActivationSetting) -> float:
    """Return the least GiB of operands of collectives that wait while the pipeline computes."""
    return FEWEST * OPERANDS_OF_LAYER * operand_gib(shape, setting)


def operand_gib(shape: Architecture, setting: ActivationSetting) -> float:
    """Return the GiB of a waiting operand of a tensor-parallel collective.

    0 without sequence parallelism, where sums are made in place.
    """
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
        memory: memory of each rank of the pipeline.
        verdict: whether the memory fits the GPUs.
        host: whether the memory fits the fullest host. None unless weights live on the host and the hosts' memory is
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
        """GiB of tensors on the fullest GPU."""
        return max(rank.total for rank in self.memory) / GIB

    @property
    def fits(self) -> bool:
        """Whether GPUs and hosts have enough memory."""
        return self.verdict.fits and (self.host is None or self.host.fits)

    @property
    def under_pressure(self) -> bool:
        """Whether memory is borderline or slows ranks. `seconds` includes the slowdown."""
        return self.verdict.under_pressure
