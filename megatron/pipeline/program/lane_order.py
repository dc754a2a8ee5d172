"""The rules for words that are carried out beside the row; everything that executes programs follows them.

**Moves to the pair stage.** BPipe (section 3.2) pairs stage x, which saves many microbatches, with stage p-1-x, which
saves few. Frozen stages save nothing and have no pair stage, so pairs are counted among the other stages: with k
frozen stages and a others, stage k+x is paired with stage k+a-1-x. A stage that is a copy names its pair stage, or has
none (`program.copies`). Four instructions move the activations of a microbatch between the two stages:

    0EVICT3  -> 3ACCEPT3     from the evictor to the acceptor
    0LOAD3   <- 3RETURN3     and back

These instructions only *request* a move. Each rank carries out its moves in the background, one after another in the
order of its row. A move is posted when the move before it has completed, and completes when both ends have posted it.
So an ACCEPT that stands behind a RETURN takes memory only after the RETURN has freed as much. This holds however early
the row requests the ACCEPT, and however far one rank is ahead of the other. The moves of the two ranks of a pair
correspond one to one, in the same order.

Computations wait as follows:

- R, B and I of an evicted microbatch wait until its LOAD has completed.
- F waits for every EVICT that stands before the computation preceding the F. So an eviction has the time of one
  computation, and after that its memory is free, whatever the timing.
- The forward of a frozen stage saves nothing, so it waits for no move, and does not count as a computation here.

A microbatch counts as saved from the start of its forward, or from the posting of its LOAD or ACCEPT. It counts until
the end of its backward, or until its EVICT or RETURN has completed. So while it moves it counts on both sides.

**Words of the host.** L2L (Pudipeddi et al., 2020, section 2.1) keeps the weights of all layers on the host, with the
optimizer, and the weights of a few layers on the device. Here whole stages are fetched, by these words:

    2FETCH@1        copy version 1 of stage 2 to the device                       lane: host to device
    2FREE@1         release that copy after the computations before this word     lane: host to device
    2STORE_GRAD@2   copy the gradients that lead to version 2 to the host         lane: device to host
    2UPDATE@2       make version 2 from them with the optimizer of the host       lane: host optimizer

    2OFFLOAD5       copy the input of microbatch 5 to the host, and free it       lane: device to host
    2RELOAD5        copy the input back before its recompute                      lane: host to device

Where weights live on the device, all that a microbatch saves may wait on the host:

    0SWAP_OUT3      copy the saved activations to the host, and free them         lane: device to host
    0SWAP_IN3       copy them back before they are used                           lane: host to device

A rank only *posts* these words. Each rank has one lane of each kind. A lane carries out its words one after another in
the order of the row. A word starts when the row has come to it and everything that it waits for is complete. FREE takes
no time: it is complete when the computations before it are, and the words behind it in its lane may use the memory. So
no FETCH takes memory that a computation still uses, under any timing.

`Word.awaits` says which words wait for which others. A FETCH waits for the UPDATE that makes its version, a STORE_GRAD
for the reduction of its gradients over the replicas, an UPDATE for the STORE_GRAD of its gradients, and a computation
for the FETCH of its weights. The awaited word has the same stage and version, and stands earlier in the same row. In
the same way, a RELOAD waits for the OFFLOAD of its microbatch, and a recompute for the RELOAD; a SWAP_IN waits for the
SWAP_OUT of its microbatch, and R, B and I for the SWAP_IN. There are four more rules:

- REDUCE_EMBED adds up the gradients of tied embeddings on the host. So REDUCE_EMBED waits for the STORE_GRAD of each
  end of the tied embeddings that its rank has, and the UPDATE of an end waits for REDUCE_EMBED.
- A rank has `GRADIENT_BUFFERS` buffers for gradients. A stage takes a buffer with its first backward of a batch, and
  the buffer is free again when the STORE_GRAD of the stage is complete. A backward that takes a buffer waits until one
  is free.
- A forward waits for every OFFLOAD or SWAP_OUT that stands before the computation preceding the forward. So the copy
  has the time of one computation, and after that its memory is free, whatever the timing. EVICT has the same rule.
- A SWAP_IN waits for every SWAP_OUT before it in its row. So it takes memory only after they have freed as much.

EVICT and LOAD are no substitute for OFFLOAD and RELOAD. An EVICT moves everything that a microbatch saves to another
rank, which has to take part. An OFFLOAD moves only the input of a microbatch, and no other rank takes part. A SWAP_OUT
moves everything, and no other rank takes part. So each pair of words has one meaning, and a program has one of the
three pairs. `Residency.stash` determines whether it may have OFFLOAD and RELOAD. The other two pairs need weights on
the device.

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

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.instruction import (
    AWAITED,
    COMPUTATIONS,
    ENDS_BACKWARD,
    EVICTIONS,
    LOADS,
    MOVES,
    OFFLOADS,
    RELOADS,
    STASH_WORDS,
    SWAPS,
    USES_SAVED,
    Instruction,
    Kind,
)


def pair_of(index: int, count: int) -> int:
    """Return the mirror image of `index` among `count` places, with the first and the last place swapped."""
    return count - 1 - index


@dataclass(frozen=True)
class Pairs:
    """The pairs of stages and of ranks. Trained stages are paired from both ends to the middle.

    Attributes:
        rank_of_stage: the rank of each stage.
        num_frozen: the number of frozen stages, which are the first ones.
        of_copies: where stages are copies, the pair stage that each one names, or itself; empty: there are none.
    """

    rank_of_stage: tuple[int, ...]
    num_frozen: int = 0
    of_copies: tuple[int, ...] = ()

    def of_stage(self, stage: int) -> int:
        """Return the other stage of a stage's pair; the stage itself if it is frozen or in the middle."""
        if self.of_copies:
            return self.of_copies[stage]
        if stage < self.num_frozen:
            return stage
        return self.num_frozen + pair_of(stage - self.num_frozen, len(self.rank_of_stage) - self.num_frozen)

    def of_rank(self, rank: int) -> int:
        """Return the rank on which the pair stages of a rank's stages live.

        This is the rank itself if its pair stages live there, too, or if all its stages are frozen.

        Raises:
            ValueError: the pair stages live on several ranks.
        """
        trained = [stage for stage in stages_of(self.rank_of_stage, rank) if stage >= self.num_frozen]
        partners = list(dict.fromkeys(self.rank_of_stage[self.of_stage(stage)] for stage in trained)) or [rank]
        if len(partners) != 1:
            raise ValueError(
                f"the stages of rank {rank} have their pair stages on ranks {' and '.join(map(str, partners))}, so it "
                "has no pair; place stages p-1-x of stages x on one rank, or move nothing"
            )
        return partners[0]

    def counterpart(self, move: Instruction) -> Instruction:
        """Return the other end of a move."""
        return Instruction(move.kind.row.other_end, self.of_stage(move.stage), move.microbatch)

    def refusal(self, stage: int) -> str | None:
        """Return why no activations can move from or to a stage, as part of an error message; None if they can."""
        if stage < self.num_frozen:
            return f"stage {stage} gets no gradients, so it has forwards only and saves nothing that could move"
        if self.of_copies and self.of_copies[stage] == stage:
            return "it is a copy that names no pair, so nothing can move"
        if self.rank_of_stage[self.of_stage(stage)] == self.rank_of_stage[stage]:
            return "its pair stage lives on the same rank, so nothing can move"
        return None


class MoveOrder:
    """Finds which moves of its own rank each instruction of a row waits for.

    Call `awaited` once for each instruction, in the order of the row.

    Args:
        num_frozen: the number of frozen stages, which are the first ones.
    """

    def __init__(self, *, num_frozen: int = 0) -> None:
        self._num_frozen = num_frozen
        self._num_moves = 0
        self._num_waited_for = 0
        self._num_to_evict = 0  # moves up to the last EVICT, this EVICT included
        self._num_to_earlier_evict = 0  # moves up to the last EVICT before the last computation
        self._num_to_load: dict[
            tuple[int, int | None], int
        ] = {}  # (stage, microbatch) -> moves up to its LOAD, this LOAD included

    def awaited(self, instruction: Instruction) -> int:
        """Return how many of the first moves of the rank have to be complete before the instruction starts."""
        kind, key = instruction.kind, (instruction.stage, instruction.microbatch)
        if kind in MOVES:
            self._num_moves += 1
            if kind in EVICTIONS:
                self._num_to_evict = self._num_moves
            elif kind in LOADS:
                self._num_to_load[key] = self._num_moves
        if kind not in COMPUTATIONS or instruction.stage < self._num_frozen:
            return 0
        needed = self._num_to_earlier_evict if kind is Kind.FORWARD else 0
        if kind in USES_SAVED:
            needed = self._num_to_load.get(key, 0) if kind is Kind.RECOMPUTE else self._num_to_load.pop(key, 0)
        self._num_to_earlier_evict = self._num_to_evict
        self._num_waited_for = max(self._num_waited_for, needed)
        return needed

    def still_awaited(self) -> list[int]:
        """Return the moves that later instructions may wait for, each as the number of moves after it."""
        needed = (self._num_to_evict, self._num_to_earlier_evict, *self._num_to_load.values())
        return [self._num_moves - each for each in needed if each > self._num_waited_for]


def awaited_moves(row: Iterable[Instruction], *, num_frozen: int = 0) -> dict[int, int]:
    """Map each position of a row that waits for moves to the number of the row's moves that have to be complete.

    Args:
        row: the instructions of a rank.
        num_frozen: as for `MoveOrder`.
    """
    order = MoveOrder(num_frozen=num_frozen)
    awaited = ((position, order.awaited(instruction)) for position, instruction in enumerate(row))
    return {position: needed for position, needed in awaited if needed}


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
                f"{text!r} is not a residency; write the number of resident stages, {EAGER} or {DEFERRED}, and {HOST} "
                f"if inputs wait on the host, such as 2 {EAGER} or 2 {EAGER} {HOST}"
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

    def still_awaited(self) -> tuple[int, ...]:
        """Return the numbers of the instructions so far that later instructions may wait for, some of them twice."""
        last = (number for _, number in self._last.values())
        offloads = (each for each in (self._offloaded, self._offloaded_earlier) if each > self._offload_awaited)
        return *last, *self._moved.values(), *self._stored, *offloads

    def _of_stash(self, instruction: Instruction) -> list[int]:
        """Return the numbers of the copies to or from the host that an instruction waits for.

        A forward and a SWAP_IN also wait for copies of other microbatches.
        """
        words = [other for other in instruction.kind.row.awaits if other in STASH_WORDS]
        found = (self._moved.pop((other, instruction.stage, instruction.microbatch), None) for other in words)
        needed = [number for number in found if number is not None]
        if instruction.kind in SWAPS & RELOADS and self._offloaded > self._offload_awaited:
            needed.append(self._offloaded)
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
