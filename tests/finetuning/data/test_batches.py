"""The order of rows, and the weight of a microbatch's loss in its batch."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.capture.randomness import Draw
from megatron.finetuning.data.batches import Epochs, Feed, Rows, Share
from megatron.pipeline.runtime.contract.stage import Microbatch

SETTINGS = {
    "num_samples": st.integers(1, 40),
    "micro_batch_size": st.integers(1, 5),
    "accumulation": st.integers(1, 4),
    "seed": st.integers(0, 3),
}


def epochs(drop_last: bool = False, **settings) -> Epochs:
    return Epochs(drop_last=drop_last, **settings)


@given(**SETTINGS)
def test_an_epoch_has_each_sample_once(num_samples, micro_batch_size, accumulation, seed):
    each = epochs(num_samples=num_samples, micro_batch_size=micro_batch_size, accumulation=accumulation, seed=seed)
    batches = list(islice(each.batches(), 2 * each.batches_per_epoch))
    for number, epoch in enumerate((batches[: each.batches_per_epoch], batches[each.batches_per_epoch :])):
        rows = [number * num_samples + row for row in range(num_samples)]
        assert sorted(i for batch in epoch for some in batch for i in some) == rows
    assert all(1 <= len(some) <= micro_batch_size for batch in batches for some in batch)
    assert all(1 <= len(batch) <= accumulation for batch in batches)
    full = (num_samples // (micro_batch_size * accumulation)) * accumulation
    assert sum(len(some) == micro_batch_size for batch in batches[: each.batches_per_epoch] for some in batch) >= full


@given(done=st.integers(0, 30), **SETTINGS)
def test_a_run_goes_on_where_it_stood(done, **settings):
    each = epochs(**settings)
    assert list(islice(each.batches(done), 5)) == list(islice(each.batches(), done, done + 5))


@given(**SETTINGS)
def test_a_dropped_last_batch_leaves_full_ones(**settings):
    if settings["num_samples"] < settings["micro_batch_size"] * settings["accumulation"]:
        with pytest.raises(ValueError, match="samples make no batch of"):
            epochs(drop_last=True, **settings)
        return
    each = epochs(drop_last=True, **settings)
    for batch in islice(each.batches(), 2 * each.batches_per_epoch):
        assert [len(some) for some in batch] == [settings["micro_batch_size"]] * settings["accumulation"]


def test_epochs_and_seeds_differ():
    def first(seed: int) -> tuple:
        each = epochs(num_samples=30, micro_batch_size=30, accumulation=1, seed=seed)
        return tuple(tuple(row % 30 for row in some) for (some,) in islice(each.batches(), 2))

    assert len({*first(0), *first(1)}) == 4


def test_microbatches_weigh_by_their_terms():
    """Two batches in flight; equal microbatches weigh 1 to the last bit, and so does a whole batch."""
    rows = Rows({"labels": torch.zeros(6, 1)}, ignored={}, num_terms=torch.tensor([1, 2, 3, 4, 5, 7]))
    feed = Feed(rows, size=2, seed=1)
    feed.add(3, 10, [(0, 3), (5, 3), (2,)])
    feed.add(4, 13, [(3, 0), (1, 2), (4,)])

    def weight(batch, position):
        return feed(Microbatch(7 + 3 * (batch - 2) + position, batch, position, 3)).weight

    assert [weight(3, position) for position in range(3)] == [3 * 5 / 19, 3 * 11 / 19, 3 * 3 / 19]
    assert [weight(4, position) for position in range(3)] == [1.0, 1.0, 1.0]
    assert [feed.counts(3, number) for number in (1, 2, 3)] == [3 * 5 / 19, 3 * 16 / 19, 3.0]
    feed.forget(4, 13)
    assert feed.counts(4, 2) == 2.0 and weight(4, 1) == 1.0


def test_replicas_share_a_batch():
    """Five microbatches for two replicas, so that the second one has none at the end: the weights and the dropout of
    one pipeline, and a row without a weight. Their mean over replicas is 1.
    """
    rows = Rows({"labels": torch.arange(10).view(10, 1)}, ignored={}, num_terms=torch.arange(1, 11))
    whole, later = [(0, 3), (5, 4), (2, 6), (1, 7), (8,)], [(0,), (9,)]
    one = Feed(rows, size=2, seed=1, first_microbatch=20)
    assert one.add(3, 6, whole) == 5
    shares = [Share(replica, 2) for replica in range(2)]
    feeds = [Feed(rows, size=2, seed=1, share=share, first_microbatch=20) for share in shares]
    for feed in feeds:
        assert [feed.add(3, 6, whole), feed.add(4, 9, later)] == [3, 1]
        assert feed.num_microbatches == 27
        assert [feed.counts(3, number) for number in (2, 3)] == [3 * 36 / 45, 3.0]
    made = [[feed(Microbatch(6 + position, 3, position, 3)) for position in range(3)] for feed in feeds]
    for number, data in enumerate([made[number % 2][number // 2] for number in range(5)]):
        expected = one(Microbatch(6 + number, 3, number, 5))
        assert data.weight == pytest.approx(expected.weight * 6 / 5)
        assert data.draw == expected.draw and torch.equal(data.tensors["labels"], expected.tensors["labels"])
    assert made[1][2].weight == 0.0 and made[1][2].tensors["labels"].tolist() == [[8], [8]]
    assert sum(data.weight for of_one in made for data in of_one) == pytest.approx(6)
    assert feeds[1](Microbatch(9, 4, 0, 1)).draw == Draw(1, 26)
