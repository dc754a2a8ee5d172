"""Proof: every computation uses the weight version that the policy says, and that version is live.

A stage holds, at any time, a set of live versions: those that it entered the program with, and those that its STEPs
have made since, less those that the policy has retired.

    policy   forward of batch j uses     live
    flush    j                           the newest
    2bw      max(j - 1, 0)               the newest and the one before: STEP@(t+1) retires t-1
    stash    the newest at this stage    the newest, and each that a microbatch saved here ran its forward with

Recompute and backward use the version of their forward. They find it live, because STEP@v comes after all backwards of
batch v-1 (which is proved with the updates), and no other batch in flight uses a version that it retires.
"""

from megatron.pipeline.check.compact import REDUCE_GRAD, SEND_F, STEP, B, CompactProgram, F, W


def prove_versions(compact: CompactProgram) -> tuple[int, ...]:
    """Prove the table above.

    Args:
        compact: a program that names weight versions, whose computations and updates are proved.

    Returns:
        The largest number of live versions at each stage.

    Raises:
        ProgramError: naming the first computation with a wrong version, or the STEP that makes one too many.
    """
    num_microbatches = compact.num_microbatches
    version_of_microbatch = version_of_each_microbatch(compact)
    forward_version = [0] * (compact.num_stages * num_microbatches)
    stages = [_StageVersions(compact, stage) for stage in range(compact.num_stages)]
    for rank, (codes, places, versions) in enumerate(zip(compact.codes, compact.places, compact.versions, strict=True)):
        for position, (code, place, version) in enumerate(zip(codes, places, versions, strict=True)):
            if version is None:
                if code < SEND_F:
                    raise compact.error(rank, position, "it names no weight version, though the program does elsewhere")
            elif code == F:
                stage = stages[place // num_microbatches]
                wanted = stage.newest if stage.stashes else version_of_microbatch[place % num_microbatches]
                if version != wanted or version not in stage.live:
                    raise compact.error(rank, position, stage.explain_forward(version, wanted))
                forward_version[place] = version
                stage.live[version] += 1
            elif code < SEND_F:
                if version != forward_version[place]:
                    reason = f"its forward ran with version {forward_version[place]}, so it has to use that one too"
                    raise compact.error(rank, position, reason)
                if code in (B, W):
                    stages[place // num_microbatches].release(version)
            elif code == STEP:
                stage = stages[place // num_microbatches]
                stage.step(version)
                if len(stage.live) > stage.bound:
                    reason = f"the stage would hold {len(stage.live)} weight versions, and its bound is {stage.bound}"
                    raise compact.error(rank, position, reason)
    return tuple(stage.peak for stage in stages)


class _StageVersions:
    """The live versions of one stage, each with the number of saved microbatches that ran their forward with it."""

    def __init__(self, compact: CompactProgram, stage: int) -> None:
        program = compact.program
        rule = program.weights.rule
        self.stage, self.policy = stage, program.weights
        self.stashes = rule.delay is None
        self.bound = compact.num_stages - stage if self.stashes else rule.delay + 1
        self.live = dict.fromkeys(program.entry_versions, 0)
        self.newest = max(self.live)
        self.peak = len(self.live)

    def release(self, version: int) -> None:
        """A microbatch that used a version has ended its backward; a stashed version dies with its last one."""
        self.live[version] -= 1
        if self.stashes and version != self.newest and not self.live[version]:
            del self.live[version]

    def step(self, version: int) -> None:
        """Make a version, retire what the policy keeps no longer; a stashed version that nobody uses is not kept."""
        assert version == self.newest + 1, "STEPs stand in order"
        retired = self.newest if self.stashes else version - self.bound
        if not self.live.get(retired):
            self.live.pop(retired, None)
        assert self.stashes or retired not in self.live, "batch v-1 has ended before STEP@v"
        self.live[version] = 0
        self.newest = version
        self.peak = max(self.peak, len(self.live))

    def explain_forward(self, version: int, wanted: int) -> str:
        if version != wanted:
            return f"{self.policy.value} runs this batch here with version {wanted}"
        return f"version {version} does not exist yet at this stage: no {self.stage}STEP@{version} stands before it"


def prove_evaluation(compact: CompactProgram) -> tuple[int, ...]:
    """Prove that a program that evaluates uses the newest version of the drained stages, and makes none.

    Returns:
        The number of live versions at each stage.

    Raises:
        ProgramError: naming the first instruction that does otherwise.
    """
    entry = compact.program.entry_versions
    for rank, (codes, versions) in enumerate(zip(compact.codes, compact.versions, strict=True)):
        for position, (code, version) in enumerate(zip(codes, versions, strict=True)):
            if code >= REDUCE_GRAD:
                raise compact.error(rank, position, "a program that evaluates updates nothing")
            if code == F and version != max(entry):
                raise compact.error(rank, position, f"the program evaluates version {max(entry)}, the newest")
    return (len(entry),) * compact.num_stages


def version_of_each_microbatch(compact: CompactProgram) -> list[int]:
    """The version of each microbatch's forward by its batch; empty where each stage uses its newest."""
    program, rule = compact.program, compact.program.weights.rule
    versions: list[int] = []
    if rule.delay is not None:
        for batch, size in enumerate(program.batches, start=program.first_batch):
            versions += [rule.version_of(batch, newest=batch)] * size
    return versions
