"""Batch sizes: constant and ramped up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.trainer.arguments.flags.values import BatchSizes, parse_steps


def sizes(**changes) -> BatchSizes:
    return BatchSizes(**{"global_batch_size": 16, "samples_per_microbatch": 2, **changes})


def test_constant():
    """Without a ramp-up every batch has the global size."""
    assert sizes().num_microbatches(0) == sizes().num_microbatches(10**9) == 8
    assert sizes().samples_after(5) == 80 and sizes().iterations_for(95) == 5


def test_ramp_up_holds_each_size_equally_long():
    """START 4, INCREMENT 4, 48 samples: three steps of 16 samples, then the full size; as Megatron-LM counts."""
    schedule, consumed, seen = sizes(rampup=(4, 4, 48)), 0, []
    for _ in range(10):
        seen.append(schedule.num_samples(consumed))
        consumed += seen[-1]
    assert seen == [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]


def assert_samples_and_iterations_agree(schedule: BatchSizes, iterations: int) -> None:
    """`samples_after` is the running sum of the batches, and `iterations_for` its inverse."""
    consumed = 0
    for _ in range(iterations):
        consumed += schedule.num_samples(consumed)
    assert schedule.samples_after(iterations) == consumed
    assert schedule.iterations_for(consumed) == iterations
    assert schedule.iterations_for(consumed + schedule.num_samples(consumed) - 1) == iterations


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 200), st.integers(0, 60))
def test_iterations_and_samples_agree(start, increment, steps, samples, iterations):
    """`samples_after` is the running sum of the batches, and `iterations_for` its inverse."""
    schedule = BatchSizes(global_batch_size=2 * (start + steps * increment), samples_per_microbatch=2,
                          rampup=(2 * start, 2 * increment, samples))  # fmt: skip
    assert_samples_and_iterations_agree(schedule, iterations)


def test_agrees_with_megatron_core():
    """The same sizes as megatron.core's own calculator."""
    from megatron import backend

    backend.install()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    theirs = RampupBatchsizeNumMicroBatchesCalculator(32, 2, 2, False, 1, 8, 4, 100)
    ours = BatchSizes(global_batch_size=32, samples_per_microbatch=4, rampup=(8, 4, 100))
    for consumed in range(0, 150, 4):
        theirs.update(consumed, consistency_check=True)
        assert ours.num_microbatches(consumed) == theirs.get()


def test_what_does_not_divide_is_refused_or_rounded():
    """A size that the replicas cannot share is refused by its number, or rounded down on request."""
    with pytest.raises(ValueError, match=r"a batch of the ramp-up \(5\) is not divisible"):
        sizes(global_batch_size=8, rampup=(5, 3, 10))
    assert sizes(global_batch_size=17, round_down=True).num_samples(0) == 16
    with pytest.raises(ValueError, match="--global-batch-size"):
        sizes(global_batch_size=1, round_down=True)


GPT3_STEPS = ["0:16", "2.4B:320", "4.8B:624", "7.2B:928", "9.6B:1232", "12B:1536"]


@pytest.mark.parametrize("words", [GPT3_STEPS, [" ".join(GPT3_STEPS)], [",".join(GPT3_STEPS)]], ids=len)
def test_steps_of_gpt3(words):
    """Tokens become samples, rounded down, and each size holds from its step on; in one word or several."""
    steps = parse_steps(words, seq_length=2048)
    assert steps == ((0, 16), (1171875, 320), (2343750, 624), (3515625, 928), (4687500, 1232), (5859375, 1536))
    schedule = BatchSizes(global_batch_size=1536, samples_per_microbatch=2, steps=steps)
    assert schedule.all_sizes() == [16, 320, 624, 928, 1232, 1536]
    at = {0: 16, 1171874: 16, 1171875: 320, 5859374: 1232, 5859375: 1536, 10**9: 1536}
    assert {sample: schedule.num_samples(sample) for sample in at} == at


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["0:16", "2.4e9:320"], ((0, 16), (1171875, 320))),
        (["0:16", ".5B:32"], ((0, 16), (244140, 32))),
        (["0:16 2.048m:1k"], ((0, 16), (1000, 1000))),
        (["4096:32,0:16"], ((0, 16), (2, 32))),
    ],
    ids=str,
)
def test_steps_as_megatron_reads_them(words, steps):
    """Exponents, no digit before the point, units of sizes, any order."""
    assert parse_steps(words, seq_length=2048) == steps


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([""], r"^--step-batch-size-schedule has no steps; write"),
        (["\u0663:16"], "is not TOKENS:SIZE"),
        (["0:\u0663"], "is not TOKENS:SIZE"),
        (["0:16", "1_000:32"], "1_000:32 is not TOKENS:SIZE"),
        (["0:16", "1e999:32"], "1e999:32 is not TOKENS:SIZE"),
        (["0:16", "-1:32"], "-1:32 is not TOKENS:SIZE"),
        (["0:0.5"], "0:0.5 is not TOKENS:SIZE"),
        (["0"], "0 is not TOKENS:SIZE"),
        (["1B:16"], "must begin at 0 tokens"),
        (["0:16", "1B:32", "1B:64"], "at least a sequence"),
    ],
    ids=str,
)
def test_what_is_no_list_of_steps(words, reason):
    """One sentence, which names the entry."""
    with pytest.raises(ValueError, match=reason):
        parse_steps(words, seq_length=2048)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), max_size=4), st.integers(0, 60))
def test_iterations_and_samples_of_steps_agree(rises, iterations):
    """`samples_after` is the running sum also where sizes rise and fall, and `iterations_for` its inverse."""
    first, steps = 0, [(0, 4)]
    for rise, size in rises:
        first += rise
        steps.append((first, 2 * size))
    schedule = BatchSizes(global_batch_size=steps[-1][1], samples_per_microbatch=2, steps=tuple(steps))
    assert_samples_and_iterations_agree(schedule, iterations)


def test_a_step_that_does_not_divide():
    """Its size is named, with the flag."""
    with pytest.raises(ValueError, match=r"a batch of --step-batch-size-schedule \(5\) is not divisible"):
        sizes(global_batch_size=8, steps=((0, 5), (10, 8)))


def test_steps_that_are_over_need_not_divide():
    """A run that goes on with another micro batch size: its past counts the samples that it had, and what is to come is
    checked from where it begins."""
    steps = ((0, 6), (60, 8), (100, 16))
    with pytest.raises(ValueError, match=r"a batch of --step-batch-size-schedule \(6\) is not divisible"):
        sizes(samples_per_microbatch=8, steps=steps)
    resumed = sizes(samples_per_microbatch=8, steps=steps, may_resume=True)
    assert resumed.all_sizes() == [8, 16] and resumed.all_num_microbatches() == [1, 2]
    assert resumed.sizes_of_the_past() == [6] and sizes(steps=steps).sizes_of_the_past() == []
    assert resumed.samples_after(12) == 76 and resumed.iterations_for(76) == 12
    with pytest.raises(ValueError, match=r"\(6\) is not divisible"):
        resumed.check_from(59)
    resumed.check_from(60)
    sizes(samples_per_microbatch=16, steps=steps, may_resume=True).check_from(100)
    with pytest.raises(ValueError, match=r"--global-batch-size \(16\) is not divisible"):
        sizes(samples_per_microbatch=32, steps=steps, may_resume=True)
    sizes().check_from(0)
