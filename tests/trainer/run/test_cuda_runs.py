"""pretrain_gpt.py on GPUs, as a user starts it: a launcher, an exit status, metrics."""

import functools
import importlib.util
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.documents import counted
from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.reliability import launch

FLAGS = (
    "--hidden-dropout 0 --attention-dropout 0 --transformer-impl local --use-cpu-initialization --train-iters 6 "
    "--global-batch-size 8 --adam-eps 1e-5"
)
"""Weights that do not depend on the device, no random numbers. Adam's epsilon keeps a gradient that should be zero, and
is rounding, from becoming a step."""
EXACT = FLAGS.split()
TOLERANCE = 1e-4
"""Relative, of losses. CPU and GPU add up FP32 products in different orders, which is 1e-6 of a sum of hundreds; six
steps spread it. The CPU's own layouts, which differ in such orders only, stay within a tenth of this
(test_layouts_of_a_cpu)."""
GIB = 1 << 30


def visible(count: int) -> str:
    """The first `count` of the GPUs that this process may use, as a job's CUDA_VISIBLE_DEVICES; skips without them."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, and torch sees {torch.cuda.device_count()}")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(count)]
    return ",".join(names[:count])


def run(directory: Path, num_ranks: int, *flags: str, gpus: str, model=None) -> tuple[launch.Outcome, dict[int, dict]]:
    """A job on these GPUs ("": on the CPU) that ends well: its outcome, and iteration -> metrics."""
    command = launch.training_command(
        num_ranks, *flags, "--metrics-file", "metrics.jsonl", model=model or (*launch.TINY, *launch.SYNTHETIC)
    )
    directory.mkdir()
    at_home = {"GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": "127.0.0.1"}  # a host's name may be no address
    with launch.Job(command, directory=directory, CUDA_VISIBLE_DEVICES=gpus, **at_home) as job:
        outcome = job.wait(timeout=300)
    outcome.assert_succeeded()
    return outcome, launch.metrics(directory / "metrics.jsonl")


def losses(metrics: dict[int, dict]) -> list[float]:
    return [metrics[iteration]["lm_loss"] for iteration in sorted(metrics)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Losses of a job on the CPU by schedule and number of stages."""

    @functools.cache
    def found(schedule: str, num_ranks: int = 1) -> list[float]:
        directory = tmp_path_factory.mktemp("cpu") / "job"
        return losses(run(directory, num_ranks, *EXACT, "--pipeline-schedule", schedule, gpus="")[1])

    return found


def assert_ends_in_order(outcome: launch.Outcome) -> None:
    """torch warns where a process ends with groups that it has not ended."""
    complaints = [line for line in outcome.output.splitlines() if "destroy" in line.lower()]
    assert not complaints, complaints


@pytest.mark.full
def test_layouts_of_a_cpu(on_cpu):
    """What the tolerance rests on: four stages with tied embeddings, whose gradients add up in another order, differ
    from one by less than a tenth of it, and a delayed schedule by more than ten times it.
    """
    one, four, delayed = on_cpu("flush"), on_cpu("flush", 4), on_cpu("2bw")
    assert len(one) == 6 and four == pytest.approx(one, rel=TOLERANCE / 10)
    assert max(abs(a / b - 1) for a, b in zip(one, delayed, strict=True)) > 10 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["flush", "2bw", "l2l"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_gpu_trains_as_a_cpu(tmp_path, on_cpu, num_ranks, schedule):
    """One rank over NCCL, or two and four stages that share a GPU and go through host memory: losses of the CPU, exit
    status 0, nothing left behind, and no group that was not ended.
    """
    outcome, metrics = run(tmp_path / "job", num_ranks, *EXACT, "--pipeline-schedule", schedule, gpus=visible(1))
    assert f"{counted(num_ranks, 'rank')} on cuda ({'nccl' if num_ranks == 1 else 'gloo'})" in outcome.output
    assert losses(metrics) == pytest.approx(on_cpu(schedule), rel=TOLERANCE)
    assert_ends_in_order(outcome)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, "--pipeline-schedule flush"),
        (2, "--pipeline-schedule 2bw"),
        (2, "--pipeline-schedule 2bw --pipeline-model-parallel-size 1 --use-distributed-optimizer"),
        (2, "--pipeline-schedule 2bw --pipeline-model-parallel-size 1 --2bw-single-gradient-buffer --clip-grad 0"),
        (2, "--pipeline-schedule 2bw --pipeline-model-parallel-size 1 --tensor-model-parallel-size 2"),
        (2, "--pipeline-schedule l2l --l2l-stash host"),
        (2, "--pipeline-schedule l2l --pipeline-model-parallel-size 1 --clip-grad 0"),
        (2, "--pipeline-schedule l2l --pipeline-model-parallel-size 1 --l2l-fetch shares"),
        (2, "--pipeline-schedule l2l --pipeline-model-parallel-size 1 --tensor-model-parallel-size 2"),
        (4, "--pipeline-schedule 2bw"),
        (4, "--pipeline-schedule bpipe"),
        (4, "--pipeline-schedule 2bw --pipeline-model-parallel-size 2 --2bw-single-gradient-buffer --clip-grad 0"),
        (4, "--pipeline-schedule 2bw --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    ],
    ids=str,
)
def test_gpus_over_nccl_train_as_a_cpu(tmp_path, num_ranks, flags):
    """Stages, replicas and tensor ranks with a GPU each: losses of the same job on the CPU, exit status 0, and no group
    that was not ended. A job that hangs is ended after two minutes, and says who waits for whom.
    """
    gpus = visible(num_ranks)
    flags = (*EXACT, "--make-vocab-size-divisible-by", "64", "--distributed-timeout-minutes", "2", *flags.split())
    outcome, metrics = run(tmp_path / "gpu", num_ranks, *flags, gpus=gpus)
    assert f"{counted(num_ranks, 'rank')} on cuda (nccl)" in outcome.output
    assert losses(metrics) == pytest.approx(losses(run(tmp_path / "cpu", num_ranks, *flags, gpus="")[1]), rel=TOLERANCE)
    assert_ends_in_order(outcome)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_fused_accumulation_trains_as_unfused(tmp_path, implementation):
    """2bw with gradients that Apex's kernel, or Transformer Engine, adds to the buffer: losses as without, in BF16 to
    its three digits.
    """
    for name, package in (("fused_weight_gradient_mlp_cuda", "Apex's kernels"), ("apex", "Apex")):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {package}, not installed")
    if implementation == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine, which is not installed")
    flags = (*EXACT, "--bf16", "--pipeline-schedule", "2bw", "--transformer-impl", implementation)
    gpus = visible(1)
    outcome, fused = run(tmp_path / "fused", 1, *flags, gpus=gpus)
    if "gradient_accumulation_fusion is off" in outcome.output:
        pytest.skip("needs a Transformer Engine that can be fused under 2bw: training turned fusion off")
    _, plain = run(tmp_path / "plain", 1, *flags, "--no-gradient-accumulation-fusion", gpus=gpus)
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-2)


# Memory.

MIDDLE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 16 --lr 1e-4 --lr-decay-style constant --log-interval 1 --eval-iters 0 "
    "--num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 --transformer-impl local "
    "--train-iters 3 --no-gradient-accumulation-fusion"
)
"""134 million parameters."""
MARGIN = 0.25
"""Share of the estimate, either way: it counts neither what operators need for a moment nor what torch's allocator
rounds."""


def estimate(directory: Path, *flags: str) -> dict:
    """What `--dry-run` says of the memory of the only rank."""
    args = parse_args([*MIDDLE.split(), *flags, "--dry-run", "1", "--dry-run-json", str(directory / "dry.json")])
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        assert run_dry(args, "pretrain_gpt.py") == 0
    return json.loads((directory / "dry.json").read_text())["memory"][0]


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_estimate_is_of_a_job_whose_peak_is_in_a_backward(tmp_path, schedule):
    """What the comparison below rests on: a step's temporary tensors, at most 12 bytes a parameter in FP32, are less
    than the activations that are gone by then, so the peak is where the planner looks for it.
    """
    memory = estimate(tmp_path, "--pipeline-schedule", schedule)
    assert memory["num_parameters"] == pytest.approx(134e6, rel=0.03)
    assert memory["activations_bytes"] > 12 * memory["num_parameters"]
    assert memory["communicators_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["flush", "2bw", "l2l"])
def test_memory_is_what_the_planner_estimates(tmp_path, schedule, record_property):
    """The most that torch has handed out in a run of one rank is within a quarter of the dry run's estimate; both are
    in the report.
    """
    flags = ("--pipeline-schedule", schedule)
    estimated = estimate(tmp_path, *flags)["total_bytes"]
    if torch.cuda.mem_get_info()[0] < 1.5 * estimated:
        pytest.skip(f"needs {1.5 * estimated / GIB:.0f} GiB of free memory on the GPU")
    _, metrics = run(tmp_path / "job", 1, *flags, gpus=visible(1), model=MIDDLE.split())
    measured = metrics[max(metrics)]["peak_memory_bytes"]
    argv = f"{measured / GIB:.2f} GiB, estimated {estimated / GIB:.2f}"
    record_property(f"peak memory, {schedule}", argv)
    print(f"peak memory, {schedule}: {argv}")
    assert abs(measured / estimated - 1) < MARGIN, argv


@pytest.mark.gpu
def test_memory_does_not_grow_with_depth(tmp_path, record_property):
    """Twice the layers under l2l with its stash on the host: the allocator's peaks of later iterations differ by what a
    norm of each weight takes, and the host holds the rest.
    """
    peaks = []
    for layers in (8, 16):
        flags = ("--pipeline-schedule", "l2l", "--l2l-stash", "host", "--num-layers", str(layers))
        _, metrics = run(tmp_path / str(layers), 1, *flags, gpus=visible(1), model=MIDDLE.split()[2:])
        last = metrics[max(metrics)]
        peaks.append(last["device_peak_bytes"][0])
        assert last["host_peak_bytes"][0] > 18 * 0.99 * 12 * 1024**2 * layers
    record_property("device peaks of 8 and 16 layers", str(peaks))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
