"""The cost of moves without a clock: what runs is the program, and the simulator speaks first."""

import math
import subprocess
import sys

import pytest

from tests.benchmarks.test_emulated import BENCHMARKS, rows_of


@pytest.mark.full
def test_every_contender_has_a_prediction_and_its_times(tmp_path):
    """The quick form: `flush` and `bpipe` in pairs, asynchronous and synchronous, execute their programs within the
    bound, and what overlaps is predicted to add nothing, what does not to add something.
    """
    rows = rows_of("balance_cost", "--smoke --scopes none", tmp_path)
    of = {row["contender"]: row for row in rows}
    assert list(of) == ["without", "asynchronous", "synchronous"]
    assert [len(row["measured"]) for row in rows] == [2, 2, 1]
    for row in rows:
        assert row["executed_is_program"]
        assert min(row["measured"]) > row["predicted"] * 0.999  # stages sleep at least as long as told
        assert len(row["added"]) == len(row["measured"]) == len(row["reference"])
        assert 0 < row["busy"] <= 1.0
        assert math.isclose(row["transfer_over_forward"], 22.48 / 36.32)
    assert math.isclose(of["without"]["predicted"], 11 * (3.632 + 7.412) / 1e3)
    assert math.isclose(of["asynchronous"]["predicted_added"], 0, abs_tol=1e-9)
    assert of["synchronous"]["predicted_added"] > 0.01
    assert of["without"]["saved"] == [4, 3, 2, 1]
    assert max(of["asynchronous"]["saved"] + of["synchronous"]["saved"]) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("--stages 2", "nothing to balance"), ("--microbatches 4", "at least p each"), ("--stretch 0", "more than 0")],
)
def test_settings_out_of_range_are_refused(arguments, reason):
    """A wrong setting ends in one sentence."""
    command = [sys.executable, str(BENCHMARKS / "balance_cost.py"), *arguments.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and reason in ended.stderr
