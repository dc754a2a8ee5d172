"""The known processors with the rates of their data sheets, and labels that mean one of them.

Examples of labels: "A100-SXM4-80GB", "NVIDIA H100 PCIe", "32x V100-16GB (4 servers)".
"""

import re
from dataclasses import dataclass

from megatron.documents.faults import shown


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor with its maker's rates, and the fractions of them that kernels reach. Bandwidths count one direction.

    Attributes:
        memory_gib: the memory that CUDA reports to programs.
        peak_teraflops: 10^12 operations per second of a dense matrix product of 16-bit numbers, summed in FP32.
        peak_teraflops_fp8: the same for 8-bit floating-point numbers; None: the processor has no FP8.
        peak_teraflops_fp32: the same in FP32. Without TF32, as is torch's default.
        memory_bandwidth: GB/s of its memory.
        link_bandwidth: GB/s to the other GPUs of its node, over NVLink or else PCIe.
        host_bandwidth: GB/s to and from its host's memory.
        has_bfloat16: whether it multiplies bfloat16. Other GPUs emulate bfloat16, many times slower.
        gpus_per_node: number of GPUs that these links usually connect.
        gpus_per_host: number of these GPUs on one host; None: all.
        product_part, product_part_fp8: fraction of the peak that its fastest matrix product reaches, in 16 and 8 bits.
            Power limits this fraction, and newer GPUs have less power per unit.
        attention_part: fraction of `product_rate` in 16 bits that the flash-attention kernels for this GPU reach.
        older_attention_part: the same for FlashAttention-2, which was written for A100.
    """

    memory_gib: float
    peak_teraflops: float
    peak_teraflops_fp32: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    has_bfloat16: bool = True
    peak_teraflops_fp8: float | None = None
    gpus_per_node: int = 8
    gpus_per_host: int | None = None
    product_part: float = 1.0
    product_part_fp8: float | None = None
    attention_part: float = 0.7
    older_attention_part: float = 0.7

    @property
    def has_nvlink(self) -> bool:
        """Whether GPUs are linked by NVLink (or another link as fast). A slower link is PCIe."""
        return self.link_bandwidth >= SLOWEST_NVLINK

    def peak(self, element_bytes: int) -> float:
        """Return the peak operations per second of a product of numbers of 2 or 4 bytes."""
        return 1e12 * (self.peak_teraflops if element_bytes == 2 else self.peak_teraflops_fp32)

    def product_rate(self, element_bytes: int) -> float:
        """Return the operations per second that the fastest product of numbers of 1, 2 or 4 bytes reaches."""
        if element_bytes == 1:
            return 1e12 * self.peak_teraflops_fp8 * self.product_part_fp8
        return self.peak(element_bytes) * self.product_part


_PCIE_3, _PCIE_4, _PCIE_5 = (16 * rate * 128 / 130 / 8 for rate in (8, 16, 32))
"""GB/s of 16 PCIe lanes in one direction, at 8, 16 and 32 Gbit/s per lane. 128 of 130 bits are data (PCI-SIG)."""

_XGMI = 7 * 64.0
"""GB/s of an MI300X in one direction to all seven others of its node, over a link of 64 GB/s to each."""

_NVLINK_C2C = 225.0
"""GB/s in one direction of one GPU. GB200's sheet gives 900 for a Grace CPU in both directions; two GPUs share them."""

SLOWEST_NVLINK = 100.0
"""GB/s in one direction to all other GPUs of the node, above which a link counts as NVLink."""

_RACKS = {name: {"gpus_per_node": 72, "gpus_per_host": 4} for name in ("GB200", "GB300")}  # NVL72 has 18 trays

_AMPERE = 271.2 / 312
_HOPPER, _HOPPER_FP8 = 794.5 / 989, 1402.6 / 1979
_PRODUCT_PARTS = {  # (16 bits, FP8)
    "A100-PCIe-80": (252.9 / 312, None),
    "A100-PCIe-40": (252.9 / 312, None),
    "H200": (_HOPPER, 1453.4 / 1979),
    "B200": (1745.0 / 2250, 3432.5 / 4500),
    "GB200": (1822.0 / 2500, 3615.6 / 5000),
    "GB300": (1822.0 / 2500, 3615.6 / 5000),  # taken from GB200, which has the same peaks
    "MI300X": (668.4 / 1307.4, 668.4 / 1307.4 * (_HOPPER_FP8 / _HOPPER)),  # FP8 was not measured
}
"""GPU -> rate of the fastest measured product over the peak. Source: "Maximum Achievable Matmul FLOPS" in the Machine
Learning Engineering Open Book, compute/accelerator. Other GPUs were not measured: those with FP8 get the values of
H100, and the others those of A100."""


def _product_parts(name: str, eighth: float | None) -> dict[str, float | None]:
    usual = (_AMPERE, None) if eighth is None else (_HOPPER, _HOPPER_FP8)
    return dict(zip(("product_part", "product_part_fp8"), _PRODUCT_PARTS.get(name, usual), strict=True))


_NEWER_ATTENTION = {"B200": 0.59, "GB200": 0.59, "GB300": 0.59}


def _attention_parts(name: str, eighth: float | None) -> dict[str, float]:
    """Return `attention_part` and `older_attention_part` of a GPU if they differ from the defaults.

    FlashAttention-2 at its best reaches 73% of A100's peak in the forward and 63% in the backward (Dao 2023). That is
    0.8 of `product_rate`. The default is 0.7, since FlashAttention-2 reaches less with a mask and shorter sequences. On
    H100 it reaches 35% of the peak (Shah et al. 2024). In a step of Llama 3.1 8B, FlashAttention-3 reaches 447 TFLOP/s
    on H200 and FlashAttention-4 reaches 834 TFLOP/s on B200 (insights/when-to-upgrade-gpus of the Machine Learning
    Engineering Open Book). These numbers do not count the operations that a backward repeats; with them they grow by
    the factor 7/6.
    """
    if eighth is None:
        return {}
    return {"attention_part": _NEWER_ATTENTION.get(name, 0.7), "older_attention_part": 0.46}


DEVICES: dict[str, Device] = {
    name: Device(
        memory_gib=gib, peak_teraflops=half, peak_teraflops_fp32=single, memory_bandwidth=memory, link_bandwidth=link,
        host_bandwidth=host, has_bfloat16=bfloat16, peak_teraflops_fp8=eighth, **_RACKS.get(name, {}),
        **_product_parts(name, eighth), **_attention_parts(name, eighth),
    )
    for name, gib, eighth, half, single, memory, link, host, bfloat16 in (
        ("A100-80", 79.25, None, 312, 19.5, 2039, 300, _PCIE_4, True),
        ("A100-40", 39.5, None, 312, 19.5, 1555, 300, _PCIE_4, True),
        ("A800", 79.25, None, 312, 19.5, 2039, 200, _PCIE_4, True),
        ("A100-PCIe-80", 79.25, None, 312, 19.5, 1935, _PCIE_4, _PCIE_4, True),
        ("A100-PCIe-40", 39.5, None, 312, 19.5, 1555, _PCIE_4, _PCIE_4, True),
        ("H100", 79.1, 1979, 989, 67, 3350, 450, _PCIE_5, True),
        ("H100-PCIe", 79.1, 1513, 756, 51, 2000, _PCIE_5, _PCIE_5, True),
        ("H100-NVL", 93.1, 1671, 835, 60, 3900, _PCIE_5, _PCIE_5, True),
        ("H800", 79.1, 1979, 989, 67, 3350, 200, _PCIE_5, True),
        ("H20", 95.0, 296, 148, 44, 4000, 450, _PCIE_5, True),
        ("H200", 139.7, 1979, 989, 67, 4800, 450, _PCIE_5, True),
        ("L40S", 44.4, 733, 362, 91.6, 864, _PCIE_4, _PCIE_4, True),
        ("L4", 22.03, 242.5, 121, 30.3, 300, _PCIE_4, _PCIE_4, True),
        ("B200", 178.35, 4500, 2250, 75, 7700, 900, _PCIE_5, True),
        ("GB200", 184.3, 5000, 2500, 80, 8000, 900, _NVLINK_C2C, True),
        ("GB300", 275.5, 5000, 2500, 80, 8000, 900, _NVLINK_C2C, True),
        ("MI300X", 191.98, 2614.9, 1307.4, 163.4, 5300, _XGMI, _PCIE_5, True),
        ("A6000", 47.53, None, 154.8, 38.7, 768, _PCIE_4, _PCIE_4, True),
        ("RTX5090", 31.36, 419, 209.5, 104.8, 1792, _PCIE_5, _PCIE_5, True),
        ("RTX4090", 23.64, 330.3, 165.2, 82.6, 1008, _PCIE_4, _PCIE_4, True),
        ("RTX3090", 23.69, None, 71, 35.6, 936, _PCIE_4, _PCIE_4, True),
        ("V100-32", 31.75, None, 125, 15.7, 900, 150, _PCIE_3, False),
        ("V100-16", 15.78, None, 125, 15.7, 900, 150, _PCIE_3, False),
        ("RTX2080Ti", 10.76, None, 53.8, 13.4, 616, 16, _PCIE_3, False),
        ("GTX1080Ti", 10.92, None, 11.3, 11.3, 484, 16, _PCIE_3, False),
    )
}  # fmt: skip
"""GPU name -> GPU, from the makers' data sheets (docs/planner_devices.md). A name without an edition means SXM. Sheets
state peaks with sparsity; a dense peak is half of that. A PCIe card has the memory of the SXM module with the same
chips. The 1080 Ti multiplies 16-bit numbers in FP32."""


def described(*, memory_gib: float, peak_teraflops: float, memory_bandwidth: float, link_bandwidth: float) -> Device:
    """Make an unknown GPU with the given rates. Its products reach the same fraction of its peak as on A100."""
    return Device(
        memory_gib=memory_gib, peak_teraflops=peak_teraflops, peak_teraflops_fp32=peak_teraflops,
        memory_bandwidth=memory_bandwidth, link_bandwidth=link_bandwidth, host_bandwidth=link_bandwidth,
        **_product_parts("", None),
    )  # fmt: skip


def device_gib(text: str) -> float:
    """Return a GPU's memory in GiB, from its name in `DEVICES` or from a number. Raises ValueError for other text."""
    if text in DEVICES:
        return DEVICES[text].memory_gib
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"'{text}' is no GPU; give {', '.join(DEVICES)}, or its memory in GiB")
    return value


_FAMILIES = (
    "GB300", "GB200", "B200", "H200", "H100", "H800", "A100", "A800", "V100", "L40S", "MI300X", "A6000", "2080TI",
    "1080TI", "5090", "4090", "3090", "H20", "L4",
)  # fmt: skip
_ANOTHER = r"(?![\dT]| ?D\b| LAPTOP| MAX-Q)"
"""Matches only if no text behind a family's name makes it another card: 4090 D, 3090 Ti (`_spelled` removes the blank),
or L40 for L4."""
_BEFORE = dict.fromkeys(("H20", "L4"), "(?<![A-Z])")  # NVL4 is no L4
_EDITIONS = {
    r"PCI[-_ ]?E": "PCIe", r"(?<![A-Z])NVL(?![A-Z0-9])": "NVL", r"(?<![A-Z])GH200": "Grace Hopper",
    r"(?<![A-Z])A100X": "A100X",
}  # fmt: skip
_OTHER_MEMORY = 0.05  # if memory differs by more than this fraction from the nearest known GPU, it is another edition
_SOLD_AS = {
    "L40S": 48,
    "L4": 24,
    "B200": 192,
}  # GB on labels; error correction and spare stacks take the difference to the memory that CUDA reports
_REPORTED = 0.99  # GiB that CUDA reports for each GB on the label


def edition_of(label: str) -> str | None:
    """Return the edition in a GPU's label; None for SXM. Other editions have other rates, and mostly no NVLink."""
    return next((name for pattern, name in _EDITIONS.items() if re.search(pattern, label.upper())), None)


def is_edition(name: str, edition: str | None) -> bool:
    """Return whether the GPU of that name in `DEVICES` is of the given edition."""
    known = edition_of(name)
    return known == edition or (edition == "PCIe" and known is None and not DEVICES[name].has_nvlink)


def device_of(label: str, memory_gb: float | None, edition: str | None = None) -> tuple[str, float | None, bool]:
    """Return (name in `DEVICES` or `cpu`, GiB if the memory differs from it else None, whether the edition is a guess).

    `edition`: replaces the edition in the label. For an unknown edition the name is that of the SXM module. Raises
    ValueError if the label names no known processor.
    """
    if label.strip().lower() == "cpu":
        return "cpu", memory_gb, False
    names = devices_like(label, edition)
    if not names:
        raise ValueError(f"{shown(label)} is no GPU that is known; give one of {', '.join(DEVICES)}, cpu")
    size = memory_gb or _gigabytes(_split(label)[1])
    if size is None:
        spelled = _without_edition(_spelled(label))
        named = [name for name in names if _without_edition(name) in spelled] or names
        return named[0], None, len(named) > 1
    nearest = min(names, key=lambda name: abs(DEVICES[name].memory_gib - size))
    is_other = _differs(size, nearest)
    return nearest, _REPORTED * size if is_other else None, False


def known_device(label: str) -> str | None:
    """Return the name in `DEVICES` of the GPU that a label means, such as "NVIDIA A100-SXM4-80GB".

    Returns None if the label has other text, or could mean none or several of these GPUs.
    """
    if label in DEVICES:
        return label
    if not devices_like(label):
        return None
    before, behind = _split(label)
    if not re.fullmatch(r"(NVIDIA|AMD)?[ -]*(GEFORCE|INSTINCT)?[ -]*(RTX|GTX)?[ -]*", before):
        return None
    name, _, is_guess = device_of(label, None)
    numbers = [float(each) for each in re.findall(r"(?<![A-Z\d])\d+", behind)]
    is_other = domain_of(label) not in (None, DEVICES[name].gpus_per_node) or not is_edition(name, edition_of(label))
    return None if is_guess or is_other or any(_differs(each, name) for each in numbers) else name


def devices_like(label: str, edition: str | None = None) -> list[str]:
    """Return the names in `DEVICES` of the label's family and edition; the SXM modules if the edition is unknown."""
    family = _family(label)
    names = [name for name in DEVICES if family and _family(name) == family]
    edition = edition or edition_of(label)
    same = [name for name in names if is_edition(name, edition)]
    return same or [name for name in names if edition_of(name) is None]


def domain_of(label: str) -> int | None:
    """Return the number of GPUs that NVLink connects according to the label, such as 72 for NVL72; None without it."""
    found = re.search(r"(?<![A-Z])NVL(\d+)", label.upper())
    return int(found[1]) if found else None


def _family(label: str) -> str | None:
    spelled = _spelled(label)
    return next((each for each in _FAMILIES if re.search(rf"{_BEFORE.get(each, '')}{each}{_ANOTHER}", spelled)), None)


def _spelled(label: str) -> str:
    return label.upper().replace(" TI", "TI").replace(" GB", "GB").replace(" GIB", "GIB")


def _split(label: str) -> tuple[str, str]:
    """Return the text before and behind the family's name, in capitals."""
    before, _, behind = _spelled(label).partition(_family(label))
    return before, behind


def _differs(gigabytes: float, name: str) -> bool:
    return gigabytes != _SOLD_AS.get(name) and abs(gigabytes / DEVICES[name].memory_gib - 1) > _OTHER_MEMORY


def _without_edition(text: str) -> str:
    """Return the text in capitals, without PCIe and NVL."""
    return re.sub(r"[-_ ]?(PCI[-_ ]?E|NVL)", "", text.upper())


def _gigabytes(label: str) -> float | None:
    """Return the number in the first word such as 80GB, or None."""
    words = label.replace("-", " ").replace("(", " ").replace(")", " ").split()
    numbers = {word: word.rstrip("GIB") for word in words}
    return next((float(each) for word, each in numbers.items() if each != word and each.isdecimal()), None)
