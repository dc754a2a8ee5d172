"""The benchmark of shrinking pipelines: its plans are what the arms allow, and all of them run."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import elastic, elastic_figures
from benchmarks.elastic_plan import ARMS, Setting, depths, plan, seconds_of, seconds_of_arm

OF = {arm.name: arm for arm in ARMS}
SMALL = [
    "--stages", "2", "--layer-times", "2ms,1ms,2ms,1ms", "--microbatches", "4", "--intervals", "3", "--cache-from",
    "1", "--alpha", "0.4", "--read", "0.2ms", "--write", "0.3ms", "--reduce", "0.5ms", "--move", "0.01", "--batches",
    "3", "--repeats", "1", "--payload", "64",
]  # fmt: skip


def setting_of(*more: str) -> Setting:
    """Six layers on four ranks."""
    shape = ["--stages", "4", "--layers", "6", "--microbatches", "8", "--intervals", "5", "--cache-from", "2"]
    return elastic.setting_of(elastic.parse([*shape, *more]))


def test_depths():
    """The closed form of the paper's bound, rounded down."""
    assert depths(12, 1 / 3, 10) == (0, 4, 6, 8, 9, 10, 10, 11, 11, 11)
    assert depths(24, 0.2, 8) == tuple(math.floor(24 * (1 - 0.8**each) + 1e-9) for each in range(8))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
@pytest.mark.parametrize("more", [(), ("--saved", "0"), ("--epochs", "2", "--link", "4ms"), ("--schedule", "gpipe")])
def test_a_plan_is_what_its_arm_allows(arm, more):
    """All intervals are there once, in order; ranks, cut, replicas and cache as the arm has them; memory is kept."""
    setting = setting_of(*more)
    phases, static = plan(arm, setting), setting.static()
    assert sum(each.intervals for each in phases) == pytest.approx(len(setting.depths))
    assert phases[0].pipeline == static and not phases[0].transition
    frozen = [each.pipeline.num_frozen for each in phases]
    assert frozen == sorted(frozen) and set(frozen) == (set(setting.depths) if arm.freezes else {0})
    for phase in phases:
        pipeline = phase.pipeline
        assert pipeline.num_bytes <= setting.limit * (1 + 1e-9)
        assert arm.recuts or pipeline.layers_of_rank == static.layers_of_rank
        assert pipeline.num_ranks * pipeline.num_replicas == setting.num_stages or not arm.replicates
        assert pipeline.num_replicas == 1 or arm.replicates
        assert pipeline.num_microbatches * pipeline.num_replicas == setting.num_microbatches
        assert not pipeline.cached or (arm.caches and pipeline.num_frozen >= setting.cache_from)
    for before, behind in pairwise(phases):
        deeper = behind.pipeline.num_frozen > before.pipeline.num_frozen
        assert bool(behind.moves) <= deeper, "no transition but behind a freeze"
        assert deeper or behind.pipeline.num_stored == behind.pipeline.num_frozen, "the second epoch reads"
        if deeper and behind.pipeline.cached:
            stored = before.pipeline.num_frozen if before.pipeline.cached else 0
            assert behind.pipeline.num_stored == stored, "what is there is read"


def test_parts_together_are_faster_than_alone():
    setting = setting_of()
    seconds = {arm.name: seconds_of_arm(plan(arm, setting), setting) for arm in ARMS}
    assert seconds["all"] < seconds["freeze + AutoPipe + AutoDP"] < seconds["freeze + AutoPipe"]
    assert seconds["freeze + AutoPipe"] < seconds["freeze only"] < seconds["static"]
    free = replace(setting, move=0.0)
    phase = plan(OF["all"], free)[-1]
    assert seconds_of(phase, free) == pytest.approx(free.batches * phase.intervals * phase.pipeline.seconds)


def test_a_transition_has_to_repay():
    """Where moving takes longer than all intervals, the cut that is there is kept."""
    setting = replace(setting_of(), move=1e6)
    phases = plan(OF["freeze + AutoPipe + AutoDP"], setting)
    assert all(each.pipeline.layers_of_rank == setting.static().layers_of_rank for each in phases)
    assert not any(each.moves for each in phases)


def test_memory_that_binds():
    """Less memory, more ranks; the weights of what is cached count where they stay; and of equally even cuts one takes
    least.
    """
    loose, tight = setting_of(), setting_of("--saved", "0")
    for name in ("freeze + AutoPipe + AutoDP", "all"):
        ranks = [[each.pipeline.num_ranks for each in plan(OF[name], it)] for it in (loose, tight)]
        assert min(ranks[0]) <= min(ranks[1]) and sum(ranks[0]) / len(ranks[0]) < sum(ranks[1]) / len(ranks[1])
    papers = elastic.setting_of(elastic.parse(["--saved", "0"]))
    host, device = (replace(papers, on_host=each) for each in (True, False))
    assert seconds_of_arm(plan(OF["all"], host), host) < seconds_of_arm(plan(OF["all"], device), device)
    assert loose.limit == pytest.approx(2 * (1 + 4 * 0.73)), "2 2 1 1"
    assert elastic_figures.least_static(loose) == pytest.approx(2 * (1 + 2 * 0.73)), "1 1 2 2"


def test_figures():
    """More alpha, more speed; a short pipeline needs fewer microbatches; the cache is worth it early."""
    setting = setting_of()
    speeds = [row["all"] for row in elastic_figures.by_alpha(setting)]
    assert speeds == sorted(speeds)
    best = [each.best for each in elastic_figures.best_microbatches(setting, 0.1)]
    assert best == sorted(best, reverse=True) and best[-1] == 1
    *rows, never = elastic_figures.by_cache_from(setting)
    assert rows[2]["all"] > never["all"] and len(rows) == 6
    assert all(row["read"] < row["computed"] < row["written"] for row in rows[2:])


def test_all_arms_run(tmp_path, capsys):
    """Two ranks, a few milliseconds a layer: every phase of every arm has run, and no batch is faster than its stages
    allow; the picture is drawn.
    """
    path, picture = tmp_path / "found.json", tmp_path / "all.png"
    assert elastic.main([*SMALL, "--json", str(path), "--picture", str(picture)]) == 0
    found = json.loads(path.read_text())
    rows = {row["arm"]: row for row in found["rows"]}
    assert set(rows) == set(OF) and picture.stat().st_size > 10_000
    for row in rows.values():
        for phase in row["phases"]:
            assert len(phase["every_batch"]) == 1 and len(phase["every_batch"][0]) == 2
            assert phase["measured_run"] > 3 * phase["m"] * phase["busiest"], "sleeps are no shorter than told"
            assert (phase["measured_transition"] > 0) == (phase["transition"] > 0)
    assert {(each["p"], each["d"]) for each in rows["all"]["phases"]} == {(2, 1), (1, 2)}
    assert [each["cache"] for each in rows["all"]["phases"]][1].startswith("compute")
    assert all(row["measured"] > 0 for row in found["figure_11"])
    assert "speed-up, measured" in capsys.readouterr().out


@pytest.mark.full
def test_slow_links_on_four_ranks(tmp_path):
    """Uneven layers, transfers that take as long as a layer, ranks with frozen layers alone."""
    path = tmp_path / "found.json"
    options = ["--stages", "4", "--layer-times", "2ms,4ms,2ms,4ms,2ms,4ms", "--microbatches", "8", "--intervals", "4",
               "--link", "3ms", "--move", "0.01", "--batches", "3", "--repeats", "1", "--json", str(path)]  # fmt: skip
    assert elastic.main(options) == 0
    rows = json.loads(path.read_text())["rows"]
    phases = [phase for row in rows for phase in row["phases"]]
    assert all(phase["measured_run"] > 3 * phase["m"] * phase["busiest"] for phase in phases)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layers", "4"], "--stages is 8; give 2 to 16, and no more than the 4 layers"),
        (["--layers", "4", "--layer-times", "1,2"], "--layer-times has 2 and --layers is 4"),
        (["--alpha", "1"], "--alpha is 1; give a number between 0 and 1"),
        (["--link", "0"], "a link of 0 carries nothing"),
    ],
)
def test_sentences(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        elastic.parse(arguments)
    assert sentence in capsys.readouterr().err


def test_memory_that_is_too_small(capsys):
    assert elastic.main(["--simulate", "--limit", "1"]) == 2
    assert "the static pipeline takes" in capsys.readouterr().err
