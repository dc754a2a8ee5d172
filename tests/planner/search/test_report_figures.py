"""Where an iteration's time goes and what takes the memory: parts that add up, and their bars."""

import re
from dataclasses import replace

import pytest

from megatron.planner.memory.memory import GIB
from megatron.planner.search import Outcome, Training, report_figures
from megatron.planner.search.report_figures import COLOURS, bars, memory_bars, time_bars
from tests.planner.search.helper import PAPER, a100, gpt3, planner, run

MODEL, MACHINES = gpt3(16, 8192, 64), a100(2)
SPACE = {"global_batch_size": 32, "tensor": (2, 4), "pipeline": (1, 4), "num_simulated": 1}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    names = ("flush", "gpipe", "interleaved", "bpipe", "2bw", "zb-h1", "zbv", "pipedream")
    model = replace(MODEL, tied_embeddings=False)
    return run(model, MACHINES, training=Training(clips_gradients=False), schedules=names, **SPACE)


@pytest.fixture(scope="module")
def planned():
    return planner(replace(MODEL, tied_embeddings=False), MACHINES, PAPER)


def test_parts_of_time_add_up(outcome, planned):
    """For each schedule, each scope and with or without replicas: none is negative, and all are an iteration."""
    assert len({each.choice.schedule for each in outcome.kept}) >= 6
    for each in outcome.kept:
        parts = report_figures.time_parts(each.estimate, planned)
        assert sum(parts.values()) == pytest.approx(each.estimate.seconds) and min(parts.values()) >= -1e-9
        assert (parts[report_figures.RECOMPUTED] > 0) is (each.choice.recompute.value != "none")
        bubble = each.estimate.bubble * each.estimate.seconds
        idle = parts[report_figures.WAITS] + parts[report_figures.REDUCTIONS] + parts[report_figures.TRANSFERS]
        assert idle == pytest.approx(bubble, abs=1e-9)
        if each.choice.pipeline == 1 and each.choice.schedule == "flush":
            assert parts[report_figures.TRANSFERS] == 0 < parts[report_figures.REDUCTIONS]


def test_parts_of_memory_add_up(outcome):
    """Those of tensors are what the fullest GPU holds; what is lost beside them has room."""
    for each in outcome.kept:
        parts = report_figures.memory_parts(each.estimate, 79.25)
        lost = parts.pop(report_figures.LOST)
        fullest = max(rank.total for rank in each.estimate.memory) / GIB
        assert sum(parts.values()) == pytest.approx(fullest) and min(parts.values()) >= -1e-9
        assert 0 <= lost <= 79.25 - fullest + 1e-9


def test_bars(outcome, planned):
    """A row for each, whose parts are as long as they are large on an axis from zero, and say what they are."""
    rows = [("1: a <label>", each, planned) for each in outcome.kept[:3]]
    text = time_bars(rows)
    assert text.count("1: a &lt;label&gt;") == 3 and ">0</text>" in text
    widths = [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]
    seconds = [
        value for _, each, _ in rows for part, value in report_figures.time_parts(each.estimate, planned).items()
    ]
    assert sum(widths) / sum(seconds) == pytest.approx(max(widths) / max(seconds), rel=0.02)
    titles = re.findall("<title>([^<]*)</title>", text)
    assert len(titles) == len(widths)
    assert any(re.match(r"backward: [\d.]+ seconds of an iteration, ", each) for each in titles)
    assert 'stroke="#b03030"' in memory_bars(rows, 79.25)
    used = {part for _, each, _ in rows for part in report_figures.memory_parts(each.estimate, 79.25)}
    assert used <= COLOURS.keys()
    assert "<svg" in bars([], name="nothing", unit="s")
