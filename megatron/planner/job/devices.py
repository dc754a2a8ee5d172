"""The processors that are known, by name, with the rates of their data sheets."""

import re
from dataclasses import dataclass


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
