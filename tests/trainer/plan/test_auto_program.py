"""`--pipeline-schedule auto`: the program that a job gets, what it may take, what is kept, and what is refused."""

import json
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from unittest import mock

import pytest
import torch

from megatron import backend

backend.install()  # before anything imports megatron.core

from megatron.documents.tables import ranges_of
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem
from megatron.pipeline.synthesis.several_problems import synthesize_fastest
from megatron.planner.memory.memory import GIB, estimate_memory
from megatron.planner.memory.schedule_demand import proved_demand
from megatron.planner.synthesis import fastest_made
from megatron.trainer import arguments
from megatron.trainer.arguments import parse_args, resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.plan import auto_program, from_flags
from megatron.trainer.plan.auto_costs import MeasuredHere
from megatron.trainer.plan.auto_log import lines_of
from megatron.trainer.plan.auto_problem import moving_problems_of, problems_of, search_of, within_limit
from tests.planner.profiles import profile
from tests.trainer.arguments.command_line import CPU, argv
from tests.trainer.run import run_case

P2 = "--pipeline-model-parallel-size 2 --distributed-backend gloo"
V = "--num-virtual-stages-per-pipeline-rank 2"
UNEVEN = Costs(
    forward=[1.0, 2.0], backward=[2.0, 4.0], backward_input=[1.0, 2.0], backward_weight=[1.0, 2.0], recompute=[1.0, 2.0]
)


@pytest.fixture
def measured(tmp_path):
    """The times of a run of zb-h1 on two ranks, the second of which takes twice as long."""
    path = tmp_path / "measured.json"
    simulate(Schedule.preset("zb-h1", num_stages=2).build([4]), UNEVEN).save(path)
    return path


@pytest.fixture
def profiled(tmp_path):
    """A profile of a machine whose times are formulas, for the model of `command_line`."""
    path = tmp_path / "profile.json"
    profile(tensors=(1,), sizes=(1,), counts=(1, 2, 4), halves=True).save(path)
    return path


def parsed(costs, extra: str = ""):
    auto = f"--pipeline-schedule auto --pipeline-profile {costs} --pipeline-synthesis-seconds 0.5"
    return parse_args(argv(f"{P2} {auto} {extra}"))


def made_for(args, *, world_size: int = 2) -> tuple[auto_program.MadeProgram, TrainConfig]:
    """The program, and the configuration of the job that has it."""
    made = auto_program.make(args, world_size=world_size, platform=CPU)
    job = auto_program.with_program(args, made)
    validate_args(job, world_size=world_size)
    resolve_platform(job, CPU)
    return made, TrainConfig.of(job, padded_vocab_size=128)


@pytest.mark.parametrize(("extra", "world_size"), [("", 2), (V, 2), ("--global-batch-size 16", 4)])
def test_the_program_is_proved_and_not_slower_than_named_orders(profiled, extra, world_size):
    """One stage on a rank, two in a V, and replicas, whose reductions the rows get."""
    made, job = made_for(parsed(profiled, extra), world_size=world_size)
    known = json.loads(made.certificate)
    assert known["bound"] <= known["seconds"] * (1 + 1e-9)
    assert known["best_registered_order"] is None or known["seconds"] <= known["best_registered_order"][1]
    assert job.schedule.data_parallel == (world_size == 4) and job.schedule.tied_embeddings
    assert job.schedule.program.batches == (8,)
    assert job.schedule.rank_of_stage == ((0, 1, 1, 0) if "virtual" in extra else (0, 1))
    assert made.lines[0].startswith("auto: a batch takes")


@pytest.mark.sample(1)
@pytest.mark.parametrize("virtual", ["", V])
def test_under_2bw_the_rows_repeat_at_the_rate_of_the_busiest_rank(profiled, virtual):
    """All batches but the first are alike and take the bound; the limit, which has room for two versions of weights and
    for little else, is kept; and the log says what is known."""
    limit = 0.0034
    flags = f"{virtual} --pipeline-weights 2bw --pipeline-memory-limit {limit}"
    made, job = made_for(parsed(profiled, flags))
    known, repetition = json.loads(made.certificate), job.schedule.repetition
    assert job.schedule.weights.name == "2bw" and repetition.num_period == 1
    assert not job.schedule.drains_between_periods
    assert known["bound"] == pytest.approx(known["seconds"], rel=1e-3)
    assert known["asked"]["--pipeline-weights"] == known["bound_holds_for"]["weights"] == "2bw"
    assert made.lines[0].startswith("auto: under 2bw a batch takes") and "from the work of rank" in made.lines[0]
    assert total(job) <= limit
    begun, first = made_for(parse_args(argv(f"{P2} --pipeline-schedule auto --num-layers 4 {flags}")))
    assert begun.measures and first.schedule.weights == job.schedule.weights and total(first) <= limit
    with pytest.raises(ValueError, match="GiB without activations; raise the limit"):
        made_for(parsed(profiled, f"{virtual} --pipeline-weights 2bw --pipeline-memory-limit 0.0021"))


def test_measured_times_of_a_run_are_costs(measured):
    """Ranks keep their stages, and the slower one is always busy behind its fill."""
    made, job = made_for(parsed(measured))
    assert job.schedule.rank_of_stage == (0, 1)
    known = json.loads(made.certificate)
    assert known["seconds"] == pytest.approx(known["bound"]) and known["seconds"] == pytest.approx(1 + 8 * 6)


def test_a_run_of_whole_backwards_has_no_times_of_halves(tmp_path):
    """Its times are costs of a program of whole backwards: the slower rank waits for a forward and a backward."""
    path = tmp_path / "measured.json"
    simulate(Schedule.preset("flush", num_stages=2).build([4]), UNEVEN).save(path)
    made, job = made_for(parsed(path))
    assert not job.schedule.splits_backward
    assert json.loads(made.certificate)["seconds"] == pytest.approx(1 + 8 * 6 + 2)


def total(job: TrainConfig) -> float:
    """GiB of the fullest rank, as a dry run estimates them."""
    stages = job.schedule.num_stages
    memory = estimate_memory(
        from_flags.architecture(job), from_flags.activation_setting(job), from_flags.training_state(job),
        proved_demand(job.schedule, 8), layers=(4 // stages,) * stages,
    )  # fmt: skip
    return max(each.total for each in memory) / GIB


@pytest.mark.sample(1)
@pytest.mark.parametrize(("virtual", "limit"), [("", 0.0021), (V, 0.002)])
def test_microbatches_are_recomputed_where_memory_asks_for_it(profiled, virtual, limit):
    """Under a limit that keeps one microbatch of a stage on each rank, or not that, a stage recomputes some and keeps
    others, the program is faster for it, keeps the limit, and says which; with room for all activations none is."""
    made, job = made_for(parsed(profiled, f"{virtual} --pipeline-recompute --pipeline-memory-limit {limit}"))
    without, known = parsed(profiled, f"{virtual} --pipeline-memory-limit {limit}"), json.loads(made.certificate)
    if virtual:
        with pytest.raises(ValueError, match="raise the limit, or recompute"):
            made_for(without)
    else:
        plain = json.loads(made_for(without)[0].certificate)
        assert known["seconds"] < plain["seconds"] and known["bound"] <= plain["bound"]
    again: dict[str, list[int]] = {}
    for each in sorted(chain(*job.schedule.program.rows), key=lambda each: each.microbatch or 0):
        if each.kind is Kind.RECOMPUTE:
            again.setdefault(str(each.stage), []).append(each.microbatch)
    assert known["recomputed_microbatches"] == {stage: ranges_of(again[stage]) for stage in sorted(again)}
    assert known["recomputed_stages"] == sorted(map(int, again)) and any(0 < len(each) < 8 for each in again.values())
    assert known["bound_holds_for"]["recomputes"] == "any microbatches of these stages"
    said = (f"stage {stage} {'all microbatches' if len(again[stage]) == 8 else ranges_of(again[stage])}"
            for stage in sorted(again))  # fmt: skip
    assert f"auto: recomputed: {', '.join(said)}" in made.lines
    assert known["bound"] <= known["seconds"] and total(job) <= limit
    made, job = made_for(parsed(profiled, f"{virtual} --pipeline-recompute --pipeline-memory-limit 1"))
    assert "auto: recomputed: nothing" in made.lines and not job.schedule.recompute


def test_no_rank_takes_more_than_the_limit(profiled):
    """The limit lies halfway between what zb-h1 takes and what one microbatch after another takes."""
    named = parse_args(argv(f"{P2} --pipeline-schedule zb-h1"))
    validate_args(named, world_size=2)
    resolve_platform(named, CPU)
    whole = total(TrainConfig.of(named, padded_vocab_size=128))
    with pytest.raises(ValueError, match="without activations; raise the limit") as refused:
        made_for(parsed(profiled, "--pipeline-memory-limit 1e-4"))
    least = float(str(refused.value).split(" takes ")[1].split()[0])
    assert least < whole
    limit = least + 0.7 * (whole - least)
    _, job = made_for(parsed(profiled, f"--pipeline-memory-limit {limit}"))
    assert total(job) <= limit < whole
    made, job = made_for(parse_args(argv(f"{P2} --pipeline-schedule auto --pipeline-memory-limit {limit}")))
    assert "the job begins with one microbatch after another" in made.lines[0]  # on rank 0 there is room for one
    assert total(job) <= limit
    with pytest.raises(ValueError, match=r"--pipeline-memory-limit \S+: rank \d may hold"):
        made_for(parsed(profiled, f"--pipeline-memory-limit {least * 1.0001}"))


class Copied(MeasuredHere):
    """Costs with short copies."""

    def of_moves(self, config, ways, sizes):
        return {name: [0.1 for _ in sizes] for name in ("swap_out", "evict")}


@pytest.mark.sample(1, "pair--0.0035")
@pytest.mark.parametrize(
    ("moves", "virtual", "short"),
    [("host", "", 0.003), pytest.param("host", V, 0.0027, marks=pytest.mark.full), ("pair", "", 0.0035)],
)
def test_activations_move_where_memory_asks_for_it(moves, virtual, short):
    """With slow links a rank should run far ahead, for which it has no room. What moves makes it faster, it keeps the
    limit with what is on its way, and the log and the certificate say what it is; with room for all, nothing moves."""
    for limit, is_short in ((short, True), (1, False)):
        args = parse_args(argv(f"{P2} --pipeline-schedule auto {virtual} --pipeline-memory-limit {limit} --num-layers 4"
                               f" --pipeline-moves {moves} --pipeline-synthesis-seconds 1"))  # fmt: skip
        _, job = made_for(args)
        stages = [1.0] * job.schedule.num_stages
        costs = Costs(forward=stages, backward=[2.0] * len(stages), latency=6.0)
        costs_of, configs = Copied(costs), {tuple(job.schedule.rank_of_stage): job}
        problems, moving = problems_of(job, costs_of), moving_problems_of(job, costs_of)
        found = search_of(job, problems, moving)()
        best = within_limit(configs, costs_of, found)
        schedule = best.schedule(tied_embeddings=True)
        assert total(replace(job, program=schedule, schedule=schedule)) <= limit
        assert (best.way is not None) == bool(best.moved) == (len(found) == 2) == is_short
        lines = list(lines_of(best, may_recompute=False))
        if is_short:
            assert best is found[0] and best.seconds < found[1].seconds
            assert f"auto: moved to the {'host' if moves == 'host' else 'pair rank'}: stage 0 " in "\n".join(lines)
            assert best.certificate()["moves"]["microbatches_of_stage"] == best.moved
        else:
            assert "auto: moved: nothing" in lines


@pytest.mark.full
def test_one_search_decides_what_is_recomputed_and_what_moves():
    """With room for two microbatches of four stages, a program that recomputes some and moves others is faster than
    one that recomputes alone. Its bound is the least of both searches."""
    same = [1.0] * 4
    costs = Costs(forward=same, backward=[2.0] * 4, recompute=same, swap_out=same, swap_in=same)
    problems = [
        Problem(
            rank_of_stage=(0, 1, 2, 3), num_microbatches=12, costs=costs, saved=4.0, stage_input=0.5, limits=9.0,
            recomputed=frozenset(recomputed),
        )
        for recomputed in ((), range(4))
    ]  # fmt: skip
    both, alone = fastest_made(problems, problems, moves="host", recomputes_some=True, seconds=0.0, rounds=1)
    assert both.recomputed and both.moved and alone.recomputed and not alone.moved
    assert both.bound == alone.bound <= both.seconds < alone.seconds
    assert all(not set(both.recomputed.get(stage, ())) & set(moved) for stage, moved in both.moved.items())


def test_what_moves_has_the_size_of_what_is_kept():
    """Where every stage may keep some microbatches, those move, in full; where a stage recomputes all, inputs do."""

    class OfSize(MeasuredHere):
        def of_moves(self, config, ways, sizes):
            return {"swap_out": [*sizes]}

    args = f"{P2} --pipeline-schedule auto --pipeline-memory-limit 1 --num-layers 4 --pipeline-moves host"
    _, job = made_for(parse_args(argv(f"{args} --pipeline-recompute")))
    problems = moving_problems_of(job, OfSize(Costs(forward=[1.0, 1.0], backward=[2.0, 2.0])))
    sizes = {tuple(sorted(each.recomputed)): each.costs.seconds(2)[Kind.SWAP_OUT] for each in problems}
    assert {*sizes} == {(), (0,), (1,), (0, 1)} and sizes[0, 1] == sizes[()]
    assert sizes[0,][0] < sizes[()][0] and sizes[0,][1] == sizes[()][1]


@pytest.mark.parametrize("virtual", ["", pytest.param(V, marks=pytest.mark.full)])
def test_receives_that_stand_ahead_have_their_room(virtual):
    """With slow links receives stand several computations ahead. Where the limit leaves room to them, they do, and
    elsewhere they stand one computation ahead."""
    ahead = set()
    for limit in (0.00199, 0.00203, 0.0021, 0.0023):
        args = parse_args(argv(f"{P2} --pipeline-schedule auto {virtual} --pipeline-memory-limit {limit}"
                               " --pipeline-recompute --num-layers 4"))  # fmt: skip
        _, job = made_for(args)
        stages = range(job.schedule.num_stages)
        costs = Costs(forward=[1.0 for _ in stages], backward=[2.0 for _ in stages], latency=3.0)
        costs_of, configs = MeasuredHere(costs), {tuple(job.schedule.rank_of_stage): job}
        found = synthesize_fastest(problems_of(job, costs_of), recomputes_some=True, rounds=1)
        schedule = within_limit(configs, costs_of, [found]).schedule(tied_embeddings=True)
        assert total(replace(job, program=schedule, schedule=schedule)) <= limit
        ahead.add(found.receives_ahead)
    assert max(ahead) > 1


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("--pipeline-model-parallel-size 1", "is for a pipeline; give --pipeline-model-parallel-size 2 or more"),
        ("--pipeline-recompute", "nothing says what fits; add --pipeline-memory-limit, or leave it out"),
        ("--pipeline-moves host", "nothing says what fits; add --pipeline-memory-limit, or leave it out"),
        (f"--pipeline-moves pair --pipeline-memory-limit 1 {V}", "in a V the pair stages of each rank lie on the rank"),
        ("--pipeline-moves host --pipeline-memory-limit 1 --pipeline-weights 2bw", "overlap, in which nothing moves"),
        (
            "--pipeline-moves host --pipeline-memory-limit 1 --num-experts 2 --moe-token-dispatcher-type alltoall",
            "activations of experts differ in size between microbatches",
        ),
        (
            "--pipeline-moves host --pipeline-memory-limit 1 --recompute-granularity selective --recompute-modules "
            "layernorm",
            "activations that cannot be freed can be neither moved nor counted",
        ),
        ("--pipeline-weights 2bw --2bw-single-gradient-buffer", "needs --pipeline-schedule 2bw"),
        ("--pipeline-weights 2bw --2bw-provisional stage", "auto says which weights each computation uses; leave"),
        ("--pipeline-weights 2bw --2bw-error-feedback", "auto says which weights each computation uses; leave one"),
        ("--pipeline-program rows.csv", "makes a program, and --pipeline-program rows.csv is one"),
        ("--num-virtual-stages-per-pipeline-rank 3", "is 3; give 2, or leave it out"),
        ("--pipeline-memory-limit -1", "--pipeline-memory-limit -1.0 must be greater than 0"),
        ("--rampup-batch-size 2 2 8", "for batches of one size, and this run has batches of 2 to 8"),
        ("--freeze-training --freeze-interval 2", "--freeze-training: the program of --pipeline-schedule auto"),
        ("--balance-activations", "--balance-activations: the program of --pipeline-schedule auto"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_searched(profiled, extra, reason):
    with pytest.raises(ValueError, match=reason):
        auto_program.require(parsed(profiled, extra), world_size=2)


def test_costs_have_to_fit(profiled, measured, tmp_path):
    """None that can be read, one of another model, one of other ranks, and one beside a wish to measure."""
    with pytest.raises(ValueError, match="--pipeline-measured-batches 3 is for a job that measures its own costs"):
        auto_program.require(parsed(profiled, "--pipeline-measured-batches 3"), world_size=2)
    with pytest.raises(ValueError, match="is a timeline, which has none; give a profile of"):
        auto_program.require(parsed(measured, "--pipeline-moves host --pipeline-memory-limit 1"), world_size=2)
    with pytest.raises(ValueError, match="cannot be read"):
        auto_program.require(parsed(tmp_path / "nowhere.json"), world_size=2)
    with pytest.raises(ValueError, match=r"profile.json: the profile is of a model with hidden_size 64, not 32"):
        made_for(parsed(profiled, "--hidden-size 32"))
    with pytest.raises(ValueError, match="stages on the ranks 0 1, and the job's are on 0 1 2 3"):
        made_for(parsed(measured, "--pipeline-model-parallel-size 4"), world_size=4)


def test_its_flags_are_for_it_alone(profiled):
    with pytest.raises(ValueError, match="--pipeline-memory-limit is for --pipeline-schedule auto"):
        validate_args(parse_args(argv(f"{P2} --pipeline-memory-limit 4")), world_size=2)
    with pytest.raises(ValueError, match="--pipeline-weights is for --pipeline-schedule auto"):
        validate_args(parse_args(argv(f"{P2} --pipeline-weights 2bw")), world_size=2)
    with pytest.raises(ValueError, match="makes a program when a training or its --dry-run starts"):
        validate_args(parsed(profiled), world_size=2)


def test_a_program_is_kept_for_the_same_job(measured, tmp_path):
    """Beside the checkpoint that is loaded; another limit asks for another program, and the log says why."""
    folder = tmp_path / "saved"
    folder.mkdir()
    first, _ = made_for(parsed(measured))
    auto_program.keep(first, folder)
    again, _ = made_for(parsed(measured, f"--load {folder}"))
    assert (again.csv, again.certificate) == (first.csv, first.certificate)
    assert again.lines == (f"auto: the program is {folder}/pipeline_program.csv, as before",)
    other, _ = made_for(parsed(measured, f"--load {folder} --pipeline-memory-limit 100"))
    assert (
        "was made with another --pipeline-memory-limit, so another program is made" in other.lines[0]
        and len(other.lines) > 1
    )
    less = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    other, _ = made_for(parsed(measured, f"--load {folder} {less}"))
    assert "--recompute-granularity, --recompute-method, --recompute-num-layers, so" in other.lines[0]
    (folder / auto_program.CERTIFICATE).unlink()
    other, _ = made_for(parsed(measured, f"--load {folder}"))
    assert "does not say what" in other.lines[0]


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_get_what_rank_0_made(measured, fails):
    """Over the store by which ranks meet: the same rows, or the same reason. A process that comes later in the place of
    rank 0 makes none."""
    args, store, found = parsed(measured), torch.distributed.HashStore(), {}

    def make() -> auto_program.MadeProgram:
        if fails:
            raise ValueError("the limit allows none")
        return auto_program.make(args, world_size=2, platform=CPU)

    def take_part(rank: int) -> None:
        share = partial(auto_program.shared, args, store, rank=rank, patience=timedelta(seconds=60), make_it=make)
        try:
            found[rank] = share().made_program
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found[0] == found[1]
    assert found[0] == "the limit allows none" if fails else found[0].csv.count("\n") > 2
    with mock.patch.object(auto_program, "make", side_effect=AssertionError):
        take_part(0)
    assert found[0] == found[1]


def made_case(*, made: auto_program.MadeProgram, **options) -> dict:
    """`train_case` of a job whose program is `made`."""
    parse = arguments.parse_args
    with mock.patch.object(
        arguments, "parse_args", lambda *words, **given: auto_program.with_program(parse(*words, **given), made)
    ):
        return run_case.train_case(**options)


@pytest.mark.full
@pytest.mark.parametrize("virtual", ["", pytest.param(V, marks=pytest.mark.full)])
def test_2bw_trains_what_2bw_trains(profiled, virtual):
    """With the gradients of each batch, bit for bit; two stages in a V as one on each rank."""
    made, job = made_for(parsed(profiled, f"{virtual} --pipeline-weights 2bw --global-batch-size 4"))
    same = "--hidden-dropout 0.1 --num-layers 4 --clip-grad 0 --untie-embeddings-and-output-weights"
    flags = f"--pipeline-schedule auto --pipeline-weights 2bw --pipeline-profile {profiled} {same} {virtual}"
    ranks = run_case.train(2, flags, function=f"{__name__}:made_case", made=made)
    expected = run_case.train(2, f"--pipeline-schedule 2bw {same}")
    assert ranks[-1]["losses"] == expected[-1]["losses"] and len(expected[-1]["losses"]) == 6
    assert job.schedule.splits_backward
    if not virtual:
        assert [rank["gradients"] for rank in ranks] == [rank["gradients"] for rank in expected]
