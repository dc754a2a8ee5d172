"""Proofs of updates and of weight versions.

Proof: every batch's gradients are reduced and applied once, in order, and complete.

The chain that leads to version v applies the gradients of batch v-1. Each rank has one chain for all its stages, whose
instructions name the lowest of these stages. Its links are

    REDUCE_GRAD@v    over the replicas of the rank                    if the program is data parallel
    REDUCE_EMBED@v   over the ranks of `tied_stages`                  if these are two ranks that tie embeddings
    REDUCE_NORM@v    over all ranks                                   if the program takes a global norm
    STEP@v           makes the version

If stages update alone (`stash`, `stale`), each stage has a chain of its own, except for the norm: it occurs once on
each rank, after the STEPs of all its stages.

With weights on the host, gradients leave the device stage by stage. Then REDUCE_GRAD belongs to one stage, and the ends
of tied embeddings have a REDUCE_EMBED even on one rank, which may come before backwards of other stages. The positions
of these two are proved in `host_updates`.

If steps are optimistic, STEP comes before REDUCE_NORM, and VALIDATE@v, which waits for the norm, is the last link. No
link of the next chain comes before it, and the gradient buffer is free only behind it (`validations`).

A rank without backwards, whose stages are all frozen, reduces no gradients, and its STEP is a no-op that makes the
version. Its REDUCE_NORM, to which it contributes zero, comes after its STEP, so the rank waits for no other.

A link comes after the batch's last backward at any of the rank's stages (without backwards: after its last forward),
after the earlier links of its chain, and after the same link of the previous batch; each link occurs once. If each
stage uses its newest version (`stash`), REDUCE_NORM comes last, since it only reports.

At the first backward of a batch, or its first half, fewer batches have begun their backwards and await their STEP than
the policy has gradient buffers (`WeightPolicy.max_gradient_buffers`).

So all members of a group post the group's reductions in order of v. The proof of progress shows that members of
different groups do not wait for one another in a circle.

Proof: every computation uses the weight version that the policy demands, and that version is live.

A stage holds, at any time, a set of live versions: those with which it began the program, and those that the STEPs of
its rank have made since, without those that the policy has retired.

    policy   forward of batch j at stage s      live versions
    flush    j                                  the newest
    2bw      max(j - 1, 0)                      the newest and the one before: STEP@(t+1) retires t-1
    delay k  max(j - k, 0)                      the newest and the k before: STEP@(t+1) retires t-k
    stash    the newest at this stage, which    the newest, and the version of the forward of each microbatch that is
             is that of microbatch i - k        saved here
    stale    as stash                           the newest, and one that is ahead (`horizons`, `unstepped`)

If the policy predicts, these are predicted versions, which PREDICT makes in place of STEP; batch j uses version j, and
the newest and the one before are live. The true version is an additional set of weights that no computation uses.

Recompute and backward use the version of their forward; under `stale`, the version of their own batch, which is then
the newest. This version is live, since STEP@v comes after all backwards of batch v-1 (which is proved with the updates)
and no other batch in flight uses a version that it retires.

Under `stash` and `stale`, microbatch i finds at a stage of depth k (edges to the end; in a chain p-1-s) the version
made from the batches before that of microbatch i - k, counted from the program's first. This is proved together with
"the newest". So the results of a program depend only on the policy and the graph, as under the other policies.
"""

from collections.abc import Sequence

from megatron.pipeline.check.compact import (
    CODE_OF_KIND,
    FETCH,
    FIRST_PREDICTION,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    FREE,
    KIND_OF_CODE,
    NUM_CODES,
    REDUCE_EMBED,
    REDUCE_GRAD,
    REDUCE_NORM,
    STEP,
    VALIDATE,
    B,
    CompactProgram,
    F,
    I,
    W,
)
from megatron.pipeline.program.program import Program


def chain_of_rank(compact: CompactProgram, rank: int) -> tuple[int, ...]:
    """The codes of the links that the program's flags demand of a rank, in order."""
    program = compact.program
    is_frozen = program.is_frozen(rank)
    wanted = {
        REDUCE_GRAD: program.data_parallel and program.residency is None and not is_frozen,
        REDUCE_EMBED: program.reduces_embeddings(rank),
        REDUCE_NORM: program.global_norm,
        STEP: True,
    }
    if program.optimistic:
        return *(code for code in (REDUCE_GRAD, REDUCE_EMBED) if wanted[code]), STEP, REDUCE_NORM, VALIDATE
    if program.weights.updates_alone or is_frozen:
        order = (REDUCE_GRAD, REDUCE_EMBED, STEP, REDUCE_NORM)
    else:
        order = (REDUCE_GRAD, REDUCE_EMBED, REDUCE_NORM, STEP)
    return tuple(code for code in order if wanted[code])


def prove_updates(compact: CompactProgram) -> None:
    """Prove the module's rules of chains.

    Args:
        compact: a program that names weight versions, whose computations are proved.

    Raises:
        ProgramError: for a link out of place, or for the end of a row that lacks a link.
        ValueError: if a batch has several microbatches, or a rank several stages, under a policy that keeps a version
            for each microbatch.
    """
    program = compact.program
    size = program.weights.batch_size
    if size and set(program.batches) != {size}:
        raise ValueError(
            f"{program.weights.name} updates after each microbatch: give batches of {size}, not {program.batches}"
        )
    if size and len(compact.codes) < compact.num_stages:
        raise ValueError(f"{program.weights.name} updates each stage by itself: give each rank one stage")
    is_forward_only = program.graph.is_forward_only
    num_microbatches, num_batches, batch_of = compact.num_microbatches, len(program.batches), compact.batch_of
    num_buffers = program.weights.max_gradient_buffers
    frees = VALIDATE if program.optimistic else STEP
    of_stages, of_ends = ((REDUCE_GRAD,), (REDUCE_EMBED,)) if program.residency else ((), ())
    for rank in range(len(compact.codes)):
        chain, lowest = chain_of_rank(compact, rank), compact.stages_of(rank)[0]
        ends = (F,) if program.is_frozen(rank) else (B, W)
        owners = [
            _Owner(stages, [stage for stage in stages if F in ends or not is_forward_only(stage)], program)
            for stages in program.owners(rank)
        ]
        owner_of = {stage: owner for owner in owners for stage in owner.stages}
        for position, (code, place, version) in compact.row(rank):
            if FIRST_TRANSFER <= code < FIRST_UPDATE:
                continue
            if code in (B, I, W):
                owner, batch = owner_of[place // num_microbatches], batch_of[place % num_microbatches]
                owner.begun.add(batch)
                if len(owner.begun) - owner.posted[frees] > num_buffers:
                    due = compact.update(owner.stages[0], frees, owner.posted[frees])
                    reason = f"all gradient buffers hold batches before it: no {due} stands before it"
                    raise compact.error(rank, position, reason)
            if code in ends:
                owner_of[place // num_microbatches].unfinished[batch_of[place % num_microbatches]] -= 1
            elif FIRST_UPDATE <= code < FIRST_PREDICTION and code not in of_stages:
                stage, index = place // num_microbatches, version - program.first_batch - 1
                owner, reason = owner_of[stage], ""
                before = owners if code == REDUCE_NORM else [owner]  # owners whose links come before this one
                if stage != (lowest if code == REDUCE_NORM else owner.stages[0]):
                    reason = f"the chain of rank {rank} is for all its stages and stands at the lowest, stage {lowest}"
                elif code not in chain:
                    reason = f"by the program's flags the chain of stage {stage} has no {KIND_OF_CODE[code].value}"
                elif index != owner.posted[code] or index >= num_batches:
                    reason = compact.out_of_order(stage, code, owner.posted[code])
                elif program.optimistic and code != VALIDATE and owner.posted[VALIDATE] < index:
                    reason = f"no {compact.update(stage, VALIDATE, index - 1)} stands before it"
                elif any(each.unfinished[index] for each in before) and code not in of_ends:
                    reason = f"batch {version - 1}, whose gradients it takes, has backwards to come on this rank"
                else:
                    missing = [
                        compact.update(each.stages[0], link, index)
                        for each in before
                        for link in chain[: chain.index(code)]
                        if each.posted[link] <= index
                    ]
                    reason = f"no {missing[0]} stands before it" if missing else ""
                if reason:
                    raise compact.error(rank, position, reason)
                owner.posted[code] += 1
        for owner in owners:
            for code in chain:
                if owner.posted[code] < num_batches and (code != REDUCE_NORM or owner is owners[0]):
                    raise compact.missing(rank, owner.stages[0], code, owner.posted[code])


class _Owner:
    """Stages that are updated together, with the state of their chain.

    Attributes:
        unfinished: per batch, the number of remaining backwards of the stages that take part.
        begun: the batches that have had backwards.
        posted: per code, the number of batches that have this link.
    """

    def __init__(self, stages: Sequence[int], taking_part: Sequence[int], program: Program) -> None:
        self.stages = stages
        batches = range(program.first_batch, program.first_batch + len(program.batches))
        self.unfinished = [sum(program.num_taken(stage, batch) for stage in taking_part) for batch in batches]
        self.begun: set[int] = set()
        self.posted = [0] * NUM_CODES


def prove_versions(compact: CompactProgram) -> tuple[int, ...]:
    """Prove the module's table of versions.

    Args:
        compact: a program that names weight versions, whose computations and updates are proved.

    Returns:
        The largest number of live versions at each stage.

    Raises:
        ProgramError: for the first computation with a wrong version, or the first STEP or PREDICT that makes one too
            many.
    """
    program, num_microbatches = compact.program, compact.num_microbatches
    batch_of = [batch for batch, size in enumerate(program.batches, start=program.first_batch) for _ in range(size)]
    maker = CODE_OF_KIND[program.weights.maker]
    forward_version = [0] * (compact.num_stages * num_microbatches)
    stages = [_StageVersions(program, stage, batch_of) for stage in range(compact.num_stages)]
    refreshes = program.weights.refreshes
    for rank in range(len(compact.codes)):
        made_for = {owned[0]: [stages[stage] for stage in owned] for owned in program.owners(rank)}
        for position, (code, place, version) in compact.row(rank):
            reason = ""
            if version is None:
                if code < FIRST_TRANSFER:
                    reason = "it names no weight version, though the program does elsewhere"
            elif code == F:
                reason = stages[place // num_microbatches].forward(version, place % num_microbatches)
                forward_version[place] = version
            elif code < FIRST_TRANSFER and refreshes:
                reason = stages[place // num_microbatches].refreshed(version, batch_of[place % num_microbatches])
            elif code < FIRST_TRANSFER:
                if version != forward_version[place]:
                    reason = f"it has to use the version of its forward, {forward_version[place]}"
                elif code in (B, W):
                    stages[place // num_microbatches].release(version)
            elif code == maker:
                made = made_for[place // num_microbatches]
                reason = next(filter(None, [stage.step(version) for stage in made]), "")
            if reason:
                raise compact.error(rank, position, reason)
    return tuple(
        1 if program.graph.is_forward_only(each.stage) else each.peak for each in stages
    )  # frozen weights have one version


class _StageVersions:
    """The live versions of one stage, each with the number of saved microbatches that ran their forward with it.

    The methods return the text of an error, or "".
    """

    def __init__(self, program: Program, stage: int, batch_of: Sequence[int]) -> None:
        rule = program.weights
        self.program, self.stage = program, stage
        self.batch_of, self.depth = batch_of, program.graph.depth(stage)
        self.maker = rule.maker.value
        refreshes = rule.refreshes
        self.stashes = rule.updates_alone
        self.saves = not (refreshes or program.graph.is_forward_only(stage))
        self.bound = 1 if refreshes else rule.max_live_versions(stage, program.num_stages)
        self.live = dict.fromkeys(program.entry_versions, 0)
        self.newest = max(self.live)
        self.peak = len(self.live)

    def forward(self, version: int, index: int) -> str:
        """Use a version for the forward of the microbatch `index`."""
        batch = self.batch_of[index]
        wanted = self.program.weights.version_of(batch, newest=self.batch_of[max(0, index - self.depth)])
        if version != wanted:
            return f"{self.program.weights.name} runs batch {batch} here with version {wanted}"
        if version > self.newest:
            owners = self.program.owners(self.program.rank_of_stage[self.stage])
            lowest = next(stages[0] for stages in owners if self.stage in stages)
            made = f"{lowest}{self.maker}@{version}"
            return f"version {version} does not exist yet at this stage: no {made} stands before it"
        if self.stashes and version < self.newest:
            return f"the newest version at this stage is {self.newest} already"
        self.live[version] += self.saves
        return ""

    def refreshed(self, version: int, batch: int) -> str:
        """Use the version of a microbatch's own batch in its recompute or its backward."""
        if version != batch:
            return f"{self.program.weights.name} computes this of batch {batch} with version {batch}"
        if version != self.newest:
            return f"the newest version at this stage is {self.newest}, and nothing older is kept"
        return ""

    def release(self, version: int) -> None:
        """Note the end of a backward; an old stashed version is dropped with the last microbatch that used it."""
        self.live[version] -= 1
        if self.stashes and version != self.newest and not self.live[version]:
            del self.live[version]

    def step(self, version: int) -> str:
        """Make a version, and retire the version that the policy drops; an unused stashed version is dropped, too."""
        assert version == self.newest + 1, "versions are made in order"
        retired = self.newest if self.stashes else version - self.bound
        if not self.live.get(retired):
            self.live.pop(retired, None)
        assert self.stashes or retired not in self.live, "batch v-1 has ended before STEP@v"
        self.live[version] = 0
        self.newest = version
        self.peak = max(self.peak, len(self.live))
        if len(self.live) > self.bound:
            return f"the stage would hold {len(self.live)} weight versions, and its bound is {self.bound}"
        return ""


def prove_evaluation(compact: CompactProgram) -> tuple[int, ...]:
    """Prove that a program that evaluates uses the newest version of the drained stages, and makes no versions.

    Returns:
        The number of live versions at each stage.

    Raises:
        ProgramError: for the first instruction that updates weights or uses another version.
    """
    entry = compact.program.entry_versions
    for rank in range(len(compact.codes)):
        for position, (code, _, version) in compact.row(rank):
            if code >= FIRST_UPDATE and code not in (FETCH, FREE):
                raise compact.error(rank, position, "a program that evaluates updates nothing")
            if code == F and version != max(entry):
                raise compact.error(rank, position, f"the program evaluates version {max(entry)}, the newest")
    return (len(entry),) * compact.num_stages
