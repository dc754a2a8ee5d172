"""What proved programs ask of the ranks' memory, in microbatches, versions and buffers.

No formula of its own: the checker reports what is saved and which versions live; the rest is read off the rows. So the
numbers are those of the very programs that run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from megatron.pipeline.check import CheckReport
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Kind, Tensor
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.stages import stages_of


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is held at once at most, over all programs of a run.

    Attributes:
        rank_of_stage: as the programs'.
        saved_microbatches: by stage, as the checker proves them; those of the pair that it accepts included.
        own_microbatches: by stage: between their forward and the end of their backward, wherever they are.
        saved_on_rank: by rank, over all its stages.
        live_versions: by rank.
        gradient_buffers: by rank: batches between their first backward and their STEP.
        held_gradients: by rank: copies of gradients between HOLD and PREDICT.
        held_embeddings: by rank: the same of tied embeddings alone.
        predicts: by rank, whether the live versions are predictions, beside which the true weights are kept.
        receives_ahead: by rank: receives that are posted and not yet used.
        evicts, accepts: by rank, whether activations move away from it, or to it.
        boundaries: by rank, where weights live on the host: tensors between stages on the device, which wait for
            another stage of the rank or for their recompute; else empty.
        num_frozen: stages in front that are frozen: they keep weights alone.
        unread: by rank: outputs of a frozen stage that the next rank has not read.
    """

    rank_of_stage: tuple[int, ...]
    saved_microbatches: tuple[int, ...]
    own_microbatches: tuple[int, ...]
    saved_on_rank: tuple[int, ...]
    live_versions: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    held_gradients: tuple[int, ...]
    held_embeddings: tuple[int, ...]
    predicts: tuple[bool, ...]
    receives_ahead: tuple[int, ...]
    evicts: tuple[bool, ...]
    accepts: tuple[bool, ...]
    boundaries: tuple[int, ...] = ()
    num_frozen: int = 0
    unread: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.saved_on_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(self.rank_of_stage, rank)


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
        num_frozen=program.graph.num_frozen,
        unread=tuple(_unread(program, rank) for rank in ranks) if program.graph.num_frozen else (),
    )


def most(demands: Iterable[Demand]) -> Demand:
    """The largest of each number: what a run needs that executes all of these programs."""
    first, *others = demands
    for other in others:
        assert (other.rank_of_stage, other.num_frozen) == (first.rank_of_stage, first.num_frozen)
        names = [field.name for field in fields(Demand) if field.name != "num_frozen"]
        largest = {name: tuple(map(max, getattr(first, name), getattr(other, name))) for name in names}
        first = Demand(**largest, num_frozen=first.num_frozen)
    return first


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
    """The outputs of a frozen stage that hands on to another rank."""
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
