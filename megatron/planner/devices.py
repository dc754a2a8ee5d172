"""What GPUs hold, and whether an estimate fits.

An estimate counts tensors. Beside them stand the CUDA context, the communication libraries and what the allocator
loses between blocks; near the limit throughput falls, as PyTorch gives cached blocks back (BPipe, appendix B). So the
last 6% are called borderline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.memory import GIB, RankMemory

BORDERLINE = 0.06

DEVICE_GIB: dict[str, float] = {
    "A100-80": 79.25,
    "A100-40": 39.5,
    "H100": 79.1,
    "H200": 139.7,
    "V100-32": 31.75,
    "V100-16": 15.78,
    "RTX2080Ti": 10.76,
    "GTX1080Ti": 10.92,
}
"""Memory of a GPU in GiB, as CUDA reports it to programs."""


def device_gib(text: str) -> float:
    """The memory of a GPU by its name in `DEVICE_GIB`, or a number of GiB. Raises ValueError."""
    if text in DEVICE_GIB:
        return DEVICE_GIB[text]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"'{text}' is no GPU; give {', '.join(DEVICE_GIB)}, or its memory in GiB")
    return value


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a pipeline fits, by its fullest rank. `spare_gib`: what that rank leaves; negative is missing."""

    rank: int
    spare_gib: float
    is_borderline: bool

    @property
    def fits(self) -> bool:
        return self.spare_gib >= 0

    @property
    def word(self) -> str:
        return "out of memory" if not self.fits else "borderline" if self.is_borderline else "fits"


def judge(memory: Sequence[RankMemory], gib: float) -> Verdict:
    """The verdict on GPUs with this much memory, in GiB."""
    fullest = max(memory, key=lambda rank: rank.total)
    spare = gib - fullest.total / GIB
    return Verdict(rank=fullest.rank, spare_gib=spare, is_borderline=0 <= spare < BORDERLINE * gib)
