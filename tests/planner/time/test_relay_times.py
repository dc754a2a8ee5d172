"""The time of a relay: its closed form is what its programs take, and so is what is extrapolated from short batches."""

import random
import time
from dataclasses import replace

import pytest

from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import Software
from megatron.planner.planner import Planner
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import _MOST_PRICED, _simulate, closed_form, priced, simulated


def relayed(stages: int, m: int, *, pipeline: int = 1, update: str = "eager", data: int = 1) -> Configuration:
    return Configuration(
        schedule="l2l", pipeline=pipeline, virtual=stages // pipeline, data=data, micro_batch_size=1,
        global_batch_size=m * data, host_update=update,
    )  # fmt: skip


def test_the_closed_form_is_exact_where_there_is_one():
    generator, compared = random.Random(15), 0
    for _ in range(60):
        n, m = generator.choice((2, 3, 6)), generator.randint(1, 8)
        costs = Costs(
            backward=generator.uniform(1.5, 2.5), fetch=generator.uniform(0, 3 * m), store=generator.uniform(0, 3 * m),
            update=generator.uniform(0, 6 * m), reduce_grad=generator.uniform(0, 2 * m),
        )  # fmt: skip
        configuration = relayed(n, m, data=2)
        closed = closed_form(costs, configuration)
        if closed is not None:
            exact = simulated(costs, configuration, configuration.pipeline_schedule(tied_embeddings=False))
            assert abs(closed.seconds / exact.seconds - 1) < 1e-9, (n, m, costs)
            compared += 1
    assert compared > 30


def test_there_is_none_where_it_does_not_hold():
    """Fetches that nothing hides, too few gradient buffers, deferred updates, other ranks, stages that differ."""
    short = Costs(fetch=2, store=2, update=2)
    assert closed_form(short, relayed(4, 4)) is not None
    assert closed_form(Costs(fetch=13, store=2, update=2), relayed(4, 4)) is None
    assert closed_form(Costs(fetch=2, store=13, reduce_grad=14, update=2), relayed(4, 4, data=2)) is None
    assert closed_form(short, relayed(4, 4, update="deferred")) is None
    assert closed_form(short, relayed(4, 4, pipeline=2)) is None
    assert closed_form(Costs(forward=[1, 1, 1, 1.1], fetch=2), relayed(4, 4)) is None


def test_deferred_updates_gate_the_next_batch():
    """L2L's eager server hides updates behind backwards; behind the norm they hide behind the next batch's forwards:
    docs/schedules_l2l.md's 1.5 at U = 3uC.
    """
    n, m = 48, 4
    costs, ideal = Costs(fetch=1, store=1, update=3 * m), n * 4 * m
    eager, deferred = (
        simulated(costs, each, each.pipeline_schedule(tied_embeddings=False)).seconds / ideal
        for each in (relayed(n, m), relayed(n, m, update="deferred"))
    )
    assert eager < 1.03 and 1.45 < deferred < 1.52


@pytest.mark.full
def test_short_batches_stand_for_long_ones():
    """Within half a percent, with copies and updates of any length, eager and deferred, on one rank and several."""
    generator = random.Random(7)
    for stages, pipeline, m in ((40, 1, 40), (12, 2, 100)):
        for update in ("eager", "deferred"):
            configuration = relayed(stages, m, pipeline=pipeline, update=update)
            schedule = configuration.pipeline_schedule(tied_embeddings=False)
            costs = Costs(
                forward=[generator.uniform(1, 1.2) for _ in range(stages)], fetch=generator.uniform(0, 2 * m),
                store=generator.uniform(0, 2 * m), update=generator.uniform(0, 4 * m), backward=2.0,
            )  # fmt: skip
            assert m * stages > _MOST_PRICED // 4
            found, exact = priced(costs, configuration, schedule), _simulate(costs, schedule, m)
            assert abs(found.seconds / exact[0] - 1) < 5e-3, (stages, pipeline, update)


def test_a_fetch_in_shares_takes_a_part_of_the_way_to_the_host():
    """And the rest of the links between GPUs: with NVLink it is shorter, over PCIe alone as long."""
    model = Architecture.gpt3(
        num_layers=8, hidden_size=1024, num_attention_heads=16, sequence_length=512, vocabulary_size=51200
    )
    for gpu, whole_over_shares in (("H100", 8 / (1 + 7 * 63.0 / 450)), ("GTX1080Ti", 8 / (1 + 7 * 15.75 / 16))):
        prices = FirstPrinciples(model, Cluster(gpu=gpu, nodes=1, gpus_per_node=8, host_memory_gib=512))
        one, other = relayed(8, 4, data=8), replace(relayed(8, 4, data=8), gathers_fetch=True)
        whole, shares = (prices.costs(each, (1,) * 8) for each in (one, other))
        assert whole.fetch == pytest.approx([whole_over_shares * each for each in shares.fetch], rel=0.01)
        assert (whole.store, whole.update) == (shares.store, shares.update)
    apart = FirstPrinciples(
        model, Cluster(gpu="H100", nodes=8, gpus_per_node=1, host_memory_gib=512, bandwidth={"between_nodes": 50})
    )
    assert apart.costs(one, (1,) * 8).fetch == pytest.approx(apart.costs(other, (1,) * 8).fetch)


def test_what_programs_overlap_is_not_taken_off_besides():
    """Reductions of a relay run beside computation on a lane of their own, in its programs; flags add nothing."""
    model = Architecture.gpt3(
        num_layers=8, hidden_size=8192, num_attention_heads=64, sequence_length=512, vocabulary_size=51200
    )
    cluster = Cluster(gpu="H100", nodes=1, gpus_per_node=8, host_memory_gib=512)
    asked = relayed(8, 4, data=8)
    plain, overlapped = (
        FirstPrinciples(model, cluster, Software(overlaps_gradients=each, overlaps_weights=each)).costs(asked, (1,) * 8)
        for each in (False, True)
    )
    assert plain.reduce_grad == overlapped.reduce_grad and min(plain.reduce_grad) > 0


def test_a_deep_model_takes_no_time_to_price():
    """96 layers, embedding and head included: far below a second."""
    model = Architecture.gpt3(
        num_layers=96, hidden_size=1024, num_attention_heads=16, sequence_length=512, vocabulary_size=51200
    )
    cluster = Cluster(gpu="V100-16", nodes=1, gpus_per_node=1, host_memory_gib=512)
    planner = Planner(model, cluster, FirstPrinciples(model, cluster))
    configuration = relayed(96, 64)
    planner.estimate(relayed(96, 63))
    started = time.process_time()
    found = planner.estimate(configuration)
    assert time.process_time() - started < 1.0
    assert found.fits and found.host.spare_gib > 400 and found.seconds > 0 and 0 <= found.bubble < 1
