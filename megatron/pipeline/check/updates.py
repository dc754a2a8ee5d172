"""Proof: every batch's gradients are reduced and applied once, in order, complete.

The chain that leads to version v applies the gradients of batch v-1. Its links, at each stage, are

    REDUCE_GRAD@v    over the replicas of the stage                             where the program is data parallel
    REDUCE_EMBED@v   over the first and the last stage                          where they tie their embeddings
    REDUCE_NORM@v    over all ranks; on a rank with several stages at its       where the program takes a global norm
                     lowest stage, the last to end a batch, for all of them
    STEP@v           makes the version

A link stands after the batch's last backward, after the links before it in its chain, and after the same link of the
batch before; and each stands once. Where each stage uses its newest version (`stash`), REDUCE_NORM comes last, for it
only reports.

So every member of a group posts the group's reductions in order of v: their order agrees. That members of different
groups do not wait for one another in a circle is proved with the progress.
"""

from megatron.pipeline.check.compact import (
    KIND_OF_CODE,
    NUM_CODES,
    REDUCE_EMBED,
    REDUCE_GRAD,
    REDUCE_NORM,
    STEP,
    B,
    CompactProgram,
    W,
)

_Link = tuple[int, int]  # stage, code


def chain_of_stage(compact: CompactProgram, stage: int) -> tuple[int, ...]:
    """The codes of the links that the program's flags demand of a stage, in order."""
    program, rank_of_stage = compact.program, compact.rank_of_stage
    ties = program.tied_embeddings and rank_of_stage[0] != rank_of_stage[-1]
    wanted = {
        REDUCE_GRAD: program.data_parallel,
        REDUCE_EMBED: ties and stage in (0, compact.num_stages - 1),
        REDUCE_NORM: program.global_norm and stage == rank_of_stage.index(rank_of_stage[stage]),
        STEP: True,
    }
    return tuple(code for code in _order_of_links(compact) if wanted[code])


def prove_updates(compact: CompactProgram) -> None:
    """Prove the rules above.

    Args:
        compact: a program that names weight versions, whose computations are proved.

    Raises:
        ProgramError: naming the link that is out of place, or the end of the row that lacks one.
        ValueError: a batch has several microbatches under a policy that updates after every one.
    """
    program = compact.program
    if program.weights.rule.updates_alone and set(program.batches) != {1}:
        raise ValueError(
            f"{program.weights.value} updates after each microbatch: give batches of 1, not {program.batches}"
        )
    num_microbatches, num_batches = compact.num_microbatches, len(program.batches)
    batch_of = [batch for batch, size in enumerate(program.batches) for _ in range(size)]
    unfinished = [
        list(program.batches) for _ in range(compact.num_stages)
    ]  # per stage and batch, the backwards still to come
    posted = [[0] * NUM_CODES for _ in range(compact.num_stages)]  # per stage and code, how many batches have this link

    for rank, (codes, places, versions) in enumerate(zip(compact.codes, compact.places, compact.versions, strict=True)):
        stages = [stage for stage, owner in enumerate(compact.rank_of_stage) if owner == rank]
        chains = {stage: chain_of_stage(compact, stage) for stage in stages}
        links_before = _links_before(compact, chains)
        for position, (code, place, version) in enumerate(zip(codes, places, versions, strict=True)):
            if code in (B, W):
                unfinished[place // num_microbatches][batch_of[place % num_microbatches]] -= 1
            elif code >= REDUCE_GRAD:
                stage, index = place // num_microbatches, version - program.first_batch - 1
                if code not in chains[stage]:
                    raise compact.error(
                        rank,
                        position,
                        f"by the program's flags the chain of stage {stage} has no {KIND_OF_CODE[code].value}",
                    )
                if index != posted[stage][code] or index >= num_batches:
                    raise compact.error(rank, position, _explain_order(compact, stage, code, posted[stage][code]))
                if any(unfinished[each][index] for each in (stages if code == REDUCE_NORM else [stage])):
                    raise compact.error(
                        rank,
                        position,
                        f"batch {version - 1}, whose gradients it takes, has backwards to come on this rank",
                    )
                for other, link in links_before[stage, code]:
                    if posted[other][link] <= index:
                        raise compact.error(rank, position, f"no {_word(other, link, version)} stands before it")
                posted[stage][code] += 1
        for stage in stages:
            for code in chains[stage]:
                if posted[stage][code] < num_batches:
                    missing = _word(stage, code, program.first_batch + 1 + posted[stage][code])
                    raise compact.error(
                        rank,
                        len(codes),
                        f"{missing} is missing: batch {program.first_batch + posted[stage][code]} needs it",
                    )


def _order_of_links(compact: CompactProgram) -> tuple[int, ...]:
    if compact.program.weights.rule.updates_alone:
        return (REDUCE_GRAD, REDUCE_EMBED, STEP, REDUCE_NORM)
    return (REDUCE_GRAD, REDUCE_EMBED, REDUCE_NORM, STEP)


def _links_before(compact: CompactProgram, chains: dict[int, tuple[int, ...]]) -> dict[_Link, list[_Link]]:
    """For each link of a rank's stages, those that stand before it; only the norm binds stages to one another."""
    order = _order_of_links(compact)
    return {
        (stage, code): [
            (other, link)
            for other, links in chains.items()
            for link in links
            if order.index(link) < order.index(code) and (other == stage or REDUCE_NORM in (code, link))
        ]
        for stage, chain in chains.items()
        for code in chain
    }


def _explain_order(compact: CompactProgram, stage: int, code: int, due: int) -> str:
    program = compact.program
    if due == len(program.batches):
        return f"the {KIND_OF_CODE[code].value} of every batch stands before it already"
    return f"each batch has one, in order, and {_word(stage, code, program.first_batch + 1 + due)} is due"


def _word(stage: int, code: int, version: int) -> str:
    return f"{stage}{KIND_OF_CODE[code].value}@{version}"
