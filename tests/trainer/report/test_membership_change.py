"""What a run prints and records when ranks are lost or come back."""

import importlib.machinery
import re
import sys
from dataclasses import replace
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.survivors import ReplicaRank, without
from megatron.trainer.report.log import Reporter
from megatron.trainer.report.log_line import Progress
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.report.metrics import read_metrics
from tests.trainer.arguments.command_line import arguments

PROGRAM = without(Schedule.preset("flush", num_stages=2), 4, num_replicas=2, lost=[ReplicaRank(1, 0)])
"""Of four ranks, rank 1 is lost: the first stage of the second replica."""


def loss(iteration: int = 3, **changes) -> MembershipChange:
    fields = {"iteration": iteration, "lost": {1: "its process has ended"}, "ranks": (0, 2, 3), "world_size": 4,
              "seconds": 0.25, "survivors": PROGRAM}  # fmt: skip
    return MembershipChange(**{**fields, **changes})


def back(iteration: int) -> MembershipChange:
    return loss(iteration, lost={}, joined=[1], ranks=range(4), survivors=None)


def reporter(folder, flags: str = "", *, rank: int = 3, world_size: int = 4) -> Reporter:
    args = arguments(
        f"--metrics-file {folder}/metrics.jsonl --pipeline-model-parallel-size 2 {flags}", world_size=world_size
    )
    return Reporter(replace(args, padded_vocab_size=128, rank=rank))


def tell(reports: Reporter, iteration: int, **metrics: tuple[float, ...]) -> None:
    report = BatchReport(
        batch=iteration - 1, losses={"lm loss": 4.0}, grad_norm=1.0, learning_rate=1e-3, num_samples=8,
        rank_metrics=metrics,
    )  # fmt: skip
    reports.iteration(report, Progress(iteration, 8 * iteration, 8, 0.5))


def lines(folder) -> list[int | str]:
    """The iterations of the batches that the file has, and of the changes with a sign before."""
    return [f"+{each['iteration']}" if "ranks" in each else each["iteration"]
            for each in read_metrics(f"{folder}/metrics.jsonl")]  # fmt: skip


SPEED = f"a batch takes {PROGRAM.slowdown:.2f} times as long as with all ranks, as simulated (at least"


def test_a_throughput_is_of_the_gpus_that_are_left(tmp_path, monkeypatch, capsys):
    """A batch that takes as long on half of the GPUs has twice the operations of each."""
    monkeypatch.setattr("megatron.trainer.report.log.backend.is_cuda", lambda: True)
    monkeypatch.setattr("megatron.trainer.report.log.flops_per_sample", lambda args: 1e15)
    reports = reporter(tmp_path, "--log-throughput --log-interval 1")
    tell(reports, 1)
    reports.args = replace(reports.args, rank=1, world_size=2)
    tell(reports, 2)
    reports.close()
    before, after = map(float, re.findall(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)", capsys.readouterr().out))
    assert after == pytest.approx(2 * before, abs=0.1) and before > 0


def test_ranks_of_a_place_have_the_same_pipeline_rank():
    """With tensor parallelism each place of the program has several ranks; the first stands for it in a picture."""
    change = loss(ranks=(0, 1, 4, 5, 6, 7), lost={2: "it ended", 3: "with 2"}, world_size=8, ranks_of_place=2)
    assert change.pipeline_ranks == (0, 0, 1, 1, 1, 1)
    assert change.places == [(0, "0.0"), (4, "0.1"), (6, "1.1")]


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (loss(), f"lost rank 1 (its process has ended): 3 ranks of 4 go on from iteration 3 after 0.2 s; {SPEED}"),
        (loss(lost={3: "no heartbeat for 10 s", 1: "it ended"}, ranks=(0, 2)),
         "lost rank 1 (it ended), lost rank 3 (no heartbeat for 10 s): 2 ranks of 4 go on from"),
        (loss(lost={}), f"no rank is lost or back: 3 ranks of 4 go on from iteration 3 after 0.2 s; {SPEED}"),
        (loss(joined=[0, 3]), "lost rank 1 (its process has ended), rank 0 is back, rank 3 is back: 3 ranks of 4"),
        (loss(lost={}, joined=[2]), "rank 2 is back: 3 ranks of 4 go on from iteration 3 after 0.2 s; a batch"),
    ],
    ids=["one", "two", "a link", "one for two", "one comes back"],
)  # fmt: skip
def test_one_line_of_the_log(tmp_path, capsys, change, start):
    """It names who is lost, why, and who has come back, and what the run costs from then on."""
    reports = reporter(tmp_path)
    reports.membership(change)
    reports.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(start)
    assert line.endswith(f"{PROGRAM.least_slowdown:.2f}); program {PROGRAM.schedule.short_hash}, made now")


def test_a_whole_job_goes_on_as_it_began(tmp_path, capsys):
    """There is no program to name, and nothing for a picture to say."""
    reports = reporter(tmp_path)
    reports.membership(back(5))
    reports.close()
    assert capsys.readouterr().out == (
        "rank 1 is back: 4 ranks of 4 go on from iteration 5 after 0.2 s; a batch takes as long as before any loss\n"
    )
    assert (back(5).title(), back(5).places, back(5).pipeline_ranks) == ("", [], None)
    (record,) = read_metrics(f"{tmp_path}/metrics.jsonl")
    assert record == {"iteration": 5, "lost_ranks": {}, "joined_ranks": [1], "ranks": 4, "recovery_seconds": 0.25,
                      "slowdown": 1.0, "least_slowdown": 1.0}  # fmt: skip


def test_file_and_boards_record_it(tmp_path, monkeypatch):
    """The file has all of it at the iteration from which the run goes on; boards have numbers and the log's line."""
    wandb = mock.Mock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    board = tmp_path / "board"
    flags = f"--tensorboard-dir {board} --wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path}/w"
    reports = reporter(tmp_path, flags)
    reports.membership(loss())
    reports.close()
    numbers = {"ranks": 3, "recovery_seconds": 0.25, "slowdown": PROGRAM.slowdown,
               "least_slowdown": PROGRAM.bound / PROGRAM.undisturbed}  # fmt: skip
    assert read_metrics(f"{tmp_path}/metrics.jsonl") == [
        {"iteration": 3, "lost_ranks": {"1": "its process has ended"}, "joined_ranks": [], **numbers,
         "program": PROGRAM.schedule.short_hash}
    ]  # fmt: skip
    events = EventAccumulator(str(board)).Reload()
    shown = {name.replace("_", "-"): pytest.approx(value) for name, value in numbers.items()}
    for name, value in shown.items():
        (found,) = events.Scalars(name)
        assert (found.step, found.value) == (3, value)
    (text,) = events.Tensors("membership/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (3, loss().describe())
    wandb.log.assert_called_once_with({**shown, "membership": loss().describe()}, step=3)


def test_what_a_lost_writer_may_not_have_written_is_recorded_again(tmp_path):
    """A loss among the latest batches is recorded by whoever takes over; an earlier one is in the file already."""
    reports = [reporter(tmp_path, rank=rank) for rank in range(4)]

    def lose_writer() -> None:
        reports.pop().close()
        for rank, each in enumerate(reports):
            each.args = replace(each.args, rank=rank, world_size=len(reports))
            each.take_over()

    def go_on(change: MembershipChange, *iterations: int) -> None:
        for each in reports:
            each.membership(change)
        for iteration in iterations:
            for each in reports:
                tell(each, iteration)

    go_on(loss(0), 1, 2)
    lose_writer()
    assert lines(tmp_path) == ["+0", 1, 2, 1, 2, "+0"]
    go_on(loss(2), 3, 4, 5)
    lose_writer()
    assert lines(tmp_path)[6:] == ["+2", 3, 4, 5, 4, 5]
    for each in reports:
        each.close()


def test_peaks_are_those_of_the_ranks_that_are_left(tmp_path, capsys):
    """The first stage has one rank left, and the second has two. What a batch before the loss has measured on other
    ranks counts with none of them; the interval of the log goes on over the loss, and over the return."""
    reports = reporter(tmp_path, "--log-interval 5")
    MIB = 2.0**20
    tell(reports, 1, saved_activation_bytes=(1 * MIB, 9 * MIB, 2 * MIB, 1 * MIB))
    reports.args = replace(reports.args, rank=2, world_size=3)
    reports.membership(loss(2))
    tell(reports, 2, saved_activation_bytes=(99 * MIB,) * 4)
    tell(reports, 3, saved_activation_bytes=(4 * MIB, 2 * MIB, 8 * MIB))
    reports.args = replace(reports.args, rank=3, world_size=4)
    reports.membership(back(3))
    tell(reports, 4, saved_activation_bytes=(99 * MIB,) * 3)
    tell(reports, 5, saved_activation_bytes=(1 * MIB, 5 * MIB, 6 * MIB, 1 * MIB))
    reports.close()
    batches = [each for each in read_metrics(f"{tmp_path}/metrics.jsonl") if "lm_loss" in each]
    found = [[count / MIB for count in each.get("saved_activation_bytes", ())] for each in batches]
    assert found == [[9, 2], [], [4, 8], [], [5, 6]]
    assert "saved activations (MiB): 9.0 8.0 |" in capsys.readouterr().out


def test_a_picture_says_who_is_left():
    """Its rows have the numbers in the whole job, by which the log names ranks, with replica and pipeline rank."""
    assert loss().places == [(0, "0.0"), (2, "0.1"), (3, "1.1")] and loss().pipeline_ranks == (0, 1, 1)
    assert loss().title() == "3 ranks of 4\nwithout rank 1; last change after iteration 3, in 0.2 s"
    assert loss(ranks=(), world_size=12).title().splitlines()[1].startswith("without 12 ranks; last change")
    assert loss(ranks=range(4)).title() == "4 ranks of 4\nlast change after iteration 3, in 0.2 s"
