"""Times of programs whose stages are copies, against a loop over ranks that knows the words, and by hand."""

import json
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.simulate import Costs, SimulationError, simulate
from megatron.pipeline.simulate.costs import measured_costs
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from megatron.pipeline.simulate.timeline import Timeline
from tests.draws import draws
from tests.pipeline.check.copied import programs
from tests.pipeline.check.copies_oracle import Model

SHARED = (Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM)


@dataclass
class Job:
    """All ranks of a job, each with its own clock; a rank goes on as soon as all that it waits for has a time."""

    program: Program
    costs: dict[str, list[float]]
    clocks: list[float] = field(default_factory=list)
    made: dict = field(default_factory=dict)  # kind, stage, microbatch -> end of what makes the tensor
    arrived: dict = field(default_factory=dict)  # kind of the send, taker, microbatch -> time
    posted: dict = field(default_factory=lambda: defaultdict(deque))  # kind of the send, maker, taker, end -> times
    busy: dict = field(default_factory=dict)  # channel -> time until which it is
    chains: list = field(default_factory=list)  # by rank: reductions to come, and the end of the last one
    reduced: dict = field(default_factory=dict)  # rank, version -> end of the last reduction

    def run(self) -> list[list[float]]:
        """The ends of the computations and STEPs of each rank."""
        self.model, rows = Model(self.program), self.program.rows
        self.clocks, self.chains = [0.0] * len(rows), [[deque(), 0.0] for _ in rows]
        places, ends = [0] * len(rows), [[] for _ in rows]
        while any(place < len(row) for place, row in zip(places, rows, strict=True)):
            before = list(places)
            for rank, row in enumerate(rows):
                while places[rank] < len(row) and self.can(rank, row[places[rank]], ends[rank]):
                    places[rank] += 1
                    self.transfer()
                    self.reduce()
            assert before != places, "it never ends"
        return ends

    def can(self, rank: int, word: Instruction, ends: list[float]) -> bool:
        """Execute a word, if all that it waits for has a time."""
        kind, stage, microbatch = word.kind, word.stage, word.microbatch
        of_model = self.model.stage_of[stage]
        if kind in (Kind.SEND_F, Kind.SEND_B):
            self.posted[kind, stage, self.model.peer(word), "sent"].append((self.clocks[rank], microbatch))
            return True
        if kind in (Kind.RECV_F, Kind.RECV_B):
            send = Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B
            self.posted[send, self.model.peer(word), stage, "received"].append((self.clocks[rank], microbatch))
            return True
        if kind in SHARED:
            self.chains[rank][0].append((kind, word.version, self.clocks[rank]))
            return True
        start = self.clocks[rank]
        if kind is Kind.STEP:
            reductions = self.reduced.get((rank, word.version), [])
            if len(reductions) < 2 + self.reduces_embeddings(rank):
                return False
            start = max(start, *reductions)
            took = sum(self.costs["step"][each] for each in self.program.stages_of(rank))
        else:
            first, last = of_model == 0, of_model == self.model.num_stages - 1
            if kind is Kind.FORWARD and not first:
                start = max(start, self.tensor(Kind.FORWARD, Kind.SEND_F, of_model - 1, stage, microbatch))
            if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and not last:
                start = max(start, self.tensor(Kind.BACKWARD, Kind.SEND_B, of_model + 1, stage, microbatch))
            if math.isinf(start):
                return False
            names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.RECOMPUTE: "recompute"}
            halves = {Kind.BACKWARD_INPUT: "backward_input", Kind.BACKWARD_WEIGHT: "backward_weight"}
            took = self.costs[(names | halves)[kind]][stage]
        self.clocks[rank] = start + took
        ends.append(self.clocks[rank])
        if kind is not Kind.BACKWARD_WEIGHT:
            name = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
            self.made[name, stage, microbatch] = self.clocks[rank]
        return True

    def tensor(self, kind: Kind, send: Kind, of_model: int, stage: int, microbatch: int) -> float:
        maker, rank_of = self.model.holder(of_model, microbatch), self.program.rank_of_stage
        if rank_of[maker] == rank_of[stage]:
            return self.made.get((kind, maker, microbatch), math.inf)
        return self.arrived.get((send, stage, microbatch), math.inf)

    def transfer(self) -> None:
        """Carry out what is posted at both ends of a channel, in order."""
        for kind, maker, taker, end in list(self.posted):
            sent, received = (self.posted[kind, maker, taker, each] for each in ("sent", "received"))
            while end == "sent" and sent and received:
                (at, microbatch), (ready, same) = sent.popleft(), received.popleft()
                assert microbatch == same
                start = max(at, ready, self.busy.get((kind, maker, taker), 0.0))
                self.busy[kind, maker, taker] = start + self.costs["transfer"][0]
                self.arrived[kind, taker, microbatch] = self.busy[kind, maker, taker] + self.costs["latency"][0]

    def reduce(self) -> None:
        """Carry out each reduction that stands first in the chains of all its members."""
        for rank, (chain, _) in enumerate(self.chains):
            if not chain:
                continue
            kind, version, _ = chain[0]
            members = self.members(kind, rank)
            firsts = [self.chains[each][0][0] if self.chains[each][0] else None for each in members]
            if not all(first is not None and first[:2] == (kind, version) for first in firsts):
                continue
            start = max(max(first[2], self.chains[each][1]) for first, each in zip(firsts, members, strict=True))
            name = kind.name.lower()
            took = max(self.of_rank(name, each) for each in members)
            for each in members:
                self.chains[each][0].popleft()
                self.chains[each][1] = start + took
                self.reduced.setdefault((each, version), []).append(start + took)
            return self.reduce()

    def members(self, kind: Kind, rank: int) -> list[int]:
        if kind is Kind.REDUCE_GRAD:
            return self.model.sharers(rank)
        ends = self.model.ranks_of(0) | self.model.ranks_of(self.model.num_stages - 1)
        return sorted(ends) if kind is Kind.REDUCE_EMBED else list(range(len(self.clocks)))

    def of_rank(self, name: str, rank: int) -> float:
        costs = self.costs[name]
        return sum(costs[each] for each in self.program.stages_of(rank)) if name == "reduce_grad" else costs[0]

    def reduces_embeddings(self, rank: int) -> bool:
        first, last = self.model.ranks_of(0), self.model.ranks_of(self.model.num_stages - 1)
        return self.program.tied_embeddings and first != last and rank in first | last


@draws(120)
@given(programs(), st.randoms(use_true_random=False))
def test_times_are_those_of_a_loop_over_ranks(program: Program, random):
    """Slow links, reductions that wait for the slowest copy, and stages of different speeds."""
    per_stage = {
        name: [random.uniform(0.5, 2.0) for _ in range(program.num_stages)]
        for name in ("forward", "backward_input", "backward_weight", "recompute", "step", "reduce_grad")
    }
    per_stage["backward"] = [
        sum(both) for both in zip(per_stage["backward_input"], per_stage["backward_weight"], strict=True)
    ]
    costs = Costs(**per_stage, latency=0.3, bandwidth=2.0, forward_bytes=1.4, reduce_embed=0.7, reduce_norm=0.4)
    others = {"transfer": [0.7], "latency": [0.3], "reduce_embed": [0.7], "reduce_norm": [0.4]}
    expected = Job(program, per_stage | others).run()
    timeline = simulate(program, costs)
    for rank, ends in enumerate(expected):
        assert [span.end for span in timeline.computations(rank)] == pytest.approx(ends)
    path = critical_path(timeline, costs)
    assert sum(span.end - span.start for span in path) == pytest.approx(timeline.makespan)


LOST = """\
# weights: {weights}
# batches: {batches}
# copies: 0:0,2 0:1,3 1:0-3
{rows}
"""
TWO = "0F0,0F2,0B0,0B2,0F4,0F6,0B4,0B6\n1F1,1F3,1B1,1B3,1F5,1F7,1B5,1B7\n" + (
    "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7"
)


def lost_rank(weights: str = "flush") -> Program:
    return completed(Program.from_csv(LOST.format(weights=weights, batches="4 4", rows=TWO)))


def test_gradients_of_copies_are_reduced_together():
    """The first copy is done at 12, the second one at 15: the reduction of both ends one later."""
    timeline = simulate(lost_rank(), Costs(reduce_grad=1.0))
    found = {
        (span.rank, span.instruction.kind): (span.start, span.end)
        for span in timeline.spans
        if span.instruction.version == 1 and span.instruction.microbatch is None
    }
    assert found[0, Kind.REDUCE_GRAD] == found[1, Kind.REDUCE_GRAD] == (15.0, 16.0)
    assert found[2, Kind.REDUCE_GRAD] == (13.0, 14.0)
    assert found[2, Kind.REDUCE_NORM] == (16.0, 16.0)


def test_a_measured_reduction_takes_what_the_last_copy_waits():
    """Of the first copy's 4 seconds 3 are spent waiting for the second one; so both take 1."""
    simulated = simulate(lost_rank(), Costs(reduce_grad=1.0))
    starts = [list(row) for row in simulated.starts]
    for position, each in enumerate(simulated.rows[0]):
        starts[0][position] -= 3.0 * (each.kind is Kind.REDUCE_GRAD)
    assert measured_costs(replace(simulated, starts=tuple(starts))).reduce_grad == [1.0, 1.0, 1.0]


def test_a_batch_starts_where_its_first_copy_does():
    """Stage 0 has microbatches 1, 3, 5, ..., and the batches begin with microbatches 0, 4 and 8 on stage 1."""
    third = "0F8,0F10,0B8,0B10", "1F9,1F11,1B9,1B11", ",".join(f"2F{each},2B{each}" for each in range(8, 12))
    first, second, last = (f"{row},{more}" for row, more in zip(TWO.split("\n"), third, strict=True))
    rows = "\n".join(
        (second.replace("1F", "0F").replace("1B", "0B"), first.replace("0F", "1F").replace("0B", "1B"), last)
    )
    text = LOST.format(weights="2bw", batches="4 4 4", rows=rows).replace("0:0,2 0:1,3", "0:1,3 0:0,2")
    timeline = simulate(completed(Program.from_csv(text)))
    starts = {str(span.instruction).split("@")[0]: span.start for span in timeline.computations()}
    assert timeline.batch_starts() == [0.0, starts["1F4"], starts["1F8"]]
    assert timeline.steady_time_per_batch() == starts["1F8"] - starts["1F4"] == 12.0


def test_a_timeline_keeps_its_copies(tmp_path):
    """Through JSON, of a part of the batches too; one with too few copies is refused."""
    timeline = simulate(lost_rank())
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json").to_dict() == timeline.to_dict()
    assert timeline.of_batches(1, 1).copies == timeline.copies
    data = json.loads((tmp_path / "timeline.json").read_text())
    with pytest.raises(ValueError, match="there are 3 stages and 2 copies"):
        Timeline.from_dict(data | {"copies": data["copies"][:2]})


def test_a_computation_of_another_copy_is_no_part_of_a_simulation():
    program = lost_rank()
    rows = [*program.rows]
    rows[0] = (Instruction(Kind.FORWARD, 0, 1, 0), *rows[0])
    with pytest.raises(SimulationError, match="rank 0, position 0, 0F1@0: another copy takes this microbatch"):
        simulate(program.with_rows(tuple(rows)))


def test_memory_of_copies_is_that_of_their_shares():
    """Each copy holds its own microbatches: two of the first stage, one of the last."""
    curves = memory_curves(simulate(lost_rank()), MemorySizes(activations=1.0), lost_rank().weights)
    assert [curve.peak for curve in curves] == [2.0, 2.0, 1.0]
