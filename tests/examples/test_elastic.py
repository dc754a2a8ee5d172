"""The example of a pipeline that shrinks while it trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_changes_come_in_a_short_run_too(tmp_path):
    """examples/elastic.sh with three epochs in place of twenty: three changes, the last well before the end, and a
    picture."""
    pytest.importorskip("sklearn")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OUTPUT": str(tmp_path), "PYTHONPATH": str(ROOT), "EPOCHS": "3", "PATH": path}
    subprocess.run(["bash", str(ROOT / "examples/elastic.sh")], check=True, timeout=500, env=environment)
    records = [json.loads(line) for line in (tmp_path / "elastic.jsonl").read_text().splitlines()]
    changes = [each for each in records if "frozen_layers" in each]
    assert [(each["frozen_layers"], each["pipeline_ranks"]) for each in changes] == [(3, 4), (5, 2), (6, 1)]
    last = max(each["iteration"] for each in records)
    assert changes[-1]["iteration"] < 0.9 * last and any("test_accuracy" in each for each in records)
    assert (tmp_path / "changes.png").exists()
