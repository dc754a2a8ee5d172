"""A new word is a row, a proof and a method: three files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.house.count import files_of_words
from tests.pipeline.program.new_words import EDITS

ROOT = Path(__file__).resolve().parents[3]


def test_three_words_that_touch_three_files():
    """A copy to the host, the copy back and the wait for it, each with a row, a rule and a method: a pass emits them,
    and they are read, proved, timed, counted in memory, drawn and run.
    """
    assert len(EDITS) == 3
    command = [sys.executable, "-m", "tests.pipeline.program.new_words"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    found = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    out = json.loads(found.stdout)
    assert out["words"] == ["AWAIT", "PARK", "UNPARK"] and out["reads"]
    for name in ("offloaded", "saved", "curve"):  # as with the project's own words
        assert out[name][0] == out[name][1], name
    assert out["refused"] == [
        "its input is on its way, and no AWAIT stands before it",
        "its input is on the host, and no RELOAD stands before it",
    ]
    assert out["spans"] == {"PARK": [0.5], "UNPARK": [20.0]}
    assert out["seconds"][0] > out["seconds"][1], "recomputes wait for copies that take time"
    assert "wait for an input, first to last stage of the rank" in out["legend"]
    assert "wait for an input, first to last stage of the rank" in out["signs"]
    lanes = [line for line in out["text"].splitlines() if "|1--" in line]
    assert {line[: len("host to device")] for line in lanes} >= {"host to device", "device to host"}
    assert out["run"], "the trace of the run is the program"


def test_few_files_name_a_word():
    """The table, the pass that emits it, and its proof; of PREDICT also the policy whose weights it makes, of EVICT the
    proofs of memory, of computations and of the device's order, too. All others ask rows.
    """
    files = files_of_words(ROOT, sorted(ROOT.glob("megatron/**/*.py")))
    assert len(files["HOLD"]) <= 3 and len(files["PREDICT"]) <= 4 and len(files["EVICT"]) <= 6
