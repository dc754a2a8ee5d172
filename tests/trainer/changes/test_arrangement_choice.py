"""Which pipeline is chosen, by times and links that are told."""

import math
from dataclasses import replace

import pytest

from megatron import backend

backend.install()

from megatron.elastic.cache import CacheSeconds
from megatron.elastic.stages import Arrangement
from megatron.pipeline.placement.topology import Process
from megatron.trainer.changes.arrangement_choice import ArrangementChoice, memory_of_ranks, state_bytes
from megatron.trainer.changes.times import LinkTimes, measure_links
from megatron.trainer.plan.arrangement import arranged
from tests import workers
from tests.trainer.arguments.command_line import arguments


@pytest.fixture
def choice() -> ArrangementChoice:
    """The choice among arrangements of 8 layers on 4 ranks, of which a forward takes a second and a backward two."""
    args = arguments(
        "--num-layers 8 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --freeze-training "
        "--freeze-interval 1000 --elastic-pipeline",
        without="--num-layers", world_size=4,
    )  # fmt: skip
    first = Arrangement(4, 1, 1, (2, 2, 2, 2))
    return ArrangementChoice(arranged(replace(args, padded_vocab_size=100, first_arrangement=first), first))


def decided(choice: ArrangementChoice, links: LinkTimes) -> tuple[int, int]:
    """Ranks and replicas with 6 layers frozen."""
    choice._links = links
    wanted, _ = choice.decide(choice.args.arrangement.with_frozen(6), batches_left=100)
    return wanted.pipeline, wanted.data


def test_fast_links(choice):
    """Two layers are trained, so replicas are worth more than stages."""
    assert decided(choice, LinkTimes()) == (2, 2)


def test_reductions_that_take_longer_than_they_save(choice):
    """A pipeline alone reduces nothing; its transfers are small beside a layer's gradients."""
    assert decided(choice, LinkTimes(byte=1e-3)) == (4, 1)


def test_transfers_hold_their_links(choice):
    """As many microbatches as cross a border of the pipeline, each as long as its link is held."""
    now, seconds = replace(choice.args.arrangement, num_frozen=6), []
    for byte in (0.0, 10 / choice._output_bytes()):
        choice._links = LinkTimes(byte=byte)
        seconds.append(choice._seconds(now))
    assert seconds[1] >= 8 * 10 > seconds[0]


def test_a_change_has_to_repay(choice):
    """What is saved in the batches that are left has to be more than a change is expected to take; but for the way of
    its state, where layers freeze and the run takes another place anyway."""
    now = choice.args.arrangement.with_frozen(6)
    choice.args = arranged(choice.args, now)
    _, free = choice.decide(now, batches_left=100)
    saved = 100 * (free.before - free.after)
    assert saved > 0
    for seconds, pipeline in ((0.99 * saved, 2), (1.01 * saved, 4)):
        choice.seconds_of_change = seconds
        assert choice.decide(now, batches_left=100)[0].pipeline == pipeline
    choice.args = arranged(choice.args, now.with_frozen(5))
    assert choice.decide(now, batches_left=100)[0].pipeline == 2
    choice._links = LinkTimes(byte=1.0)
    assert choice.decide(now, batches_left=100)[0].pipeline == 4


def test_no_rank_takes_more_than_one_did_at_first(choice):
    """Two layers that are trained on one rank, with as many microbatches in flight, are more than the limit."""
    wanted, _ = choice.decide(choice.args.arrangement.with_frozen(6), batches_left=100)
    assert choice._bytes(wanted) <= choice._limit()
    choice._most_bytes = choice._bytes(wanted) - 1
    other, _ = choice.decide(choice.args.arrangement.with_frozen(6), batches_left=100)
    assert other != wanted and choice._bytes(other) <= choice._most_bytes


def test_layers_that_train_again_get_their_room_back(choice):
    """Behind a shrunk pipeline, though that is the fastest; where its ranks have the room, it stays. No interval ends
    there."""
    shrunk = replace(choice.args.arrangement, num_frozen=6, pipeline=1, data=4, layers_of_rank=(8,))
    thawed = shrunk.with_frozen(0)
    choice.args = arranged(choice.args, shrunk)
    choice._links = LinkTimes()  # replicas alone are the fastest
    found, _ = choice.decide(thawed, batches_left=1, is_interval=False)
    assert choice._bytes(found) <= choice._limit() < choice._bytes(thawed)
    assert found.pipeline > 1 and found.num_frozen == 0
    choice._most_bytes = choice._bytes(thawed)
    assert choice.decide(thawed, batches_left=1, is_interval=False)[0] == thawed
    assert choice._num_intervals == 0


def test_the_device_has_room_for_both_places(choice):
    """What the ranks hold before, and what they are to hold then."""
    now = choice.args.arrangement.with_frozen(6)
    wanted, _ = choice.decide(now, batches_left=100)
    most = choice._bytes_within(wanted)
    at_least = max(state_bytes(each) for each in memory_of_ranks(choice._arranged(wanted)))
    assert at_least < most < 2 * max(at_least, choice._limit())
    for given, is_wanted in ((most, True), (most - 1, False)):
        choice._device_bytes = given
        assert (choice.decide(now, batches_left=100)[0] == wanted) == is_wanted


def test_reading_has_to_be_sooner_than_computing(choice):
    """By times of a sample; and where the disk cannot be written nothing is read, whatever was asked for."""
    choice.args, choice._epoch = replace(choice.args, activation_cache="somewhere", activation_cache_use="auto"), 8
    now = choice.args.arrangement.with_frozen(6)
    for read, is_read in ((0.1, True), (7.0, False), (math.inf, False)):
        choice._disk = CacheSeconds(read, read, 0.0)
        assert choice.decide(now, batches_left=1000)[0].cached == is_read
    choice.args = replace(choice.args, activation_cache_use="always")
    assert not choice.decide(now, batches_left=1000)[0].cached
    choice._disk = CacheSeconds(7.0, 7.0, 0.0)
    assert choice.decide(now, batches_left=1000)[0].cached


def test_the_first_epoch_at_a_depth_is_priced_as_misses(choice):
    """One of four epochs is; on two nodes more, as each has what it has computed itself."""
    choice.args = replace(choice.args, activation_cache="somewhere")
    choice._epoch, choice._disk = 80, CacheSeconds(0.1, 0.1, 0.0)
    cached = replace(choice.args.arrangement, num_frozen=6, cached=True, layers_of_rank=(7, 1), pipeline=2, data=2)
    assert choice._share_that_is_read(cached, 40) == pytest.approx(3 / 4)
    choice._processes = tuple(Process(host, None) for host in "abab")
    assert choice._share_that_is_read(cached, 40) == pytest.approx((0 + 1 / 2 + 3 / 4 + 7 / 8) / 4)
    expected = choice._expected(cached, 40)
    assert choice._seconds(cached) < expected < choice._seconds(cached, num_stored=0)


@pytest.mark.parametrize("begins_anew", [None, "fp32_residual_connection", "elastic_micro_batch_size"])
def test_a_cache_is_filled_for_later_depths_too(choice, begins_anew: str | None):
    """With intervals of an epoch its first epoch at a depth may be the last one there; the next depth reads what there
    is, except where a cache begins anew."""
    choice.args = args = replace(
        choice.args, activation_cache="somewhere", activation_cache_use="auto", freeze_interval=10,
        fp32_residual_connection=begins_anew == "fp32_residual_connection",
    )  # fmt: skip
    choice._epoch, choice._disk = 10 * 8, CacheSeconds(0.01, 0.01, 0.01)
    if begins_anew == "elastic_micro_batch_size":
        choice._microbatches = (1, 1)
    wanted, _ = choice.decide(args.arrangement.with_frozen(6), batches_left=60)
    assert wanted.cached == (begins_anew is None)
    assert choice.decide(args.arrangement.with_frozen(7), batches_left=60)[0].cached, "no layer is left to freeze"
    assert not choice.decide(args.arrangement.with_frozen(7), batches_left=10)[0].cached, "nobody will read"


def test_the_rank_that_reads_has_fewer_layers(choice):
    """The seconds of reading are work of the first rank."""
    choice.args = replace(choice.args, activation_cache="somewhere")
    now = replace(choice.args.arrangement, num_frozen=4, cached=True)
    first = []
    for read in (0.0, 5.0):
        choice._disk = CacheSeconds(read, read, 0.0)
        found = {each.pipeline: each.layers_of_rank for each in choice._candidates(now)}
        first.append(found[2][0])
    assert first[0] > first[1] >= 4 + 1


def links(num_bytes: float) -> LinkTimes:
    return measure_links(num_bytes)


def test_measured():
    """Among processes of one machine: more than nothing a message, and more bytes take longer."""
    for found in workers.run(2, "tests.trainer.changes.test_arrangement_choice:links", num_bytes=8 << 20):
        assert 0 < found.message < 1
        assert 0 < found.byte < 1e-6
        assert found.of_reduction(2e6) == pytest.approx(2 * found.of_reduction(1e6))
        assert found.of_message(2) == pytest.approx(2 * found.message)
    (alone,) = workers.run(1, "tests.trainer.changes.test_arrangement_choice:links", num_bytes=8 << 20)
    assert alone == LinkTimes()
