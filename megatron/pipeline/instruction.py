"""One instruction of a pipeline program, and its text form.

A schedule is data only if its smallest part can be written down, read back and compared. An instruction is a frozen
value: what to do (`Kind`), on which global stage, and where they apply the microbatch, the weight version and the peer.
Its text form (`2F5@1`, `2SEND_F5`, `2STEP@4`) is a superset of torch.distributed.pipelining's. Reading it is strict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(str, Enum):
    """What an instruction does; the value is its word in the text form."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of input and weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"  # the forward again, from the stored input
    SEND_F = "SEND_F"  # post the transfer of an activation to the next stage
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # post the transfer of a gradient to the stage before
    RECV_B = "RECV_B"
    EVICT = "EVICT"  # move the saved activations of a microbatch to the pair stage, and back
    ACCEPT = "ACCEPT"
    RETURN = "RETURN"
    LOAD = "LOAD"
    REDUCE_GRAD = "REDUCE_GRAD"  # the chain that leads to a version
    REDUCE_EMBED = "REDUCE_EMBED"
    REDUCE_NORM = "REDUCE_NORM"
    STEP = "STEP"  # waits for the chain, then makes the version

    @property
    def is_computation(self) -> bool:
        return self in COMPUTATIONS

    @property
    def is_transfer(self) -> bool:
        return self in TRANSFERS

    @property
    def is_move(self) -> bool:
        return self in MOVES

    @property
    def is_update(self) -> bool:
        return self in UPDATES


COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE})
MOVES = frozenset({Kind.EVICT, Kind.ACCEPT, Kind.RETURN, Kind.LOAD})
TRANSFERS = MOVES | {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
UPDATES = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM, Kind.STEP})

_WORDS = "|".join(kind.value for kind in Kind)
_TEXT = re.compile(rf"(0|[1-9][0-9]*)({_WORDS})(0|[1-9][0-9]*)?(?:@(0|[1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction for one stage.

    Attributes:
        kind: what to do.
        stage: global (virtual) stage.
        microbatch: numbered on over the whole run; None for updates.
        version: the weight version that a computation uses or an update leads to; None for transfers, and where a
            program says nothing about versions.
        peer: the other stage of a transfer; None where the kind implies it.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    version: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.kind.value}{microbatch}{version}"

    def shifted(self, *, microbatches: int, versions: int) -> Instruction:
        """The same instruction, later in the run."""
        return Instruction(
            self.kind,
            self.stage,
            None if self.microbatch is None else self.microbatch + microbatches,
            None if self.version is None else self.version + versions,
            self.peer,
        )

    @staticmethod
    @lru_cache(maxsize=65536)
    def parse(text: str) -> Instruction:
        """Read the text form; the whole text must be one instruction.

        Raises:
            ValueError: an unknown word, characters left over, a microbatch or version missing or out of place.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an instruction; the form is STAGE WORD MICROBATCH[@VERSION], "
                "such as 2F5@1, 2SEND_F5 or 2STEP@4"
            )
        stage, word, microbatch, version = match.groups()
        kind = Kind(word)
        if kind.is_update:
            if microbatch is not None or version is None:
                raise ValueError(f"{text!r}: {word} takes a version and no microbatch, such as {stage}{word}@1")
        elif microbatch is None:
            raise ValueError(f"{text!r}: {word} needs a microbatch, such as {stage}{word}0")
        elif kind.is_transfer and version is not None:
            raise ValueError(f"{text!r}: {word} moves a tensor and takes no weight version")
        return Instruction(
            kind,
            int(stage),
            None if microbatch is None else int(microbatch),
            None if version is None else int(version),
        )
