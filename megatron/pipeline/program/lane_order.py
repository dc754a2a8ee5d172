"""Weights that live in the host's memory: the rules, for all that execute programs.

L2L (Pudipeddi et al., 2020, section 2.1) holds the weights of few layers on the device and all on the host, which
also has the optimizer. Here a stage is what is fetched, and four words say so:

    2FETCH@1        copy version 1 of stage 2 to the device                       lane: host to device
    2FREE@1         what is computed before it was the last use of that copy      lane: host to device
    2STORE_GRAD@2   copy the gradients that lead to version 2 to the host         lane: device to host
    2UPDATE@2       the host's optimizer makes version 2 from them                lane: host optimizer

    2OFFLOAD5       copy the input of microbatch 5 to the host, and free it       lane: device to host
    2RELOAD5        copy it back, before its recompute                            lane: host to device

They only *post*. Each rank has one lane of each kind, and a lane carries out its words one after another in the order
of the row, each when the row has come to it and what it waits for is complete. FREE takes no time there: it is complete
when the computations before it are, and what stands behind it in its lane may have the room. So no FETCH takes room
that a computation still uses, under any timing.

What waits for what, besides, is `Word.awaits`: a FETCH for the UPDATE that makes its version, a STORE_GRAD for the
reduction of its gradients over the replicas, an UPDATE for the STORE_GRAD of its gradients, and every computation for
the FETCH of its weights. All this is of one stage and one version, and stands before it in the same row. Likewise
a RELOAD waits for the OFFLOAD of its microbatch, and its recompute for the RELOAD. Three rules are more:

- REDUCE_EMBED adds up the gradients of tied embeddings where they are then, on the host. So it waits for the STORE_GRAD
  of each end that its rank has, and the UPDATE of an end waits for it.
- A rank has `GRADIENT_BUFFERS` buffers for gradients. A stage takes one with its first backward of a batch, and its
  STORE_GRAD gives it back when it is complete. The backward that takes one waits until one is free.

- A forward waits for every OFFLOAD that stands before the last computation before it. An OFFLOAD thus has the time of
  one computation, and after that its memory is free, whatever the timing (as an EVICT has, see `move_order`).

OFFLOAD and RELOAD are words of their own. EVICT and LOAD are about all that a microbatch saves, and move it to another
rank; here it is its input alone, and nobody meets. So no word has two meanings, and the words that a program may have
follow from `Residency.stash`.

Nothing of this waits for what stands behind it in its row. So by itself no lane can be part of a circle: every wait
within a rank leads to a place before it in the row. A circle has to leave the rank, and it leaves only where ranks wait
for each other: in the row, for tensors, and in the chain, for reductions over several ranks.

`places` says where the weights of a rank's stages lie on the device, of which few are there at once. Every stage has a
fixed place in one memory, such that the K stages that follow one another in the order of the rank lie apart. For K = 2
the memory is filled from both ends, and is as large as the largest pair of neighbours.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.pipeline.program.instruction import (
    AWAITED,
    COMPUTATIONS,
    ENDS_BACKWARD,
    OFFLOADS,
    STASH_WORDS,
    Instruction,
    Kind,
)

GRADIENT_BUFFERS = 2
RELOADED_AHEAD = 2  # inputs that are on their way, or there, beside the one in use
EAGER, DEFERRED = "eager", "deferred"
DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class Residency:
    """How a program keeps its weights on the host.

    Attributes:
        stages: the most stages of a rank whose weights are on the device at once: of 2, one is fetched while the other
            computes.
        update: when the host updates a stage. `eager`: as soon as it has the gradients (the paper's eager parameter
            server), so that nothing in the update may depend on other stages. `deferred`: behind the rank's STEP, which
            knows the global norm and any overflow.
        stash: where the inputs of stages wait for their recompute. `device`: each stage's batch stays there, so that
            memory grows with the number of stages. `host`: they leave and come back (section 2.2's stash).

    Raises:
        ValueError: fewer stages than 1, or another word.
    """

    stages: int = 2
    update: str = DEFERRED
    stash: str = DEVICE

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"{self.stages} resident stages leave none to compute with; give 1 and more")
        if self.update not in (EAGER, DEFERRED):
            raise ValueError(f"the host's update is {self.update!r}; choose {EAGER} or {DEFERRED}")
        if self.stash not in (DEVICE, HOST):
            raise ValueError(f"the stash of inputs is {self.stash!r}; choose {DEVICE} or {HOST}")

    @property
    def is_eager(self) -> bool:
        return self.update == EAGER

    @property
    def stashes_on_host(self) -> bool:
        return self.stash == HOST

    def __str__(self) -> str:
        return f"{self.stages} {self.update}" + f" {self.stash}" * self.stashes_on_host

    @classmethod
    def parse(cls, text: str) -> Residency:
        """Read what `str` writes. Raises ValueError for any other text."""
        match = re.fullmatch(r"([0-9]+) +([a-z]+)(?: +([a-z]+))?", text)
        if match is None:
            raise ValueError(
                f"{text!r} is no number of resident stages with {EAGER} or {DEFERRED}, and {HOST} where that has the "
                f"stash, such as 2 {EAGER} or 2 {EAGER} {HOST}"
            )
        return cls(int(match[1]), match[2], match[3] or DEVICE)


def most_boundaries(num_microbatches: int) -> int:
    """The most tensors between stages that a rank with its stash on the host has on the device at once, however many
    stages it has: the batch that waits between two of them, what is reloaded ahead, and the input in use.
    """
    return num_microbatches + RELOADED_AHEAD + 1


class LaneOrder:
    """What each instruction of a row waits for, besides the words before it in its own lane.

    Instructions are told in the row's order and numbered from 0. What is kept does not grow with their number.

    Args:
        num_stages: of the whole pipeline; the first and the last are the ends of tied embeddings.
    """

    def __init__(self, num_stages: int) -> None:
        self._ends = (0, num_stages - 1)
        self._num_told = 0
        self._last: dict[tuple[Kind, int], tuple[int | None, int]] = {}  # word, stage -> version, number
        self._moved: dict[tuple[Kind, int, int | None], int] = {}  # word of the stash, until it is awaited -> number
        self._offloaded = self._offloaded_earlier = -1  # the last OFFLOAD; as it was before the last computation
        self._offload_awaited = -1
        self._in_use: set[int] = set()  # stages whose gradients are in a buffer, and to be stored
        self._stored: deque[int] = deque(maxlen=GRADIENT_BUFFERS)  # the last STORE_GRADs

    def awaited(self, instruction: Instruction) -> tuple[int, ...]:
        """The numbers of the instructions that have to be complete before this one starts."""
        kind, stage, version = instruction.kind, instruction.stage, instruction.version
        number = self._num_told
        self._num_told += 1
        stages = self._ends if kind is Kind.REDUCE_EMBED else (stage,)
        found = (self._last.get((other, each)) for other in kind.row.awaits for each in stages)
        needed = [its_number for its_version, its_number in filter(None, found) if its_version == version]
        needed += self._of_stash(instruction)
        if kind in ENDS_BACKWARD:
            needed += self._take_buffer(stage)
        elif kind is Kind.STORE_GRAD:
            self._in_use.discard(stage)
            self._stored.append(number)
        if kind in STASH_WORDS:
            self._moved[kind, stage, instruction.microbatch] = number
            self._offloaded = number if kind in OFFLOADS else self._offloaded
        elif kind in AWAITED:
            for each in stages:
                self._last[kind, each] = version, number
        return tuple(needed)

    def still_awaited(self) -> frozenset[int]:
        """The numbers of those told so far that instructions to come may wait for."""
        last = (number for _, number in self._last.values())
        offloads = (each for each in (self._offloaded, self._offloaded_earlier) if each > self._offload_awaited)
        return frozenset((*last, *self._moved.values(), *self._stored, *offloads))

    def _of_stash(self, instruction: Instruction) -> list[int]:
        """The OFFLOADs and the RELOAD that an instruction waits for."""
        words = [other for other in instruction.kind.row.awaits if other in STASH_WORDS]
        found = (self._moved.pop((other, instruction.stage, instruction.microbatch), None) for other in words)
        needed = [number for number in found if number is not None]
        if instruction.kind is Kind.FORWARD and self._offloaded_earlier > self._offload_awaited:
            needed.append(self._offloaded_earlier)
            self._offload_awaited = self._offloaded_earlier
        if instruction.kind in COMPUTATIONS:
            self._offloaded_earlier = self._offloaded
        return needed

    def _take_buffer(self, stage: int) -> list[int]:
        """The STORE_GRAD whose end leaves a buffer for a stage's gradients; none where it has one, or one is free."""
        if stage in self._in_use:
            return []
        self._in_use.add(stage)
        num_under_way = max(0, GRADIENT_BUFFERS - len(self._in_use))  # of the last ones, that need not be complete
        return [self._stored[-1 - num_under_way]] if len(self._stored) > num_under_way else []


def awaited_in_lanes(row: Iterable[Instruction], rank_of_stage: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each position of a row that waits for others, besides those before it in its lane: their positions."""
    order = LaneOrder(len(rank_of_stage))
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}


def places(sizes: Sequence[int], num_resident: int) -> tuple[list[int], int]:
    """Where each of a rank's stages begins, and how long the memory is: any `num_resident` that follow one another lie
    apart.

    Args:
        sizes: of the rank's stages in its order, in any unit, which is that of the answer.
    """
    if num_resident == 2:
        pairs = [one + other for one, other in pairwise(sizes)]
        length = max(pairs, default=max(sizes, default=0))
        return [length - size if index % 2 else 0 for index, size in enumerate(sizes)], length
    slots = [max(sizes[slot::num_resident], default=0) for slot in range(num_resident)]
    starts = [sum(slots[:slot]) for slot in range(num_resident)]
    return [starts[index % num_resident] for index in range(len(sizes))], sum(slots)
