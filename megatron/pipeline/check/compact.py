"""The program as integers, so that every proof is a plain loop over lists.

A program for 64 stages and 512 microbatches has hundreds of thousands of instructions. If every proof read attributes
of objects and hashed enum members, these reads would take most of the time. `compact` reads each instruction once, and
proves the claims that concern a single instruction:

- the checker knows its kind (an instruction that a consumer does not handle is an error, never a no-op);
- its stage exists and lives on the rank of its row;
- it names a microbatch of the program exactly if its kind has one, and a version exactly if its kind has one;
- only a forward is ahead of its version, and only in the way of the weight policy;
- the peer of a transfer is a stage with an edge, and is named if there are several such stages; the peer of a move is
  the pair stage.

Every instruction becomes a *code* (its kind) and a *place*: `stage * num_microbatches + (microbatch -
first_microbatch)`. Places index flat arrays over (stage, microbatch). An instruction of an update has the first place
of its stage. A *slot* indexes tables of rules: it stands for a code at a stage, and for a transfer of a stage with
several peers, for a code, a stage and a peer.

A `ProgramError` shows the place of an error. A reason alone does not help a reader of ten thousand instructions, so the
error names the rank, the position in its row and the instruction, and draws the neighbouring part of the row with an
arrow:

    rank 1, position 9, 1B1@0: the gradient of its output has not been received: no 1RECV_B1 stands before it
    rank 1: ... 1SEND_F3  1B0@0  1SEND_B0  1F4@0  1B1@0  1SEND_B1  1RECV_F5  1F5@0 ...
                                                  ^^^^^
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.pipeline.program.copies import validate_copies
from megatron.pipeline.program.instruction import AWAITS_REDUCTIONS, WORDS, Instruction, Kind, Proof
from megatron.pipeline.program.lane_order import awaited_in_lanes, awaited_moves
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import Ahead

_AROUND = 4  # instructions drawn on each side


class ProgramError(ValueError):
    """The error for a program that breaks a claim that `check` proves.

    Attributes:
        rank: the pipeline rank of the wrong row.
        position: index of the wrong instruction in the row; the row's length if an instruction is missing at its end.
        instruction: the instruction at this position; None at the end of the row.
        reason: the cause, in one sentence.
    """

    def __init__(self, rank: int, position: int, instruction: Instruction | None, reason: str, rendering: str) -> None:
        where = "end of the row" if instruction is None else str(instruction)
        super().__init__(f"rank {rank}, position {position}, {where}: {reason}\n{rendering}")
        self.rank = rank
        self.position = position
        self.instruction = instruction
        self.reason = reason


def error_at(program: Program, rank: int, position: int, reason: str) -> ProgramError:
    """The error for the instruction at `position` of row `rank`, or at the row's end if the position is past it."""
    row = program.rows[rank]
    instruction = row[position] if position < len(row) else None
    return ProgramError(rank, position, instruction, reason, render(row, position, rank=rank))


def render(row: Sequence[Instruction], position: int, *, rank: int) -> str:
    """Draw the neighbourhood of `position` in a row, with an arrow under it."""
    first, last = max(0, position - _AROUND), min(len(row), position + _AROUND + 1)
    head = f"rank {rank}: " + ("... " if first else "")
    words = [str(instruction) for instruction in row[first:last]]
    if position >= len(row):
        words.append("(end)")
    marked = min(position - first, len(words) - 1)
    indent = len(head) + sum(len(word) + 2 for word in words[:marked])
    tail = " ..." if last < len(row) else ""
    return f"{head}{'  '.join(words)}{tail}\n{' ' * indent}{'^' * len(words[marked])}"


KIND_OF_CODE = tuple(kind for proof in Proof for kind, word in WORDS.items() if word.proof is proof)
CODE_OF_KIND = {kind: code for code, kind in enumerate(KIND_OF_CODE)}
NUM_CODES = len(KIND_OF_CODE)
_, FIRST_TRANSFER, FIRST_MOVE, FIRST_STASH, FIRST_SWAP, FIRST_UPDATE, FIRST_PREDICTION, FIRST_HOST_WORD = (
    next(code for code, kind in enumerate(KIND_OF_CODE) if kind.row.proof is proof) for proof in Proof
)  # codes are numbered by group of proofs, so a comparison with a bound finds the group


def codes_of(words: str) -> list[int]:
    """The codes of words, which are given as text with blanks between them."""
    return [CODE_OF_KIND[Kind(word)] for word in words.split()]


F, B, I, W, R = codes_of("F B I W R")  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = codes_of("SEND_F RECV_F SEND_B RECV_B")
REDUCE_GRAD, REDUCE_EMBED, REDUCE_NORM, STEP, VALIDATE, ROLLBACK = codes_of(
    "REDUCE_GRAD REDUCE_EMBED REDUCE_NORM STEP VALIDATE ROLLBACK"
)
FETCH, FREE, STORE_GRAD, UPDATE = codes_of("FETCH FREE STORE_GRAD UPDATE")
AWAITS = frozenset(CODE_OF_KIND[kind] for kind in AWAITS_REDUCTIONS if kind.row.proof)
OFFLOADS, RELOADS = (
    frozenset(code for code in range(FIRST_STASH, FIRST_UPDATE) if KIND_OF_CODE[code].row.saved == change)
    for change in (-1, +1)
)


@dataclass(frozen=True)
class Transfer:
    """The transfer that a slot stands for: a code at `stage` with `peer`, over the edge of the number `edge`."""

    code: int
    stage: int
    peer: int
    edge: int

    @property
    def is_send(self) -> bool:
        return self.code in (SEND_F, SEND_B)

    @property
    def channel(self) -> tuple[int, int, int]:
        """The channel of the transfer as (code of the send, sending stage, receiving stage)."""
        if self.is_send:
            return self.code, self.stage, self.peer
        return SEND_F if self.code == RECV_F else SEND_B, self.peer, self.stage


@dataclass(frozen=True)
class CompactProgram:
    """A program as parallel lists of integers, one list per rank.

    Attributes:
        program: the program itself, for the text of messages.
        codes: per rank, the code of each instruction.
        places: per rank, the place of each instruction.
        slots: per rank, the slot of each instruction: `stage * NUM_CODES + code`, or a higher number for a transfer of
            a stage with several peers.
        transfers: slot -> transfer, for every transfer that the edges between ranks allow.
        versions: per rank, the weight version that each instruction names, or None.
        num_slots: one past the last slot.
        num_stages, num_microbatches: extents of the flat arrays.
        rank_of_stage: the rank of each stage.
        communicates: whether the program contains SENDs and RECVs. The tensors of a compute-only program are assumed to
            move without transfers.
        moves: whether the program moves saved activations between stages.
        swaps: whether the program moves saved activations to the host and back.
        versioned: whether the program names weight versions or updates weights.
    """

    program: Program
    codes: tuple[list[int], ...]
    places: tuple[list[int], ...]
    slots: tuple[list[int], ...]
    transfers: dict[int, Transfer]
    versions: tuple[list[int | None], ...]
    num_slots: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    communicates: bool
    moves: bool
    swaps: bool
    versioned: bool

    @cached_property
    def batch_of(self) -> list[int]:
        """The batch of each microbatch; both are counted from the program's first."""
        return [batch for batch, size in enumerate(self.program.batches) for _ in range(size)]

    @cached_property
    def awaited_moves(self) -> tuple[dict[int, int], ...]:
        """Per rank: position -> number of the rank's moves that must be complete there, if there are any."""
        num_frozen = self.program.pairs.num_frozen
        return tuple(awaited_moves(row, num_frozen=num_frozen) if self.moves else {} for row in self.program.rows)

    @cached_property
    def awaited_in_lanes(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Per rank: position -> positions that must be complete before it, besides the earlier ones of its lane."""
        if self.program.residency is None and not self.swaps:
            return ({},) * len(self.codes)
        return tuple(awaited_in_lanes(row, self.rank_of_stage) for row in self.program.rows)

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """The partner of each rank: the rank of the pair stages of its stages.

        Raises:
            ValueError: if the pair stages of a rank's stages live on several ranks.
        """
        return tuple(map(self.program.pairs.of_rank, range(len(self.codes))))

    def row(self, rank: int) -> Iterator[tuple[int, tuple[int, int, int | None]]]:
        """Position, and (code, place, version), of each instruction of a rank."""
        return enumerate(zip(self.codes[rank], self.places[rank], self.versions[rank], strict=True))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in ascending order."""
        return self.program.stages_of(rank)

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.codes))

    @cached_property
    def transfers_of(self) -> tuple[dict[int, Transfer], ...]:
        """The transfers of each stage: slot -> transfer; empty for a compute-only program."""
        of: tuple[dict[int, Transfer], ...] = tuple({} for _ in range(self.num_stages))
        for slot, transfer in self.transfers.items() if self.communicates else ():
            of[transfer.stage][slot] = transfer
        return of

    def crosses(self, stage: int, other: int) -> bool:
        """Whether tensors between two stages need a transfer: the stages live on two ranks of a program that sends."""
        return self.communicates and self.program.crosses(stage, other)

    def word(self, code: int, place: int, peer: int | None = None) -> str:
        """The text of an instruction on a microbatch without its version, for messages.

        `peer`: the peer of a transfer, which the text names if the stage has several.
        """
        stage, index = divmod(place, self.num_microbatches)
        instruction = Instruction(KIND_OF_CODE[code], stage, self.program.first_microbatch + index)
        if peer is not None and FIRST_TRANSFER <= code < FIRST_MOVE:
            instruction = replace(instruction, peer=self.program.graph.named_peer(instruction, peer))
        return str(instruction)

    def update(self, stage: int, code: int, index: int) -> str:
        """The text of the instruction for the update from batch `index`, counted from the program's first."""
        return f"{stage}{KIND_OF_CODE[code].value}@{self.program.first_batch + index + 1}"

    def out_of_order(self, stage: int, code: int, num_posted: int) -> str:
        """The reason why an instruction of updates is not the next one of its code, after `num_posted` others."""
        if num_posted == len(self.program.batches):
            return f"the {KIND_OF_CODE[code].value} of every batch stands before it already"
        return f"each batch has one, in order, and {self.update(stage, code, num_posted)} is due"

    def missing(self, rank: int, stage: int, code: int, num_posted: int) -> ProgramError:
        """The error for the end of a row that has an instruction of updates only for its first batches."""
        batch = self.program.first_batch + num_posted
        reason = f"{self.update(stage, code, num_posted)} is missing: batch {batch} needs it"
        return self.error(rank, len(self.codes[rank]), reason)

    def receive(self, channel: tuple[int, int, int], microbatch: int) -> tuple[int, int]:
        """The rank and the position of the receive of a microbatch, counted from the program's first, on a channel."""
        slot = next(slot for slot, each in self.transfers.items() if each.channel == channel and not each.is_send)
        _, _, receiver = channel
        rank, place = self.rank_of_stage[receiver], receiver * self.num_microbatches + microbatch
        return rank, self.position(rank, slot, place)

    def position(self, rank: int, slot: int, place: int) -> int:
        """The first position of an instruction in its row, or the row's length if the instruction is missing.

        A linear search, meant for messages only.
        """
        pairs = zip(self.slots[rank], self.places[rank], strict=True)
        return next((position for position, pair in enumerate(pairs) if pair == (slot, place)), len(self.codes[rank]))

    def error(self, rank: int, position: int, reason: str) -> ProgramError:
        return error_at(self.program, rank, position, reason)


def compact(program: Program) -> CompactProgram:
    """Convert a program to integers.

    Raises:
        ProgramError: for an instruction that is malformed, unknown, or in the wrong row.
        ValueError: if the program's rows do not match the ranks of its stages.
    """
    if sorted(set(program.rank_of_stage)) != list(range(len(program.rows))):
        raise ValueError(
            f"the stages live on ranks {program.rank_of_stage}, and the program has {len(program.rows)} rows: "
            "give each rank a stage and a row"
        )
    if program.copies:
        require_shared(program)
    num_microbatches = sum(program.batches)
    first = program.first_microbatch
    rank_of_stage = program.rank_of_stage
    num_stages = len(rank_of_stage)
    transfers, slot_of_peer, num_slots = _transfers(program)
    all_codes, all_places, all_slots, all_versions = [], [], [], []
    way = None if program.forward_only else program.weights.ahead
    communicates = moves = swaps = versioned = False
    for rank, row in enumerate(program.rows):
        codes, places, slots, versions = [], [], [], []
        own = set(program.stages_of(rank))
        for position, instruction in enumerate(row):
            code = CODE_OF_KIND.get(instruction.kind)
            stage, microbatch, version = instruction.stage, instruction.microbatch, instruction.version
            if code is None or stage not in own:
                raise error_at(program, rank, position, _explain_owner(instruction, rank_of_stage))
            if instruction.horizon and (code != F or way is not Ahead.PREDICTION):
                raise error_at(program, rank, position, _explain_ahead(program, instruction, Ahead.PREDICTION))
            if instruction.unstepped and (code != F or way is not Ahead.PROVISIONAL_STEP):
                raise error_at(program, rank, position, _explain_ahead(program, instruction, Ahead.PROVISIONAL_STEP))
            if code < FIRST_UPDATE:
                if microbatch is None or not 0 <= (index := microbatch - first) < num_microbatches:
                    raise error_at(program, rank, position, _explain_microbatch(microbatch, first, num_microbatches))
                places.append(stage * num_microbatches + index)
                slot = stage * NUM_CODES + code
                if code >= FIRST_TRANSFER:
                    if code < FIRST_MOVE:
                        communicates = True
                        slot = slot_of_peer[slot].get(instruction.peer)
                        if version is not None or slot is None:
                            raise error_at(program, rank, position, _explain_transfer(program, instruction))
                    else:
                        moves, swaps = moves or code < FIRST_STASH, swaps or code >= FIRST_SWAP
                        peer = program.pairs.of_stage(stage) if code < FIRST_STASH else None
                        if version is not None or instruction.peer not in (None, peer):
                            raise error_at(program, rank, position, _explain_move(instruction, peer))
                elif version is not None:
                    versioned = True
            else:
                if microbatch is not None or version is None:
                    reason = f"{instruction.kind.value} belongs to a weight version and to no microbatch"
                    raise error_at(program, rank, position, reason)
                places.append(stage * num_microbatches)
                slot = stage * NUM_CODES + code
                versioned = True
            codes.append(code)
            slots.append(slot)
            versions.append(version)
        all_codes.append(codes)
        all_places.append(places)
        all_slots.append(slots)
        all_versions.append(versions)
    return CompactProgram(
        program, tuple(all_codes), tuple(all_places), tuple(all_slots), transfers, tuple(all_versions), num_slots,
        num_stages, num_microbatches, tuple(rank_of_stage), communicates, moves, swaps, versioned,
    )  # fmt: skip


def _explain_owner(instruction: Instruction, rank_of_stage: tuple[int, ...]) -> str:
    if instruction.kind not in CODE_OF_KIND:
        return f"the checker proves nothing about {instruction.kind.value}, so it accepts no program with it"
    if not 0 <= instruction.stage < len(rank_of_stage):
        return f"there is no stage {instruction.stage}: the program has stages 0 to {len(rank_of_stage) - 1}"
    return f"stage {instruction.stage} lives on rank {rank_of_stage[instruction.stage]}"


def require_shared(program: Program) -> None:
    """Raise ValueError if stages that are copies do not share the microbatches, or the program allows no copies."""
    validate_copies(program.copies, program.graph.edges, program.rank_of_stage)
    if not program.forward_only:
        _require_gradients(program)
    for needs, word, remedy in (
        (program.residency is not None, "weights on the host (residency)", "keep them on the device"),
        (program.optimistic, "steps that do not wait for their norm (optimistic)", "let them wait"),
        (
            not program.forward_only and program.predicts_apart,
            f"predictions from a copy's own gradients ({program.weights.name})",
            "let them read the sum over the copies (reduce_partial: yes), or nothing (provisional_microbatches: 0)",
        ),
        (program.weights.updates_alone, f"weights {program.weights.name}", "take 2bw or flush"),
        (bool(program.kept), "microbatches that a stage keeps (kept)", "recompute all of a stage or none"),
    ):
        if needs:
            raise ValueError(f"the stages are copies of the model's, and with copies there can be no {word}; {remedy}")


def _require_gradients(program: Program) -> None:
    """Raise ValueError if a copy has no gradient in some batch, or copies of one stage do not add up theirs."""
    fewest = min(program.batches)
    for stage, copy in enumerate(program.copies):
        if copy.positions[0] >= fewest:
            raise ValueError(
                f"stage {stage} takes no microbatch of a batch of {fewest}: its first position is {copy.positions[0]}; "
                "give it an earlier one, or make batches larger"
            )
    if not program.data_parallel and len({copy.stage for copy in program.copies}) < program.num_stages:
        raise ValueError(
            "copies of one stage of the model share a batch, and nothing adds up their gradients (data_parallel: no); "
            "make it data_parallel: yes"
        )


def _explain_microbatch(microbatch: int | None, first: int, num_microbatches: int) -> str:
    if microbatch is None:
        return "it names no microbatch"
    return (
        f"there is no microbatch {microbatch}: the program has microbatches {first} to {first + num_microbatches - 1}"
    )


def _explain_ahead(program: Program, instruction: Instruction, way: Ahead) -> str:
    verb = "predicted" if way is Ahead.PREDICTION else "stepped provisionally"
    if instruction.kind is not Kind.FORWARD:
        return f"only a forward is {verb} ahead, and {instruction.kind.value} uses weights as they are"
    if program.forward_only:
        return "a program that evaluates uses weights as they are"
    return f"weights {program.weights.name} are not {verb} ahead"


def _explain_transfer(program: Program, instruction: Instruction) -> str:
    if instruction.version is not None:
        return "a transfer has no weight version"
    try:
        program.graph.peer_of(instruction)
    except ValueError as error:
        return str(error).removeprefix(str(instruction)).lstrip(": ")
    raise AssertionError("its peer has a slot")


def _explain_move(instruction: Instruction, peer: int | None) -> str:
    if instruction.version is not None:
        return "a transfer has no weight version"
    if peer is None:
        return f"its other end is the host, and not stage {instruction.peer}"
    return f"its peer is stage {peer}, not {instruction.peer}"


def _transfers(program: Program) -> tuple[dict[int, Transfer], dict[int, dict[int | None, int]], int]:
    """The tables of transfers: slot -> transfer, base slot -> slot by peer, and one past the last slot.

    The first table has the transfers between ranks. The second maps the slot of a code at a stage to a slot for each
    peer. The peer None stands for an instruction that names no peer, which is allowed for a stage with at most one. A
    stage without peers has a slot but no transfer.
    """
    graph, found, slot_of_peer = program.graph, {}, {}
    further = program.num_stages * NUM_CODES
    for stage in range(program.num_stages):
        for code in range(FIRST_TRANSFER, FIRST_MOVE):
            word, slot = KIND_OF_CODE[code].row, stage * NUM_CODES + code
            peers = graph.makers(word.receives, stage) if word.sends is None else graph.takers(word.sends, stage)
            slots = slot_of_peer[slot] = {None: slot} if len(peers) < 2 else {}
            for peer in peers:
                if len(peers) > 1:
                    slot, further = further, further + 1
                slots[peer] = slot
                if program.crosses(stage, peer):
                    found[slot] = Transfer(code, stage, peer, graph.edge_between(stage, peer))
    return found, slot_of_peer, further
