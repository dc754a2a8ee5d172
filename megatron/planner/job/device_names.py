"""Which GPU of `DEVICES` a label means: "A100-SXM4-80GB", "NVIDIA H100 PCIe", "32x V100-16GB (4 servers)"."""

import re

from megatron.documents.faults import shown
from megatron.planner.job.devices import DEVICES

_FAMILIES = (
    "GB300", "GB200", "B200", "H200", "H100", "H800", "A100", "A800", "V100", "L40S", "MI300X", "A6000", "2080TI",
    "1080TI", "4090", "3090", "H20", "L4",
)  # fmt: skip
_ANOTHER = r"(?![\dT]| ?D\b| LAPTOP| MAX-Q)"
"""What behind a family means another card: of 4090 the D, of 3090 the Ti (whose blank `_spelled` takes out), L40."""
_BEFORE = dict.fromkeys(("H20", "L4"), "(?<![A-Z])")  # NVL4 is no L4
_EDITIONS = {
    r"PCI[-_ ]?E": "PCIe", r"(?<![A-Z])NVL(?![A-Z0-9])": "NVL", r"(?<![A-Z])GH200": "Grace Hopper",
    r"(?<![A-Z])A100X": "A100X",
}  # fmt: skip
_OTHER_MEMORY = 0.05  # a GPU with so much more or less than the nearest that is known is another edition
_SOLD_AS = {
    "L40S": 48,
    "L4": 24,
    "B200": 192,
}  # GB on labels, of which error correction and stacks in reserve take as much
_REPORTED = 0.99  # part of the GB on the label that CUDA reports, in GiB


def edition_of(label: str) -> str | None:
    """The edition of a GPU that its label names, where that is not SXM: other rates, and mostly no NVLink."""
    return next((name for pattern, name in _EDITIONS.items() if re.search(pattern, label.upper())), None)


def is_edition(name: str, edition: str | None) -> bool:
    """Whether the GPU of that name in `DEVICES` is of this edition."""
    known = edition_of(name)
    return known == edition or (edition == "PCIe" and known is None and not DEVICES[name].has_nvlink)


def device_of(label: str, memory_gb: float | None, edition: str | None = None) -> tuple[str, float | None, bool]:
    """The name in `DEVICES` (or `cpu`), the GiB of an edition with other memory, and whether the edition was guessed.

    `edition`: in place of the label's. Of one that is not known, the name is that of the SXM module.
    Raises ValueError where the label names no processor that is known.
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
    """The name of the one GPU of `DEVICES` that a label means, such as "NVIDIA A100-SXM4-80GB"; None: it says more, or
    could mean none or several."""
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
    """Names in `DEVICES` of the label's family and edition; of an edition that is not known, the SXM modules."""
    family = _family(label)
    names = [name for name in DEVICES if family and _family(name) == family]
    edition = edition or edition_of(label)
    same = [name for name in names if is_edition(name, edition)]
    return same or [name for name in names if edition_of(name) is None]


def domain_of(label: str) -> int | None:
    """How many GPUs NVLink connects, where the label says so: 72 of NVL72."""
    found = re.search(r"(?<![A-Z])NVL(\d+)", label.upper())
    return int(found[1]) if found else None


def _family(label: str) -> str | None:
    spelled = _spelled(label)
    return next((each for each in _FAMILIES if re.search(rf"{_BEFORE.get(each, '')}{each}{_ANOTHER}", spelled)), None)


def _spelled(label: str) -> str:
    return label.upper().replace(" TI", "TI").replace(" GB", "GB").replace(" GIB", "GIB")


def _split(label: str) -> tuple[str, str]:
    """What stands before and behind the family, in capitals."""
    before, _, behind = _spelled(label).partition(_family(label))
    return before, behind


def _differs(gigabytes: float, name: str) -> bool:
    return gigabytes != _SOLD_AS.get(name) and abs(gigabytes / DEVICES[name].memory_gib - 1) > _OTHER_MEMORY


def _without_edition(text: str) -> str:
    """In capitals."""
    return re.sub(r"[-_ ]?(PCI[-_ ]?E|NVL)", "", text.upper())


def _gigabytes(label: str) -> float | None:
    """The number of the first word such as 80GB, if there is one."""
    words = label.replace("-", " ").replace("(", " ").replace(")", " ").split()
    numbers = {word: word.rstrip("GIB") for word in words}
    return next((float(each) for word, each in numbers.items() if each != word and each.isdecimal()), None)
