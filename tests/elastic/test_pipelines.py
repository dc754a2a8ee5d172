"""What a pipeline takes once its first layers are frozen."""

import pytest

from megatron.elastic.pipelines import Layers, pipelines, schedule_of, work_of_stages
from megatron.pipeline.simulate import simulate

EVEN = Layers((1.0,) * 8, (2.0,) * 8)


def one(found, num_ranks):
    (pipeline,) = (each for each in found if each.num_ranks == num_ranks)
    return pipeline


def test_nothing_frozen():
    """flush: (m+p-1)(f+b) of the busiest rank; replicas share the batch out, and one rank has no bubble."""
    found = pipelines(EVEN, 0, world=8, num_microbatches=16)
    assert [(each.num_ranks, each.num_replicas, each.num_microbatches) for each in found] == [
        (8, 1, 16), (4, 2, 8), (2, 4, 4), (1, 8, 2),
    ]  # fmt: skip
    assert [each.seconds for each in found] == pytest.approx([23 * 3, 11 * 6, 5 * 12, 2 * 24])
    assert [each.num_bytes for each in found] == [1, 2, 4, 8]


def test_frozen_layers_go_where_they_are_cheap():
    """Four layers cost a forward each: of two ranks the first takes them and one more, and the batch does not pay for
    their fill again.
    """
    pipeline = one(pipelines(EVEN, 4, world=2, num_microbatches=8), 2)
    assert pipeline.layers_of_rank == (5, 3)
    assert pipeline.seconds < one(pipelines(EVEN, 0, world=2, num_microbatches=8), 2).seconds * 0.75
    wholly = one(pipelines(Layers((1.0,) * 4, (2.0,) * 4), 3, world=2, num_microbatches=8), 2)
    assert wholly.layers_of_rank == (3, 1) and wholly.seconds == pytest.approx(8 * 3)


def test_a_prefix_that_is_read():
    """It costs the reading, on the first rank, and its weights stay there for what is not in the cache."""
    layers = Layers((1.0,) * 8, (2.0,) * 8, read=0.25)
    read = one(pipelines(layers, 4, world=2, num_microbatches=8, cached=True), 2)
    computed = one(pipelines(layers, 4, world=2, num_microbatches=8), 2)
    assert read.layers_of_rank == (2, 2) and read.seconds < computed.seconds
    assert read.num_bytes == pytest.approx(2 + 4 / 6)
    faster = one(pipelines(Layers((1.0,) * 8, (2.0,) * 8, read=0.0), 4, world=2, num_microbatches=8, cached=True), 2)
    assert faster.seconds < read.seconds


def test_a_first_epoch_reads_computes_and_writes():
    """Four frozen layers, of which the cache has three: read, compute one, write; the others need no memory on the
    device if they are on the host. The first rank gets fewer layers for that.
    """
    layers = Layers((1.0,) * 8, (2.0,) * 8, read=0.25, write=0.5)
    choices = {"world": 1, "num_microbatches": 4, "cached": True, "on_host": True}
    nothing, three, four = (one(pipelines(layers, 4, num_stored=each, **choices), 1) for each in (0, 3, 4))
    assert nothing.seconds == pytest.approx(4 * (4 + 0.5 + 12))
    assert three.seconds == pytest.approx(4 * (0.25 + 1 + 0.5 + 12))
    assert four.seconds == pytest.approx(4 * (0.25 + 12)) and four == one(pipelines(layers, 4, **choices), 1)
    assert [each.num_bytes for each in (nothing, three, four)] == pytest.approx([4 + 4 / 6, 4 + 1 / 6, 4])
    assert [(each.rank, each.forward, each.num_frozen) for each in work_of_stages(layers, three)] == [
        (0, 1.75, 1),
        (0, 4, 0),
    ]
    at_once = one(pipelines(layers, 4, num_stored=0, world=2, num_microbatches=8, cached=True), 2)
    assert at_once.layers_of_rank == (1, 3)
    with pytest.raises(ValueError, match="a cache cannot have the output of 5 of 4 frozen layers"):
        pipelines(layers, 4, num_stored=5, **choices)


def test_a_cut_that_is_given():
    (kept,) = pipelines(EVEN, 4, world=2, num_microbatches=8, layers_of_rank=(4, 4))
    assert kept.layers_of_rank == (4, 4) and kept.num_ranks == 2
    assert kept.seconds > one(pipelines(EVEN, 4, world=2, num_microbatches=8), 2).seconds
    with pytest.raises(ValueError, match=r"\(4, 3\) is no cut of 8 layers"):
        pipelines(EVEN, 4, world=2, num_microbatches=8, layers_of_rank=(4, 3))


def test_layers_are_cut_so_that_they_fit():
    """Two frozen, six trained: even in time is 4, 2, 2, which does not fit into 2; 3, 3, 2 does not either."""
    layers = Layers((1.0,) * 8, (2.0,) * 8, frozen_bytes=1.0)
    even = one(pipelines(layers, 2, world=3, num_microbatches=9), 3)
    assert even.layers_of_rank == (4, 2, 2) and even.num_bytes == 4
    fitting = one(pipelines(layers, 2, world=3, num_microbatches=9, most_bytes=3), 3)
    assert fitting.layers_of_rank == (3, 3, 2) and fitting.num_bytes == 3 and fitting.seconds > even.seconds
    assert one(pipelines(layers, 2, world=3, num_microbatches=9, most_bytes=2), 3) == even, "none fits"


def test_what_a_pipeline_runs():
    """The program and the costs that were simulated: the steady state of more batches is the one that was found."""
    layers = Layers((1.0,) * 8, (2.0,) * 8, reduce=0.5, occupation=0.1, latency=0.2)
    pipeline = one(pipelines(layers, 3, world=4, num_microbatches=16), 2)
    schedule, costs = schedule_of(layers, pipeline)
    assert schedule.num_frozen == 1 and schedule.num_ranks == 2
    starts = simulate(schedule.build((8,) * 6), costs).batch_starts()
    assert starts[5] - starts[4] == pytest.approx(pipeline.seconds)


def test_reductions_and_transfers_take_time():
    plain = pipelines(EVEN, 0, world=4, num_microbatches=16)
    slow = pipelines(Layers((1.0,) * 8, (2.0,) * 8, reduce=1.0), 0, world=4, num_microbatches=16)
    assert one(slow, 4).seconds == one(plain, 4).seconds, "no replicas"
    assert one(slow, 2).seconds == pytest.approx(one(plain, 2).seconds + 4)
    normed = pipelines(Layers((1.0,) * 8, (2.0,) * 8, norm=0.5), 0, world=4, num_microbatches=16)
    assert one(normed, 4).seconds == pytest.approx(one(plain, 4).seconds + 0.5)
    short = pipelines(Layers((1.0,) * 8, (2.0,) * 8, reduce_latency=0.5), 0, world=4, num_microbatches=16)
    assert one(short, 4).seconds == one(plain, 4).seconds, "no replicas"
    assert one(short, 2).seconds == pytest.approx(one(plain, 2).seconds + 0.5), "a rank's reduction, not a layer's"
    sent = pipelines(Layers((1.0,) * 8, (2.0,) * 8, occupation=0.5), 0, world=4, num_microbatches=16)
    assert one(sent, 4).seconds > one(plain, 4).seconds and one(sent, 1).seconds == one(plain, 1).seconds


def test_the_runtime_takes_time_around_each_computation():
    """Around those of a stage, however many layers it has; nothing runs backward through a frozen one."""
    layers = Layers((1.0,) * 8, (2.0,) * 8, around=0.25)
    assert one(pipelines(layers, 0, world=1, num_microbatches=4), 1).seconds == pytest.approx(4 * (24 + 2 * 0.25))
    assert one(pipelines(layers, 3, world=1, num_microbatches=4), 1).seconds == pytest.approx(4 * (18 + 3 * 0.25))


def test_activations_take_memory():
    """Those of each trained layer do, for each microbatch in flight; none of frozen layers."""
    layers = Layers((1.0,) * 4, (2.0,) * 4, saved_bytes=0.5)
    assert one(pipelines(layers, 0, world=4, num_microbatches=8), 4).num_bytes == 1 + 0.5 * 4
    assert one(pipelines(layers, 2, world=4, num_microbatches=8), 4).num_bytes == 1 + 0.5 * 2


def test_what_is_no_candidate():
    assert [each.num_ranks for each in pipelines(EVEN, 0, world=6, num_microbatches=6)] == [6, 3, 2, 1]
    assert [each.num_ranks for each in pipelines(EVEN, 0, world=6, num_microbatches=2)] == [6, 3]
    assert [each.num_ranks for each in pipelines(EVEN, 0, world=4, num_microbatches=3, preset="2bw")] == []
    with pytest.raises(ValueError, match="8 of 8 layers cannot be frozen; give 0 to 7"):
        pipelines(EVEN, 8, world=2, num_microbatches=2)
    with pytest.raises(ValueError, match="a cache needs frozen layers, and the seconds that reading takes"):
        pipelines(EVEN, 2, world=2, num_microbatches=2, cached=True)
    with pytest.raises(ValueError, match="1 forwards and 2 backwards are given"):
        Layers((1.0,), (1.0, 2.0))
