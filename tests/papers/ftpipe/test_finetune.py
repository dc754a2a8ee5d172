"""The benchmarks of fine-tuning: what they make of a run's timeline and of its accuracies."""

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from papers.ftpipe import finetune_convergence, finetune_speed


def test_a_simulated_run_reaches_its_limit():
    """Without transfers, a chain of two equal stages keeps both ranks busy but for fill and drain."""
    schedule = Schedule(order="async", weights="stale", recompute=True, num_stages=2)
    costs = Costs(forward=1.0, recompute=[1.0, 0.0], backward=[2.0, 3.0], step=0.5)
    seconds, limit = finetune_speed.judged(simulate(schedule.build((finetune_speed.ACCUMULATION,) * 20), costs))
    of_microbatch = 1.0 + 1.0 + 2.0 + 0.5 / finetune_speed.ACCUMULATION
    assert seconds == pytest.approx(of_microbatch) and limit == pytest.approx(of_microbatch)


def test_what_the_ranks_lack_is_seen():
    """A second stage of twice the work leaves the first idle half of the time; the busiest one's is the limit."""
    schedule = Schedule(order="async", weights="stale", recompute=True, num_stages=2)
    costs = Costs(forward=[1.0, 2.0], recompute=[1.0, 0.0], backward=[2.0, 6.0], latency=3.0)
    seconds, limit = finetune_speed.judged(simulate(schedule.build((finetune_speed.ACCUMULATION,) * 20), costs))
    assert limit == pytest.approx(8.0) and seconds > limit


def test_epochs_to_the_end_of_flush(capsys):
    results = {
        "validation": {"0.1": [0.5, 0.7]},
        "learning_rate": 0.1,
        "accuracy": {"flush": [[0.7, 0.8], [0.8, 0.8]], "ftpipe": [[0.6, 0.79], [0.8, 0.8]]},
    }
    finetune_convergence.show(results)
    lines = capsys.readouterr().out.splitlines()
    flush, ftpipe = (next(line for line in lines if line.startswith(f"│ {name}")) for name in ("flush", "ftpipe"))
    assert "0.8000" in flush and "1.5 (2 of 2)" in flush
    assert "0.7950" in ftpipe and "+0.50" in ftpipe and "1 (1 of 2)" in ftpipe
