"""The rules for weights that live in host memory; everything that executes programs follows them.

L2L (Pudipeddi et al., 2020, section 2.1) keeps the weights of all layers on the host, with the optimizer, and the
weights of a few layers on the device. Here whole stages are fetched, by these words:

    2FETCH@1        copy version 1 of stage 2 to the device                       lane: host to device
    2FREE@1         release that copy after the computations before this word     lane: host to device
    2STORE_GRAD@2   copy the gradients that lead to version 2 to the host         lane: device to host
    2UPDATE@2       make version 2 from them with the optimizer of the host       lane: host optimizer

    2OFFLOAD5       copy the input of microbatch 5 to the host, and free it       lane: device to host
    2RELOAD5        copy the input back before its recompute                      lane: host to device

A rank only *posts* these words. Each rank has one lane of each kind. A lane carries out its words one after another in
the order of the row. A word starts when the row has come to it and everything that it waits for is complete. FREE takes
no time: it is complete when the computations before it are, and the words behind it in its lane may use the memory. So
no FETCH takes memory that a computation still uses, under any timing.

`Word.awaits` says which words wait for which others. A FETCH waits for the UPDATE that makes its version, a STORE_GRAD
for the reduction of its gradients over the replicas, an UPDATE for the STORE_GRAD of its gradients, and a computation
for the FETCH of its weights. The awaited word has the same stage and version, and stands earlier in the same row. In
the same way, a RELOAD waits for the OFFLOAD of its microbatch, and a recompute for the RELOAD. There are three more
rules:

- REDUCE_EMBED adds up the gradients of tied embeddings on the host. So REDUCE_EMBED waits for the STORE_GRAD of each
  end of the tied embeddings that its rank has, and the UPDATE of an end waits for REDUCE_EMBED.
- A rank has `GRADIENT_BUFFERS` buffers for gradients. A stage takes a buffer with its first backward of a batch, and
  the buffer is free again when the STORE_GRAD of the stage is complete. A backward that takes a buffer waits until one
  is free.
- A forward waits for every OFFLOAD that stands before the computation preceding the forward. So an OFFLOAD has the time
  of one computation, and after that its memory is free, whatever the timing. EVICT has the same rule (`move_order`).

EVICT and LOAD are no substitute for OFFLOAD and RELOAD. An EVICT moves everything that a microbatch saves to another
rank, which has to take part. An OFFLOAD moves only the input of a microbatch, and no other rank takes part. So each
word has one meaning, and `Residency.stash` determines which of these words a program may have.

No word waits for a word behind it in its row. So lanes alone cannot form a circle: every wait within a rank leads to an
earlier place in the row. A circle has to include another rank. Ranks wait for each other only in their rows, for
tensors, and in their chains, for reductions over several ranks.

The device holds the weights of only a few stages at once. `places` says where the weights of each stage lie there.
Every stage has a fixed place in one memory, such that any K consecutive stages of a rank do not overlap. For K = 2 the
memory is filled from both ends, and is as large as the largest pair of consecutive stages.
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
RELOADED_AHEAD = 2  # the number of inputs that are reloaded early, in addition to the input in use
EAGER, DEFERRED = "eager", "deferred"
DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class Residency:
    """How a program keeps its weights on the host.

    Attributes:
        stages: the largest number of stages of a rank whose weights are on the device at once. With 2, one stage is
            fetched while the other computes.
        update: when the host updates a stage. `eager`: as soon as the host has the gradients (the eager parameter
            server of the paper), so the update may not depend on other stages. `deferred`: after the STEP of the rank,
            which knows the global norm and any overflow.
        stash: where the inputs of stages wait for their recompute. `device`: the inputs stay on the device, so memory
            grows with the number of stages. `host`: they go to the host and come back (the stash of section 2.2).

    Raises:
        ValueError: `stages` is less than 1, or `update` or `stash` is unknown.
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
        """Read the text that `str` writes. Raises ValueError for any other text."""
        match = re.fullmatch(r"([0-9]+) +([a-z]+)(?: +([a-z]+))?", text)
        if match is None:
            raise ValueError(
                f"{text!r} is no number of resident stages with {EAGER} or {DEFERRED}, and {HOST} where that has the "
                f"stash, such as 2 {EAGER} or 2 {EAGER} {HOST}"
            )
        return cls(int(match[1]), match[2], match[3] or DEVICE)


def most_boundaries(num_microbatches: int) -> int:
    """Return the bound on boundaries, the tensors between stages, that a rank has on the device at once.

    The bound holds for a stash on the host and any number of stages. It counts the batch that waits between two stages,
    the inputs that are reloaded early, and the input in use.
    """
    return num_microbatches + RELOADED_AHEAD + 1


class LaneOrder:
    """Finds what each instruction of a row waits for, in addition to the words before it in its own lane.

    Call `awaited` once for each instruction, in the order of the row. The instructions are numbered from 0 in this
    order. The memory that this object takes does not grow with their number.

    Args:
        num_stages: the number of stages of the whole pipeline; the first and the last are the ends of tied embeddings.
    """

    def __init__(self, num_stages: int) -> None:
        self._ends = (0, num_stages - 1)
        self._num_told = 0
        self._last: dict[tuple[Kind, int], tuple[int | None, int]] = {}  # kind, stage -> version, number
        self._moved: dict[tuple[Kind, int, int | None], int] = {}  # stash words not yet awaited -> number
        self._offloaded = self._offloaded_earlier = -1  # last OFFLOAD; last OFFLOAD before the last computation
        self._offload_awaited = -1  # the last OFFLOAD that a forward has waited for
        self._in_use: set[int] = set()  # stages with a gradient buffer and no STORE_GRAD yet
        self._stored: deque[int] = deque(maxlen=GRADIENT_BUFFERS)  # the last STORE_GRADs

    def awaited(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the numbers of the instructions that have to be complete before the next instruction starts."""
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
        """Return the numbers of the instructions so far that later instructions may wait for."""
        last = (number for _, number in self._last.values())
        offloads = (each for each in (self._offloaded, self._offloaded_earlier) if each > self._offload_awaited)
        return frozenset((*last, *self._moved.values(), *self._stored, *offloads))

    def _of_stash(self, instruction: Instruction) -> list[int]:
        """Return the OFFLOADs and the RELOAD that an instruction waits for."""
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
        """Give a stage a gradient buffer, and return the STORE_GRAD that has to be complete before the buffer is free.

        The list is empty if the stage has a buffer already, or if no stage has used the buffer so far.
        """
        if stage in self._in_use:
            return []
        self._in_use.add(stage)
        num_under_way = max(0, GRADIENT_BUFFERS - len(self._in_use))  # the last ones may be incomplete
        return [self._stored[-1 - num_under_way]] if len(self._stored) > num_under_way else []


def awaited_in_lanes(row: Iterable[Instruction], rank_of_stage: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Map each position of a row to the positions that it waits for by `LaneOrder`; positions without any are left out.

    The words before a word in its own lane are not listed.
    """
    order = LaneOrder(len(rank_of_stage))
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}


def places(sizes: Sequence[int], num_resident: int) -> tuple[list[int], int]:
    """Place the stages of a rank in one memory such that no `num_resident` consecutive stages overlap.

    Args:
        sizes: the sizes of the stages in the order of the rank, in any unit.
        num_resident: the number of consecutive stages that are in the memory at once.

    Returns:
        The start of each stage and the length of the memory, in the unit of `sizes`.
    """
    if num_resident == 2:
        pairs = [one + other for one, other in pairwise(sizes)]
        length = max(pairs, default=max(sizes, default=0))
        return [length - size if index % 2 else 0 for index, size in enumerate(sizes)], length
    slots = [max(sizes[slot::num_resident], default=0) for slot in range(num_resident)]
    starts = [sum(slots[:slot]) for slot in range(num_resident)]
    return [starts[index % num_resident] for index in range(len(sizes))], sum(slots)
