"""Which pipeline is chosen, by times and links that are told."""

from dataclasses import replace

import pytest

from megatron.training.arrangement import Arrangement, arrange
from megatron.training.link_times import LinkTimes, measure_links
from megatron.training.shaping import Shaping
from tests import workers
from tests.training.arguments_helper import arguments


@pytest.fixture
def shaping() -> Shaping:
    """Of 8 layers on 4 ranks, of which a forward takes a second and a backward two."""
    args = arguments(
        "--num-layers 8 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --freeze-training "
        "--freeze-interval 2 --elastic-pipeline",
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


def links(num_bytes: float) -> LinkTimes:
    return measure_links(num_bytes)


def test_measured():
    """Among processes of one machine: more than nothing a message, and more bytes take longer."""
    for found in workers.run(2, "tests.training.test_shaping:links", num_bytes=8 << 20):
        assert 0 < found.message < 1
        assert 0 < found.byte < 1e-6
        assert found.of_reduction(2e6) == pytest.approx(2 * found.of_reduction(1e6))
        assert found.of_message(2) == pytest.approx(2 * found.message)
    (alone,) = workers.run(1, "tests.training.test_shaping:links", num_bytes=8 << 20)
    assert alone == LinkTimes()
