"""The benchmark of shrinking pipelines: its plans are what the arms allow, and all of them run."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from papers.pipetransformer import elastic, elastic_figures
from papers.pipetransformer.elastic_plan import ARMS, Phase, Setting, depths, places, plan, seconds_of, seconds_of_arm

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
        assert pipeline.num_ranks * pipeline.num_replicas <= setting.num_stages
        assert pipeline.num_replicas == 1 or arm.replicates
        assert pipeline.num_microbatches * pipeline.num_replicas == setting.num_microbatches
        assert not pipeline.cached or (arm.caches and pipeline.num_frozen >= setting.cache_from)
    stored = 0
    for before, behind in pairwise(phases):
        deeper = behind.pipeline.num_frozen > before.pipeline.num_frozen
        assert bool(behind.moves) <= deeper, "no transition but behind a freeze"
        assert deeper or behind.pipeline.num_stored == behind.pipeline.num_frozen, "the second epoch reads"
        if before.pipeline.cached:
            stored = before.pipeline.num_frozen
        if deeper and behind.pipeline.cached:
            assert behind.pipeline.num_stored == stored, "what is there is read"


@pytest.mark.parametrize(
    "more",
    [
        ("--read", "0.1", "--write", "0.1"), ("--write", "1"), ("--move", "1000"), ("--move", "0"),
        ("--interval-batches", "1"), ("--intervals", "2"), ("--stages", "3"), ("--stages", "1"),
        ("--microbatches", "4"), ("--microbatches", "1"), ("--link", "1e6"), ("--schedule", "gpipe"),
        ("--layer-times", "1ms,8ms,0,2ms,3ms,1ms", "--saved", "0", "--prefix", "device"), ("--epochs", "3"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_part_more_is_never_slower(more):
    setting = setting_of(*more)
    seconds = {arm: seconds_of_arm(plan(arm, setting), setting) for arm in ARMS}
    for arm in ARMS:
        for other in ARMS:
            if arm.has_parts_of(other):
                assert seconds[arm] <= seconds[other] * (1 + 1e-9), (arm.name, other.name)


def test_a_cache_is_a_choice():
    """It is there where it pays over the whole run, although an epoch that writes takes longer than one that computes;
    where it does not pay it is not; and where it is forced it is there nevertheless.
    """
    name = "freeze + AutoPipe + AutoCache"
    pays, dear = setting_of(), setting_of("--write", "1")
    forced = replace(dear, is_forced=True)
    assert any(each.pipeline.cached for each in plan(OF["all"], pays))
    assert plan(OF[name], dear) == plan(OF["freeze + AutoPipe"], dear)
    frozen = [each for each in plan(OF[name], forced) if each.pipeline.num_frozen >= forced.cache_from]
    assert frozen and all(each.pipeline.cached for each in frozen)
    assert plan(OF["all"], setting_of("--cache-from", "never")) == plan(OF["freeze + AutoPipe + AutoDP"], pays)


def test_a_plan_looks_ahead():
    """The best of all ways through three stretches that can be tried one by one."""
    setting = replace(setting_of("--intervals", "4", "--move", "1"), num_stages=2, limit=math.inf)
    arm = OF["freeze + AutoPipe + AutoDP"]
    batches, others = setting.batches, sorted(set(setting.depths) - {0})

    def least(now, place: int) -> float:
        if place == len(others):
            return 0.0
        num_frozen = others[place]
        found = [setting.of_shape((now.num_ranks, now.num_replicas), num_frozen, None, places(now))]
        found += [setting.of_shape(shape, num_frozen) for shape in setting.shapes(replicates=True)]
        return min(
            setting.depths.count(num_frozen) * batches * each.seconds
            + setting.seconds_of_move(now, each)
            + least(each, place + 1)
            for each in found
        )

    static = setting.static()
    found = seconds_of_arm(plan(arm, setting), setting)
    assert len(others) == 3 and found == pytest.approx(batches * static.seconds + least(static, 0))


def test_seconds_of_pipelines_are_bounded():
    """Nothing is given up for a bound that is too high."""
    for more in ((), ("--link", "4ms"), ("--layer-times", "1ms,8ms,0,2ms,3ms,1ms"), ("--schedule", "gpipe")):
        setting = setting_of(*more)
        for shape in setting.shapes(replicates=True):
            for num_frozen, stored in ((0, None), (2, None), (5, None), (4, 0), (4, 2), (4, 4)):
                pipeline = setting.of_shape(shape, num_frozen, stored)
                if pipeline is not None:
                    assert setting.at_least(shape, num_frozen, stored) <= pipeline.seconds * (1 + 1e-9)


def test_what_moves():
    """The state of the layers that a rank gets, by the rank that gets most; a cache that is turned on moves nothing."""
    setting = replace(setting_of(), limit=math.inf, move=0.5, move_layer=1.0)
    static, alone = setting.static(), setting.of_shape((1, 4), 0)
    assert static.layers_of_rank == (2, 2, 1, 1) and alone.layers_of_rank == (6,)
    assert setting.seconds_of_move(static, alone) == pytest.approx(5), "one has one of six"
    assert setting.seconds_of_move(alone, static) == 0.0
    assert setting.seconds_of_move(static, setting.of_shape((1, 4), 3)) == pytest.approx(3 + 1 / 6), "and weights alone"
    assert setting.seconds_of_move(static, setting.of_shape((4, 1), 1, 1, (1, 2, 1, 1))) == 0.0
    assert setting.seconds_of_move(setting.of_shape((1, 1), 0), alone) == pytest.approx(6), "ranks that were idle"


def test_ranks_may_be_idle():
    """Three replicas have no 32 microbatches to share out; two have, and one rank is idle."""
    setting = setting_of("--stages", "3", "--microbatches", "32", "--alpha", "0.5")
    last = plan(OF["all"], setting)[-1].pipeline
    assert (last.num_ranks, last.num_replicas) == (1, 2)
    assert setting.shapes(replicates=True) == [(1, 1), (1, 2), (2, 1), (3, 1)]


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


@pytest.mark.full
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
    as_it_is, least = elastic_figures.by_static_cut(loose)
    assert as_it_is["limit"] == loose.limit and as_it_is["cut"] == [2, 2, 1, 1]
    assert least["limit"] == pytest.approx(2 * (1 + 2 * 0.73)) and least["cut"] == [1, 1, 2, 2]
    assert all(each["static"] == 1.0 and set(OF) < set(each) for each in (as_it_is, least))


def test_figures():
    """More alpha, more speed; a short pipeline needs fewer microbatches; the cache is worth it early."""
    setting = setting_of()
    rows = elastic_figures.by_alpha(setting, 0.45)
    speeds = [row["all"] for row in rows]
    assert speeds == sorted(speeds) and 0.45 in [row["alpha"] for row in rows]
    best = [each.best for each in elastic_figures.best_microbatches(setting, 0.1)]
    assert best == sorted(best, reverse=True) and best[-1] == 1
    *rows, never = elastic_figures.by_cache_from(setting)
    assert rows[2]["all"] > never["all"] and len(rows) == 6
    assert all(row["read"] < row["computed"] < row["written"] for row in rows[2:])


def test_one_run_does_not_decide():
    assert elastic_figures.median_of_runs([[1.0, 1.1, 5.0], [9.0, 9.0, 9.0], [1.2, 1.2, 1.2]]) == 1.2
    assert elastic_figures.median_of_runs([[9.0, 9.0], [1.0, 1.2]]) == pytest.approx(1.1)


@pytest.mark.full
def test_ranks_without_a_pipeline_wait():
    """Two of three ranks are replicas, then one alone runs, then all three."""
    args = elastic.parse(["--stages", "3", "--layer-times", "1ms,1ms,1ms", "--microbatches", "4", "--batches", "3",
                          "--repeats", "1", "--payload", "64"])  # fmt: skip
    setting = replace(elastic.setting_of(args), limit=math.inf)
    shapes = ((1, 2), (1, 1), (3, 1))
    phases = tuple(Phase(setting.layers, setting.of_shape(each, 0), 0, 1, transition=0.1) for each in shapes)
    (run,) = elastic.measured(args, {"idle": phases})["idle"]
    for phase, found in zip(phases, run, strict=True):
        assert len(found["batches"]) == 2 and min(found["batches"]) > phase.pipeline.num_microbatches * 3e-3


@pytest.mark.full
def test_one_rank(tmp_path, capsys):
    """A static pipeline of one stage is measured, too."""
    path = tmp_path / "found.json"
    options = ["--stages", "1", "--layer-times", "1ms,1ms", "--microbatches", "2", "--intervals", "2", "--batches", "3"]
    assert elastic.main([*options, "--repeats", "1", "--alpha", "1/2", "--json", str(path)]) == 0
    assert all(row["measured"] > 0 for row in json.loads(path.read_text())["rows"])


@pytest.mark.full  # the command: test_one_rank; ranks that come and go: test_ranks_without_a_pipeline_wait
def test_all_arms_run(tmp_path, capsys):
    """Two ranks, a few milliseconds a layer: every phase of every arm has run, and no batch is faster than its stages
    allow; the picture is drawn.
    """
    path, picture = tmp_path / "found.json", tmp_path / "all.png"
    assert elastic.main([*SMALL, "--json", str(path), "--picture", str(picture)]) == 0
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert None in [row["limit"] for row in found["assumptions"]], "memory without end"
    rows = {row["arm"]: row for row in found["rows"]}
    assert set(rows) == set(OF) and picture.stat().st_size > 10_000
    for row in rows.values():
        for phase in row["phases"]:
            assert len(phase["every_batch"]) == 1 and len(phase["every_batch"][0]) == 2
            assert phase["measured_run"] > 3 * phase["m"] * phase["busiest"], "sleeps are no shorter than told"
            assert (phase["measured_transition"] > 0) == (phase["transition"] > 0)
    assert {(each["p"], each["d"]) for each in rows["all"]["phases"]} == {(2, 1), (1, 2)}
    assert any(each["cache"].startswith("compute") for each in rows["all"]["phases"])
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
        (["--layers", "4"], "--stages is 8; give 1 to 16, and no more than the 4 layers"),
        (["--layers", "4", "--layer-times", "1,2"], "--layer-times has 2 and --layers is 4"),
        (["--layer-times", "0"], "layers that take no time cannot be sped up; give times above 0"),
        (["--layer-times", "abc"], "abc is no time; give seconds, 0 and more, such as 0.004 or 4ms"),
        (["--alpha", "1"], "--alpha is 1; give a number between 0 and 1"),
        (["--alpha", "1/0"], "1/0 is no number of 0 and more; give such as 0.5 or 1/3"),
        (["--link", "0"], "a link of 0 carries nothing"),
        (["--link", "0MB/s"], "a link of 0MB/s carries nothing"),
        (["--link", "fast"], "give seconds of a transfer, such as 4ms, or bytes per second, such as 1e9 or 1GB/s"),
        (["--cache-from", "-1"], "-1 is no number of layers; give 0 and more, or never"),
        (["--limit", "0"], "--limit: more than 0"),
        (["--limit", "inf"], "inf is no number"),
        (["--limit", "nan"], "nan is no number"),
        (["--saved", "nan"], "nan is no number"),
        (["--frozen", "inf"], "inf is no number"),
    ],
)
def test_sentences(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        elastic.parse(arguments)
    assert sentence in capsys.readouterr().err


def test_memory_that_is_too_small(capsys):
    assert elastic.main(["--simulate", "--limit", "1"]) == 2
    assert "the static pipeline takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.004", 0.004), ("4ms", 0.004), ("2000ms", 2.0), ("1.5s", 1.5), ("1", 1.0),
        ("1e9", elastic.OUTPUT_BYTES / 1e9), ("1GB/s", elastic.OUTPUT_BYTES / 1e9),
        ("250MB/s", elastic.OUTPUT_BYTES / 2.5e8), ("0.5B/s", elastic.OUTPUT_BYTES / 0.5),
    ],
)  # fmt: skip
def test_links(text, seconds):
    assert elastic.link(text) == pytest.approx(seconds)


def test_state_goes_over_the_same_links():
    """10 GB/s and 3.7 s if nothing is told, and what is told as it is."""

    def told(*arguments: str) -> tuple[float, float, float]:
        setting = elastic.setting_of(elastic.parse(arguments))
        return setting.layers.reduce, setting.move, setting.move_layer

    assert told() == pytest.approx((2 * 4 * 7.09e6 / 10e9, 3.7, 0.0))
    assert told("--link", "100MB/s") == pytest.approx((2 * 4 * 7.09e6 / 1e8, 3.7, 18 * 7.09e6 / 1e8))
    assert told("--link", "1e8", "--reduce", "1ms", "--move", "2") == pytest.approx((0.001, 2.0, 0.0))


def test_numbers():
    args = elastic.parse(["--alpha", "1/3", "--cache-from", "none"])
    assert args.alpha == 1 / 3 and args.cache_from is None
    assert elastic.parse(["--cache-from", "0"]).cache_from == 0
