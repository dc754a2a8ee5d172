"""The checker is quick to start and quick to run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron.pipeline.check import check
from megatron.pipeline.schedules import Schedule

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=True, text=True, capture_output=True, env=environment
    ).stdout


def test_a_large_program_is_proved_in_seconds():
    """p=64, m=512: 390,000 instructions take a few CPU seconds, building included."""
    start = time.process_time()
    report = check(Schedule.preset("2bw", num_stages=64).build((512,) * 2))
    assert report.num_instructions > 380_000
    assert time.process_time() - start < 20


def test_it_imports_neither_torch_nor_megatron_core():
    """Plans are checked on machines and in moments that have no torch."""
    code = "import sys, megatron.pipeline.check; print({'torch', 'megatron.core'} & set(sys.modules))"
    assert run("-c", code).strip() == "set()"


def test_the_benchmark_reports_growth():
    """Piped, it prints one JSON object with the fitted exponents and a line for each program."""
    report = json.loads(
        run("benchmarks/program_scale.py", "--stages", "2", "4", "--microbatches", "8", "64", "--repeat", "1")
    )
    assert [(each["num_stages"], each["num_microbatches"]) for each in report["programs"]] == [
        (2, 8),
        (2, 64),
        (4, 8),
        (4, 64),
    ]
    assert set(report) >= {"schedule", "exponent", "build_exponent", "check_exponent"}
