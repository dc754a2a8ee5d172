"""Proofs for weights that live on the host, and for the gradients that go there.

Every computation finds its weights on the device, few weights are there at once, and each stage's gradients reach the
host complete and are applied once.

**Weights.** A rank has room for the weights of K stages (`Program.residency`). In the order of its row:

- FETCH comes where fewer than K stages are resident and its own stage is not. It fetches the version that the host has
  at this point: the version with which the program begins, or that of the stage's last UPDATE; of a frozen stage, that
  of the last STEP.
- FREE comes where its stage is resident with its version, after a computation that used it.
- F, R, B, I and W come where their stage is resident with the version that they name.
- At STEP, where one batch ends and the next begins, and at the end of the row no stage is resident.

The lane from host to device executes FETCHes and FREEs in the same order, and a FREE completes only after the
computations before it. So the rules hold at each moment and under any timing, and not only at each position of the row:
K slots are enough, and no FETCH overwrites weights that are still used. An UPDATE does not overwrite weights on the
host that are still being copied, since it waits for gradients of a computation that has waited for that copy. A slot
that is overwritten too early would give wrong gradients without any error, since autograd does not notice it.

**Gradients.** Version v applies the gradients of batch v-1. For each stage and version v, the row has one each of the
following, in order of v and in this order (a frozen stage has none):

    REDUCE_GRAD@v    after the stage's last backward of the batch; only if the program is data parallel
    STORE_GRAD@v     after that backward, too
    UPDATE@v         after STEP@v if updates are deferred

If the stage is an end of tied embeddings, the rank's REDUCE_EMBED@v comes between STORE_GRAD@v and UPDATE@v. An eager
UPDATE may come before REDUCE_NORM@v: with `eager` the program declares that updates do not depend on the norm.
REDUCE_NORM@v comes after the STORE_GRAD@v of each stage of the rank, since norms are computed when gradients leave.

A backward that begins the gradients of a stage comes where at most one other stage has begun gradients whose STORE_GRAD
is still to come, and where its own stage has none. It waits for earlier STORE_GRADs until a buffer is free (see
`program.lane_order`). So at most two buffers are in use, under any timing.
"""

from megatron.pipeline.check.compact import (
    FETCH,
    FIRST_HOST_WORD,
    FIRST_STASH,
    FIRST_SWAP,
    FIRST_TRANSFER,
    FREE,
    KIND_OF_CODE,
    NUM_CODES,
    REDUCE_EMBED,
    REDUCE_GRAD,
    REDUCE_NORM,
    STEP,
    STORE_GRAD,
    UPDATE,
    B,
    CompactProgram,
    W,
)
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS


def require_residency(compact: CompactProgram) -> None:
    """Check that the program may keep its weights on the host; if it keeps none there, it must have no host words.

    Raises:
        ProgramError: for an instruction of the host in a program whose weights live on the device.
        ValueError: if weights live on the host, and the program names no versions, or needs several at once.
    """
    program = compact.program
    if program.residency is None:
        _require_none(compact)
    elif not compact.versioned:
        raise ValueError("weights on the host are fetched by their version, and no instruction names one; name them")
    elif not program.weights.drains:
        raise ValueError(f"the host has one version of the weights, and {program.weights} needs more; use flush")


def prove_residency(compact: CompactProgram) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prove the module's rules of resident weights.

    Args:
        compact: a program whose versions are proved, if weights live on the host.

    Returns:
        For each rank, its number of FETCHes, and its largest number of stages that are resident at once. Empty if
        weights live on the device.

    Raises:
        ProgramError: for an instruction out of place, or for the end of a row with weights left on the device.
    """
    if compact.program.residency is None:
        return (), ()
    ranks = [_RankResidency(compact, rank) for rank in range(len(compact.codes))]
    for rank in ranks:
        rank.prove()
    return tuple(rank.num_fetched for rank in ranks), tuple(rank.peak for rank in ranks)


def _require_none(compact: CompactProgram) -> None:
    words = {*range(FIRST_STASH, FIRST_SWAP), *range(FIRST_HOST_WORD, NUM_CODES)}
    for rank, codes in enumerate(compact.codes):
        if not words.isdisjoint(codes):
            position = next(at for at, code in enumerate(codes) if code in words)
            raise compact.error(rank, position, "the weights of this program live on the device: it says no residency")


class _RankResidency:
    """The state of the proof of resident weights for one row."""

    def __init__(self, compact: CompactProgram, rank: int) -> None:
        self.compact, self.rank = compact, rank
        self.most = compact.program.residency.stages
        self.on_host = dict.fromkeys(compact.stages_of(rank), max(compact.program.entry_versions))
        self.frozen = list(filter(compact.program.graph.is_forward_only, self.on_host))
        self.resident: dict[int, int] = {}  # stage -> version
        self.used: set[int] = set()  # resident stages with a computation since their FETCH
        self.num_fetched = self.peak = 0

    def prove(self) -> None:
        compact, width = self.compact, self.compact.num_microbatches
        for position, (code, place, version) in compact.row(self.rank):
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
                self.on_host.update(dict.fromkeys(self.frozen, version))
            if reason:
                raise compact.error(self.rank, position, reason)
        reason = self._end()
        if reason:
            raise compact.error(self.rank, len(compact.codes[self.rank]), reason)

    def _compute(self, stage: int, version: int) -> str:
        if self.resident.get(stage) != version:
            return (
                f"its weights are not on the device: no {stage}FETCH@{version} stands before it, or a FREE is between"
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
        """The error at the end of a batch if a stage is still resident; otherwise ""."""
        for stage, version in self.resident.items():
            return f"stage {stage} is resident over the end of its batch: no {stage}FREE@{version} stands before it"
        return ""


def codes_of_host_updates(compact: CompactProgram) -> tuple[int, ...]:
    """The codes of updates that each stage has once a batch, in order; empty if weights live on the device."""
    program = compact.program
    if program.residency is None:
        return ()
    return (REDUCE_GRAD, STORE_GRAD, UPDATE) if program.data_parallel else (STORE_GRAD, UPDATE)


def prove_host_updates(compact: CompactProgram) -> None:
    """Prove the module's rules of gradients and updates on the host.

    Args:
        compact: a program whose computations and updates are proved.

    Raises:
        ProgramError: for an instruction out of place, or for the end of a row that lacks one.
    """
    if compact.program.residency is not None:
        for rank in range(len(compact.codes)):
            _RankUpdates(compact, rank).prove()


class _RankUpdates:
    """The state of the proof of host updates for one row. Batches are counted from the program's first batch."""

    def __init__(self, compact: CompactProgram, rank: int) -> None:
        self.compact, self.rank, self.program = compact, rank, compact.program
        self.codes = codes_of_host_updates(compact)
        stages = self.program.trained_stages_of(rank)
        ends = {0, compact.num_stages - 1} if self.program.reduces_embeddings(rank) else set()
        self.ends = [stage for stage in stages if stage in ends]
        self.left = {stage: list(self.program.batches) for stage in stages}  # remaining backwards of each batch
        self.posted = {stage: dict.fromkeys(self.codes, 0) for stage in stages}
        self.num_embedded = self.num_stepped = 0  # earlier REDUCE_EMBEDs and STEPs
        self.in_use: dict[int, int] = {}  # stage whose gradients are begun and not stored -> their batch

    def prove(self) -> None:
        compact, width, batch_of = self.compact, self.compact.num_microbatches, self.compact.batch_of
        for position, (code, place, version) in compact.row(self.rank):
            stage, reason = place // width, ""
            if code in (B, W):
                batch = batch_of[place % width]
                self.left[stage][batch] -= 1
                reason = self._begin(stage, batch)
            elif code in (REDUCE_GRAD, STORE_GRAD, UPDATE):
                reason = self._post(code, stage, version - self.program.first_batch - 1)
            elif code == REDUCE_EMBED:
                reason = self._embed()
            elif code == REDUCE_NORM:
                reason = self._take_norm(version - self.program.first_batch - 1)
            elif code == STEP:
                self.num_stepped += 1
            if reason:
                raise compact.error(self.rank, position, reason)
        self._require_all()

    def _begin(self, stage: int, batch: int) -> str:
        """The reason why a backward has no buffer for its gradients; "" if it has one."""
        begun = self.in_use.setdefault(stage, batch)
        if begun != batch:
            return (
                f"the gradients of batch {self.program.first_batch + begun} are still in the stage's buffer: no "
                f"{self.compact.update(stage, STORE_GRAD, begun)} stands before it"
            )
        if len(self.in_use) > GRADIENT_BUFFERS:
            others = " and ".join(f"stage {other}" for other in self.in_use if other != stage)
            return f"the {GRADIENT_BUFFERS} gradient buffers are those of {others}, whose STORE_GRADs are to come"
        return ""

    def _post(self, code: int, stage: int, index: int) -> str:
        """The reason why a stage's instruction for the update of batch `index` is out of place; "" if it is not."""
        posted = self.posted[stage]
        if code not in posted:
            return f"by the program's flags a stage has no {KIND_OF_CODE[code].value}"
        if index != posted[code] or index == len(self.program.batches):
            return self.compact.out_of_order(stage, code, posted[code])
        if self.left[stage][index]:
            return f"batch {self.program.first_batch + index}, whose gradients it takes, has backwards to come here"
        before = self.codes[: self.codes.index(code)]
        missing = next((self.compact.update(stage, each, index) for each in before if posted[each] <= index), "")
        if code == UPDATE and not missing:
            missing = self._missing_of_rank(stage, index)
        if missing:
            return f"no {missing} stands before it"
        posted[code] += 1
        if code == STORE_GRAD:
            del self.in_use[stage]
        return ""

    def _missing_of_rank(self, stage: int, index: int) -> str:
        """The instruction of the whole rank that is missing before a stage's UPDATE; "" if none is missing."""
        lowest = self.compact.stages_of(self.rank)[0]
        if stage in self.ends and self.num_embedded <= index:
            return self.compact.update(lowest, REDUCE_EMBED, index)
        if not self.program.residency.is_eager and self.num_stepped <= index:
            return self.compact.update(lowest, STEP, index)
        return ""

    def _embed(self) -> str:
        for end in self.ends:
            if self.posted[end][STORE_GRAD] <= self.num_embedded:
                missing = self.compact.update(end, STORE_GRAD, self.num_embedded)
                return f"it adds gradients on the host: no {missing} before it"
        self.num_embedded += 1
        return ""

    def _take_norm(self, index: int) -> str:
        for stage, posted in self.posted.items():
            if posted[STORE_GRAD] <= index:
                missing = self.compact.update(stage, STORE_GRAD, index)
                return f"norms are taken as gradients leave: no {missing} stands before it"
        return ""

    def _require_all(self) -> None:
        """Raise ProgramError if an instruction is missing at the end of the row."""
        for stage, posted in self.posted.items():
            for code in self.codes:
                if posted[code] < len(self.program.batches):
                    raise self.compact.missing(self.rank, stage, code, posted[code])
