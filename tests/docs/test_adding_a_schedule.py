"""docs/adding_a_schedule.md is true: its code is the project's, entered into the tables as it says, and does what it
shows."""

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.commands.schedule import main as tool
from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset, Schedule
from tests import workers
from tests.draws import draws

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_a_schedule.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
BLOCKS = re.findall(r"```\n(.*?)```", PAGE.replace(f"```python\n{CODE}```", ""), re.DOTALL)


def register(code=CODE):
    """Do what the page says: the order's file, and its two lines in the table."""
    names = {"ORDERS": ORDERS, "PRESETS": PRESETS, "Preset": Preset}
    exec(code, names)
    exec(BLOCKS[0], names)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The tables as they are without the page, and then what it enters."""
    monkeypatch.setitem(ORDERS, "zb-h1", None)
    monkeypatch.setitem(PRESETS, "zb-h1", None)
    register()


def arguments(line):
    return shlex.split(line.removeprefix("$ python tools/schedule.py "))


def test_the_file_is_the_projects():
    """What the page shows is the file that it names, and what the tables have."""
    assert (ROOT / "megatron" / "pipeline" / "schedules" / "zero_bubble_h1.py").read_text() == CODE
    table = (ROOT / "megatron" / "pipeline" / "schedules" / "orders.py").read_text()
    assert '"zb-h1": ZeroBubbleH1,' in table and '"zb-h1": Preset("zb-h1", "flush"),' in table


def test_the_proof_is_the_one_shown(capsys):
    """`check` prints what the page shows."""
    command, _, shown = BLOCKS[1].partition("\n")
    assert tool(arguments(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_mistake_is_explained_as_shown(capsys):
    """The wrong order that the page describes ends with the message that it shows."""
    right, wrong = "ahead, late = self.num_stages - 1 - stage, stage", "late = self.num_stages - 1"
    assert right in CODE and f"(`{wrong}`)" in PAGE
    register(CODE.replace(right, f"ahead = self.num_stages - 1 - stage\n        {wrong}"))
    assert tool(arguments(BLOCKS[1].partition("\n")[0])) == 1
    assert capsys.readouterr().err == BLOCKS[2]


def test_the_table_of_times(capsys, tmp_path, monkeypatch):
    """Times per batch, saved microbatches and peaks of memory of the table come from the commands above it."""
    monkeypatch.chdir(tmp_path)
    draw, simulate = BLOCKS[3].strip().splitlines()
    assert tool(arguments(draw)) == 0
    assert (tmp_path / "zb-h1.png").stat().st_size > 10_000
    capsys.readouterr()
    rows = re.findall(r"^\| `(\S*)` \| (\d+) \| ([\d, ]+) \| ([\d, ]+) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == ["flush", "zb-h1", "2bw"]
    for name, time, saved, peaks in rows:
        words = arguments(simulate.replace("zb-h1", name))
        if name != "zb-h1":  # nothing is between I and W
            words = [word for at, word in enumerate(words) if "--deferred-size" not in (word, words[at - 1])]
        assert tool([*words, *(["--batches", "8"] if name == "2bw" else [])]) == 0
        out = capsys.readouterr().out
        assert re.search(r"time per batch, steady +([\d.]+)", out).group(1) == time
        assert re.findall(r"peak saved microbatches +(\d+)", out) == saved.split(", ")
        assert re.findall(r"peak memory +(\d+) at", out) == peaks.split(", ")


@draws(30)
@given(
    st.integers(1, 7),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["2bw", "flush"]),
)
def test_the_order_is_right_for_all_sizes(num_stages, more, recompute, weights):
    """Programs of any size, of ramp-ups, under both policies, and for every number of batches, are proved."""
    schedule = Schedule(
        order="zb-h1", weights=weights, num_stages=num_stages, recompute=recompute, tied_embeddings=True
    )
    fewest = ORDERS["zb-h1"](num_stages).max_in_flight(0)
    batches = [fewest + each for each in more]
    check(schedule.build(batches), max_saved=schedule.max_saved_microbatches(batches))
    check_periodic(schedule.build_periodic(batches[0]))


def train(training):
    """On each rank of a worker pool: train with the page's schedule, drained once in between."""
    from tests.pipeline.runtime.stages.module import module_cases

    before = ORDERS["zb-h1"], PRESETS["zb-h1"]
    register()
    try:
        return module_cases.run("zb-h1", training, drains=(2,))
    finally:
        ORDERS["zb-h1"], PRESETS["zb-h1"] = before


@pytest.mark.full
def test_it_trains():
    """The runtime executes it as it is: the losses are those of one process, and each stage saves the 4 that the
    checker proves, up to the end of W."""
    from tests.pipeline.runtime.stages.module import reference

    training = reference.Training(batches=(6, 6, 8, 3, 6))
    outcomes = workers.run(4, f"{__name__}:train", training=training, timeout=180)
    expected = reference.train(training, delay=0)
    for outcome in outcomes:
        assert [report.losses["loss"] for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-6)
    assert [outcome.peak_saved[stage] for stage, outcome in enumerate(outcomes)] == [4, 4, 4, 4]
