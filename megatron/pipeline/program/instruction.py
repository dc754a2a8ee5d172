"""The words of a pipeline program, and one instruction made of them.

A schedule is data only if its smallest part can be written down, read back and compared. An instruction is a frozen
value: what to do (`Kind`), on which global stage, and where they apply the microbatch, the weight version and the peer.
Its text form (`2F5@1`, `2F5@1+2`, `2F5@1~3`, `2SEND_F5`, `2STEP@4`) is a superset of torch.distributed.pipelining's.
Reading it is strict.

What a word means is said once, in `WORDS`. Passes, checker, simulator, planner, drawing and executor ask that table and
keep none of their own, so a new word is a row there, its proof in the checker, and a method of the executor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial


class Kind(str, Enum):
    """What an instruction does; the value is its word in the text form."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of input and weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"  # the forward again, from the stored input
    SEND_F = "SEND_F"  # post the transfer of an activation to a stage that needs it
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # post the transfer of a gradient to the stage that made the activation
    RECV_B = "RECV_B"
    EVICT = "EVICT"  # move the saved activations of a microbatch to the pair stage, and back
    ACCEPT = "ACCEPT"
    RETURN = "RETURN"
    LOAD = "LOAD"
    OFFLOAD = "OFFLOAD"  # where inputs are stashed on the host: copy the input of a microbatch there, and back
    RELOAD = "RELOAD"
    REDUCE_GRAD = "REDUCE_GRAD"  # the chain that leads to a version
    REDUCE_EMBED = "REDUCE_EMBED"
    REDUCE_NORM = "REDUCE_NORM"
    STEP = "STEP"  # waits for the chain, then makes the version
    HOLD = "HOLD"  # keep the gradients as they are here, for the prediction that leads to a version
    REDUCE_PARTIAL = "REDUCE_PARTIAL"  # what is kept, over the replicas
    REDUCE_PARTIAL_EMBED = "REDUCE_PARTIAL_EMBED"
    PREDICT = "PREDICT"  # takes the step to a version provisionally, from a part of its gradients
    FETCH = "FETCH"  # where weights live on the host: copy a version of a stage to the device
    FREE = "FREE"  # what is computed before it was the last use of that copy
    STORE_GRAD = "STORE_GRAD"  # copy the gradients that lead to a version of a stage to the host
    UPDATE = "UPDATE"  # the host's optimizer makes a version of a stage

    __hash__ = str.__hash__  # that of enums is written in Python, and programs ask for it millions of times

    @cached_property
    def row(self) -> Word:
        """What the word means."""
        return WORDS[self]

    @property
    def is_computation(self) -> bool:
        return self in COMPUTATIONS


class Subject(Enum):
    """What an instruction is about."""

    MICROBATCH = "microbatch"
    UPDATE = "update"  # of the weights: a version


class Lane(Enum):
    """Where an instruction takes its time. Outside of `COMPUTE` it is only posted, and its lane carries it out."""

    COMPUTE = "compute"
    TRANSFERS = "transfers"
    MOVES = "moves"
    CHAIN = "chain"
    H2D = "host to device"
    D2H = "device to host"
    HOST = "host optimizer"


class Tensor(Enum):
    """What travels between stages that have an edge (see `edges`)."""

    __hash__ = object.__hash__  # as of `Kind`

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Members(Enum):
    """Whose part of a reduction a rank waits for."""

    REPLICAS = "replicas"  # of its stages, which run the same program
    ENDS = "ends"  # the ranks of the first and the last stage
    ALL = "all"


class Proof(Enum):
    """What `check` proves of an instruction, in the order in which it numbers words."""

    COMPUTATION = "computation"
    TRANSFER = "transfer"
    MOVE = "move"
    STASH = "input on the host"
    UPDATE = "update"
    PREDICTION = "prediction"
    RESIDENCY = "weights on the host"


@dataclass(frozen=True, kw_only=True)
class Word:
    """A row of `WORDS`.

    Attributes:
        name: what a legend calls it.
        proof: what is proved of it; None: nothing, so the checker refuses it.
        handler: the method that executes it, an attribute of the executor.
        cost: the name of its seconds in `simulate.costs.Costs`; none: it takes no time.
        colour, sign: its family of colours in drawings (`draw.colours`), and what stands before its number there; `#`:
            a mark at its end. An update without a sign is a bar as wide as its time.
        lane, subject: see the classes.
        needs, makes: what a computation takes from the stages before or behind it, and what it has for them.
        uses_saved: it reads the saved activations of its microbatch, which so have to be at the stage.
        adds_gradients: it adds its microbatch to the gradients of the weights, and ends the backward with that.
        saved: what it does to the number of microbatches that the stage saves: +1 from its start on, -1 at its end.
        keeps: of which gradients it keeps a copy for a prediction: `gradients` or `tied_gradients`, as
            `simulate.memory_curve.MemorySizes` names their bytes.
        is_prediction: it makes a prediction, and drops the kept copies at its end.
        deferred: what it does, at its end, to the number of microbatches between the halves of a split backward.
        of_pair: of a move, that what is saved belongs to the pair stage.
        sends, receives: what a transfer takes to, or from, another stage.
        other_end: of a transfer or a move, the word at the other stage.
        members: of a reduction.
        awaits: the words for which it waits: of its stage, and of its version or its microbatch, as far as they stand
            before it in its row. Besides, every lane carries out its words in the order of the row.
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
        """Whether activations leave their stage with this move, seen from either end: EVICT and ACCEPT."""
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
        cost="backward", handler="_backward",
    ),
    Kind.BACKWARD_INPUT: _COMPUTATION(
        name="backward, inputs", needs=_B, makes=_B, uses_saved=True, deferred=+1, colour="green",
        cost="backward_input", handler="_backward_input",
    ),
    Kind.BACKWARD_WEIGHT: _COMPUTATION(
        name="backward, weights", adds_gradients=True, saved=-1, deferred=-1, colour="olive", cost="backward_weight",
        handler="_backward_weights",
    ),
    Kind.RECOMPUTE: _COMPUTATION(
        name="recompute", uses_saved=True, awaits=(Kind.FETCH, Kind.RELOAD), colour="purple", cost="recompute",
        handler="_recompute",
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
    Kind.REDUCE_GRAD: _UPDATE(
        name="gradients reduced", lane=Lane.CHAIN, members=Members.REPLICAS, cost="reduce_grad", handler="_reduce_grad"
    ),
    Kind.REDUCE_EMBED: _UPDATE(
        name="tied embeddings reduced", lane=Lane.CHAIN, members=Members.ENDS, awaits=(Kind.STORE_GRAD,),
        cost="reduce_embed", handler="_reduce_embed",
    ),
    Kind.REDUCE_NORM: _UPDATE(
        name="norm reduced", lane=Lane.CHAIN, members=Members.ALL, cost="reduce_norm", handler="_reduce_norm"
    ),
    Kind.STEP: _UPDATE(
        name="optimizer step; makes weights Wn", lane=Lane.COMPUTE, colour="red", sign="#", cost="step",
        handler="_step",
    ),
    Kind.HOLD: _PREDICTION(
        name="gradients kept", lane=Lane.COMPUTE, keeps="gradients", colour="pale teal", cost="hold", handler="_hold"
    ),
    Kind.REDUCE_PARTIAL: _PREDICTION(
        name="partial gradients reduced", lane=Lane.CHAIN, members=Members.REPLICAS, cost="reduce_grad",
        handler="_reduce_partial",
    ),
    Kind.REDUCE_PARTIAL_EMBED: _PREDICTION(
        name="partial tied embeddings reduced", lane=Lane.CHAIN, members=Members.ENDS, keeps="tied_gradients",
        cost="reduce_embed", handler="_reduce_partial_embed",
    ),
    Kind.PREDICT: _PREDICTION(
        name="prediction ~n of weights Wn", lane=Lane.COMPUTE, is_prediction=True, colour="teal", sign="~",
        cost="predict", handler="_predict",
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
    """The kinds of whose rows this holds."""
    return frozenset(kind for kind, word in WORDS.items() if holds(word))


BUSY = kinds(lambda word: word.lane is Lane.COMPUTE)  # what keeps a rank from computing anything else
UPDATES = kinds(lambda word: word.subject is Subject.UPDATE)
COMPUTATIONS = BUSY - UPDATES
AWAITS_REDUCTIONS = BUSY & UPDATES  # of its version, as far as they stand before it
MOVES = kinds(lambda word: word.lane is Lane.MOVES)
OWN_MOVES = kinds(lambda word: word.lane is Lane.MOVES and not word.of_pair)  # of the evictor
EVICTIONS = kinds(lambda word: word.lane is Lane.MOVES and word.saved < 0 and not word.of_pair)
LOADS = OWN_MOVES - EVICTIONS
SENDS = kinds(lambda word: word.sends)
RECEIVES = kinds(lambda word: word.receives)
REDUCTIONS = kinds(lambda word: word.lane is Lane.CHAIN)
HOST_WORDS = kinds(lambda word: word.lane in (Lane.H2D, Lane.D2H, Lane.HOST))  # of one stage each
STASH_WORDS = HOST_WORDS - UPDATES  # of one microbatch, too
OFFLOADS = STASH_WORDS & kinds(lambda word: word.saved < 0)
RELOADS = STASH_WORDS & kinds(lambda word: word.saved > 0)
RESIDENCY_WORDS = UPDATES & kinds(lambda word: word.lane is Lane.H2D)  # their version is read, not made
TRANSFERS = MOVES | SENDS | RECEIVES | STASH_WORDS
AWAITED = frozenset(kind for word in WORDS.values() for kind in word.awaits)
SHARED_REDUCTIONS = kinds(lambda word: word.members in (Members.ENDS, Members.ALL))  # stages wait for each other there
EVALUATES = RESIDENCY_WORDS | kinds(lambda word: _F in (word.makes, word.sends, word.receives))
USES_SAVED = kinds(lambda word: word.uses_saved)
BEGINS_BACKWARD = kinds(lambda word: word.needs is Tensor.GRADIENT)
ENDS_BACKWARD = kinds(lambda word: word.adds_gradients)
BACKWARDS = BEGINS_BACKWARD | ENDS_BACKWARD
HALVES = kinds(lambda word: word.deferred)  # of a split backward

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
        kind: what to do.
        stage: global (virtual) stage.
        microbatch: numbered on over the whole run; None for updates.
        version: the weight version that a computation uses or an update leads to; None for transfers, and where a
            program says nothing about versions.
        peer: the other stage of a transfer; None where only one can be meant.
        horizon: of a forward, how many steps ahead of its version the weights are predicted that it uses.
        unstepped: of a forward, how many microbatches of the batch `version` have their backward behind them at the
            stage: the step that their gradients lead to, taken provisionally, makes the weights that it uses. With a
            horizon 0.
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
        """How its weights are ahead of its version, as in the text: +2, ~3, or nothing."""
        return (f"+{self.horizon}" if self.horizon else "") + (f"~{self.unstepped}" if self.unstepped else "")

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        peer = "" if self.peer is None or self.kind not in _ARROWS else f"{_ARROWS[self.kind]}{self.peer}"
        return f"{self.stage}{self.kind.value}{microbatch}{version}{self.ahead}{peer}"

    def shifted(self, *, microbatches: int, versions: int) -> Instruction:
        """The same instruction, later in the run."""
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
        """Read the text form; the whole text must be one instruction.

        Raises:
            ValueError: an unknown word, characters left over, a microbatch, version or what is ahead of it missing or
                out of place.
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
"""What one rank does, in order."""
Rows = tuple[Row, ...]
"""One for each rank of a pipeline."""
