"""--profile with PyTorch's profiler records the iterations asked for, on the ranks asked for."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron.trainer.report.profiler import Profiler


def profiled(folder, *, rank: int, iterations: int) -> list[str]:
    """Names of the recorded events of a run that multiplies in each iteration, iteration i under its own label."""
    args = SimpleNamespace(
        profile=True,
        profile_ranks=[1],
        rank=rank,
        profile_step_start=2,
        profile_step_end=4,
        use_pytorch_profiler=True,
        tensorboard_dir=str(folder),
    )
    profiler = Profiler(args)
    for iteration in range(iterations):
        profiler.before(iteration)
        with torch.profiler.record_function(f"iteration {iteration}"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        profiler.after(iteration + 1)
    profiler.close()
    files = list(folder.rglob("*.json"))
    assert len(files) <= 1
    return [event["name"] for file in files for event in json.loads(file.read_text())["traceEvents"]]


@pytest.mark.parametrize("iterations", [6, 3])
def test_the_iterations_asked_for(tmp_path, iterations):
    """Start is included and end is not; a run that ends before still writes what it has."""
    names = {name for name in profiled(tmp_path, rank=1, iterations=iterations) if name.startswith("iteration")}
    assert names == {f"iteration {iteration}" for iteration in range(2, min(4, iterations))}


def test_other_ranks_record_nothing(tmp_path):
    """A rank that is not in --profile-ranks writes no file."""
    assert profiled(tmp_path, rank=0, iterations=6) == []
