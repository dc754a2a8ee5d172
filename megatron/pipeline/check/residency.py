"""Proof: where weights live on the host, every computation finds its own on the device, and few are there at once.

A rank has room for the weights of K stages (`Program.residency`). In the order of its row:

- FETCH stands where fewer than K stages are resident, and its own is not. It fetches the version that the host has by
  then: the one that the program entered with, or that of the last UPDATE of the stage before it.
- FREE stands where its stage is resident with its version, and has been computed with.
- F, R, B, I and W stand where their stage is resident with the version that they name.
- At STEP, where one batch ends and the next begins, and at the end of the row nothing is resident.

That is the order of the lane from host to device, too, which has the FETCHes and FREEs, and FREE is complete there only
when the computations before it are. So what holds at each position of the row holds at each moment, under any timing: K
slots are enough, and no FETCH overwrites what is still used. Nor does an UPDATE overwrite on the host what is still
copied: it waits for gradients of a computation that has waited for that copy. A slot that were overwritten too early
would give wrong gradients without any error, as autograd does not see it.
"""

from megatron.pipeline.check.compact import (
    FETCH,
    FIRST_HOST_WORD,
    FIRST_STASH,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    FREE,
    NUM_CODES,
    STEP,
    UPDATE,
    CompactProgram,
)


def require_residency(compact: CompactProgram) -> None:
    """The words of weights on the host stand where the program says that these live there, and it may say so.

    Raises:
        ProgramError: naming a word of a program whose weights live on the device.
        ValueError: the weights live on the host, and the program names no versions, or needs several at once.
    """
    program = compact.program
    if program.residency is None:
        _require_none(compact)
    elif not compact.versioned:
        raise ValueError("weights on the host are fetched by their version, and no instruction names one; name them")
    elif not program.weights.drains:
        raise ValueError(f"the host has one version of the weights, and {program.weights} needs more; use flush")


def prove_residency(compact: CompactProgram) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prove the rules above.

    Args:
        compact: a program whose versions are proved, if weights live on the host.

    Returns:
        For each rank, how many FETCHes it has, and the most stages that are resident at once. Empty where weights live
        on the device.

    Raises:
        ProgramError: naming the instruction that is out of place, or the end of the row where weights are left.
    """
    if compact.program.residency is None:
        return (), ()
    ranks = [_RankResidency(compact, rank) for rank in range(len(compact.codes))]
    for rank in ranks:
        rank.prove()
    return tuple(rank.num_fetched for rank in ranks), tuple(rank.peak for rank in ranks)


def _require_none(compact: CompactProgram) -> None:
    words = {*range(FIRST_STASH, FIRST_UPDATE), *range(FIRST_HOST_WORD, NUM_CODES)}
    for rank, codes in enumerate(compact.codes):
        if not words.isdisjoint(codes):
            position = next(at for at, code in enumerate(codes) if code in words)
            raise compact.error(rank, position, "the weights of this program live on the device: it says no residency")


class _RankResidency:
    """What has happened in a row so far."""

    def __init__(self, compact: CompactProgram, rank: int) -> None:
        self.compact, self.rank = compact, rank
        self.most = compact.program.residency.stages
        self.on_host = dict.fromkeys(compact.stages_of(rank), max(compact.program.entry_versions))
        self.resident: dict[int, int] = {}  # stage -> version
        self.used: set[int] = set()  # of the resident ones
        self.num_fetched = self.peak = 0

    def prove(self) -> None:
        compact, width = self.compact, self.compact.num_microbatches
        row = zip(compact.codes[self.rank], compact.places[self.rank], compact.versions[self.rank], strict=True)
        for position, (code, place, version) in enumerate(row):
            stage, reason = place // width, ""
            if code < FIRST_TRANSFER:
                reason = self._compute(stage, version)
            elif code == FETCH:
                reason = self._fetch(stage, version)
            elif code == FREE:
                reason = self._free(stage, version)
            elif code == UPDATE:
                self.on_host[stage] = version
            elif code == STEP:
                reason = self._end()
            if reason:
                raise compact.error(self.rank, position, reason)
        reason = self._end()
        if reason:
            raise compact.error(self.rank, len(compact.codes[self.rank]), reason)

    def _compute(self, stage: int, version: int) -> str:
        if self.resident.get(stage) != version:
            return (
                f"its weights are not on the device: no {stage}FETCH@{version} stands before it without a FREE behind"
            )
        self.used.add(stage)
        return ""

    def _fetch(self, stage: int, version: int) -> str:
        if stage in self.resident:
            return "the stage is resident already"
        if len(self.resident) == self.most:
            there = " and ".join(map(str, self.resident))
            return (
                f"{self.most} stages may be resident, and {there} {'are' if self.most > 1 else 'is'}: FREE one before"
            )
        if version > self.on_host[stage]:
            return f"the host does not have version {version} yet: no {stage}UPDATE@{version} stands before it"
        if version < self.on_host[stage]:
            return f"the host has version {self.on_host[stage]} by then"
        self.resident[stage] = version
        self.num_fetched += 1
        self.peak = max(self.peak, len(self.resident))
        return ""

    def _free(self, stage: int, version: int) -> str:
        if self.resident.get(stage) != version:
            return f"there is nothing to free: version {version} of the stage is not resident"
        if stage not in self.used:
            return "nothing has been computed with what was fetched"
        del self.resident[stage]
        self.used.discard(stage)
        return ""

    def _end(self) -> str:
        """What is wrong where a batch ends."""
        for stage, version in self.resident.items():
            return f"stage {stage} is resident over the end of its batch: no {stage}FREE@{version} stands before it"
        return ""
