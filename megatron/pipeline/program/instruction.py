"""The words of a pipeline program, and the instructions that are made of them.

A schedule is data only if its smallest part can be written down, read back and compared. So an instruction is a frozen
value. It holds the action (`Kind`), the global stage, and, if they apply, the microbatch, the weight version and the
peer. Its text form (`2F5@1`, `2F5@1+2`, `2F5@1~3`, `2SEND_F5`, `2STEP@4`) is a superset of the text form of
torch.distributed.pipelining. Reading is strict: any text that is not understood is an error.

The table `WORDS` is the only place that defines the meaning of a word. Passes, checker, simulator, planner, drawing and
executor read this table and have no table of their own. So a new word takes a row in `WORDS`, a proof in the checker,
and a method of the executor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial


class Kind(str, Enum):
    """The action of an instruction; the value is its word in the text form."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of input and weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"  # the forward again, from the stored input
    SEND_F = "SEND_F"  # post the transfer of an activation to a stage that needs it
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # post the transfer of a gradient to the stage that made the activation
    RECV_B = "RECV_B"
    EVICT = "EVICT"  # EVICT and ACCEPT move a microbatch's saved activations to the pair stage; RETURN and LOAD, back
    ACCEPT = "ACCEPT"
    RETURN = "RETURN"
    LOAD = "LOAD"
    OFFLOAD = "OFFLOAD"  # with inputs stashed on the host: copy the input of a microbatch to the host
    RELOAD = "RELOAD"  # copy that input back to the device
    SWAP_OUT = "SWAP_OUT"  # copy the saved activations of a microbatch to the host, and free them
    SWAP_IN = "SWAP_IN"  # copy them back to the device
    REDUCE_GRAD = "REDUCE_GRAD"  # REDUCE_GRAD, REDUCE_EMBED and REDUCE_NORM are the update chain of a version
    REDUCE_EMBED = "REDUCE_EMBED"
    REDUCE_NORM = "REDUCE_NORM"
    STEP = "STEP"  # wait for the chain, then make the version
    VALIDATE = "VALIDATE"  # wait for the norm of a step that did not wait for it, and accept or reject the step
    ROLLBACK = "ROLLBACK"  # undo a rejected step and the work behind it, and take the right step
    HOLD = "HOLD"  # copy the gradients accumulated so far, for the prediction of a version
    REDUCE_PARTIAL = "REDUCE_PARTIAL"  # reduce that copy over the replicas
    REDUCE_PARTIAL_EMBED = "REDUCE_PARTIAL_EMBED"  # reduce the tied embeddings' gradients for a prediction
    PREDICT = "PREDICT"  # take the step to a version provisionally, from a part of its gradients
    FETCH = "FETCH"  # with weights on the host: copy a version of a stage to the device
    FREE = "FREE"  # release that copy after the computations that stand before this word
    STORE_GRAD = "STORE_GRAD"  # copy the gradients that lead to a version of a stage to the host
    UPDATE = "UPDATE"  # the host's optimizer makes a version of a stage

    __hash__ = str.__hash__  # Enum's own hash is written in Python, and a program asks for hashes millions of times

    @cached_property
    def row(self) -> Word:
        """The row of the word in `WORDS`."""
        return WORDS[self]

    @property
    def is_computation(self) -> bool:
        return self in COMPUTATIONS


class Subject(Enum):
    """The subject of an instruction: a microbatch or a weight version."""

    MICROBATCH = "microbatch"
    UPDATE = "update"  # concerns a version of the weights


class Lane(Enum):
    """The queue that carries out an instruction. A rank only posts the instructions of all lanes but `COMPUTE`."""

    COMPUTE = "compute"
    TRANSFERS = "transfers"
    MOVES = "moves"
    CHAIN = "chain"
    H2D = "host to device"
    D2H = "device to host"
    HOST = "host optimizer"


class Tensor(Enum):
    """A kind of tensor that travels over the edges between stages (see `edges`)."""

    __hash__ = object.__hash__  # for speed, as in `Kind`

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Members(Enum):
    """The ranks that take part in a reduction."""

    REPLICAS = "replicas"  # the replicas of a rank, which run the same program
    ENDS = "ends"  # the ranks of the two stages that share an embedding: the first, and mostly the last
    ALL = "all"  # all ranks


class Proof(Enum):
    """The group of proofs in `check` that a word belongs to. `check` numbers the words in this order."""

    COMPUTATION = "computation"
    TRANSFER = "transfer"
    MOVE = "move"
    STASH = "input on the host"
    SWAP = "activations on the host"
    UPDATE = "update"
    PREDICTION = "prediction"
    RESIDENCY = "weights on the host"


@dataclass(frozen=True, kw_only=True)
class Word:
    """A row of `WORDS`.

    Attributes:
        name: the name in legends.
        proof: the group of its proofs; None: there is no proof, so the checker refuses the word.
        handler: the method that executes the word, as an attribute of the executor.
        cost: the attribute of `simulate.costs.Costs` with its seconds; empty: it takes no time.
        colour: its family of colours in drawings (`draw.colours`).
        sign: the text before its number in drawings; `#`: a mark at its end. An update without a sign is drawn as a
            bar as wide as its time.
        lane, subject: see the classes.
        needs, makes: the kind of tensor that a computation takes from other stages, and the kind that it hands on.
        uses_saved: whether the word reads the saved activations of its microbatch, which then have to be at the stage.
        adds_gradients: whether the word accumulates its microbatch's weight gradients, which ends the backward.
        saved: the change in the number of microbatches that the stage saves. +1 counts from the start of the word, -1
            from its end.
        keeps: the gradients that the word copies for a prediction, `gradients` or `tied_gradients`: the attribute of
            `simulate.memory_curve.MemorySizes` with their bytes.
        frees_gradients: whether the gradients that make a version can be freed after the last such word of the version.
        is_prediction: whether the word makes a prediction, and frees the copied gradients at its end.
        deferred: the change, at the end of the word, in the number of microbatches between the two halves of a split
            backward.
        of_pair: whether the activations that a move carries belong to the pair stage.
        sends, receives: the kind of tensor that a transfer sends, or receives.
        other_end: the word at the other end of a transfer or a move.
        members: the ranks that take part in a reduction.
        awaits: the words that this word waits for, if they stand before it in its row, for the same stage and the same
            version or microbatch. In addition, every lane carries out its words in the order of the row.
    """

    name: str
    lane: Lane
    proof: Proof | None = None
    handler: str = ""
    cost: str = ""
    colour: str = "grey"
    sign: str = ""
    subject: Subject = Subject.MICROBATCH
    needs: Tensor | None = None
    makes: Tensor | None = None
    uses_saved: bool = False
    adds_gradients: bool = False
    saved: int = 0
    keeps: str = ""
    frees_gradients: bool = False
    is_prediction: bool = False
    deferred: int = 0
    of_pair: bool = False
    sends: Tensor | None = None
    receives: Tensor | None = None
    other_end: Kind | None = None
    members: Members | None = None
    awaits: tuple[Kind, ...] = ()

    @property
    def leaves(self) -> bool:
        """Whether a move takes activations away from their own stage: EVICT and ACCEPT, the two ends of an eviction."""
        return (self.saved < 0) != self.of_pair


_F, _B = Tensor.ACTIVATION, Tensor.GRADIENT

_COMPUTATION = partial(Word, lane=Lane.COMPUTE, proof=Proof.COMPUTATION, awaits=(Kind.FETCH,))
_TRANSFER = partial(Word, lane=Lane.TRANSFERS, proof=Proof.TRANSFER)
_MOVE = partial(Word, lane=Lane.MOVES, proof=Proof.MOVE)
_UPDATE = partial(Word, subject=Subject.UPDATE, proof=Proof.UPDATE)
_PREDICTION = partial(Word, subject=Subject.UPDATE, proof=Proof.PREDICTION)
_RESIDENCY = partial(Word, subject=Subject.UPDATE, proof=Proof.RESIDENCY)

WORDS: dict[Kind, Word] = {
    Kind.FORWARD: _COMPUTATION(
        name="forward", needs=_F, makes=_F, saved=+1, colour="blue", cost="forward", handler="_forward"
    ),
    Kind.BACKWARD: _COMPUTATION(
        name="backward", needs=_B, makes=_B, uses_saved=True, adds_gradients=True, saved=-1, colour="green",
        awaits=(Kind.FETCH, Kind.SWAP_IN), cost="backward", handler="_backward",
    ),
    Kind.BACKWARD_INPUT: _COMPUTATION(
        name="backward, inputs", needs=_B, makes=_B, uses_saved=True, deferred=+1, colour="green",
        awaits=(Kind.FETCH, Kind.SWAP_IN), cost="backward_input", handler="_backward_input",
    ),
    Kind.BACKWARD_WEIGHT: _COMPUTATION(
        name="backward, weights", adds_gradients=True, saved=-1, deferred=-1, colour="olive", cost="backward_weight",
        handler="_backward_weights",
    ),
    Kind.RECOMPUTE: _COMPUTATION(
        name="recompute", uses_saved=True, awaits=(Kind.FETCH, Kind.RELOAD, Kind.SWAP_IN), colour="purple",
        cost="recompute", handler="_recompute",
    ),
    Kind.SEND_F: _TRANSFER(name="send activation", sends=_F, other_end=Kind.RECV_F, handler="_send_output"),
    Kind.RECV_F: _TRANSFER(
        name="receive activation", receives=_F, other_end=Kind.SEND_F, handler="_exchange.post_receive"
    ),
    Kind.SEND_B: _TRANSFER(name="send gradient", sends=_B, other_end=Kind.RECV_B, handler="_exchange.send"),
    Kind.RECV_B: _TRANSFER(
        name="receive gradient", receives=_B, other_end=Kind.SEND_B, handler="_exchange.post_receive"
    ),
    Kind.EVICT: _MOVE(
        name="eviction to the pair stage", saved=-1, other_end=Kind.ACCEPT, colour="brick", sign=">", cost="evict",
        handler="_evict",
    ),
    Kind.ACCEPT: _MOVE(
        name="acceptance from the pair stage", saved=+1, of_pair=True, other_end=Kind.EVICT,
        handler="_transfers.accept",
    ),
    Kind.RETURN: _MOVE(
        name="return to the pair stage", saved=-1, of_pair=True, other_end=Kind.LOAD, awaits=(Kind.ACCEPT,),
        handler="_transfers.give_back",
    ),
    Kind.LOAD: _MOVE(
        name="load from the pair stage", saved=+1, other_end=Kind.RETURN, awaits=(Kind.EVICT,), colour="navy", sign="<",
        cost="load", handler="_transfers.load",
    ),
    Kind.OFFLOAD: Word(
        name="input to the host", lane=Lane.D2H, saved=-1, colour="moss", proof=Proof.STASH, cost="offload",
        handler="_offload",
    ),
    Kind.RELOAD: Word(
        name="input back from the host", lane=Lane.H2D, saved=+1, awaits=(Kind.OFFLOAD,), colour="steel",
        proof=Proof.STASH, cost="reload", handler="_reload",
    ),
    Kind.SWAP_OUT: Word(
        name="activations to the host", lane=Lane.D2H, saved=-1, colour="moss", proof=Proof.SWAP, cost="swap_out",
        handler="_offload",
    ),
    Kind.SWAP_IN: Word(
        name="activations back from the host", lane=Lane.H2D, saved=+1, awaits=(Kind.SWAP_OUT,), colour="steel",
        proof=Proof.SWAP, cost="swap_in", handler="_reload",
    ),
    Kind.REDUCE_GRAD: _UPDATE(
        name="gradients reduced", lane=Lane.CHAIN, members=Members.REPLICAS, cost="reduce_grad",
        handler="_steps.reduce_grad",
    ),
    Kind.REDUCE_EMBED: _UPDATE(
        name="tied embeddings reduced", lane=Lane.CHAIN, members=Members.ENDS, awaits=(Kind.STORE_GRAD,),
        cost="reduce_embed", handler="_steps.reduce_embed",
    ),
    Kind.REDUCE_NORM: _UPDATE(
        name="norm reduced", lane=Lane.CHAIN, members=Members.ALL, cost="reduce_norm", handler="_steps.reduce_norm"
    ),
    Kind.STEP: _UPDATE(
        name="optimizer step; makes weights Wn", lane=Lane.COMPUTE, frees_gradients=True, colour="red", sign="#",
        cost="step", handler="_steps.step",
    ),
    Kind.VALIDATE: _UPDATE(name="step validated", lane=Lane.COMPUTE, frees_gradients=True, handler="_steps.validate"),
    Kind.ROLLBACK: _UPDATE(name="step rolled back", lane=Lane.COMPUTE, handler="_roll_back"),
    Kind.HOLD: _PREDICTION(
        name="gradients kept", lane=Lane.COMPUTE, keeps="gradients", colour="pale teal", cost="hold",
        handler="_steps.hold",
    ),
    Kind.REDUCE_PARTIAL: _PREDICTION(
        name="partial gradients reduced", lane=Lane.CHAIN, members=Members.REPLICAS, cost="reduce_grad",
        handler="_steps.reduce_partial",
    ),
    Kind.REDUCE_PARTIAL_EMBED: _PREDICTION(
        name="partial tied embeddings reduced", lane=Lane.CHAIN, members=Members.ENDS, keeps="tied_gradients",
        cost="reduce_embed", handler="_steps.reduce_partial_embed",
    ),
    Kind.PREDICT: _PREDICTION(
        name="prediction ~n of weights Wn", lane=Lane.COMPUTE, is_prediction=True, colour="teal", sign="~",
        cost="predict", handler="_steps.predict",
    ),
    Kind.FETCH: _RESIDENCY(
        name="weights fetched", lane=Lane.H2D, awaits=(Kind.UPDATE,), colour="sky", cost="fetch", handler="_fetch"
    ),
    Kind.FREE: _RESIDENCY(name="weights freed", lane=Lane.H2D, handler="_free"),
    Kind.STORE_GRAD: _RESIDENCY(
        name="gradients stored", lane=Lane.D2H, awaits=(Kind.REDUCE_GRAD,), colour="leaf", cost="store",
        handler="_store_grad",
    ),
    Kind.UPDATE: _RESIDENCY(
        name="update on the host", lane=Lane.HOST, awaits=(Kind.STORE_GRAD, Kind.REDUCE_EMBED), colour="pink",
        cost="update", handler="_update_on_host",
    ),
}  # fmt: skip


def kinds(holds: Callable[[Word], object]) -> frozenset[Kind]:
    """Return the kinds whose row in `WORDS` satisfies `holds`."""
    return frozenset(kind for kind, word in WORDS.items() if holds(word))


BUSY = kinds(lambda word: word.lane is Lane.COMPUTE)  # a rank carries out one of these at a time
UPDATES = kinds(lambda word: word.subject is Subject.UPDATE)
COMPUTATIONS = BUSY - UPDATES
OWN_UPDATES = BUSY & UPDATES
AWAITS_REDUCTIONS = OWN_UPDATES - kinds(lambda word: word.keeps)  # reductions of its version, earlier in the row
MOVES = kinds(lambda word: word.lane is Lane.MOVES)
OWN_MOVES = kinds(lambda word: word.lane is Lane.MOVES and not word.of_pair)  # the evictor's ends of moves
EVICTIONS = kinds(lambda word: word.lane is Lane.MOVES and word.saved < 0 and not word.of_pair)
LOADS = OWN_MOVES - EVICTIONS
SENDS = kinds(lambda word: word.sends)
RECEIVES = kinds(lambda word: word.receives)
REDUCTIONS = kinds(lambda word: word.lane is Lane.CHAIN)
HOST_WORDS = kinds(lambda word: word.lane in (Lane.H2D, Lane.D2H, Lane.HOST))  # each concerns one stage
STASH_WORDS = HOST_WORDS - UPDATES  # each concerns one microbatch at one stage
SWAPS = kinds(lambda word: word.proof is Proof.SWAP)  # these move all that a microbatch saves
OFFLOADS = STASH_WORDS & kinds(lambda word: word.saved < 0)
RELOADS = STASH_WORDS & kinds(lambda word: word.saved > 0)
RESIDENCY_WORDS = UPDATES & kinds(lambda word: word.lane is Lane.H2D)  # these read their version and do not make it
TRANSFERS = MOVES | SENDS | RECEIVES | STASH_WORDS
AWAITED = frozenset(kind for word in WORDS.values() for kind in word.awaits)
SHARED_REDUCTIONS = kinds(lambda word: word.members in (Members.ENDS, Members.ALL))  # ranks wait for each other there
OF_REPLICAS = kinds(lambda word: word.members is Members.REPLICAS)  # where stages are copies, these wait there, too
EVALUATES = RESIDENCY_WORDS | kinds(lambda word: _F in (word.makes, word.sends, word.receives))
USES_SAVED = kinds(lambda word: word.uses_saved)
BEGINS_BACKWARD = kinds(lambda word: word.needs is Tensor.GRADIENT)
ENDS_BACKWARD = kinds(lambda word: word.adds_gradients)
BACKWARDS = BEGINS_BACKWARD | ENDS_BACKWARD
HALVES = kinds(lambda word: word.deferred)  # the two halves of a split backward

SEND_OF = {WORDS[kind].sends: kind for kind in SENDS}  # by the tensor that is sent
RECEIVE_OF = {WORDS[kind].receives: kind for kind in RECEIVES}

_ARROWS = dict.fromkeys(SENDS, ">") | dict.fromkeys(RECEIVES, "<")
_WORDS = "|".join(kind.value for kind in Kind)
_TEXT = re.compile(
    rf"(0|[1-9][0-9]*)({_WORDS})(0|[1-9][0-9]*)?(?:@(0|[1-9][0-9]*)(?:([+~])([1-9][0-9]*))?)?(?:([<>])(0|[1-9][0-9]*))?"
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction for one stage.

    Attributes:
        kind: the action.
        stage: the global (virtual) stage.
        microbatch: its number, counted over the whole run; None for updates.
        version: the weight version that a computation uses or that an update concerns; None for transfers, and in a
            program that names no versions.
        peer: the stage at the other end of a transfer; None if only one stage is possible.
        horizon: for a forward at predicted weights, the number of steps from `version` to the prediction; else 0.
        unstepped: for a forward at provisionally stepped weights, the number of microbatches of batch `version` whose
            gradients make the provisional step: those whose backward is done at the stage. Otherwise 0.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    version: int | None = None
    peer: int | None = None
    horizon: int = 0
    unstepped: int = 0

    @property
    def ahead(self) -> str:
        """The suffix for weights ahead of `version` in the text form: `+2`, `~3`, or empty."""
        return (f"+{self.horizon}" if self.horizon else "") + (f"~{self.unstepped}" if self.unstepped else "")

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        peer = "" if self.peer is None or self.kind not in _ARROWS else f"{_ARROWS[self.kind]}{self.peer}"
        return f"{self.stage}{self.kind.value}{microbatch}{version}{self.ahead}{peer}"

    def shifted(self, *, microbatches: int, versions: int) -> Instruction:
        """Return the instruction with `microbatches` added to its microbatch and `versions` to its version."""
        return Instruction(
            self.kind,
            self.stage,
            None if self.microbatch is None else self.microbatch + microbatches,
            None if self.version is None else self.version + versions,
            self.peer,
            self.horizon,
            self.unstepped,
        )

    @staticmethod
    @lru_cache(maxsize=65536)
    def parse(text: str) -> Instruction:
        """Read an instruction from its text form.

        Raises:
            ValueError: the text is not one instruction with a known word, it lacks the microbatch or the version that
                the word needs, or it has a part that the word does not take.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an instruction; the form is STAGE WORD MICROBATCH[@VERSION], "
                "such as 2F5@1, 2SEND_F5, 2SEND_F5>4 or 2STEP@4"
            )
        stage, word, microbatch, version, sign, ahead, arrow, peer = match.groups()
        kind = Kind(word)
        if arrow is not None and _ARROWS.get(kind) != arrow:
            raise ValueError(f"{text!r}: only SENDs go to a stage (>), and only RECVs come from one (<)")
        if sign is not None and kind is not Kind.FORWARD:
            reason = (
                f"only a forward takes predicted weights, and {word} no steps ahead"
                if sign == "+"
                else f"only a forward takes weights of a provisional step, and {word} none"
            )
            raise ValueError(f"{text!r}: {reason} ({sign}{ahead})")
        if kind in UPDATES:
            if microbatch is not None or version is None:
                raise ValueError(f"{text!r}: {word} takes a version and no microbatch, such as {stage}{word}@1")
        elif microbatch is None:
            raise ValueError(f"{text!r}: {word} needs a microbatch, such as {stage}{word}0")
        elif kind in TRANSFERS and version is not None:
            raise ValueError(f"{text!r}: {word} moves a tensor and takes no weight version")
        return Instruction(
            kind,
            int(stage),
            None if microbatch is None else int(microbatch),
            None if version is None else int(version),
            None if peer is None else int(peer),
            int(ahead) if sign == "+" else 0,
            int(ahead) if sign == "~" else 0,
        )


Row = tuple[Instruction, ...]
"""The instructions of one rank, in order."""
Rows = tuple[Row, ...]
"""One row for each rank of a pipeline."""
