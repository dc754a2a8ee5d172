"""The comparison with the peers: all contenders train the same model on the same data."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import real_compute

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--hidden-size 32 --heads 2 --layers 1 --seq-length 16 --micro-batch-size 1 --vocab-size 64 "
    "--microbatches 2 4 --rounds 2 --microbatches-per-round 4"
)


@pytest.mark.parametrize(
    ("again", "delayed", "said"),
    [  # the shares are, in order: of the limit 1, 1, 1, 1, 1 and of 2bw 0.5, 0.8, 1, 1, 1
        (
            (1.0, 2.0, 1.0, 4.0, 1.0),
            (2.0, 2.5, 1.0, 4.0, 1.0),
            "100.0%, of 2bw 80.0%, which is 80.0% of that; 90% is m",
        ),
        # 0.5, 0.8, 1, 1, 1.25 and the same
        ((2.0, 2.5, 1.0, 4.0, 0.8), (2.0, 2.5, 1.0, 4.0, 0.8), "80.0%, which is 100.0% of that; 90% cannot be re"),
        # 1, 1, 1, 1, 1 and 0.5, 1, 1, 1, 1: a single bad round is no quartile
        ((1.0, 2.0, 1.0, 4.0, 1.0), (2.0, 2.0, 1.0, 4.0, 1.0), "100.0%, which is 100.0% of that; 90% is reached"),
    ],
)
def test_a_bar_is_judged_by_what_the_limit_itself_reaches(again, delayed, said):
    """Shares are of the limit within each round, whose batches take 1, 2, 1, 4 and 1 seconds."""
    seconds = {"limit": [1.0, 2.0, 1.0, 4.0, 1.0], "limit again": list(again), "2bw": list(delayed)}
    assert said in real_compute.judgement(seconds, bar=0.9)
    del seconds["2bw"]
    assert "2bw" not in real_compute.judgement(seconds)
    assert real_compute.lower_quartile([1.0], [2.0]) == 0.5


@pytest.mark.full
def test_contenders_compute_the_same(tmp_path):
    """The first batch has one loss for all; after it, everyone that flushes still agrees (2bw applies gradients one
    batch later), and every contender has a time for each m and round."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks/real_compute.py"), *TINY.split(), "--json", str(result)]
    subprocess.run(command, check=True, timeout=300)
    measured = json.loads(result.read_text())["result"]
    first, last = measured["first_losses"], measured["last_losses"]
    peers = {"library 2bw", "library flush", "megatron.core 1F1B", "torch 1F1B", "torch GPipe"}
    assert set(first) == {"2bw", "2bw provisional", "flush", *peers}
    assert all(math.isclose(loss, first["flush"], rel_tol=1e-6) for loss in first.values())
    assert all(math.isclose(loss, last["flush"], rel_tol=1e-5) for name, loss in last.items() if "2bw" not in name)
    for seconds in measured["seconds"].values():
        assert set(seconds) == {"limit", "limit again", *first}
        assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())


@pytest.mark.full
def test_some_contenders_alone(tmp_path):
    """--contenders leaves the others out, in the table too; a name that nobody has is one sentence."""
    command = [sys.executable, str(ROOT / "benchmarks/real_compute.py"), *TINY.split(), "--contenders"]
    done = subprocess.run([*command, "limit", "2bw", "2bw provisional"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "2bw provisional over 2bw" in done.stdout and "GPipe" not in done.stdout
    assert done.stdout.count("lower quartile of the limit itself") == 2  # numbers of microbatches
    done = subprocess.run([*command, "limit", "2BW"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "there is no contender 2BW" in done.stderr
