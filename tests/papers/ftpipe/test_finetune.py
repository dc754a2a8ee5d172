"""The benchmarks of fine-tuning: what they make of a run's timeline and of its accuracies."""

import json

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from papers.ftpipe import finetune_convergence, finetune_models, finetune_speed


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


@pytest.mark.full
def test_cuts_of_a_t5_keep_a_limit_of_memory(tmp_path):
    """A partition of each method is written with its simulated time, or none fits."""
    shape = {"d_model": 16, "d_ff": 32, "num_heads": 1}
    finetune_models.write_t5(tmp_path, length=8, target=4, **shape)
    words = [
        str(tmp_path / "t5"), "--task", "text-to-text", "--train_file", str(tmp_path / "train.jsonl"),
        "--max_seq_length", "8", "--max_target_length", "4", "--per_device_train_batch_size", "1", "--optim", "sgd",
        "--devices", "2", "--output", str(tmp_path),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="fits"):
        finetune_speed.write_cuts(*words, "--memory", "0.1MiB")
    finetune_speed.write_cuts(*words, "--memory", "64MiB")
    simulated = json.loads((tmp_path / "simulated.json").read_text())
    assert sorted(simulated) == ["mixed", "sequential"] and min(simulated.values()) > 0
    ranks = json.loads((tmp_path / "sequential.json").read_text())["rank_of_stage"]
    assert sorted(ranks) == [0, 1]


def test_a_model_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        finetune_speed.main(["bert"])
    assert "'bert' is no model" in capsys.readouterr().err


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


def test_the_time_to_the_best_of_flush(capsys):
    """Less the margin, seed by seed; an arm that never comes there with one seed is compared on the others."""
    results = {
        "evaluations": 2,
        "accuracy": {
            "flush": [[0.7, 0.8], [0.8, 0.8]], "gpipe": [[0.7, 0.8], [0.8, 0.8]], "ftpipe": [[0.6, 0.796], [0.7, 0.79]],
        },
        "seconds": {"flush": [[4, 9], [4, 9]], "gpipe": [[5, 10], [6, 12]], "ftpipe": [[2, 5], [2, 4]]},
    }  # fmt: skip
    finetune_convergence.show_times(results)
    lines = capsys.readouterr().out.splitlines()
    gpipe, flush, ftpipe = (" ".join(line.split()) for line in lines if line.startswith("│"))
    assert (
        gpipe == "│ gpipe │ 11.00 (10.00 to 12.00) │ 8.00 (6.00 to 10.00) │ 1.00 (1.00 to 1.00) │ 1.00 (1.00 to 1.00) │"
    )
    assert flush.startswith(
        "│ flush │ 9.00 (9.00 to 9.00) │ 6.50 (4.00 to 9.00) │ 1.22 (1.11 to 1.33) │ 1.29 (1.11 to 1.50)"
    )
    assert ftpipe.startswith(
        "│ ftpipe │ 4.50 (4.00 to 5.00) │ inf (5.00 to inf) │ 2.45 (2.00 to 3.00) │ 2.00 (2.00 to 2.00), 1 of 2 │"
    )
