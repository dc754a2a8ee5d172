"""Programs that nobody planned: random orders that can run, as somebody might write them into a file."""

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Kind, Row
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW, WeightPolicy


@dataclass(frozen=True)
class Habits:
    """How the ranks choose: by the same rule in the same situation, so that what they do repeats itself in the end.

    Attributes:
        seed: of the rule.
        most: for each stage, the most microbatches in flight.
        permutation: in which order backwards take the microbatches of a batch.
        splits: whether backwards are in halves, I and W.
        rhythm: batches after which a rule may be another.
    """

    seed: int
    most: tuple[int, ...]
    permutation: tuple[int, ...]
    splits: bool
    rhythm: int = 1


def rows_of(rank_of_stage: tuple[int, ...], batches: tuple[int, ...], delay: int, habits: Habits) -> tuple[Row, ...]:
    """The computations of every rank for equal batches, where batch j needs the update of batch j - 1 - delay."""
    num_stages, size, total = len(rank_of_stage), batches[0], sum(batches)
    rows: list[list[Instruction]] = [[] for _ in range(max(rank_of_stage) + 1)]
    num_forwards, num_backwards = [0] * num_stages, [0] * num_stages
    waiting: list[list[int]] = [[] for _ in range(num_stages)]  # W that are to come
    back = [batch * size + each for batch in range(len(batches)) for each in habits.permutation]
    ended = Counter()  # by batch, backwards that are complete
    most = [max(each, size) if habits.permutation != tuple(range(size)) else each for each in habits.most]

    def can(rank: int) -> list[Instruction]:
        found = []
        for stage, at in enumerate(rank_of_stage):
            if at != rank:
                continue
            new, old = num_forwards[stage], num_backwards[stage]
            held = new - old + len(waiting[stage])
            is_fed = stage == 0 or num_forwards[stage - 1] > new
            if new < total and held < most[stage] and is_fed:
                needed = new // size - 1 - delay
                if needed < 0 or ended[needed] == size * num_stages:
                    found.append(Instruction(Kind.FORWARD, stage, new))
            due = back[old] if old < total else total
            has_gradient = stage == num_stages - 1 or num_backwards[stage + 1] > old
            if due < new and has_gradient:
                found.append(Instruction(Kind.BACKWARD_INPUT if habits.splits else Kind.BACKWARD, stage, due))
            found += [Instruction(Kind.BACKWARD_WEIGHT, stage, each) for each in waiting[stage][:1]]
        return found

    while sum(ended.values()) < total * num_stages:
        for rank, row in enumerate(rows):
            choices = can(rank)
            if not choices:
                continue
            begun = min(num_forwards[0], total - 1) // size
            situation = [(each.kind.value, each.stage, each.microbatch - begun * size) for each in choices]
            chosen = choices[
                random.Random(f"{habits.seed} {rank} {begun % habits.rhythm} {situation}").randrange(len(choices))
            ]
            row.append(chosen)
            stage, microbatch = chosen.stage, chosen.microbatch
            if chosen.kind is Kind.FORWARD:
                num_forwards[stage] += 1
            elif chosen.kind is Kind.BACKWARD_WEIGHT:
                waiting[stage].remove(microbatch)
                ended[microbatch // size] += 1
            else:
                num_backwards[stage] += 1
                if habits.splits:
                    waiting[stage].append(microbatch)
                else:
                    ended[microbatch // size] += 1
    return tuple(map(tuple, rows))


@st.composite
def made_up(draw: st.DrawFn, *, delays: tuple[int, ...] = (0, 1), most_batches: int = 6) -> Program:
    """Computations alone."""
    num_ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))
    rank_of_stage = tuple(draw(st.permutations([*range(num_ranks), *extra])))
    size, delay = draw(st.integers(1, 4)), draw(st.sampled_from(delays))
    num_batches = draw(st.integers(1 if delay == 0 else 3, most_batches))
    habits = Habits(
        seed=draw(st.integers(0, 10**6)),
        most=tuple(draw(st.integers(1, 5)) for _ in rank_of_stage),
        permutation=tuple(draw(st.permutations(range(size)))),
        splits=draw(st.booleans()),
        rhythm=draw(st.integers(1, 2)),
    )
    batches = (size,) * num_batches
    policy: WeightPolicy = {0: FLUSH, 1: TWO_BW, 2: WeightPolicy("3bw", delay=2)}[delay]
    extent = Extent(
        rank_of_stage=rank_of_stage, batches=batches, weights=policy,
        data_parallel=draw(st.booleans()), tied_embeddings=draw(st.booleans()), recompute=draw(st.booleans()),
    )  # fmt: skip
    return Program.of(extent, rows_of(rank_of_stage, batches, delay, habits))
