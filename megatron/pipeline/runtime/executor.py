"""The executor: runs one rank's row of a program under any schedule, on the stages of a chain or of another graph.

A table gives the method of each instruction kind, and a loop calls these methods in the order of the row. Sends and
receives are posted, and the instruction that needs a tensor waits for it. A kind without a method is an error, raised
before the row starts. The executor knows no schedule. Between rows it keeps only results of instructions: saved
microbatches, posted receives, outputs for other stages (in its `Exchange`), and batches in flight (in its `Steps`).

A row ends at a VALIDATE that refuses the step. The caller has the instructions that replace the rest of the row,
ROLLBACK among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    GraphStage,
    Microbatch,
    RelayUpdate,
    SplittingStage,
    Stage,
)
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.exchange import Exchange
from megatron.pipeline.runtime.failure.errors import annotate
from megatron.pipeline.runtime.relay.activation_stash import ActivationStash
from megatron.pipeline.runtime.relay.input_stash import InputStash
from megatron.pipeline.runtime.relay.lanes import Lanes
from megatron.pipeline.runtime.steps import Steps
from megatron.pipeline.runtime.transport.channels import Channels
from megatron.pipeline.runtime.transport.lane import Chain


class Executor:
    """Executes rows on the stages of one rank.

    Args:
        stages: the rank's stages, by their numbers in the program.
        update: their weight update; a `StagewiseUpdate` where `weights` refreshes.
        channels: the rank's links to other ranks.
        chain: runs the reductions for which a STEP waits.
        late_chain: runs the reductions that come after their STEP in the row.
        saved: counter of the saved microbatches.
        graph: the edges between all stages of the pipeline.
        copies: see `Exchange`.
        weights: the schedule's weight policy.
        transfers: moves saved microbatches between paired ranks and updates `saved`; None: the rows have no moves.
        lanes: carry weights, gradients and stashed inputs between device and host, where `update` is a `RelayUpdate`;
            None: the rows have no such instructions.
        stash: the inputs or activations of microbatches on the host; None: the rows have no instructions for them.
        tracer: records the instructions of training rows.
        stop_requests: returns the bits to send with the next norm reduction.
        on_boundary: see `Exchange`.

    Attributes:
        reports: as in `Steps`.
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
        num_held: Callable[[Instruction], int] | None = None,
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
        self._channels = channels
        self._saved = saved
        self._transfers = transfers
        self._lanes = lanes
        self._stash = stash
        self._tracer = tracer
        self._steps = Steps(
            self._stages, update, chain, late_chain, saved, alone=self._steps_alone, lanes=lanes,
            stop_requests=stop_requests, waited=self._waited, num_held=num_held,
        )  # fmt: skip
        self._microbatches, self.reports = self._steps.microbatches, self._steps.reports
        self._begun, self._num_backwards = self._steps.begun, self._steps.num_backwards
        self._stepping = self._steps.of_stage
        self._exchange = Exchange(
            self._stages, graph, weights, channels, copies=copies, about=self._microbatches.__getitem__,
            waited=self._waited, on_boundary=on_boundary,
        )  # fmt: skip
        self._frozen = self._exchange.most_unread
        self._take_input = {index: self._exchange.taker(Kind.RECV_F, index) for index in self._stages}
        self._take_output_grad = {index: self._exchange.taker(Kind.RECV_B, index) for index in self._stages}
        self._give_output = {index: self._exchange.giver(Kind.SEND_F, index) for index in self._stages}
        self._give_input_grad = {index: self._exchange.giver(Kind.SEND_B, index) for index in self._stages}
        self._splitting: set[int] = set()  # stages prepared for split backwards
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
            self._exchange.begin_batch(info.index, range(first_microbatch, first_microbatch + info.num_microbatches))
        self._steps.add_batch(info, first_microbatch)

    def run(self, row: Sequence[Instruction]) -> bool:
        """Execute a row of a training program. `annotate` marks an error with the instruction that raised it.

        Returns whether the row ran to its end. If its VALIDATE refuses the step, the row ends there, and the caller
        runs the instructions that replace the rest.

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
        self._steps.begin_trial(on_trial)
        self._run_part(on_trial)
        if self._steps.is_refused:
            return False
        self._steps.end_trial()
        self._run_part(rest)
        return True

    def _run_part(self, row: Sequence[Instruction]) -> None:
        self._steps.before_predictions = {
            step.version for step, after in pairwise(row) if step.kind is Kind.STEP and after.kind.row.is_prediction
        }
        self._run(self._resolve(row, self._training), tracer=self._tracer)

    def run_evaluation(self, row: Sequence[Instruction], num_microbatches: int) -> None:
        """Execute a row of forwards of the microbatches 0, 1, ... that save nothing. Call it only while drained."""
        self._update.begin_evaluation()
        assert not self._microbatches, "an evaluation while batches are in flight"
        self.add_batch(BatchInfo(EVALUATION_BATCH, num_microbatches, 0), 0)
        try:
            self._run(self._resolve(row, self._evaluation), tracer=None)
        finally:
            self._microbatches.clear()

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
        if microbatch.batch not in self._begun:
            self._steps.begin_batch(microbatch.batch)
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
            self._steps.require_whole(instruction, instruction.version)
            stage.load_provisional(instruction.version, instruction.unstepped)
        else:
            stage.load_version(instruction.version)
        self._steps.begin_forward(instruction.stage, batch, instruction.version)

    def _forward_only(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.stage]
        microbatch = self._microbatches[instruction.microbatch]
        self._wait_for_lanes(instruction)
        self._infer(stage, microbatch, instruction)

    def _infer(self, stage: AnyStage, microbatch: Microbatch, instruction: Instruction) -> None:
        output = stage.forward_only(microbatch, self._take_input[instruction.stage](instruction))
        self._give_output[instruction.stage](instruction, output)

    def _recompute(self, instruction: Instruction) -> None:
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        self._wait_for_lanes(instruction)
        self._bring_back(stage, microbatch, instruction)
        stage.load_version(instruction.version)
        stage.recompute(microbatch)

    def _backward(self, instruction: Instruction) -> None:
        stage, microbatch = self._begin_backward(instruction)
        self._bring_back(stage, microbatch, instruction)
        input_grad = stage.backward(microbatch, self._take_output_grad[instruction.stage](instruction))
        self._let_go(instruction)
        self._end_backward(instruction.stage, microbatch)
        self._give_input_grad[instruction.stage](instruction, input_grad)

    def _backward_input(self, instruction: Instruction) -> None:
        stage, microbatch = self._begin_backward(instruction)
        self._bring_back(stage, microbatch, instruction)
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
            self._steps.accumulate_for(stepping, microbatch.batch)
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

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _send_output(self, instruction: Instruction) -> None:
        self._exchange.send(instruction)
        self._stages[instruction.stage].free_output(self._microbatches[instruction.microbatch])

    def _roll_back(self, instruction: Instruction) -> None:
        self._exchange.drop(instruction)
        self._steps.roll_back(instruction)

    # -- moved activations --------------------------------------------------------------------------------------------

    def _wait_for_moves(self, instruction: Instruction) -> None:
        if self._transfers.wait_for(instruction):
            self._waited()

    def _bring_back(self, stage: Stage, microbatch: Microbatch, instruction: Instruction) -> None:
        """Give the stage the activations or the input of a microbatch, if the pair rank or the host had them."""
        if self._transfers is not None:
            self._wait_for_moves(instruction)
            self._transfers.finish_load(stage, microbatch, instruction)
        if self._stash is not None:
            self._stash.restore(stage, microbatch)

    def _let_go(self, instruction: Instruction) -> None:
        """Drop the buffers in which activations or inputs came back: the backward has read them."""
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
