"""Flags whose effect depends on others: noted where they have none, and not where they have one."""

import pytest

from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.flags.parser import FLAGS
from megatron.trainer.arguments.rules.without_effect import ROWS
from tests.trainer.arguments.command_line import argv

ROPE, LOAD, TP, PP = (
    "--position-embedding-type rope", "--load x", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2",
)  # fmt: skip
FILES = "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m"
CASES = [  # a flag, what leaves it without effect, what gives it one
    ("--rotary-base 500000", "", ROPE),
    ("--rotary-percent 0.5", "--position-embedding-type none", ROPE),
    ("--rotary-interleaved", "", ROPE),
    ("--rotary-seq-len-interpolation-factor 2", "", ROPE),
    ("--use-rope-scaling", "", ROPE),
    ("--rope-scaling-factor 2", ROPE, f"{ROPE} --use-rope-scaling"),
    ("--reset-position-ids", ROPE, ""),
    ("--reset-position-ids", "--position-embedding-type none", ""),
    ("--add-qkv-bias", "", "--disable-bias-linear"),
    ("--attention-softmax-in-fp32", "", "--bf16"),
    ("--init-method-std 0.01", "--init-method-xavier-uniform", ""),
    ("--cross-entropy-fusion-impl te", "", "--cross-entropy-loss-fusion"),
    ("--tp-comm-overlap", "", f"{TP} --sequence-parallel"),
    ("--pipeline-extra-warmup", "", PP),
    ("--account-for-embedding-in-pipeline-split", "", f"{PP} --num-layers 3"),
    ("--account-for-loss-in-pipeline-split", "", f"{PP} --num-layers 3"),
    ("--ddp-pad-buckets-for-high-nccl-busbw", "", "--use-distributed-optimizer"),
    ("--adam-beta1 0.8", "--optimizer sgd", ""),
    ("--adam-beta2 0.8", "--optimizer sgd", "--optimizer lamb"),
    ("--adam-eps 1e-6", "--optimizer sgd", ""),
    ("--sgd-momentum 0.5", "", "--optimizer sgd"),
    ("--weight-decay 0.5", "--start-weight-decay 0.1 --end-weight-decay 0.1", ""),
    ("--min-lr 1e-5", "--lr-decay-style constant", ""),
    ("--lr-decay-iters 5", "--lr-decay-style constant", "--lr-decay-style constant --lr-warmup-fraction 0.5"),
    ("--lr-wsd-decay-style linear", "", "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    ("--lr-wsd-decay-iters 2", "", "--lr-decay-style WSD"),
    ("--lr-warmup-init 1e-5", "", "--lr-warmup-iters 2"),
    ("--decoupled-min-lr 1e-5", "", "--decoupled-lr 1e-3"),
    ("--override-opt_param-scheduler", "", LOAD),
    ("--use-checkpoint-opt_param-scheduler", "", LOAD),
    ("--initial-loss-scale 64", "--bf16", "--fp16"),
    ("--min-loss-scale 4", "--fp16 --loss-scale 8", "--fp16"),
    ("--loss-scale-window 5", "", "--fp16"),
    ("--hysteresis 1", "", "--fp16"),
    ("--manual-gc-interval 5", "", "--manual-gc"),
    ("--no-manual-gc-eval", "", "--manual-gc"),
    ("--tiktoken-pattern v1", "", "--tokenizer-type TikTokenizer --tokenizer-model x"),
    ("--vocab-file v", "", FILES),
    ("--merge-file m", "", FILES),
    ("--tokenizer-model x", FILES, "--tokenizer-type HuggingFaceTokenizer"),
    ("--save-interval 5", "", "--save x"),
    ("--save-interval 50", "--save x", "--save x --train-iters 50"),
    ("--dist-ckpt-strictness log_unexpected", "", LOAD),
    ("--ckpt-fully-parallel-load", "", "--pretrained-checkpoint x"),
    ("--eval-interval 5", "--eval-iters 0", ""),
    ("--eval-interval 5", "--skip-train", ""),
    ("--save x", "--skip-train", ""),
    ("--exit-interval 5", "--skip-train", ""),
    ("--exit-duration-in-mins 5", "--skip-train", ""),
    ("--pipeline-timeline x", "--skip-train", ""),
    ("--log-interval 11", "", "--train-iters 11"),
    ("--tensorboard-log-interval 11", "--tensorboard-dir x", "--tensorboard-dir x --train-iters 11"),
    ("--log-timers-to-tensorboard", "", "--tensorboard-dir x"),
    ("--wandb-entity x", "", "--wandb-project x --wandb-exp-name y"),
    ("--use-pytorch-profiler", "", "--profile --profile-step-start 2"),
    ("--profile-step-start 2", "", "--profile"),
    ("--profile", "--use-pytorch-profiler", "--use-pytorch-profiler --train-iters 11"),
    ("--profile --profile-step-start 2", "--profile-ranks 3", ""),
    ("--pipeline-timeline-iterations 5", "", "--pipeline-timeline x"),
]


def notes(flags: str) -> list[str]:
    size = 2 if "parallel-size 2" in flags else 1
    args = parse_args(argv(flags))
    return [each for each in validate_args(args, world_size=size) if " has no effect: " in each]


@pytest.mark.parametrize(("flag", "without", "with_effect"), CASES, ids=[" ".join(case[:2]) for case in CASES])
def test_said_where_there_is_none(flag, without, with_effect):
    """One note that names flag and value as they were written, and says why; none where the flag has its effect, nor
    where it is left out."""
    written = next(part for part in flag.split(" --"))
    said = [each for each in notes(f"{without} {flag}") if each.startswith(f"{written.split()[0]} ")]
    assert len(said) == 1 and len(said[0]) > len(f"{written} has no effect: ") + 10
    assert not [each for each in notes(f"{with_effect} {flag}") if each.startswith(f"{written.split()[0]} ")]
    assert not [each for each in notes(without) if each.startswith(f"{written.split()[0]} ")]


def test_a_value_that_holds_anyway_is_not_worth_a_word():
    """A script that spells out defaults is not told that they do nothing."""
    assert not notes("--sgd-momentum 0.9 --hysteresis 2 --min-lr 0 --lr-decay-style constant --rotary-base 10000")


def test_a_run_that_does_not_train_is_not_told_when_training_would_have_logged():
    """Scripts have these intervals, and whoever gives --skip-train waits for no line of a training."""
    assert not notes("--skip-train --log-interval 11 --tensorboard-dir x --tensorboard-log-interval 11")


def test_the_table_names_flags():
    """Each row's names are destinations of flags that work."""
    known = {flag.dest for flag in FLAGS if not flag.refused}
    assert {name for row in ROWS for name in row.names.split()} <= known


def test_what_megatron_core_does_not_read_is_said_always():
    """No layer of megatron.core reads this setting, which Megatron-LM still accepts."""
    said = notes("--apply-residual-connection-post-layernorm")
    assert len(said) == 1 and "take the residual before the normalization" in said[0]
