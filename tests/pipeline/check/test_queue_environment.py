"""CUDA_DEVICE_MAX_CONNECTIONS: which values are refused, of a schedule and the job's degrees alone."""

import pytest

from megatron.pipeline.check.hardware_queues import require_hardware_queues
from megatron.pipeline.schedules import Schedule

JOB = {"tensor": 2, "data": 2, "distributed_optimizer": False, "max_microbatches": 16, "moves_activations": False}
LOSS = (
    "(Megatron's scripts set 1 to have tensor-parallel communication launched ahead of the GEMM that it overlaps, and "
    "some of that overlap is lost)"
)
CUDA = "CUDA_DEVICE_MAX_CONNECTIONS"
NCCL = "NCCL_LAUNCH_ORDER_IMPLICIT"


def require(name: str, environment: dict[str, str], *, stages: int = 4, **job) -> None:
    """What is said of a job of that preset."""
    job = {**JOB, "pipeline": stages, **job}
    schedule = Schedule.preset(name, num_stages=stages, data_parallel=job["data"] > 1)
    require_hardware_queues(schedule, environment, flag=f"--schedule {name}", **job)


@pytest.mark.parametrize(
    ("name", "job", "value", "sentence"),
    [
        ("2bw", {}, "1", "is 1, but --schedule 2bw runs reductions beside computations: streams that share one "
         f"hardware queue block each other, and the job may hang; export 32 {LOSS}"),
        ("2bw", {}, "10", "is 10, but --schedule 2bw runs reductions beside computations, and a rank has 11 streams: "
         "those that share a hardware queue block each other, and the job may hang; export 32"),
        ("2bw", {}, None, "is 8, but --schedule 2bw runs reductions beside computations, and a rank has 11 streams: "
         "those that share a hardware queue block each other, and the job may hang; export 32"),
        ("2bw", {"distributed_optimizer": True}, "11", "is 11, but --schedule 2bw runs reductions beside computations, "
         "and a rank has 12 streams: those that share a hardware queue block each other, and the job may hang; "
         "export 32"),
        ("bpipe", {"moves_activations": True, "tensor": 1, "data": 1}, "1", "is 1, but --schedule bpipe runs moves of "
         "activations beside computations: streams that share one hardware queue block each other, and the job may "
         f"hang; export 32 {LOSS}"),
        ("l2l", {"stages": 1}, "31", "is 31, but --schedule l2l copies weights and gradients beside computations, and "
         f"streams that share a hardware queue block each other; export 32 {LOSS}"),
        ("2bw", {}, "33", "is '33', not a whole number from 1 to 32; export 32"),
        ("2bw", {}, "-1", "is '-1', not a whole number from 1 to 32; export 32"),
        ("2bw", {}, "many", "is 'many', not a whole number from 1 to 32; export 32"),
        ("2bw", {}, "3²", "is '3²', not a whole number from 1 to 32; export 32"),
    ],
)  # fmt: skip
def test_too_few_queues_are_refused(name, job, value, sentence):
    """In one sentence: value, reason and remedy, with the words that chose the schedule."""
    with pytest.raises(ValueError) as caught:
        require(name, {} if value is None else {CUDA: value}, **job)
    assert str(caught.value) == f"{CUDA} {sentence}"


@pytest.mark.parametrize(
    ("name", "job", "value"),
    [
        ("2bw", {}, "11"),
        ("2bw", {"distributed_optimizer": True}, "12"),
        ("flush", {}, "1"),
        ("bpipe", {"max_microbatches": 1}, "1"),  # nothing to move
        ("l2l", {"stages": 1}, "32"),
        ("2bw", {"stages": 1, "tensor": 1, "data": 1}, "1"),  # waits for nobody
        ("2bw", {"stages": 1, "tensor": 1}, "2"),  # replicas alone wait for nobody in their computations
    ],
)
def test_what_is_proved_or_cannot_hang_is_let_through(name, job, value):
    """As many queues as streams, and any number where one thread launches at a time."""
    require(name, {CUDA: value}, **job)


@pytest.mark.parametrize("name", ["2bw", "flush", "l2l"])
def test_nccl_must_not_order_what_is_launched(name):
    """Its order over communicators wants one order on all ranks, which the ranks of a pipeline do not have."""
    stages = 1 if name == "l2l" else 4
    with pytest.raises(ValueError) as caught:
        require(name, {CUDA: "32", NCCL: "1"}, stages=stages)
    assert str(caught.value) == (
        f"{NCCL} is 1, so that NCCL orders all communication as it is launched, but ranks of this job launch it in "
        "different orders and may hang; unset it"
    )
    require(name, {CUDA: "32", NCCL: "0"}, stages=stages)


def test_the_program_looked_at_is_one_that_the_schedule_takes():
    """Interleaved wants a multiple of its ranks, bpipe as many microbatches as make it move something."""
    schedule = Schedule.preset("interleaved", num_stages=8, num_virtual_stages=2, data_parallel=True)
    job = {**JOB, "pipeline": 4, "flag": "--schedule interleaved"}
    require_hardware_queues(schedule, {CUDA: "1"}, **job)
    with pytest.raises(ValueError, match="runs moves of activations beside computations, and a rank has"):
        require("bpipe", {CUDA: "4"}, moves_activations=True, max_microbatches=64)
