"""A shared parameter moves once for each version of its weights, and its gradient once for each batch."""

from dataclasses import replace

import pytest

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.weight_policies import FLUSH, STALE
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch
from megatron.pipeline.runtime.exchange import SharedParameters
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape
from tests.pipeline.runtime.test_graph import SKIPS, run

WEIGHT_BYTES = 4 * graph_cases.WIDTH**2
PAIR = Shape((Edge(0, 1),), (0, 1), shares=True)


@pytest.mark.parametrize("weights", ["stale", "stale-predicted", "stale-provisional"])
@pytest.mark.parametrize("batches", [(1,) * 9, (2, 1, 3, 2), (5, 5, 5)], ids=str)
def test_it_moves_where_the_program_has_other_weights(weights, batches):
    """The versions of the forwards, and how far ahead they are, in the text of a program that was proved."""
    schedule = Schedule(
        order="async", weights=weights, recompute=True, num_stages=4, edges=SKIPS.edges, rank_of_stage=(0, 1, 0, 1)
    )
    used: dict[int, list[tuple[int, str]]] = {stage: [] for stage in range(4)}
    for row in schedule.build(batches).rows:
        for each in row:
            if each.kind is Kind.FORWARD:
                used[each.stage].append((each.version, each.ahead))
    shared, first, moves = SharedParameters(schedule.graph, schedule.weights), 0, {stage: [] for stage in range(4)}
    for batch, size in enumerate(batches):
        shared.begin_batch(batch, range(first, first + size))
        for position in range(size):
            about = Microbatch(first + position, batch, position, size)
            for stage in range(4):
                moves[stage].append(shared.moves_value(stage, about))
        first += size
    for stage, pairs in used.items():
        before = [None, *pairs[:-1]]
        assert moves[stage] == [one != other for one, other in zip(before, pairs, strict=True)], stage


def test_a_drain_and_an_evaluation_begin_anew():
    """The others have kept nothing by then."""
    shared = SharedParameters(StageGraph.of(2), STALE)
    shared.begin_batch(0, range(3))
    assert [shared.moves_value(0, Microbatch(index, 0, index, 3)) for index in range(3)] == [True, False, False]
    shared.begin_batch(1, range(3, 5))
    assert [shared.moves_value(0, Microbatch(index, 1, index - 3, 2)) for index in (3, 4)] == [False, True]
    shared.settle()
    shared.begin_batch(2, range(5, 6))
    assert shared.moves_value(0, Microbatch(5, 2, 0, 1))
    evaluation = [shared.moves_value(0, Microbatch(index, EVALUATION_BATCH, index, 4)) for index in range(4)]
    assert evaluation == [True, False, False, False]
    assert [SharedParameters(StageGraph.of(2), FLUSH).moves_gradient(Microbatch(7, 1, 2, size)) for size in (3, 4)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("preset", "provisional", "values"), [("flush", False, 3), ("stale", False, 3), ("stale", True, 4)]
)
def test_so_many_bytes_cross(preset, provisional, values):
    """Between two ranks, beside the activations: the weight for each version or step, its gradient for each batch."""
    batches = (3, 1, 4)
    chosen = {"preset": preset, "provisional": provisional, "batches": batches, "recompute": True}
    sent = [sum(each.bytes_sent for each in run(shape, **chosen)) for shape in (PAIR, replace(PAIR, shares=False))]
    aligned = sent[0] - sent[1] - (values + len(batches)) * WEIGHT_BYTES
    assert 0 <= aligned < 64 * 2 * sum(batches)
