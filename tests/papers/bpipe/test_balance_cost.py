"""The cost of moves without a clock: what runs is the program, and the simulator speaks first."""

import math
from unittest.mock import patch

import pytest

from megatron.pipeline.simulate import Costs, simulate
from papers.bpipe import balance_cost
from tests.benchmarks.test_emulated import rows_of
from tests.pipeline.simulate.programs import build
from tests.pipeline.simulate.test_pair_moves import spans_of


@pytest.mark.full
def test_every_contender_has_a_prediction_and_its_times(tmp_path):
    """The quick form: `flush` and `bpipe` in pairs, asynchronous and synchronous, execute their programs within the
    bound, and what overlaps is predicted to add nothing, what does not to add something.
    """
    rows = rows_of("papers.bpipe.balance_cost", "--smoke --scopes none", tmp_path)
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


def test_synchronous_moves_stop_the_evictor():
    """The computation after an EVICT or a LOAD starts when that is complete; the acceptor waits for nothing, and moves
    that take no time change nothing.
    """
    synchronous, bpipe = build("bpipe", 4, (8,)), build("bpipe", 4, (8,))  # the graph of a program is kept with it
    with patch("megatron.pipeline.program.lane_order.MoveOrder", balance_cost.SynchronousMoves):
        timeline, without_time = simulate(synchronous, Costs(evict=0.5)), simulate(synchronous)
    evictor = spans_of(timeline, 0)
    for move, computation in (("0EVICT1", "0F2"), ("0EVICT3", "0B0"), ("0LOAD1", "0F4")):
        assert evictor[computation][0] >= evictor[move][1]
    assert evictor["0F2"] == [2.5, 3.5]
    assert spans_of(timeline, 3)["3F0"][0] == 3.0  # as without moves
    assert timeline.makespan > simulate(bpipe, Costs(evict=0.5)).makespan
    assert without_time.makespan == simulate(bpipe).makespan
