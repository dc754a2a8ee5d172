"""Proof: every microbatch passes every stage once, forward, then backward, with all that it needs standing before it.

What has happened to a microbatch at a stage is a set of facts, eight bits in one byte. Each kind of instruction
requires some facts, must not find others, and adds its own:

    kind     requires                                       must not find    adds
    F        INPUT_POSTED (where the input is sent)         FORWARD          FORWARD
    R        FORWARD                                        RECOMPUTED       RECOMPUTED
    B        FORWARD, GRAD_POSTED (where it is sent),       INPUT_GRAD,      INPUT_GRAD,
             RECOMPUTED (in a program that recomputes)      WEIGHT_GRAD      WEIGHT_GRAD
    I        as B                                           INPUT_GRAD       INPUT_GRAD
    W        INPUT_GRAD                                     WEIGHT_GRAD      WEIGHT_GRAD
    SEND_F   FORWARD                                        OUTPUT_SENT      OUTPUT_SENT
    RECV_F                                                  INPUT_POSTED     INPUT_POSTED
    SEND_B   INPUT_GRAD                                     GRAD_SENT        GRAD_SENT
    RECV_B                                                  GRAD_POSTED      GRAD_POSTED

A kind that a stage cannot have (the last stage sends no activations) has no rule. At the end every byte must hold every
fact that its stage has rules for: so nothing is missing, nothing stays saved, and each needed transfer was posted at
both ends.
"""

from megatron.pipeline.check.compact import (
    ACCEPT,
    EVICT,
    LOAD,
    NUM_CODES,
    OFFLOAD,
    RECV_B,
    RECV_F,
    RELOAD,
    RETURN,
    SEND_B,
    SEND_F,
    B,
    CompactProgram,
    F,
    I,
    R,
    W,
)
from megatron.pipeline.check.error import ProgramError

FORWARD, RECOMPUTED, INPUT_GRAD, WEIGHT_GRAD, OUTPUT_SENT, INPUT_POSTED, GRAD_SENT, GRAD_POSTED = (
    1 << bit for bit in range(8)
)

# (facts to look at, what they must be, facts added); one that concerns no microbatch changes nothing.
_Rule = tuple[int, int, int]
_NO_CONCERN: _Rule = (0, 0, 0)

# The instruction that brings a fact about, and what is wrong when the fact is missing or already there.
_FACTS = {
    FORWARD: (F, "its forward has not run", "it had its forward already"),
    INPUT_GRAD: (B, "its backward has not run", "it had its backward already"),
    WEIGHT_GRAD: (W, "the gradients of its weights are not computed", "it had its backward already"),
    RECOMPUTED: (R, "its activations have not been recomputed", "it was recomputed already"),
    INPUT_POSTED: (RECV_F, "its input has not been received", "its input is received twice"),
    GRAD_POSTED: (RECV_B, "the gradient of its output has not been received", "that gradient is received twice"),
    OUTPUT_SENT: (SEND_F, "its output is never sent", "its output is sent twice"),
    GRAD_SENT: (SEND_B, "the gradient of its input is never sent", "that gradient is sent twice"),
}


def prove_computations(compact: CompactProgram) -> None:
    """Prove the table above for every (stage, microbatch).

    Args:
        compact: the program. One that evaluates (`forward_only`) has no backwards, and nothing of them.

    Raises:
        ProgramError: naming the first instruction that breaks its rule, or the forward of a microbatch that stays
            unfinished.
    """
    num_microbatches = compact.num_microbatches
    rules = [rule for stage in range(compact.num_stages) for rule in stage_rules(compact, stage)]
    facts = bytearray(compact.num_stages * num_microbatches)
    for rank, (codes, places) in enumerate(zip(compact.codes, compact.places, strict=True)):
        for position, (code, place) in enumerate(zip(codes, places, strict=True)):
            rule = rules[place // num_microbatches * NUM_CODES + code]
            if rule is None:
                raise compact.error(rank, position, _explain_no_rule(compact, code, place // num_microbatches))
            looked_at, wanted, added = rule
            found = facts[place]
            if found & looked_at != wanted:
                raise compact.error(rank, position, _explain_facts(compact, place, found & looked_at, wanted))
            facts[place] = found | added
    for stage in range(compact.num_stages):
        complete = complete_facts(rules[stage * NUM_CODES : (stage + 1) * NUM_CODES])
        row = facts[stage * num_microbatches : (stage + 1) * num_microbatches]
        if row != bytes([complete]) * num_microbatches:
            index = next(index for index, found in enumerate(row) if found != complete)
            raise _incomplete(compact, stage * num_microbatches + index, complete & ~row[index])


def stage_rules(compact: CompactProgram, stage: int) -> list[_Rule | None]:
    """The rule of each code at a stage; None where the stage cannot have such an instruction."""
    receives, sends = compact.crosses(stage - 1), compact.crosses(stage)
    recompute = compact.program.recomputes(stage)
    rules: list[_Rule | None] = [_NO_CONCERN] * NUM_CODES
    ready = FORWARD | (GRAD_POSTED if sends else 0) | (RECOMPUTED if recompute else 0)

    def rule(requires: int, must_not_find: int, adds: int) -> _Rule:
        return requires | must_not_find, requires, adds

    rules[F] = rule(INPUT_POSTED if receives else 0, FORWARD, FORWARD)
    rules[R] = rule(FORWARD, RECOMPUTED, RECOMPUTED) if recompute else None
    rules[B] = rule(ready, INPUT_GRAD | WEIGHT_GRAD, INPUT_GRAD | WEIGHT_GRAD)
    rules[I] = rule(ready, INPUT_GRAD, INPUT_GRAD)
    rules[W] = rule(INPUT_GRAD, WEIGHT_GRAD, WEIGHT_GRAD)
    rules[SEND_F] = rule(FORWARD, OUTPUT_SENT, OUTPUT_SENT) if sends else None
    rules[RECV_F] = rule(0, INPUT_POSTED, INPUT_POSTED) if receives else None
    rules[SEND_B] = rule(INPUT_GRAD, GRAD_SENT, GRAD_SENT) if receives else None
    rules[RECV_B] = rule(0, GRAD_POSTED, GRAD_POSTED) if sends else None
    if compact.program.forward_only:
        for code in (R, B, I, W, SEND_B, RECV_B, EVICT, ACCEPT, RETURN, LOAD, OFFLOAD, RELOAD):
            rules[code] = None
    return rules


def complete_facts(rules: list[_Rule | None]) -> int:
    """All facts that a microbatch must have at the end."""
    complete = 0
    for rule in rules:
        if rule is not None:
            complete |= rule[2]
    return complete


def _explain_no_rule(compact: CompactProgram, code: int, stage: int) -> str:
    if compact.program.forward_only and code not in (SEND_F, RECV_F):
        return "a program that evaluates has forwards only"
    if code == R:
        return "the program recomputes nothing" + " at this stage" * compact.program.recompute
    neighbour = stage + 1 if code in (SEND_F, RECV_B) else stage - 1
    if not 0 <= neighbour < compact.num_stages:
        return f"stage {stage} has no neighbour there: the program has stages 0 to {compact.num_stages - 1}"
    return f"stages {stage} and {neighbour} live on the same rank and exchange tensors without transfers"


def _explain_facts(compact: CompactProgram, place: int, found: int, wanted: int) -> str:
    unwanted = found & ~wanted
    for fact, (code, missing, twice) in _FACTS.items():
        if fact & unwanted:
            return twice
        if fact & wanted & ~found:
            return f"{missing}: no {compact.word(code, place)} stands before it"
    raise AssertionError("facts agree")


def _incomplete(compact: CompactProgram, place: int, lacking: int) -> ProgramError:
    """The error for a microbatch that lacks facts at the end; it points at its forward where there is one."""
    code, missing, _ = next(_FACTS[fact] for fact in _FACTS if fact & lacking)
    rank = compact.rank_of_stage[place // compact.num_microbatches]
    position = compact.position(rank, F, place)
    return compact.error(rank, position, f"{missing}: the row has no {compact.word(code, place)}")
