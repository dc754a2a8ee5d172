"""The benchmark of asynchronous pipelines runs, and its bound holds: no rank is faster than its own work."""

import json

import pytest

from papers.ftpipe import asynchronous


@pytest.mark.full
def test_emulated_stages_of_a_graph_execute_the_program(tmp_path, capsys):
    path = tmp_path / "found.json"
    small = ["--ranks", "2", "--forward", "0.002", "--payload", "4096", "--repeats", "1", "--json", str(path)]
    assert asynchronous.main(small) == 0
    found = json.loads(path.read_text())
    (seconds,) = found["2 ranks"]
    assert seconds >= 0.98 * asynchronous.of_busiest_rank(asynchronous.mixed(2, 2, 0.002))
    row, mixed = (asynchronous.of_figure_4(method, 0.002) for method in ("sequential", "mixed"))
    assert asynchronous.of_busiest_rank(row) / asynchronous.of_busiest_rank(mixed) == pytest.approx(880 / 520)
    assert found["figure 4, mixed"][0] >= 0.98 * asynchronous.of_busiest_rank(mixed)
    assert found["gpipe"][0] > found["ftpipe"][0] > 0.98 * 4 * 0.006
    assert "gpipe takes" in capsys.readouterr().out


def test_contenders_are_what_is_said():
    """Two stages on each rank, edges that skip, one microbatch a batch; the simulator finds little idle time."""
    for num_ranks in (4, 8):
        contender = asynchronous.mixed(num_ranks, num_ranks, 0.02)
        places = contender.schedule.rank_of_stage
        assert all(places.count(rank) == 2 for rank in range(num_ranks))
        assert not contender.schedule.graph.is_chain
        assert 1.0 - 1e-9 <= asynchronous.simulated(contender) / asynchronous.of_busiest_rank(contender) < 1.01
