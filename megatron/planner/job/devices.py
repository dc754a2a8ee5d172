"""What GPUs hold, and whether an estimate fits.

An estimate counts tensors. Beside them stand the CUDA context, the communication libraries and what the allocator
loses between blocks; near the limit throughput falls, as PyTorch gives cached blocks back (BPipe, appendix B). So the
last 6% are called borderline.

Collectives run on a stream of their own, and their operands cannot be given to others before they are done, while the
host is several layers ahead. With tensor parallelism these operands are as large as the residual stream of all tensor
ranks together, whatever is split; some `COLLECTIVE_OPERANDS` of them lie idle. An estimate that leaves less than this
reserve is under pressure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.memory import GIB, RankMemory

BORDERLINE = 0.06
COLLECTIVE_OPERANDS = 60
"""Operands of tensor-parallel collectives that are not free yet: those of about 7 layers, which have 8 each."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor as its maker states it. Bandwidths count one direction.

    Attributes:
        memory_gib: what CUDA reports to programs.
        peak_teraflops: 10^12 operations per second of a dense matrix product of 16-bit numbers, summed in FP32.
        peak_teraflops_fp32: of one in FP32. As torch multiplies by default, without TF32.
        memory_bandwidth: GB/s of its memory.
        link_bandwidth: GB/s to the other GPUs of its node: NVLink where there is one, else PCIe.
        host_bandwidth: GB/s to its host's memory, and from there.
        has_bfloat16: multiplies in it; others emulate it, many times slower.
    """

    memory_gib: float
    peak_teraflops: float
    peak_teraflops_fp32: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    has_bfloat16: bool = True

    def peak(self, element_bytes: int) -> float:
        """Operations per second of a product of numbers of 2 or 4 bytes."""
        return 1e12 * (self.peak_teraflops if element_bytes == 2 else self.peak_teraflops_fp32)


_PCIE_3, _PCIE_4, _PCIE_5 = (16 * rate * 128 / 130 / 8 for rate in (8, 16, 32))
"""GB/s of 16 lanes in one direction: gigatransfers of a bit each a second, of 130 bits 128 data (PCI-SIG)."""

DEVICES: dict[str, Device] = {
    name: Device(
        memory_gib=gib, peak_teraflops=half, peak_teraflops_fp32=single, memory_bandwidth=memory, link_bandwidth=link,
        host_bandwidth=host, has_bfloat16=bfloat16,
    )
    for name, gib, half, single, memory, link, host, bfloat16 in (
        ("A100-80", 79.25, 312, 19.5, 2039, 300, _PCIE_4, True),
        ("A100-40", 39.5, 312, 19.5, 1555, 300, _PCIE_4, True),
        ("H100", 79.1, 989, 67, 3350, 450, _PCIE_5, True),
        ("H200", 139.7, 989, 67, 4800, 450, _PCIE_5, True),
        ("V100-32", 31.75, 125, 15.7, 900, 150, _PCIE_3, False),
        ("V100-16", 15.78, 125, 15.7, 900, 150, _PCIE_3, False),
        ("RTX2080Ti", 10.76, 53.8, 13.4, 616, 16, _PCIE_3, False),
        ("GTX1080Ti", 10.92, 11.3, 11.3, 484, 16, _PCIE_3, False),
    )
}  # fmt: skip
"""GPUs by name, from their data sheets (SXM where there is one; the 1080 Ti multiplies 16-bit numbers in FP32)."""

SLOWEST_NVLINK = 100.0
"""GB/s in one direction: what has less to its neighbours is on PCIe."""
_EDITIONS = {
    r"PCI[-_ ]?E": "PCIe", r"(?<![A-Z])NVL(?![A-Z])": "NVL", r"(?<![A-Z])GH200": "Grace Hopper",
    r"(?<![A-Z])A100X": "A100X",
}  # fmt: skip


def edition_of(label: str) -> str | None:
    """The edition of a GPU that its label names, where that is not SXM: other rates, and mostly no NVLink."""
    return next((name for pattern, name in _EDITIONS.items() if re.search(pattern, label.upper())), None)


def device_gib(text: str) -> float:
    """The memory of a GPU by its name in `DEVICES`, or a number of GiB. Raises ValueError."""
    if text in DEVICES:
        return DEVICES[text].memory_gib
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"'{text}' is no GPU; give {', '.join(DEVICES)}, or its memory in GiB")
    return value


def reserve_gib(shape: Architecture, setting: ActivationSetting) -> float:
    """GiB that wait for collectives to end; see the module."""
    if setting.tensor == 1:
        return 0.0
    tokens = setting.micro_batch_size * (shape.sequence_length // setting.context)
    return COLLECTIVE_OPERANDS * setting.residual_bytes * tokens * shape.hidden_size / GIB


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a pipeline fits, by its fullest rank.

    Attributes:
        spare_gib: what that rank leaves; negative is missing.
        reserve_gib: of that, what the allocator cannot give away at once.
    """

    rank: int
    spare_gib: float
    is_borderline: bool
    reserve_gib: float = 0.0

    @property
    def fits(self) -> bool:
        return self.spare_gib >= 0

    @property
    def under_pressure(self) -> bool:
        """So near the limit of memory that throughput may fall by 16 to 31% (BPipe, appendix B, where the allocator
        gives its blocks back again and again)."""
        return self.is_borderline or self.spare_gib < self.reserve_gib

    @property
    def word(self) -> str:
        return "out of memory" if not self.fits else "borderline" if self.is_borderline else "fits"


def judge(memory: Sequence[RankMemory], gib: float, *, reserve_gib: float = 0.0) -> Verdict:
    """The verdict on GPUs with this much memory, in GiB."""
    fullest = max(memory, key=lambda rank: rank.total)
    spare = gib - fullest.total / GIB
    is_borderline = 0 <= spare < BORDERLINE * gib
    return Verdict(rank=fullest.rank, spare_gib=spare, is_borderline=is_borderline, reserve_gib=reserve_gib)
