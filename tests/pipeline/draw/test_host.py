"""Drawings of weights on the host: lanes and slots, in pictures and in text, and the memory over time."""

from itertools import pairwise

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.draw.panels import HeldTensors, accumulated_of, residents_of
from megatron.pipeline.draw.scene import extent, has_host
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from tests.pipeline.check.hosted import hosted
from tests.pipeline.draw.test_draw import shapes, texts

COSTS = Costs(fetch=1, store=2, update=3)


def timeline(p: int, v: int, *batches: int, costs: Costs = COSTS, **flags: object):
    return simulate(hosted(p, v, **flags).build(batches), costs)


def test_lanes_and_slots_have_panels_of_their_own():
    """Each word that takes time is a bar in its lane, with its stage; each stay of a stage one in a slot."""
    _, lanes, _, slots = draw_timeline(timeline(2, 3, 2), lanes=True, saved_microbatches=True).axes
    assert [shapes(lanes, gid) for gid in ("host to device", "device to host", "host optimizer")] == [8, 6, 6]
    assert sorted(map(int, texts(lanes, "stage"))) == sorted([*range(6)] * 3 + [0, 1])
    assert [label.get_text() for label in lanes.get_yticklabels()] == [
        "rank 0: to device", "to host", "optimizer", "rank 1: to device", "to host", "optimizer",
    ]  # fmt: skip
    assert (shapes(slots, "resident"), shapes(slots, "fetched")) == (8, 8)
    assert (shapes(slots, "accumulated"), shapes(slots, "stored")) == (6, 6)
    assert [label.get_text() for label in slots.get_yticklabels()] == [
        *("rank 0: slot 0", "slot 1", "gradients 0", "gradients 1"),
        *("rank 1: slot 0", "slot 1", "gradients 0", "gradients 1"),
    ]


def test_they_are_there_where_they_are_asked_for():
    """And where weights live on the host: elsewhere a drawing is what it was."""
    assert len(draw_timeline(timeline(1, 3, 2)).axes) == 1
    assert len(draw_timeline(timeline(1, 3, 2), lanes=True).axes) == 2
    flush = simulate(Schedule.preset("flush", num_stages=2).build((2,)))
    assert not has_host(flush) and extent(flush) == (flush.start, flush.end)
    assert len(draw_timeline(flush, lanes=True, saved_microbatches=True).axes) == 2
    figure = draw_timeline([timeline(1, 3, 2).named("a"), flush.named("b")], lanes=True, saved_microbatches=True)
    assert len(figure.axes) == 8


def test_slots_by_hand():
    """Two slots, three stages: the second one stays over the turn."""
    assert residents_of(timeline(1, 3, 1)) == [  # rank, slot, stage; from, fetched, until
        HeldTensors(0, 0, 0, 0.0, 1.0, 2.0),
        HeldTensors(0, 0, 2, 2.0, 3.0, 6.0),
        HeldTensors(0, 1, 1, 1.0, 2.0, 9.0),
        HeldTensors(0, 0, 0, 6.0, 7.0, 12.0),
    ]


def test_gradient_buffers_by_hand():
    """Two buffers, three stages: each takes the one that was given back first, and none before it is free."""
    one = timeline(1, 3, 1)
    assert accumulated_of(one) == [  # rank, buffer, stage; from its backward on, when it begins to leave and has left
        HeldTensors(0, 0, 2, 4.0, 6.0, 8.0),
        HeldTensors(0, 1, 1, 7.0, 9.0, 11.0),
        HeldTensors(0, 0, 0, 10.0, 12.0, 14.0),
    ]
    slow = accumulated_of(timeline(1, 5, 2, 2, costs=Costs(store=9)))
    assert len(slow) == 10
    for buffer in (0, 1):
        times = [(each.start, each.end) for each in slow if each.line == buffer]
        assert all(end <= start for (_, end), (start, _) in pairwise(times)) and len(times) == 5


def test_part_of_a_run_shows_the_weights_of_its_own_batches():
    """Not those that are fetched for the next one."""
    part = timeline(1, 3, 2, 2, 2).of_batches(1, 1)
    assert {span.instruction.version for span in part.spans if span.instruction.kind is Kind.FETCH} == {1}
    assert len(residents_of(part)) == 2 * 3 - 2 and len(accumulated_of(part)) == 3


def test_the_picture_begins_with_the_first_fetch_and_ends_with_the_last_update():
    """So the axis holds all that is drawn, and a path lies on the same scale."""
    one = timeline(1, 3, 2)
    first, last = extent(one)
    assert (first, last) == (0, max(max(ends) for ends in one.ends)) and last > one.end
    axes = draw_timeline(one, critical_path=critical_path(one, COSTS)).axes[0]
    assert axes.get_xlim() == (0, last)
    frames = [each for each in axes.collections if each.get_gid() == "critical"]
    assert frames[0].get_paths()[0].vertices[0][0] == one.start


def test_a_legend_names_what_takes_time():
    """Words without time are not drawn, and not explained."""

    def names(costs: Costs) -> set[str]:
        figure = draw_timeline(timeline(1, 3, 2, costs=costs), lanes=True)
        return {text.get_text() for text in figure.legends[0].get_texts()}

    assert {"weights fetched", "gradients stored", "update on the host"} <= names(COSTS)
    assert not {"gradients stored", "update on the host"} & names(Costs(fetch=1))


def test_text_has_a_line_for_each_lane():
    """With the stage of each word, under the computations that it runs beside."""
    text = timeline_text(timeline(1, 2, 1, costs=Costs(fetch=1, update=2)), width=100).plain
    assert [line.rstrip() for line in text.splitlines()] == [
        "rank 0         ....|0F0|1F0|1B0----|0R0|0B0----#................",
        "host to device |0--|1--",
        "host optimizer                                 |0------|1------",
    ]
    assert len(timeline_text(timeline(1, 2, 1, costs=Costs())).plain.splitlines()) == 1


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_memory_does_not_grow_with_depth(update: str):
    """Weights of two neighbours are held and two buffers of gradients; boundaries as the checker counts them."""
    peaks = {}
    for v in (4, 8, 16):
        sizes = MemorySizes(weights=tuple(range(1, v + 1)), gradients=100, optimizer=1000, activations=1)
        built = hosted(1, v, update=update).build((3, 3))
        curve = memory_curves(simulate(built, Costs(fetch=1, store=20, update=3)), sizes, FLUSH)[0]
        assert max(curve.parts["weights"]) == 2 * v - 1  # of the last two stages, the largest pair
        assert max(curve.parts["optimizer"]) == 0
        assert max(curve.parts["activations"]) == check(built).peak_saved_on_rank[0] == 3 * (v - 1) + 1
        assert curve.parts["weights"][-1] == curve.parts["gradients"][-1] == 0
        peaks[v] = max(curve.parts["gradients"])
    assert set(peaks.values()) == {200}


def test_inputs_that_leave_are_drawn_and_explained():
    """In the same lanes, in a colour of their own; a critical path leads through them where they are waited for."""
    costs = Costs(fetch=1, store=2, update=3, offload=4)
    one = timeline(1, 4, 2, costs=costs, stash="host")
    figure = draw_timeline(one, lanes=True, saved_microbatches=True)
    lanes = figure.axes[1]
    assert [shapes(lanes, gid) for gid in ("host to device", "device to host")] == [2 * 4 - 2 + 2 * 2, 4 + 2 * 2]
    (bars,) = (each for each in lanes.collections if each.get_gid() == "device to host")
    assert len({tuple(colour) for colour in bars.get_facecolors()}) == 2
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"input to the host", "input back from the host"} <= names
    assert Kind.OFFLOAD in {span.instruction.kind for span in critical_path(one, costs)}


@pytest.mark.parametrize("v", [4, 9])
def test_memory_of_inputs_on_the_host(v: int):
    """Two or three inputs of the batch that each stage would keep are there; the checker's count bounds what is
    drawn."""
    program = hosted(1, v, stash="host").build((5, 5))
    sizes = MemorySizes(activations=(0, *[1] * (v - 1)))  # the first stage's are data
    one = simulate(program, Costs(fetch=1, offload=0.5))
    peak = max(memory_curves(one, sizes, FLUSH)[0].parts["activations"])
    assert peak == max(count for _, count in one.saved_on_rank(0, range(1, v))) == 3
    assert peak <= check(program).peak_saved_on_rank[0]
