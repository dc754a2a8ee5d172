"""The program as integers, so that every proof is a plain loop over lists.

A program for 64 stages and 512 microbatches has hundreds of thousands of instructions; reading attributes of objects
and hashing enum members in every proof would cost most of the time. `compact` reads each instruction once and, on the
way, proves what concerns one instruction alone:

- its kind is one that the checker knows (an instruction that a consumer does not handle is an error, never a no-op);
- its stage exists and lives on the rank in whose row it stands;
- it names a microbatch of the program exactly where its kind has one, and a version exactly where its kind has one;
- the peer of a transfer, where it is given, is the neighbouring stage; that of a move, the pair stage.

Every instruction becomes a *code* (its kind) and a *place*: `stage * num_microbatches + (microbatch -
first_microbatch)`. Places index flat arrays over (stage, microbatch). An instruction of an update has its stage's
first place.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron.pipeline.check.error import ProgramError, error_at
from megatron.pipeline.instruction import AWAITS_REDUCTIONS, Instruction, Kind
from megatron.pipeline.moves import awaited_moves, pair_of, partner_of_rank
from megatron.pipeline.program import Program
from megatron.pipeline.residency import awaited_in_lanes

_PROVED = {  # the words that have a proof, by what is proved of them
    "computations": (
        Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE,
    ),
    "transfers": (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B),
    "moves": (Kind.EVICT, Kind.ACCEPT, Kind.RETURN, Kind.LOAD),
    "inputs on the host": (Kind.OFFLOAD, Kind.RELOAD),
    "updates": (Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM, Kind.STEP),
    "predictions": (Kind.HOLD, Kind.REDUCE_PARTIAL, Kind.REDUCE_PARTIAL_EMBED, Kind.PREDICT),
    "weights on the host": (Kind.FETCH, Kind.FREE, Kind.STORE_GRAD, Kind.UPDATE),
}  # fmt: skip
KIND_OF_CODE = tuple(kind for group in _PROVED.values() for kind in group)  # so a bound tells the group
CODE_OF_KIND = {kind: code for code, kind in enumerate(KIND_OF_CODE)}
NUM_CODES = len(KIND_OF_CODE)
FIRST_TRANSFER, FIRST_MOVE, FIRST_STASH, FIRST_UPDATE, FIRST_PREDICTION, FIRST_HOST_WORD, _ = accumulate(
    map(len, _PROVED.values())
)
(
    F, B, I, W, R,  # noqa: E741
    SEND_F, RECV_F, SEND_B, RECV_B,
    EVICT, ACCEPT, RETURN, LOAD,
    OFFLOAD, RELOAD,
    REDUCE_GRAD, REDUCE_EMBED, REDUCE_NORM, STEP,
    HOLD, REDUCE_PARTIAL, REDUCE_PARTIAL_EMBED, PREDICT,
    FETCH, FREE, STORE_GRAD, UPDATE,
) = range(NUM_CODES)  # fmt: skip
AWAITS = frozenset(CODE_OF_KIND[kind] for kind in AWAITS_REDUCTIONS)
_PEER_OFFSET = [kind.row.neighbour for kind in KIND_OF_CODE]


@dataclass(frozen=True)
class CompactProgram:
    """A program as parallel lists of integers, one list per rank.

    Attributes:
        program: the program itself, for its words in messages.
        codes: per rank, the code of each instruction.
        places: per rank, the place of each instruction.
        versions: per rank, the weight version that each instruction names, or None.
        num_stages, num_microbatches: extents of the flat arrays.
        rank_of_stage: the rank of each stage.
        communicates: whether the program contains SENDs and RECVs. A compute-only program has none, and its tensors are
            then taken to move by themselves.
        moves: whether the program moves saved activations between stages.
        versioned: whether the program names weight versions or updates weights.
    """

    program: Program
    codes: tuple[list[int], ...]
    places: tuple[list[int], ...]
    versions: tuple[list[int | None], ...]
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    communicates: bool
    moves: bool
    versioned: bool

    @cached_property
    def awaited_moves(self) -> tuple[dict[int, int], ...]:
        """Per rank and position, how many of the rank's moves have to be complete there; only where some have."""
        return tuple(awaited_moves(row) if self.moves else {} for row in self.program.rows)

    @cached_property
    def awaited_in_lanes(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Per rank and position, the positions that have to be complete besides those before it in its lane."""
        if self.program.residency is None:
            return ({},) * len(self.codes)
        return tuple(awaited_in_lanes(row, self.rank_of_stage) for row in self.program.rows)

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """For each rank the one that has the pair stages of its stages.

        Raises:
            ValueError: the pair stages of a rank's stages live on several ranks.
        """
        return tuple(partner_of_rank(self.rank_of_stage, rank) for rank in range(len(self.codes)))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return self.program.stages_of(rank)

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.codes))

    def crosses(self, stage: int) -> bool:
        """Whether tensors between `stage` and the next are sent: both exist, on two ranks, in a program that sends."""
        return (
            self.communicates
            and 0 <= stage < self.num_stages - 1
            and self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]
        )

    def word(self, code: int, place: int) -> str:
        """The text form of an instruction on a microbatch, without its version, for messages."""
        stage, index = divmod(place, self.num_microbatches)
        return f"{stage}{KIND_OF_CODE[code].value}{self.program.first_microbatch + index}"

    def position(self, rank: int, code: int, place: int) -> int:
        """Where an instruction first stands in its row; its length if missing. For messages: it searches."""
        pairs = zip(self.codes[rank], self.places[rank], strict=True)
        return next((position for position, pair in enumerate(pairs) if pair == (code, place)), len(self.codes[rank]))

    def error(self, rank: int, position: int, reason: str) -> ProgramError:
        return error_at(self.program, rank, position, reason)


def compact(program: Program) -> CompactProgram:
    """Read a program into integers.

    Raises:
        ProgramError: an instruction is malformed, unknown, or stands in the wrong row.
        ValueError: the program's rows and its stages' ranks do not fit together.
    """
    if sorted(set(program.rank_of_stage)) != list(range(len(program.rows))):
        raise ValueError(
            f"the stages live on ranks {program.rank_of_stage}, and the program has {len(program.rows)} rows: "
            "give each rank a stage and a row"
        )
    num_microbatches = sum(program.batches)
    first = program.first_microbatch
    rank_of_stage = program.rank_of_stage
    num_stages = len(rank_of_stage)
    all_codes, all_places, all_versions = [], [], []
    communicates = moves = versioned = False
    for rank, row in enumerate(program.rows):
        codes, places, versions = [], [], []
        for position, instruction in enumerate(row):
            code = CODE_OF_KIND.get(instruction.kind)
            stage, microbatch, version = instruction.stage, instruction.microbatch, instruction.version
            if code is None or not 0 <= stage < num_stages or rank_of_stage[stage] != rank:
                raise error_at(program, rank, position, _explain_owner(instruction, rank_of_stage))
            if code < FIRST_UPDATE:
                if microbatch is None or not 0 <= microbatch - first < num_microbatches:
                    raise error_at(program, rank, position, _explain_microbatch(microbatch, first, num_microbatches))
                places.append(stage * num_microbatches + microbatch - first)
                if code >= FIRST_TRANSFER:
                    if code < FIRST_MOVE:
                        communicates = True
                        peer = stage + _PEER_OFFSET[code]
                    elif code < FIRST_STASH:
                        moves = True
                        peer = pair_of(stage, num_stages)
                    else:
                        peer = None
                    if version is not None or instruction.peer not in (None, peer):
                        raise error_at(program, rank, position, _explain_transfer(instruction, peer))
                elif version is not None:
                    versioned = True
            else:
                if microbatch is not None or version is None:
                    raise error_at(
                        program,
                        rank,
                        position,
                        f"{instruction.kind.value} belongs to a weight version and to no microbatch",
                    )
                places.append(stage * num_microbatches)
                versioned = True
            codes.append(code)
            versions.append(version)
        all_codes.append(codes)
        all_places.append(places)
        all_versions.append(versions)
    return CompactProgram(
        program=program,
        codes=tuple(all_codes),
        places=tuple(all_places),
        versions=tuple(all_versions),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(rank_of_stage),
        communicates=communicates,
        moves=moves,
        versioned=versioned,
    )


def _explain_owner(instruction: Instruction, rank_of_stage: tuple[int, ...]) -> str:
    if instruction.kind not in CODE_OF_KIND:
        return f"the checker proves nothing about {instruction.kind.value}, so it accepts no program with it"
    if not 0 <= instruction.stage < len(rank_of_stage):
        return f"there is no stage {instruction.stage}: the program has stages 0 to {len(rank_of_stage) - 1}"
    return f"stage {instruction.stage} lives on rank {rank_of_stage[instruction.stage]}"


def _explain_microbatch(microbatch: int | None, first: int, num_microbatches: int) -> str:
    if microbatch is None:
        return "it names no microbatch"
    return (
        f"there is no microbatch {microbatch}: the program has microbatches {first} to {first + num_microbatches - 1}"
    )


def _explain_transfer(instruction: Instruction, peer: int | None) -> str:
    if instruction.version is not None:
        return "a transfer has no weight version"
    if peer is None:
        return f"its other end is the host, and not stage {instruction.peer}"
    return f"its peer is stage {peer}, not {instruction.peer}"
