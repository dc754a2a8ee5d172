"""Ranks are lost while a checkpoint is written beside training (`--async-save`): it is complete or dropped, and nothing
that was saved is lost."""

import re
import signal
import time

import pytest

from tests.reliability import launch
from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    Finished,
    assert_nothing_lost,
    command,
    environment,
    finished,
    lose_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import train
from tests.trainer.run.test_lost_shards import COPIES, SHARED

FLUSH, TWO_BW = "--pipeline-schedule flush", "--pipeline-schedule 2bw"
BATCHES = "--global-batch-size 4 --train-iters 8"
SAVING = "--pipeline-model-parallel-size 2 --save saved --save-interval 2 --async-save"


def saved_iterations(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "saved").glob("iter_*"))


def broken_off(job: Finished) -> list[str]:
    """What became of saves that losses broke off, as the log says it: 'iteration outcome'."""
    found = re.findall(
        r"checkpoint of iteration (\d+) in saved, which was being written when ranks were lost, is (\w+)",
        job.outcome.output,
    )
    return list(dict.fromkeys(" ".join(each) for each in found))


def assert_tidy(folder) -> int:
    """Nothing but checkpoints and the tracker is left, which names the latest one, whose iteration is returned."""
    names = {path.name for path in (folder / "saved").iterdir()}
    iterations = saved_iterations(folder)
    assert names == {"latest_checkpointed_iteration.txt", *(f"iter_{each:07d}" for each in iterations)}
    latest = int((folder / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert latest == iterations[-1]
    return latest


def assert_goes_on_from_tracker(folder, flags: str) -> None:
    """The directory is tidy, and a run of all ranks goes on from the checkpoint that the tracker names."""
    latest = assert_tidy(folder)
    resumed = train(4, f"{flags} --pipeline-model-parallel-size 2 --load {folder}/saved", base=MODEL)
    later = {iteration: loss for iteration, loss in values(undisturbed(flags), "lm_loss").items() if iteration > latest}
    assert later and resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


CASES = {
    "rank 0 in its files": (FLUSH, "", [[0, "files", 2, "SIGKILL"]], ["4 dropped"]),
    "rank 0 behind a commit of which nobody else knows": (
        FLUSH, SHARED, [[0, "committed", 1, "SIGKILL"]], ["2 complete"],
    ),
    "another, while rank 0 is slow to commit": (
        TWO_BW, "", [[0, "commit", 2, "sleep 12"], [2, "forward", 6, "sleep 4"], [2, "backward", 6, "SIGKILL"]],
        ["4 dropped"],
    ),
    "another in the copying": (FLUSH, "", [[1, "copying", 2, "SIGKILL"]], ["4 dropped"]),
    "another in its files, 2bw": (TWO_BW, COPIES, [[2, "files", 1, "SIGKILL"]], ["2 dropped"]),
    "another in the gather": (FLUSH, "", [[3, "written", 2, "SIGKILL"]], ["4 dropped"]),
    "another in the gather, without its shard": (
        FLUSH, SHARED, [[3, "written", 2, "SIGKILL"]], ["4 dropped"],
    ),
    "another is stopped in the gather": (TWO_BW, COPIES, [[2, "written", 2, "SIGSTOP"]], ["4 dropped"]),
    "rank 0 in the gather": (TWO_BW, SHARED, [[0, "written", 2, "SIGKILL"]], ["4 dropped"]),
    "rank 0 before the commit": (FLUSH, COPIES, [[0, "commit", 2, "SIGKILL"]], ["4 dropped"]),
    "rank 0 is stopped before the commit": (FLUSH, SHARED, [[0, "commit", 2, "SIGSTOP"]], ["4 dropped"]),
    "rank 0 in the commit": (TWO_BW, SHARED, [[0, "tracker", 2, "SIGKILL"]], ["4 complete"]),
    "rank 0 in the first commit": (FLUSH, "", [[0, "tracker", 1, "SIGKILL"]], ["2 complete"]),
    "rank 0 behind the commit": (TWO_BW, "", [[0, "committed", 2, "SIGKILL"]], ["4 complete"]),
    "another waits for the verdict": (FLUSH, "", [[0, "commit", 2, "kill 3"]], None),
    "another waits for the verdict, without its shard": (FLUSH, SHARED, [[0, "commit", 2, "kill 2"]], None),
    "another, while files are written slowly": (
        FLUSH, "", [[1, "files", 2, "sleep 8"], [2, "forward", 5, "SIGKILL"]], ["4 dropped"],
    ),
    "another, while rank 0 writes slowly": (
        TWO_BW, SHARED, [[0, "files", 2, "sleep 8"], [1, "forward", 6, "SIGKILL"]], ["4 dropped"],
    ),
    "another in the last save": (FLUSH, "", [[3, "written", 3, "SIGKILL"]], ["6 dropped"]),
    "rank 0 behind the last commit": (TWO_BW, SHARED, [[0, "committed", 3, "SIGKILL"]], ["6 complete"]),
    "rank 0, and another in the next save": (
        FLUSH, "", [[0, "files", 1, "SIGKILL"], [2, "files", 2, "SIGKILL"]], None,
    ),
    "another, and rank 0 in the recovery": (
        TWO_BW, "", [[3, "written", 2, "SIGKILL"], [0, "new groups", 1, "SIGKILL"]], ["4 dropped"],
    ),
    "rank 0 behind the commit, and another in the recovery": (
        FLUSH, COPIES, [[0, "committed", 2, "SIGKILL"], [2, "new program", 1, "SIGKILL"]], ["4 complete"],
    ),
}  # fmt: skip
USUAL = [*list(CASES)[:2], "another in the gather"]
SAVED = {2, 4, 6}
BEHIND_THE_SAVE = [name for name in CASES if "slow" in name]
"""Cases where ranks have left the save's border when one is lost, so they save next at the next border."""


@pytest.mark.sample(1, "another in the gather")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in CASES]
)
def test_a_rank_is_lost_while_a_checkpoint_is_written(tmp_path, name):
    """In each part of the save. What the log calls dropped is not there, and no folder of it is left behind the next
    save; without a lost shard the run goes back to what is there. The ranks that are left save again, and end."""
    schedule, flags, losses, outcome = CASES[name]
    shared = f"{BATCHES} {schedule}"
    job = run(tmp_path, 4, f"{shared} --exit-interval 6 {SAVING} {flags}", losses)
    assert_nothing_lost(job, f"{shared} --exit-interval 6")
    expected = [int(what.split()[1]) if "kill" in what else rank for rank, _, _, what in losses if "sleep" not in what]
    assert [moment.rank for moment in job.moments if moment.is_loss] == expected, job.outcome.output
    told = broken_off(job)
    assert told == outcome or outcome is None, job.outcome.output
    dropped = {int(each.split()[0]) for each in told if "dropped" in each}
    assert SAVED - dropped <= {*saved_iterations(tmp_path)} <= SAVED, job.outcome.output
    if name in BEHIND_THE_SAVE and not flags:
        assert dropped and dropped.isdisjoint(saved_iterations(tmp_path)), job.outcome.output
    assert_goes_on_from_tracker(tmp_path, shared)


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", SHARED, COPIES])
def test_rank_0_comes_back_to_a_job_that_saves_in_the_background(tmp_path, flags):
    """It is lost in a save, owns the directory again, and is taken in while another save is written slowly, which is
    not broken off."""
    losses = [[0, "files", 2, "SIGKILL"], [2, "forward", 6, "newcomer"]]
    losses += [[1, "files", number, "sleep 3"] for number in (3, 4)]  # of iteration 6, and that of 4 again, if it is
    shared = f"--global-batch-size 4 --train-iters 12 {FLUSH}"
    job = run(tmp_path, 4, f"{shared} --exit-interval 10 {SAVING} {flags}", losses, max_restarts=1)
    assert_nothing_lost(job, f"{shared} --exit-interval 10")
    assert "rank 0 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output
    assert broken_off(job) == ["4 dropped"], job.outcome.output
    assert {2, 6, 8, 10} <= {*saved_iterations(tmp_path)}, job.outcome.output
    assert_goes_on_from_tracker(tmp_path, shared)


@pytest.mark.full
def test_a_stop_request_and_a_loss_while_a_checkpoint_is_written(tmp_path):
    """SIGTERM to the launcher while a save is written, and a rank is killed in the save with which the job ends."""
    flags = f"--global-batch-size 4 --train-iters 2000 {FLUSH}"
    losses = [[1, "files", 1, "sleep 4"], [3, "written", 2, "SIGKILL"]]
    saving = SAVING.replace("--save-interval 2", "--save-interval 3")
    with launch.Job(command(4, f"{flags} {saving}"), directory=tmp_path, **environment(tmp_path, losses)) as started:
        launch.wait_for_iteration(started, tmp_path / "metrics.jsonl", 3)
        time.sleep(0.5)
        started.process.terminate()
        job = finished(tmp_path, started.wait(timeout=240))
    last = max(record["iteration"] for record in job.records)
    assert job.outcome.status == 128 + signal.SIGTERM and not job.outcome.leftovers, job.outcome.output
    assert assert_tidy(tmp_path) == last, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("flags", ["", SHARED, COPIES])
@pytest.mark.parametrize("schedule", [FLUSH, TWO_BW])
def test_ranks_are_lost_at_random_moments_of_saves(tmp_path, schedule, flags, seed):
    """A save is under way nearly always: one is begun after each batch. With shards and no copies the run goes back to
    its last checkpoint with each loss."""
    shared = f"--global-batch-size 6 --train-iters 40 {schedule}"
    saving = "--pipeline-model-parallel-size 2 --save saved --save-interval 1 --async-save"
    job, lost = lose_at_random(tmp_path, 2, 3, f"{shared} {saving} {flags}", seed=seed)
    assert len(lost) == 4, lost
    assert_nothing_lost(job, shared)
    assert assert_tidy(tmp_path) == 40, job.outcome.output
