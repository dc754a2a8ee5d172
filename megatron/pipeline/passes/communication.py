"""Lower an order of computations to transfers between ranks.

Each transfer is placed in one move, both ends at once, so neither end can be missing:

- SEND directly after the computation that makes the tensor;
- RECV before the computation that precedes the one that needs it, so that the transfer runs while that one computes.

A receive never leaves its leg: where a batch begins, the run may be drained instead, and a receive posted there would
wait for a tensor that nobody sends. SEND and RECV only post, and only the computation that needs a tensor waits. So
whatever order of computations can run, can run with its transfers, even where a send completes only once its receive
is posted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.pipeline.instruction import RECEIVE_OF, SEND_OF, Instruction, Tensor
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


class _Draft:
    """A leg, and the transfers to be set between its instructions."""

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self._sends: dict[int, list[Instruction]] = {}  # by the position of what makes the tensor
        self._receives: dict[int, list[tuple[int, Instruction]]] = {}  # by where to post: (needed where, receive)

    def needs(self) -> Iterator[tuple[int, int]]:
        """Of each computation that may need a tensor: its position, and the position before which to post the receive.

        A recompute and the backward after it count as one computation.
        """
        before = current = None
        for position, instruction in enumerate(self.leg):
            if current is None and instruction.kind.is_computation:
                current = position
            if instruction.kind.row.needs is not None:
                yield position, current if before is None else before
                before, current = current, None

    def send(self, instruction: Instruction, *, made: int) -> None:
        self._sends.setdefault(made, []).append(instruction)

    def receive(self, instruction: Instruction, *, needed: int, posted: int) -> None:
        self._receives.setdefault(posted, []).append((needed, instruction))

    def joined(self) -> Leg:
        """The leg with its transfers; of receives at one place, what is needed first stands first; of sends, that to
        the nearest stage.
        """
        result: Leg = []
        for position, instruction in enumerate(self.leg):
            if position in self._receives:
                result += [receive for _, receive in sorted(self._receives[position], key=lambda pair: pair[0])]
            result.append(instruction)
            result += self._sends.get(position, ())
        return result


def add_communication(legs_of_rank: Sequence[Legs], outline: Program) -> list[Legs]:
    """The legs of all ranks, with the transfers that take each tensor to the stage on another rank that needs it.

    Raises:
        ValueError: a computation makes a tensor that nothing needs.
    """
    drafts_of_rank = [[_Draft(leg) for leg in legs] for legs in legs_of_rank]
    drafts = [draft for drafts in drafts_of_rank for draft in drafts]
    graph = outline.graph
    needs: dict[tuple[Tensor, int, int], tuple[_Draft, int, int]] = {}  # (tensor, stage, microbatch) -> where
    for draft in drafts:
        for needed, posted in draft.needs():
            instruction = draft.leg[needed]
            tensor = instruction.kind.row.needs
            needs[tensor, instruction.stage, instruction.microbatch] = draft, needed, posted
    for draft in drafts:
        for made, instruction in enumerate(draft.leg):
            tensor = instruction.kind.row.makes
            if tensor is None:
                continue
            stage, microbatch = instruction.stage, instruction.microbatch
            for target in sorted(graph.takers(tensor, stage), key=lambda each: abs(each - stage)):
                if not outline.crosses(stage, target):
                    continue
                need = tensor, target, microbatch
                if need not in needs:
                    raise ValueError(f"{instruction} makes a tensor for stage {target}, where nothing needs it")
                receiver, needed, posted = needs[need]
                send, receive = (
                    Instruction(SEND_OF[tensor], stage, microbatch),
                    Instruction(RECEIVE_OF[tensor], target, microbatch),
                )
                draft.send(replace(send, peer=graph.named_peer(send, target)), made=made)
                receive = replace(receive, peer=graph.named_peer(receive, stage))
                receiver.receive(receive, needed=needed, posted=posted)
    return [[draft.joined() for draft in drafts] for drafts in drafts_of_rank]
