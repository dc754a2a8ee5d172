"""A rank that fails does not leave the others waiting."""

import copy
import json
import subprocess
import sys
import time

import pytest
import torch

from megatron.pipeline import Pipeline
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from tests import workers
from tests.pipeline.library import library_cases

CASES = "tests.pipeline.library.library_cases"


def test_a_failing_rank_ends_the_job_in_seconds():
    """A module that raises in the third batch ends both processes, though the other one's modules are well."""
    start = time.monotonic()
    with pytest.raises(workers.WorkerError) as failure:
        workers.run(2, f"{CASES}:with_a_failing_module", timeout=100, grace=30)
    assert str(failure.value).count("died with exit code 1") == 2
    assert time.monotonic() - start < 60  # the patience of transfers is ten minutes


def test_the_launcher_is_told_what_failed(tmp_path, monkeypatch):
    """Outside of a with block the exception is the caller's, and torchrun's summary has its sentence."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    module = library_cases.Failing(library_cases.WIDTH, library_cases.WIDTH)
    pipeline = Pipeline(module, "2bw", 4, loss=library_cases.loss_of, optimizer=library_cases.make_optimizer)
    with pytest.raises(RuntimeError, match="the ninth is too many"):
        for index in range(3):
            pipeline.step(library_cases.data(index, plain=True))
    said = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert said == "rank 0 (stage 0) failed in 0F8@1: RuntimeError: the ninth is too many"


@pytest.mark.parametrize("fails_in", ["_predict", "step"])
def test_a_failed_pipeline_closes_with_the_weights_of_its_steps(monkeypatch, fails_in):
    """An error behind a step that was put off, and one before a step: weights and state are those of all steps made.

    With one stage the weights of 2bw are predicted from whole batches, so a loop over the batches takes the same steps.
    """
    made = []

    def make_optimizer(parameters):
        made.append(torch.optim.AdamW(parameters, lr=0.1))
        return made[-1]

    module = torch.nn.Linear(8, 8)
    alone = copy.deepcopy(module)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(6)]
    pipeline = Pipeline(module, "2bw", 4, loss=torch.nn.functional.mse_loss, optimizer=make_optimizer, provisional=True)
    called = getattr(ModuleUpdate, fails_in)

    def fails(self, version, *args, **options):
        if version == 5:
            raise RuntimeError("out of memory")
        return called(self, version, *args, **options)

    monkeypatch.setattr(ModuleUpdate, fails_in, fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        for batch in batches:
            pipeline.step(batch)
    pipeline.close()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for inputs, targets in batches[:4]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs), targets).backward()
        optimizer.step()
    state, expected = (list(each.state.values()) for each in (made[0], optimizer))
    assert [float(each["step"]) for each in state] == [float(each["step"]) for each in expected] == [4.0, 4.0]
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(RuntimeError, match="has failed; make another"):
        pipeline.step(batches[5])


SCRIPT = """
import torch
import torch.distributed as dist
from megatron.pipeline import Pipeline

dist.init_process_group("gloo")
pipeline = Pipeline(torch.nn.Linear(8, 8), schedule="2bw", num_microbatches=4, loss=torch.nn.functional.mse_loss,
                    optimizer=torch.optim.AdamW)
for step in range(4):
    report = pipeline.step((torch.randn(8, 8), torch.randn(8, 8)))
print("the last is", report.batch)
"""


@pytest.mark.full
def test_a_script_need_not_close(tmp_path):
    """A script that ends with a batch under way ends well on both ranks."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert done.stdout.count("the last is 2") == 2
