"""Add the transfers between ranks to an order of computations.

Both ends of a transfer are placed together, so neither end can be missing:

- SEND stands directly after the computation that makes the tensor.
- RECV stands one computation before the computation that needs the tensor, so the transfer overlaps that computation.
  A link that takes longer than a computation needs receives that stand further ahead.

A receive stays in its segment. At the border of a segment the run may drain instead of beginning a batch, and a receive
posted before the border would wait for a tensor that no rank sends. There is one exception. If the rank's first
computation after the border is the same in both cases (`Order.first_after_border`), its receive is posted in the
segment before.

SEND and RECV only post, and only the computation that needs a tensor waits. So an order of computations without
deadlock stays without deadlock, even if a send completes only after its receive is posted.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import RECEIVE_OF, SEND_OF, Instruction, Kind, Tensor
from megatron.pipeline.schedules.passes import Segment, Segments

Turn = tuple[Kind, int, int]
"""Kind and stage of a computation, and the number of microbatches that it is behind the first one of the new batch."""


class _Draft:
    """A segment, and the transfers that are to stand between its instructions.

    Attributes:
        segment: the segment without transfers.
        receives_ahead: a receive stands this many computations before the one that needs the tensor.
        last_begins: where the last computation that may need a tensor begins; set at the end of `needs`.
    """

    def __init__(self, segment: Segment, receives_ahead: int) -> None:
        self.segment, self.receives_ahead = segment, receives_ahead
        self.last_begins: int | None = None
        self._sends: dict[int, list[Instruction]] = {}  # position of the computation that makes the tensor -> SENDs
        # Position to post at -> (position that needs the tensor, RECV). The next segment continues the count.
        self._receives: dict[int, list[tuple[int, Instruction]]] = {}

    def computations(self) -> Iterator[tuple[int, int]]:
        """Yield, for each computation that may need a tensor, the position where it begins and its own position.

        A recompute and the backward after it count as one computation, which begins at the recompute.
        """
        begins = None
        for position, instruction in enumerate(self.segment):
            if begins is None and instruction.kind.is_computation:
                begins = position
            if instruction.kind.row.needs is not None:
                yield begins, position
                begins = None

    def needs(self) -> Iterator[tuple[int, int]]:
        """Yield the position of each computation that may need a tensor, and the position before which to post."""
        before: deque[int] = deque(maxlen=self.receives_ahead)
        for begins, position in self.computations():
            yield position, before[0] if before else begins
            before.append(begins)
        self.last_begins = before[-1] if before else None

    def send(self, instruction: Instruction, *, made: int) -> None:
        self._sends.setdefault(made, []).append(instruction)

    def receive(self, instruction: Instruction, *, needed: int, posted: int) -> None:
        self._receives.setdefault(posted, []).append((needed, instruction))

    def joined(self) -> Segment:
        """Return the segment with its transfers.

        Receives at the same place stand in the order in which their tensors are needed. Sends at the same place stand
        in the order in which they were added.
        """
        result: Segment = []
        for position, instruction in enumerate(self.segment):
            if position in self._receives:
                result += [receive for _, receive in sorted(self._receives[position], key=lambda pair: pair[0])]
            result.append(instruction)
            result += self._sends.get(position, ())
        return result


_Needs = dict[tuple[Tensor, int, int], tuple[_Draft, int, int]]  # tensor, stage, microbatch -> draft, needed, posted


def _post_earlier(turns: Sequence[Turn], drafts: Sequence[_Draft], extent: Extent, needs: _Needs) -> None:
    """Move the receive of the first computation after each border to before the last computation ahead of it.

    This is done only if the first computation is the same whether or not the run drains.
    """
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
"""The stage that a tensor goes to, the kinds of SEND and RECV, and the peers that SEND and RECV name."""


def _routes(extent: Extent, tensor: Tensor, stage: int) -> list[_Route]:
    """Return the routes of a tensor from a stage to stages on other ranks, the nearest stage first."""
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
    segments_of_rank: Sequence[Segments],
    extent: Extent,
    after_borders: Sequence[Sequence[Turn]] = (),
    receives_ahead: int = 1,
) -> list[Segments]:
    """Add the transfers that take each tensor to the stages on other ranks that need it.

    Args:
        segments_of_rank: the segments of each rank, without transfers.
        extent: the extent of the program.
        after_borders: the `Order.first_after_border` of each rank; empty: every receive stays in its segment.
        receives_ahead: a receive stands this many computations before the one that needs the tensor, 1 or more.

    Raises:
        ValueError: a computation makes a tensor for a stage where no computation needs it.
    """
    drafts_of_rank = [[_Draft(segment, receives_ahead) for segment in segments] for segments in segments_of_rank]
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
                if extent.copies and not extent.carries(stage, target, microbatch):
                    continue
                need = tensor, target, microbatch
                if need not in needs:
                    raise ValueError(f"{instruction} makes a tensor for stage {target}, where nothing needs it")
                receiver, needed, posted = needs[need]
                draft.send(Instruction(send, stage, microbatch, None, send_peer), made=made)
                receiver.receive(
                    Instruction(receive, target, microbatch, None, receive_peer), needed=needed, posted=posted
                )
    return [[draft.joined() for draft in drafts] for drafts in drafts_of_rank]
