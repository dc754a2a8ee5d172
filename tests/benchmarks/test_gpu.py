"""benchmarks/gpu.py as far as a CPU goes: what it refuses, what it makes of times, and that its processes run."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import gpu
from tests.benchmarks.test_emulated import BENCHMARKS

TINY = (
    "--rounds 2 --batches 2 --layers 1 --hidden-size 32 --heads 2 --seq-length 16 --micro-batch-size 2 --vocab-size 64"
)


def test_without_cuda_it_says_so(monkeypatch, capsys):
    """One sentence, with what to do instead, and status 1."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("gpu.py: error: no CUDA device is there; measure on a machine that has one, or run ")


def test_stages_have_gpus_or_share_one():
    """A stage for each GPU, two where there is one, over NCCL where each has its own; m is checked against them."""
    plain = gpu.parse([])
    assert [gpu.place(plain, number) for number in (1, 2, 4)] == [(2, "gloo"), (2, "nccl"), (4, "nccl")]
    assert gpu.place(gpu.parse(["--stages", "1"]), 1) == (1, "nccl")
    assert gpu.place(gpu.parse(["--stages", "8"]), 4) == (8, "gloo")
    with pytest.raises(ValueError, match="as many as the 4 stages"):
        gpu.place(gpu.parse(["--microbatches", "2"]), 4)


def test_a_shared_gpu_says_nothing_of_speed(monkeypatch, capsys):
    """That is said ahead of the figures and after them, and not where each stage has its own."""
    found = {"seconds": {2: {"flush": [1.0], "2bw": [1.0]}}, "tokens_per_microbatch": 8, "losses": {}, "device": "GPU",
             "torch": "2", "backend": "gloo", "environment": {}, "peak_bytes": [0, 0]}  # fmt: skip
    monkeypatch.setattr(gpu, "measure", lambda *arguments: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for num_gpus, times in ((1, 2), (2, 0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda number=num_gpus: number)
        assert gpu.main(["--stages", "2"]) == 0
        assert (
            capsys.readouterr().out.count("2 stages share 1 GPU and go through host memory; the figures say") == times
        )


def test_ratio_is_of_the_rounds():
    """Tokens/s are of the medians; the ratio is the median of the rounds' ratios, beside (m+p-1)/m."""
    seconds = {"4": {"flush": [2.0, 3.0, 8.0], "2bw": [1.0, 2.0, 2.0]}}
    [row] = gpu.rows_of({"seconds": seconds, "tokens_per_microbatch": 10}, num_stages=2)
    assert row["tokens_per_second"] == {"flush": 40 / 3.0, "2bw": 20.0}
    assert (row["ratios"], row["ideal"]) == ({"2bw over flush": [2.0, 1.5, 4.0]}, 1.25)
    orders = gpu.orders(gpu.SCHEDULES, 4)
    assert orders[0] == orders[2] == orders[1][::-1] and sorted(orders[0]) == sorted(gpu.SCHEDULES)


@pytest.mark.full
def test_its_processes_run_on_a_cpu(tmp_path):
    """Two stages of the tiniest model: the schedules have a time for each m and round, and the same first loss."""
    result = tmp_path / "found.json"
    program = (
        "import gpu, json, sys\n"
        "if __name__ == '__main__':\n"
        "    args = gpu.parse(sys.argv[2:])\n"
        "    found = gpu.measure(args, 2, 'gloo', device='cpu')\n"
        "    open(sys.argv[1], 'w').write(json.dumps(found))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, str(result), *TINY.split(), "--microbatches", "2", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    for times in found["seconds"].values():
        assert set(times) == set(gpu.SCHEDULES) and all(len(each) == 2 and min(each) > 0 for each in times.values())
    flush, delayed, predicted = (found["losses"][name] for name in gpu.SCHEDULES)
    batches = 2 * 2 * 2  # two m, two rounds, two timed batches in each, and those outside of the clock
    assert (len(flush), len(delayed), len(predicted)) == (batches + 4 * 2, batches + 4 * 3, batches + 4 * 3)
    assert flush[0] == delayed[0] == predicted[0] and flush[:4] != delayed[:4] != predicted[:4]
    assert len(gpu.rows_of(found, 2)) == 2 and len(found["peak_bytes"]) == 2
