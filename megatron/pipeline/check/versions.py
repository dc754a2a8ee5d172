"""Proof: every computation uses the weight version that the policy demands, and that version is live.

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
    FIRST_TRANSFER,
    FIRST_UPDATE,
    FREE,
    B,
    CompactProgram,
    F,
    W,
)
from megatron.pipeline.program.program import Program


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
    for rank, (codes, places, versions) in enumerate(zip(compact.codes, compact.places, compact.versions, strict=True)):
        made_for = {owned[0]: [stages[stage] for stage in owned] for owned in program.owners(rank)}
        for position, (code, place, version) in enumerate(zip(codes, places, versions, strict=True)):
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
                    reason = f"its forward ran with version {forward_version[place]}, so it has to use that one too"
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
        self.stashes, self.refreshes = rule.updates_alone, rule.refreshes
        self.saves = not (rule.refreshes or program.graph.is_forward_only(stage))
        self.bound = 1 if rule.refreshes else rule.max_live_versions(stage, program.num_stages)
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
    for rank, (codes, versions) in enumerate(zip(compact.codes, compact.versions, strict=True)):
        for position, (code, version) in enumerate(zip(codes, versions, strict=True)):
            if code >= FIRST_UPDATE and code not in (FETCH, FREE):
                raise compact.error(rank, position, "a program that evaluates updates nothing")
            if code == F and version != max(entry):
                raise compact.error(rank, position, f"the program evaluates version {max(entry)}, the newest")
    return (len(entry),) * compact.num_stages
