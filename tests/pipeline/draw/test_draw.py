"""Drawings show every computation, step, bubble and border, found in the figure's artists rather than in its pixels."""

import pytest

from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.draw.scene import Scene, cells_of
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import TRANSFERS, WORDS, Kind
from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.memory_curve import MemorySizes


def timeline(name="2bw", num_stages=4, batches=(4, 4, 4), costs=None, **flags):
    return simulate(Schedule.preset(name, num_stages=num_stages, **flags).build(tuple(batches)), costs)


def shapes(axes, gid):
    """How many shapes the collections of a gid have; a final @ stands for any version."""
    chosen = [each for each in axes.collections if (each.get_gid() or "").startswith(gid)]
    return sum(len(each.get_paths()) for each in chosen)


def texts(axes, gid):
    return [text.get_text() for text in axes.texts if text.get_gid() == gid]


def test_every_computation_has_a_cell_with_its_number_and_version():
    """Four stages and twelve microbatches are 48 blue and 48 green cells, each labelled; rows are grey behind."""
    axes = draw_timeline(timeline()).axes[0]
    assert (shapes(axes, "F@"), shapes(axes, "B@")) == (48, 48)
    assert (shapes(axes, "F@0"), shapes(axes, "F@1")) == (32, 16)  # batches 0 and 1 use the initial weights
    assert sorted(map(int, texts(axes, "microbatch"))) == sorted(list(range(12)) * 8)
    assert len(texts(axes, "version")) == 96
    assert shapes(axes, "bubble") == 4


def test_steps_and_borders_are_marked():
    """Each stage has a mark for each optimizer step and a hatched cell for each batch; each batch has a border."""
    axes = draw_timeline(timeline()).axes[0]
    assert shapes(axes, "step") == 12
    assert sorted(texts(axes, "step label")) == ["W1"] * 4 + ["W2"] * 4 + ["W3"] * 4
    assert shapes(axes, "completes") == 12
    assert [line.get_gid() for line in axes.lines] == ["batch"] * 3
    border = axes.lines[2]  # of batch 2, at each stage's first forward with new weights
    assert list(border.get_xdata()[::2]) == [24.0, 25.0, 26.0, 27.0]


def test_transfers_past_other_ranks_are_arcs():
    """Three stages of which the first hands on to both others have four lines a microbatch, and two arcs."""
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 2))
    skips = timeline("flush", 3, batches=(2,), costs=Costs(latency=0.5), edges=edges)
    axes = draw_timeline(skips, lanes=True).axes[0]
    assert shapes(axes, "transfer past ranks") == 2 * 2
    assert shapes(axes, "transfer") == 2 * 2 + 2 * 4


def test_predictions_are_marked():
    """Each stage has a thin mark for each prediction, where a batch begins or could, beside the marks of the steps."""
    predicted = timeline(predict=True)
    figure = draw_timeline(predicted)
    axes = figure.axes[0]
    assert (shapes(axes, "predict"), shapes(axes, "step"), shapes(axes, "hold")) == (12, 12, 0)
    assert sorted(texts(axes, "predict label")) == ["~1"] * 4 + ["~2"] * 4 + ["~3"] * 4
    assert sorted(texts(axes, "step label")) == ["W1"] * 4 + ["W2"] * 4 + ["W3"] * 4
    begins = {(cell.rank, cell.instruction.version): cell.start for cell in cells_of(predicted) if cell.begins_batch}
    for each in Scene(predicted).marks[Kind.PREDICT]:
        assert begins.get((each.rank, each.instruction.version), each.end) == each.end
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "prediction ~n of weights Wn" in entries and "gradients kept" not in entries
    plain = draw_timeline(timeline())
    assert shapes(plain.axes[0], "predict") == 0
    assert not [text for text in plain.legends[0].get_texts() if "prediction" in text.get_text()]


def test_predictions_are_as_wide_as_they_took():
    """Predicting, and keeping gradients for it, is no bubble where it takes time; a mark is thinner than a step's."""
    costs = Costs(predict=0.5, hold=0.25)
    figure = draw_timeline(timeline(num_stages=2, costs=costs, predict=True, provisional_microbatches=1))
    axes = figure.axes[0]
    for gid, seconds in (("predict", 0.5), ("hold", 0.25)):
        (drawn,) = [each for each in axes.collections if each.get_gid() == gid]
        widths = [path.get_extents().width for path in drawn.get_paths()]
        assert widths == pytest.approx([seconds] * 6)
    assert "gradients kept" in [text.get_text() for text in figure.legends[0].get_texts()]
    at_once = draw_timeline(timeline(predict=True)).axes[0]
    of = {each.get_gid(): each for each in at_once.collections}
    widths = {gid: of[gid].get_paths()[0].get_extents().width for gid in ("predict", "step")}
    assert 0 < widths["predict"] < widths["step"]


@pytest.mark.parametrize(
    ("drawn", "gids", "count"),
    [
        (timeline(num_stages=2, predict=True), ("step label", "predict label", "microbatch"), 60),
        (timeline(predict=True), ("step label", "predict label", "microbatch"), 120),
        (timeline("bpipe", 8, (16,), costs=Costs(evict=1.0)), ("EVICT label", "LOAD label"), 30),
    ],
    ids=["versions of two", "versions", "moves"],
)
def test_labels_do_not_cover_each_other(drawn, gids, count):
    """A step and a prediction at one time, and evictions that follow loads at once, are legible both."""
    figure = draw_timeline(drawn)
    axes, renderer = figure.axes[0], figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_gid() in gids]
    assert len(boxes) == count
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_numbers_may_begin_at_one():
    """As the figures of PipeDream-2BW do."""
    axes = draw_timeline(timeline(), one_based=True).axes[0]
    assert {int(text) for text in texts(axes, "microbatch")} == set(range(1, 13))


def test_a_batch_of_one_microbatch_has_no_borders():
    """PipeDream updates after every microbatch: marks at every cell would say nothing."""
    axes = draw_timeline(timeline("pipedream", batches=(1,) * 8)).axes[0]
    assert (shapes(axes, "F@"), shapes(axes, "completes"), len(axes.lines)) == (32, 0, 0)


def test_plan_and_measurement_share_one_scale():
    """Two timelines give two panels, named, with the same limits; each may have its saved microbatches below."""
    planned = timeline().named("planned")
    measured = timeline(costs=Costs(forward=1.1, backward=2.2)).shifted(1e9).named("measured")
    figure = draw_timeline([planned, measured], saved_microbatches=True)
    assert len(figure.axes) == 4
    assert all(axes.get_xlim() == (0.0, pytest.approx(49.5)) for axes in figure.axes)
    assert [figure.axes[index].get_title(loc="left") for index in (0, 2)] == ["planned", "measured"]
    assert [text.strip() for text in texts(figure.axes[1], "peak")] == ["4", "3", "2", "1"]


def test_moves_are_arrows_between_a_pair():
    """Figure 4: stage 0 evicts 1, 3 and 5 to stage 3 and loads them; below, no stage saves more than 3."""
    moving = timeline("bpipe", batches=(8,), costs=Costs(evict=0.5))
    figure = draw_timeline(moving, saved_microbatches=True)
    axes = figure.axes[0]
    for kind, rows in (("EVICT", (0.46, 2.54)), ("LOAD", (2.54, 0.46))):
        (lines,) = [each for each in axes.collections if each.get_gid() == kind]
        segments = [segment.tolist() for segment in lines.get_segments()]
        assert all(tuple(row for _, row in segment) == pytest.approx(rows) for segment in segments)
        assert [end - start for (start, _), (end, _) in segments] == [0.5] * 3
        assert texts(axes, f"{kind} label") == ["1", "3", "5"]
    assert [text.strip() for text in texts(figure.axes[1], "peak")] == ["3", "3", "2", "3"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"eviction to the pair stage", "load from the pair stage"} <= set(names)
    assert shapes(draw_timeline(timeline("flush", batches=(8,))).axes[0], "EVICT") == 0


@pytest.mark.parametrize(("placed", "first"), [((0, 1, 2, 3, 4), 1), ((0, 0, 1, 2, 3), 0)])
def test_behind_a_frozen_stage_arrows_go_between_those_that_train(placed, first):
    """Figure 4 behind a frozen stage: that one saves nothing, and its forwards on the evictor's rank have no arrows."""
    moving = timeline("bpipe", 5, (8,), Costs(evict=0.5), num_frozen=1, rank_of_stage=placed)
    figure = draw_timeline(moving, saved_microbatches=True)
    (lines,) = [each for each in figure.axes[0].collections if each.get_gid() == "EVICT"]
    rows = [[row for _, row in segment.tolist()] for segment in lines.get_segments()]
    assert rows == [pytest.approx([first + 0.46, first + 2.54])] * 3
    assert [text.strip() for text in texts(figure.axes[1], "peak")] == ["0"] * first + ["3", "3", "2", "3"]
    lines = timeline_text(moving, width=400).plain.splitlines()
    assert [place for place, line in enumerate(lines) if line.split()[0] == "moves"] == [first + 1]


def test_saved_microbatches_of_a_rank_are_those_of_its_stages():
    """Appendix A's bound is a rank's: no row of an interleaved timeline is higher than 9; each stage has a shade."""
    balanced = timeline("interleaved", 8, (8,), num_virtual_stages=2, balance=True)
    axes = draw_timeline(balanced, saved_microbatches=True).axes[1]
    assert [text.strip() for text in texts(axes, "peak")] == ["9", "9", "7", "7"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    assert len([each for each in axes.collections if each.get_gid() == "saved"]) == 8


@pytest.mark.full
def test_recompute_and_lanes():
    """Recomputations have cells, transfers and reductions that take time have lanes, and only then."""
    plain = draw_timeline(timeline(recompute=True), lanes=True).axes[0]
    assert (shapes(plain, "R@"), shapes(plain, "transfer"), shapes(plain, "reduction")) == (48, 0, 0)
    slow = draw_timeline(timeline(costs=Costs(latency=0.1, reduce_norm=0.5)), lanes=True).axes[0]
    assert (shapes(slow, "transfer"), shapes(slow, "reduction")) == (2 * 3 * 12, 3 * 4)


def test_the_critical_path_is_framed_and_connected():
    """The path of the first timeline only: a frame around each computation on it, a line to the next rank's."""
    costs = Costs(latency=0.25)
    plan = timeline("flush", batches=(4,), costs=costs)
    path = critical_path(plan, costs)
    figure = draw_timeline([plan, timeline("flush", batches=(4,))], critical_path=path, time_scale=10.0)
    first, second = figure.axes
    transfers = [span for span in path if span.instruction.kind in TRANSFERS]
    assert shapes(first, "critical") - shapes(first, "critical wait") == len(path) - len(transfers) == 14
    (lines,) = [each for each in first.collections if each.get_gid() == "critical wait"]
    assert lines.get_segments()[0].tolist() == [[10.0, 0.0], [12.5, 1.0]]
    assert len(lines.get_segments()) == len(transfers) == 10
    assert shapes(second, "critical") == 0
    assert "critical path" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_memory_stands_below_each_timeline():
    """Stacked by what holds it, on one scale, with each rank's peak; what nobody holds is in no legend."""
    sizes = MemorySizes(activations=2.0, weights=1.0, gradients=1.0)
    figure = draw_timeline([timeline(), timeline("flush")], memory=(sizes, TWO_BW), saved_microbatches=True)
    assert len(figure.axes) == 6
    axes = figure.axes[2]
    assert [text.strip() for text in texts(axes, "peak memory")] == ["12", "10", "8", "6"]
    drawn = {each.get_gid() for each in axes.collections}
    assert drawn == {"memory weights", "memory gradients", "memory activations"}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"weights", "gradients", "activations"} <= set(names) and not {"optimizer", "transfers"} & set(names)


def test_labels_stay_inside_their_cells():
    """No number is wider than its cell, at 4 stages and at 12."""
    for num_stages in (4, 12):
        line = timeline(num_stages=num_stages, batches=(num_stages,) * 2)
        figure = draw_timeline(line)
        axes, renderer = figure.axes[0], figure.canvas.get_renderer()
        lengths = {}
        for cell in cells_of(line):
            lengths[cell.rank, round((cell.start + cell.end) / 2, 6)] = cell.end - cell.start
        for text in axes.texts:
            if text.get_gid() == "microbatch":
                x, y = text.get_position()
                box = text.get_window_extent(renderer).transformed(axes.transData.inverted())
                assert box.width <= lengths[round(y), round(x, 6)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_suffix_chooses_the_format(tmp_path, suffix, magic):
    """PNG, SVG and PDF are written under the given name."""
    path = tmp_path / f"timeline{suffix}"
    draw_timeline(timeline(), path, title="2bw")
    assert path.read_bytes().startswith(magic)


def test_the_same_drawing_gives_the_same_bytes(tmp_path):
    """Pictures under version control change only when what they show does."""
    for suffix in (".png", ".svg"):
        for name in "ab":
            draw_timeline(timeline(batches=(4,)), tmp_path / f"{name}{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path):
    """No timeline, no time, and no image format: a sentence each."""
    for nothing in ([], timeline(costs=Costs(forward=0, backward=0))):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw_timeline(nothing)
    with pytest.raises(ValueError, match=r"timeline\.txt is no image"):
        draw_timeline(timeline(), tmp_path / "timeline.txt")


def test_text_shows_the_same():
    """One line per stage: cells in proportion to their time, dots for bubbles, # where an optimizer step stands."""
    text = timeline_text(timeline("flush", 2, (2, 2)), width=200).plain
    assert text.splitlines() == [
        "stage 0 |F0|F1......|B0---...|B1---#F2|F3......|B2---...|B3---#",
        "stage 1 ...|F0|B0---|F1|B1---......#..|F2|B2---|F3|B3---......#",
    ]


def test_text_shows_moves():
    """Below the row of an evictor: what leaves and what comes back, from when to when; others have no second line."""
    lines = timeline_text(timeline("bpipe", batches=(8,), costs=Costs(evict=0.9)), width=200).plain.splitlines()
    assert [line[:7] for line in lines] == ["stage 0", "  moves", "stage 1", "stage 2", "stage 3"]
    computations, moves = lines[:2]
    assert moves[8:].split() == [">1-", ">3-", "<1-", ">5-", "<3-", "<5-"]
    assert [computations[moves.index(word) :][:3] for word in (">1", "<1", ">5", "<3")] == ["|F2", "|F4", "|B2", "|F6"]
    at_once = timeline_text(timeline("interleaved", 8, (8,), num_virtual_stages=2, balance=True), width=400).plain
    assert at_once.splitlines()[1].split() == ["moves", ">0:3", ">0:4", "<0:3", "<0:4"]


def test_text_shows_predictions():
    """Below each row, which version is predicted, from when to when; # is a step there, too."""
    lines = timeline_text(timeline("2bw", 2, (2, 2), predict=True), width=200).plain.splitlines()
    assert [line.rstrip() for line in lines] == [
        "stage 0 |F0|F1......|B0---|F2|B1---|F3|B2---#..|B3---#",
        "weights                   ~1                ~2",
        "stage 1 ...|F0|B0---|F1|B1---|F2|B2---|F3|B3---#.....#",
        "weights                      ~1                ~2",
    ]
    slow = timeline_text(timeline("2bw", 2, (2, 2), Costs(predict=2.0), predict=True), width=200).plain
    assert slow.splitlines()[1].split() == ["weights", "~1----", "~2----"]


def test_versions_that_are_predicted_ahead_say_how_far():
    """With the version that they start from; backwards have theirs as it is."""
    choices = {"order": "async", "recompute": True, "num_stages": 2}
    program = Schedule(weights="stale-predicted", **choices).build((1,) * 4)
    drawn = timeline_text(simulate(program, Costs(forward=3, backward=3, recompute=3)), width=200, versions=True).plain
    assert "F2@1+1" in drawn and "B2@2-" in drawn and "B2@2+" not in drawn
    assert "+" not in drawn.splitlines()[1]
    program = Schedule(weights="stale-provisional", **choices).build((2,) * 3)
    drawn = timeline_text(simulate(program, Costs(forward=6, backward=6, recompute=6)), width=300, versions=True).plain
    assert "F2@0~1" in drawn and drawn.count("~1") == 2


def test_long_text_goes_on_in_blocks():
    """No line is longer than the terminal; every cell is there."""
    lines = timeline_text(timeline(), width=60, one_based=True, versions=True).plain.splitlines()
    assert max(map(len, lines)) <= 60
    joined = "".join(line[len("stage 0 ") :] for line in lines if line.startswith("stage 0"))
    assert all(f"F{microbatch}@" in joined for microbatch in range(1, 13))
    assert joined.count("#") == len([step for step in Scene(timeline()).marks[Kind.STEP] if step.rank == 0])


def test_text_that_helps_nobody_is_refused():
    """Lines of tens of thousands of characters are no drawing."""
    for costs in (Costs(forward=0.001, backward=100.0), Costs(forward=1e-320)):
        with pytest.raises(ValueError, match="draw fewer batches, or a picture"):
            timeline_text(timeline(costs=costs))


def test_stages_of_a_rank_differ_in_shade():
    """With several stages on a rank, its first one is dark and its last one light, whatever weights they have."""
    interleaved = timeline("interleaved", 4, (2, 2), num_virtual_stages=2)
    cells = cells_of(interleaved)
    assert {(c.instruction.stage, c.chunk, c.shade) for c in cells} == {(0, 0, 1), (1, 0, 1), (2, 1, 0), (3, 1, 0)}
    figure = draw_timeline([interleaved, timeline("flush", 2, (2, 2))])
    colours = {tuple(each.get_facecolor()[0]) for each in figure.axes[0].collections if each.get_gid() == "F@0"}
    assert len(colours) == 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    (drawn,) = figure.legends
    entries = [text.get_text() for text in drawn.get_texts()]
    assert entries[:2] == ["forward, first to last stage of the rank", "forward with weights v0, v1"]
    text = timeline_text(interleaved, width=200).plain.splitlines()
    assert text[0].startswith("rank 0 |0F0|0F1|2F0|2F1")


def test_colours_are_known():
    """Every shade that a word may have is a colour that rich can print, and one of a picture."""
    from matplotlib.colors import is_color_like
    from rich.color import Color

    from megatron.pipeline.draw.colours import COLOURS

    assert {word.colour for word in WORDS.values()} <= COLOURS.keys()
    for of_pictures, of_terminals in COLOURS.values():
        assert all(map(is_color_like, of_pictures)) and len(of_pictures) == len(of_terminals)
        assert all(Color.parse(shade).number is not None for shade in of_terminals)
