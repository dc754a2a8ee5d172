"""The number of hardware queues that a job needs: CUDA_DEVICE_MAX_CONNECTIONS.

Problem: Megatron's scripts export 1. If reductions or moves of activations run beside computations, streams that share
a hardware queue block one another, and the job may hang (see `hardware_queues`).

Solution: 1 is refused for such a schedule, and so is any number below a rank's number of streams if the job may hang.
With weights on the host, CUDA's largest number is required. The program shows which of these cases applies. The
functions are pure: the environment is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.pipeline.check.hardware_queues import launches_beside, may_deadlock, num_streams
from megatron.pipeline.program.program import Program

if TYPE_CHECKING:
    from megatron.pipeline.schedules import PipelineSchedule

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
            proof shows which queue that may share with others.

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
    if schedule.residency is not None:
        # No proof shows which queues the copies between device and host may share with reductions and transfers.
        if implicit_order != "0":
            raise ValueError(in_one_order)
        if num_queues < MOST:
            raise ValueError(
                f"{VARIABLE} is {num_queues}, but {flag} copies weights and "
                "gradients beside computations, and streams that share a hardware queue block each other; export "
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
    if not text.isdigit() or not 1 <= int(text) <= MOST:
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
