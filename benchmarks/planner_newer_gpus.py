"""The contribution of parts of the time model on GPUs to which no constant is fitted: the mean error without each part.

    python benchmarks/planner_newer_gpus.py benchmarks/published/*h100.json benchmarks/published/*blackwell.json

The runs are predicted with the project's constants, which are fitted to A100. Each line removes one part of the model,
or sets a constant to a value without an effect (an efficiency of 1, no seconds, no contention); nothing is fitted
again. Each mean is over the absolute errors of the iteration times of one kind of runs.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of
from megatron.planner.job.devices import DEVICES, Device
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.prediction import Question
from megatron.planner.time.calibration import Constants, default_constants
from megatron.planner.time.work import LayerWork, Work

_A100 = DEVICES["A100-80"].product_part
CONSTANTS = {
    "product_efficiency": 1.0, "product_overhead": 0.0, "memory_efficiency": 1.0, "tensor_efficiency": 1.0,
    "link_efficiency": 1.0, "network_efficiency": 1.0, "contention": 0.0, "launch": 0.0,
}  # fmt: skip
"""Constant -> the value at which it has no effect."""


def _rate_of_a100(device: Device, element_bytes: int) -> float:
    peak = 1e12 * device.peak_teraflops_fp8 if element_bytes == 1 else device.peak(element_bytes)
    return peak * _A100


PATCHES: dict[str, Callable[[], AbstractContextManager]] = {
    "nothing left out": nullcontext,
    "what this GPU's products reach of the peak (A100's part for all)": lambda: mock.patch.object(
        Device, "product_rate", _rate_of_a100
    ),
    "scores that a causal mask leaves out": lambda: mock.patch.object(
        Architecture, "is_causal", property(lambda _: False)
    ),
    "casts to FP8": lambda: mock.patch.object(LayerWork, "_casts", lambda *_, **__: Work()),
}
SOFTWARE: dict[str, dict[str, bool]] = {
    "overlap of reductions and gathers over replicas": {"overlaps_gradients": False, "overlaps_weights": False},
    "tensor ranks' products in pieces": {"overlaps_in_pieces": False},
    "kernels of attention for this GPU (FlashAttention-2 for all)": {"flash_attention_2": True},
}


def kind_of(entry: Entry) -> str:
    """The kind of a run, as the heading of a column."""
    generation = "H100" if entry.cluster.gpu.startswith("H") else "Blackwell"
    if entry.model.experts is not None:
        return f"experts, {generation}"
    return f"{'FP8' if entry.software.fp8 else '16 bits'}, {generation}"


def mean_errors(entries: list[Entry], constants: Constants, **software: bool) -> dict[str, float]:
    """The mean absolute errors by kind of run. `software`: fields of the runs' software to change."""
    errors = defaultdict(list)
    for entry in entries:
        changed = replace(entry, software=replace(entry.software, **software))
        errors[kind_of(entry)].append(abs(Question(changed).time_errors(constants)["iteration"]))
    return {kind: mean(found) for kind, found in sorted(errors.items())}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("entries", nargs="+", help="measured runs")
    options = parser.parse_args()
    entries = [
        each
        for file in options.entries
        for each in load_entries(file)
        if isinstance(each, Entry) and each.seconds is not None
    ]
    constants = default_constants()
    rows = {}
    for name, patch in PATCHES.items():
        with patch():
            rows[name] = mean_errors(entries, constants)
    for name, changes in SOFTWARE.items():
        rows[name] = mean_errors(entries, constants, **changes)
    for name, value in CONSTANTS.items():
        rows[name] = mean_errors(entries, replace(constants, **{name: value}))
    kinds = list(rows["nothing left out"])
    counts = {kind: sum(kind_of(entry) == kind for entry in entries) for kind in kinds}
    table = Table("left out", *(f"{kind}\n({counts[kind]})" for kind in kinds), box=None)
    for name, found in rows.items():
        table.add_row(name, *(f"{100 * found[kind]:.1f}%" for kind in kinds))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
