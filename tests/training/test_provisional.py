"""Training with --2bw-provisional: numbers over degrees, files, other policies' checkpoints, and what is refused."""

import re

import pytest
import torch

from tests.training import run_case
from tests.training.arguments_helper import arguments

FULL = pytest.mark.full
STAGE = "--pipeline-schedule 2bw --2bw-provisional stage"
UNIFORM = "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches"
FP16 = "--fp16 --initial-loss-scale 1e12"


def records(run, *names):
    names = names or ("iteration", "lm_loss", "grad_norm", "loss_scale", "learning_rate", "consumed_samples")
    return [[record[name] for name in names] for record in run[-1]["records"] if "lm_loss" in record]


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_uniform_losses_are_equal_over_cuts():
    """p=1, p=2 and an uneven cut: bit-equal without ties; an evaluation in between changes nothing."""
    flags = f"{UNIFORM} 3 --untie-embeddings-and-output-weights --clip-grad 0"
    one = run_case.train(1, f"{flags} --pipeline-model-parallel-size 1")
    for more in ("", "--num-layers 4 --decoder-first-pipeline-num-layers 1", "--eval-iters 1 --eval-interval 2"):
        two = run_case.train(2, f"{flags} --pipeline-model-parallel-size 2 {more}")
        alone = (
            run_case.train(1, f"{flags} --pipeline-model-parallel-size 1 --num-layers 4")
            if "num-layers" in more
            else one
        )
        assert records(two, "iteration", "lm_loss") == records(alone, "iteration", "lm_loss")


def test_predictions_change_what_2bw_computes():
    """From the second batch on: the first has nothing to predict from. Off is 2bw, and says nothing."""
    plain, stage = (run_case.train(2, flags) for flags in ("--pipeline-schedule 2bw", STAGE))
    off = run_case.train(2, "--pipeline-schedule 2bw --2bw-provisional off")
    assert records(plain) == records(off)
    first, *rest = zip(records(plain, "lm_loss"), records(stage, "lm_loss"), strict=True)
    assert first[0] == first[1] and all(one != other for one, other in rest)


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(2, STAGE, id="p=2"),
        pytest.param(2, f"{UNIFORM} 1 --bf16 --async-save", id="uniform bf16 in the background", marks=FULL),
        pytest.param(2, f"{STAGE} {FP16}", id="fp16 with overflows"),
        pytest.param(2, f"{STAGE} --pipeline-model-parallel-size 1", id="d=2, each its own"),
        pytest.param(
            2, f"{STAGE} --pipeline-model-parallel-size 1 --use-distributed-optimizer --hidden-dropout 0.1",
            id="distributed optimizer",
        ),
        pytest.param(
            2, f"{STAGE} --pipeline-model-parallel-size 1 --ckpt-fully-parallel-save", id="d=2, in parallel", marks=FULL
        ),
        pytest.param(4, f"{STAGE} --bf16 --pipeline-model-parallel-size 2", id="p=2 d=2 bf16", marks=FULL),
        pytest.param(
            4, f"{STAGE} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            id="t=2", marks=FULL
        ),
    ],
)  # fmt: skip
def test_training_goes_on_through_files(tmp_path, num_ranks, flags):
    """A run that is drained for a checkpoint and goes on, and one that loads it: bit for bit the same, and so is one
    that never saves."""
    never = run_case.train(num_ranks, f"{flags} --train-iters 6".replace("--async-save", ""))
    whole = run_case.train(num_ranks, f"{flags} --save {tmp_path} --save-interval 3 --train-iters 6")
    rest = run_case.train(
        num_ranks, f"{flags} --load {tmp_path} --ckpt-step 3 --train-iters 6".replace("--async-save", "")
    )
    assert records(whole) == records(never)
    assert records(rest) == records(whole)[3:] and len(records(rest)) == 3
    for one, other, third in zip(whole, rest, never, strict=True):
        assert equal(one["weights"], other["weights"]) and equal(one["weights"], third["weights"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--pipeline-schedule 2bw", STAGE),
        (STAGE, "--pipeline-schedule 2bw"),
        pytest.param(STAGE, "--pipeline-schedule flush", marks=FULL),
        pytest.param("--pipeline-schedule flush", STAGE, marks=FULL),
        pytest.param(f"{STAGE} --bf16", "--pipeline-schedule 2bw --bf16", marks=FULL),
    ],
)
def test_checkpoints_serve_other_policies(tmp_path, first, second):
    """The true weights go on, and training with them; a strict load misses no place for what is beside them."""
    settings = "--eval-iters 1 --eval-interval 3"
    saved = run_case.train(2, f"{first} --save {tmp_path} --exit-interval 3 --train-iters 6 {settings}")
    strict = "--dist-ckpt-strictness raise_unexpected"
    loaded = run_case.train(2, f"{second} --load {tmp_path} --train-iters 6 {settings} {strict}")
    assert sorted(loaded[-1]["losses"]) == [4, 5, 6]
    assert saved[-1]["iteration"] == 3
    alone = run_case.train(2, f"{first} --load {tmp_path} --train-iters 6 {settings}")
    assert records(alone)[0] != [] and records(alone, "lm_loss")[2] != records(loaded, "lm_loss")[2]
    resumed = run_case.train(2, f"{second} --load {tmp_path} --train-iters 3 --override-opt_param-scheduler")
    for before, after in zip(saved, resumed, strict=True):  # nothing was left to do
        assert equal(before["weights"], after["weights"])


def test_other_degrees_go_on(tmp_path):
    """From p=2 to p=1 at one number of microbatches: the losses agree to rounding, predictions included."""
    flags = f"{UNIFORM} 2 --train-iters 6"
    whole = run_case.train(2, f"{flags} --save {tmp_path} --save-interval 3")
    rest = run_case.train(1, f"{flags} --load {tmp_path} --ckpt-step 3 --pipeline-model-parallel-size 1")
    expected = [loss for [loss] in records(whole, "lm_loss")][3:]
    assert [loss for [loss] in records(rest, "lm_loss")] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--2bw-provisional stage", "goes with the weights of --pipeline-schedule 2bw, not flush"),
        ("--pipeline-schedule pipedream --clip-grad 0 --global-batch-size 1 --2bw-provisional stage", "not pipedream"),
        ("--pipeline-schedule 2bw --2bw-provisional uniform", "needs --2bw-provisional-microbatches, from 1 to m-p+1"),
        (f"{STAGE} --2bw-provisional-microbatches 1", "leave out --2bw-provisional-microbatches, or use uniform"),
        ("--pipeline-schedule 2bw --2bw-provisional-microbatches 1", "says nothing without predictions"),
        ("--pipeline-schedule 2bw --2bw-provisional-reduce", "says nothing without predictions"),
        (f"{STAGE} --2bw-provisional-reduce", "needs replicas, and this job has one"),
        (f"{STAGE} --2bw-single-gradient-buffer", "gives away early"),
        (f"{UNIFORM} 4", "from 4 microbatches, and with batches of 4 the first stage has done 3"),
        (f"{UNIFORM} 0", "give 1 to 3"),
        (f"{UNIFORM} 3 --pipeline-extra-warmup", "has done 2"),
        ("--2bw-provisional on", "invalid choice: 'on'"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, words):
    """In one sentence, with the value and what to do."""
    with pytest.raises(ValueError, match=re.escape(words)):
        arguments(f"--pipeline-model-parallel-size 2 --global-batch-size 4 {flags}", world_size=2)
