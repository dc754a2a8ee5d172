"""The demand of proved programs.

No formula of its own: the checker reports what is saved and which versions live; the rest is read off the rows. So the
numbers are those of the very programs that run.
"""

from functools import lru_cache

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Kind, Tensor
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import PipelineSchedule
from megatron.planner.memory.demand import Demand, moments_of


@lru_cache(maxsize=4096)
def proved_demand(schedule: PipelineSchedule, num_microbatches: int) -> Demand:
    """What each rank holds at most in a run of batches with so many microbatches, whose programs are built and proved.

    Raises ValueError as `Schedule.validate`, and where the checker refuses them.
    """
    if schedule.weights.drains:
        program = schedule.build((num_microbatches,))
        return demand_of(program, check(program))
    periodic = schedule.build_periodic(num_microbatches)
    return demand_of(periodic.unroll(1), check_periodic(periodic))


def demand_of(program: Program, report: CheckReport) -> Demand:
    """The demand of a training program that has been proved."""
    ranks = range(program.num_ranks)
    versions = report.live_versions or (1,) * program.num_stages
    evicts = [any(report.evicted_microbatches[stage] for stage in program.stages_of(rank)) for rank in ranks]
    return Demand(
        rank_of_stage=program.rank_of_stage,
        saved_microbatches=report.peak_saved_microbatches,
        own_microbatches=_own_microbatches(program),
        saved_on_rank=report.peak_saved_on_rank,
        live_versions=tuple(max(versions[stage] for stage in program.stages_of(rank)) for rank in ranks),
        gradient_buffers=tuple(_gradient_buffers(program, rank) for rank in ranks),
        held_gradients=tuple(_held(program, rank, Kind.HOLD) for rank in ranks),
        held_embeddings=tuple(_held(program, rank, Kind.REDUCE_PARTIAL_EMBED) for rank in ranks),
        predicts=(program.weights.predicts,) * program.num_ranks,
        receives_ahead=tuple(_receives_ahead(program, rank) for rank in ranks),
        evicts=tuple(evicts),
        accepts=tuple(any(evicts) and evicts[program.pairs.of_rank(rank)] for rank in ranks),
        boundaries=report.peak_boundaries_on_rank,
        moments=tuple(moments_of(program.rows[rank], program.stages_of(rank)) for rank in ranks)
        if any(report.peak_deferred_microbatches)
        else (),
        num_frozen=program.graph.num_frozen,
        unread=tuple(_unread(program, rank) for rank in ranks) if program.graph.num_frozen else (),
    )


def _own_microbatches(program: Program) -> tuple[int, ...]:
    held, peaks = [0] * program.num_stages, [0] * program.num_stages
    first_trained = program.graph.num_frozen
    for instruction in (each for row in program.rows for each in row):
        if instruction.kind is Kind.FORWARD and instruction.stage >= first_trained:
            held[instruction.stage] += 1
            peaks[instruction.stage] = max(peaks[instruction.stage], held[instruction.stage])
        elif instruction.kind in ENDS_BACKWARD:
            held[instruction.stage] -= 1
    return tuple(peaks)


def _unread(program: Program, rank: int) -> int:
    """The most tensors that a frozen stage which hands on to another rank leaves unread."""
    leaves = program.stages_of(rank)[-1]
    return program.graph.most_unread(leaves) if program.graph.is_forward_only(leaves) else 0


def _gradient_buffers(program: Program, rank: int) -> int:
    open_batches: set[int] = set()
    peak = 0
    for instruction in program.rows[rank]:
        if instruction.kind in BEGINS_BACKWARD:
            open_batches.add(program.batch_of(instruction.microbatch))
            peak = max(peak, len(open_batches))
        elif instruction.kind is Kind.STEP:
            open_batches.discard(instruction.version - 1)
    return peak


def _held(program: Program, rank: int, keeps: Kind) -> int:
    """The most copies at once that a word makes for a prediction, and the prediction drops."""
    held: set[int] = set()
    peak = 0
    for instruction in program.rows[rank]:
        if instruction.kind is keeps:
            held.add(instruction.version)
            peak = max(peak, len(held))
        elif instruction.kind is Kind.PREDICT:
            held.discard(instruction.version)
    return peak


def _receives_ahead(program: Program, rank: int) -> int:
    posted: set[tuple[Tensor, int, int]] = set()
    peak = 0
    for instruction in program.rows[rank]:
        word, key = instruction.kind.row, (instruction.stage, instruction.microbatch)
        if word.receives:
            posted.add((word.receives, *key))
            peak = max(peak, len(posted))
        elif word.needs:
            posted.discard((word.needs, *key))
    return peak
