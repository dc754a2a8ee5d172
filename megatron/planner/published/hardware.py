"""What papers call their machines: which processor it is, and how fast a node's network.

Texts such as "A100-SXM-80GB", "32x V100-16GB (4 servers)", "4x200Gb/s HDR IB per node (800 Gb/s)", "Selene".
"""

import re

from megatron.planner.job.devices import DEVICES

_NETWORKS = {  # GB/s of a node, where a paper names the machine; hyphens and case do not matter
    "selene": 200.0,  # DGX A100: 8 x HDR InfiniBand
    "dgx a100": 200.0,
    "dgx h100": 400.0,  # 8 x NDR InfiniBand
    "dgx h200": 400.0,
    "dgx 2": 100.0,  # 8 x EDR InfiniBand
    "p3.16xlarge": 3.125,  # 25 Gb/s Ethernet
    "p3dn.24xlarge": 12.5,  # 100 Gb/s
    "p4d.24xlarge": 50.0,  # 4 x 100 Gb/s
    "p4de.24xlarge": 50.0,
    "p5.48xlarge": 400.0,  # 32 x 100 Gb/s
}
_GPUS_PER_NODE = {"dgx 2": 16}
_FAMILY = re.compile(r"(A100|H100|H200|V100|2080 ?Ti|1080 ?Ti)", re.IGNORECASE)
_MEMORY = (re.compile(r"(\d+(?:\.\d+)?) ?Gi?B\b", re.IGNORECASE), re.compile(r"-(\d{2,3})G?\b"))
_RATE = re.compile(
    r"(?:(?P<count>\d+) ?[x×*] ?)?(?P<rate>\d+(?:\.\d+)?) ?(?P<scale>[GT])(?P<unit>[bB])(?:it|yte)?s?"
    r"(?:/s(?:ec)?|ps|E\b| ?Ethernet)(?P<per_gpu>[ -]?(?:per|a|/)[ -]?GPU)?"
)
_NEGATIVE = re.compile(r"(?<!\S)-" + _RATE.pattern)
_INFINIBAND = re.compile(r"(\d+) ?[x×*] ?(EDR|HDR|NDR)")
_ADAPTERS = {"EDR": 12.5, "HDR": 25.0, "NDR": 50.0}
_INSIDE = re.compile(r"nvlink|nvswitch|pcie", re.IGNORECASE)  # these rates are of links in a node
_OTHER_MEMORY = 0.05  # a GPU with so much more or less than the nearest that is known is another edition
_REPORTED = 0.99  # part of the GB on the label that CUDA reports, in GiB


def device_of(text: str, memory_gb: float | None) -> tuple[str, float | None, bool]:
    """The name in `DEVICES` (or `cpu`), the GiB of an edition with other memory, and whether the edition was guessed.

    Raises ValueError where the text names no processor that is known.
    """
    if text.strip().lower() == "cpu":
        return "cpu", memory_gb, False
    family = _FAMILY.search(text)
    if family is None:
        raise ValueError(f"hardware.gpu {text!r} is no GPU that is known; give one of {', '.join(DEVICES)}, cpu")
    compact = family[1].replace(" ", "").upper()
    names = [name for name in DEVICES if compact in name.upper()]
    found = next(filter(None, (pattern.search(text, family.end()) for pattern in _MEMORY)), None)
    size = memory_gb or (float(found[1]) if found else None)
    if size is None:
        return names[0], None, len(names) > 1
    nearest = min(names, key=lambda name: abs(DEVICES[name].memory_gib - size))
    is_other = abs(size / DEVICES[nearest].memory_gib - 1) > _OTHER_MEMORY
    return nearest, _REPORTED * size if is_other else None, False


def node_bandwidth(texts: tuple[str | None, ...], gpus_per_node: int) -> float:
    """GB/s of a node to the network. Raises ValueError where no text says it."""
    text = " | ".join(filter(None, texts))
    if negative := _NEGATIVE.search(text):
        raise ValueError(f"the bandwidth between nodes is {negative[0]}; give a number above 0")
    parts = [part for part in re.split(r"[|;,]", text) if not _INSIDE.search(part)]
    rates = [_gigabytes(found, gpus_per_node) for part in parts for found in _RATE.finditer(part)]
    rates += [int(found[1]) * _ADAPTERS[found[2]] for part in parts for found in _INFINIBAND.finditer(part)]
    if rates:
        return max(rates)
    for name, rate in _NETWORKS.items():
        if name in _plain(text):
            return rate
    raise ValueError("there are several nodes, and the bandwidth between them is not given (hardware.internode)")


def usual_gpus_per_node(texts: tuple[str | None, ...], otherwise: int) -> int:
    text = _plain(" | ".join(filter(None, texts)))
    return next((count for name, count in _GPUS_PER_NODE.items() if name in text), otherwise)


def _gigabytes(found: re.Match, gpus_per_node: int) -> float:
    rate = float(found["rate"]) * int(found["count"] or 1) * (1000 if found["scale"] == "T" else 1)
    return rate * (gpus_per_node if found["per_gpu"] else 1) / (8 if found["unit"] == "b" else 1)


def _plain(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ")
