"""Runs of every optimizer, model and program lose ranks and get them back, and nothing of the training is lost."""

import re
from collections.abc import Callable

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from tests.trainer.arguments import bert_command_line
from tests.trainer.run import test_bert, test_conversations, test_experts, test_t5, text_helper, vision_helper
from tests.trainer.run.lost_rank_jobs import MODEL, Trained, assert_nothing_lost, gpt, run
from tests.trainer.run.run_case import table
from tests.trainer.run.test_coming_back import DECAY

LOST_AND_BACK = [
    [1, "forward", 3, "SIGKILL"],
    [2, "forward", 5, "newcomer"],
    [0, "without sums", 8, "broken"],
    [3, "stepped", 8, "SIGKILL"],
]
"""A rank is lost and comes back. Then rank 3 is lost behind a step that rank 0 lacks."""
SAVING = "--save saved --save-interval 3"
EXPERTS = f"--num-experts 4 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 {test_experts.SMOOTH}"
MUON = "--optimizer muon --muon-fp32-matmul-prec high --lr 1e-3 --muon-scalar-lr 2e-3 --decoupled-lr 3e-3"


def bert() -> Trained:
    return Trained("pretrain_bert", test_bert.BASE, bert_command_line.data_flags())


def t5() -> Trained:
    return Trained("pretrain_t5", test_t5.BASE, bert_command_line.data_flags())


def texts() -> Trained:
    return Trained("finetune_bert", text_helper.BASE, text_helper.data_flags())


def images() -> Trained:
    return Trained("pretrain_vision_classify", vision_helper.BASE, vision_helper.data_flags())


def chats() -> Trained:
    return Trained("pretrain_gpt", f"{MODEL} {test_conversations.SFT}", test_conversations.data())


# name: (program, ranks of 2 replicas, flags)
RUNS = {
    "experts with biases": (gpt, 4, f"{EXPERTS} {test_experts.BIASED} --eval-iters 1 --pipeline-schedule 2bw"),
    "muon": (gpt, 4, f"{MUON} --eval-iters 1 --pipeline-schedule 2bw"),
    "bert": (bert, 4, "--clip-grad 1 --lr 1e-3"),
    "sgd": (gpt, 4, "--optimizer sgd --sgd-momentum 0.9"),
    "sgd without momentum, 2bw": (gpt, 4, "--optimizer sgd --sgd-momentum 0 --pipeline-schedule 2bw"),
    "lamb, bf16": (gpt, 4, "--optimizer lamb --lr 1e-3 --bf16"),
    "muon of 16 bits": (gpt, 4, f"{MUON} --bf16"),
    "bert, 2bw": (bert, 4, "--clip-grad 1 --lr 1e-3 --pipeline-schedule 2bw --bert-no-binary-head"),
    "t5 with an embedding on three stages": (t5, 8, "--lr 1e-3"),
    "t5, 2bw": (t5, 4, "--clip-grad 1 --lr 1e-3 --pipeline-schedule 2bw --calculate-per-token-loss"),
    "texts": (texts, 4, "--lr 1e-3 --pipeline-schedule 2bw"),
    "experts with dropout and bf16": (
        gpt, 4, f"{EXPERTS} --hidden-dropout 0.1 --moe-router-load-balancing-type seq_aux_loss --bf16 "
        "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 32",
    ),
    "experts with a capacity, recomputed": (
        gpt, 4, f"{EXPERTS} --moe-expert-capacity-factor 1.0 --pipeline-recompute --calculate-per-token-loss",
    ),
    "images": (images, 4, "--lr 1e-3 --pipeline-schedule 2bw"),
    "conversations": (
        chats, 4, "--eval-iters 1 --pipeline-schedule 2bw --calculate-per-token-loss --hidden-dropout 0.1",
    ),
    "conversations, means": (chats, 4, "--eval-iters 1 --pipeline-schedule zb-h1 --position-embedding-type rope"),
}  # fmt: skip


@pytest.mark.full
@table("trained, num_ranks, flags", RUNS, usual=1)
def test_what_is_trained_goes_on(tmp_path, trained: Callable[[], Trained], num_ranks: int, flags: str):
    """Losses, norms, learning rates and validations are those of one process."""
    trained = trained()
    flags = f"--global-batch-size 8 --train-iters 12 --eval-interval 4 {flags} {DECAY}"
    losses = LOST_AND_BACK if num_ranks == 4 else [[1, "forward", 3, "SIGKILL"], [4, "stepped", 5, "SIGKILL"]]
    shape = f"--pipeline-model-parallel-size {num_ranks // 2}"
    job = run(
        tmp_path, num_ranks, f"{flags} {shape} {SAVING}", losses, max_restarts=int(num_ranks == 4), trained=trained
    )
    assert_nothing_lost(job, flags.replace("zb-h1", "flush"), trained=trained)
    lost = [moment.rank for moment in job.moments if moment.is_loss]
    assert sorted(lost) == sorted(rank for rank, _, _, what in losses if what == "SIGKILL"), job.outcome.output
    assert num_ranks > 4 or "rank 1 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "lost", "flags"),
    [(4, 3, MUON), (4, 2, f"{MUON} --bf16"), (8, 3, "--decoupled-lr 3e-3 --bf16 --pipeline-schedule 2bw")],
)
def test_a_new_process_has_the_groups_of_parameters_of_all_ranks(tmp_path, num_ranks, lost, flags):
    """Also where its own stage lacks some kind of parameters: position embeddings, or embeddings and a head."""
    flags = f"--global-batch-size 8 --train-iters 10 {flags}"
    losses = [[lost, "forward", 3, "SIGKILL"], [0, "forward", 6, "newcomer"]]
    shape = f"--pipeline-model-parallel-size {num_ranks // 2} --save saved --save-interval 4"
    job = run(tmp_path, num_ranks, f"{flags} {shape}", losses, max_restarts=1)
    assert_nothing_lost(job, flags)
    assert f"rank {lost} is back: {num_ranks} ranks of {num_ranks} go on" in job.outcome.output, job.outcome.output


TENSOR = "--tensor-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2 --position-embedding-type rope"
CUT = f"{TENSOR} --sequence-parallel"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 32"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
SEQUENCES = "--moe-router-load-balancing-type seq_aux_loss"


@pytest.mark.full
@pytest.mark.parametrize(
    ("trained", "flags"),
    [
        (gpt, f"{EXPERTS} {test_experts.BIASED} {CUT} {ALLTOALL} --pipeline-schedule 2bw"),
        (gpt, f"{EXPERTS} {SEQUENCES} {SHARED_EXPERT} {CUT} --pipeline-schedule zb-h1 --calculate-per-token-loss"),
        (gpt, f"{EXPERTS} {test_experts.BIASED} {CONTEXT} --moe-expert-capacity-factor 1.0 --pipeline-recompute"),
        (gpt, f"{EXPERTS} {SEQUENCES} {CONTEXT} {ALLTOALL} --use-distributed-optimizer --redundant-optimizer"),
        (gpt, f"{MUON} {TENSOR} --pipeline-schedule 2bw"),
        (gpt, f"{MUON} {CUT} {EXPERTS} --muon-tp-mode blockwise"),
        (gpt, f"{MUON} {CONTEXT} --pipeline-schedule zb-h1"),
        (gpt, f"{MUON} {TENSOR} --use-distributed-optimizer"),
        (bert, f"{TENSOR} --sequence-parallel --clip-grad 1 --pipeline-schedule 2bw"),
        (t5, f"{TENSOR} --pipeline-schedule zb-h1"),
        (texts, f"{TENSOR} --pipeline-schedule 2bw"),
        (images, f"{TENSOR} --use-distributed-optimizer --redundant-optimizer"),
        (gpt, f"{CONTEXT} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --clip-grad 0"),
        (gpt, f"{CONTEXT} --mtp-num-layers 1 --pipeline-schedule 2bw --calculate-per-token-loss"),
    ],
    ids=[
        "biases of experts", "experts, sequences", "capacity of experts, context", "shards of experts, context",
        "muon, 2bw", "muon, experts", "muon, context", "muon, owners", "bert", "t5", "texts", "images",
        "further tokens", "further tokens, 2bw",
    ],
)  # fmt: skip
def test_what_is_trained_by_groups_goes_on(tmp_path, trained: Callable[[], Trained], flags: str):
    """A rank is lost with its tensor or context parallel group, both come back, and a rank of the other group is lost
    behind a step."""
    trained = trained()
    flags = f"--global-batch-size 8 --train-iters 12 --eval-interval 4 --lr 1e-3 {flags} {DECAY}"
    losses = [[3, "forward", 4, "SIGKILL"], [4, "forward", 6, "newcomer"], [4, "stepped", 9, "SIGKILL"]]
    shape = f"--pipeline-model-parallel-size 2 {SAVING}"
    job = run(tmp_path, 8, f"{flags} {shape}", losses, max_restarts=1, trained=trained)
    plain = (
        flags.replace("zb-h1", "flush").replace("--use-distributed-optimizer", "").replace("--redundant-optimizer", "")
    )
    assert_nothing_lost(job, f"{plain} --pipeline-model-parallel-size 1", num_ranks=2, trained=trained)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [3, 4], job.outcome.output
    assert "8 ranks of 8 go on" in job.outcome.output, job.outcome.output


GROWING = "--global-batch-size 8 --rampup-batch-size 4 2 64 --train-iters 18"
"""4 samples a batch, 6 from the 9th on, and 8 from the 15th on."""
STEPS = "--step-batch-size-schedule 0:4,256:8,512:6 --global-batch-size 6 --train-iters 12"
"""4 samples a batch, 8 from the 5th on (a sequence has 16 tokens), and 6 from the 7th on."""
AUTO = "--pipeline-schedule auto"
SHARED = "--use-distributed-optimizer --save saved --save-interval 3"
COPIES = f"{SHARED} --redundant-optimizer"


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "schedule", "losses", "sizes"),
    [
        (GROWING, "2bw", [[1, "forward", 10, "SIGKILL"]], [8]),  # which drops a batch of another size than the last
        (GROWING, "2bw", [[0, "without sums", 8, "broken"], [3, "stepped", 8, "SIGKILL"]], [6, 8]),
        (GROWING, "flush --bf16 --optimizer sgd", [[3, "evaluation", 1, "SIGKILL"], [1, "chain", 9, "SIGKILL"]], [8]),
        (STEPS, "zb-h1 --attention-dropout 0.1", [[2, "stepped", 4, "SIGKILL"], [0, "forward", 7, "SIGSTOP"]], [8, 6]),
        (STEPS, f"2bw {COPIES}", [[2, "gather", 4, "SIGKILL"], [0, "copy", 6, "SIGKILL"]], [8, 6]),
        (STEPS, f"2bw {SHARED}", [[1, "forward", 6, "SIGKILL"], [2, "forward", 9, "SIGKILL"]], [8, 6]),
    ],
)  # fmt: skip
def test_batches_of_several_sizes(tmp_path, flags, schedule, losses, sizes):
    """Where batches change their size, so does the program without lost ranks. Evaluations have the last size."""
    flags = f"{flags} --eval-interval 4 --eval-iters 1 {DECAY} --pipeline-schedule {schedule}"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 2", losses)
    for words in (SHARED, "--redundant-optimizer"):
        flags = flags.replace(words, "")
    assert_nothing_lost(job, flags.replace("zb-h1", "flush"))
    found = [int(size) for size in re.findall(r"^batches have (\d+) microbatches", job.outcome.output, re.MULTILINE)]
    assert found[-len(sizes) :] == sizes, job.outcome.output


@pytest.mark.full
@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_a_made_program_goes_on(tmp_path, weights):
    """`--pipeline-schedule auto` with a profile: the process of rank 0 that comes back takes the program of the others,
    and makes none."""
    costs = Costs(forward=(1.0, 2.0), backward=(2.0, 4.0), backward_input=(1.0, 2.0), backward_weight=(1.0, 2.0))
    simulate(Schedule.preset("zb-h1", num_stages=2).build([4]), costs).save(tmp_path / "costs.json")
    losses = [[0, "forward", 3, "SIGKILL"], [2, "forward", 5, "newcomer"], [3, "stepped", 8, "SIGKILL"]]
    flags = f"--global-batch-size 8 --train-iters 12 {DECAY}"
    auto = f"{AUTO} --pipeline-weights {weights} --pipeline-profile costs.json --pipeline-synthesis-seconds 1"
    job = run(tmp_path, 4, f"{flags} --pipeline-model-parallel-size 2 {auto}", losses, max_restarts=1)
    assert_nothing_lost(job, f"{flags} --pipeline-schedule {weights}")
    assert "rank 0 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output


@pytest.mark.full
def test_a_program_that_changes_is_refused(tmp_path):
    """Without a profile the job would measure itself, and change its program."""
    job = run(tmp_path, 4, f"--pipeline-model-parallel-size 2 {AUTO}", [])
    job.outcome.assert_failed_clearly(
        "a run with --pipeline-schedule auto and no --pipeline-profile changes its program"
    )
