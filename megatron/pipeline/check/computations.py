"""Proofs about each microbatch: its computations, and the moves of its activations.

Proof: every microbatch passes every stage once, forward, then backward, each after everything that it needs.

The state of a microbatch at a stage is a set of facts, one bit each. Each kind of instruction requires some facts,
must not find others, and adds its own. A transfer has a fact for each peer stage:

    kind     requires                                       must not find    adds
    F        each INPUT_POSTED (of inputs that are sent)    FORWARD          FORWARD
    R        FORWARD                                        RECOMPUTED       RECOMPUTED
    B        FORWARD, each GRAD_POSTED (of those sent),     INPUT_GRAD,      INPUT_GRAD,
             RECOMPUTED (in a program that recomputes)      WEIGHT_GRAD      WEIGHT_GRAD
    I        as B                                           INPUT_GRAD       INPUT_GRAD
    W        INPUT_GRAD                                     WEIGHT_GRAD      WEIGHT_GRAD
    SEND_F   FORWARD                                        OUTPUT_SENT      OUTPUT_SENT
    RECV_F                                                  INPUT_POSTED     INPUT_POSTED
    SEND_B   INPUT_GRAD                                     GRAD_SENT        GRAD_SENT
    RECV_B                                                  GRAD_POSTED      GRAD_POSTED

A kind that a stage cannot have (the last stage sends no activations, a frozen stage computes no backward) has no rule.
At the end every microbatch must have every fact for which its stage has a rule. So no instruction is missing, no
activations stay saved, and each needed transfer was posted at both ends. Where stages are copies, a microbatch begins
with all facts of the stages that do not take it, and with the facts of the transfers over edges that do not carry it.

Proof: evicted activations come back before their backward, and both ends of every move agree.

The saved activations of a microbatch may leave a stage once, after its forward, and must come back before the
instruction that needs them first (its recompute, or its backward):

    EVICT    after F; not twice; nothing has needed the activations yet
    LOAD     after EVICT; not twice
    R, B, I  not between EVICT and LOAD
    ACCEPT   at the pair stage; not twice
    RETURN   after ACCEPT; not twice
    SWAP_OUT as EVICT, to the host; and after the second forward of its stage
    SWAP_IN  after SWAP_OUT; not twice

The tensors that microbatches share (masks, tables) are known from the second forward of a stage on; until then nothing
can leave. All moves from a stage have one size. So where a stage keeps some microbatches and recomputes the others,
only those that it keeps may move, from the second of their forwards on.

Each rank carries out its moves in the order of its row (see `program.lane_order`), so moves carry no tags: the n-th
move of a rank is matched with the n-th move of its partner rank. The proof shows that the two rows list the two ends of
the same moves in the same order. Otherwise a stage would load another microbatch's activations without any error. The
proof of progress shows that the moves complete and that no ranks wait for each other in a circle.
"""

from megatron.pipeline.check.compact import (
    FIRST_MOVE,
    FIRST_STASH,
    FIRST_SWAP,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    NUM_CODES,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    CompactProgram,
    F,
    I,
    ProgramError,
    R,
    W,
    codes_of,
)
from megatron.pipeline.program.instruction import Tensor

FORWARD, RECOMPUTED, INPUT_GRAD, WEIGHT_GRAD, _FIRST_OF_TRANSFERS = (1 << bit for bit in range(5))

# (mask of facts, their required values, facts added); an instruction without a microbatch changes no facts.
_Rule = tuple[int, int, int]
_NO_CONCERN: _Rule = (0, 0, 0)
_ABSENT_WHERE_EVALUATED = (R, B, I, W, SEND_B, RECV_B, *range(FIRST_MOVE, FIRST_UPDATE))

# fact -> (code that adds it, message if the fact is missing, message if it is already there)
_FACTS = {
    FORWARD: (F, "its forward has not run", "it had its forward already"),
    INPUT_GRAD: (B, "its backward has not run", "it had its backward already"),
    WEIGHT_GRAD: (W, "the gradients of its weights are not computed", "it had its backward already"),
    RECOMPUTED: (R, "its activations have not been recomputed", "it was recomputed already"),
}
_OF_TRANSFERS = {
    RECV_F: ("its input has not been received", "its input is received twice"),
    RECV_B: ("the gradient of its output has not been received", "that gradient is received twice"),
    SEND_F: ("its output is never sent", "its output is sent twice"),
    SEND_B: ("the gradient of its input is never sent", "that gradient is sent twice"),
}


class Facts:
    """The table of rules about the facts of a microbatch at each stage.

    Attributes:
        rules: by slot; None if the stage cannot have such an instruction.
        added: by slot, the facts that the instruction adds.
        complete: for each stage, all facts that a microbatch must have at the end.
        kept: the places of the microbatches that a stage keeps although it recomputes others. They count as recomputed.
        known: place -> the facts that it has from the start.
    """

    def __init__(self, compact: CompactProgram) -> None:
        self._compact = compact
        self.rules: list[_Rule | None] = [_NO_CONCERN] * compact.num_slots
        self.complete = [0] * compact.num_stages
        for stage in range(compact.num_stages):
            rules = self._rules_of(stage)
            for slot, rule in rules.items():
                self.rules[slot] = rule
            for rule in rules.values():
                self.complete[stage] |= rule[2] if rule else 0
        self.added = [rule[2] if rule else 0 for rule in self.rules]
        self.kept = _kept_places(compact)
        self.known = {place: RECOMPUTED for place in self.kept} | self._elsewhere()
        self._fits_bytes = max(self.complete) < 256

    def none_yet(self, num_microbatches: int) -> bytearray | list[int]:
        """The initial states of `num_microbatches` microbatches, without any facts."""
        return bytearray(num_microbatches) if self._fits_bytes else [0] * num_microbatches

    def _elsewhere(self) -> dict[int, int]:
        """Place -> the facts of microbatches that a copy does not take, and of transfers that do not carry them."""
        compact, found = self._compact, {}
        program, width = compact.program, compact.num_microbatches
        for stage in range(compact.num_stages * bool(program.copies)):
            peers = [(fact, compact.transfers[slot].peer) for slot, fact in self.of_transfers(stage).items()]
            own = stage * width
            found |= dict.fromkeys(range(own, own + width), self.complete[stage])
            for index in program.indexes_taken(stage):
                microbatch = program.first_microbatch + index
                given = sum(fact for fact, peer in peers if not program.takes(peer, microbatch))
                found[own + index] = self.complete[stage] & given
                if not found[own + index]:
                    del found[own + index]
        return found

    def of_transfers(self, stage: int) -> dict[int, int]:
        """The facts of a stage's transfers: slot -> fact."""
        return {slot: _FIRST_OF_TRANSFERS << number for number, slot in enumerate(self._compact.transfers_of[stage])}

    def _rules_of(self, stage: int) -> dict[int, _Rule | None]:
        compact, first = self._compact, stage * NUM_CODES
        recompute = compact.program.recomputes(stage)
        rules: dict[int, _Rule | None] = dict.fromkeys(range(first + FIRST_TRANSFER, first + FIRST_MOVE))
        posted = {RECV_F: 0, RECV_B: 0}

        def rule(requires: int, must_not_find: int, adds: int) -> _Rule:
            return requires | must_not_find, requires, adds

        for slot, fact in self.of_transfers(stage).items():
            code = compact.transfers[slot].code
            if code in posted:
                posted[code] |= fact
            rules[slot] = rule({SEND_F: FORWARD, SEND_B: INPUT_GRAD}.get(code, 0), fact, fact)
            if compact.program.forward_only and code in _ABSENT_WHERE_EVALUATED:
                rules[slot] = None
        ready = FORWARD | posted[RECV_B] | (RECOMPUTED if recompute else 0)
        of_code = {
            F: rule(posted[RECV_F], FORWARD, FORWARD),
            R: rule(FORWARD, RECOMPUTED, RECOMPUTED) if recompute else None,
            B: rule(ready, INPUT_GRAD | WEIGHT_GRAD, INPUT_GRAD | WEIGHT_GRAD),
            I: rule(ready, INPUT_GRAD, INPUT_GRAD),
            W: rule(INPUT_GRAD, WEIGHT_GRAD, WEIGHT_GRAD),
        }
        if compact.program.forward_only or compact.program.graph.is_forward_only(stage):
            of_code |= dict.fromkeys(set(_ABSENT_WHERE_EVALUATED) - set(range(FIRST_TRANSFER, FIRST_MOVE)))
        return rules | {first + code: each for code, each in of_code.items()}

    def explain(self, place: int, found: int, wanted: int) -> str:
        """The message for an instruction whose required facts `wanted` differ from the facts `found`."""
        unwanted = found & ~wanted
        for fact, (word, missing, twice) in self._known(place).items():
            if fact & unwanted:
                return twice
            if fact & wanted & ~found:
                return f"{missing}: no {word} stands before it"
        raise AssertionError("facts agree")

    def explain_known(self, rank: int, position: int, place: int) -> str | None:
        """The message for an instruction whose facts its place has from the start; None for any other one."""
        compact, code = self._compact, self._compact.codes[rank][position]
        if place in self.kept and code == R:
            return "the program keeps this microbatch (kept) at this stage"
        if place not in self.known or not compact.program.copies:
            return None
        stage, index = divmod(place, compact.num_microbatches)
        microbatch = compact.program.first_microbatch + index
        if not compact.program.takes(stage, microbatch):
            return f"another copy of stage {compact.program.copies[stage].stage} of the model takes this microbatch"
        peer = FIRST_TRANSFER <= code < FIRST_MOVE and compact.program.graph.peer_of(
            compact.program.rows[rank][position]
        )
        if peer is False or compact.program.takes(peer, microbatch):
            return None
        return f"stage {peer} does not take this microbatch"

    def incomplete(self, place: int, lacking: int) -> ProgramError:
        """The error for a microbatch that lacks facts at the end; it points at the forward if the row has one."""
        compact = self._compact
        word, missing, _ = next(known for fact, known in self._known(place).items() if fact & lacking)
        stage = place // compact.num_microbatches
        rank = compact.rank_of_stage[stage]
        position = compact.position(rank, stage * NUM_CODES + F, place)
        return compact.error(rank, position, f"{missing}: the row has no {word}")

    def _known(self, place: int) -> dict[int, tuple[str, str, str]]:
        """Fact -> (text of the instruction that adds it, message if it is missing, message if it is there twice)."""
        compact = self._compact
        known = {fact: (compact.word(code, place), *texts) for fact, (code, *texts) in _FACTS.items()}
        stage = place // compact.num_microbatches
        of_transfers = self.of_transfers(stage)
        for code, texts in _OF_TRANSFERS.items():
            for slot, fact in of_transfers.items():
                transfer = compact.transfers[slot]
                if transfer.code == code:
                    known[fact] = (compact.word(code, place, transfer.peer), *texts)
        return known


def _kept_places(compact: CompactProgram) -> frozenset[int]:
    program, width = compact.program, compact.num_microbatches
    first = program.first_microbatch
    return frozenset(
        stage * width + microbatch - first
        for stage in {each.stage for each in program.kept}
        for microbatch in range(first, first + width)
        if not program.is_recomputed(stage, microbatch)
    )


def prove_computations(compact: CompactProgram) -> None:
    """Prove the module's table of rules for every (stage, microbatch).

    Args:
        compact: the program. A program that evaluates (`forward_only`) may have only forwards and their transfers.

    Raises:
        ProgramError: for the first instruction that breaks its rule, or for the forward of an unfinished microbatch.
    """
    num_microbatches = compact.num_microbatches
    known = Facts(compact)
    rules, facts = known.rules, known.none_yet(compact.num_stages * num_microbatches)
    for place, given in known.known.items():
        facts[place] = given
    for rank, (slots, places) in enumerate(zip(compact.slots, compact.places, strict=True)):
        for position, (slot, place) in enumerate(zip(slots, places, strict=True)):
            rule = rules[slot]
            if rule is None:
                raise compact.error(rank, position, _explain_no_rule(compact, rank, position))
            looked_at, wanted, added = rule
            found = facts[place]
            if found & looked_at != wanted:
                if reason := known.explain_known(rank, position, place):
                    raise compact.error(rank, position, reason)
                raise compact.error(rank, position, known.explain(place, found & looked_at, wanted))
            facts[place] = found | added
    for stage, complete in enumerate(known.complete):
        row = facts[stage * num_microbatches : (stage + 1) * num_microbatches]
        if row.count(complete) != num_microbatches:
            index = next(index for index, found in enumerate(row) if found != complete)
            raise known.incomplete(stage * num_microbatches + index, complete & ~row[index])


def _explain_no_rule(compact: CompactProgram, rank: int, position: int) -> str:
    instruction, code = compact.program.rows[rank][position], compact.codes[rank][position]
    stage, graph = instruction.stage, compact.program.graph
    if compact.program.forward_only and code not in (SEND_F, RECV_F):
        return "a program that evaluates has forwards only"
    if graph.is_forward_only(stage) and not FIRST_TRANSFER <= code < FIRST_MOVE:
        saves = " and saves nothing that could move" * (code >= FIRST_MOVE)
        return f"stage {stage} gets no gradients, so it has forwards only{saves}"
    if code == R:
        return "the program recomputes nothing" + " at this stage" * compact.program.recompute
    word = KIND_OF_CODE[code].row
    if not (graph.takers(word.sends, stage) if word.sends else graph.makers(word.receives, stage)):
        there = "there" if graph.is_chain else f"that {'takes' if word.sends else 'makes'} that {_of(word).value}"
        return f"stage {stage} has no neighbour {there}: the program has stages 0 to {compact.num_stages - 1}"
    peer = graph.peer_of(instruction)
    return f"stages {stage} and {peer} live on the same rank and exchange tensors without transfers"


def _of(word) -> Tensor:
    return word.sends or word.receives


EVICT, ACCEPT, RETURN, LOAD, SWAP_OUT, SWAP_IN = codes_of("EVICT ACCEPT RETURN LOAD SWAP_OUT SWAP_IN")

# States of the activations of a microbatch at a stage; at its pair stage: _NOWHERE, _LENT, _GIVEN_BACK.
_NOWHERE, _SAVED, _AWAY, _ON_HOST, _BACK, _USED, _LENT, _GIVEN_BACK = range(8)

# code -> (states in which the instruction is allowed, state that it leaves)
_MUST_FIND = {
    EVICT: ((_SAVED,), _AWAY),
    LOAD: ((_AWAY,), _BACK),
    SWAP_OUT: ((_SAVED,), _ON_HOST),
    SWAP_IN: ((_ON_HOST,), _BACK),
    R: ((_SAVED, _BACK), _USED),
    B: ((_SAVED, _BACK, _USED), _USED),
    I: ((_SAVED, _BACK, _USED), _USED),
    ACCEPT: ((_NOWHERE,), _LENT),
    RETURN: ((_LENT,), _GIVEN_BACK),
}
_FOUND = {
    _NOWHERE: "its activations are not here",
    _SAVED: "its activations are here and have never left",
    _AWAY: "its activations are at the pair stage, and no LOAD stands before it",
    _ON_HOST: "its activations are on the host, and no SWAP_IN stands before it",
    _BACK: "its activations have left and come back already",
    _USED: "its activations have been used already",
    _LENT: "the activations of the pair stage were accepted already",
    _GIVEN_BACK: "the activations of the pair stage were returned already",
}


def prove_balance(compact: CompactProgram) -> None:
    """Prove the module's rules of moves.

    Args:
        compact: a program whose computations are proved.

    Raises:
        ProgramError: for the first instruction that breaks its rule, or a move without its other end.
    """
    if not (compact.moves or compact.swaps):
        return
    pairs, width = compact.program.pairs, compact.num_microbatches
    num_places = compact.num_stages * width
    own, lent = bytearray(num_places), bytearray(num_places)
    num_forwards = [0] * compact.num_stages
    kept, two_sizes = _kept_places(compact), {each.stage for each in compact.program.kept}
    for rank in range(len(compact.codes)):
        for position, (code, place, _) in compact.row(rank):
            if code == F:
                own[place] = _SAVED
                num_forwards[place // width] += place // width not in two_sizes or place in kept
            elif code in _MUST_FIND:
                refusal = ""
                if code in (EVICT, SWAP_OUT) and place // width in two_sizes and place not in kept:
                    reason = "the stage recomputes this microbatch and keeps others (kept): only those may move"
                    raise compact.error(rank, position, reason)
                if FIRST_MOVE <= code < FIRST_STASH:
                    refusal = pairs.refusal(place // width)
                elif code >= FIRST_SWAP:
                    refusal = _why_no_swap(compact, num_forwards[place // width])
                if refusal:
                    raise compact.error(rank, position, refusal)
                wanted, left = _MUST_FIND[code]
                states = lent if code in (ACCEPT, RETURN) else own
                if states[place] not in wanted:
                    raise compact.error(rank, position, _FOUND[states[place]])
                states[place] = left
    for rank, partner in enumerate(compact.partners if compact.moves else ()):
        if rank < partner:
            _prove_correspondence(compact, rank, partner)


def _why_no_swap(compact: CompactProgram, num_forwards: int) -> str:
    """Return why no activations may move to the host behind so many forwards of a stage; empty if they may."""
    if compact.program.residency is not None:
        return "where weights live on the host, inputs wait there and not all activations; OFFLOAD them instead"
    if compact.moves:
        return "activations move to the host or to a pair stage, and this program does both"
    if num_forwards < 2:
        return (
            "nothing can leave a stage before its second forward, which shows what microbatches share; move it behind"
        )
    return ""


def moves_of_rank(compact: CompactProgram, rank: int, end: int | None = None) -> list[int]:
    """The positions of the moves in a row, before position `end`."""
    return [position for position, code in enumerate(compact.codes[rank][:end]) if FIRST_MOVE <= code < FIRST_STASH]


def _prove_correspondence(compact: CompactProgram, rank: int, partner: int) -> None:
    own, others = moves_of_rank(compact, rank), moves_of_rank(compact, partner)
    rows, pairs = compact.program.rows, compact.program.pairs
    for nth, (position, other) in enumerate(zip(own, others, strict=False)):
        wanted = pairs.counterpart(rows[partner][other])
        found = rows[rank][position]
        if (found.kind, found.stage, found.microbatch) != (wanted.kind, wanted.stage, wanted.microbatch):
            reason = f"move {nth} of rank {partner} is {rows[partner][other]}, whose other end is {wanted}"
            raise compact.error(rank, position, reason)
    if len(own) != len(others):
        alone, rest = (rank, own[len(others) :]) if len(own) > len(others) else (partner, others[len(own) :])
        missing = pairs.counterpart(rows[alone][rest[0]])
        other_rank = partner if alone == rank else rank
        raise compact.error(alone, rest[0], f"the row of rank {other_rank} has no {missing} to meet it")
