"""`--pipeline-schedule auto` without a profile: a run makes a program for the costs of its own first batches.

After these batches every rank knows the costs, and rank 0 starts a search in another process while training continues.
When the search is over, rank 0 sends a bit with the norm reduction of its next batch. All ranks read the bit in the
report of the same batch, drain after it, receive the rows, prove them, and use them from the next batch on.

Stages, model and optimizer stay where they are; only the engine is replaced. Every stage adds up its gradients in the
same order under both programs, so the losses are those of a run without a change. Under 2bw the update keeps both
versions of the weights: the drain has made the newest version, and the next batch computes with the previous one, as it
would without a drain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import agreed, on_rank_zero
from megatron.pipeline.runtime.failure.errors import AgreedError
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem
from megatron.pipeline.synthesis.search_process import SearchProcess
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.synthesis import ways_named
from megatron.trainer.arguments.flags.config import MadeProgram, TrainConfig
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.platform import require_hardware_queues
from megatron.trainer.arguments.rules.schedule import made_or_read, settled_schedule
from megatron.trainer.changes.change import collect, end_engine
from megatron.trainer.changes.times import measure_copies, measured_costs
from megatron.trainer.plan import auto_program, from_flags
from megatron.trainer.plan.auto_costs import MeasuredHere
from megatron.trainer.plan.auto_problem import moving_problems_of, problems_of, search_of
from megatron.trainer.ranks import MADE
from megatron.trainer.report.metrics import ByProduct
from megatron.trainer.start_up.run import Run, build_engine

_COPIED_BYTES = 8 << 20
"""The size of the measured copy to the host, in bytes."""
_PARTS = {"F": "forward", "R": "recompute", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class ProgramInMaking:
    """The steps from a run's first program to a better one: measure costs, search for a program, and switch to it.

    Args:
        args: the run's configuration.
        first: the number of batches before the run starts or resumes.
    """

    def __init__(self, args: TrainConfig, *, first: int) -> None:
        self._num_measured = args.pipeline_measured_batches
        self._measured_at = first + 1 + self._num_measured
        self._search: SearchProcess | None = None  # on rank 0 only
        self._costs_of: MeasuredHere | None = None
        self._problems: list[Problem] = []  # the problems of the search, on rank 0 only
        self._failure: str | None = None  # of the search, on rank 0 only
        self._is_made = False

    def announce(self, engine: PipelineEngine) -> None:
        """If the search is over, tell all ranks with the stop requests of the next batch."""
        if self._failure is not None or (self._search is not None and self._search.is_over):
            engine.stop_requests |= MADE

    def note(self, report: BatchReport) -> None:
        self._is_made |= bool(report.stop_requests & MADE)

    def is_due(self, iteration: int) -> bool:
        """Whether `go_on` has work to do after `iteration` batches; the same on all ranks."""
        return iteration == self._measured_at or self._is_made

    def go_on(self, run: Run) -> bool:
        """Start the search, or switch to the program that was found. Returns whether all work is done.

        Collective: every rank must call it. The pipeline must be drained.
        """
        if not self._is_made:
            self._begin_to_search(run)
            return False
        made, problem = on_rank_zero(lambda: self._made(run.args))
        if made is not None:
            problem = _change(run, made)
        if problem is not None:
            run.reporter.say(f"warning: {AUTO}: {problem}; the run goes on with the program with which it began")
        self.close()
        return True

    def close(self) -> None:
        """End the search process."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _begin_to_search(self, run: Run) -> None:
        sent = activations_of(from_flags.architecture(run.args), from_flags.activation_setting(run.args)).boundary
        costs = measured_costs(run.engine, num_batches=self._num_measured, num_bytes=sent)
        to_host = "host" in ways_named(run.args.pipeline_moves, run.args.schedule.rank_of_stage)
        self._costs_of = MeasuredHere(costs, *(measure_copies(_COPIED_BYTES) if to_host else ()))
        copied = f", a copy to the host at {1e-9 / self._costs_of.to_host:.3g} GB/s" if to_host else ""
        transfer = 1000 * (costs.latency + costs.forward_bytes / costs.bandwidth)
        run.reporter.say(
            f"{AUTO}: measured in iterations {run.iteration - self._num_measured + 1} to {run.iteration}, in ms of a "
            f"microbatch by stage: {', '.join(_described(costs))}, and {transfer:.3g} of a transfer{copied}; the "
            f"search takes up to {run.args.pipeline_synthesis_seconds:g} s, and training goes on"
        )
        if dist.get_rank() == 0:
            try:
                self._problems = problems_of(run.args, self._costs_of)
                moving = moving_problems_of(run.args, self._costs_of)
                self._search = SearchProcess(search_of(run.args, self._problems, moving))
            except (ValueError, OSError) as error:
                self._failure = str(error)

    def _made(self, args: TrainConfig) -> tuple[MadeProgram | None, str | None]:
        """The program that the search has found, or the reason why there is none. Called on rank 0."""
        if self._failure is not None:
            return None, self._failure
        try:
            return auto_program.better(args, self._costs_of, self._search.result(), self._problems), None
        except ValueError as error:
            return None, str(error)


def _described(costs: Costs) -> Iterator[str]:
    for letter, name in _PARTS.items():
        values = getattr(costs, name)
        is_derived = {"R": values in (None, costs.forward), "B": any(costs.backward_input)}.get(letter, False)
        if not is_derived and any(values):
            yield f"{letter} {' '.join(f'{1000 * each:.3g}' for each in values)}"


def _change(run: Run, made: MadeProgram) -> str | None:
    """Switch the run to a program; return the problem that prevents the switch, or None.

    Collective: every rank must call it. The pipeline must be drained.
    """
    try:
        with agreed():
            args = _with_program(run.args, made)
        digest = on_rank_zero(lambda: args.program.sha256)
        with agreed():
            if args.program.sha256 != digest:
                raise ValueError(f"rank {dist.get_rank()} has made another program of the same rows than rank 0")
    except AgreedError as error:
        return str(error)
    if made.csv != run.args.made_program.csv:
        run.reporter.say(f"{AUTO}: from iteration {run.iteration + 1} on the program is sha256 {digest[:12]}")
    end_engine(run)
    run.go_on_with(args)
    run.model_and_optimizer = replace(run.model_and_optimizer, schedule=args.schedule)
    for stage in run.stages:
        stage.recompute_from_now(args.schedule.recomputes(stage.index), keeps=args.schedule.keeps(stage.index))
    collect(run)
    run.engine = build_engine(args, run.model_and_optimizer, run.position())
    for line in made.lines:
        run.reporter.say(line)
    if args.save is not None and dist.get_rank() == 0:
        with ByProduct(f"{AUTO}: the program in {args.save}", consequence="and a resumed job makes another").attempt():
            auto_program.keep(made, Path(args.save))
    return None


def _with_program(args: TrainConfig, made: MadeProgram) -> TrainConfig:
    """The run's configuration under a program with the same stages.

    Raises ValueError if the program cannot run on this machine.
    """
    args = replace(args, made_program=made)
    program = made_or_read(args)
    assert tuple(program.rank_of_stage) == tuple(args.schedule.rank_of_stage)
    args = replace(args, program=program, schedule=program, pipeline_program_sha256=program.sha256)
    args = replace(args, moves_activations=settled_schedule(args)[1])
    if args.distributed_backend == "nccl":
        require_hardware_queues(args, os.environ)
    return args
