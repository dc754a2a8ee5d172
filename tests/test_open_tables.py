"""What a file of somebody's own registers goes through everything that the project's own presets go through."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron import backend
from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.planner import Architecture, Cluster, Configuration, Planner
from megatron.planner.memory.schedule_demand import schedule_demand
from megatron.planner.search import SCOPES
from megatron.planner.time.first_principles import FirstPrinciples
from tests import workers
from tests.open_tables import PRESET, registered
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.planner.search.helper import PAPER, run

backend.install()

from tests.draws import draws
from tests.pipeline.runtime.stages.megatron.megatron_cases import Case, deviation
from tests.trainer.run import run_case

MODEL = Architecture.gpt3(
    num_layers=16, hidden_size=256, num_attention_heads=8, sequence_length=128, vocabulary_size=1024
)  # fmt: skip


@pytest.fixture(autouse=True)
def tables():
    with registered():
        yield


def schedule(num_ranks: int = 2, **options) -> Schedule:
    return Schedule.preset(PRESET, num_stages=2 * num_ranks, num_virtual_stages=2, **options)


def test_where_its_stages_lie():
    """The preset's placement decides, and the program says so."""
    assert schedule().rank_of_stage == (1, 0, 0, 1)
    assert schedule().build((2,)).stages_of(1) == (0, 3)


@draws(30)
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_its_programs_are_proved(num_ranks: int, batches: list[int], recompute: bool, tied: bool):
    """For any size, ramp-up and flags; the text is read back as the same program."""
    with registered():
        chosen = schedule(num_ranks, recompute=recompute, tied_embeddings=tied, data_parallel=True)
        program = chosen.build(batches)
        report = check(program, max_saved=chosen.max_saved_microbatches(batches))
        assert report.live_versions == (min(3, len(batches) + 1),) * chosen.num_stages
        assert Program.from_csv(program.to_csv()) == program
        check_periodic(chosen.build_periodic(batches[0]))


@draws(30)
@given(st.integers(1, 3), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3))
def test_its_segments_are_the_programs(num_ranks: int, stretches: list[list[int]]):
    """Segments and drains, which are what runs, are what is built; drains in between included."""
    with registered():
        chosen = schedule(num_ranks)
        stream = chosen.stream()
        for batches in stretches:
            program = chosen.build(batches, first_batch=stream.next_batch, first_microbatch=stream.next_microbatch)
            segments = [*(stream.start_batch(size) for size in batches), stream.drain()]
            for rank, row in enumerate(program.rows):
                assert tuple(each for segment in segments for each in segment[rank]) == row


def test_it_is_simulated_and_explained():
    """Every microbatch's work is in the timeline, and a critical path explains it."""
    costs = Costs(forward=1.0, backward=2.0, latency=0.25)
    timeline = simulate(schedule().build((4,) * 6), costs)
    assert timeline.busy(0) == timeline.busy(1) == 6 * 4 * 2 * 3.0
    path = critical_path(timeline, costs)
    assert path[0].start == 0.0 and path[-1].end == pytest.approx(timeline.end)


def test_it_is_drawn(tmp_path):
    """As a picture and as text."""
    timeline = simulate(schedule().build((2,) * 3), Costs(forward=1.0, backward=2.0))
    draw_timeline([timeline], tmp_path / "timeline.png", saved_microbatches=True, lanes=True)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert "rank 1" in timeline_text(timeline).plain


def test_it_is_estimated():
    """The price is what its very program takes, and its memory that of the proved program: three versions a rank."""
    cluster = Cluster(gpu="A100-80", nodes=1, gpus_per_node=2, bandwidth={"between_nodes": 25.0})
    planner = Planner(MODEL, cluster, FirstPrinciples(MODEL, cluster, PAPER), PAPER)
    job = Configuration(pipeline=2, virtual=2, micro_batch_size=1, global_batch_size=6, schedule=PRESET)
    estimate = planner.estimate(job)
    assert estimate.seconds == pytest.approx(planner.estimate(job, simulate=True).seconds, rel=1e-9)
    demand = schedule_demand(schedule(), 6)
    assert demand.live_versions == (3, 3) and demand.saved_on_rank == (24, 24)


def test_the_search_offers_it():
    """It is priced beside the presets, and no other schedule takes its place."""
    cluster = Cluster(gpu="A100-80", nodes=1, gpus_per_node=2, bandwidth={"between_nodes": 25.0})
    outcome = run(MODEL, cluster, global_batch_size=8, pipeline=(2,), early_stopping=False, scopes=SCOPES[:1])
    assert {each.choice.schedule for each in outcome.kept} >= {PRESET, "2bw", "flush"}


# --- real runs


def run_module(**options):
    from tests.pipeline.runtime.stages.module.module_cases import run

    with registered():
        return run(PRESET, num_virtual_stages=2, **options)


def train_gpt(**options):
    from tests.pipeline.runtime.stages.megatron.megatron_cases import train

    with registered():
        return train(schedule=PRESET, **options)


def gpt_alone(**options):
    """The same case by plain torch, which only needs to know how old the weights are."""
    from tests.pipeline.runtime import made_up_policies
    from tests.pipeline.runtime.stages.megatron.megatron_reference import reference

    with made_up_policies.registered():
        return reference(schedule="3bw", **options)


def train_program(**options):
    with registered():
        return run_case.train_case(**options)


@pytest.mark.parametrize("drains", [(), (0, 3)])
def test_modules_train_as_one_process(drains: tuple[int, ...]):
    """Ramp-up, drains in the middle with evaluations: the losses and parameters of plain torch, bit for bit."""
    training = Training(batches=(2, 2, 3, 3, 1, 4))
    outcomes = workers.run(2, f"{__name__}:run_module", training=training, drains=drains, evaluate=2)
    expected = reference.train(training, delay=2)
    for outcome in outcomes:
        assert [report.losses["loss"] for report in outcome.reports] == expected.losses
        for name, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[name])


@pytest.mark.full
def test_a_gpt_trains_as_one_process():
    """Tied embeddings, both copies on one rank, and clipping: losses, norms and weights of plain torch."""
    options = {"layers": 4, "batches": (2, 2, 3, 3, 4, 4), "clip": 0.5, "tied": True, "warmup": 8}
    ranks = workers.run(2, f"{__name__}:train_gpt", timeout=100, p=2, v=2, **options)
    [expected] = workers.run(1, f"{__name__}:gpt_alone", timeout=100, **options)
    worst = deviation(Case(schedule="3bw", p=2, v=2, **options), expected, ranks)
    assert worst.loss < 1e-5 and worst.norm < 1e-5 and max(worst.newest, worst.older) < 2e-6


@pytest.mark.full
def test_the_program_trains_saves_and_goes_on(tmp_path):
    """pretrain_gpt.py's own run on two ranks, saved and resumed through files, bit for bit; flush loads it, too. Rank 0
    reads no data, but writes the indices of samples for rank 1.
    """
    here, two = f"--pipeline-schedule {PRESET}", "--num-virtual-stages-per-pipeline-rank 2"
    model = "--num-layers 4 --hidden-dropout 0.1 --untie-embeddings-and-output-weights --clip-grad 0"

    def train(flags: str, num_ranks: int = 2) -> list[dict]:
        flags += f" {model} --pipeline-model-parallel-size {num_ranks} {run_case.data_flags()}"
        flags += f" --data-cache-path {tmp_path / 'cache'}"
        return workers.run(num_ranks, f"{__name__}:train_program", flags=flags)

    whole = train(f"{here} {two} --save {tmp_path / 'saved'} --save-interval 3")
    resumed = train(f"{here} {two} --load {tmp_path / 'saved'} --ckpt-step 3")
    losses = next(each["losses"] for each in whole if each["losses"])
    assert next(each["losses"] for each in resumed if each["losses"]) == {step: losses[step] for step in (4, 5, 6)}
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    [flush] = train(f"--load {tmp_path / 'saved'} --train-iters 7 --override-opt_param-scheduler", num_ranks=1)
    assert flush["iteration"] == 7 and list(flush["losses"]) == [7]
