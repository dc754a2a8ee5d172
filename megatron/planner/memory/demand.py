"""The demand of a run on the ranks' memory, in microbatches, weight versions and buffers (other files count bytes).

A demand is read from proved programs (`proved_demand`), or computed from the schedule (`closed_form_demand`);
`schedule_demand` chooses the cheaper of the two that is exact (schedule_demand.py).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import ge
from typing import NamedTuple

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, MOVES, SWAPS, Instruction, Kind


class Moment(NamedTuple):
    """The numbers of microbatches that a rank holds at one time, for each of its stages in ascending order.

    Attributes:
        saved: microbatches between F and the end of B or I.
        deferred: microbatches between I and the end of W.
        recomputed: saved microbatches whose R has run; for a stage that recomputes nothing, 1 if it saves any
            microbatch, else 0. Empty: the rank recomputes nothing.
        kept: saved microbatches that are not recomputed, of a stage that recomputes others. Empty: there are none.
        accepted: microbatches accepted from the pair of the stage. Empty: there are none.
    """

    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


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
        repeats_update: predictions repeat the last update, for which a step copies the parameters that it steps.
        receives_ahead: by rank, receives that are posted and not yet used.
        evicts, accepts: by rank, whether activations move away from the rank, or to it.
        on_host: by rank, microbatches of all its stages whose saved activations are on the host; empty: none.
        boundaries: by rank, if weights live on the host: tensors between stages on the device that wait for another
            stage of the rank or for their recompute; else empty.
        moments: by rank, if backwards are split or the program recomputes only some microbatches: the moments that no
            other moment dominates in all numbers; else empty.
        num_frozen: the number of frozen stages at the front, which keep only weights.
        unread: by rank, outputs of a frozen stage that the next rank has not read.
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

    A demand without moments counts as one moment: the stages hold all their saved microbatches at once, and one of each
    stage is recomputed.
    """
    if not (first.moments or other.moments):
        return ()
    found = []
    for rank in range(first.num_ranks):
        stages, of_rank = first.stages_of(rank), []
        for each in (first, other):
            saved = tuple(each.saved_microbatches[stage] for stage in stages)
            of_rank += each.moments[rank] if each.moments else [Moment(saved, (0,) * len(stages))]
        has = Moment(*(any(numbers) for numbers in zip(*of_rank, strict=True)))
        found.append(largest_moments(
            each._replace(
                recomputed=each.recomputed or (1,) * len(stages) * has.recomputed,
                kept=each.kept or (0,) * len(stages) * has.kept,
                accepted=each.accepted or (0,) * len(stages) * has.accepted,
            )
            for each in of_rank
        ))  # fmt: skip
    return tuple(found)


def largest_moments(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments that no other moment dominates in all numbers, in order."""
    found: dict[Moment, tuple[int, ...]] = {}
    numbers = {moment: tuple(chain.from_iterable(moment)) for moment in moments}
    # A moment that dominates another has the larger sum.
    for moment in sorted(numbers, key=lambda each: sum(numbers[each]), reverse=True):
        if not any(all(map(ge, other, numbers[moment])) for other in found.values()):
            found[moment] = numbers[moment]
    return tuple(sorted(found))


def moments_of(
    row: Iterable[Instruction],
    stages: Sequence[int],
    *,
    keeps: Callable[[int, int], bool] = lambda *_: False,
    complete: Mapping[int, int] | None = None,
) -> tuple[Moment, ...]:
    """The `Demand.moments` of the row of a rank with the given stages.

    Activations that a computation frees count until the computation ends. Activations that it leaves count from then
    on. Moves that are posted and not yet waited for may be complete or not: each possible number of complete moves is a
    moment.

    Args:
        keeps: whether a microbatch of a stage is not recomputed.
        complete: position -> how many of the row's first moves are complete there; None: the row has no moves.
    """
    row, place = tuple(row), {stage: place for place, stage in enumerate(stages)}
    again = {each.stage: set() for each in row if each.kind is Kind.RECOMPUTE}
    saved, deferred, kept, accepted = ([0] * len(stages) for _ in range(4))
    keeps_some = any(each.kind is Kind.FORWARD and each.stage in again and keeps(each.stage, each.microbatch)
                     for each in row)  # fmt: skip
    accepts = any(each.kind.row.of_pair for each in row)
    moves: deque[Instruction] = deque()  # posted, and perhaps not complete
    num_complete, found = 0, []

    def save(each: Instruction, change: int) -> None:
        saved[place[each.stage]] += change
        if keeps_some and each.stage in again and keeps(each.stage, each.microbatch):
            kept[place[each.stage]] += change

    def move(each: Instruction, sign: int = 1) -> None:
        if each.kind.row.of_pair:
            accepted[place[each.stage]] += sign * each.kind.row.saved
        else:
            save(each, sign * each.kind.row.saved)

    def note() -> None:
        for number in range(len(moves) + 1):
            if number:
                move(moves[number - 1])
            made = (len(again[stage]) if stage in again else int(saved[at] > 0) for stage, at in place.items())
            found.append(Moment(
                tuple(saved), tuple(deferred), tuple(made) if again else (), tuple(kept) if keeps_some else (),
                tuple(accepted) if accepts else (),
            ))  # fmt: skip
        for each in moves:
            move(each, -1)

    for position, each in enumerate(row):
        for _ in range(num_complete, (complete or {}).get(position, 0)):
            move(moves.popleft())
            num_complete += 1
        begins, ends = each.kind in BEGINS_BACKWARD, each.kind in ENDS_BACKWARD
        if each.kind is Kind.FORWARD:
            save(each, 1)
        elif each.kind is Kind.RECOMPUTE:
            again[each.stage].add(each.microbatch)
        elif each.kind in MOVES | SWAPS:
            moves.append(each)
        if begins or ends or complete:
            note()
        if begins:
            save(each, -1)
            again.get(each.stage, set()).discard(each.microbatch)
        if begins != ends:
            deferred[place[each.stage]] += 1 if begins else -1
    return largest_moments(found)
