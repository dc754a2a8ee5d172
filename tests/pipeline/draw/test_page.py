"""Timelines for pages: every computation is a box at its place, little is drawn twice, and what is not is said."""

import re
from xml.etree import ElementTree

import pytest

from megatron.pipeline.draw import colours
from megatron.pipeline.draw.page import MOST_ROWS, page_timeline
from megatron.pipeline.draw.scene import Sign, cells_of
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
            cells = [
                cell
                for cell in cells_of(of_batches)
                if (cell.instruction.kind, cell.instruction.version) == (kind, version)
            ]
            found = boxes(drawn, colours.colour_of(kind, version))
            assert len(found) == len(cells) == {0: 32, 1: 16}[version]
            scale = (found[-1][0] - found[0][0]) / (cells[-1].start - cells[0].start)
            for cell, (start, end, _) in zip(cells, found, strict=True):
                assert start - found[0][0] == pytest.approx((cell.start - cells[0].start) * scale, abs=2)
                assert end - start == pytest.approx((cell.end - cell.start) * scale, abs=4)
            heights = sorted({height for *_, height in found})
            assert len(heights) == 4 and [heights.index(height) for *_, height in found] == [c.rank for c in cells]
    assert len(boxes(drawn, colours.colour_of(Kind.STEP))) == 12
    assert len(boxes(drawn, colours.HATCH)) == 12
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
    first = boxes(drawn, colours.colour_of(Kind.FORWARD, 0))[0]
    forwards = [cell for cell in cells_of(long) if cell.rank == 0 and cell.instruction.kind is Kind.FORWARD]
    axis = int(ElementTree.fromstring(drawn.svg).get("viewBox").split()[2])
    assert len(boxes(drawn, colours.colour_of(Kind.FORWARD, 0))) == 2
    assert (first[1] - first[0]) / axis == pytest.approx(len(forwards) / long.end, rel=0.1)
    assert "microbatches' numbers" in drawn.left_out and len(drawn.svg) < 20_000


@pytest.mark.parametrize(("num_stages", "size"), [(64, 24), (200, 12)], ids=str)
def test_a_deep_pipeline_is_small(num_stages, size):
    """A few bytes for each computation; of more ranks than rows only some are drawn, and that is said."""
    deep = timeline("flush", num_stages, (size,))
    drawn = page_timeline(deep, name="flush")
    rows = len({height for *_, height in boxes(drawn, colours.colour_of(Kind.BACKWARD, 0))})
    assert rows <= MOST_ROWS and (rows == num_stages) == (num_stages <= MOST_ROWS)
    assert ("3 of every 4 rows" in drawn.left_out) == (num_stages > MOST_ROWS)
    assert len(drawn.svg) < 14 * 2 * rows * size + 30_000


@pytest.mark.full
def test_moves_are_lines_as_long_as_they_are_few():
    """An eviction and a load for each; of hundreds none, and then neither a sign nor silence."""
    costs = Costs(forward=1.0, backward=2.0, evict=0.5)
    few = timeline("bpipe", 8, (10,), costs)
    drawn = page_timeline(few, name="bpipe")
    kinds = [span.instruction.kind for span in few.spans]
    for kind in (Kind.EVICT, Kind.LOAD):
        paths = [each for each in elements(drawn, "path") if each.get("stroke") == colours.colour_of(kind)]
        assert sum(path.get("d").count("L") for path in paths) == kinds.count(kind) > 0
        assert Sign((colours.colour_of(kind),), kind.row.name, "line") in drawn.signs
    many = page_timeline(timeline("bpipe", 16, (200,), costs), name="bpipe")
    assert any("moves of saved activations" in each for each in many.left_out)
    assert not {sign.meaning for sign in many.signs} & {Kind.EVICT.row.name, Kind.LOAD.row.name}


def test_signs_explain_what_is_drawn():
    """Each colour of the picture, and no other; names are escaped."""
    for name, flags in (("2bw", {}), ("interleaved", {"num_virtual_stages": 2}), ("zb-h1", {})):
        drawn = page_timeline(timeline(name, 8 if flags else 4, (4, 4), **flags), name='a "name" <b>')
        assert 'aria-label="a &quot;name&quot; &lt;b&gt;"' in drawn.svg
        strokes = {path.get("stroke") for path in elements(drawn, "path")} - {"currentColor"}
        assert {colour for sign in drawn.signs for colour in sign.colours} == strokes


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="there is nothing to draw; give a timeline in which a computation takes time"):
        page_timeline(timeline(costs=Costs(forward=0, backward=0)), name="nothing")


def test_a_window_shows_what_is_in_it():
    """From its start, which is zero on the axis, on a scale that is given: boxes that cross its ends are cut there."""
    whole = timeline(batches=(8, 8, 8, 8))
    start = whole.batch_starts()[2]
    drawn = page_timeline(whole, name="2bw", window=(start, start + 10.0), scale=50.0)
    inside = [cell for cell in cells_of(whole) if cell.end > start and cell.start < start + 10.0]
    strokes = [each for kind in (Kind.FORWARD, Kind.BACKWARD) for version in range(3)
               for each in boxes(drawn, colours.colour_of(kind, version))]  # fmt: skip
    assert len(strokes) == len(inside) < len(cells_of(whole))
    left, right = min(start for start, *_ in strokes), max(end for _, end, _ in strokes)
    assert right - left == pytest.approx(10.0 * 50 * 4, abs=4)
    texts = [text.text for text in elements(drawn, "text")]
    assert "batch 2" in texts and "batch 0" not in texts and texts.count("0") == 1  # of the axis
    assert {str(cell.instruction.microbatch) for cell in inside if cell.end - cell.start > 1} <= set(texts)
    assert not any("numbers" in each for each in drawn.left_out)


def test_numbers_of_any_length_have_room():
    """Beyond 9 and beyond 99, as far as the picture may be as wide as that takes."""
    for size in (12, 110):
        whole = timeline("flush", 2, (size,))
        drawn = page_timeline(whole, name="flush", window=(whole.end - 30, whole.end))
        texts = [text.text for text in elements(drawn, "text")]
        assert drawn.left_out == () and all(texts.count(str(each)) >= 4 for each in range(size - 5, size))


def test_what_is_under_the_pointer():
    """Of each row its boxes, with kind, stage, microbatch, version and place: where that is asked for, unless there
    are too many."""
    of_batches = timeline()
    drawn = page_timeline(of_batches, name="2bw", hovers=True)
    root = ElementTree.fromstring(drawn.svg)
    kinds, rows = root.get("data-kinds").split(","), root.get("data-rows").split("|")
    assert len(rows) == 4 and "data-rows" not in page_timeline(of_batches, name="2bw").svg
    left, second = float(root.get("data-left")), float(root.get("data-second"))
    for rank, row in enumerate(rows):
        cells, x = [cell for cell in cells_of(of_batches) if cell.rank == rank], 0
        for cell, text in zip(cells, row.split(";"), strict=True):
            kind, stage, microbatch, version, distance, width = text.split(",")
            x += int(distance)
            assert (kinds[int(kind)], stage, microbatch, version) == (
                cell.instruction.kind.row.name, str(cell.instruction.stage), str(cell.instruction.microbatch),
                str(cell.instruction.version),
            )  # fmt: skip
            assert (x - left) / second == pytest.approx(cell.start, abs=0.05)
            assert int(width) / second == pytest.approx(cell.end - cell.start, abs=0.05)
    many = page_timeline(timeline("gpipe", 2, (2000,)), name="gpipe", hovers=True)
    assert "what is under the pointer" in many.left_out and "data-rows" not in many.svg
