"""Proof: the job runs to its end on devices whose hardware queues are FIFO.

Problem: a GPU takes work from a number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). With fewer queues than
streams, a stream's wait at the head of a queue blocks later operations of other streams. If the chain of reductions or
moves of activations run beside computations, two threads of a rank launch in an order that differs from rank to rank.
One rank may have a reduction or a move first, another rank a computation's collective or transfer. Then they wait for
each other, and the rows do not show it.

Solution: `device_operations` lowers the rows to the operations that threads launch, and `device_queues` executes them
with tensor and data ranks. The meaning of one execution depends on the sharing of queues:

    a queue for each stream            "proved": one execution stands for all (see `device_queues`).
    fewer queues, and one thread at    "proved": the order of launches is fixed, so one execution with one queue stands
    a time launches on each rank       for all, and for every assignment of streams to more queues: in one queue an
    that shares                        operation waits for all earlier ones, in several queues only for some of them.
    fewer queues, and threads launch   a search: each rank's other threads launch as early or as late as possible. A
    beside one another                 deadlock that is found is real. Without one the verdict is "not proved".

The driver chooses which streams share a queue. So fewer queues than streams are treated as one queue.

**The environment of a job** sets the number of queues. Problem: Megatron's scripts export 1. If reductions or moves of
activations run beside computations, streams that share a hardware queue block one another, and the job may hang.

Solution: 1 is refused for such a schedule, and so is any number below a rank's number of streams if the job may hang.
With weights on the host, CUDA's largest number is required. The program shows which of these cases applies. The
functions are pure: the environment is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from megatron.pipeline.check.compact import compact
from megatron.pipeline.check.device_operations import AWAIT, LAUNCH, MAIN, POST, RankOperations, lower
from megatron.pipeline.check.device_queues import IsEarly, QueueExecution, RankCoordinates, explain
from megatron.pipeline.program.program import Program

if TYPE_CHECKING:
    from megatron.pipeline.schedules import PipelineSchedule


PROVED, NOT_PROVED = "proved", "not proved"
_MOST_EXHAUSTIVE = 6  # ranks: 64 interleavings


@dataclass(frozen=True)
class HardwareQueuesReport:
    """The result of the proof for a program on devices with a given number of hardware queues.

    Attributes:
        verdict: "proved", or "not proved" if a search found no deadlock.
        num_streams: per pipeline rank, the number of its streams; with as many queues each stream has its own.
        num_interleavings: the number of executed relative orders of the ranks' threads.
    """

    verdict: str
    num_streams: tuple[int, ...]
    num_interleavings: int


def prove_hardware_queues(
    program: Program, *, tensor: int = 1, data: int = 1, num_queues: int, distributed_optimizer: bool = False
) -> HardwareQueuesReport:
    """Prove or refute that a job runs to its end on devices with few hardware queues.

    Args:
        program: a complete program that `check` has proved.
        tensor, data: the degrees; the job has tensor x data ranks for each rank of the program.
        num_queues: number of FIFO hardware queues of each device.
        distributed_optimizer: whether a STEP gathers the parameters over the replicas.

    Raises:
        ProgramError: for a deadlock; the message names the circle of waits.
        ValueError: for a degree or a number of queues below 1, and for a program whose launches are not modelled.
    """
    if num_queues < 1:
        raise ValueError(f"a device cannot have {num_queues} hardware queues; give 1 and more")
    job = _Job(program, tensor, data, distributed_optimizer)
    streams = tuple(each.num_streams for each in job.ranks)
    shares = [needed > num_queues for needed in streams]
    num_looked_at = 0
    for is_early in job.interleavings(shares):
        execution = job.execution(shares, is_early)
        num_looked_at += 1
        if not execution.run():
            raise explain(job.compact, execution, _where(max(streams), num_queues))
    verdict = PROVED if job.has_fixed_order(shares) else NOT_PROVED
    return HardwareQueuesReport(verdict, streams, num_looked_at)


def _where(num_streams: int, num_queues: int) -> str:
    if num_queues >= num_streams:
        return f"even with a hardware queue for each of {num_streams} streams"
    if num_queues == 1:
        return f"with one hardware queue for {num_streams} streams"
    return f"with {num_queues} hardware queues for {num_streams} streams, any of which may share one"


def num_streams(
    program: Program, *, tensor: int = 1, data: int = 1, distributed_optimizer: bool = False
) -> tuple[int, ...]:
    """The number of streams of each pipeline rank, which is the number of hardware queues with one for each stream."""
    return tuple(each.num_streams for each in _Job(program, tensor, data, distributed_optimizer).ranks)


def launches_beside(program: Program) -> bool:
    """Whether two threads of some rank may launch at the same time, so that their order matters in a shared queue.

    One thread launches computations; another launches the chain of reductions, or moves of activations.
    """
    return not all(_launches_alone(each) for each in _Job(program, 1, 1, False).ranks)


def may_deadlock(program: Program, *, tensor: int = 1, data: int = 1, distributed_optimizer: bool = False) -> bool:
    """Whether a deadlock is possible if streams share a queue, decided without a search.

    It is possible if several threads of a rank launch at the same time, and two of them launch collectives or
    transfers. If only one thread at a time launches, `prove_hardware_queues` gives the answer.
    """
    job = _Job(program, tensor, data, distributed_optimizer)
    return any(not _launches_alone(each) and _num_meeting_threads(each) > 1 for each in job.ranks)


class _Job:
    """A program at given tensor and data parallel degrees, with its lowered ranks."""

    def __init__(self, program: Program, tensor: int, data: int, distributed_optimizer: bool) -> None:
        for name, degree in (("tensor", tensor), ("data", data)):
            if degree < 1:
                raise ValueError(f"the {name} parallel degree cannot be {degree}; give 1 and more")
        if data > 1 and not program.data_parallel and not program.forward_only:
            raise ValueError(
                f"the program has no REDUCE_GRAD for {data} data parallel replicas; build it with data_parallel"
            )
        if program.copies:
            raise ValueError(
                "launches are modelled for replicas that run alike, and the stages of this program are copies; prove "
                "the program of one replica"
            )
        self.compact = compact(program)
        if program.residency is not None or self.compact.swaps:
            raise ValueError("what lanes between device and host launch is not modelled; keep weights on the device")
        num_ranks = len(self.compact.codes)
        if num_ranks > 1 and not self.compact.communicates:
            raise ValueError("a compute-only program does not say what is launched; give one with SENDs and RECVs")
        options = {"tensor": tensor, "data": data, "distributed_optimizer": distributed_optimizer}
        self._degrees = min(tensor, 2), min(data, 2)
        self.ranks = [lower(self.compact, rank, **options) for rank in range(num_ranks)]

    def has_fixed_order(self, shares: list[bool]) -> bool:
        """Whether the order of launches is fixed or does not matter on every rank."""
        return not any(self._is_open(rank, shares) for rank in range(len(self.ranks)))

    def _is_open(self, rank: int, shares: list[bool]) -> bool:
        return shares[rank] and not _launches_alone(self.ranks[rank])

    def execution(self, shares: list[bool], is_early: IsEarly | None) -> QueueExecution:
        tensor, data = (1, 1) if is_early is None else self._degrees
        return QueueExecution(self.ranks, tensor=tensor, data=data, shares=shares, is_early=is_early)

    def interleavings(self, shares: list[bool]) -> Iterator[IsEarly | None]:
        """Yield the interleavings to execute: None if the order is fixed, all if they are few, else some patterns."""
        open_ranks = [rank for rank in range(len(self.ranks)) if self._is_open(rank, shares)]
        tensor, data = self._degrees
        if not open_ranks:
            yield None
        elif len(open_ranks) * tensor * data <= _MOST_EXHAUSTIVE:
            ranks = [RankCoordinates(rank, i, k) for rank in open_ranks for i in range(tensor) for k in range(data)]
            for choice in product((False, True), repeat=len(ranks)):
                early = dict(zip(ranks, choice, strict=True))
                yield lambda rank, early=early: early.get(rank, False)
        else:
            yield from _patterns(len(self.ranks), tensor, data)


def _patterns(num_ranks: int, tensor: int, data: int) -> Iterator[IsEarly]:
    """Yield each choice by tensor and data rank, the same on all stages or inverted on some of them."""
    corners = [(i, k) for i in range(tensor) for k in range(data)]
    turned = {
        tuple(turn(rank) for rank in range(num_ranks))
        for turn in (
            lambda rank: False,
            lambda rank: rank % 2 == 1,
            lambda rank: rank == 0,
            lambda rank: rank == num_ranks - 1,
            lambda rank: rank >= num_ranks // 2,
        )
    }
    seen = set()
    for turns in sorted(turned):
        for choice in product((False, True), repeat=len(corners)):
            early = dict(zip(corners, choice, strict=True))
            table = tuple(early[corner] != turn for turn in turns for corner in corners)
            if table not in seen:
                seen.add(table)
                yield lambda rank, early=early, turns=turns: early[rank[1:]] != turns[rank.pipeline]


def _launches_alone(operations: RankOperations) -> bool:
    """Whether at any time only one thread of the rank can launch."""
    busy, num_posted = None, {}
    for action, argument in operations.steps[MAIN]:
        if action == POST:
            num_posted[argument] = num_posted.get(argument, 0) + 1
            if busy not in (None, argument):
                return False
            busy = argument
        elif action == AWAIT and argument[0] == busy and argument[1] == num_posted[busy]:
            busy = None
        elif action == LAUNCH and busy is not None:
            return False
    return True


def _num_meeting_threads(operations: RankOperations) -> int:
    """The number of threads of a rank that launch collectives or transfers."""
    return sum(
        any(action == LAUNCH and operations.joint[argument] is not None for action, argument in steps)
        for steps in operations.steps
    )


VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
IMPLICIT_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
MOST = 32  # CUDA's largest number
_DEFAULT = 8  # CUDA's number if the variable is not set
_LOSS = (
    "Megatron's scripts set 1 to have tensor-parallel communication launched ahead of the GEMM that it overlaps, and "
    "some of that overlap is lost"
)


def require_hardware_queues(
    schedule: PipelineSchedule,
    environment: Mapping[str, str],
    *,
    flag: str,
    tensor: int,
    data: int,
    pipeline: int,
    distributed_optimizer: bool,
    max_microbatches: int,
    moves_activations: bool,
    reduces_scales: bool = False,
) -> None:
    """Refuse an environment with too few hardware queues for a job over NCCL.

    Args:
        environment: environment variables, of which `VARIABLE` and `IMPLICIT_ORDER` are read.
        flag: the flag that chose the schedule, for messages, such as `--pipeline-schedule 2bw`.
        tensor, data, pipeline: the job's degrees.
        distributed_optimizer: whether a STEP gathers the parameters over the replicas.
        max_microbatches: number of microbatches of the job's largest batch.
        moves_activations: whether some batch of the job moves activations.
        reduces_scales: computations reduce scales of FP8 over tensor and data ranks, on a stream of their own. No
            proof shows which queues this stream may share with others.

    Raises:
        ValueError: for too few queues, with reason and remedy.
    """
    if pipeline * tensor * data == 1:
        return
    degrees = {"tensor": tensor, "data": data, "distributed_optimizer": distributed_optimizer}
    num_queues = _number(environment[VARIABLE]) if VARIABLE in environment else _DEFAULT
    implicit_order = environment.get(IMPLICIT_ORDER, "0")
    in_one_order = (
        f"{IMPLICIT_ORDER} is {implicit_order}, so that NCCL orders all communication as it is launched, but ranks "
        "of this job launch it in different orders and may hang; unset it"
    )
    if schedule.residency is not None or schedule.swaps:
        # No proof shows which queues the copies between device and host may share with reductions and transfers.
        if implicit_order != "0":
            raise ValueError(in_one_order)
        if num_queues < MOST:
            copied = "activations" if schedule.swaps else "weights and gradients"
            raise ValueError(
                f"{VARIABLE} is {num_queues}, but {flag} copies {copied} "
                "beside computations, and streams that share a hardware queue block each other; export "
                f"{MOST} ({_LOSS})"
            )
        return
    program = _smallest_program(schedule, max_microbatches, moves_activations=moves_activations)
    if implicit_order != "0" and (program.num_ranks > 1 or may_deadlock(program, **degrees)):
        raise ValueError(in_one_order)
    if not launches_beside(program):
        return
    beside = "moves of activations" if any(program.num_evictions) else "reductions"
    why = f"{flag} runs {beside} beside computations"
    reduces_scales = reduces_scales and tensor * data > 1
    needed = max(num_streams(program, **degrees)) + reduces_scales
    if num_queues == 1:
        raise ValueError(
            f"{VARIABLE} is 1, but {why}: streams that share one hardware queue block each other, and the job may "
            f"hang; export {MOST} ({_LOSS})"
        )
    if num_queues < needed and (reduces_scales or may_deadlock(program, **degrees)):
        remedy = f"export {MOST}" if needed <= MOST else "CUDA gives at most 32, so put fewer stages on each rank"
        raise ValueError(
            f"{VARIABLE} is {num_queues}, but {why}, and a rank has {needed} streams: those that share a hardware "
            f"queue block each other, and the job may hang; {remedy}"
        )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST:
        raise ValueError(f"{VARIABLE} is '{text}', not a whole number from 1 to {MOST}; export {MOST}")
    return int(text)


def _smallest_program(schedule: PipelineSchedule, max_microbatches: int, *, moves_activations: bool) -> Program:
    """A short program with the kinds of launches of the job: two of the smallest batches that the schedule accepts.

    The program moves activations if the job does.
    """
    for num_microbatches in range(1, max_microbatches + 1):
        try:
            schedule.validate(num_microbatches)
        except ValueError:
            continue
        if bool(schedule.evicting_ranks((num_microbatches,))) == moves_activations:
            return schedule.build((num_microbatches,) * 2)
    raise AssertionError("the job's own batches are among them")
