"""Runs with provisional weights lose ranks and get them back: each batch is computed at the prediction that an
undisturbed run computes it at.

One process is the oracle where all stages read as many microbatches: it reads those of both replicas. Where each stage
reads what it has done, the oracle is an undisturbed job of as many ranks, which
tests/pipeline/runtime/stages/megatron compares with plain torch.
"""

import pytest

from tests.trainer.run.lost_rank_jobs import (
    MODEL,
    assert_nothing_lost,
    gpt,
    lose_at_random,
    run,
    undisturbed,
    values,
)
from tests.trainer.run.run_case import BASE, table, train
from tests.trainer.run.test_coming_back import DECAY
from tests.trainer.run.test_experts import BIASED
from tests.trainer.run.test_what_loses_ranks import ALLTOALL, CONTEXT, EXPERTS, LOST_AND_BACK, MUON

P2 = "--pipeline-model-parallel-size 2"
P1 = "--pipeline-model-parallel-size 1"
P4 = "--pipeline-model-parallel-size 4"
TWO_BW = f"--pipeline-schedule 2bw --eval-interval 4 --eval-iters 1 {DECAY}"
STAGE = "--2bw-provisional stage --2bw-provisional-reduce"
FEEDBACK = "--2bw-error-feedback"
SHARDS = "--use-distributed-optimizer"
COPIES = f"{SHARDS} --redundant-optimizer"
SHARED = f"{EXPERTS} --expert-model-parallel-size 2 --lr 1e-3"


def uniform(num_read: int) -> str:
    return f"--2bw-provisional uniform --2bw-provisional-microbatches {num_read}"


def reduced(num_read: int) -> str:
    return f"{uniform(num_read)} --2bw-provisional-reduce"


@pytest.mark.full
def test_a_rank_is_lost_while_it_predicts_and_comes_back(tmp_path):
    """A rank of the first stage dies before a prediction. When it is back, rank 0 lacks the step to version 7, behind
    which rank 3 has predicted version 8 and dies. A run of all ranks resumes from the checkpoint that the others save.
    """
    losses = [
        [1, "predict", 3, "SIGKILL"],
        [2, "forward", 5, "newcomer"],
        [0, "without sums", 7, "broken"],
        [3, "predicted", 8, "SIGKILL"],
    ]
    flags = f"--global-batch-size 8 --train-iters 10 {TWO_BW} --clip-grad 0.5"
    saving = f"--save {tmp_path}/saved --save-interval 8"
    job = run(tmp_path, 4, f"{flags} {P2} {reduced(2)} {saving}", losses, max_restarts=1)
    assert_nothing_lost(job, f"{flags} {uniform(4)}")
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1, 3], job.outcome.output
    assert "rank 1 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output
    resumed = train(4, f"{flags} {P2} {reduced(2)} --load {tmp_path}/saved --ckpt-step 8", base=MODEL)
    later = {at: loss for at, loss in values(undisturbed(f"{flags} {uniform(4)}"), "lm_loss").items() if at > 8}
    assert resumed[-1]["losses"] == pytest.approx(later, rel=2e-6)


def _num_ranks(whole: str) -> int:
    return 1 if P2 not in whole else 4 if STAGE in whole else 2


# name: (flags, of the job, of its oracle)
RUNS = {
    "stage, clipped": ("--clip-grad 0.3", STAGE, f"{STAGE} {P2}"),
    "stage, tied": (f"{BASE} --clip-grad 0.3 --bf16", STAGE, f"{STAGE} {P2}"),
    "stage, by token": (
        "--clip-grad 0.3 --calculate-per-token-loss --hidden-dropout 0.1 --attention-dropout 0.1", STAGE,
        f"{STAGE} {P2}",
    ),
    "tied": (f"{BASE} --bf16", reduced(2), f"{uniform(4)} {P2}"),
    "tied, error feedback": (BASE, "--2bw-error-feedback", "--2bw-error-feedback"),
    "error feedback, bf16": ("--bf16 --clip-grad 0.5", "--2bw-error-feedback", "--2bw-error-feedback"),
    "bf16": ("--bf16 --clip-grad 0.5", reduced(2), uniform(4)),
    "fp16 that overflows": ("--fp16 --initial-loss-scale 4294967296 --loss-scale-window 2", reduced(3), uniform(6)),
    "sgd": ("--optimizer sgd --sgd-momentum 0.9 --clip-grad 0.5", reduced(2), uniform(4)),
    "lamb, error feedback": ("--optimizer lamb --lr 1e-3", "--2bw-error-feedback", "--2bw-error-feedback"),
    "muon": (MUON, reduced(2), uniform(4)),
    "experts": (f"{EXPERTS} {BIASED}", reduced(2), uniform(4)),
    "shards": ("--clip-grad 0.3", f"{STAGE} {COPIES}", f"{STAGE} {P2}"),
    "shards, tied, bf16": (f"{BASE} --bf16", f"{reduced(2)} {COPIES}", f"{uniform(4)} {P2}"),
    "shards, error feedback, bf16": ("--bf16 --clip-grad 0.5", f"{FEEDBACK} {COPIES}", FEEDBACK),
    "shards, error feedback, tied": (BASE, f"{FEEDBACK} {COPIES}", FEEDBACK),
    "shards, fp16 that overflows": (
        "--fp16 --initial-loss-scale 4294967296 --loss-scale-window 2", f"{reduced(3)} {COPIES}", uniform(6),
    ),
    "shards, experts, by token": (
        f"{EXPERTS} {BIASED} --clip-grad 0.3 --calculate-per-token-loss --hidden-dropout 0.1", f"{STAGE} {COPIES}",
        f"{STAGE} {P2}",
    ),
    "recomputed": ("--pipeline-recompute --optimizer-kernel fused", reduced(3), uniform(6)),
}  # fmt: skip


@table("flags, predicted, whole", RUNS, usual=0)
def test_each_batch_is_computed_at_its_prediction(tmp_path, flags: str, predicted: str, whole: str):
    """A rank is lost and comes back, and another one is lost behind a step that rank 0 lacks."""
    trained = gpt(BASE if BASE in flags else None)
    shared = f"--global-batch-size 8 --train-iters 12 {TWO_BW} {flags.removeprefix(BASE)}"
    job = run(tmp_path, 4, f"{shared} {P2} {predicted}", LOST_AND_BACK, max_restarts=1, trained=trained)
    assert_nothing_lost(job, f"{shared} {whole}", num_ranks=_num_ranks(whole), trained=trained)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1, 3], job.outcome.output
    assert "rank 1 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "losses"),
    [
        ("", [
            [0, "forward", 2, "SIGKILL"], [1, "backward", 3, "SIGSTOP"], [4, "partial", 4, "SIGKILL"],
            [2, "chain", 5, "SIGKILL"], [5, "predict", 6, "SIGSTOP"], [6, "predicted", 8, "SIGKILL"],
        ]),
        ("--bf16 --clip-grad 0.5", [
            [7, "step", 2, "SIGKILL"], [0, "save", 1, "SIGSTOP"], [4, "new program", 2, "SIGKILL"],
            [1, "partial", 6, "SIGKILL"], [5, "predicted", 6, "SIGKILL"], [2, "stepped", 8, "SIGKILL"],
        ]),
        ("--optimizer sgd --sgd-momentum 0.9", [
            [1, "without sums", 3, "broken"], [4, "without sums", 3, "broken"], [0, "predicted", 4, "SIGKILL"],
            [5, "predict", 5, "error"], [2, "new groups", 2, "error"], [7, "norm", 7, "SIGSTOP"],
        ]),
    ],
    ids=["fp32", "bf16", "sgd"],
)  # fmt: skip
def test_every_place_where_a_rank_can_be_lost(tmp_path, flags, losses):
    """Eight ranks, evaluations and checkpoints: in each part of a batch, between batches, and in a recovery."""
    shared = f"--global-batch-size 16 --train-iters 9 {TWO_BW} {flags}"
    job = run(tmp_path, 8, f"{shared} {P2} {reduced(2)} --save saved --save-interval 4", losses, timeout=500)
    assert_nothing_lost(job, f"{shared} {uniform(8)}")
    expected = sorted(rank for rank, _, _, what in losses if what != "broken")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == expected, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "predicted", "whole", "losses"),
    [
        ("", reduced(2), uniform(8), [
            [0, "copy", 2, "SIGKILL"], [5, "predict", 3, "SIGKILL"], [1, "copied", 4, "SIGSTOP"],
            [4, "predicted", 6, "SIGKILL"], [7, "stepped", 6, "SIGKILL"], [2, "partial", 8, "SIGKILL"],
        ]),
        ("--bf16 --clip-grad 0.5", reduced(2), uniform(8), [
            [6, "step", 2, "SIGKILL"], [3, "evaluation", 1, "SIGKILL"], [1, "without sums", 4, "broken"],
            [0, "predicted", 5, "SIGKILL"], [7, "handed over", 3, "SIGKILL"], [5, "norm", 7, "SIGSTOP"],
        ]),
        ("", FEEDBACK, FEEDBACK, [
            [0, "predict", 3, "SIGKILL"], [5, "predicted", 4, "SIGKILL"], [4, "stepped", 5, "SIGKILL"],
            [1, "evaluation", 1, "SIGKILL"], [6, "without sums", 7, "broken"], [2, "predict", 8, "SIGSTOP"],
            [7, "handed over", 5, "SIGKILL"],
        ]),
    ],
    ids=["fp32", "bf16", "error feedback"],
)  # fmt: skip
def test_every_place_where_a_shard_can_be_lost(tmp_path, flags, predicted, whole, losses):
    """As `test_every_place_where_a_rank_can_be_lost`, where replicas share out the optimizer and keep copies."""
    shared = f"--global-batch-size 16 --train-iters 9 {TWO_BW} {flags}"
    saving = "--save saved --save-interval 4"
    job = run(tmp_path, 8, f"{shared} {P2} {predicted} {COPIES} {saving}", losses, timeout=500)
    assert_nothing_lost(job, f"{shared} {whole}")
    expected = sorted(rank for rank, _, _, what in losses if what != "broken")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == expected, job.outcome.output
    assert "have loaded the checkpoint" not in job.outcome.output


ALONE = "--2bw-provisional stage"
"""For one process, which has no replicas whose mean it could read."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("predicted", "whole", "lost"),
    [
        (f"{STAGE} {SHARDS}", ALONE, [1]),
        (f"{STAGE} {COPIES}", ALONE, [1, 2]),
        (f"{FEEDBACK} {SHARDS}", FEEDBACK, [1]),
        (f"{STAGE} {SHARDS} {MUON}", f"{ALONE} {MUON}", [1]),
        (f"{FEEDBACK} {SHARDS} {MUON}", f"{FEEDBACK} {MUON}", [1]),
    ],
)
def test_shards_are_lost_for_good(tmp_path, predicted, whole, lost):
    """Without copies, or with a copy that is lost together with its shard, the last checkpoint is loaded, with its
    predictions. A new process gets them from the others' memory."""
    losses = [[rank, "forward", 6, "SIGKILL"] for rank in lost]
    losses += [[0, "forward", iteration, "newcomer"] for iteration in (8, 11)]
    flags = f"--global-batch-size 12 --train-iters 14 {TWO_BW} --clip-grad 0.5"
    saving = f"--save {tmp_path}/saved --save-interval 4"
    job = run(tmp_path, 3, f"{flags} {P1} {predicted} {saving}", losses, max_restarts=1)
    assert_nothing_lost(job, f"{flags} {whole}")
    assert sorted(moment.rank for moment in job.moments if moment.is_loss) == lost, job.outcome.output
    assert job.outcome.output.count("have loaded the checkpoint") == 1, job.outcome.output
    assert "3 ranks of 3 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
def test_a_step_is_put_off_until_its_prediction(tmp_path):
    """What the prediction reads is long reduced, so rank 0 puts the step to version 6 off, and hears of a loss before
    it predicts version 7."""
    losses = [[0, "predict", 7, "alarm"], [3, "predict", 7, "SIGKILL"]]
    flags = f"--global-batch-size 16 --train-iters 10 {TWO_BW}"
    job = run(tmp_path, 4, f"{flags} {P2} {reduced(1)}", losses)
    assert_nothing_lost(job, f"{flags} {uniform(2)}")
    assert {moment.what for moment in job.moments if ":" in moment.what} == {"predict:alarm", "predict:SIGKILL"}


@pytest.mark.full
@pytest.mark.parametrize("predicted", [reduced(1), STAGE])
def test_four_stages(tmp_path, predicted):
    """A rank of the last stage and one of the first are lost at once, and come back."""
    losses = [[1, "partial", 3, "SIGKILL"], [6, "predict", 3, "SIGKILL"]]
    losses += [[3, "forward", iteration, "newcomer"] for iteration in (6, 9)]
    shared = f"--global-batch-size 8 --train-iters 12 {TWO_BW} --clip-grad 0.5"
    job = run(tmp_path, 8, f"{shared} {P4} {predicted}", losses, max_restarts=1)
    if predicted == STAGE:
        assert_nothing_lost(job, f"{shared} {P4} {STAGE}", num_ranks=8)
    else:
        assert_nothing_lost(job, f"{shared} {uniform(2)}")
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --clip-grad 0.3",
        "--context-parallel-size 2 --position-embedding-type rope --calculate-per-token-loss",
        "--context-parallel-size 2 --cp-comm-type a2a --clip-grad 0.3 --bf16",
        f"{SHARED} {BIASED} {ALLTOALL} --clip-grad 0.3",
        f"{SHARED} --moe-router-load-balancing-type seq_aux_loss --hidden-dropout 0.1 --bf16 --clip-grad 0.3",
        f"{SHARED} {BIASED} {MUON} --clip-grad 0.3",
        f"{SHARED} {CONTEXT} {ALLTOALL} --clip-grad 0.3",
        f"{SHARED} {BIASED} {COPIES} --clip-grad 0.3",
        f"--tensor-model-parallel-size 2 --sequence-parallel {COPIES} --bf16 --clip-grad 0.3",
    ],
)
def test_groups_that_predict_together(tmp_path, flags):
    """A rank is lost with the others that compute its layers or share out its experts, and all come back; then one dies
    behind a prediction of the group."""
    assert_two_groups_are_lost(tmp_path, f"{STAGE} {flags}", ("partial", 3))


def assert_two_groups_are_lost(folder, flags: str, first: tuple[str, int]) -> None:
    """Of eight ranks: rank 3 at the place and in the iteration `first`, which comes back, and rank 4 later."""
    place, iteration = first
    losses = [[3, place, iteration, "SIGKILL"], [4, "forward", iteration + 2, "newcomer"]]
    shared = f"--global-batch-size 8 --train-iters 11 {TWO_BW} {P2} {flags}"
    job = run(folder, 8, shared, [*losses, [4, "predicted", 8, "SIGKILL"]], max_restarts=1)
    assert_nothing_lost(job, shared.replace("--redundant-optimizer", ""), num_ranks=8)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [3, 4], job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        f"{SHARED} {BIASED} {ALLTOALL} --clip-grad 0.3",
        f"{SHARED} {CONTEXT} --moe-shared-expert-intermediate-size 32",
        f"{CONTEXT} --bf16 --clip-grad 0.3",
        f"{SHARED} {CONTEXT} {COPIES} --clip-grad 0.3",
    ],
)
def test_groups_with_error_feedback(tmp_path, flags):
    """The factor and the predicted weights are those of an undisturbed job. As `test_groups_that_predict_together`."""
    assert_two_groups_are_lost(tmp_path, f"{FEEDBACK} {flags}", ("predict", 4))


@pytest.mark.full
@pytest.mark.parametrize(
    ("predicted", "whole", "together", "seed"),
    [
        (reduced(1), uniform(4), 1, 0), (reduced(2), uniform(8), 1, 1), (FEEDBACK, FEEDBACK, 1, 2),
        (f"{SHARED} {BIASED} {reduced(1)}", f"{SHARED} {BIASED} {reduced(2)} {P1}", 2, 3),
        (f"{reduced(2)} {COPIES}", uniform(8), 1, 4), (f"{FEEDBACK} {COPIES}", FEEDBACK, 1, 5),
        (f"{SHARED} {BIASED} {reduced(1)} {COPIES}", f"{SHARED} {BIASED} {reduced(2)} {P1}", 2, 6),
    ],
)  # fmt: skip
def test_ranks_are_lost_at_random_moments(tmp_path, predicted, whole, together, seed):
    """Eight ranks are killed or stopped until each stage has one place left."""
    shared = "--global-batch-size 16 --train-iters 40 --pipeline-schedule 2bw --eval-interval 5 --eval-iters 1"
    shape = f"{P2} --save saved --save-interval 7"
    job, gone = lose_at_random(
        tmp_path, 2, 4 // together, f"{shared} {predicted} {shape}", seed=seed, together=together
    )
    assert len(gone) == 8 // together - 2, gone
    assert_nothing_lost(job, f"{shared} {whole}", num_ranks=together)


@pytest.mark.full
def test_batches_that_grow(tmp_path):
    """4 samples a batch, 6 from the 9th on, and 8 from the 15th on: predictions read as many of each."""
    flags = f"--global-batch-size 8 --rampup-batch-size 4 2 64 --train-iters 18 {TWO_BW}"
    losses = [[1, "predict", 10, "SIGKILL"], [0, "without sums", 15, "broken"], [2, "predicted", 16, "SIGKILL"]]
    job = run(tmp_path, 4, f"{flags} {P2} {reduced(1)}", losses)
    assert_nothing_lost(job, f"{flags} {uniform(2)}")
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1, 2], job.outcome.output
