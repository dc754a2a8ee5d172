"""What a sweep writes: its table, its picture and its page say the same of each point."""

import json
import re
from html import unescape

import pytest
from rich.console import Console

from megatron.documents.picture import as_png
from megatron.planner.search.outcome import Sweep, SweepPoint, amount
from megatron.planner.search.report import draw_sweep, sweep_page
from megatron.planner.search.table import sweep_records, sweep_rows, sweep_table
from tests.planner.search.helper import a100, gpt3, priced, run

MODEL = gpt3(8, 4096, 32)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    """Of one, two, three and six nodes, of which one has a reason, and three make a front with a knee."""
    points = []
    for nodes in (1, 2, 3, 6):
        machines = a100(nodes)
        found = run(MODEL, machines, global_batch_size=48, schedules=("flush",), num_simulated=1)
        best = priced(found, MODEL, machines).best
        points.append(SweepPoint(num_gpus=machines.num_gpus, sequence_length=2048, best=best))
    points.append(SweepPoint(num_gpus=7, sequence_length=2048, best=None, reason="7 <GPUs> are odd"))
    swept = Sweep(points=tuple(points), tokens=1e9, currency="EUR")
    assert len(swept.fronts[2048]) >= 3 and swept.knees
    return swept


@pytest.mark.full
def test_the_table_says_what_the_records_say(sweep):
    names, rows = sweep_rows(sweep)
    records = json.loads(json.dumps(sweep_records(sweep)))
    assert {"GPUs", "days", "EUR", "cost/M tokens", "s (80%)", "remarks"} <= set(names)
    for row, record in zip(rows, records, strict=True):
        said = dict(zip(names, row, strict=True))
        assert said["GPUs"] == str(record["num_gpus"])
        if record["status"] == "rejected":
            assert said["remarks"] == record["reason"] and not said["days"]
            continue
        assert said["days"] == f"{record['days']:.3g}" and record["time"] == record["days"]
        assert said["EUR"] == amount(record["cost"]) and record["cost_of_time"] == record["cost"]
        assert ("knee" in said["remarks"]) == record["is_knee"]
        assert ("neither" in said["remarks"]) != record["on_front"]
    console = Console(width=300, no_color=True)
    with console.capture() as capture:
        console.print(sweep_table(sweep, plain=True))
    lines = capture.get().splitlines()
    assert len(lines) == len(rows) + 1 and capture.get().isascii()
    assert all(text in line for row, line in zip(rows, lines[1:], strict=True) for text in row)


@pytest.mark.full
def test_columns_without_a_word_are_left_out(sweep):
    """Of sweeps without tokens and without a price: days, and money; GPU hours of an iteration stay."""
    points = [each for each in sweep.points if each.best is not None]
    bare = []
    for each in points:
        machines = a100(each.num_gpus // 8)
        found = run(MODEL, machines, global_batch_size=48, schedules=("flush",), num_simulated=1)
        best = priced(found, MODEL, machines, tokens=None, price=None).best
        bare.append(SweepPoint(num_gpus=each.num_gpus, sequence_length=2048, best=best))
    names, _ = sweep_rows(Sweep(points=tuple(bare)))
    assert "GPU hours/iteration" in names and not {"days", "cost/M tokens", "EUR"} & set(names)


def test_the_picture(sweep):
    """The front is a line from point to point, each with its GPUs; the knee is ringed, with its time and cost; both
    axes begin at zero and show all points."""
    figure = draw_sweep(sweep, title="title")
    (axes,) = figure.axes
    drawn = {line.get_gid(): [*zip(*line.get_data(), strict=True)] for line in axes.lines}
    assert drawn["front 2048"] == [(each.time, each.cost) for each in sweep.fronts[2048]]
    assert drawn["knee 2048"] == [(sweep.knees[2048].time, sweep.knees[2048].cost)]
    beaten = [each for each in sweep.curves[2048] if each not in sweep.fronts[2048]]
    assert drawn.get("beaten 2048", []) == [(each.time, each.cost) for each in beaten]
    knee = sweep.knees[2048]
    said = f"knee: {knee.time:.3g} days, {amount(knee.cost)} EUR"
    assert {text.get_text() for text in axes.texts} == {said, *(str(each.num_gpus) for each in sweep.curves[2048])}
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear") and axes.get_ylabel() == "EUR"
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    assert all(each.time < axes.get_xlim()[1] and each.cost < axes.get_ylim()[1] for each in sweep.curves[2048])
    assert as_png(figure).startswith(b"\x89PNG")
    assert as_png(draw_sweep(Sweep(points=sweep.points[-1:])))


def test_the_page(sweep):
    """Title, summary, notes, the curve and all rows; it loads nothing, and what is written is text."""
    notes = ["a <note>, docs/convergence.md"]
    page = sweep_page(sweep, title="A <sweep>", summary=["one & two"], notes=notes, docs="file:///docs")
    assert "<svg" in page and "A &lt;sweep&gt;" in page and "7 &lt;GPUs&gt; are odd" in page
    assert 'href="file:///docs/convergence.md"' in page and not re.search(r'(src|href)="(http|//)', page)
    _, rows = sweep_rows(sweep)
    body = page[page.index('<table id="sweep">') :]
    written = [re.sub("<[^>]*>", "|", line) for line in body.splitlines() if line.startswith("<tr><td")]
    assert [[unescape(cell) for cell in line.split("|")[2:]] for line in written] == [list(row) for row in rows]
