"""Lower an order of computations to transfers between ranks.

Each transfer is placed in one move, both ends at once, so none can lack its other end and the two ends of a channel list the same microbatches:

- SEND directly after the computation that makes the tensor;
- RECV before the computation that precedes the one that needs the tensor, so that the transfer runs while that one computes.

A receive never moves out of its leg: where a batch begins, the run may be drained instead, and a receive posted there would wait for a tensor that
nobody sends. SEND and RECV only post, and only the computation that needs a tensor waits. So whatever order of computations can run, can run with
its transfers, even where a send completes only once its receive is posted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


class _Transfer(NamedTuple):
    """What a computation makes for another stage: the words of both ends, and how far away that stage is."""

    send: Kind
    receive: Kind
    distance: int


_MAKES = {
    Kind.FORWARD: _Transfer(Kind.SEND_F, Kind.RECV_F, +1),
    Kind.BACKWARD: _Transfer(Kind.SEND_B, Kind.RECV_B, -1),
    Kind.BACKWARD_INPUT: _Transfer(Kind.SEND_B, Kind.RECV_B, -1),
}
_NEEDS = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B, Kind.BACKWARD_INPUT: Kind.RECV_B}


class _Draft:
    """A leg, and the transfers to be set between its instructions."""

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self._before: dict[int, list[tuple[int, Instruction]]] = {}  # position -> receives, each with the position of what needs it
        self._after: dict[int, Instruction] = {}

    def needs(self) -> list[tuple[int, int]]:
        """(position of a computation that may need a tensor, position before which that tensor's receive is posted)."""
        pairs, current, previous = [], None, None
        for position, instruction in enumerate(self.leg):
            if current is None and instruction.kind.is_computation:
                current = position  # a recompute and the backward after it are one computation here
            if instruction.kind in _NEEDS:
                pairs.append((position, current if previous is None else previous))
                previous, current = current, None
        return pairs

    def send(self, position: int, instruction: Instruction) -> None:
        self._after[position] = instruction

    def receive(self, needed: int, posted: int, instruction: Instruction) -> None:
        self._before.setdefault(posted, []).append((needed, instruction))

    def joined(self) -> Leg:
        result = []
        for position, instruction in enumerate(self.leg):
            if position in self._before:
                result += [receive for _, receive in sorted(self._before[position], key=lambda pair: pair[0])]
            result.append(instruction)
            if position in self._after:
                result.append(self._after[position])
        return result


def add_communication(rows: Sequence[Legs], outline: Program) -> list[Legs]:
    """The legs of all ranks, with the transfers that take each tensor from its stage to the next one on another rank.

    Raises:
        ValueError: a computation makes a tensor for a stage on which nothing needs it.
    """
    drafts = [[_Draft(leg) for leg in legs] for legs in rows]
    needs = {}
    for draft in (draft for legs in drafts for draft in legs):
        for needed, posted in draft.needs():
            instruction = draft.leg[needed]
            needs[_NEEDS[instruction.kind], instruction.stage, instruction.microbatch] = draft, needed, posted
    for draft in (draft for legs in drafts for draft in legs):
        for position, instruction in enumerate(draft.leg):
            transfer = _MAKES.get(instruction.kind)
            if transfer is None or not outline.crosses(instruction.stage, instruction.stage + transfer.distance):
                continue
            target, microbatch = instruction.stage + transfer.distance, instruction.microbatch
            need = needs.get((transfer.receive, target, microbatch))
            if need is None:
                raise ValueError(f"{instruction} makes a tensor for stage {target}, where nothing needs it; complete the order of computations")
            receiver, needed, posted = need
            draft.send(position, Instruction(transfer.send, instruction.stage, microbatch))
            receiver.receive(needed, posted, Instruction(transfer.receive, target, microbatch))
    return [[draft.joined() for draft in legs] for legs in drafts]
