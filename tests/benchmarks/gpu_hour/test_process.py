"""The process of a part that trains on one device."""

import json

import pytest

from benchmarks.gpu_hour import process
from tests import workers


def test_without_cuda_a_part_says_so(tmp_path):
    """One sentence that says what to do, and nothing is run or written."""
    with pytest.raises(SystemExit, match="no CUDA device is there; give --rehearse") as ended:
        process.main("A part.", lambda result: pytest.fail("it ran"), ["--json", str(tmp_path / "found.json")])
    assert str(ended.value).startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_a_command_runs_its_part_and_leaves_no_group(tmp_path):
    """The part has megatron.core's groups, its file says that it is a rehearsal, and no group is left."""
    path = tmp_path / "found.json"
    workers.run(1, "tests.benchmarks.gpu_hour.test_process:_command", path=str(path))
    assert json.loads(path.read_text()) == {"rehearsal": True, "lines": ["one rank"], "figures": {"ranks": 1}}


def _command(path: str) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()

    def run(result) -> None:
        from megatron.core import parallel_state

        assert dist.get_backend() == "gloo"
        result.add("one rank", ranks=parallel_state.get_pipeline_model_parallel_world_size())

    process.main("A part.", run, ["--json", path, "--rehearse"])
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool ends a group of its own
