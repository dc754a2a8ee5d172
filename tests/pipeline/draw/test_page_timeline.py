"""Timelines for pages: every computation is a box at its place, little is drawn twice, and what is not is said."""

import re
from xml.etree import ElementTree

import pytest

from megatron.pipeline.draw import legend
from megatron.pipeline.draw.cells import cells_of, steps_of
from megatron.pipeline.draw.page_timeline import MOST_ROWS, page_timeline
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="2bw", num_stages=4, batches=(4, 4, 4), costs=None, **flags):
    return simulate(Schedule.preset(name, num_stages=num_stages, **flags).build(tuple(batches)), costs)


def elements(drawn, tag):
    return list(ElementTree.fromstring(drawn.svg).iter(f"{SVG}{tag}"))


def boxes(drawn, colour):
    """(start, end, height) of each stroke of a colour, in the picture's units."""
    found, x, y = [], 0, 0
    for path in elements(drawn, "path"):
        if path.get("stroke") != colour:
            continue
        x = y = 0
        for dx, dy, length in re.findall(r"m(-?\d+) (-?\d+)h(\d+)", path.get("d")):
            x, y = x + int(dx), y + int(dy)
            found.append((x, x + int(length), y))
            x += int(length)
    return found


def test_every_computation_is_a_box_at_its_place():
    """Of the colour of its kind and version; their starts stand to one another as the times do, row under row."""
    of_batches = timeline()
    drawn = page_timeline(of_batches, name="2bw")
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for version in (0, 1):
            cells = [cell for cell in cells_of(of_batches) if (cell.kind, cell.version) == (kind, version)]
            found = boxes(drawn, legend.shade_of(kind, version))
            assert len(found) == len(cells) == {0: 32, 1: 16}[version]
            scale = (found[-1][0] - found[0][0]) / (cells[-1].start - cells[0].start)
            for cell, (start, end, _) in zip(cells, found, strict=True):
                assert start - found[0][0] == pytest.approx((cell.start - cells[0].start) * scale, abs=2)
                assert end - start == pytest.approx((cell.end - cell.start) * scale, abs=4)
            heights = sorted({height for *_, height in found})
            assert len(heights) == 4 and [heights.index(height) for *_, height in found] == [c.rank for c in cells]
    assert len(boxes(drawn, legend.STEP)) == len(steps_of(of_batches)) == 12
    assert len(boxes(drawn, legend.HATCH)) == 12
    assert len(elements(drawn, "polyline")) == 3


def test_what_has_room_is_written():
    """Each box's microbatch, each row's name, which batch begins and which weights the first rank makes."""
    texts = [text.text for text in elements(page_timeline(timeline(), name="2bw"), "text")]
    for microbatch in range(12):
        assert texts.count(str(microbatch)) >= 2 * 4
    assert {f"stage {stage}" for stage in range(4)} | {"batch 0", "batch 1", "W1", "W2", "W3", "seconds"} <= set(texts)
    assert page_timeline(timeline(), name="2bw").left_out == ()


def test_boxes_that_are_too_narrow_are_drawn_together():
    """A thousand forwards in a row are one stroke from the first to the last, and the caption says what is missing."""
    long = timeline("gpipe", 2, (1000,))
    drawn = page_timeline(long, name="gpipe")
    first = boxes(drawn, legend.shade_of(Kind.FORWARD, 0))[0]
    forwards = [cell for cell in cells_of(long) if cell.rank == 0 and cell.kind is Kind.FORWARD]
    axis = int(ElementTree.fromstring(drawn.svg).get("viewBox").split()[2])
    assert len(boxes(drawn, legend.shade_of(Kind.FORWARD, 0))) == 2
    assert (first[1] - first[0]) / axis == pytest.approx(len(forwards) / long.end, rel=0.1)
    assert "microbatches' numbers" in drawn.left_out and len(drawn.svg) < 20_000


@pytest.mark.parametrize(("num_stages", "size"), [(64, 64), (200, 40)], ids=str)
def test_a_deep_pipeline_is_small(num_stages, size):
    """A few bytes for each computation; of more ranks than rows only some are drawn, and that is said."""
    deep = timeline("flush", num_stages, (size,))
    drawn = page_timeline(deep, name="flush")
    rows = len({height for *_, height in boxes(drawn, legend.shade_of(Kind.BACKWARD, 0))})
    assert rows <= MOST_ROWS and (rows == num_stages) == (num_stages <= MOST_ROWS)
    assert ("all but every 4. row" in drawn.left_out) == (num_stages > MOST_ROWS)
    assert len(drawn.svg) < 14 * 2 * rows * size + 30_000


def test_moves_are_lines_as_long_as_they_are_few():
    """An eviction and a load for each; of hundreds none, and then neither a sign nor silence."""
    costs = Costs(forward=1.0, backward=2.0, evict=0.5)
    few = timeline("bpipe", 8, (10,), costs)
    drawn = page_timeline(few, name="bpipe")
    kinds = [span.instruction.kind for span in few.spans]
    for kind in (Kind.EVICT, Kind.LOAD):
        paths = [each for each in elements(drawn, "path") if each.get("stroke") == legend.MOVE_COLOURS[kind.row.saved]]
        assert sum(path.get("d").count("L") for path in paths) == kinds.count(kind) > 0
        assert (legend.MOVE_COLOURS[kind.row.saved], kind.row.name) in drawn.signs
    many = page_timeline(timeline("bpipe", 16, (200,), costs), name="bpipe")
    assert any("moves of saved activations" in each for each in many.left_out)
    assert not {colour for colour, _ in many.signs} & set(legend.MOVE_COLOURS.values())


def test_signs_explain_what_is_drawn():
    """Each colour of the picture, and no other; names are escaped."""
    for name, flags in (("2bw", {}), ("interleaved", {"num_virtual_stages": 2}), ("zb-h1", {})):
        drawn = page_timeline(timeline(name, 8 if flags else 4, (4, 4), **flags), name='a "name" <b>')
        assert 'aria-label="a &quot;name&quot; &lt;b&gt;"' in drawn.svg
        strokes = {path.get("stroke") for path in elements(drawn, "path")} - {"currentColor"}
        explained = {colour for colour, _ in drawn.signs}
        assert explained <= strokes
        chunks = {colour for shades in legend.SHADES.values() for colour in shades} if flags else set()
        assert strokes - chunks <= explained


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="there is nothing to draw; give a timeline in which a computation takes time"):
        page_timeline(timeline(costs=Costs(forward=0, backward=0)), name="nothing")
