"""The table of docs/convergence.md at flush's best learning rate: its figures are those of docs/convergence.json."""

import json
import statistics
from pathlib import Path

import pytest

from megatron.commands.compare_runs import Run, compare

DOCS = Path(__file__).parents[2] / "docs"
JUDGED = {
    ("AdamW", 2e-3): {"2bw", "provisional@2", "provisional@4"},
    ("AdamW, 8 layers", 2e-3): {"2bw@8", "provisional@8"},
    ("AdamW, 10 million parameters", 1e-3): {"2bw", "provisional@2"},
    ("AdamW, BERT", 5e-4): {"2bw", "provisional@2"},
    ("Muon", 8e-3): {"2bw", "provisional@2"},
}
SEEDS = range(11, 19)  # not those of the choice


def runs(optimizer: str, rate: float) -> list[Run]:
    found = json.loads((DOCS / "convergence.json").read_text())["runs"]
    return [
        Run(each["schedule"], rate, each["seed"], {int(number): loss for number, loss in each["losses"].items()})
        for each in found
        if (each["optimizer"], each["rate"]) == (optimizer, rate) and each["seed"] in SEEDS
    ]


@pytest.mark.parametrize(("optimizer", "rate"), sorted(JUDGED))
def test_rows_are_those_of_the_runs(optimizer, rate):
    """Each schedule that was judged has one row, and its figures are the medians and the interval of its seeds."""
    page = (DOCS / "convergence.md").read_text()
    compared = compare(runs(optimizer, rate), "flush")
    assert {each.schedule for each in compared} == JUDGED[optimizer, rate]
    for each in compared:
        lost = statistics.median(each.lost.values())
        assert f"| {optimizer}, {rate:g} | {each.schedule} | {len(each.over)} | {each} | {lost:.0f} |" in page
