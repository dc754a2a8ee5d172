"""A rank that fails does not leave the others waiting."""

import subprocess
import sys
import time

import pytest

from tests import workers

CASES = "tests.pipeline.library.library_cases"


def test_a_failing_rank_ends_the_job_in_seconds():
    """A module that raises in the third batch ends both processes, though the other one's modules are well."""
    start = time.monotonic()
    with pytest.raises(workers.WorkerError) as failure:
        workers.run(2, f"{CASES}:with_a_failing_module", timeout=100)
    assert str(failure.value).count("died with exit code 1") == 2
    assert time.monotonic() - start < 60  # the patience of transfers is ten minutes


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
