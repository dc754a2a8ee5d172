"""A rank that fails does not leave the others waiting."""

import json
import subprocess
import sys
import time

import pytest

from megatron.pipeline import Pipeline
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
