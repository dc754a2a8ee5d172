"""The benchmark of asynchronous pipelines runs, and its bound holds: no rank is faster than its own work."""

import json

import pytest

from benchmarks import ftpipe


@pytest.mark.full
def test_emulated_stages_of_a_graph_execute_the_program(tmp_path, capsys):
    path = tmp_path / "found.json"
    small = ["--ranks", "2", "--forward", "0.002", "--payload", "4096", "--repeats", "1", "--json", str(path)]
    assert ftpipe.main(small) == 0
    found = json.loads(path.read_text())
    (seconds,) = found["2 ranks"]
    assert seconds >= 0.98 * ftpipe.of_busiest_rank(ftpipe.mixed(2, 2, 0.002))
    row, mixed = (ftpipe.of_figure_4(method, 0.002) for method in ("sequential", "mixed"))
    assert ftpipe.of_busiest_rank(row) / ftpipe.of_busiest_rank(mixed) == pytest.approx(880 / 520)
    assert found["figure 4, mixed"][0] >= 0.98 * ftpipe.of_busiest_rank(mixed)
    assert found["gpipe"][0] > found["ftpipe"][0] > 0.98 * 4 * 0.006
    assert "gpipe takes" in capsys.readouterr().out


def test_contenders_are_what_is_said():
    """Two stages on each rank, edges that skip, one microbatch a batch; the simulator finds little idle time."""
    for num_ranks in (4, 8):
        contender = ftpipe.mixed(num_ranks, num_ranks, 0.02)
        places = contender.schedule.rank_of_stage
        assert all(places.count(rank) == 2 for rank in range(num_ranks))
        assert not contender.schedule.graph.is_chain
        assert 1.0 - 1e-9 <= ftpipe.simulated(contender) / ftpipe.of_busiest_rank(contender) < 1.01
