"""Runs of every optimizer, model and program lose ranks and get them back, and nothing of the training is lost."""

from collections.abc import Callable

from tests.trainer.arguments import bert_command_line
from tests.trainer.run import test_bert, test_experts, test_t5, text_helper, vision_helper
from tests.trainer.run.lost_rank_jobs import Trained, assert_nothing_lost, gpt, run
from tests.trainer.run.run_case import table
from tests.trainer.run.test_coming_back import DECAY

LOST_AND_BACK = [
    [1, "forward", 3, "SIGKILL"],
    [2, "forward", 5, "newcomer"],
    [0, "without sums", 8, "broken"],
    [3, "stepped", 8, "SIGKILL"],
]
"""A rank is lost and comes back. Then rank 3 is lost behind a step that rank 0 lacks."""
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


# name: (program, ranks of 2 replicas, flags)
RUNS = {
    "muon": (gpt, 4, f"{MUON} --eval-iters 1 --pipeline-schedule 2bw"),
    "bert": (bert, 4, "--clip-grad 1 --lr 1e-3"),
    "experts with biases": (gpt, 4, f"{EXPERTS} {test_experts.BIASED} --eval-iters 1 --pipeline-schedule 2bw"),
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
}  # fmt: skip


@table("trained, num_ranks, flags", RUNS, usual=3)
def test_what_is_trained_goes_on(tmp_path, trained: Callable[[], Trained], num_ranks: int, flags: str):
    """Losses, norms, learning rates and validations are those of one process."""
    trained = trained()
    flags = f"--global-batch-size 8 --train-iters 12 --eval-interval 4 {flags} {DECAY}"
    losses = LOST_AND_BACK if num_ranks == 4 else [[1, "forward", 3, "SIGKILL"], [4, "stepped", 5, "SIGKILL"]]
    shape = f"--pipeline-model-parallel-size {num_ranks // 2}"
    job = run(tmp_path, num_ranks, f"{flags} {shape}", losses, max_restarts=int(num_ranks == 4), trained=trained)
    assert_nothing_lost(job, flags, trained=trained)
    lost = [moment.rank for moment in job.moments if moment.is_loss]
    assert sorted(lost) == sorted(rank for rank, _, _, what in losses if what == "SIGKILL"), job.outcome.output
    assert num_ranks > 4 or "rank 1 is back: 4 ranks of 4 go on" in job.outcome.output, job.outcome.output
