"""Say on which machine the hour runs: card, clocks, driver, torch and its libraries, packages, processors, memory.

    python -m benchmarks.gpu_hour.machine --json machine.json

It runs as a process of its own, since a process that has asked the card keeps memory there. Whatever cannot be found
out is left out.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from megatron.documents.files import write_whole

ASKED = {
    "driver_version": "driver", "clocks.sm": "SM MHz", "clocks.max.sm": "SM MHz at most", "clocks.mem": "memory MHz",
    "clocks.max.mem": "memory MHz at most", "power.draw": "W", "power.limit": "W at most",
    "temperature.gpu": "degrees C",
}  # fmt: skip
"""Field of nvidia-smi -> what it is called here."""
PACKAGES = ("triton", "transformer_engine", "apex", "flash-attn", "megatron-core", "numpy", "transformers", "pytest")


def asked(fields: dict[str, str]) -> dict[str, str]:
    """What nvidia-smi says of the first card; nothing where it is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        values = [each.strip() for each in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(values) == len(fields):
            return dict(zip(fields.values(), values, strict=True))
    return {}


def clocks() -> str:
    """The clocks and the power of the first card at this moment, as text."""
    found = asked({name: title for name, title in ASKED.items() if name != "driver_version"})
    return ", ".join(f"{title} {value}" for title, value in found.items())


def of_torch() -> dict[str, object]:
    import torch

    found: dict[str, object] = {"torch": torch.__version__, "CUDA": torch.version.cuda}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name, "cards": torch.cuda.device_count(), "card bytes": card.total_memory,
            "multiprocessors": card.multi_processor_count, "capability": [card.major, card.minor],
        }  # fmt: skip
    with suppress(Exception):  # a build without these libraries
        found["cuDNN"] = torch.backends.cudnn.version()
    with suppress(Exception):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def describe() -> dict[str, object]:
    found: dict[str, object] = {}
    try:
        found |= of_torch()
    except Exception as error:  # the hour says what it can, whatever is broken
        found["torch says"] = f"{type(error).__name__}: {error}"
    found |= asked(ASKED)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found |= {"Python": platform.python_version(), "system": platform.platform(), "cores": cores}
    found |= {"host bytes": psutil.virtual_memory().total}
    return found


def identity(machine: dict) -> str:
    """What has to be equal for results to go together: card, its memory, torch and Python, not the one machine."""
    card = f"{machine['card']}, {machine['card bytes'] / 2**30:.0f} GiB" if "card" in machine else "no card"
    return f"{card}, torch {machine.get('torch')}, Python {machine.get('Python')}"


def sentence(machine: dict) -> str:
    parts = [identity(machine)]
    parts += [
        f"{name} {machine[name]}"
        for name in (
            "driver",
            "CUDA",
            "cuDNN",
            "NCCL",
            *PACKAGES,
            "SM MHz",
            "SM MHz at most",
            "memory MHz",
            "memory MHz at most",
            "W at most",
        )
        if machine.get(name)
    ]
    return f"{', '.join(parts)}; {machine.get('cores')} cores, {machine.get('host bytes', 0) / 2**30:.0f} GiB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    content = describe()
    write_whole(args.json, json.dumps(content, indent=1, default=str) + "\n")
    print(sentence(content))
