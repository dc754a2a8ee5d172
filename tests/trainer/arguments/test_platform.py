"""CUDA_DEVICE_MAX_CONNECTIONS: which values a job refuses, by its schedule and degrees, without CUDA."""

import warnings

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.platform import require_hardware_queues
from megatron.trainer.report.log import configure_logging
from megatron.trainer.run import pretraining
from tests.trainer.arguments.command_line import arguments, argv

BATCH = "--global-batch-size 64"  # fills every pipeline of these tests
PIPEDREAM = "--pipeline-schedule pipedream --clip-grad 0 --untie-embeddings-and-output-weights"
FOUR = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2"


def require(flags: str, max_connections: str | None, *, world_size: int = 16, implicit_order: str | None = None):
    """What a run with these flags says to a value."""
    batch = "--global-batch-size 2" if "pipedream" in flags else BATCH
    args = arguments(f"{flags} {batch}", without="--global-batch-size", world_size=world_size)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": max_connections, "NCCL_LAUNCH_ORDER_IMPLICIT": implicit_order}
    require_hardware_queues(args, {name: value for name, value in environment.items() if value is not None})


@pytest.mark.parametrize(
    ("flags", "value", "message"),
    [
        (
            f"--pipeline-schedule 2bw {FOUR}",
            None,
            "is 8, but --pipeline-schedule 2bw .* a rank has 11 streams: .*; export",
        ),
        (f"--pipeline-schedule 2bw {FOUR} --use-distributed-optimizer", "11", "a rank has 12 streams"),
        ("--pipeline-schedule 2bw --use-distributed-optimizer", "4", "a rank has 5 streams"),
        (f"{PIPEDREAM} {FOUR}", "1", "pipedream runs reductions beside computations"),
        ("--pipeline-schedule bpipe --num-layers 8 --pipeline-model-parallel-size 8", "10", "a rank has 11 streams"),
        ("--pipeline-schedule l2l", "31", "is 31, but --pipeline-schedule l2l copies"),
    ],
)
def test_too_few_queues_are_refused(flags, value, message):
    """By what the flags make of a job; the sentences are of tests/pipeline/check/test_queue_environment.py."""
    with pytest.raises(ValueError, match=message):
        require(flags, value)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (f"--pipeline-schedule 2bw {FOUR}", "11"),
        (f"--pipeline-schedule 2bw {FOUR} --use-distributed-optimizer", "12"),
        (f"--pipeline-schedule flush {FOUR} --sequence-parallel", "1"),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-layers 8 --pipeline-model-parallel-size 4", "1"),
        ("--pipeline-schedule bpipe --num-layers 8 --pipeline-model-parallel-size 8", "11"),
        ("--pipeline-schedule bpipe --num-layers 2 --pipeline-model-parallel-size 2", "1"),  # nothing to move
        ("--pipeline-schedule 2bw", "2"),  # replicas alone wait for nobody in their computations
    ],
)
def test_what_is_proved_or_cannot_hang_is_let_through(flags, value):
    """As many queues as streams under 2bw and with moves; any where one thread launches, Megatron's 1 included."""
    require(flags, value)


def test_one_gpu_needs_no_queues():
    """It waits for nobody."""
    require("--pipeline-schedule 2bw", "1", world_size=1)


def test_nccl_must_not_order_what_is_launched():
    """Refused for pipelines, and without one for 2bw alone."""
    with pytest.raises(ValueError, match=r"NCCL_LAUNCH_ORDER_IMPLICIT is 1, so that NCCL orders .*; unset it"):
        require("--pipeline-schedule 2bw --tensor-model-parallel-size 2", "32", implicit_order="1")
    require("--pipeline-schedule flush --tensor-model-parallel-size 2", "32", implicit_order="1")


def test_more_streams_than_cuda_has_queues():
    """Many stages on a rank, and moves beside them: the remedy is fewer stages."""
    flags = "--num-virtual-stages-per-pipeline-rank 8 --num-layers 32 --pipeline-model-parallel-size 4"
    with pytest.raises(ValueError, match=r"a rank has 3. streams: .* so put fewer stages on each rank"):
        require(f"{flags} --balance-activations", "32")


def test_a_run_over_nccl_asks(monkeypatch):
    """A rank that is to use NCCL reads its environment; one over gloo does not."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for chosen in ("nccl", "gloo"):
        args = parse_args(argv("--pipeline-schedule 2bw --pipeline-model-parallel-size 2"))
        validate_args(args, world_size=2)
        monkeypatch.setattr(pretraining.initialize, "choose_device", lambda _, chosen=chosen: (0, chosen))
        if chosen == "nccl":
            with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
                pretraining.complete(args, [])
        else:
            pretraining.complete(args, [])


def test_advice_that_would_hang_the_job_is_not_given():
    """megatron.core's warning wants 1 from every user with tensor parallelism; others still come."""
    with warnings.catch_warnings(record=True) as caught:
        configure_logging(None)
        warnings.warn("When using sequence parallelism it is recommended to set the environment variable "
                      "CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup", stacklevel=1)  # fmt: skip
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in caught] == ["something else"]
