"""Lower an order of computations to transfers between ranks.

Each transfer is placed in one move, both ends at once, so neither end can be missing:

- SEND directly after the computation that makes the tensor;
- RECV before the computation that precedes the one that needs it, so that the transfer runs while that one computes.

A receive does not leave its segment: where a batch begins, the run may be drained instead, and a receive posted there
would wait for a tensor that nobody sends. But where a rank goes on with a batch that has begun, drained or not, its
next computation is known (`Order.first_after_border`), and so its receive is posted in the segment before. SEND and
RECV only post, and only the computation that needs a tensor waits. So whatever order of computations can run, can run
with its transfers, even where a send completes only once its receive is posted.
"""

from collections.abc import Iterator, Sequence

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import RECEIVE_OF, SEND_OF, Instruction, Kind, Tensor
from megatron.pipeline.schedules.passes import Segment, Segments

Turn = tuple[Kind, int, int]
"""What computes, its stage, and how many microbatches it is behind the first of the batch that begins."""


class _Draft:
    """A segment, and the transfers to be set between its instructions."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.last_begins: int | None = None  # where the last such computation begins, once `needs` has gone through
        self._sends: dict[int, list[Instruction]] = {}  # by the position of what makes the tensor
        # by where to post: (needed where, receive); those that are needed in the next segment as if behind this one
        self._receives: dict[int, list[tuple[int, Instruction]]] = {}

    def computations(self) -> Iterator[tuple[int, int]]:
        """Where each computation that may need a tensor begins, and its position; a recompute and the backward after it
        count as one.
        """
        begins = None
        for position, instruction in enumerate(self.segment):
            if begins is None and instruction.kind.is_computation:
                begins = position
            if instruction.kind.row.needs is not None:
                yield begins, position
                begins = None

    def needs(self) -> Iterator[tuple[int, int]]:
        """The position of each computation that may need a tensor, and that before which to post the receive."""
        before = None
        for begins, position in self.computations():
            yield position, begins if before is None else before
            before = begins
        self.last_begins = before

    def send(self, instruction: Instruction, *, made: int) -> None:
        self._sends.setdefault(made, []).append(instruction)

    def receive(self, instruction: Instruction, *, needed: int, posted: int) -> None:
        self._receives.setdefault(posted, []).append((needed, instruction))

    def joined(self) -> Segment:
        """The segment with its transfers; of receives at one place, what is needed first stands first; of sends, that
        to the nearest stage.
        """
        result: Segment = []
        for position, instruction in enumerate(self.segment):
            if position in self._receives:
                result += [receive for _, receive in sorted(self._receives[position], key=lambda pair: pair[0])]
            result.append(instruction)
            result += self._sends.get(position, ())
        return result


_Needs = dict[tuple[Tensor, int, int], tuple[_Draft, int, int]]  # (tensor, stage, microbatch) -> where


def _post_earlier(turns: Sequence[Turn], drafts: Sequence[_Draft], extent: Extent, needs: _Needs) -> None:
    """Post the receives of what a rank does next after a border before its last computation ahead of the border."""
    first = extent.first_microbatch
    border = first
    for place, size in enumerate(extent.batches):
        border += size
        begins = drafts[place].last_begins
        goes_on = next(
            ((kind, stage, border - behind) for kind, stage, behind in turns if border - behind >= first), None
        )
        if begins is None or goes_on is None:
            continue
        kind, stage, microbatch = goes_on
        draft, needed, _ = needs[kind.row.needs, stage, microbatch]
        assert draft is drafts[place + 1], "it stands right behind the border"
        needs[kind.row.needs, stage, microbatch] = drafts[place], len(drafts[place].segment) + needed, begins


_Route = tuple[int, Kind, Kind, int | None, int | None]
"""The stage a tensor goes to, the words of both ends, and the peer that each of them names."""


def _routes(extent: Extent, tensor: Tensor, stage: int) -> list[_Route]:
    """Where a tensor of a stage is sent, the nearest stage first."""
    graph, send, receive = extent.graph, SEND_OF[tensor], RECEIVE_OF[tensor]
    return [
        (
            target, send, receive, graph.named_peer(Instruction(send, stage), target),
            graph.named_peer(Instruction(receive, target), stage),
        )
        for target in sorted(graph.takers(tensor, stage), key=lambda each: abs(each - stage))
        if extent.crosses(stage, target)
    ]  # fmt: skip


def add_communication(
    segments_of_rank: Sequence[Segments], extent: Extent, after_borders: Sequence[Sequence[Turn]] = ()
) -> list[Segments]:
    """The segments of all ranks, with the transfers that take each tensor to the stage on another rank that needs it.

    `after_borders`: for each rank, its order's `first_after_border`; none: receives stay in their segments.

    Raises:
        ValueError: a computation makes a tensor that nothing needs.
    """
    drafts_of_rank = [[_Draft(segment) for segment in segments] for segments in segments_of_rank]
    drafts = [draft for drafts in drafts_of_rank for draft in drafts]
    needs: _Needs = {}
    for draft in drafts:
        for needed, posted in draft.needs():
            instruction = draft.segment[needed]
            tensor = instruction.kind.row.needs
            needs[tensor, instruction.stage, instruction.microbatch] = draft, needed, posted
    for turns, own in zip(after_borders, drafts_of_rank, strict=False):
        _post_earlier(turns, own, extent, needs)
    routes = {
        (tensor, stage): _routes(extent, tensor, stage) for tensor in Tensor for stage in range(extent.num_stages)
    }
    for draft in drafts:
        for made, instruction in enumerate(draft.segment):
            tensor = instruction.kind.row.makes
            if tensor is None:
                continue
            stage, microbatch = instruction.stage, instruction.microbatch
            for target, send, receive, send_peer, receive_peer in routes[tensor, stage]:
                need = tensor, target, microbatch
                if need not in needs:
                    raise ValueError(f"{instruction} makes a tensor for stage {target}, where nothing needs it")
                receiver, needed, posted = needs[need]
                draft.send(Instruction(send, stage, microbatch, None, send_peer), made=made)
                receiver.receive(
                    Instruction(receive, target, microbatch, None, receive_peer), needed=needed, posted=posted
                )
    return [[draft.joined() for draft in drafts] for drafts in drafts_of_rank]
