"""What a pipeline takes once its first layers are frozen."""

import pytest

from megatron.elastic.pipelines import Layers, fastest, pipelines

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


def test_reductions_and_transfers_take_time():
    plain = pipelines(EVEN, 0, world=4, num_microbatches=16)
    slow = pipelines(Layers((1.0,) * 8, (2.0,) * 8, reduce=1.0), 0, world=4, num_microbatches=16)
    assert one(slow, 4).seconds == one(plain, 4).seconds, "no replicas"
    assert one(slow, 2).seconds == pytest.approx(one(plain, 2).seconds + 4)
    sent = pipelines(Layers((1.0,) * 8, (2.0,) * 8, occupation=0.5), 0, world=4, num_microbatches=16)
    assert one(sent, 4).seconds > one(plain, 4).seconds and one(sent, 1).seconds == one(plain, 1).seconds


def test_the_fastest_that_fits():
    found = pipelines(EVEN, 4, world=8, num_microbatches=32)
    assert fastest(found, most_bytes=100).num_ranks == 1
    within = fastest(found, most_bytes=2)
    assert within.num_bytes <= 2 and within.num_ranks > 1
    with pytest.raises(ValueError, match=r"no pipeline fits into 0\.5 bytes a rank; the least takes 1"):
        fastest(found, most_bytes=0.5)


def test_activations_take_memory():
    """Of each trained layer for each microbatch in flight; none of frozen layers."""
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
