"""From the gradients of a batch to the next weights: the reductions, steps and predictions of one rank.

Reductions run on the chain thread, and STEP waits for them. Only the report and VALIDATE wait for a reduction that
comes after its STEP in the row. Such a reduction runs on another thread: in the chain it would delay the next STEP
until all ranks have reached it.

`Steps` also keeps the batches in flight, from their announcement to their STEP.

Where weights are stale, each stage steps by itself (FTPipe, Table 1), with its own update (`StagewiseUpdate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.runtime.activations.transfers import SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import (
    EVALUATION_BATCH,
    AnyStage,
    AnyUpdate,
    BatchInfo,
    BatchReport,
    Microbatch,
    StageUpdate,
    WeightUpdate,
    take_losses,
)
from megatron.pipeline.runtime.relay.lanes import Lanes
from megatron.pipeline.runtime.transport.lane import Chain


@dataclass(slots=True)
class Stepping:
    """Stages that step together: all stages of the rank, or a single stage."""

    update: WeightUpdate | StageUpdate
    accumulating: int | None = None  # the batch that the last backward belonged to
    with_backwards: set[int] = field(default_factory=set)  # batches whose first backward has started
    with_forwards: int | None = None  # the batch of the last forward, where the stage steps alone


class Steps:
    """The updates of one rank, and its batches in flight.

    Args:
        stages, update, chain, late_chain, saved, lanes, stop_requests: as for `Executor`.
        alone: each stage steps by itself.
        waited: called after each wait for reductions.
        num_held: where stages are copies, returns how many microbatches a HOLD or REDUCE_PARTIAL_EMBED reads over all
            copies, which add up their gradients; None: the finished backwards.

    Attributes:
        of_stage: stage -> the stages that step together with it.
        microbatches: index -> microbatch, from the announcement of its batch until the batch's STEP.
        begun: the batches with a forward.
        num_backwards: batch -> backwards that have ended.
        before_predictions: versions whose STEP is directly before a PREDICT.
        is_refused: whether the last VALIDATE refused its step.
        reports: batch -> its report, for the batches stepped so far. The caller removes them.
    """

    def __init__(
        self,
        stages: Mapping[int, AnyStage],
        update: AnyUpdate,
        chain: Chain,
        late_chain: Chain,
        saved: SavedMicrobatches,
        *,
        alone: bool,
        lanes: Lanes | None,
        stop_requests: Callable[[], int],
        waited: Callable[[], None],
        num_held: Callable[[Instruction], int] | None = None,
    ) -> None:
        self._stages, self._update, self._saved, self._alone = stages, update, saved, alone
        self._chain, self._late_chain, self._lanes = chain, late_chain, lanes
        self._stop_requests, self._waited = stop_requests, waited
        self._num_held = num_held or self._num_done
        together = Stepping(update)
        self.of_stage = {each: Stepping(update.of_stage(each)) if alone else together for each in stages}
        self._newest = dict.fromkeys(stages, -1)  # the last version stepped to at each stage
        self._num_stepped: Counter[int] = Counter()  # version -> number of stages at it, where each steps alone
        self._batches: dict[int, BatchInfo] = {}
        self.microbatches: dict[int, Microbatch] = {}
        self.begun: set[int] = set()
        self.num_backwards: Counter[int] = Counter()
        self.before_predictions: set[int] = set()
        self.is_refused = False
        self._on_trial: list[Instruction] = []  # the forwards before the VALIDATE of the row
        self.reports: dict[int, BatchReport] = {}

    # -- batches in flight --------------------------------------------------------------------------------------------

    def add_batch(self, info: BatchInfo, first_microbatch: int) -> None:
        """Announce a batch."""
        if info.index != EVALUATION_BATCH:
            self._batches[info.index] = info
        for position in range(info.num_microbatches):
            index = first_microbatch + position
            self.microbatches[index] = Microbatch(index, info.index, position, info.num_microbatches)

    def begin_batch(self, batch: int) -> None:
        """Announce the first forward of a batch on this rank."""
        self.begun.add(batch)
        self._update.begin_batch(self._batches[batch])

    def begin_forward(self, stage: int, batch: int, version: int) -> None:
        """Announce a forward, with `version` loaded, of a stage that steps alone."""
        stepping = self.of_stage[stage]
        if stepping.with_forwards != batch:
            stepping.with_forwards = batch
            stepping.update.begin_forward(self._batches[batch], version)

    def accumulate_for(self, stepping: Stepping, batch: int) -> None:
        """Make the next backwards add to the gradients of `batch`. Backwards of other batches may have come between."""
        if batch in stepping.with_backwards:
            stepping.update.resume_backward(self._batches[batch])
        else:
            stepping.with_backwards.add(batch)
            stepping.update.begin_backward(self._batches[batch])
        stepping.accumulating = batch

    def _forget_batch(self, batch: int) -> None:
        info = self._batches.pop(batch)
        self.begun.discard(batch)
        del self.num_backwards[batch]
        first = next(index for index, microbatch in self.microbatches.items() if microbatch.batch == batch)
        for index in range(first, first + info.num_microbatches):
            del self.microbatches[index]

    # -- the chain and the step ---------------------------------------------------------------------------------------

    def _post(self, instruction: Instruction, call: Callable[[], None]) -> None:
        if self._lanes is not None:
            call = self._lanes.in_chain(instruction, call)
        is_late = self._newest[instruction.stage] >= instruction.version
        (self._late_chain if is_late else self._chain).post(instruction, call)

    def reduce_grad(self, instruction: Instruction) -> None:
        self._post(instruction, lambda: self._update.reduce_grad(instruction.version, instruction.stage))

    def reduce_embed(self, instruction: Instruction) -> None:
        self._post(instruction, lambda: self._update.reduce_embed(instruction.version))

    def reduce_norm(self, instruction: Instruction) -> None:
        version, stop_requests = instruction.version, self._stop_requests()

        def reduce() -> None:
            self._update.reduce_norm(version, stop_requests, take_losses(self._stages.values(), version - 1))

        self._post(instruction, reduce)

    def step(self, instruction: Instruction) -> None:
        stage, version = instruction.stage, instruction.version
        self._chain.wait_for(version)
        self._late_chain.raise_error()
        self._waited()
        stepping = self.of_stage[stage]
        if version in self.before_predictions and self._chain.is_done(version + 1):
            report = self._update.step(version, with_prediction=True)
        else:  # the step is taken while the prediction would wait
            report = stepping.update.step(version)
        stepping.with_backwards.discard(version - 1)
        self._newest[stage] = version
        if self._alone:
            self._num_stepped[version] += 1
            if self._num_stepped[version] < len(self._stages):
                return
            del self._num_stepped[version]
            report = self._update.step(version)
        self.reports[version - 1] = report
        self._forget_batch(version - 1)

    def begin_trial(self, row: Sequence[Instruction]) -> None:
        """Announce instructions that end with a VALIDATE. If it refuses the step, their forwards are repeated."""
        self._on_trial = [each for each in row if each.kind is Kind.FORWARD]
        for stage in self._stages.values():
            stage.begin_trial()

    def end_trial(self) -> None:
        """Announce that the VALIDATE has accepted the step."""
        for stage in self._stages.values():
            stage.end_trial()

    def validate(self, instruction: Instruction) -> None:
        self._late_chain.wait_for(instruction.version)
        self._waited()
        self.is_refused = not self._update.validate(instruction.version)

    def roll_back(self, instruction: Instruction) -> None:
        """Drop the forwards of the batch after the step, and let the update take the right step."""
        for index, stage in self._stages.items():
            begun = [self.microbatches[each.microbatch] for each in self._on_trial if each.stage == index]
            for _ in begun:
                self._saved.remove(index)
            stage.begin_again(begun)
        self.begun.discard(instruction.version)
        self._update.roll_back(instruction.version)

    # -- predictions --------------------------------------------------------------------------------------------------

    def require_whole(self, instruction: Instruction, batch: int) -> None:
        """Raise ValueError if a microbatch of `batch` has had its I but not its W: its gradients are incomplete."""
        halfway = self._saved.deferred_of(instruction.stage)
        halfway = [index for index in halfway if self.microbatches[index].batch == batch]
        if halfway:
            raise ValueError(
                f"{instruction} reads the gradients of batch {batch} before the W of microbatches "
                f"{', '.join(map(str, halfway))} have added to them; place each W before it"
            )

    def _num_done(self, instruction: Instruction) -> int:
        """Return the number of finished backwards of the batch that makes the instruction's version."""
        return self.num_backwards[instruction.version - 1]

    def hold(self, instruction: Instruction) -> None:
        self.require_whole(instruction, instruction.version - 1)
        self._update.hold(instruction.version, self._num_held(instruction))

    def reduce_partial(self, instruction: Instruction) -> None:
        self._post(instruction, lambda: self._update.reduce_partial(instruction.version))

    def reduce_partial_embed(self, instruction: Instruction) -> None:
        self.require_whole(instruction, instruction.version - 1)
        self._update.hold_embed(instruction.version, self._num_held(instruction))
        self._post(instruction, lambda: self._update.reduce_partial_embed(instruction.version))

    def predict(self, instruction: Instruction) -> None:
        self._chain.wait_for(instruction.version)
        self._waited()
        if self._update.reads_gradients:
            self.require_whole(instruction, instruction.version - 1)
        self._update.predict(instruction.version, self._num_done(instruction))


# --- optimistic steps that were refused

OF_BATCHES = 100
MOST = OF_BATCHES // 20
"""The most steps that may be refused among the last `OF_BATCHES` batches. After one more, optimistic steps are off."""


class RefusedSteps:
    """Counts refused steps. All ranks refuse the same, so they agree on when there are too many."""

    def __init__(self) -> None:
        self._before: list[int] = []  # of the last `OF_BATCHES` batches, those whose preceding step was refused

    def note(self, batch: int) -> str | None:
        """Note that the step before `batch` was refused. Return a sentence for the log if too many were refused."""
        self._before = [*(each for each in self._before if each > batch - OF_BATCHES), batch]
        if len(self._before) <= MOST:
            return None
        return (
            f"optimistic steps are off from iteration {batch + 1} on: {len(self._before)} of the last {OF_BATCHES} "
            "were refused, and each makes a batch begin again"
        )
