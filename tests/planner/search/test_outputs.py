"""What a search writes: records, JSON lines, CSV, tables and the picture."""

import csv
import json
import math
import re

import pytest
from rich.console import Console

from megatron.documents.picture import as_png, as_svg
from megatron.planner.search import Outcome
from megatron.planner.search.report import draw_outcome
from megatron.planner.search.table import FIELDS, best_table, reasons, records, write_csv, write_jsonl, write_whole
from tests.planner.search.helper import a100, gpt3, priced, run

MODEL, MACHINES = gpt3(16, 8192, 64), a100(1)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Several schedules, some of it under pressure."""
    found = run(MODEL, MACHINES, global_batch_size=16, num_simulated=2)
    assert any(each.estimate.under_pressure for each in found.kept) and len(found.best_of_schedules()) > 3
    return found


def test_records_are_whole(outcome):
    """One for each choice, kept or rejected; numbers are those of the estimates, and nothing is infinite or unnamed."""
    rows = list(records(outcome))
    assert len(rows) == len(outcome.kept) + len(outcome.rejected)
    assert [row["rank"] for row in rows if row["status"] == "kept"] == list(range(1, len(outcome.kept) + 1))
    first, best = rows[0], outcome.best
    assert first["iteration_seconds"] == best.estimate.seconds and first["mfu"] == best.estimate.mfu
    assert first["sequences_per_second"] == 16 / best.estimate.seconds
    assert first["memory_gib"] == max(first["memory_gib_by_rank"])
    assert len(first["memory_gib_by_rank"]) == best.choice.pipeline
    assert all(row["reason"] for row in rows if row["status"] == "rejected")
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


def test_records_of_intervals_and_bills(outcome):
    """Numbers where an interval is known, else the reason; what nobody asked for is not there."""
    plain, rows = list(records(outcome)), list(records(priced(outcome, MODEL, MACHINES)))
    assert not any({"iteration_seconds_low", "not_validated", "cost"} & set(row) for row in plain)
    kept = [row for row in rows if row["status"] == "kept"]
    assert {"iteration_seconds_low" in row for row in kept} == {True, False}
    for row in kept:
        assert ("iteration_seconds_low" in row) != ("not_validated" in row) and row["currency"] == "EUR"
        if "iteration_seconds_low" in row:
            assert row["iteration_seconds_low"] < row["iteration_seconds"] < row["iteration_seconds_high"]
        assert row["cost"] == pytest.approx(2.0 * 8 * 24 * row["days"])
        tokens = 2048 * row["sequences_per_second"] * 86_400 * row["days"]
        assert 1e9 <= tokens * (1 + 1e-9) < 1e9 + 16 * 2048 * 1.01
        assert row["cost_per_million_tokens"] == pytest.approx(1e6 * row["cost"] / tokens)
    assert plain[0]["rank"] == 1 and set(rows[-1]) == set(plain[-1])


def test_files_hold_the_records(outcome, tmp_path):
    """JSON lines give the records back; the CSV has the same rows in named columns."""
    write_jsonl(outcome, tmp_path / "all.jsonl")
    write_csv(outcome, tmp_path / "all.csv")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert rows == list(records(outcome))
    with open(tmp_path / "all.csv", newline="") as stream:
        table = list(csv.DictReader(stream))
    assert tuple(table[0]) == FIELDS and len(table) == len(rows)
    assert [line["reason"] for line in table] == [row.get("reason", "") for row in rows]
    assert float(table[0]["iteration_seconds"]) == rows[0]["iteration_seconds"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "all.jsonl"]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    """Nobody sees a part of a file, and nothing is left beside it."""
    path = tmp_path / "best.sh"
    write_whole(path, "old")
    with pytest.raises(TypeError):
        write_whole(path, 5)
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["best.sh"]


def test_the_pareto_front(outcome):
    """No configuration is both faster and smaller than one of the front; all others are beaten by one of it."""
    front = outcome.pareto_front()
    measure = {id(each): (each.sequences_per_second, each.memory_gib) for each in outcome.kept}
    for each in outcome.kept:
        speed, memory = measure[id(each)]
        beaten = any(
            (a >= speed and b <= memory) and (a, b) != (speed, memory) for a, b in (measure[id(one)] for one in front)
        )
        assert beaten != any(measure[id(one)] == (speed, memory) for one in front)


def test_the_fastest_of_each_schedule(outcome):
    """The first of each in the ranking."""
    best = {each.choice.schedule: each for _, each in outcome.best_of_schedules()}
    for each in outcome.kept:
        assert outcome.kept.index(best[each.choice.schedule]) <= outcome.kept.index(each)


def printed(table, *, plain: bool) -> str:
    console = Console(width=300, no_color=plain, force_terminal=not plain)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables(outcome):
    """Plain text has neither lines nor colours; what is not simulated is marked; empty columns are left out."""
    ranked = list(enumerate(outcome.kept, start=1))
    text = printed(best_table(outcome, ranked[:4], plain=True), plain=True)
    assert text.isascii() and "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == 5 and "~" not in lines[2] and "~" in lines[3]
    flush = [row for row in ranked if row[1].choice.schedule == "flush"]
    assert " v " not in printed(best_table(outcome, flush, plain=True), plain=True).splitlines()[0]
    rich = list(enumerate(priced(outcome, MODEL, MACHINES).kept, start=1))
    head, *rows = printed(best_table(outcome, rich, plain=True), plain=True).splitlines()
    assert all(heading in head for heading in ("s (80%)", "days", "cost/M tokens"))
    assert {"not validated" in row for row in rows} == {True, False} and all(" EUR" in row for row in rows)
    pressed = [row for row in ranked if row[1].estimate.under_pressure][:1]
    assert "slowed" in printed(best_table(outcome, pressed, plain=False), plain=False)


def test_reasons_are_counted(outcome):
    """Every rejection is counted once, the commonest kind first, each with an example of it."""
    counted = reasons(outcome.rejected, 1000)
    assert sum(count for _, count in counted) == len(outcome.rejected)
    assert [count for _, count in counted] == sorted((count for _, count in counted), reverse=True)
    said = {each.reason for each in outcome.rejected}
    assert all(text in said for text, _ in counted if not text.startswith("out of memory"))
    assert any(text.startswith("out of memory; the nearest: ") for text, _ in counted)


def test_the_picture(outcome):
    """A collection for each schedule, crosses for what is under pressure, and the front as a line."""
    figure = draw_outcome(outcome, memory_gib=79.25, title="title")
    (axes,) = figure.axes
    drawn = {each.get_gid(): len(each.get_offsets()) for each in axes.collections if each.get_gid()}
    expected: dict = {}
    for each in outcome.kept:
        gid = each.choice.schedule + "!" * each.estimate.under_pressure
        expected[gid] = expected.get(gid, 0) + 1
    assert drawn == expected
    assert any(line.get_gid() == "pareto" and len(line.get_xdata()) for line in axes.lines)
    assert as_png(figure).startswith(b"\x89PNG")
    assert as_svg(figure, salt="a").startswith("<svg")
    ringed = next(line for line in axes.lines if line.get_gid() == "best")
    assert (*ringed.get_xdata(), *ringed.get_ydata()) == (outcome.best.memory_gib, outcome.best.sequences_per_second)
    empty = draw_outcome(Outcome(kept=(), rejected=outcome.rejected), memory_gib=79.25)
    assert as_png(empty)


def test_the_legend_hides_no_point(outcome):
    """It stands below the axes, with an entry for each schedule in a colour of its own, and names the best."""
    figure = draw_outcome(outcome, memory_gib=79.25, title="title")
    as_png(figure)
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_legend() is None and not axes.texts
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0
    assert figure.bbox.containsx(legend.get_window_extent().x0) and figure.bbox.containsx(legend.get_window_extent().x1)
    schedules = {each.choice.schedule for each in outcome.kept}
    entries = {handle.get_label(): handle.get_color() for handle in legend.legend_handles}
    assert schedules < entries.keys() and len({entries[name] for name in schedules}) == len(schedules)
    assert any(label.startswith(f"the fastest: {outcome.best.choice.schedule}, t=") for label in entries)
    shade = next(patch for patch in axes.patches)
    assert all(shade.get_zorder() < each.get_zorder() for each in axes.collections)


def test_a_themed_picture_takes_the_colour_of_the_page(outcome):
    """Nothing is black, and there is no ground, so it can be read on a dark page, too."""
    figure = draw_outcome(outcome, memory_gib=79.25)
    themed, plain = as_svg(figure, salt="a", themed=True), as_svg(figure, salt="a")
    assert "#000000" in plain and "#ffffff" in plain
    assert not {"#000000", "#ffffff"} & {each.lower() for each in re.findall("#[0-9a-fA-F]{6}", themed)}
    assert "currentColor" in themed
