"""tools/schedule.py synthesize: what it prints and writes, and what it refuses."""

import json
import re

import pytest

from megatron.commands import schedule as tool  # noqa: F401  of the fixture `run`
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

HEAD = ["--ranks", "4", "--microbatches", "12", "--forward", "1,1,1,2.4", "--backward", "2,2,2,4.8"]


def lines_of(out: str) -> dict[str, str]:
    return dict(line.split("  ", 1) for line in out.splitlines())


def test_it_writes_a_program_that_can_be_trained_with_and_its_certificate(run, tmp_path):
    """The file is read as --pipeline-program reads it, and the certificate has what is printed."""
    csv, certificate = tmp_path / "mine.csv", tmp_path / "mine.json"
    status, out, _ = run("synthesize", *HEAD, "--limit", 3, "--rounds", 20, "--csv", csv, "--json", certificate)
    assert status == 0
    printed = {name: value.strip() for name, value in lines_of(out).items()}
    assert printed["above the bound"] == "0.00%" and printed["ranks hold"] == "3, 3, 3, 3"
    schedule = read_schedule(csv)
    assert schedule.num_ranks == 4 and schedule.program.batches == (12,)
    written = json.loads(certificate.read_text())
    assert f"{written['seconds']:g}" == printed["time of a batch"]
    assert written["bound_holds_for"]["rank_of_stage"] == [0, 1, 2, 3]
    costs = Costs(forward=[1.0, 1.0, 1.0, 2.4], backward=[2.0, 2.0, 2.0, 4.8])
    assert simulate(schedule.program, costs).makespan == pytest.approx(written["seconds"])


def test_the_best_placement_and_recompute_are_chosen(run):
    """Of two placements the faster counts, and where activations do not fit without recompute they are recomputed."""
    placed = ["--ranks", "2", "--microbatches", "4", "--forward", "1,2,1,3", "--rounds", "2", "--placement"]
    v, in_turn, best = (lines_of(run("synthesize", *placed, name)[1]) for name in ("v", "round-robin", "best"))
    times = [float(each["time of a batch"]) for each in (v, in_turn, best)]
    assert times[2] == min(times) < max(times)
    assert best["placement"] == min((v, in_turn), key=lambda each: float(each["time of a batch"]))["placement"]
    tight = ["--ranks", 2, "--microbatches", 4, "--saved", 4, "--stage-input", 1, "--limit", 5, "--rounds", 2]
    slow, fast = (run("synthesize", *tight, "--recompute", each)[1] for each in ("none", "best"))
    times = [float(lines_of(out)["time of a batch"]) for out in (slow, fast)]
    assert times[1] < times[0]


def test_some_microbatches_of_the_first_ranks_are_recomputed_where_these_hold_most(run, tmp_path):
    """Which is faster than none and than all, and can be trained with."""
    csv = tmp_path / "some.csv"
    given = ["--ranks", 4, "--microbatches", 12, "--forward", "1,1,1,1", "--saved", 4, "--stage-input", 0.5,
             "--limit", 9, "--rounds", 2, "--csv", csv]  # fmt: skip
    found = [lines_of(run("synthesize", *given, "--recompute", each)[1]) for each in ("none", "all", "some", "best")]
    times = [float(each["time of a batch"]) for each in found]
    assert times[3] == times[2] < times[1] < times[0]
    assert re.fullmatch(r"0 \(\d of 12\) 1 \(\d of 12\)", found[3]["recomputed stages"].strip())
    bounds = [float(each["lower bound"].split()[0]) for each in found]
    assert bounds[3] == bounds[2] <= min(bounds[:2])
    schedule = read_schedule(csv, recompute=True)
    assert [schedule.recomputes(stage) for stage in range(4)] == [True, True, False, False]
    assert [bool(schedule.keeps(stage)) for stage in range(4)] == [True, True, False, False]


@pytest.mark.full
def test_moves_are_printed_and_written(run, tmp_path):
    """Which microbatches of which stage leave; a bound over programs with moves; nothing is slower than without."""
    csv, certificate = tmp_path / "mine.csv", tmp_path / "mine.json"
    given = ["--ranks", 4, "--microbatches", 10, "--forward", "1,1,1,1", "--limit", 3, "--rounds", 1]
    plain = lines_of(run("synthesize", *given)[1])
    written = ["--csv", csv, "--json", certificate]
    status, out, _ = run("synthesize", *given, "--moves", "best", "--swap-out", 0.5, "--evict", 0.5, *written)
    found = lines_of(out)
    assert status == 0 and float(found["time of a batch"]) < float(plain["time of a batch"])
    assert float(found["lower bound"].split()[0]) <= float(plain["lower bound"].split()[0])
    moved = json.loads(certificate.read_text())["moves"]
    assert moved["to"] == "host" and f"stage 0: {moved['microbatches_of_stage']['0'][0]}" in found["to the host"]
    words = {each.kind for row in read_schedule(csv).program.rows for each in row}
    assert {Kind.SWAP_OUT, Kind.SWAP_IN} < words
    out = run("synthesize", *given, "--moves", "pair", "--evict", 1000)[1]
    assert lines_of(out)["moves"].strip() == "none is faster"


def test_costs_come_from_a_measured_run(run, tmp_path):
    """Mean times of a timeline that a run has written; halves need a run that split its backwards."""
    halves, whole = tmp_path / "halves.json", tmp_path / "whole.json"
    costs = Costs(forward=[0.5, 1.0], backward=[1.0, 2.0])
    simulate(Schedule.preset("zb-h1", num_stages=2).build([4]), costs).save(halves)
    simulate(Schedule.preset("flush", num_stages=2).build([4]), costs).save(whole)
    given = ["--microbatches", 6, "--rounds", 1]
    status, out, _ = run("synthesize", "--measured", halves, *given)
    assert status == 0
    assert float(lines_of(out)["time of a batch"]) == pytest.approx(0.5 + 6 * 3.0)
    status, out, _ = run("synthesize", "--measured", whole, *given, "--whole-backwards")
    assert status == 0 and float(lines_of(out)["time of a batch"]) == pytest.approx(0.5 + 6 * 3.0 + 1.0)
    status, _, error = run("synthesize", "--measured", whole, *given)
    assert status == 1 and "measure a run of zb-h1 or zbv" in error
    for half in "--backward-input", "--backward-weight":  # the other one is the rest of the backward
        status, out, _ = run("synthesize", "--measured", whole, *given, half, "0.5,1")
        assert status == 0 and float(lines_of(out)["time of a batch"]) == pytest.approx(0.5 + 6 * 3.0)
        assert float(lines_of(out)["lower bound"].split()[0]) == pytest.approx(0.5 + 6 * 3.0)


def test_a_frontier_is_a_table_and_a_picture(run, tmp_path):
    """More room is never slower; a limit under which nothing passes says so in its line."""
    picture = tmp_path / "frontier.png"
    status, out, _ = run("synthesize", *HEAD, "--frontier", "0.5,1,2,4", "--rounds", 6, "--picture", picture)
    assert status == 0 and picture.stat().st_size > 1000
    rows = [line.split() for line in out.splitlines()[1:5]]
    assert rows[0][:2] == ["0.5", "-"] and "one microbatch" in out
    times = [float(row[1]) for row in rows[1:]]
    assert times == sorted(times, reverse=True)


def test_batches_that_follow_one_another_get_the_least_memory(run, tmp_path):
    """Of two placements the one that holds least at the same rate; the file is trained with under 2bw."""
    csv, certificate = tmp_path / "steady.csv", tmp_path / "steady.json"
    given = ["--weights", "2bw", "--ranks", 4, "--microbatches", 8, "--placement", "best", "--rounds", 2]
    status, out, _ = run("synthesize", *given, "--csv", csv, "--json", certificate)
    printed, written = lines_of(out), json.loads(certificate.read_text())
    assert status == 0 and printed["above the bound"].strip() == "0.00%"
    assert printed["time of a batch"].strip() == "48" and written["seconds"] == pytest.approx(48.0)
    assert max(written["held"]) == 2.0 and written["bound_holds_for"]["weights"] == "2bw"
    schedule = read_schedule(csv)
    assert schedule.weights.name == "2bw" and not schedule.drains_between_periods


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--microbatches 4", "the number of ranks is not known"),
        ("--microbatches 4 --ranks 2 --placement spiral", "there is no placement 'spiral'"),
        ("--microbatches 4 --ranks 2 --placement=", "there is no placement ''"),
        ("--microbatches 4 --placement 0,x", "no list of ranks"),
        (f"--microbatches 4 --placement 0,{10**30}", "leaves a rank without a stage"),
        ("--microbatches 4 --ranks 2 --limit 0.5", "rank 0 may hold 0.5"),
        ("--microbatches 4 --ranks 2 --frontier 1,zero", "--frontier 1,zero"),
        ("--microbatches 4 --ranks 2 --frontier 1,2 --csv a.csv", "leave --limit, --csv and --json out"),
        ("--microbatches 4 --ranks 2 --picture a.png", "add --frontier"),
        ("--microbatches 4 --ranks 2 --weights 2bw --frontier 1,2", "one --limit after another"),
        ("--microbatches 2 --ranks 8 --weights 2bw --forward 0 --backward 0", "give the seconds of computations"),
        ("--microbatches 4 --ranks 2 --weights 2bw --recompute some", "under 2bw give all or best"),
        ("--microbatches 4 --ranks 2 --forward 1,2,3", "forward has 3 numbers"),
        ("--microbatches 4 --ranks 2 --moves host", "--moves host needs the time of a move; add --swap-out"),
        ("--microbatches 4 --ranks 2 --moves best --swap-out 1", "add --evict"),
        ("--microbatches 4 --ranks 2 --swap-in 1", "add --moves host or best"),
        ("--microbatches 4 --ranks 2 --moves host --swap-out 1 --load 1", "add --moves pair or best"),
        ("--microbatches 4 --ranks 2 --moves host --swap-out 1 --weights 2bw", "--moves are for --weights flush"),
        ("--microbatches 4 --ranks 2 --placement v --moves pair --evict 1", "on the rank itself, so nothing can move"),
    ],
)
def test_what_does_not_go_together_is_refused(run, arguments, text):
    status, _, error = run("synthesize", *arguments.split())
    assert status == 1 and text in error
