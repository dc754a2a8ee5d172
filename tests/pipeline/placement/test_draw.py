"""Pictures and tables of a placement."""

import pytest

from megatron.pipeline.placement.cost import Level
from megatron.pipeline.placement.mapping import Degrees, pair_adjacent, standard
from megatron.pipeline.placement.placement_report import draw_placement, label, make_report
from megatron.pipeline.placement.traffic import TrafficKind
from tests.pipeline.placement.examples import machine, traffic_of

DEGREES = Degrees(tensor=1, pipeline=16, data=1)


def lines(figure, gid):
    return [patch for patch in figure.axes[0].patches if patch.get_gid() == gid]


def test_pairs_are_drawn_where_they_are(tmp_path):
    """Figure 5: eight lines that cross under standard, eight inside nodes under pair-adjacent; PNG and SVG."""
    crossing = draw_placement(
        make_report("standard", standard(DEGREES), DEGREES, machine(8, 8), evictors=range(7)), tmp_path / "a.png"
    )
    inside = draw_placement(
        make_report("x", pair_adjacent(DEGREES), DEGREES, machine(8, 8), evictors=range(7)), tmp_path / "b.svg"
    )
    assert (len(lines(crossing, "pair-crossing")), len(lines(crossing, "pair"))) == (8, 0)
    assert (len(lines(inside, "pair-crossing")), len(lines(inside, "pair"))) == (0, 8)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "b.svg").read_text()
    assert "stage 15" in "".join(text.get_text() + ";" for text in inside.axes[0].texts) and "<svg" in written


def test_bars_are_as_long_as_the_transfers_take():
    """One bar for each kind and level, in milliseconds of the busiest link."""
    topology, traffic = machine(8, 8), traffic_of(DEGREES)
    report = make_report("standard", standard(DEGREES), DEGREES, topology, evictors=range(7), traffic=traffic)
    bars = {bar.get_gid(): bar.get_width() for bar in draw_placement(report).axes[1].patches}
    cost = report.costs["standard"]
    assert set(bars) == {
        f"{kind.value}, {level.value}"
        for kind in (TrafficKind.PIPELINE, TrafficKind.PAIR, TrafficKind.EMBEDDING)
        for level in Level
    }
    for kind in (TrafficKind.PIPELINE, TrafficKind.PAIR, TrafficKind.EMBEDDING):
        for level in Level:
            assert bars[f"{kind.value}, {level.value}"] == pytest.approx(1e3 * cost.at(kind, level).busiest_seconds)
    assert bars["pair, between nodes"] > 0 == bars["pair, within a node"]


def test_what_cannot_be_drawn():
    """Too many nodes, and names that are no images, in one sentence each."""
    degrees = Degrees(tensor=1, pipeline=1, data=65)
    with pytest.raises(ValueError, match="65 nodes are too many"):
        draw_placement(make_report("standard", standard(degrees), degrees, machine(*[1] * 65), evictors=()))
    with pytest.raises(ValueError, match=r"map\.txt is no image"):
        draw_placement(make_report("standard", standard(DEGREES), DEGREES, machine(8, 8), evictors=range(7)), "map.txt")


def test_labels_leave_out_what_has_one_value():
    """Figure 6 names PP, DP and TP; Figure 5 needs only the stage."""
    assert label(5, DEGREES) == "5: PP 5"
    assert label(13, Degrees(tensor=2, pipeline=4, data=2)) == "13: PP 3 DP 0 TP 1"
