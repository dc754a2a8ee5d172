"""The sweep over schedules, learning rates and seeds, with few iterations."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = {"ITERATIONS": "4", "SEEDS": "1", "RATES": "1e-3", "OUTPUT": str(output), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "convergence_sweep.sh")], env={**os.environ, **words, **environment},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=500,
    )  # fmt: skip


@pytest.mark.full
def test_replicas_share_the_batch(tmp_path):
    """Predictions from one replica and from all, on two stages with two replicas, beside flush; then nothing is
    left to train.
    """
    asked = {"REPLICAS": "2", "SCHEDULES": "flush provisional reduced"}
    done = run(tmp_path, **asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stages read 3, 4 of 4 microbatches of each replica" in done.stdout
    assert "stages read 3, 4 of 4 microbatches, means over the replicas" in done.stdout
    names = {"flush_lr1e-3_seed1.jsonl", "provisional_lr1e-3_seed1.jsonl", "reduced_lr1e-3_seed1.jsonl"}
    assert {path.name for path in tmp_path.glob("*.jsonl")} == names and (tmp_path / "sweep.png").exists()
    assert "== " not in run(tmp_path, **asked).stdout


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [({"MODEL": "t5"}, "MODEL is t5"), ({"REPLICAS": "3"}, "REPLICAS is 3, which does not divide microbatches of 4")],
    ids=str,
)
def test_what_is_refused(tmp_path, environment, sentence):
    done = run(tmp_path, **environment)
    assert done.returncode == 1 and sentence in done.stderr and not any(tmp_path.iterdir())
