"""The order of samples: each epoch has all of them once, whatever the batches, the replicas and the resumes."""

from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.copies import Share
from megatron.trainer.data.classification import EpochSamples, EvaluationSamples, order_of_epoch
from megatron.trainer.data.microbatches import MicrobatchSampler


class Numbers:
    """Samples that are their own numbers."""

    digest = "numbers"

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        return {"number": index}


def taken(num_samples: int, batches: list[int], *, replicas: int, micro_batch: int, resume_at: int = 0) -> list[set]:
    """The sample numbers of each batch; from batch `resume_at` on by a run that was started anew."""
    found, consumed = [], 0
    data = EpochSamples(Numbers(num_samples), seed=7, length=sum(batches))
    for number, size in enumerate(batches):
        if number == resume_at:
            data = EpochSamples(Numbers(num_samples), seed=7, length=sum(batches))
        positions = []
        for rank in range(replicas):
            sampler = MicrobatchSampler(
                num_samples=consumed + size, consumed_samples=consumed, micro_batch_size=micro_batch,
                num_replicas=replicas, share=Share((rank,), replicas),
            )  # fmt: skip
            positions += [position for microbatch in sampler for position in microbatch]
        found.append(Counter(data[position]["number"] for position in positions))
        consumed += size
    return found


@given(
    num_samples=st.integers(1, 40),
    batches=st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=12),
    resume_at=st.integers(0, 5),
)
def test_no_sample_twice_and_none_lost(num_samples, batches, resume_at):
    """Over batches of several sizes: after every whole number of epochs each sample was taken as often; and the batches
    of 4 replicas, of microbatches of 1 and 2, and of a resumed run are the same."""
    found = taken(num_samples, batches, replicas=1, micro_batch=8)
    assert found == taken(num_samples, batches, replicas=4, micro_batch=2, resume_at=resume_at)
    assert found == taken(num_samples, batches, replicas=2, micro_batch=1, resume_at=resume_at)
    total = sum(found, Counter())
    epochs, rest = divmod(sum(batches), num_samples)
    assert set(total.values()) <= {epochs, epochs + 1}
    assert sum(count == epochs + 1 for count in total.values()) == rest


def test_the_order_depends_on_seed_and_epoch():
    """And on nothing else; the numbers are fixed, since checkpoints count on them."""
    assert order_of_epoch(8, seed=1234, epoch=0).tolist() == [4, 5, 3, 1, 2, 0, 6, 7]
    assert order_of_epoch(8, seed=1234, epoch=1).tolist() != order_of_epoch(8, seed=1234, epoch=0).tolist()
    assert order_of_epoch(8, seed=1235, epoch=0).tolist() != order_of_epoch(8, seed=1234, epoch=0).tolist()
    data = EpochSamples(Numbers(8), seed=1234, length=16)
    assert [data.sample_id(index) for index in (0, 15, 1)] == [
        4, order_of_epoch(8, seed=1234, epoch=1)[7], 5
    ]  # fmt: skip
    assert data.samples_repeat and data[0] == {"number": 4, "counts": 1.0, "sample_id": 4}
    assert order_of_epoch(5, seed=2**32 - 1, epoch=10**6).shape == (5,)


@pytest.mark.parametrize("number, batch, per_evaluation, length", [(10, 8, 16, 16), (10, 8, 8, 16), (10, 8, 24, 24)])
def test_evaluations_count_each_sample_once(number, batch, per_evaluation, length):
    """Fillers make whole batches and do not count; a short evaluation goes on where the one before stopped."""
    data = EvaluationSamples(Numbers(number), batch_size=batch, per_evaluation=per_evaluation)
    assert len(data) == length and data.starts_over is (per_evaluation == length)
    counted = [data.sample_id(index) for index in range(length) if data[index]["counts"]]
    assert counted == list(range(number))
    assert all(0 <= data.sample_id(index) < number for index in range(length))
    assert isinstance(data[0]["counts"], float) and numpy.isscalar(data.sample_id(0))
