"""Several stages on a rank in any placement: every merge is proved, and what it leaves idle is little."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import RECEIVE_OF, Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.merged import merge
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from tests.draws import draws
from tests.pipeline.runtime.graph_cases import random_shape


@st.composite
def schedules(draw):
    num_stages = draw(st.integers(2, 8))
    num_ranks = draw(st.integers(1, num_stages))
    shape = random_shape(draw(st.integers(0, 10_000)), num_stages=num_stages, num_ranks=num_ranks)
    return Schedule.preset(
        draw(st.sampled_from(("flush", "gpipe"))), num_stages=num_stages, rank_of_stage=shape.rank_of_stage,
        edges=shape.edges, recompute=draw(st.booleans()),
    )  # fmt: skip


batches = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@draws(60)
@given(schedules(), batches, st.integers(0, 10_000))
def test_every_graph_is_proved_simulated_and_written(schedule, sizes, seed):
    """With bounds on what is saved; its text reads back; the simulation ends, the chain that bounds it has no gap, and
    the curve of memory ends where it began.
    """
    program = schedule.build(sizes)
    report = check(
        program, max_saved=schedule.max_saved_microbatches(sizes), max_saved_on_rank=schedule.max_saved_on_rank(sizes)
    )
    assert report.num_stages == schedule.num_stages
    assert Program.from_csv(program.to_csv()) == program
    choose = random.Random(seed)
    num_edges = len(program.graph.edges)
    costs = Costs(
        forward=[choose.uniform(0.5, 2) for _ in range(schedule.num_stages)], step=0.25,
        latency=[choose.uniform(0, 1) for _ in range(num_edges)], bandwidth=2.0,
        forward_bytes=[choose.uniform(0, 1) for _ in range(num_edges)], overlap=choose.random() < 0.5,
    )  # fmt: skip
    timeline = simulate(program, costs)
    path = critical_path(timeline, costs)
    assert path[-1].end == pytest.approx(timeline.end) and path[0].start == 0
    for curve in memory_curves(timeline, MemorySizes(activations=1.0, transfers=1.0), program.weights):
        assert curve.total[-1] == pytest.approx(0.0, abs=1e-9)
    assert simulate(program, Costs(forward=costs.forward)).end <= timeline.end + 1e-9


@draws(40)
@given(schedules(), st.integers(0, 10_000))
def test_a_program_with_one_word_less_or_another_peer_is_rejected(schedule, seed):
    """Whatever is left out; a transfer of another edge; an edge that nothing serves."""
    program, choose = schedule.build((2, 1)), random.Random(seed)
    rank = choose.randrange(program.num_ranks)
    row = program.rows[rank]
    position = choose.randrange(len(row))
    less = row[:position] + row[position + 1 :]
    with pytest.raises(ProgramError):
        check(program.with_rows((*program.rows[:rank], less, *program.rows[rank + 1 :])))
    named = [position for position, each in enumerate(row) if each.peer is not None]
    if named:
        position = choose.choice(named)
        each = row[position]
        peer = choose.choice([other for other in range(program.num_stages + 1) if other != each.peer])
        wrong = Instruction(each.kind, each.stage, each.microbatch, peer=peer)
        with pytest.raises(ProgramError):
            rows = (*row[:position], wrong, *row[position + 1 :])
            check(program.with_rows((*program.rows[:rank], rows, *program.rows[rank + 1 :])))


@draws(40)
@given(schedules(), st.integers(0, 10_000))
def test_a_computation_before_what_it_needs_is_rejected(schedule, seed):
    """Whichever of several tensors it is, from another rank or from a stage of its own."""
    program, choose = schedule.build((2, 1)), random.Random(seed)
    graph, pairs = program.graph, []
    for rank, row in enumerate(program.rows):
        place = {(each.kind, each.stage, each.peer, each.microbatch): position for position, each in enumerate(row)}
        for position, each in enumerate(row):
            needs = each.kind.row.needs
            for maker in graph.makers(needs, each.stage) if needs else ():
                if program.crosses(maker, each.stage):
                    receive = Instruction(RECEIVE_OF[needs], each.stage)
                    before = receive.kind, each.stage, graph.named_peer(receive, maker), each.microbatch
                else:
                    before = each.kind, maker, None, each.microbatch
                pairs.append((rank, place[before], position))
    if not pairs:
        return
    rank, first, second = choose.choice(pairs)
    row = list(program.rows[rank])
    row.insert(first, row.pop(second))
    with pytest.raises(ProgramError):
        check(program.with_rows((*program.rows[:rank], tuple(row), *program.rows[rank + 1 :])))


@draws(40)
@given(schedules())
def test_what_waits_between_stages_of_a_rank_is_counted(schedule):
    """Against a walk through the row with the tensors in hand."""
    program = schedule.build((3,))
    for rank, peak in enumerate(check(program).peak_waiting_on_rank):
        there, most, own = set(), 0, set(program.stages_of(rank))
        for each in program.rows[rank]:
            for tensor, others, taken in (
                (each.kind.row.needs, program.graph.makers, True), (each.kind.row.makes, program.graph.takers, False)
            ):  # fmt: skip
                for other in own.intersection(others(tensor, each.stage)) if tensor else ():
                    ends = (other, each.stage) if taken else (each.stage, other)
                    (there.remove if taken else there.add)((tensor, *ends, each.microbatch))
            most = max(most, len(there))
        assert (most, len(there)) == (peak, 0)


def test_an_edge_that_is_not_served_is_found():
    """And one that is served and not there."""
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 2))
    program = Schedule.preset("flush", num_stages=3, edges=edges).build((2,))
    chain = Schedule.preset("flush", num_stages=3).build((2,))
    text = program.to_csv()
    with pytest.raises(ProgramError, match=r"1 or 2|its peer is stage 1, not 2|not say which"):
        check(Program.from_csv(text.replace("# edges: 0>1 0>2 1>2\n", "")))
    with pytest.raises(ProgramError, match=r"does not say which stage is at its other end: 1 or 2"):
        check(Program.from_csv("# edges: 0>1 0>2 1>2\n" + chain.to_csv()))
    lacking = Program.from_csv(text.replace(",0SEND_F1>2", "").replace("2RECV_F1<0,", ""))
    with pytest.raises(ProgramError, match=r"2F1@0.*no 2RECV_F1<0 stands before it|no 0SEND_F1>2"):
        check(lacking)


def test_an_encoder_and_a_decoder_are_balanced():
    """The paper's Figure 4: encoder layers are three times a decoder's. With one of each on a rank nobody waits long;
    contiguous stages leave the decoder's rank idle for half of the time.
    """
    encoder, decoder, work = range(6), range(6, 12), [3.0] * 6 + [1.0] * 6
    edges = [Edge(each, each + 1) for each in range(11)] + [Edge(5, each) for each in decoder[1:]]
    mixed = tuple(stage % 3 for stage in (*encoder, *decoder))
    costs = Costs(forward=work, backward=[2 * each for each in work])

    def seconds(placement):
        schedule = Schedule.preset("gpipe", num_stages=12, rank_of_stage=placement, edges=tuple(edges))
        return simulate(schedule.build((24,)), costs).makespan

    bound = 24 * 3 * sum(work) / 3
    assert seconds(mixed) < 1.2 * bound
    assert seconds((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)) > 1.4 * bound


def test_orders_that_wait_for_one_another_are_told():
    """Which no order does that keeps a stage's forward ahead of its backward."""
    graph = StageGraph.of(2)
    rows = [[Instruction(Kind.BACKWARD, 0, 0), Instruction(Kind.FORWARD, 0, 0)],
            [Instruction(Kind.FORWARD, 1, 0), Instruction(Kind.BACKWARD, 1, 0)]]  # fmt: skip
    with pytest.raises(ValueError, match="the orders of the stages wait for one another, at 0B0, 1F0"):
        merge(rows, graph, (0, 0))


@pytest.mark.parametrize(
    ("preset", "choices", "message"),
    [
        ("2bw", {"rank_of_stage": (0, 1, 2)}, "2bw depends on how far ahead each stage of a chain is"),
        ("interleaved", {"num_virtual_stages": 3}, "interleaved passes each stage's output to the next one"),
        ("bpipe", {}, "balance pairs the stages of a chain"),
        ("l2l", {"num_virtual_stages": 3}, "relay passes each stage's output to the next one"),
        ("flush", {"tied_embeddings": True}, "tied embeddings are shared by the first and the last stage of a chain"),
    ],
)
def test_what_is_for_chains_is_refused(preset, choices, message):
    with pytest.raises(ValueError, match=message):
        Schedule.preset(preset, num_stages=3, edges=(Edge(0, 1), Edge(0, 2), Edge(1, 2)), **choices)


def test_several_stages_on_a_rank_need_a_drain():
    with pytest.raises(ValueError, match="merged-1f1b takes one batch at a time, and under 2bw"):
        Schedule.preset("2bw", num_stages=4, rank_of_stage=(0, 1, 1, 0))
    with pytest.raises(ValueError, match="merged-1f1b places stages freely, and balance goes with stages dealt out"):
        Schedule.preset("bpipe", num_stages=4, rank_of_stage=(0, 1, 1, 0))
