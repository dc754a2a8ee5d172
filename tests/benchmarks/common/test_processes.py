"""The processes that benchmarks start."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.processes import gathered, run_group, torchrun

pytestmark = pytest.mark.full  # test_emulated.py has such processes


def report(word: str) -> dict:
    return {"word": word, "ranks": gathered(dist.get_rank()), "threads": torch.get_num_threads()}


def fail() -> None:
    raise ValueError("rank 1 cannot") if dist.get_rank() == 1 else SystemExit(0)


def test_a_group_returns_what_rank_0_returns():
    """Each process is a rank of one group, with a thread."""
    assert run_group(2, report, "a") == {"word": "a", "ranks": [0, 1], "threads": 1}


def test_a_failure_is_told():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 1 cannot"):
        run_group(2, fail)


def test_torchrun_hands_on_flags(tmp_path):
    """As words, whatever they are, to each rank."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').write(sys.argv[2])\n")
    assert torchrun(2, program, f"{tmp_path}/rank", 7, capture_output=True).returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["7", "7"]
