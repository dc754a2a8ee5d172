"""The order of samples."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.finetuning.data.epochs import Epochs

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
    for epoch in (batches[: each.batches_per_epoch], batches[each.batches_per_epoch :]):
        assert sorted(i for batch in epoch for some in batch for i in some) == list(range(num_samples))
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
        return tuple(islice(each.batches(), 2))

    assert len({*first(0), *first(1)}) == 4
