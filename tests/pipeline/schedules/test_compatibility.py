"""What predictions can read of a batch: never nothing, and how many too many are refused."""

import contextlib
import itertools

import pytest

from megatron.pipeline.program.weight_policies import TWO_BW, predicting
from megatron.pipeline.schedules import ORDERS, Schedule, TooManyRead
from tests.pipeline.runtime import made_up_orders


def predictions(order: str, num_stages: int, **choices) -> Schedule:
    return Schedule(order=order, weights=predicting(TWO_BW), num_stages=num_stages, **choices)


@pytest.mark.parametrize("extra_warmup", [False, True])
def test_every_stage_has_done_a_microbatch_of_a_batch_that_runs(extra_warmup):
    """Under every order that goes with predictions, one that is in no table of the project among them; and the smallest
    batches of 1F1B leave not more than one."""
    least = {}
    with made_up_orders.registered():
        for order, num_stages in itertools.product(ORDERS, range(1, 9)):
            with contextlib.suppress(ValueError):  # some orders drain, some have no other warm-up
                schedule = predictions(order, num_stages, extra_warmup=extra_warmup)
                sizes = filter(schedule.accepts, range(1, 30))
                least[order, num_stages] = min(size - max(schedule.remaining_backwards(size)) for size in sizes)
    assert {least.pop(("1f1b", num_stages)) for num_stages in range(1, 9)} == {1}
    assert all(done >= 1 for done in least.values()) and bool(least) != extra_warmup


@pytest.mark.parametrize(("wanted", "num_microbatches"), [(-1, 4), (2, 4), (3, 5), (9, 8)])
def test_more_than_is_done_is_refused(wanted, num_microbatches):
    """With the reason, which whoever calls the choice by another name tells under that."""
    schedule = predictions("1f1b", 4, provisional_microbatches=wanted)
    with pytest.raises(TooManyRead) as error:
        schedule.validate(num_microbatches)
    done = num_microbatches - 3
    reason = (
        f"{wanted}: with batches of {num_microbatches} the first stage has done {done} when the next batch begins; "
        f"give 0 to {done}, or larger batches"
    )
    assert str(error.value) == f"provisional_microbatches {reason}"
    assert str(error.value.under("--number")) == f"--number {reason}"
    predictions("1f1b", 4, provisional_microbatches=done).validate(num_microbatches)
