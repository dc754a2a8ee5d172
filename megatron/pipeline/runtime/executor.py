"""The executor: runs one rank's row of a program under any schedule, on the stages of a chain or of another graph.

A table gives the method of each instruction kind, and a loop calls these methods in the order of the row. Sends and
receives are posted, and the instruction that needs a tensor waits for it. Reductions run on the chain thread, and STEP
waits for them. Only the report and VALIDATE wait for a reduction that stands behind its STEP. Such a reduction runs on
another thread: in the chain it would delay the next STEP until all ranks have reached it. A kind without a method is an
error, raised before the row starts. The executor knows no schedule. Between rows it keeps only results of instructions:
saved microbatches, posted receives, and outputs for other stages (in its `Exchange`).

A row ends at a VALIDATE that refuses the step; the caller has the words in place of the rest. ROLLBACK is one of them.

Where weights are stale each stage steps by itself (FTPipe, Table 1), with its own update (`StagewiseUpdate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from torch import Tensor

from megatron.pipeline.program.copies import Copy
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import (
    EVALUATES,
    HALVES,
    HOST_WORDS,
    MOVES,
    STASH_WORDS,
    WORDS,
    Instruction,
    Kind,
)
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.activations.transfers import ActivationTransfers, SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import (
    EVALUATION_BATCH,
    AnyStage,
    AnyUpdate,
    BatchInfo,
    BatchReport,
    GraphStage,
    Microbatch,
    RelayUpdate,
    SplittingStage,
    Stage,
    StageUpdate,
    WeightUpdate,
    take_losses,
)
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.exchange import Exchange
from megatron.pipeline.runtime.failure.errors import annotate
from megatron.pipeline.runtime.relay.activation_stash import ActivationStash
from megatron.pipeline.runtime.relay.input_stash import InputStash
from megatron.pipeline.runtime.relay.lanes import Lanes
from megatron.pipeline.runtime.transport.channels import Channels
from megatron.pipeline.runtime.transport.lane import Chain


@dataclass(slots=True)
class _Stepping:
    """Stages that step together: all stages of the rank, or a single stage."""

    update: WeightUpdate | StageUpdate
    accumulating: int | None = None  # the batch that the last backward belonged to
    with_backwards: set[int] = field(default_factory=set)  # batches whose first backward has started
    with_forwards: int | None = None  # the batch of the last forward, where the stage steps alone


class Executor:
    """Executes rows on the stages of one rank.

    Args:
        stages: the rank's stages, by their numbers in the program.
        update: their weight update; a `StagewiseUpdate` where `weights` refreshes.
        channels: the rank's links to other ranks.
        chain: runs the reductions for which a STEP waits.
        late_chain: runs the reductions that stand behind their STEP.
        saved: counter of the saved microbatches.
        graph: the edges between all stages of the pipeline.
        copies: see `Exchange`.
        weights: the schedule's weight policy.
        transfers: moves saved microbatches between paired ranks and updates `saved`; None: the rows have no moves.
        lanes: carry weights, gradients and stashed inputs between device and host, where `update` is a `RelayUpdate`;
            None: the rows have no such instructions.
        stash: what of microbatches waits on the host, inputs or activations; None: the rows have no such instructions.
        tracer: records the instructions of training rows.
        stop_requests: returns the bits to send with the next norm reduction.
        on_boundary: see `Exchange`.

    Attributes:
        reports: batch -> its report, for the batches stepped so far. The caller removes them.
        current: the running instruction, None between rows.
        num_executed: number of instructions executed so far.
    """

    def __init__(
        self,
        stages: Mapping[int, AnyStage],
        update: AnyUpdate,
        channels: Channels,
        chain: Chain,
        late_chain: Chain,
        saved: SavedMicrobatches,
        *,
        graph: StageGraph,
        weights: WeightPolicy,
        copies: Sequence[Copy] = (),
        transfers: ActivationTransfers | None = None,
        lanes: Lanes | None = None,
        stash: InputStash | ActivationStash | None = None,
        tracer: Tracer | None = None,
        stop_requests: Callable[[], int] = lambda: 0,
        on_boundary: Callable[[Tensor | None], None] = lambda tensor: None,
    ) -> None:
        self._stages = dict(stages)
        self._update = update
        self._steps_alone = weights.refreshes
        self._relays = isinstance(update, RelayUpdate)
        of_rank = _Stepping(update)
        self._stepping = {
            each: _Stepping(update.of_stage(each)) if self._steps_alone else of_rank for each in self._stages
        }
        self._channels = channels
        self._chain = chain
        self._late_chain = late_chain
        self._saved = saved
        self._transfers = transfers
        self._lanes = lanes
        self._stash = stash
        self._newest = dict.fromkeys(self._stages, -1)  # the last version stepped to at each stage
        self._tracer = tracer
        self._stop_requests = stop_requests
        self._exchange = Exchange(
            self._stages, graph, weights, channels, copies=copies, about=lambda index: self._microbatches[index],
            waited=self._waited, on_boundary=on_boundary,
        )  # fmt: skip
        self._frozen = self._exchange.most_unread
        self._take_input = {index: self._exchange.taker(Kind.RECV_F, index) for index in self._stages}
        self._take_output_grad = {index: self._exchange.taker(Kind.RECV_B, index) for index in self._stages}
        self._give_output = {index: self._exchange.giver(Kind.SEND_F, index) for index in self._stages}
        self._give_input_grad = {index: self._exchange.giver(Kind.SEND_B, index) for index in self._stages}
        self._batches: dict[int, BatchInfo] = {}
        self._microbatches: dict[int, Microbatch] = {}
        self._with_forwards: set[int] = set()  # batches that have begun
        self._num_backwards: Counter[int] = Counter()  # batch -> backwards that have ended
        self._splitting: set[int] = set()  # stages prepared for split backwards
        self._before_predictions: set[int] = set()  # versions whose STEP is directly before a PREDICT
        self._num_stepped: Counter[int] = Counter()  # version -> stages that have stepped to it, where each steps alone
        self._is_refused = False  # what the last VALIDATE said
        self._on_trial: list[Instruction] = []  # the forwards before a VALIDATE that refused the step
        self.reports: dict[int, BatchReport] = {}
        self.current: Instruction | None = None
        self.num_executed = 0
        self._ready = 0.0
        parts = ((MOVES, transfers), (HOST_WORDS - STASH_WORDS, lanes), (STASH_WORDS, stash))
        absent = frozenset().union(*(kinds for kinds, part in parts if part is None))
        self._training = {
            kind: attrgetter(word.handler)(self) for kind, word in WORDS.items() if word.handler and kind not in absent
        }
        self._evaluation = {kind: method for kind, method in self._training.items() if kind in EVALUATES}
        self._evaluation[Kind.FORWARD] = self._forward_only

    # -- rows ---------------------------------------------------------------------------------------------------------

    def add_batch(self, info: BatchInfo, first_microbatch: int) -> None:
        """Announce a batch whose microbatches are in the following rows."""
        if info.index != EVALUATION_BATCH:
            self._batches[info.index] = info
            self._exchange.begin_batch(info.index, range(first_microbatch, first_microbatch + info.num_microbatches))
        for position in range(info.num_microbatches):
            index = first_microbatch + position
            self._microbatches[index] = Microbatch(index, info.index, position, info.num_microbatches)

    def run(self, row: Sequence[Instruction]) -> bool:
        """Execute a row of a training program. `annotate` marks an error with the instruction that raised it.

        Returns whether it ran to its end. If its VALIDATE refuses the step, the row ends there, and the caller runs
        what stands in place of the rest.

        Raises:
            ValueError: the row splits a backward that its stage cannot split. Raised before the row starts.
            NotImplementedError: the row has a kind without a method. Raised before the row starts.
        """
        self._announce_halves(row)
        validates = next((place for place, each in enumerate(row) if each.kind is Kind.VALIDATE), None)
        if validates is None:
            self._run_part(row)
            return True
        on_trial, rest = row[: validates + 1], row[validates + 1 :]
        for stage in self._stages.values():
            stage.begin_trial()
        self._run_part(on_trial)
        if self._is_refused:
            self._on_trial = [each for each in on_trial if each.kind is Kind.FORWARD]
            return False
        for stage in self._stages.values():
            stage.end_trial()
        self._run_part(rest)
        return True

    def _run_part(self, row: Sequence[Instruction]) -> None:
        self._before_predictions = {
            step.version for step, after in pairwise(row) if step.kind is Kind.STEP and after.kind.row.is_prediction
        }
        self._run(self._resolve(row, self._training), tracer=self._tracer)

    def run_evaluation(self, row: Sequence[Instruction], num_microbatches: int) -> None:
        """Execute a row of forwards of the microbatches 0, 1, ... that save nothing. Call it only while drained."""
        self._update.begin_evaluation()
        training_microbatches, self._microbatches = self._microbatches, {}
        try:
            self.add_batch(BatchInfo(EVALUATION_BATCH, num_microbatches, 0), 0)
            self._run(self._resolve(row, self._evaluation), tracer=None)
        finally:
            self._microbatches = training_microbatches

    def _announce_halves(self, row: Sequence[Instruction]) -> None:
        """Prepare each stage whose backwards the row splits, before its forwards and only once.

        Raises ValueError if the stage cannot split backwards.
        """
        for index in {each.stage for each in row if each.kind in HALVES} - self._splitting:
            stage = self._stages[index]
            if not hasattr(stage, "split_backward"):
                raise ValueError(
                    f"the program splits backwards of stage {index} into I and W, and {type(stage).__name__} computes "
                    "whole ones; give a SplittingStage, such as ModuleStage, or a schedule without I and W"
                )
            stage.split_backward()
            self._splitting.add(index)

    def settle(self) -> None:
        """Drop the tensors kept for later microbatches. Call it only while nothing is in flight."""
        self._exchange.settle()

    @staticmethod
    def _resolve(row: Sequence[Instruction], table: Mapping[Kind, Callable[[Instruction], None]]):
        try:
            return [(table[instruction.kind], instruction) for instruction in row]
        except KeyError:
            instruction = next(instruction for instruction in row if instruction.kind not in table)
            raise NotImplementedError(
                f"the executor has no method for {instruction} ({instruction.kind.name})"
            ) from None

    def _run(self, plan: Sequence[tuple[Callable[[Instruction], None], Instruction]], *, tracer: Tracer | None) -> None:
        if self._lanes is not None:
            self._lanes.traced = tracer is not None
        try:
            if tracer is None:
                for method, instruction in plan:
                    self.current = instruction
                    method(instruction)
            else:
                self._run_traced(plan, tracer)
        except BaseException as error:
            if self.current is not None:
                annotate(error, self.current, self._channels.name_of(self.current.stage))
            raise
        self.current = None
        self.num_executed += len(plan)

    def _run_traced(self, plan: Sequence[tuple[Callable[[Instruction], None], Instruction]], tracer: Tracer) -> None:
        now, record = tracer.now, tracer.record
        for method, instruction in plan:
            self.current = instruction
            self._ready = start = now()
            method(instruction)
            record((instruction, start, self._ready, now()))

    def _waited(self) -> None:
        """Record, for the trace, that the running instruction has stopped waiting."""
        if self._tracer is not None:
            self._ready = self._tracer.now()

    # -- computation --------------------------------------------------------------------------------------------------

    def _forward(self, instruction: Instruction) -> None:
        index = instruction.stage
        stage = self._stages[index]
        microbatch = self._microbatches[instruction.microbatch]
        if self._lanes is not None:
            self._wait_for_lanes(instruction)
        if microbatch.batch not in self._with_forwards:
            self._with_forwards.add(microbatch.batch)
            self._update.begin_batch(self._batches[microbatch.batch])
        if index in self._frozen:
            self._infer(stage, microbatch, instruction)
            return
        if self._steps_alone:
            self._show_stale(stage, microbatch.batch, instruction)
        else:
            stage.load_version(instruction.version)
        input = self._take_input[index](instruction)
        if self._transfers is not None:
            self._wait_for_moves(instruction)
        self._saved.add(index)
        self._give_output[index](instruction, stage.forward(microbatch, input))

    def _show_stale(self, stage: GraphStage, batch: int, instruction: Instruction) -> None:
        """Load the weights for a forward of a stage that steps alone, and announce the batch's first forward."""
        if instruction.horizon:
            stage.load_ahead(instruction.version, instruction.horizon)
        elif instruction.unstepped:
            self._require_whole(instruction, instruction.version)
            stage.load_provisional(instruction.version, instruction.unstepped)
        else:
            stage.load_version(instruction.version)
        stepping = self._stepping[instruction.stage]
        if stepping.with_forwards != batch:
            stepping.with_forwards = batch
            stepping.update.begin_forward(self._batches[batch], instruction.version)

    def _forward_only(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        microbatch = self._microbatches[instruction.microbatch]
        self._wait_for_lanes(instruction)
        self._infer(stage, microbatch, instruction)

    def _infer(self, stage: AnyStage, microbatch: Microbatch, instruction: Instruction) -> None:
        output = stage.forward_only(microbatch, self._take_input[instruction.stage](instruction))
        self._give_output[instruction.stage](instruction, output)

    def _recompute(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        self._wait_for_lanes(instruction)
        self._bring_back(stage, instruction)
        stage.load_version(instruction.version)
        stage.recompute(self._microbatches[instruction.microbatch])

    def _backward(self, instruction: Instruction) -> None:
        stage, microbatch = self._begin_backward(instruction)
        self._bring_back(stage, instruction)
        input_grad = stage.backward(microbatch, self._take_output_grad[instruction.stage](instruction))
        self._let_go(instruction)
        self._end_backward(instruction.stage, microbatch)
        self._give_input_grad[instruction.stage](instruction, input_grad)

    def _backward_input(self, instruction: Instruction) -> None:
        stage, microbatch = self._begin_backward(instruction)
        self._bring_back(stage, instruction)
        input_grad = stage.backward_input(microbatch, self._take_output_grad[instruction.stage](instruction))
        self._let_go(instruction)
        self._saved.defer(instruction.stage, microbatch.index, stage.deferred_bytes(microbatch))
        self._trace_deferred()
        self._give_input_grad[instruction.stage](instruction, input_grad)

    def _backward_weights(self, instruction: Instruction) -> None:
        stage, microbatch = self._begin_backward(instruction)
        stage.backward_weights(microbatch)
        self._saved.end_deferred(instruction.stage, microbatch.index)
        self._trace_deferred()
        self._end_backward(instruction.stage, microbatch)

    def _begin_backward(self, instruction: Instruction) -> tuple[Stage | SplittingStage, Microbatch]:
        """Load weights and gradient buffer for a backward, whole or half. Return its stage and microbatch."""
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        stepping = self._stepping[instruction.stage]
        if stepping.accumulating != microbatch.batch:
            self._accumulate_for(stepping, microbatch.batch)
        if self._lanes is not None:
            self._wait_for_lanes(instruction)
        if self._relays:
            self._update.accumulate(instruction.stage)
        stage.load_version(instruction.version)
        return stage, microbatch

    def _trace_deferred(self) -> None:
        if self._tracer is not None:
            self._tracer.record_deferred(self._saved.deferred_bytes.now)

    def _end_backward(self, stage: int, microbatch: Microbatch) -> None:
        """Count a backward as done: a whole one, or both halves of a split one."""
        self._saved.remove(stage)
        self._num_backwards[microbatch.batch] += 1

    def _accumulate_for(self, stepping: _Stepping, batch: int) -> None:
        """Make the next backwards add to the gradients of `batch`. Backwards of other batches may have come between."""
        if batch in stepping.with_backwards:
            stepping.update.resume_backward(self._batches[batch])
        else:
            stepping.with_backwards.add(batch)
            stepping.update.begin_backward(self._batches[batch])
        stepping.accumulating = batch

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _send_output(self, instruction: Instruction) -> None:
        self._exchange.send(instruction)
        self._stages[instruction.stage].free_output(self._microbatches[instruction.microbatch])

    # -- moved activations --------------------------------------------------------------------------------------------

    def _wait_for_moves(self, instruction: Instruction) -> None:
        if self._transfers.wait_for(instruction):
            self._waited()

    def _bring_back(self, stage: Stage, instruction: Instruction) -> None:
        """Give the stage what has come back of a microbatch, from the pair rank or from the host, if anything has."""
        if self._transfers is not None:
            self._wait_for_moves(instruction)
            self._transfers.finish_load(stage, self._microbatches[instruction.microbatch])
        if self._stash is not None:
            self._stash.restore(stage, self._microbatches[instruction.microbatch])

    def _let_go(self, instruction: Instruction) -> None:
        """Drop what had come back: the backward has read it."""
        for part in (self._transfers, self._stash):
            if part is not None:
                part.end_backward(instruction.stage, instruction.microbatch)

    def _evict(self, instruction: Instruction) -> None:
        self._transfers.evict(self._stages[instruction.stage], self._microbatches[instruction.microbatch], instruction)

    # -- weights on the host ------------------------------------------------------------------------------------------

    def _wait_for_lanes(self, instruction: Instruction) -> None:
        if self._lanes is not None and self._lanes.wait_for(instruction):
            self._waited()

    def _fetch(self, instruction: Instruction) -> None:
        self._lanes.request(instruction, self._update.fetch(instruction.stage, instruction.version))

    def _free(self, instruction: Instruction) -> None:
        self._lanes.request(instruction, self._update.free(instruction.stage))

    def _store_grad(self, instruction: Instruction) -> None:
        self._lanes.request(instruction, self._update.store_grad(instruction.stage, instruction.version))

    def _update_on_host(self, instruction: Instruction) -> None:
        self._lanes.request(instruction, self._update.update(instruction.stage, instruction.version))

    def _offload(self, instruction: Instruction) -> None:
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        self._lanes.request(instruction, self._stash.offload(stage, microbatch))

    def _reload(self, instruction: Instruction) -> None:
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        self._lanes.request(instruction, self._stash.reload(stage, microbatch))

    # -- the chain and the step ---------------------------------------------------------------------------------------

    def _post_reduction(self, instruction: Instruction, call: Callable[[], None]) -> None:
        if self._lanes is not None:
            call = self._lanes.in_chain(instruction, call)
        is_late = self._newest[instruction.stage] >= instruction.version
        (self._late_chain if is_late else self._chain).post(instruction, call)

    def _reduce_grad(self, instruction: Instruction) -> None:
        self._post_reduction(instruction, lambda: self._update.reduce_grad(instruction.version, instruction.stage))

    def _reduce_embed(self, instruction: Instruction) -> None:
        self._post_reduction(instruction, lambda: self._update.reduce_embed(instruction.version))

    def _reduce_norm(self, instruction: Instruction) -> None:
        version, stop_requests = instruction.version, self._stop_requests()

        def reduce() -> None:
            self._update.reduce_norm(version, stop_requests, take_losses(self._stages.values(), version - 1))

        self._post_reduction(instruction, reduce)

    def _step(self, instruction: Instruction) -> None:
        stage, version = instruction.stage, instruction.version
        self._chain.wait_for(version)
        self._late_chain.raise_error()
        self._waited()
        if version in self._before_predictions and self._chain.is_done(version + 1):
            report = self._update.step(version, with_prediction=True)
        else:  # the step is taken while the prediction would wait
            report = self._stepping[stage].update.step(version)
        self._stepping[stage].with_backwards.discard(version - 1)
        self._newest[stage] = version
        if self._steps_alone:
            self._num_stepped[version] += 1
            if self._num_stepped[version] < len(self._stages):
                return
            del self._num_stepped[version]
            report = self._update.step(version)
        self.reports[version - 1] = report
        self._forget_batch(version - 1)

    def _validate(self, instruction: Instruction) -> None:
        self._late_chain.wait_for(instruction.version)
        self._waited()
        self._is_refused = not self._update.validate(instruction.version)

    def _roll_back(self, instruction: Instruction) -> None:
        """Drop what the batch behind the step has begun, and let the update take the right step."""
        self._exchange.drop(instruction)
        for index, stage in self._stages.items():
            begun = [self._microbatches[each.microbatch] for each in self._on_trial if each.stage == index]
            for _ in begun:
                self._saved.remove(index)
            stage.begin_again(begun)
        self._on_trial = []
        self._with_forwards.discard(instruction.version)
        self._update.roll_back(instruction.version)

    # -- predictions --------------------------------------------------------------------------------------------------

    def _num_done(self, instruction: Instruction) -> int:
        """Return the number of finished backwards of the batch that makes the instruction's version."""
        self._require_whole(instruction, instruction.version - 1)
        return self._num_backwards[instruction.version - 1]

    def _require_whole(self, instruction: Instruction, batch: int) -> None:
        """Raise ValueError if a microbatch of `batch` has had its I but not its W: its gradients are incomplete."""
        halfway = self._saved.deferred_of(instruction.stage)
        halfway = [index for index in halfway if self._microbatches[index].batch == batch]
        if halfway:
            raise ValueError(
                f"{instruction} reads what microbatches have added to the gradients of batch {batch}, and of "
                f"{', '.join(map(str, halfway))} there is I without W; place W before it"
            )

    def _hold(self, instruction: Instruction) -> None:
        self._update.hold(instruction.version, self._num_done(instruction))

    def _reduce_partial(self, instruction: Instruction) -> None:
        self._post_reduction(instruction, lambda: self._update.reduce_partial(instruction.version))

    def _reduce_partial_embed(self, instruction: Instruction) -> None:
        self._update.hold_embed(instruction.version, self._num_done(instruction))
        self._post_reduction(instruction, lambda: self._update.reduce_partial_embed(instruction.version))

    def _predict(self, instruction: Instruction) -> None:
        self._chain.wait_for(instruction.version)
        self._waited()
        num_done = self._num_done(instruction) if self._update.reads_gradients else 0
        self._update.predict(instruction.version, num_done)

    def _forget_batch(self, batch: int) -> None:
        info = self._batches.pop(batch)
        self._with_forwards.discard(batch)
        del self._num_backwards[batch]
        first = next(index for index, microbatch in self._microbatches.items() if microbatch.batch == batch)
        for index in range(first, first + info.num_microbatches):
            del self._microbatches[index]
