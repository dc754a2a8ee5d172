"""Proof: evicted activations come back before their backward, and both ends of every move agree.

The saved activations of a microbatch may leave a stage once, after its forward, and must come back before the
instruction that needs them first (its recompute, or its backward):

    EVICT    after F; not twice; nothing has needed the activations yet
    LOAD     after EVICT; not twice
    R, B, I  not between EVICT and LOAD
    ACCEPT   at the pair stage; not twice
    RETURN   after ACCEPT; not twice

Each rank carries out its moves in the order of its row (see `program.move_order`), so moves carry no tags: the n-th
move of a rank is matched with the n-th move of its partner rank. The proof shows that the two rows list the two ends of
the same moves in the same order. Otherwise a stage would load another microbatch's activations without any error. The
proof of progress shows that the moves complete and that no ranks wait for each other in a circle.
"""

from megatron.pipeline.check.compact import FIRST_MOVE, FIRST_STASH, B, CompactProgram, F, I, R, codes_of

EVICT, ACCEPT, RETURN, LOAD = codes_of("EVICT ACCEPT RETURN LOAD")

# States of the activations of a microbatch at a stage; at its pair stage: _NOWHERE, _LENT, _GIVEN_BACK.
_NOWHERE, _SAVED, _AWAY, _BACK, _USED, _LENT, _GIVEN_BACK = range(7)

# code -> (states in which the instruction is allowed, state that it leaves)
_MUST_FIND = {
    EVICT: ((_SAVED,), _AWAY),
    LOAD: ((_AWAY,), _BACK),
    R: ((_SAVED, _BACK), _USED),
    B: ((_SAVED, _BACK, _USED), _USED),
    I: ((_SAVED, _BACK, _USED), _USED),
    ACCEPT: ((_NOWHERE,), _LENT),
    RETURN: ((_LENT,), _GIVEN_BACK),
}
_FOUND = {
    _NOWHERE: "its activations are not here",
    _SAVED: "its activations are here and were never evicted",
    _AWAY: "its activations are at the pair stage, and no LOAD stands before it",
    _BACK: "its activations were evicted and loaded already",
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
    if not compact.moves:
        return
    pairs, partners = compact.program.pairs, compact.partners
    num_places = compact.num_stages * compact.num_microbatches
    own, lent = bytearray(num_places), bytearray(num_places)
    for rank, (codes, places) in enumerate(zip(compact.codes, compact.places, strict=True)):
        for position, (code, place) in enumerate(zip(codes, places, strict=True)):
            if code == F:
                own[place] = _SAVED
            elif code in _MUST_FIND:
                if FIRST_MOVE <= code < FIRST_STASH and (refusal := pairs.refusal(place // compact.num_microbatches)):
                    raise compact.error(rank, position, refusal)
                wanted, left = _MUST_FIND[code]
                states = lent if code in (ACCEPT, RETURN) else own
                if states[place] not in wanted:
                    raise compact.error(rank, position, _FOUND[states[place]])
                states[place] = left
    for rank, partner in enumerate(partners):
        if rank < partner:
            _prove_correspondence(compact, rank, partner)


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
