"""The training loop: the same numbers at any depth, with and without drains, and an orderly end on request."""

import functools

import pytest
import torch

from tests.trainer.run.run_case import train

EXACT = "--untie-embeddings-and-output-weights --clip-grad 0"


def last(results: list[dict]) -> dict:
    return results[-1]


def losses(results: list[dict]) -> dict[int, float]:
    return last(results)["losses"]


@functools.cache
def exact_losses(num_ranks: int, schedule: str) -> dict[int, float]:
    return losses(train(num_ranks, f"{EXACT} --pipeline-schedule {schedule}"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["flush", "2bw", "gpipe"])
def test_losses_do_not_depend_on_the_number_of_stages(schedule):
    """p=1 and p=2 train to bit-equal losses, with dropout, untied and unclipped."""
    single, double = exact_losses(1, schedule), exact_losses(2, schedule)
    assert len(single) == 6 and single == double
    assert single[6] < single[1]


def test_2bw_is_delayed_by_one():
    """Under 2bw the second batch still uses the initial weights: there, and not before, its loss differs from flush."""
    exact, delayed = exact_losses(2, "flush"), exact_losses(2, "2bw")
    assert exact[1] == delayed[1] and exact[2] != delayed[2]


def test_pipedream_trains():
    """Weight stashing, one microbatch a batch."""
    flags = f"{EXACT} --pipeline-schedule pipedream --global-batch-size 1 --train-iters 30 --lr 1e-3"
    found = losses(train(2, flags))
    assert len(found) == 30 and found[30] < found[1]


@pytest.mark.full
def test_evaluations_and_checkpoints_change_nothing(tmp_path):
    """Drains for evaluations and checkpoints leave losses, weights and the generator bit for bit as they were."""
    flags = "--pipeline-schedule 2bw --train-iters 7"
    plain = train(2, flags)
    busy = train(2, f"{flags} --eval-iters 2 --eval-interval 2 --save {tmp_path} --save-interval 3")
    assert losses(plain) == losses(busy)
    for one, other in zip(plain, busy, strict=True):
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
        assert torch.equal(one["generator"], other["generator"])
    evaluated = [record["iteration"] for record in last(busy)["records"] if "validation_loss" in record]
    assert evaluated == [2, 4, 6, 7]
    assert sum("test_loss" in record for record in last(busy)["records"]) == 1
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000003", "iter_0000006", "iter_0000007",
    ]  # fmt: skip


@pytest.mark.full
def test_resumed_run_goes_on_with_the_same_numbers(tmp_path):
    """--exit-interval ends the run with a checkpoint; with --load it goes on as if it had never ended."""
    flags = "--pipeline-schedule 2bw --global-batch-size 8 --rampup-batch-size 4 2 24"
    whole = losses(train(2, flags))
    first = train(2, f"{flags} --save {tmp_path} --exit-interval 4")
    assert last(first)["iteration"] == 4
    second = losses(train(2, f"{flags} --load {tmp_path}"))
    assert {**losses(first), **second} == whole
    assert min(second) == 5


@pytest.mark.full
def test_a_step_that_is_over_does_not_bind_the_resumed_run(tmp_path):
    """Larger microbatches than the first batches had: the run goes on after them, and a new one is refused."""
    flags = "--global-batch-size 8 --step-batch-size-schedule 0:2,128:8 --attention-dropout 0 --hidden-dropout 0"
    whole = losses(train(2, f"{flags} --micro-batch-size 1"))
    first = train(2, f"{flags} --micro-batch-size 1 --save {tmp_path} --exit-interval 4")
    assert last(first)["iteration"] == 4
    second = losses(train(2, f"{flags} --micro-batch-size 4 --load {tmp_path}"))
    assert second == pytest.approx({5: whole[5], 6: whole[6]}, rel=1e-5)
    with pytest.raises(Exception, match=r"a batch of --step-batch-size-schedule \(2\) is not divisible"):
        train(2, f"{flags} --micro-batch-size 4 --load {tmp_path / 'none'}")


@pytest.mark.full
def test_evaluation_that_a_signal_breaks_off_shifts_no_other(tmp_path):
    """The resumed run's validation losses are those of a run that was never stopped."""
    flags = "--eval-interval 2 --eval-iters 2"

    def validations(results: list[dict]) -> dict[int, float]:
        records = [record for record in last(results)["records"] if "validation_loss" in record]
        return {record["iteration"]: record["validation_loss"] for record in records}

    whole = validations(train(2, flags))
    assert validations(train(2, f"{flags} --save {tmp_path}", stop_after={1: 2})) == {}
    assert validations(train(2, f"{flags} --load {tmp_path}")) == {at: whole[at] for at in (4, 6)}


@pytest.mark.full
def test_more_frequent_evaluations_after_a_resume(tmp_path):
    """Validation data that are sized for the new intervals begin again instead of ending the run."""
    train(1, f"--save {tmp_path} --train-iters 8 --exit-interval 4 --eval-interval 1 --eval-iters 4")
    (result,) = train(1, f"--load {tmp_path} --train-iters 8 --eval-interval 8 --eval-iters 4")
    assert [record["iteration"] for record in result["records"] if "validation_loss" in record] == [8]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stop_request_of_one_rank_ends_all_after_one_save(tmp_path, schedule, rank):
    """A stop noted on one rank is read by all in the same report: drain, one checkpoint, the end."""
    flags = f"--pipeline-schedule {schedule} --train-iters 50 --save {tmp_path} --save-interval 40"
    results = train(2, flags, stop_after={rank: 3})
    ends = {result["iteration"] for result in results}
    assert len(ends) == 1 and 4 <= ends.pop() <= 6
    assert len(list(tmp_path.glob("iter_*"))) == 1
    assert any("exiting on request" in line for line in last(results)["lines"])


def test_the_end_of_the_time_is_a_stop_request_too(tmp_path):
    """--exit-duration-in-mins ends the run like a signal; here the time was up before the first batch."""
    flags = f"--pipeline-schedule 2bw --train-iters 50 --save {tmp_path} --exit-duration-in-mins 1"
    results = train(2, flags, minutes_ago=2)
    assert last(results)["iteration"] == 2
    assert len(list(tmp_path.glob("iter_*"))) == 1


def test_skip_train_only_evaluates():
    """--skip-train: one validation and one test loss, no iteration."""
    results = train(2, "--skip-train --eval-iters 2")
    records = last(results)["records"]
    assert ["validation_loss" in record for record in records] == [True, False]
    assert "test_loss" in records[1]
    assert last(results)["iteration"] == 0


@pytest.mark.full
def test_an_evaluation_needs_no_optimizer(tmp_path):
    """--skip-train takes a checkpoint without optimizer state, and one of another learning rate, and has its loss."""
    for name, saved in (("bare", "--no-save-optim"), ("other", "--lr 1e-3 --lr-decay-style cosine")):
        trained = train(2, f"--save {tmp_path / name} --eval-iters 2 --train-iters 2 {saved}")
        found = train(2, f"--skip-train --eval-iters 2 --load {tmp_path / name}")
        assert last(found)["records"][-1]["test_loss"] == last(trained)["records"][-1]["test_loss"]


def test_parallel_degrees_together():
    """t=2, d=2 and p=2 in turn agree with one process to rounding, distributed optimizer included."""
    plain = "--hidden-dropout 0 --attention-dropout 0"
    single = losses(train(1, plain))
    for flags in (
        "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64 "
        "--pipeline-model-parallel-size 1",
        "--pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--pipeline-model-parallel-size 2",
    ):
        assert losses(train(2, f"{plain} {flags}")) == pytest.approx(single, rel=1e-5), flags


def test_metrics_are_complete():
    """Each iteration's record has every value that the format promises."""
    (result,) = train(1, "--train-iters 2")
    expected = {"iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "loss_scale",
                "iteration_time_ms", "tokens_per_second", "peak_memory_bytes"}  # fmt: skip
    assert all(expected <= set(record) for record in result["records"])
    assert [record["consumed_samples"] for record in result["records"]] == [4, 8]


def test_nan_ends_the_run():
    """A loss that is no number ends the run with a sentence, unless the check is off."""
    flags = "--lr 1e30 --clip-grad 0 --train-iters 4 --min-lr 0"
    with pytest.raises(AssertionError, match=r"is not finite .* --no-check-for-nan-in-loss-and-grad"):
        train(1, flags)
    (result,) = train(1, f"{flags} --no-check-for-nan-in-loss-and-grad")
    assert result["iteration"] == 4
