"""`--pipeline-schedule auto` without a profile: what a run begins with, what it measures, and how it changes."""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch

from megatron import backend

backend.install()  # before anything imports megatron.core

from megatron.pipeline.program.instruction import COMPUTATIONS, Kind
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.trainer import arguments
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.changes import program_making
from megatron.trainer.plan import auto_program
from megatron.trainer.plan.auto_costs import MeasuredHere
from megatron.trainer.plan.auto_problem import problems_of, search_of
from tests.reliability import launch
from tests.trainer.arguments.command_line import CPU, argv
from tests.trainer.run import run_case

P2 = "--pipeline-model-parallel-size 2 --distributed-backend gloo"
AUTO = "--pipeline-schedule auto --pipeline-measured-batches 2"
V = "--num-virtual-stages-per-pipeline-rank 2"
SAME = "--global-batch-size 4 --clip-grad 0.5 --hidden-dropout 0.1 --num-layers 4"
W2 = "--pipeline-weights 2bw"
RECOMPUTES = "--pipeline-recompute --pipeline-memory-limit 0.00064"
UNEVEN = Costs(
    forward=[1.0, 2.0, 1.0, 1.0], backward=[3.5, 3.0, 2.5, 3.5], backward_input=[3.0, 2.0, 0.5, 3.0],
    backward_weight=[0.5, 1.0, 2.0, 0.5],
)  # fmt: skip
"""With these, two stages on each rank in a V take 38 under zbv, and 37 under what a search finds."""
EVEN = Costs(forward=[1.0, 1.0], backward=[2.0, 2.0], backward_input=[1.0, 1.0], backward_weight=[1.0, 1.0])
HEAVY = Costs(forward=[1.0, 3.0], backward=[2.0, 6.0], backward_input=[1.0, 3.0], backward_weight=[1.0, 3.0])
"""With these, rank 0 of 1F1B holds two microbatches, and is as fast with one: 9 a microbatch, which rank 1 computes."""


def begun(extra: str = "") -> auto_program.MadeProgram:
    args = arguments.parse_args(argv(f"{P2} {AUTO} --num-layers 4 {extra}"))
    auto_program.require(args, world_size=2)
    return auto_program.make(args, world_size=2, platform=CPU)


def computations(program) -> list[list[tuple]]:
    return [[(each.kind, each.stage, each.microbatch) for each in row if each.kind in COMPUTATIONS]
            for row in program.rows]  # fmt: skip


# --- what it begins with ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "name"), [("", "zb-h1"), (V, "zbv")])
def test_a_job_begins_with_the_fastest_named_order(extra, name):
    """One stage on each rank, or two in a V where the flags ask for them; and it says so."""
    made = begun(extra)
    named = Schedule.preset(name, num_stages=4 if extra else 2)
    assert computations(read_schedule("begun", text=made.csv).program) == computations(named.build([8]))
    assert made.measures
    assert made.lines == (
        f"auto: without --pipeline-profile the job begins with {name}, measures its batches 2 to 3, and searches for "
        "a faster program while it goes on",
    )


def test_under_2bw_a_job_begins_with_its_order_or_with_a_pattern():
    """In halves, so that these are measured; two stages in a V have no named order, and follow one another all the
    same."""
    rows, whole = read_schedule("begun", text=begun(W2).csv).program, Schedule.preset("2bw", num_stages=2)
    halves = {Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    assert computations(rows) == [
        [(kind, stage, number) for each, stage, number in row for kind in halves.get(each, (each,))]
        for row in computations(whole.build([8] * 3))
    ]
    for extra, name in (("", "1f1b"), (V, "a repeating pattern")):
        made = begun(f"{W2} {extra}")
        assert made.measures and f"the job begins with {name} under 2bw, measures its batches 2 to 3" in made.lines[0]
        schedule = read_schedule("begun", text=made.csv)
        assert schedule.weights.name == "2bw" and not schedule.drains_between_periods


def test_what_was_made_with_a_profile_stays_without_one(tmp_path):
    """Who resumes without a profile asks for no other costs; another limit asks for another program."""
    made = begun()
    known = json.loads(made.certificate)
    known["asked"][auto_program._PROFILE] = "that of a profile"
    auto_program.keep(auto_program.MadeProgram(made.csv, (), json.dumps(known)), tmp_path)
    again = begun(f"--load {tmp_path}")
    assert again.csv == made.csv and not again.measures and "as before" in again.lines[0]
    other = begun(f"--load {tmp_path} --pipeline-memory-limit 100")
    assert other.measures and "made with another --pipeline-memory-limit" in other.lines[0]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (auto_program.FILE, "garbage", "is not what pipeline_program.json was written for"),
        (auto_program.FILE, "0F0,0B0\n", "is not what pipeline_program.json was written for"),
        (auto_program.CERTIFICATE, '{"asked": [], "csv_sha256": ""}', "was made with another"),
        (auto_program.CERTIFICATE, '{"asked": 1}', "does not say what"),
        (auto_program.CERTIFICATE, "[]", "does not say what"),
    ],
)
def test_a_kept_program_that_is_damaged_is_made_anew(name, text, reason, tmp_path):
    """And a line says why; no job fails on its own file."""
    made = begun()
    auto_program.keep(made, tmp_path)
    (tmp_path / name).write_text(text)
    again = begun(f"--load {tmp_path}")
    assert again.csv == made.csv and again.measures and reason in again.lines[0]
    assert again.lines[0].endswith("so another program is made")


# --- the change -------------------------------------------------------------------------------------------------------


def changing_case(*, costs: Costs, fails: bool = False, **options) -> dict:
    """`train_case` of a job that begins with what `make` says, and takes its costs to be `costs`, with moves; the
    search is over when the batch behind the measured ones begins. Also returns what it has measured."""
    parse, measure, measured = arguments.parse_args, program_making.measured_costs, []

    def parsed(*words, **keywords):
        args = parse(*words, **keywords)
        return auto_program.with_program(args, auto_program.make(args, world_size=2, platform=CPU))

    def measuring(engine, **options) -> Costs:
        measured.append(measure(engine, **options))
        return costs

    class Costly(MeasuredHere):
        def of_moves(self, config, ways, sizes):
            assert (self.to_host > 0) == (self.from_host > 0) == ("host" in ways)
            return {name: getattr(costs, name) for name in ("swap_out", "swap_in", "evict")}

    class Awaited(program_making.SearchProcess):
        @property
        def is_over(self) -> bool:
            if fails:
                self._process.kill()
            self._process.wait()
            return True

    with (
        mock.patch.object(arguments, "parse_args", parsed),
        mock.patch.object(program_making, "measured_costs", measuring),
        mock.patch.object(program_making, "MeasuredHere", Costly),
        mock.patch.object(program_making, "SearchProcess", Awaited),
    ):
        found = run_case.train_case(watch=f"{__name__}:watched", **options)
    return found | {"measured": measured}


def watched(run):
    """The program of the configuration and of the engine, and whether nothing is traced, at the end."""
    return lambda: (run.args.program.sha256, run.engine.schedule.sha256, run.engine.tracer is None)


def changing(extra: str, **options) -> list[dict]:
    flags = f"{AUTO} {SAME} --pipeline-synthesis-seconds 1 {extra}"
    return run_case.train(2, flags, function=f"{__name__}:changing_case", **options)


@pytest.mark.full
def test_losses_are_those_of_flush_through_the_change(tmp_path):
    """Bit-equal on the same stages, with their gradients, before and behind it; all ranks change at the same batch, to
    the same rows, which are faster by the costs; and the times that were measured are those of each stage."""
    ranks = changing(f"{V} --save {tmp_path}", costs=UNEVEN)
    flush = tmp_path / "flush.csv"
    flush.write_text(Schedule.preset("flush", num_stages=4, rank_of_stage=(0, 1, 1, 0), tied_embeddings=True)
                     .build([4]).to_csv())  # fmt: skip
    expected = run_case.train(2, f"{SAME} --pipeline-program {flush}")
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(ranks[-1]["losses"]) == 6
    for rank, same in zip(ranks, expected, strict=True):
        assert rank["gradients"] == same["gradients"] and len(rank["gradients"]) == 6
    (digest,) = {each for rank in ranks for each in rank["watched"][:2]}
    assert all(rank["watched"][2] for rank in ranks)
    lines = "\n".join(ranks[-1]["lines"])
    assert f"auto: from iteration 5 on the program is sha256 {digest[:12]}" in lines
    assert "that of zbv, with which the job began, takes 3.8e+04 ms, 2.7% more" in lines
    kept = read_schedule("kept", text=(tmp_path / auto_program.FILE).read_text())
    assert simulate(kept.program, UNEVEN).makespan == 37
    (measured,), (other,) = (rank["measured"] for rank in ranks)
    parts = (measured.forward, measured.backward_input, measured.backward_weight)
    assert all(len(part) == 4 and min(part) > 0 for part in parts)
    assert measured == other and 0 < measured.latency < 1  # seconds


@pytest.mark.full
@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ([0.25] * 4, "stage 0 (0-2|0-1 3|0 2-3|1-3)"),
        pytest.param([9.0, 2.0, 1.0, 9.0], "nothing", marks=pytest.mark.full),
    ],
    ids=["short", "long"],
)  # fmt: skip
def test_a_run_changes_what_it_recomputes(recompute, again):
    """It begins with recomputes on rank 0, where memory is short, and measures them. Where they turn out to take long,
    it goes on without, in less memory; where they are short, it keeps one microbatch of the first stage and all of the
    others. The losses are those of a run that recomputes nothing."""
    costs = replace(UNEVEN, recompute=recompute)
    ranks = changing(f"{V} {RECOMPUTES} --distributed-backend gloo", costs=costs)
    expected = run_case.train(2, f"{SAME} {V} --pipeline-schedule zbv")
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(ranks[-1]["losses"]) == 6
    for rank, same in zip(ranks, expected, strict=True):
        assert rank["gradients"] == same["gradients"] and len(rank["gradients"]) == 6
    (measured, _) = (rank["measured"][0] for rank in ranks)
    was = [again != once for again, once in zip(measured.recompute, measured.forward, strict=True)]
    assert was == [True, False, False, True] and min(measured.recompute) > 0
    lines = "\n".join(ranks[-1]["lines"])
    assert "auto: from iteration 5 on the program is sha256" in lines
    assert re.search(f"auto: recomputed: {again}$", lines, re.MULTILINE)
    assert "that of zbv, with which the job began, takes" in lines


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "named", "moved"),
    [
        (f"{V} --pipeline-moves host --pipeline-memory-limit 0.00076", f"{V} --pipeline-schedule zbv", "host: stage 0"),
        pytest.param("--pipeline-moves pair --pipeline-memory-limit 0.0009", "", "pair rank: stage 0",
                     marks=pytest.mark.full),
    ],
    ids=["host", "pair"],
)  # fmt: skip
def test_a_run_changes_to_one_whose_activations_move(flags, named, moved):
    """Links are slow, so a rank should run far ahead, for which it has no room. Bit-equal to what moves nothing."""
    stages = 4 if V in flags else 2
    costs = Costs(
        forward=[1.0] * stages, backward=[2.0] * stages, backward_input=[1.0] * stages, backward_weight=[1.0] * stages,
        latency=3.0 if V in flags else 6.0, swap_out=0.1, evict=0.1,
    )  # fmt: skip
    batches = "--global-batch-size 8 --distributed-backend gloo"
    ranks = changing(f"{flags} {batches} --pipeline-synthesis-seconds 2 --log-saved-activations", costs=costs)
    expected = run_case.train(2, f"{SAME} {batches} {named}")
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(ranks[-1]["losses"]) == 6
    for rank, same in zip(ranks, expected, strict=True):
        assert rank["gradients"] == same["gradients"] and len(rank["gradients"]) == 6
    lines = "\n".join(ranks[-1]["lines"])
    assert "auto: from iteration 5 on the program is sha256" in lines and f"auto: moved to the {moved} " in lines
    assert ("a copy to the host at" in lines) == ("host" in flags)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_goes_on_as_it_began_where_nothing_is_faster(tmp_path, fails):
    """Even costs: zb-h1 is at the bound, and is the job's program. A search that fails is a warning."""
    ranks = changing(f"--save {tmp_path} --train-iters 5", costs=EVEN, fails=fails)
    expected = run_case.train(2, f"{SAME} --train-iters 5")
    assert ranks[-1]["losses"] == expected[-1]["losses"]
    lines = "\n".join(ranks[-1]["lines"])
    if fails:
        assert "warning: auto: the process of the search ended with status -9; the run goes on with" in lines
        assert not (tmp_path / auto_program.FILE).exists()
    else:
        assert "no faster one was found, and none takes less than 1.3e+04 ms, so it stays" in lines
        known = json.loads((tmp_path / auto_program.CERTIFICATE).read_text())
        assert known["seconds"] == known["bound"] == 13 and known["begun_with"] == "zb-h1"


def assert_same(ranks: list[dict], expected: list[dict], *, num_batches: int) -> None:
    """Losses, the gradients of each batch, and the weights at the end, to the last bit."""
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(ranks[-1]["losses"]) == num_batches
    for rank, same in zip(ranks, expected, strict=True):
        assert rank["gradients"] == same["gradients"] and len(rank["gradients"]) == num_batches
        assert all(torch.equal(rank["weights"][name], each) for name, each in same["weights"].items())


@pytest.mark.full
def test_2bw_keeps_both_versions_through_the_change(tmp_path):
    """A change behind iteration 5, where a checkpoint is saved, too: the next batch computes with the weights without
    the update of the fifth, like a run of 2bw that nothing disturbs. Who resumes there takes the program again."""
    saves = f"--save {tmp_path} --save-interval 5 --train-iters 8"
    ranks = changing(f"{W2} {saves} --async-save", costs=HEAVY)
    expected = run_case.train(2, f"{SAME} --pipeline-schedule 2bw --train-iters 8")
    assert_same(ranks, expected, num_batches=8)
    lines = "\n".join(ranks[-1]["lines"])
    (digest,) = {each for rank in ranks for each in rank["watched"][:2]}
    assert f"auto: from iteration 6 on the program is sha256 {digest[:12]}" in lines
    assert "checkpoint of iteration 5" in lines and "measured in iterations 2 to 3" in lines
    assert "that of 1f1b, with which the job began, takes" in lines and "0.0% more" in lines
    known = json.loads((tmp_path / auto_program.CERTIFICATE).read_text())
    assert known["held"][0] == pytest.approx(known["registered_orders_hold"]["1f1b"] / 2) and known["seconds"] == 36
    (measured,), (other,) = (rank["measured"] for rank in ranks)
    assert measured == other and all(min(each) > 0 for each in (measured.backward_input, measured.backward_weight))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    again = changing(f"{W2} {saves} --load {tmp_path}", costs=HEAVY)
    assert {each for rank in again for each in rank["watched"][:2]} == {digest}
    assert again[-1]["losses"] == {number: expected[-1]["losses"][number] for number in (6, 7, 8)}
    for rank, same in zip(again, expected, strict=True):
        assert rank["gradients"] == same["gradients"][5:]


@pytest.mark.full
def test_2bw_changes_stages_in_a_v():
    """To rows that are faster by the costs; bit-equal to 2bw in one process."""
    free = "--clip-grad 0 --untie-embeddings-and-output-weights --train-iters 7"
    ranks = changing(f"{V} {W2} {free}", costs=UNEVEN)
    expected = run_case.train(1, f"{SAME} --pipeline-schedule 2bw {free}")
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(ranks[-1]["losses"]) == 7
    weights = run_case.joined_weights(ranks)
    assert all(torch.equal(weights[name], each) for name, each in expected[0]["weights"].items())
    lines = "\n".join(ranks[-1]["lines"])
    assert "auto: from iteration 6 on the program is sha256" in lines
    assert "that of a repeating pattern, with which the job began, takes" in lines


@pytest.mark.full
def test_2bw_changes_what_it_recomputes():
    """It begins with recomputes, where memory is short for equal layers, and measures them. With a heavy last stage it
    goes on without: each rank holds one microbatch, and rank 1 is always busy. Bit-equal to 2bw, with its gradients."""
    limit = "--pipeline-memory-limit 0.0008 --distributed-backend gloo --train-iters 7"
    ranks = changing(f"{W2} --pipeline-recompute {limit}", costs=HEAVY)
    assert_same(ranks, run_case.train(2, f"{SAME} --pipeline-schedule 2bw --train-iters 7"), num_batches=7)
    (measured, _) = (rank["measured"][0] for rank in ranks)
    assert all(again != once for again, once in zip(measured.recompute, measured.forward, strict=True))
    lines = ranks[-1]["lines"]
    assert any(line.startswith("auto: from iteration 6 on the program is sha256") for line in lines)
    assert "auto: recomputed: nothing" in lines
    assert [rank["saved_microbatches"] for rank in ranks] == [{0: 1}, {1: 1}]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("extra", "costs", "said"),
    [
        ("", EVEN, "2.4e+04 ms; none that is faster or as fast in less memory was found, and none takes less than "
                   "2.4e+04 ms, so it stays"),
        ("", HEAVY, "that of 1f1b, with which the job began, takes up to 0.000645 GiB on a rank and 7.2e+04 ms, 0.0% "
                    "more"),
        (V, UNEVEN, "GiB on a rank and 8e+04 ms, 11.1% more"),
    ],
    ids=["neither", "leaner", "faster"],
)  # fmt: skip
def test_under_2bw_a_program_is_better_that_is_faster_or_leaner(extra, costs, said):
    """With even costs 1F1B is at both bounds; with a heavy last stage it is no slower than half of its memory."""
    args = arguments.parse_args(argv(f"{P2} {AUTO} {W2} --num-layers 4 --pipeline-synthesis-seconds 0.5 {extra}"))
    first = auto_program.make(args, world_size=2, platform=CPU)
    args = auto_program.with_program(args, first)
    arguments.validate_args(args, world_size=2)
    config, costs_of = TrainConfig.of(args, padded_vocab_size=128), MeasuredHere(costs)
    problems = problems_of(config, costs_of)
    best = auto_program.better(config, costs_of, search_of(config, problems, [])(), problems)
    known, was = json.loads(best.certificate), json.loads(first.certificate)
    assert best.lines[-1].endswith(said) and known["asked"] == was["asked"] and not best.measures
    assert (best.csv == first.csv) == ("stays" in said)
    program = read_schedule("best", text=best.csv).program
    assert known["bound"] <= known["seconds"] == simulate(program, costs).steady_time_per_batch()
    assert (known["held"][0] == was["held"][0] / 2) == (costs is HEAVY)


@pytest.mark.parametrize(
    ("weights", "named"), [("", ""), pytest.param(W2, "--pipeline-schedule 2bw", marks=pytest.mark.full)]
)  # fmt: skip
def test_a_killed_job_goes_on_with_its_program(tmp_path, weights, named):
    """Started by a launcher, and killed some batches after the change: it begins with the program that stands beside
    its checkpoints, and its losses are those of a named schedule that nothing has disturbed. Under 2bw it is killed
    once before the change, too, and measures again."""
    flags = ["--num-layers", "4", "--train-iters", "2000"]
    auto = ["--pipeline-schedule", "auto", "--pipeline-measured-batches", "1", "--pipeline-synthesis-seconds", "0.1"]
    saved, metrics = tmp_path / "saved", tmp_path / "metrics.jsonl"
    command = launch.training_command(
        2, *flags, *auto, *weights.split(), "--save", saved, "--load", saved, "--save-interval", "10",
        "--metrics-file", metrics, forks=True,
    )  # fmt: skip

    def killed(extra: list[str], condition: Callable[[], bool], later: int) -> launch.Outcome:
        with launch.Job([*command, *extra], directory=tmp_path) as job:
            job.wait_until(condition)
            launch.wait_for_iteration(job, metrics, max(launch.metrics(metrics)) + later)
            for rank in psutil.Process(job.process.pid).children():
                launch.kill(rank.pid, signal.SIGKILL)
            outcome = job.wait()
        assert outcome.status != 0 and not outcome.leftovers
        return outcome

    if weights:
        before = killed(["--pipeline-synthesis-seconds", "600"], (saved / "iter_0000010").exists, 3)
        assert "measured in iterations 2 to 2" in before.output and "auto: from iteration" not in before.output
        assert not (saved / auto_program.CERTIFICATE).exists()
    first = killed([], (saved / auto_program.CERTIFICATE).exists, 11)
    last = max(launch.metrics(metrics)) + 3
    with launch.Job([*command, "--exit-interval", str(last)], directory=tmp_path) as job:
        second = job.wait()
    second.assert_succeeded()
    begun, *changed = re.findall(r"program (?:auto|is) \(?sha256 (\w+)", first.output)
    assert re.findall(r"program auto \(sha256 (\w+)", second.output) == [changed[0] if changed else begun]
    assert f"auto: the program is {saved}/pipeline_program.csv, as before" in second.output
    assert "measures its batches" not in second.output
    same = run_case.train(
        2, base=" ".join([*launch.TINY, *flags]),
        flags=" ".join([*launch.SYNTHETIC, named, "--exit-interval", str(last)]),
    )  # fmt: skip
    assert launch.losses(metrics) == same[-1]["losses"] and len(launch.losses(metrics)) == last
