"""Which pipeline is chosen, by times and links that are told."""

import math
from dataclasses import replace

import pytest

from megatron import backend

backend.install()

from megatron.elastic.cache import CacheSeconds
from megatron.pipeline.placement.topology import Process
from megatron.trainer.changes.shaping import Shaping, memory_of_ranks, state_bytes
from megatron.trainer.changes.times import LinkTimes, measure_links
from megatron.trainer.plan.arrangement import Arrangement, arrange
from tests import workers
from tests.trainer.arguments.command_line import arguments


@pytest.fixture
def shaping() -> Shaping:
    """The shaping of 8 layers on 4 ranks, of which a forward takes a second and a backward two."""
    args = arguments(
        "--num-layers 8 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --freeze-training "
        "--freeze-interval 1000 --elastic-pipeline",
        without="--num-layers", world_size=4,
    )  # fmt: skip
    args.padded_vocab_size = 100
    args.first_arrangement = Arrangement(4, 1, 1, (2, 2, 2, 2))
    arrange(args, args.first_arrangement)
    return Shaping(args)


def decided(shaping: Shaping, links: LinkTimes) -> tuple[int, int]:
    """Ranks and replicas with 6 layers frozen."""
    shaping._links = links
    wanted, _ = shaping.decide(shaping._args.arrangement.with_frozen(6), batches_left=100)
    return wanted.pipeline, wanted.data


def test_fast_links(shaping):
    """Two layers are trained, so replicas are worth more than stages."""
    assert decided(shaping, LinkTimes()) == (2, 2)


def test_reductions_that_take_longer_than_they_save(shaping):
    """A pipeline alone reduces nothing; its transfers are small beside a layer's gradients."""
    assert decided(shaping, LinkTimes(byte=1e-3)) == (4, 1)


def test_transfers_hold_their_links(shaping):
    """As many microbatches as cross a border of the pipeline, each as long as its link is held."""
    now, seconds = replace(shaping._args.arrangement, num_frozen=6), []
    for byte in (0.0, 10 / shaping._output_bytes()):
        shaping._links = LinkTimes(byte=byte)
        seconds.append(shaping._seconds(now))
    assert seconds[1] >= 8 * 10 > seconds[0]


def test_a_change_has_to_repay(shaping):
    """What is saved in the batches that are left has to be more than a change is expected to take; but for the way of
    its state, where layers freeze and the run takes another place anyway."""
    now = shaping._args.arrangement.with_frozen(6)
    arrange(shaping._args, now)
    _, free = shaping.decide(now, batches_left=100)
    saved = 100 * (free.before - free.after)
    assert saved > 0
    for seconds, pipeline in ((0.99 * saved, 2), (1.01 * saved, 4)):
        shaping.seconds_of_change = seconds
        assert shaping.decide(now, batches_left=100)[0].pipeline == pipeline
    arrange(shaping._args, now.with_frozen(5))
    assert shaping.decide(now, batches_left=100)[0].pipeline == 2
    shaping._links = LinkTimes(byte=1.0)
    assert shaping.decide(now, batches_left=100)[0].pipeline == 4


def test_no_rank_takes_more_than_one_did_at_first(shaping):
    """Two layers that are trained on one rank, with as many microbatches in flight, are more than the limit."""
    wanted, _ = shaping.decide(shaping._args.arrangement.with_frozen(6), batches_left=100)
    assert shaping._bytes(wanted) <= shaping._limit()
    shaping._most_bytes = shaping._bytes(wanted) - 1
    other, _ = shaping.decide(shaping._args.arrangement.with_frozen(6), batches_left=100)
    assert other != wanted and shaping._bytes(other) <= shaping._most_bytes


def test_layers_that_train_again_get_their_room_back(shaping):
    """Behind a shrunk pipeline, though that is the fastest; where its ranks have the room, it stays. No interval ends
    there."""
    shrunk = replace(shaping._args.arrangement, num_frozen=6, pipeline=1, data=4, layers_of_rank=(8,))
    thawed = shrunk.with_frozen(0)
    arrange(shaping._args, shrunk)
    shaping._links = LinkTimes()  # replicas alone are the fastest
    found, _ = shaping.decide(thawed, batches_left=1, is_interval=False)
    assert shaping._bytes(found) <= shaping._limit() < shaping._bytes(thawed)
    assert found.pipeline > 1 and found.num_frozen == 0
    shaping._most_bytes = shaping._bytes(thawed)
    assert shaping.decide(thawed, batches_left=1, is_interval=False)[0] == thawed
    assert shaping._num_intervals == 0


def test_the_device_has_room_for_both_places(shaping):
    """What the ranks hold before, and what they are to hold then."""
    now = shaping._args.arrangement.with_frozen(6)
    wanted, _ = shaping.decide(now, batches_left=100)
    most = shaping._bytes_within(wanted)
    at_least = max(state_bytes(each) for each in memory_of_ranks(shaping._arranged(wanted)))
    assert at_least < most < 2 * max(at_least, shaping._limit())
    for given, is_wanted in ((most, True), (most - 1, False)):
        shaping._device_bytes = given
        assert (shaping.decide(now, batches_left=100)[0] == wanted) == is_wanted


def test_reading_has_to_be_sooner_than_computing(shaping):
    """By times of a sample; and where the disk cannot be written nothing is read, whatever was asked for."""
    shaping._args.activation_cache, shaping._epoch = "somewhere", 8
    shaping._args.activation_cache_use = "auto"
    now = shaping._args.arrangement.with_frozen(6)
    for read, is_read in ((0.1, True), (7.0, False), (math.inf, False)):
        shaping._disk = CacheSeconds(read, read, 0.0)
        assert shaping.decide(now, batches_left=1000)[0].cached == is_read
    shaping._args.activation_cache_use = "always"
    assert not shaping.decide(now, batches_left=1000)[0].cached
    shaping._disk = CacheSeconds(7.0, 7.0, 0.0)
    assert shaping.decide(now, batches_left=1000)[0].cached


def test_the_first_epoch_at_a_depth_is_priced_as_misses(shaping):
    """One of four epochs is; on two nodes more, as each has what it has computed itself."""
    shaping._args.activation_cache, shaping._epoch, shaping._disk = "somewhere", 80, CacheSeconds(0.1, 0.1, 0.0)
    cached = replace(shaping._args.arrangement, num_frozen=6, cached=True, layers_of_rank=(7, 1), pipeline=2, data=2)
    assert shaping._share_that_is_read(cached, 40) == pytest.approx(3 / 4)
    shaping._processes = tuple(Process(host, None) for host in "abab")
    assert shaping._share_that_is_read(cached, 40) == pytest.approx((0 + 1 / 2 + 3 / 4 + 7 / 8) / 4)
    expected = shaping._expected(cached, 40)
    assert shaping._seconds(cached) < expected < shaping._seconds(cached, num_stored=0)


@pytest.mark.parametrize("begins_anew", [None, "fp32_residual_connection", "elastic_micro_batch_size"])
def test_a_cache_is_filled_for_later_depths_too(shaping, begins_anew: str | None):
    """With intervals of an epoch its first epoch at a depth may be the last one there; the next depth reads what there
    is, except where a cache begins anew."""
    args = shaping._args
    args.activation_cache, args.activation_cache_use, args.freeze_interval = "somewhere", "auto", 10
    shaping._epoch, shaping._disk = 10 * 8, CacheSeconds(0.01, 0.01, 0.01)
    if begins_anew == "fp32_residual_connection":
        args.fp32_residual_connection = True
    elif begins_anew:
        shaping._microbatches = (1, 1)
    wanted, _ = shaping.decide(args.arrangement.with_frozen(6), batches_left=60)
    assert wanted.cached == (begins_anew is None)
    assert shaping.decide(args.arrangement.with_frozen(7), batches_left=60)[0].cached, "no layer is left to freeze"
    assert not shaping.decide(args.arrangement.with_frozen(7), batches_left=10)[0].cached, "nobody will read"


def test_the_rank_that_reads_has_fewer_layers(shaping):
    """The seconds of reading are work of the first rank."""
    shaping._args.activation_cache = "somewhere"
    now = replace(shaping._args.arrangement, num_frozen=4, cached=True)
    first = []
    for read in (0.0, 5.0):
        shaping._disk = CacheSeconds(read, read, 0.0)
        found = {each.pipeline: each.layers_of_rank for each in shaping._candidates(now)}
        first.append(found[2][0])
    assert first[0] > first[1] >= 4 + 1


def links(num_bytes: float) -> LinkTimes:
    return measure_links(num_bytes)


def test_measured():
    """Among processes of one machine: more than nothing a message, and more bytes take longer."""
    for found in workers.run(2, "tests.trainer.changes.test_shaping:links", num_bytes=8 << 20):
        assert 0 < found.message < 1
        assert 0 < found.byte < 1e-6
        assert found.of_reduction(2e6) == pytest.approx(2 * found.of_reduction(1e6))
        assert found.of_message(2) == pytest.approx(2 * found.message)
    (alone,) = workers.run(1, "tests.trainer.changes.test_shaping:links", num_bytes=8 << 20)
    assert alone == LinkTimes()
