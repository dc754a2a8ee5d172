"""Programs whose stages are copies, made without a schedule: the computations of one random order of the whole job.

Computations are put in an order in which each stands behind all that it needs, and each rank's row is its part of that
order. So no rows of this kind are in a deadlock, whoever takes what.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from megatron.pipeline.program.copies import Copy, edges_of_copies
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import RECEIVES, SENDS, Instruction, Kind, Rows
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW
from megatron.pipeline.schedules.completion import completed
from tests.pipeline.check.examples import moved, with_row


@st.composite
def shares(draw: st.DrawFn, num_copies: int, num_positions: int) -> list[tuple[int, ...]]:
    """The positions of each copy of a stage: all are taken once, and each copy takes one at least."""
    owners = [*range(num_copies), *(draw(st.integers(0, num_copies - 1)) for _ in range(num_positions - num_copies))]
    owners = draw(st.permutations(owners))
    return [tuple(at for at, owner in enumerate(owners) if owner == copy) for copy in range(num_copies)]


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[tuple[Copy, ...], tuple[int, ...]]:
    """Copies and the rank of each: 1 to 3 stages of the model, up to 4 replicas, of which ranks may be lost.

    Ranks have a stage each, or the first stage and the last (`folded`), or all stages.
    """
    num_stages, placed = draw(st.integers(1, 3)), draw(st.sampled_from(("apart", "folded", "together")))
    num_replicas = draw(st.integers(2, 4))
    num_positions = draw(st.integers(num_replicas, 6))
    counts = [draw(st.integers(1, num_replicas)) for _ in range(num_stages)]
    copies: list[Copy] = []
    rank_of_stage: list[int] = []
    held: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}  # stage of the model -> ranks, shares
    for stage in range(num_stages):
        other = 0 if stage and (placed == "together" or (placed == "folded" and stage == num_stages - 1)) else stage
        if other in held:
            ranks, taken = held[other]
            if placed == "folded" and num_stages == 3:  # these two stages hand each other nothing
                taken = draw(shares(len(ranks), num_positions))
        else:
            first = max(rank_of_stage, default=-1) + 1
            ranks, taken = list(range(first, first + counts[stage])), draw(shares(counts[stage], num_positions))
        held[stage] = ranks, taken
        copies += [Copy(stage, positions) for positions in taken]
        rank_of_stage += ranks
    return tuple(copies), tuple(rank_of_stage)


def taker(copies: tuple[Copy, ...], stage: int, position: int) -> int:
    """The stage of the program that takes the microbatch at a position of a batch at a stage of the model."""
    num_positions = sum(len(copy.positions) for copy in copies if copy.stage == 0)
    found = (at for at, copy in enumerate(copies) if copy.stage == stage and position % num_positions in copy.positions)
    return next(found)


def rows_of(extent: Extent, *, seed: int, splits: bool) -> Rows:
    """The computations of every rank, where batch j needs the update of batch j - 1 - delay.

    A copy uses what it gets from another one in the order in which that one has made it, as the pass for transfers
    asks, and ends one batch before the next, as chains do.
    """
    chosen, last = random.Random(seed), max(copy.stage for copy in extent.copies)
    starts = [sum(extent.batches[:batch]) for batch in range(len(extent.batches))]
    gradient, ends = Kind.BACKWARD, (Kind.BACKWARD,)
    if splits:
        gradient, ends = Kind.BACKWARD_INPUT, (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    left: dict[int, list[tuple[Kind, int, int]]] = {}  # batch -> what it computes: kind, stage of the model, position
    for batch, size in enumerate(extent.batches):
        kinds = [(kind, stage) for kind in (Kind.FORWARD, *ends) for stage in range(last + 1)]
        left[batch] = [(kind, stage, position) for kind, stage in kinds for position in range(size)]
    rows: list[list[Instruction]] = [[] for _ in range(max(extent.rank_of_stage) + 1)]
    done: set[tuple[int, Kind, int, int]] = set()
    made: dict[tuple[Kind, int, int], list[tuple[int, int]]] = {}  # kind, copies that make and take -> not yet taken

    owner = {
        (stage, at): taker(extent.copies, stage, at) for stage in range(last + 1) for at in range(max(extent.batches))
    }

    def is_able(batch: int, kind: Kind, stage: int, position: int) -> bool:
        earlier = (each for before in range(batch) for each in left[before])
        own = owner[stage, position]
        if kind is not Kind.FORWARD and any(each == kind and owner[its, at] == own for each, its, at in earlier):
            return False
        if kind is Kind.BACKWARD_WEIGHT:
            return (batch, gradient, stage, position) in done
        if kind is gradient and (batch, Kind.FORWARD, stage, position) not in done:
            return False
        maker = stage - 1 if kind is Kind.FORWARD else stage + 1
        if not 0 <= maker <= last:
            return True
        channel = kind, owner[maker, position], own
        return made.get(channel, [])[:1] == [(batch, position)]

    while any(left.values()):
        oldest = min(batch for batch, rest in left.items() if rest)
        batches = range(oldest, min(oldest + extent.weights.delay + 1, len(extent.batches)))
        able = [(batch, *each) for batch in batches for each in left[batch] if is_able(batch, *each)]
        batch, kind, stage, position = chosen.choice(able)
        left[batch].remove((kind, stage, position))
        done.add((batch, kind, stage, position))
        own = owner[stage, position]
        for other, is_made in ((stage - 1, kind is Kind.FORWARD), (stage + 1, kind is gradient)):
            if is_made and 0 <= other <= last:
                made[kind, owner[other, position], own].pop(0)
        for other, makes in ((stage + 1, kind is Kind.FORWARD), (stage - 1, kind is gradient)):
            if makes and 0 <= other <= last:
                made.setdefault((kind, own, owner[other, position]), []).append((batch, position))
        microbatch = extent.first_microbatch + starts[batch] + position
        rows[extent.rank_of_stage[own]].append(Instruction(kind, own, microbatch))
    return tuple(map(tuple, rows))


@st.composite
def bare_programs(draw: st.DrawFn, *, most_batches: int = 3, equal: bool = False) -> Program:
    """Computations alone."""
    copies, rank_of_stage = draw(arrangements())
    last = max(copy.stage for copy in copies)
    num_positions = sum(len(copy.positions) for copy in copies if copy.stage == 0)
    sizes = st.integers(num_positions, num_positions + 2)
    batches = tuple(draw(st.lists(sizes, min_size=1, max_size=most_batches)))
    first_batch = draw(st.integers(0, 3))
    extent = Extent(
        rank_of_stage=rank_of_stage, batches=batches[:1] * len(batches) if equal else batches,
        weights=draw(st.sampled_from((FLUSH, TWO_BW))),
        first_batch=first_batch, first_microbatch=draw(st.integers(first_batch, 20)) if first_batch else 0,
        edges=() if len(copies) == last + 1 else edges_of_copies(copies, [Edge(at, at + 1) for at in range(last)]),
        copies=copies,
        data_parallel=True, tied_embeddings=draw(st.booleans()), recompute=draw(st.booleans()),
    )  # fmt: skip
    return Program.of(extent, rows_of(extent, seed=draw(st.integers(0, 10**6)), splits=draw(st.booleans())))


def programs(**choices: object) -> st.SearchStrategy[Program]:
    """Complete programs."""
    return bare_programs(**choices).map(completed)


def bounds_of(program: Program) -> list[int]:
    """The most microbatches that each stage saves, counted along its row."""
    most, saved = [0] * program.num_stages, [0] * program.num_stages
    for each in (each for row in program.rows for each in row):
        saved[each.stage] += each.kind is Kind.FORWARD
        saved[each.stage] -= each.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        most[each.stage] = max(most[each.stage], saved[each.stage])
    return most


# --- mutations


def others_of(program: Program, stage: int) -> list[int]:
    """The other copies of the stage of the model that a stage is."""
    return [at for at, copy in enumerate(program.copies) if copy.stage == program.copies[stage].stage and at != stage]


def peers_of(program: Program, instruction: Instruction) -> list[int]:
    """The copies that a transfer could name in the place of its peer, and does not."""
    if instruction.kind not in SENDS | RECEIVES or instruction.peer is None:
        return []
    return others_of(program, instruction.peer)


def given_away(program: Program) -> Iterator[tuple[Program, str]]:
    """Each instruction of a microbatch given to each other copy of its stage, into the middle of that one's row."""
    for rank, row in enumerate(program.rows):
        for position, each in enumerate(row):
            for other in others_of(program, each.stage) if each.microbatch is not None else ():
                rows = [list(its) for its in program.rows]
                del rows[rank][position]
                target = rows[program.rank_of_stage[other]]
                target.insert(len(target) // 2, replace(each, stage=other))
                yield program.with_rows(tuple(map(tuple, rows))), f"{each} of rank {rank} to stage {other}"


def sent_elsewhere(program: Program) -> Iterator[tuple[Program, str]]:
    """Each transfer that says where it goes with each other copy as its peer."""
    for rank, row in enumerate(program.rows):
        for position, each in enumerate(row):
            for peer in peers_of(program, each):
                wrong = [*row[:position], replace(each, peer=peer), *row[position + 1 :]]
                yield with_row(program, rank, wrong), f"{each} of rank {rank} with stage {peer}"


def taken_over(program: Program, stage: int, other: int, microbatch: int) -> Program:
    """A copy computes a microbatch of another one as a whole, and all transfers follow, as if it were its own."""
    rows: list[list[Instruction]] = []
    for rank, row in enumerate(program.rows):
        own = [
            replace(each, peer=other) if each.microbatch == microbatch and each.peer == stage else each
            for each in row
            if not (each.stage == stage and each.microbatch == microbatch)
        ]
        if rank == program.rank_of_stage[other]:
            theirs = program.rows[program.rank_of_stage[stage]]
            first = next((at for at, each in enumerate(own) if each.kind in UPDATES_BEGIN), len(own))
            own[first:first] = [
                replace(each, stage=other) for each in theirs if each.stage == stage and each.microbatch == microbatch
            ]
        rows.append(own)
    return program.with_rows(tuple(map(tuple, rows)))


UPDATES_BEGIN = (Kind.REDUCE_GRAD, Kind.REDUCE_NORM, Kind.STEP)


@st.composite
def changed(draw: st.DrawFn, program: Program) -> tuple[Program, str]:
    """The program with one instruction moved in its row, given to another copy, or sent to another copy."""
    ways = [given_away(program), sent_elsewhere(program)]
    found = [each for way in ways for each in way]
    rank = draw(st.sampled_from([rank for rank, row in enumerate(program.rows) if len(row) > 1]))
    position = draw(st.integers(0, len(program.rows[rank]) - 2))
    place = draw(st.integers(position + 1, min(position + 8, len(program.rows[rank]) - 1)))
    return draw(st.sampled_from(found)) if found and draw(st.booleans()) else moved(program, rank, position, place)
