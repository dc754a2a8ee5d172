"""The demand of a run on the ranks' memory, in microbatches, weight versions and buffers (other files count bytes).

A demand is read from proved programs (`proved_demand`), or computed from the schedule (`closed_form_demand`);
`schedule_demand` chooses the cheaper of the two that is exact (schedule_demand.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import ge

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Instruction, Kind

Moment = tuple[int, ...]
"""The numbers of microbatches that a rank holds at one time.

The first numbers count, for each stage of the rank in ascending order, the microbatches between F and the end of B or
I. As many numbers follow, which count for each stage the microbatches between I and the end of W. If the rank
recomputes, as many again count the microbatches whose activations a stage has recomputed; of a stage that recomputes
nothing, they say whether a microbatch waits for an I."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The largest numbers of microbatches, versions and buffers that stages and ranks hold at once in a run.

    Attributes:
        rank_of_stage: the rank of each stage.
        saved_microbatches: by stage, saved microbatches as the checker proves, including those accepted from the paired
            rank.
        own_microbatches: by stage, microbatches between their forward and the end of their backward, on any rank.
        saved_on_rank: by rank, saved microbatches of all its stages.
        live_versions: by rank, live weight versions.
        gradient_buffers: by rank, batches between their first backward and their STEP.
        held_gradients: by rank, copies of gradients between HOLD and PREDICT.
        held_embeddings: by rank, copies of gradients of tied embeddings alone between HOLD and PREDICT.
        predicts: by rank, whether live versions are predictions, beside the true weights.
        repeats_update: predictions take the last update again, for which a step copies what it steps.
        receives_ahead: by rank, receives that are posted and not yet used.
        evicts, accepts: by rank, whether activations move away from the rank, or to it.
        on_host: by rank, microbatches of all its stages whose saved activations are on the host; empty: none.
        boundaries: by rank, if weights live on the host: tensors between stages on the device that wait for another
            stage of the rank or for their recompute; else empty.
        moments: by rank, if backwards are split: the moments that no other moment dominates in all numbers; else empty.
        num_frozen: the number of frozen stages at the front, which keep only weights.
        unread: by rank, outputs of a frozen stage that the next rank has not read.
        kept_microbatches: by stage, if the program recomputes only some: microbatches without recompute between their
            forward and the end of their backward; else empty.
        recomputed_microbatches: by stage, if the program recomputes only some, or several at once: microbatches between
            their recompute and the end of their backward; else empty.
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
    on_host: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    moments: tuple[tuple[Moment, ...], ...] = ()
    num_frozen: int = 0
    unread: tuple[int, ...] = ()
    kept_microbatches: tuple[int, ...] = ()
    recomputed_microbatches: tuple[int, ...] = ()
    repeats_update: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.saved_on_rank)

    @property
    def in_one_buffer(self) -> "Demand":
        """The demand if the gradients of a batch are applied before the next batch fills the buffer."""
        return replace(self, gradient_buffers=(1,) * self.num_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(self.rank_of_stage, rank)


def most(demands: Iterable[Demand]) -> Demand:
    """The demand of a run that executes several programs: the largest value of each number over their demands."""
    first, *others = demands
    for other in others:
        assert (other.rank_of_stage, other.num_frozen) == (first.rank_of_stage, first.num_frozen)
        names = [
            field.name for field in fields(Demand) if field.name not in ("num_frozen", "moments", "repeats_update")
        ]
        largest = {name: tuple(map(max, getattr(first, name), getattr(other, name))) for name in names}
        repeats = first.repeats_update or other.repeats_update
        first = Demand(
            **largest, moments=_moments_of_both(first, other), num_frozen=first.num_frozen, repeats_update=repeats
        )
    return first


def _moments_of_both(first: Demand, other: Demand) -> tuple[tuple[Moment, ...], ...]:
    """The largest moments of two demands; empty if neither has any.

    The moment of a demand without moments is all microbatches that its stages save, at once, one of each recomputed.
    """
    if not (first.moments or other.moments):
        return ()
    found = []
    for rank in range(first.num_ranks):
        of_rank: list[Moment] = []
        stages, known = first.stages_of(rank), [each.moments[rank] for each in (first, other) if each.moments]
        recomputes = any(len(moment) > 2 * len(stages) for moments in known for moment in moments)
        for each in (first, other):
            saved = *(each.saved_microbatches[stage] for stage in stages), *(0 for _ in stages)
            saved += (1,) * len(stages) if recomputes else ()
            of_rank += each.moments[rank] if each.moments else [saved]
        found.append(largest_moments(of_rank))
    return tuple(found)


def largest_moments(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments that no other moment dominates in all numbers, in order."""
    found: list[Moment] = []
    for moment in sorted(set(moments), key=sum, reverse=True):  # a dominating moment has the larger sum
        if not any(all(map(ge, other, moment)) for other in found):
            found.append(moment)
    return tuple(sorted(found))


def moments_of(row: Iterable[Instruction], stages: Sequence[int]) -> tuple[Moment, ...]:
    """The `Demand.moments` of the row of a rank with the given stages.

    Activations that a computation frees count until its end. Activations that it leaves count from its end on.
    """
    row, count = tuple(row), len(stages)
    whole = {stage: place for place, stage in enumerate(stages)}
    again = {each.stage: set() for each in row if each.kind is Kind.RECOMPUTE}
    held, found = [0] * (2 * count), []

    def moment() -> Moment:
        made = (len(again[stage]) if stage in again else int(held[place] > 0) for stage, place in whole.items())
        return (*held, *made) if again else tuple(held)

    for each in row:
        if each.kind is Kind.FORWARD:
            held[whole[each.stage]] += 1
            continue
        if each.kind is Kind.RECOMPUTE:
            again[each.stage].add(each.microbatch)
        begins, ends = each.kind in BEGINS_BACKWARD, each.kind in ENDS_BACKWARD
        if begins or ends:
            found.append(moment())
        if begins:
            held[whole[each.stage]] -= 1
            again.get(each.stage, set()).discard(each.microbatch)
        if begins != ends:
            held[whole[each.stage] + count] += 1 if begins else -1
    return largest_moments(found)
